"""The manifest's description of a corpus, from the counts of its steps."""

import collections
import random
import re

import pytest

from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_corpus.inputs import Source, find_inputs, split_into_units
from bert_corpus.manifest import check_skipped, count_in_words, make_manifest
from bert_corpus.readers import read_documents
from bert_corpus.steps import Report
from bert_jax.tokenizers.tokenizer import load_tokenizer, tokenizer_from_bytes
from tests.helpers.corpora import WORDS, random_text, write_vocabulary

TOKENIZER = tokenizer_from_bytes("vocab.txt", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nriver\n")


def manifest_of(
    sentences=(20, 30),
    heldout=200,
    truncated=0,
    num_files=9,
    format="text",
    words_alone=0,
    **config,
):
    """Returns the manifest of 2,000 documents, half with each number of sentences."""
    sources = [Source(f"{n}.txt", 1, "", format) for n in range(num_files)]
    counts = dict.fromkeys(("rows", "pairs", "tokens", "text_tokens"), 10_000) | {"not_next": 5_000}
    numbers = {f"documents_of_sentences_{n}": 1000 for n in sentences}
    counts |= numbers | {"dropped_truncated_tokens": truncated}
    counts["documents_without_punctuation"] = words_alone
    counts = {"train": counts | {"documents": 2000 - heldout}}
    if heldout:
        counts["heldout"] = counts["train"] | dict.fromkeys(numbers, 0) | {"documents": heldout}
    shards = {split: [{"rows": 10_000}] for split in counts}
    return make_manifest(sources, TOKENIZER, CorpusConfig(**config), shards, Report(counts))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sentences": (1, 2)},
            r"^the median document has 1 sentence: .* --documents=files; or pu",
        ),
        ({"sentences": (4, 9)}, r"^the median document has 4 sentences: .* each of the 9 text fil"),
        ({"sentences": (2, 3), "num_files": 1}, r"documents; put blank lines only between doc"),
        ({"truncated": 1_600}, r"^16\.0% of the tokens are truncated, .* larger --max_seq_length"),
        ({"truncated": 4_800, "dupe_factor": 3}, r"^16\.0% of the tokens are truncated"),
        ({"truncated": 2_600, "max_seq_length": 64}, r"^26\.0% of the tokens are .* to 64 tokens"),
        ({"heldout": 36}, r"^only 36 of 2,000 documents are .*=0\.05 holds out about 100$"),
        ({"heldout": 1, "heldout_fraction": 0.2}, r"^only 1 of .* is held"),
        ({"heldout": 0, "heldout_fraction": 0.0}, r"^no document is held .* refuses the corpus$"),
    ],
)
def test_bad_corpus_is_a_warning(changes, message):
    (warning,) = manifest_of(**changes)["warnings"]
    assert re.search(message, warning)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sentences": (2, 3), "num_files": 1500},  # About a document per file.
        {"sentences": (2, 3), "format": "jsonl"},
        {"sentences": (2, 3), "format": "file", "documents": "files"},
        {"truncated": 4_000, "dupe_factor": 3},
        {"truncated": 6_000, "max_seq_length": 16},  # The rows of small_corpus.py.
        {"truncated": 2_000, "max_seq_length": 64},
        {"sentences": (1, 1), "heldout": 100, "words_alone": 1_500},  # Such as DNA.
    ],
)
def test_an_ordinary_corpus_gives_no_warning(changes):
    assert manifest_of(**changes)["warnings"] == []


def test_median_of_documents_is_recorded():
    assert manifest_of(sentences=(3, 8, 70))["median_sentences"] == 8


def test_counts_are_written_in_words():
    counts = {"truncated_tokens": 1234, "duplicates": 1, "empty_sentences": 0}
    assert count_in_words(counts) == "truncated tokens 1,234, duplicates 1"
    assert count_in_words({}) == "nothing"


