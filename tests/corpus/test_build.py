import collections
import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from array_record.python.array_record_module import ArrayRecordReader

from bert_corpus import build, encoding, inputs, manifest, plan, readers, steps, writing
from bert_corpus.build import build_corpus
from bert_corpus.config import LABELED_ROWS, ROWS, CorpusConfig
from bert_corpus.readers import Document
from bert_corpus.steps import Part, cut_into_parts, rows_of_group, split_hash
from bert_jax.data.rows import Rows
from bert_jax.tokenizers.tokenizer import load_tokenizer, tokenizer_from_bytes
from tests.helpers.commands import ROOT
from tests.helpers.corpora import (
    VOCABULARY,
    random_text,
    train_bpe,
    without_special_tokens,
    write_vocabulary,
)

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{index}" for index in range(400)]
TOKENIZER = tokenizer_from_bytes("vocab.txt", "\n".join(SPECIAL + WORDS).encode())
# Of `random_text`.
WORDS_TOKENIZER = tokenizer_from_bytes(
    "vocab.txt", "\n".join([*SPECIAL, ".", *VOCABULARY.split()]).encode()
)


def write_text(path, num_documents=120, num_sentences=12, seed=0):
    """Writes documents; document d consists of the words 2d and 2d + 1 only."""
    rng = random.Random(seed)
    documents = []
    for document in range(num_documents):
        words = WORDS[2 * document : 2 * document + 2]
        sentences = [
            " ".join(rng.choice(words) for _ in range(rng.randint(3, 9)))
            for _ in range(num_sentences)
        ]
        documents.append("\n".join(sentences))
    path.write_text("\n\n".join(documents) + "\n")
    return str(path)


def corpus_config(**changes):
    fields = {"max_seq_length": 32, "max_sequences": 4, "sentences": "lines", "seed": 1}
    return CorpusConfig(**(fields | {"heldout_fraction": 0.2, "block_rows": 16} | changes))


def directory_bytes(directory):
    return {
        name: hashlib.sha256((directory / name).read_bytes()).hexdigest()
        for name in sorted(os.listdir(directory))
    }


def use_small_units(monkeypatch):
    """Makes everything that bounds memory about a thousand times smaller."""
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 1000)
    monkeypatch.setattr(inputs, "UNIT_BYTES", 4000)
    monkeypatch.setattr(build, "SPILL_BYTES", 1500)
    monkeypatch.setattr(steps, "MAX_PART_TOKENS", 64)
    monkeypatch.setattr(steps, "PART_ROWS", 1)
    monkeypatch.setattr(steps, "GROUP_TOKENS", 1000)


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text.txt")


