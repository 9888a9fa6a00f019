"""The manifest's description of a corpus, from the counts of its steps."""

import collections
import re

import pytest

from bert_corpus.config import CorpusConfig
from bert_corpus.inputs import Source, find_inputs, split_into_units
from bert_corpus.manifest import check_skipped, count_in_words, make_manifest
from bert_corpus.readers import read_documents
from bert_corpus.steps import Report
from bert_jax.tokenization import tokenizer_from_bytes

TOKENIZER = tokenizer_from_bytes("vocab.txt", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nriver\n")


def manifest_of(sentences=(20, 30), heldout=200, truncated=0, num_files=9, format="text", **config):
    """Returns the manifest of 2,000 documents, half with each number of sentences."""
    sources = [Source(f"{n}.txt", 1, "", format) for n in range(num_files)]
    counts = dict.fromkeys(("rows", "pairs", "tokens", "text_tokens"), 10_000) | {"not_next": 5_000}
    numbers = {f"documents_of_sentences_{n}": 1000 for n in sentences}
    counts |= numbers | {"dropped_truncated_tokens": truncated}
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
        ({"heldout": 36}, r"^only 36 of 2,000 documents are .*=0\.05 holds out about 100$"),
        (
            {"heldout": 1, "heldout_fraction": 0.2},
            r"^only 1 of .* is held .* only more text helps$",
        ),
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