@pytest.mark.parametrize(
    "content",
    [
        '["a", "b"]\n',
        '{"data": [{"text": "one"}]}\n',
        '{"data": [\n{"text": "one"},\n{"text": "two"}\n]}\n',
        '{\n "data": [{"text": "one"}]\n}\n',
        '[["one"], ["two"]]\n',
        '"one"\n"two"\n',
        '{"content": "one"}\n',
    ],
)
def test_json_in_another_form_than_objects_with_text_is_refused_with_the_form(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    skipped = collections.Counter()
    ((unit,),) = split_into_units(find_inputs(f"{tmp_path}/a.json"))
    list(read_documents(unit, skipped))
    message = "no text in 'text'.*expected one JSON object per line, or an array of obj.*text_field"
    with pytest.raises(ValueError, match=message):
        check_skipped(skipped, "text")


@pytest.mark.parametrize(
    ("paths", "settings", "expected"),
    [
        (
            ["a.txt", "a.txt"],
            {},
            r"^1 of 2 inputs repeats others \(.*a\.txt\), and 30 documents were",
        ),
        (["a.txt", "copy.txt"], {}, r"\(.*copy\.txt, a copy of .*a\.txt\)"),
        (
            ["a.txt", "copy.txt", "b.txt", "a.txt"],
            {"near_duplicates": 0.8},
            r"^2 of 4 .*\.txt, \.\.\.\).* 60 doc.*duplicates and no --near_duplicates keeps",
        ),
        (["a.txt", "b.txt"], {}, None),
        (["a.txt", "a.txt"], {"drop_duplicates": False}, None),
    ],
)
def test_an_input_that_is_given_twice_is_a_warning(tmp_path, paths, settings, expected):
    (tmp_path / "a.txt").write_text(random_text(30))
    (tmp_path / "copy.txt").write_text(random_text(30))
    (tmp_path / "b.txt").write_text(random_text(30, seed=1))
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    config = CorpusConfig(sentences="lines", heldout_fraction=0.2, **settings)
    inputs = [str(tmp_path / path) for path in paths]
    manifest = build_corpus(inputs, tokenizer, tmp_path / "corpus", config, num_processes=1)
    found = [warning for warning in manifest["warnings"] if "inputs repeat" in warning]
    assert len(found) == bool(expected)
    assert not expected or re.search(expected, found[0])


@pytest.mark.parametrize(
    ("documents", "fix"),
    [
        ("blank_lines", "separate documents, or the chapters of a book, by blank lines, or use"),
        ("files", "add files, or use --documents=blank_lines or --documents=lines"),
    ],
)
def test_a_single_document_is_an_error_that_names_the_remedy(tmp_path, documents, fix):
    (tmp_path / "a.log").mkdir()
    path = tmp_path / "a.log" / "text"
    path.write_text("the old river .\n" * 20_000)
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    arguments = str(path), tokenizer, tmp_path / "corpus"
    with pytest.raises(ValueError, match=f"single document, so none can be held out.*: {fix}"):
        build_corpus(*arguments, CorpusConfig(documents=documents), num_processes=1)
    config = CorpusConfig(documents="lines", rows="full_sentences", drop_duplicates=False)
    path.write_text("".join(f"the {word} river .\n" for word in WORDS * 100))
    splits = build_corpus(*arguments, config, num_processes=1)["splits"]
    assert sum(split["documents"] for split in splits.values()) == 100 * len(WORDS)
    assert splits["heldout"]["rows"]


@pytest.mark.parametrize("rows", ["full_sentences", "single_segments"])
def test_sequences_of_symbols_give_no_warning_about_blank_lines(tmp_path, rows):
    rng = random.Random(0)
    letters = ["a", "c", "g", "t"]
    sequences = [" ".join(rng.choices(letters, k=150)) for _ in range(300)]
    (tmp_path / "dna.txt").write_text("\n\n".join(sequences))
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt", letters))
    config = CorpusConfig(rows=rows, heldout_fraction=0.4)
    arguments = str(tmp_path / "dna.txt"), tokenizer, tmp_path / "corpus", config
    manifest = build_corpus(*arguments, num_processes=1)
    assert manifest["warnings"] == [] and manifest["median_sentences"] == 1


def test_pieces_with_accents_that_no_text_has_are_a_warning(tmp_path):
    (tmp_path / "text.txt").write_text(random_text(30))
    vocabulary = write_vocabulary(tmp_path / "vocab.txt", [*WORDS, "sch\u00f6n", "caf\u00e9"])
    config = CorpusConfig(sentences="lines", heldout_fraction=0.2)
    for number, keeps in enumerate((False, True)):
        if keeps:  # As the warning says.
            options = '{"do_lower_case": true, "strip_accents": false}'
            (tmp_path / "tokenizer_config.json").write_text(options)
        tokenizer = load_tokenizer(vocabulary)
        arguments = str(tmp_path / "text.txt"), tokenizer, tmp_path / str(number), config
        warnings = build_corpus(*arguments, num_processes=1)["warnings"]
        found = [each for each in warnings if "2 pieces of the vocabulary have accents" in each]
        assert len(found) == (not keeps) and tokenizer.strips_accents == (not keeps)