@pytest.mark.parametrize("num_processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_output_is_the_same_for_any_number_of_processes(tmp_path, text, monkeypatch, num_processes):
    monkeypatch.setattr(inputs, "UNIT_BYTES", 1500)
    for processes in (1, num_processes):
        build_corpus(
            text,
            TOKENIZER,
            tmp_path / str(processes),
            corpus_config(num_shards=3, dupe_factor=3),
            num_processes=processes,
        )
    first = directory_bytes(tmp_path / "1")
    assert directory_bytes(tmp_path / str(num_processes)) == first
    assert len(first) == 3 + 1 + 4  # shards; manifest, tokenizer and its layout, samples


@pytest.mark.parametrize("kind", ROWS)
def test_manifest_matches_the_rows(tmp_path, text, kind):
    config = corpus_config(rows=kind)
    manifest = build_corpus(text, TOKENIZER, tmp_path / "out", config, num_processes=1)
    assert manifest == json.loads((tmp_path / "out" / "manifest.json").read_text())
    digests = directory_bytes(tmp_path / "out")
    files = manifest["vocabulary"]["files"]
    assert files == {name: digests[name] for name in ("layout.json", "tokenizer.json")}
    assert load_tokenizer(tmp_path / "out").sha256 == TOKENIZER.sha256
    num_words = 0
    assert sum(split["documents"] for split in manifest["splits"].values()) == 120
    assert sum(split["sentences"] for split in manifest["splits"].values()) == 120 * 12
    for split, entry in manifest["splits"].items():
        rows = Rows(tmp_path / "out", split)
        batch = rows.read(0, rows.num_rows)
        used = batch["sequence_bounds"][:, :, 2] > 0
        assert entry["rows"] == rows.num_rows == sum(shard["rows"] for shard in entry["shards"])
        assert entry["pairs"] == used.sum()
        assert entry["tokens"] == (batch["tokens"] != TOKENIZER.pad_id).sum()
        assert entry["fill"] == pytest.approx(entry["tokens"] / (rows.num_rows * 32), abs=1e-4)
        assert entry["nsp_labels"]["not_next"] == batch["nsp_labels"].sum()
        has_labels = kind in LABELED_ROWS
        assert sum(entry["nsp_labels"].values()) == has_labels * entry["pairs"]
        if not has_labels:
            assert not any(entry["dropped"].values()) and entry["warnings"] == []
            num_separators = np.isin(batch["tokens"], (TOKENIZER.cls_id, TOKENIZER.sep_id)).sum()
            num_words += entry["tokens"] - num_separators
    assert has_labels or num_words == len(pathlib.Path(text).read_text().split())


def documents_of(batch):
    """Returns for each pair the set of documents that its words come from."""
    sources = []
    for tokens, pairs in zip(
        batch["tokens"].tolist(), batch["sequence_bounds"].tolist(), strict=True
    ):
        for start, _, end in pairs:
            if end:
                sources.append({(token - 5) // 2 for token in tokens[start:end] if token >= 5})
    return sources


def test_no_pair_mixes_splits(tmp_path, text):
    build_corpus(text, TOKENIZER, tmp_path / "out", corpus_config(), num_processes=1)
    train, heldout = (
        documents_of((rows := Rows(tmp_path / "out", split)).read(0, rows.num_rows))
        for split in ("train", "heldout")
    )
    assert not set.union(*train) & set.union(*heldout)
    assert len(set.union(*train)) + len(set.union(*heldout)) == 120


def test_labels_are_correct_and_half_are_not_next(tmp_path, text):
    build_corpus(text, TOKENIZER, tmp_path / "out", corpus_config(dupe_factor=3), num_processes=1)
    rows = Rows(tmp_path / "out", "train")
    batch = rows.read(0, rows.num_rows)
    labels = batch["nsp_labels"][batch["sequence_bounds"][:, :, 2] > 0]
    sources = documents_of(batch)
    # A random next sentence comes from another document, a true one from the same.
    assert [len(source) > 1 for source in sources] == labels.astype(bool).tolist()
    assert abs(labels.mean() - 0.5) < 1.5 / len(labels) ** 0.5  # 3 sigma


def test_held_out_documents_are_not_duplicated(tmp_path, text):
    manifests = [
        build_corpus(
            text,
            TOKENIZER,
            tmp_path / str(factor),
            corpus_config(dupe_factor=factor),
            num_processes=1,
        )
        for factor in (1, 3)
    ]
    heldout, train = ([m["splits"][s]["pairs"] for m in manifests] for s in ("heldout", "train"))
    assert heldout[0] == heldout[1] and train[1] > 2 * train[0]


def test_documents_of_a_repeated_file_are_in_the_rows_n_times_and_held_out_ones_once(tmp_path):
    """Each document is one word, twice, so that it can be counted in the rows."""
    words = WORDS[:40]
    for name, part in (("a.txt", words[:20]), ("b.txt", words[20:])):
        (tmp_path / name).write_text("\n\n".join(f"{word} {word}" for word in part))
    config = corpus_config(rows="document_sentences", repeat=f"{tmp_path}/b*:3", num_shards=2)
    inputs = f"{tmp_path}/a.txt,{tmp_path}/b.txt"
    build_corpus(inputs, TOKENIZER, tmp_path / "out", config, num_processes=1)
    for split, expected in (("train", {2, 6}), ("heldout", {2})):
        rows = Rows(tmp_path / "out", split)
        counts = collections.Counter(rows.read(0, rows.num_rows)["tokens"].ravel().tolist())
        found = {word: counts[len(SPECIAL) + n] for n, word in enumerate(words)}
        assert set(found.values()) - {0} == expected
        if split == "train":
            assert {found[word] for word in words[:20]} <= {0, 2}


@pytest.mark.parametrize(
    ("repeat", "message"),
    [
        ("b.txt", "'b.txt' is not FILE:N or GLOB:N, with an N of 2 or more"),
        ("b.txt:1", "'b.txt:1' is not FILE:N"),
        ("b.txt:1.5", "'b.txt:1.5' is not FILE:N"),
        (":3", "':3' is not FILE:N"),
        ("c.txt:3", "c.txt matches no input; the first is "),
        ("**/b.txt:3,**:2", "b.txt matches twice"),
    ],
)
def test_a_wrong_repeat_is_refused(tmp_path, repeat, message):
    (tmp_path / "b.txt").write_text(random_text(10))
    config = corpus_config(repeat=repeat)
    with pytest.raises(ValueError, match=re.escape(message)):
        build_corpus(str(tmp_path / "b.txt"), TOKENIZER, tmp_path / "out", config)


def test_rows_are_shuffled_across_the_corpus(tmp_path, text, monkeypatch):
    use_small_units(monkeypatch)
    build_corpus(text, TOKENIZER, tmp_path / "out", corpus_config(num_shards=2), num_processes=1)
    rows = Rows(tmp_path / "out", "train")
    first = [min(source) for source in documents_of(rows.read(0, rows.num_rows // 4))]
    assert min(first) < 20 and max(first) > 90


def test_split_depends_only_on_the_text_and_the_seed():
    texts = [f"text {index}" for index in range(2000)]
    config = CorpusConfig(heldout_fraction=0.1)

    def split_of(text, config):
        is_heldout = split_hash(Document(text), config) < config.heldout_fraction * 2**64
        return "heldout" if is_heldout else "train"

    splits = [split_of(text, config) for text in texts]
    assert splits == [split_of(text, config) for text in texts]
    assert abs(splits.count("heldout") - 200) < 3 * (2000 * 0.09) ** 0.5
    assert splits != [split_of(t, CorpusConfig(heldout_fraction=0.1, seed=1)) for t in texts]


def test_half_of_the_pairs_of_three_books_are_not_next(tmp_path, monkeypatch):
    """A book is longer than what is read, tokenized and paired at once."""
    use_small_units(monkeypatch)
    books = write_text(tmp_path / "books.txt", 3, 1000)
    config = corpus_config(heldout_fraction=0, num_shards=2, max_seq_length=16)
    manifest = build_corpus(books, TOKENIZER, tmp_path / "out", config, num_processes=1)
    split = manifest["splits"]["train"]
    assert split["documents"] == 3 and split["warnings"] == [] and split["pairs"] > 1000
    labels = split["nsp_labels"]
    assert abs(labels["not_next"] / split["pairs"] - 0.5) < 1.5 / split["pairs"] ** 0.5  # 3 sigma
    rows = Rows(tmp_path / "out", "train")
    batch = rows.read(0, rows.num_rows)
    labels = batch["nsp_labels"][batch["sequence_bounds"][:, :, 2] > 0]
    assert [len(source) > 1 for source in documents_of(batch)] == labels.astype(bool).tolist()


@pytest.mark.parametrize(
    ("num_books", "num_sentences", "warning"),
    [
        (
            1,
            1000,
            r"^0\.0% of the train pairs are NotNext, expected 43 to 57 %: .* other documents",
        ),
        (
            200,
            1,
            r"^100\.0% of the train pairs are NotNext, .* remove blank lines inside documents",
        ),
    ],
)
def test_manifest_warns_of_unbalanced_labels(tmp_path, num_books, num_sentences, warning):
    books = write_text(tmp_path / "books.txt", num_books, num_sentences)
    config = corpus_config(heldout_fraction=0)
    manifest = build_corpus(books, TOKENIZER, tmp_path / "out", config, num_processes=1)
    (recorded,) = manifest["splits"]["train"]["warnings"]
    assert re.search(warning, recorded)


def test_random_next_comes_from_all_over_the_input(tmp_path, monkeypatch):
    use_small_units(monkeypatch)
    text = write_text(tmp_path / "text.txt", 200)
    config = corpus_config(heldout_fraction=0, num_shards=3)
    build_corpus(text, TOKENIZER, tmp_path / "out", config, num_processes=1)
    rows = Rows(tmp_path / "out", "train")
    distances = [
        max(sources) - min(sources)
        for sources in documents_of(rows.read(0, rows.num_rows))
        if len(sources) > 1
    ]
    # The mean distance of two of 200 documents is 200 / 3, with a standard deviation of 47.
    assert abs(np.mean(distances) - 200 / 3) < 3 * 47 / len(distances) ** 0.5


def test_another_document_is_found_in_constant_time():
    """The numbers of the documents of a group are compared log(n) times per document, not n."""
    operations = 0

    class Source(int):
        def __hash__(self):
            return count(int.__hash__(self))

        def __lt__(self, other):
            return count(int.__lt__(self, other))

        def __eq__(self, other):
            return count(int.__eq__(self, other))

    def count(result):
        nonlocal operations
        operations += 1
        return result

    documents = [[np.array([5, 6, 7], np.uint16).tobytes()] * 2 for _ in range(2000)]
    group = [Part(Source(n), 0, b"", ids) for n, ids in enumerate(documents)]
    rows, counts = rows_of_group(group, (0, 2, 3), corpus_config(), random.Random(0))
    assert counts["pairs"] >= 2000 and len(rows) == counts["rows"]
    assert operations < 40 * len(group)


@pytest.mark.parametrize("paragraphs", [["only"], ["w1\nw2"], ["w1", "w2"], ["w1\nw2", "?", "w3"]])
def test_tiny_input_gives_rows_or_a_clear_error(tmp_path, paragraphs):
    (tmp_path / "text.txt").write_text("\n\n".join(paragraphs))
    config = corpus_config(heldout_fraction=0)
    arguments = (str(tmp_path / "text.txt"), TOKENIZER, tmp_path / "out", config)
    if paragraphs == ["only"]:
        with pytest.raises(ValueError, match=r"1 of 1 documents .* has no sentence pair"):
            build_corpus(*arguments, num_processes=1)
        assert os.listdir(tmp_path / "out") == []
    else:
        manifest = build_corpus(*arguments, num_processes=1)
        assert manifest["splits"]["train"]["rows"] >= 1
        assert list(manifest["splits"]) == ["train"]


def test_corpus_with_more_shards_than_rows_can_be_read(tmp_path):
    (tmp_path / "text.txt").write_text("w1\nw2")
    config = corpus_config(heldout_fraction=0, num_shards=5)
    build_corpus(str(tmp_path / "text.txt"), TOKENIZER, tmp_path / "out", config, num_processes=1)
    rows = Rows(tmp_path / "out", "train", shuffle_seed=0)
    assert rows.read(0, 3)["epochs"].tolist() == [0, 1, 2]


def test_input_given_twice_is_read_twice(tmp_path, text):
    config = corpus_config()
    manifest = build_corpus([text, text], TOKENIZER, tmp_path / "out", config, num_processes=1)
    size = os.path.getsize(text)
    assert manifest["config"]["inputs"] == [{"path": text, "bytes": size}] * 2
    assert sum(split["documents"] for split in manifest["splits"].values()) == 240


def test_the_number_of_shards_follows_the_size_of_the_input(tmp_path, text, monkeypatch):
    monkeypatch.setattr(plan, "INPUT_BYTES_PER_SHARD", os.path.getsize(text) // 3)
    manifest = build_corpus(text, TOKENIZER, tmp_path / "out", corpus_config(), num_processes=1)
    assert len(manifest["splits"]["train"]["shards"]) == 4
    assert len(manifest["splits"]["heldout"]["shards"]) == 1


def test_blank_input_and_empty_heldout_split_are_clear_errors(tmp_path):
    blank = tmp_path / "blank.txt"
    blank.write_text("\n  \n\n")
    for config in (corpus_config(), corpus_config(near_duplicates=0.5)):
        with pytest.raises(ValueError, match="holds no document"):
            build_corpus(str(blank), TOKENIZER, tmp_path / "out", config, num_processes=1)
    few = write_text(tmp_path / "few.txt", num_documents=1)
    config = corpus_config(heldout_fraction=0.001)
    with pytest.raises(ValueError, match="single document, so none can be held out"):
        build_corpus(few, TOKENIZER, tmp_path / "out", config, num_processes=1)
    # As the message says, more text is enough: of several documents, one is held out.
    few = write_text(tmp_path / "few.txt", num_documents=3)
    manifest = build_corpus(few, TOKENIZER, tmp_path / "out", config, num_processes=1)
    assert manifest["splits"]["heldout"]["documents"] == 1


def test_error_for_no_rows_names_what_was_dropped(tmp_path):
    (tmp_path / "text.txt").write_text("w1\n\n\u200b")
    config = corpus_config(heldout_fraction=0)
    with pytest.raises(ValueError, match=r"2 of 2 .* \(dropped: empty documents 1, "):
        build_corpus(str(tmp_path / "text.txt"), TOKENIZER, tmp_path / "out", config, False, 1)


def test_dropped_documents_are_counted(tmp_path):
    path = tmp_path / "wiki.xml"
    page = "<page><ns>0</ns><revision><text>{}</text></revision></page>"
    texts = ["w1 w2 w3. w4 w5 w6.", "w7 w8. w9 w1.", "* only a list"]
    pages = "".join(map(page.format, texts))
    path.write_text(f'<mediawiki xmlns="http://x/">{pages}</mediawiki>')
    config = corpus_config(heldout_fraction=0)
    manifest = build_corpus(str(path), TOKENIZER, tmp_path / "out", config, num_processes=1)
    assert manifest["splits"]["train"]["dropped"]["empty_documents"] == 1
    assert manifest["splits"]["train"]["documents"] == 3


def test_truncated_tokens_are_counted(tmp_path):
    """Without other documents all pairs are IsNext; here each has two sentences of a row each."""
    (tmp_path / "text.txt").write_text(("w1 " * 29 + "\n") * 40)
    config = corpus_config(heldout_fraction=0, short_seq_prob=0, dupe_factor=3)
    arguments = (str(tmp_path / "text.txt"), TOKENIZER, tmp_path / "out", config)
    split = build_corpus(*arguments, num_processes=1)["splits"]["train"]
    assert split["dropped"]["truncated_tokens"] == 29 * split["pairs"] == 29 * 20 * 3
    assert split["tokens"] - 3 * split["pairs"] + 29 * split["pairs"] == 29 * 40 * 3


def test_long_sentence_is_not_lost(tmp_path):
    """A line of 3,000 words among short ones is a sentence to count, and pieces to pair."""
    short = write_text(tmp_path / "short.txt")
    (tmp_path / "long.txt").write_text("w399 " * 3000 + "\nw399")
    config, inputs = corpus_config(heldout_fraction=0), [short, str(tmp_path / "long.txt")]
    manifest = build_corpus(inputs, TOKENIZER, tmp_path / "out", config, num_processes=1)
    assert manifest["splits"]["train"]["sentences"] == 120 * 12 + 2
    rows = Rows(tmp_path / "out", "train")
    # Each piece is in a pair; in NotNext pairs also as random spans of the others.
    assert rows.count_tokens()[TOKENIZER.token_to_id("w399")] > 2900


def test_complete_corpus_is_replaced_only_with_overwrite(tmp_path, text):
    out = tmp_path / "out"
    build_corpus(text, TOKENIZER, out, corpus_config(num_shards=4), num_processes=1)
    before = directory_bytes(out)
    with pytest.raises(FileExistsError, match="--overwrite"):
        build_corpus(text, TOKENIZER, out, corpus_config(), num_processes=1)
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        build_corpus(str(tmp_path / "bad.txt"), TOKENIZER, out, corpus_config(), True, 1)
    assert directory_bytes(out) == before, "a failed build must leave the old corpus alone"
    build_corpus(text, TOKENIZER, out, corpus_config(), overwrite=True, num_processes=1)
    assert sum(name.startswith("train-") for name in os.listdir(out)) == 1


def test_files_of_an_interrupted_build_are_replaced(tmp_path, text):
    out = tmp_path / "out"
    (out / writing.SCRATCH).mkdir(parents=True)
    (out / writing.SCRATCH / "train-00000-of-00009").write_bytes(b"rest")
    (out / "train-00000-of-00009.array_record").write_bytes(b"rest")
    (out / "notes.md").write_text("by the user")
    build_corpus(text, TOKENIZER, out, corpus_config(), num_processes=1)
    assert sorted(os.listdir(out)) == [
        "heldout-00000-of-00001.array_record",
        "layout.json",
        "manifest.json",
        "notes.md",
        "samples.json",
        "tokenizer.json",
        "train-00000-of-00001.array_record",
    ]


def test_longer_rows_have_room_for_more_sequences_unless_told_otherwise():
    found = [CorpusConfig(max_seq_length=n).max_sequences for n in (32, 512, 1024, 8192)]
    assert found == [8, 8, 16, 128]
    assert CorpusConfig(max_seq_length=8192, max_sequences=4).max_sequences == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seq_length": 4}, "max_seq_length=4"),
        ({"max_sequences": 0}, "max_sequences=0"),
        ({"short_seq_prob": 1.5}, "short_seq_prob=1.5"),
        ({"heldout_fraction": -0.1}, "heldout_fraction=-0.1"),
        ({"sentences": "auto"}, "sentences='auto'"),
        ({"near_duplicates": 1.0}, r"near_duplicates=1\.0"),
        ({"min_words": 9, "max_words": 5}, "max_words=5"),
        ({"only_language": "english"}, "only_language='english'; .* such as 'en'"),
        ({"only_language": "bm"}, "only_language='bm'"),
        ({"language": "german"}, "language='german'; .* such as 'de'"),
    ],
)
def test_invalid_config_is_a_clear_error(changes, message):
    with pytest.raises(ValueError, match=message):
        CorpusConfig(**changes)


def test_bad_output_is_a_clear_error(tmp_path, text):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(OSError, match="cannot write into --output="):
        build_corpus(text, TOKENIZER, file, corpus_config(), num_processes=1)


@pytest.mark.parametrize(
    "rows",
    [
        "sentence_pairs",
        pytest.param("full_sentences", marks=pytest.mark.slow),
        pytest.param("single_segments", marks=pytest.mark.slow),
    ],
)
def test_ids_above_65535_are_stored_in_rows_of_uint32(tmp_path, rows):
    rng = random.Random(0)
    words = [f"w{index}" for index in range(70_000)]
    content = "".join(f"{piece}\n" for piece in [*SPECIAL, *words]).encode()
    documents = [[rng.choices(words, k=9) for _ in range(12)] for _ in range(12)]
    text = "\n\n".join("\n".join(" ".join(s) for s in document) for document in documents)
    (tmp_path / "text.txt").write_text(text)
    config = corpus_config(rows=rows, max_seq_length=64, heldout_fraction=0.2)
    tokenizer = tokenizer_from_bytes("vocab.txt", content)
    arguments = str(tmp_path / "text.txt"), tokenizer, tmp_path / "out", config
    manifest = build_corpus(*arguments, num_processes=1)
    assert manifest["token_dtype"] == "uint32"
    found = set()
    for split in ("train", "heldout"):
        split_rows = Rows(tmp_path / "out", split)
        tokens = split_rows.read(0, split_rows.num_rows)["tokens"]
        assert tokens.dtype == np.uint32 and tokens.max() > 65_535
        found |= {*tokens.ravel().tolist()}
    # Every word is found again, none by a part of its bits.
    expected = {5 + int(word[1:]) for document in documents for s in document for word in s}
    assert found - set(range(5)) <= expected and len(found) > 0.7 * len(expected)


@pytest.mark.parametrize("rows", ROWS)
def test_rows_do_not_depend_on_the_width_of_ids(tmp_path, monkeypatch, rows):
    rng = random.Random(0)
    documents = [
        "\n".join(" ".join(rng.choices(WORDS, k=rng.randint(3, 140))) for _ in range(9))
        for _ in range(12)
    ]
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    stored = []
    for dtype in ("uint16", "uint32"):  # uint32: 65,537 pieces or more, slow to read.
        for module in (encoding, manifest, steps):
            monkeypatch.setattr(module, "token_dtype", lambda vocab_size, dtype=dtype: dtype)
        config = corpus_config(rows=rows, max_seq_length=64)
        arguments = str(tmp_path / "text.txt"), TOKENIZER, tmp_path / dtype, config
        build_corpus(*arguments, num_processes=1)
        split = Rows(tmp_path / dtype, "train")
        stored.append(split.read(0, split.num_rows))
    assert stored[0]["tokens"].dtype == np.uint16 and stored[1]["tokens"].dtype == np.uint32
    for name in ("tokens", "sequence_bounds", "nsp_labels"):
        np.testing.assert_array_equal(stored[0][name], stored[1][name])


def test_documents_of_one_sentence_are_held_out_by_the_fraction_as_others(tmp_path):
    sentences = [f"{' '.join(random.Random(n).choices(WORDS, k=6))}" for n in range(200)]
    (tmp_path / "text.txt").write_text("\n\n".join(sentences))
    config = corpus_config(heldout_fraction=0.05)
    planned = plan.Plan(str(tmp_path / "text.txt"), TOKENIZER, config)
    assert planned.heldout_limit == 0.05 * 2**64


def test_small_corpus_holds_out_the_document_with_the_smallest_hash(tmp_path):
    (tmp_path / "text.txt").write_text(random_text(12))
    manifests = []
    for number, (fraction, processes) in enumerate(((1e-9, 1), (1e-6, 2))):
        config = corpus_config(heldout_fraction=fraction)
        arguments = str(tmp_path / "text.txt"), WORDS_TOKENIZER, tmp_path / f"{number}", config
        manifests.append(build_corpus(*arguments, num_processes=processes)["splits"])
    for splits in manifests:
        assert splits["heldout"]["documents"] == 1 and splits["train"]["documents"] == 11
        assert (
            splits["heldout"]["rows"]
            and splits["heldout"]["shards"] == (manifests[0]["heldout"]["shards"])
        )


def test_document_without_rows_is_not_held_out(tmp_path):
    documents = [*random_text(6).split("\n\n"), *(f"{word} ." for word in VOCABULARY.split())]
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    config = corpus_config(heldout_fraction=1e-9, rows="sentence_order")
    arguments = str(tmp_path / "text.txt"), WORDS_TOKENIZER, tmp_path / "out", config
    splits = build_corpus(*arguments, num_processes=1)["splits"]
    assert splits["heldout"]["rows"] and splits["heldout"]["sentences"] > 5
    config = corpus_config(heldout_fraction=0.0)
    arguments = str(tmp_path / "text.txt"), WORDS_TOKENIZER, tmp_path / "none", config
    assert build_corpus(*arguments, num_processes=1)["splits"].keys() == {"train"}


def test_near_duplicate_is_not_held_out(tmp_path):
    rng = random.Random(0)
    documents = ["\n".join(" ".join(rng.choices(WORDS, k=9)) for _ in range(40)) for _ in range(6)]
    near = ["\n".join([*document.split("\n")[:-1], WORDS[0]]) for document in documents]
    (tmp_path / "text.txt").write_text("\n\n".join(documents + near))
    for seed in range(3):  # In two of them a near copy has the smallest hash.
        config = corpus_config(heldout_fraction=1e-9, near_duplicates=0.8, seed=seed)
        arguments = str(tmp_path / "text.txt"), TOKENIZER, tmp_path / f"{seed}", config
        splits = build_corpus(*arguments, num_processes=1)["splits"]
        dropped = [split["dropped"].get("near_duplicates", 0) for split in splits.values()]
        assert splits["heldout"]["rows"] and sum(dropped) == len(near)


def test_planning_without_held_out_documents_reads_none(text, monkeypatch):
    monkeypatch.setattr(steps, "read_documents", None)
    assert plan.Plan(text, TOKENIZER, corpus_config(heldout_fraction=0.0)).heldout_limit == 0


def test_unknown_tokens_are_counted_and_many_are_a_warning(tmp_path):
    text = random_text(20)
    for name, unknown in (("known", 0), ("unknown", 1)):
        (tmp_path / "text.txt").write_text(text.replace("river", "★") if unknown else text)
        arguments = str(tmp_path / "text.txt"), WORDS_TOKENIZER, tmp_path / name
        manifest = build_corpus(*arguments, corpus_config(heldout_fraction=0.2), num_processes=1)
        train = manifest["splits"]["train"]
        rows = Rows(tmp_path / name, "train")
        tokens = rows.read(0, rows.num_rows)["tokens"]
        count = int((tokens == WORDS_TOKENIZER.unk_id).sum())
        assert train["unknown_tokens"] == count and bool(count) == bool(unknown)
        share = count / (train["tokens"] - train["special_tokens"])
        assert train["unknown_share"] == pytest.approx(share, abs=1e-6)
        warned = [each for each in train["warnings"] if "[UNK], expected at most 1%" in each]
        assert len(warned) == unknown


def test_write_shard_keeps_every_row_in_blocks(tmp_path):
    rows = np.arange(1000, dtype=np.uint16)
    shard = tmp_path / "train-00000-of-00001.array_record"
    assert writing.write_shard(shard, rows, 64)["rows"] == 1000
    reader = ArrayRecordReader(str(shard))
    blocks = [np.frombuffer(block, np.uint16) for block in reader.read_all()]
    assert [len(block) for block in blocks] == [64] * 15 + [40]
    assert np.concatenate(blocks).tolist() == rows.tolist()


def test_parts_hold_every_sentence_and_are_equally_long():
    sentences = [bytes([number, 0]) * 10 for number in range(31)]
    parts = list(cut_into_parts(sentences, max_tokens=50))
    assert [sentence for part in parts for sentence in part] == sentences
    assert {len(part) for part in parts} == {4, 5}
    assert len(list(cut_into_parts([bytes(2000)], max_tokens=50))) == 1


@pytest.mark.parametrize(("length", "expected"), [(128, 8192), (512, 8192), (8192, 131_072)])
def test_parts_are_of_many_rows(length, expected):
    assert steps.max_part_tokens(CorpusConfig(max_seq_length=length)) == expected


class Interrupted(Exception):
    pass


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def interrupt(monkeypatch, function, after, calls=None):
    """Makes one of the functions of `writing` fail after some calls."""
    calls, original = [] if calls is None else calls, getattr(writing, function)

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) > after:
            raise Interrupted
        return original(*arguments)

    monkeypatch.setattr(writing, function, interrupted)


def test_full_sentences_of_byte_level_bpe_decode_to_the_text(tmp_path, capsys):
    sentences = ["Ein Fluß.", "The river 😀 is old.", "A town, too."]
    (tmp_path / "text.txt").write_text("\n".join(sentences) + "\n\nAnother text.\n")
    tokenizer = train_bpe(tmp_path, "\n".join(sentences) * 9)
    settings = {"sentences": "lines", "heldout_fraction": 0, "max_seq_length": 128}
    arguments = str(tmp_path / "text.txt"), tokenizer, tmp_path / "corpus"
    with pytest.raises(ValueError, match=r"tokenizer have no segments: .* --rows=full_sentences"):
        build_corpus(*arguments, CorpusConfig(**settings), num_processes=1)
    build_corpus(*arguments, CorpusConfig(**settings, rows="full_sentences"), num_processes=1)
    rows = Rows(tmp_path / "corpus", "train", None)
    batch = rows.read(0, 1)
    (start, second, end), *others = batch["sequence_bounds"][0].tolist()
    assert start == 0 and second == end and not np.any(others)
    assert rows.tokenizer.sha256 == tokenizer.sha256
    # Sentences of a document are joined by spaces, documents by a separator.
    texts = " ".join(sentences), "Another text."
    expected = {f"<s>{'</s>'.join(pair)}</s>" for pair in (texts, texts[::-1])}
    assert rows.tokenizer.decode(batch["tokens"][0, :end].tolist()) in expected


def test_rows_of_a_tokenizer_that_adds_no_special_tokens_are_refused(tmp_path):
    (tmp_path / "text.txt").write_text("the river")
    bare = without_special_tokens(load_tokenizer(write_vocabulary(tmp_path / "vocab.txt")))
    with pytest.raises(ValueError, match=r"tokenizer adds no special .* `post_processor`"):
        plan.Plan(str(tmp_path / "text.txt"), bare, CorpusConfig(max_seq_length=16))


def test_interrupted_build_continues_to_the_same_corpus(tmp_path, text, monkeypatch):
    use_small_units(monkeypatch)
    config = corpus_config(num_shards=4, dupe_factor=2)
    build_corpus(text, TOKENIZER, tmp_path / "whole", config, num_processes=1)
    for function, num_calls in (("replace_file", 30), ("write_shard", 5)):
        for after in range(0, num_calls, 4):
            out = tmp_path / f"{function}-{after}"
            with monkeypatch.context() as patched:
                interrupt(patched, function, after)
                with pytest.raises(Interrupted):
                    build_corpus(text, TOKENIZER, out, config, num_processes=1)
            assert not (out / "manifest.json").exists()
            finished = set((out / writing.SCRATCH).glob("*-?????*.json"))
            with monkeypatch.context() as patched:
                interrupt(patched, "replace_file", 10**9, written := [])
                build_corpus(text, TOKENIZER, out, config, num_processes=1)
            assert not finished & {path for (path,) in written}
            assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.parametrize(
    "after",
    [pytest.param(0, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow), 6],
)
def test_interrupted_publication_continues(tmp_path, text, monkeypatch, after):
    """The files of a corpus are replaced one by one; without a manifest it is not complete."""
    out, config = tmp_path / "out", corpus_config(num_shards=4)
    build_corpus(text, TOKENIZER, out, corpus_config(num_shards=6, seed=3), num_processes=1)
    replaced, original = [], os.replace

    def interrupted(source, target):
        if pathlib.Path(target).parent == out:
            replaced.append(target)
            if len(replaced) > after:
                raise Interrupted
        original(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(writing.os, "replace", interrupted)
        with pytest.raises(Interrupted):
            build_corpus(text, TOKENIZER, out, config, overwrite=True, num_processes=1)
    assert not (out / "manifest.json").exists()
    build_corpus(text, TOKENIZER, out, config, num_processes=1)
    build_corpus(text, TOKENIZER, tmp_path / "whole", config, num_processes=1)
    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.parametrize("change", ["seed", "input", "vocabulary"])
def test_interrupted_build_of_something_else_is_not_continued(tmp_path, text, monkeypatch, change):
    out, config, tokenizer = tmp_path / "out", corpus_config(num_shards=2), TOKENIZER
    with monkeypatch.context() as patched:
        interrupt(patched, "write_shard", 1)
        with pytest.raises(Interrupted):
            build_corpus(text, TOKENIZER, out, config, num_processes=1)
    if change == "seed":
        config = corpus_config(num_shards=2, seed=2)
    elif change == "input":
        content = pathlib.Path(text).read_text()
        pathlib.Path(text).write_text(content.replace("w1 ", "w2 "))
    else:
        words = "\n".join(SPECIAL + WORDS[::-1])
        tokenizer = tokenizer_from_bytes("vocab.txt", words.encode())
    build_corpus(text, tokenizer, out, config, num_processes=1)
    build_corpus(text, tokenizer, tmp_path / "whole", config, num_processes=1)
    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.slow
def test_killed_build_continues_to_the_same_corpus(tmp_path, monkeypatch):
    """Kills the parent, a worker, or both, at random moments; see BERT_JAX_KILLS."""
    text = write_text(tmp_path / "text.txt", 190, 400)
    (tmp_path / "vocab.txt").write_text("\n".join(SPECIAL + WORDS))
    program = (
        "from bert_corpus import inputs, build\n"
        "from bert_corpus.config import CorpusConfig\n"
        "from bert_jax.tokenizers.tokenizer import load_tokenizer\n"
        "import sys\n"
        "if __name__ == '__main__':\n"
        "    inputs.UNIT_BYTES = 20_000\n"
        "    config = CorpusConfig(max_seq_length=32, heldout_fraction=0.1, dupe_factor=3,\n"
        "                          num_shards=30, sentences='lines')\n"
        f"    arguments = {text!r}, load_tokenizer({str(tmp_path / 'vocab.txt')!r}), sys.argv[1]\n"
        "    build.build_corpus(*arguments, config, num_processes=2)\n"
    )
    (tmp_path / "program.py").write_text(program)

    def start(directory):
        command = [sys.executable, str(tmp_path / "program.py"), str(directory)]
        return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})

    def finished_parts() -> int:
        return len(list((out / writing.SCRATCH).glob("*.json")))

    assert start(tmp_path / "whole").wait() == 0
    rng, out, num_kills = random.Random(0), tmp_path / "out", 0
    max_kills = int(os.environ.get("BERT_JAX_KILLS", 3))
    kinds = itertools.cycle(("parent", "worker", "both"))
    while num_kills < max_kills:
        before = finished_parts()
        process = start(out)
        wanted = before + rng.randint(1, 100 // max_kills)  # Of over 130 parts.
        while finished_parts() < wanted and process.poll() is None:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.05))
        workers = []
        with contextlib.suppress(psutil.NoSuchProcess):  # One that has just ended.
            workers += [
                child
                for child in psutil.Process(process.pid).children()
                if "spawn_main" in " ".join(child.cmdline())
            ]
        kind = next(kinds)
        victims = {"parent": [], "worker": workers[:1], "both": workers}[kind]
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        if kind != "worker":
            process.kill()
        exit_code = process.wait()
        assert not psutil.wait_procs(workers, timeout=200)[1], "workers outlive the parent"
        if exit_code == 0:
            break
        num_kills += 1
    else:
        assert start(out).wait() == 0
    print(f"killed {num_kills} times")
    assert num_kills and files_of(out) == files_of(tmp_path / "whole")
    assert not (out / writing.SCRATCH).exists()


def test_second_build_in_a_directory_is_refused(tmp_path, text):
    with (
        writing.open_scratch(tmp_path / "out", ["another"]),
        pytest.raises(ValueError, match=r"another build is writing to .*out"),
    ):
        build_corpus(text, TOKENIZER, tmp_path / "out", corpus_config(), num_processes=1)
    build_corpus(text, TOKENIZER, tmp_path / "out", corpus_config(), num_processes=1)


def test_file_that_was_removed_while_a_build_was_published_is_a_clear_error(tmp_path, text):
    config, out = corpus_config(num_shards=2), tmp_path / "out"
    build_corpus(text, TOKENIZER, out, config, num_processes=1)
    names = [path.name for path in out.glob("*.array_record")]
    with (
        pytest.raises(OSError, match=r"train-00000.* was removed while it was built"),
        writing.open_scratch(out, ["x"], overwrite=True) as scratch,
    ):
        (out / "train-00000-of-00002.array_record").unlink()
        writing.publish(scratch, out, names, {})
    assert not (out / writing.SCRATCH).exists()
    build_corpus(text, TOKENIZER, out, config, overwrite=True, num_processes=1)
    assert len(list(out.glob("*.array_record"))) == 3


def test_files_of_other_programs_stay(tmp_path, text):
    out = tmp_path / "out"
    out.mkdir()
    (out / "results-00000-of-00001.array_record").write_bytes(b"others")
    build_corpus(text, TOKENIZER, out, corpus_config(), num_processes=1)
    assert (out / "results-00000-of-00001.array_record").read_bytes() == b"others"
