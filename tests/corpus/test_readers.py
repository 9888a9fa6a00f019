import bz2
import collections
import glob
import gzip
import itertools
import json
import lzma
import math
import os
import pathlib
import random
import re
import sys
import tracemalloc

import fsspec
import pyarrow
import pytest
import tensorflow_datasets
from pyarrow import parquet

from bert_corpus import files, inputs, json_values, readers
from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_corpus.inputs import Unit, find_inputs, split_into_units
from bert_corpus.readers import read_documents
from bert_corpus.sentences import split_sentences
from bert_jax.data.tfds import tfds_source
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import random_text, write_tfds, write_vocabulary

TEXT = tensorflow_datasets.features.Text()

DUMP = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">
<siteinfo><sitename>Test</sitename></siteinfo>
{pages}
</mediawiki>"""
PAGE = """<page><title>T</title><ns>{ns}</ns>{redirect}
<revision><text>{text}</text></revision></page>"""


def dump(*pages):
    text = "\n".join(
        PAGE.format(ns=ns, redirect='<redirect title="x" />' if redirect else "", text=text)
        for ns, redirect, text in pages
    )
    return DUMP.format(pages=text).encode()


def read(pattern, data_dir="", text_field="text", skipped=None, documents="blank_lines"):
    """Returns the documents of the inputs, read in units."""
    return [
        document
        for units in split_into_units(find_inputs(pattern, text_field, data_dir, documents))
        for unit in units
        for document in read_documents(unit, collections.Counter() if skipped is None else skipped)
    ]


def write_compressed(path, content):
    """Writes a file, compressed as its suffix says."""
    if path.endswith(".zst"):
        with pyarrow.CompressedOutputStream(path, "zstd") as stream:
            stream.write(content)
    else:
        with fsspec.open(path, "wb", compression="infer") as stream:
            stream.write(content)


def test_blank_lines_separate_documents(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffone\ntwo\n\n \nthrée\n\n\n".encode())
    documents = read(str(path))
    assert [document.text for document in documents] == ["one\ntwo\n", "thrée\n"]
    assert not any(document.continues for document in documents)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_each_file_is_a_document_of_paragraphs(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(inputs, "UNIT_BYTES", 10)  # Files are read whole all the same.
    text = "\ufeff\n\nTitle\n\nOne two\nthree. Four\n \n\n\nfive.\n\n"
    for name, content in (("a.txt", text), ("b.txt", "Six.")):
        write_compressed(f"{tmp_path}/{name}{suffix}", content.encode())
    (tmp_path / "c.jsonl").write_text('{"text": "Seven.\\n\\neight."}\n')
    found = read(f"{tmp_path}/*", documents="files")
    assert [document.continues for document in found] == [False] * 3
    assert [split_sentences(document) for document in found] == [
        ["Title", "One two three.", "Four", "five."],  # No sentence spans paragraphs.
        ["Six."],
        ["Seven.", "eight."],
    ]
    assert split_sentences(found[0], "lines") == ["Title", "One two", "three. Four", "five."]


def test_long_file_is_read_in_parts_of_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 8)
    (tmp_path / "a.txt").write_text("aaaa\n\nbbbb\n\n\ncccc\n" + 3 * "dddd dddd ")
    found = read(f"{tmp_path}/a.txt", documents="files")
    assert [document.continues for document in found] == [False] + [True] * (len(found) - 1)
    words = "".join(document.text for document in found).split()
    assert words == ["aaaa", "bbbb", "cccc", *["dddd"] * 6]
    assert len(found) > 3


@pytest.mark.parametrize("documents", ["files", "lines"])
def test_documents_of_files_or_lines_are_for_text_inputs_only(tmp_path, documents):
    (tmp_path / "a.jsonl").write_text('{"text": "One."}\n')
    message = f"--documents={documents} is for text files, and the inputs are jsonl"
    with pytest.raises(ValueError, match=message):
        find_inputs(f"{tmp_path}/a.jsonl", documents=documents)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["unix", "dos", "old_mac"])
def test_each_line_is_a_document(tmp_path, monkeypatch, suffix, end):
    lines = [f"Line {n}. It is " + "long " * (n % 9) for n in range(40)]
    text = "\ufeff" + end.join([*lines[:20], "", "  ", *lines[20:]])
    write_compressed(f"{tmp_path}/a.txt{suffix}", text.encode())
    for unit_bytes in (1 << 22, 50):
        monkeypatch.setattr(inputs, "UNIT_BYTES", unit_bytes)
        found = read(f"{tmp_path}/a.txt{suffix}", documents="lines")
        assert sorted(document.text for document in found) == sorted(
            f"{line.strip()}\n" for line in lines
        )


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    "text",
    [
        ">chr1 a header\nACGTNNACGTAC\nACG\n",
        ">sp|P1\r\nMKVLAAGIVLL\r\n",
        ">a\nacgtnnacgtacgt-acgt\n>b\nacgt\n",
    ],
)
def test_fasta_without_its_suffix_is_not_read_as_text(tmp_path, suffix, text):
    write_compressed(f"{tmp_path}/a.txt{suffix}", text.encode())
    with pytest.raises(ValueError, match=r"a\.txt.* looks like FASTA, .* name it \*\.fa"):
        find_inputs(f"{tmp_path}/a.txt{suffix}")


@pytest.mark.parametrize("name", ["a.fasta", "a.FA", "a.fna.gz", "a.faa.xz"])
def test_fasta_is_known_by_its_suffix_even_if_its_sequences_are_short(tmp_path, name):
    write_compressed(f"{tmp_path}/{name}", b">a short one\nMKV\n")
    assert read(f"{tmp_path}/{name}") == [readers.Document("MKV", "sequence")]


@pytest.mark.parametrize(
    "text", ["> quoted\n> again\n", ">He\nsaid nothing.\n", ">>> x = 1\nWONDERFUL DAY\n"]
)
def test_a_quotation_is_not_fasta(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    assert read(f"{tmp_path}/a.txt") == [readers.Document(text)]


@pytest.mark.parametrize("end", [b"\r\n", b"\r"], ids=["dos", "old_mac"])
def test_all_line_endings_give_the_same_documents(tmp_path, end):
    content = "one\ntwo\x85\u2028\n\n\nthrée".encode()
    (tmp_path / "unix.txt").write_bytes(content)
    (tmp_path / "other_end.txt").write_bytes(content.replace(b"\n", end))
    unix, other_end = (read(str(tmp_path / f"{name}.txt")) for name in ("unix", "other_end"))
    assert [document.text for document in unix] == [document.text for document in other_end]
    assert [document.text for document in unix] == ["one\ntwo\x85\u2028\n", "thrée\n"]


def test_long_document_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 8)
    path = tmp_path / "text.txt"
    path.write_text("aaaa\nbbbb\ncccc\n\ndddd\n")
    documents = read(str(path))
    assert [document.text for document in documents] == ["aaaa\nbbbb\n", "cccc\n", "dddd\n"]
    assert [document.continues for document in documents] == [False, True, False]


def test_document_that_ends_at_the_size_limit_does_not_continue(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 8)
    path = tmp_path / "text.txt"
    path.write_text("aaaa\nbbbb\n\ncccc\n")
    documents = read(str(path))
    assert [document.continues for document in documents] == [False, False]


@pytest.mark.parametrize("name", ["wiki.xml", "wiki.xml.bz2", "wiki1.xml-p1p99.bz2"])
def test_dump_yields_only_articles(tmp_path, name):
    content = dump((0, False, "First &amp; best."), (0, True, "#REDIRECT"), (1, False, "Talk."))
    content = content.replace(b"</mediawiki>", dump((0, False, "Last."))[57:])
    path = tmp_path / name
    path.write_bytes(bz2.compress(content) if name.endswith(".bz2") else content)
    documents = read(str(path))
    assert [document.text for document in documents] == ["First & best.", "Last."]
    assert {document.markup for document in documents} == {"wikitext"}


def test_inputs_of_several_globs_are_found_in_sorted_order(tmp_path):
    for name in ("b.txt", "a.txt", "c", "d.xml"):
        (tmp_path / name).write_text("x")
    write_tfds(tmp_path, "wiki", {"train": [{"text": "x"}]}, {"text": TEXT})
    patterns = f"{tmp_path}/*.txt,{tmp_path}/c,{tmp_path}/d.xml,tfds:wiki"
    sources = find_inputs(patterns, data_dir=str(tmp_path))
    assert [source.path.rsplit("/")[-1] for source in sources] == [
        "a.txt",
        "b.txt",
        "c",
        "d.xml",
        "tfds:wiki",
    ]


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        (None, b"", FileNotFoundError, "matches no file"),
        ("empty.txt", b"", ValueError, "is empty"),
        ("text.pdf", b"x", ValueError, "unknown suffix"),
        ("text.txt", b"good\nb\xffd\n", ValueError, "line 2, byte 6: 0xff is not UTF-8"),
        ("dos.txt", b"good\r\nb\xffd\r\n", ValueError, "line 2, byte 7: 0xff is not UTF-8"),
        ("cut.xml.bz2", bz2.compress(dump((0, False, "x")))[:-9], ValueError, "damaged or cut off"),
        ("bad.xml", b"<mediawiki><page>", ValueError, "damaged or cut off"),
        ("other.xml", b"<html></html>", ValueError, "holds no <page>"),
    ],
)
def test_bad_input_is_a_clear_error(tmp_path, name, content, error, message):
    path = tmp_path / (name or "absent-*.txt")
    if name:
        path.write_bytes(content)
    with pytest.raises(error, match=message) as caught:
        read(str(path))
    assert str(path) in str(caught.value)


def test_tfds_yields_the_text_field_without_tensorflow(tmp_path):
    texts = ["première\n\nfin", "second"]
    write_tfds(tmp_path, "news", {"train": [{"text": text} for text in texts]}, {"text": TEXT})
    documents = read("tfds:news", str(tmp_path))
    assert sorted(document.text for document in documents) == texts
    assert {document.markup for document in documents} == {""}
    assert "tensorflow" not in sys.modules


def test_corpus_of_a_tfds_dataset_has_the_documents_of_the_text_file(tmp_path):
    (tmp_path / "text.txt").write_text(random_text(30))
    documents = [{"text": text} for text in random_text(30).split("\n\n")]
    write_tfds(tmp_path, "news", {"train": documents}, {"text": TEXT})
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    config = CorpusConfig(sentences="lines", heldout_fraction=0, data_dir=str(tmp_path))
    manifests = [
        build_corpus(source, tokenizer, tmp_path / f"corpus-{number}", config, num_processes=1)
        for number, source in enumerate((str(tmp_path / "text.txt"), "tfds:news"))
    ]
    of_file, of_tfds = (manifest["splits"]["train"] for manifest in manifests)
    # TFDS shuffles what it prepares, so the pairs differ.
    assert of_file["documents"] == of_tfds["documents"] == 30
    assert of_file["sentences"] == of_tfds["sentences"]


WIKI40B = """
_START_ARTICLE_
Old Mill Stream
_START_SECTION_
Is this a heading?
_START_PARAGRAPH_
The stream runs south. It is old_NEWLINE_It was named in 1865
_START_SECTION_
History
_START_PARAGRAPH_
A mill stood here."""
WIKIPEDIA = """The stream runs south. It is old.

History
A mill stood here.

 See also
Rivers of the north
"""


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "wiki40b/en",
            WIKI40B,
            ["The stream runs south.", "It is old", "It was named in 1865", "A mill stood here."],
        ),
        (
            "wikipedia/ja",
            "東京は日本の首都であり、大都市である。\n\n歴史\n江戸と呼ばれた。",
            ["東京は日本の首都であり、大都市である。", "江戸と呼ばれた。"],
        ),
        ("wikipedia/en", WIKIPEDIA, ["The stream runs south.", "It is old.", "A mill stood here."]),
        ("news/en", "One\nsentence.\n\nTwo.", ["One sentence.", "Two."]),
    ],
)
def test_articles_of_tfds_lose_their_headings_and_marks(tmp_path, name, text, expected):
    write_tfds(tmp_path, name, {"train": [{"text": text}]}, {"text": TEXT})
    (document,) = read(f"tfds:{name}", str(tmp_path))
    assert split_sentences(document) == expected


@pytest.mark.parametrize(
    ("name", "field", "prepared", "error", "message"),
    [
        ("news", "body", True, ValueError, "tfds:news has the fields body"),
        (
            "news",
            "text",
            False,
            ValueError,
            "tfds:news is prepared as tfrecord in .*/news/1.0.0; expected array_record: prepare it "
            "again with `tfds build news --file_format=array_record --overwrite`",
        ),
        ("olds", "text", True, FileNotFoundError, "no prepared dataset tfds:olds in"),
        ("news:2.0.0", "text", True, FileNotFoundError, "no prepared dataset tfds:news:2.0.0 in"),
    ],
)
def test_tfds_that_cannot_be_read_is_a_clear_error(tmp_path, name, field, prepared, error, message):
    write_tfds(tmp_path, "news", {"train": [{field: "a"}]}, {field: TEXT}, prepared)
    with pytest.raises(error, match=message):
        read(f"tfds:{name}", str(tmp_path))


def test_tfds_field_that_is_not_text_is_a_clear_error(tmp_path):
    write_tfds(tmp_path, "news", {"train": [{"text": b"\xff"}]}, {"text": TEXT})
    with pytest.raises(ValueError, match=r"tfds:news, 'text' of example 0: .*0xff"):
        read("tfds:news", str(tmp_path))


def test_unknown_tfds_split_is_a_clear_error(tmp_path):
    write_tfds(tmp_path, "news", {"train": [{"text": "a"}]}, {"text": TEXT})
    with pytest.raises(ValueError, match=r"tfds:news in .*: Unknown split 'dev'.* \['train'\]"):
        tfds_source("news", "dev", str(tmp_path))


def test_overlong_line_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 10)
    path = tmp_path / "text.txt"
    path.write_text("x" * 30)
    with pytest.raises(ValueError, match="line of over 10 bytes"):
        read(str(path))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["unix", "dos", "old_mac"])
def test_units_of_text_hold_each_document_once(tmp_path, monkeypatch, end):
    rng = random.Random(0)
    documents = [
        "".join("x" * rng.randint(1, 30) + end for _ in range(rng.randint(1, 5))) for _ in range(20)
    ]
    blank = ["", end, end * 3, f" {end}"]
    text = "".join(f"{document}{end}{rng.choice(blank)}" for document in documents)
    (tmp_path / "text.txt").write_bytes(text.encode())
    whole = read(str(tmp_path / "text.txt"))
    assert len(whole) == 20
    for unit_bytes in (1, 2, 7, 50, 1000):
        monkeypatch.setattr(inputs, "UNIT_BYTES", unit_bytes)
        assert read(str(tmp_path / "text.txt")) == whole


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".zst", ".xz"])
def test_units_of_json_lines_hold_each_line_once(tmp_path, monkeypatch, suffix):
    path = f"{tmp_path}/text.jsonl{suffix}"
    texts = [f"text {n} " + "é" * (n % 7) for n in range(50)]
    lines = [json.dumps({"text": text, "id": 1}, ensure_ascii=False) for text in texts]
    lines[10:10] = ["", "{", "[1]", '{"id": 2}', '{"text": 3}']
    write_compressed(path, "\n".join(lines).encode())
    for unit_bytes in (1 << 22, 40):
        monkeypatch.setattr(inputs, "UNIT_BYTES", unit_bytes)
        skipped = collections.Counter()
        documents = read(path, skipped=skipped)
        assert sorted(document.text for document in documents) == sorted(texts)
        assert skipped == {"lines": 54, "lines_without_text": 4}


def multistream_dump(num_streams, pages_of_a_stream):
    """A dump as Wikimedia writes it: the header, pages and end of the document compressed apart."""
    head, tail = DUMP.split("{pages}\n")
    streams = [head]
    number = 0
    for _ in range(num_streams):
        pages = range(number, number + pages_of_a_stream)
        number += pages_of_a_stream
        streams.append(
            "".join(PAGE.format(ns=0, redirect="", text=f"Page {n}. " * 50) for n in pages)
        )
    return b"".join(bz2.compress(stream.encode()) for stream in (*streams, tail))


def test_units_of_a_multistream_dump_hold_each_page_once(tmp_path, monkeypatch):
    path = tmp_path / "wiki-pages-articles-multistream.xml.bz2"
    path.write_bytes(multistream_dump(9, 3))
    expected = [f"Page {n}. " * 50 for n in range(27)]
    for unit_bytes in (1 << 22, 1000, 100, 10):
        monkeypatch.setattr(inputs, "UNIT_BYTES", unit_bytes)
        assert len(split_into_units(find_inputs(str(path)))) == math.ceil(
            path.stat().st_size / unit_bytes
        )
        assert [document.text for document in read(str(path))] == expected


@pytest.mark.parametrize("name", ["wiki.xml.bz2", "wiki.xml.gz", "text.txt.zst"])
def test_compressed_files_are_read_by_several_workers(tmp_path, monkeypatch, name):
    content = dump(*[(0, n % 3 == 0, f"Page {n}.") for n in range(30)])
    if name.startswith("text"):
        content = "\n\n".join(f"Page {n}." for n in range(20)).encode()
    write_compressed(f"{tmp_path}/{name}", content)
    monkeypatch.setattr(inputs, "UNIT_BYTES", 40)
    units, skipped = split_into_units(find_inputs(f"{tmp_path}/{name}")), collections.Counter()
    parts = [[d.text.strip() for d in read_documents(unit, skipped)] for (unit,) in units]
    assert len(units) > 4 and max(map(len, parts)) - min(map(len, parts)) <= 1
    numbers = [n for n in range(30) if n % 3] if name.startswith("wiki") else range(20)
    assert sorted(itertools.chain(*parts)) == sorted(f"Page {n}." for n in numbers)
    assert skipped == ({"redirects": 10} if name.startswith("wiki") else {})


def write_parquet(path, columns):
    parquet.write_table(pyarrow.table(columns), path, row_group_size=3)


def test_units_of_parquet_hold_each_row_once(tmp_path, monkeypatch):
    texts = [f"text {n}" for n in range(20)]
    write_parquet(tmp_path / "text.parquet", {"body": [*texts, None], "id": list(range(21))})
    for unit_bytes in (1 << 22, 100):
        monkeypatch.setattr(inputs, "UNIT_BYTES", unit_bytes)
        skipped = collections.Counter()
        documents = read(f"{tmp_path}/text.parquet", text_field="body", skipped=skipped)
        assert [document.text for document in documents] == texts
        assert skipped == {"lines": 21, "lines_without_text": 1}


def test_a_large_input_has_a_bounded_number_of_units(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "UNIT_BYTES", 10)
    monkeypatch.setattr(inputs, "MAX_UNITS", 100)
    (tmp_path / "text.txt").write_text("word\n\n" * 10_000)
    assert len(split_into_units(find_inputs(f"{tmp_path}/text.txt"))) == 100
    assert len(read(f"{tmp_path}/text.txt")) == 10_000


def test_small_inputs_are_read_together(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "UNIT_BYTES", 100)
    for number in range(30):
        (tmp_path / f"{number:02d}.txt").write_text(f"text {number:02d}\n")  # 8 bytes
    (tmp_path / "10.txt").write_text("a long text " * 15)
    units = split_into_units(find_inputs(f"{tmp_path}/*.txt"))
    assert list(map(len, units)) == [10, 1, 2, 12, 6]
    documents = read(f"{tmp_path}/*.txt")
    assert [d.text[5:7] for d in documents if len(d.text) == 8] == [
        f"{number:02d}" for number in range(30) if number != 10
    ]


def test_a_part_of_white_space_is_not_a_document(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 10)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "x" * 30 + "\n" * 11}))
    assert [document.text for document in read(f"{tmp_path}/text.jsonl")] == ["x" * 10] * 3


def test_many_compressed_files_are_decompressed_once(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "UNIT_BYTES", 10)
    for number in range(20):
        write_compressed(f"{tmp_path}/{number}.txt.gz", b"text\n\n" * 100)
    assert len(split_into_units(find_inputs(f"{tmp_path}/*.gz"))) == 20


def test_unreadable_file_is_not_reported_as_damaged(tmp_path, monkeypatch):
    write_parquet(tmp_path / "text.parquet", {"text": ["a"]})
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress(b"a", mtime=0))

    def deny(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(parquet, "ParquetFile", deny)
    monkeypatch.setattr(pyarrow, "CompressedInputStream", deny)
    for name in ("text.parquet", "text.txt.gz"):
        with pytest.raises(PermissionError, match="Permission denied"):
            read(f"{tmp_path}/{name}")


def test_parquet_column_that_is_not_text_is_a_clear_error(tmp_path):
    write_parquet(tmp_path / "text.parquet", {"text": [b"a"]})
    with pytest.raises(ValueError, match=r"column 'text' of .* is binary"):
        read(f"{tmp_path}/text.parquet")


def test_parquet_without_the_column_is_a_clear_error(tmp_path):
    write_parquet(tmp_path / "text.parquet", {"body": ["a"], "id": [1]})
    with pytest.raises(ValueError, match=r"has the columns 'body', 'id'; expected 'text'"):
        read(f"{tmp_path}/text.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "text.parquet").read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"cut\.parquet is damaged or cut off"):
        read(f"{tmp_path}/cut.parquet")


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst", ".xz"])
def test_cut_off_compressed_text_is_a_clear_error(tmp_path, suffix):
    path = f"{tmp_path}/text.txt{suffix}"
    write_compressed(path, random.Random(0).randbytes(20_000).hex().encode())
    content = pathlib.Path(path).read_bytes()
    pathlib.Path(path).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="damaged or cut off"):
        read(path)


COMPRESS = {
    ".gz": lambda content: gzip.compress(content, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, "zstd", asbytes=True),
}
# The content of a file of the streams `one`, `two` and `nothing` -> its words; None for damage.
# The programs `gzip` and `bzip2` only warn of garbage after the last stream, `xz` and `zstd` fail.
STREAMS = {
    "one": ("one", lambda one, two, nothing: one),
    "two": ("one two", lambda one, two, nothing: one + two),
    "empty first": ("one", lambda one, two, nothing: nothing + one),
    "empty last": ("one", lambda one, two, nothing: one + nothing),
    "cut by a byte": (None, lambda one, two, nothing: one[:-1]),
    "second cut": (None, lambda one, two, nothing: one + two[:-1]),
    "second begun": (None, lambda one, two, nothing: one + two[:2]),
    "garbage": (None, lambda one, two, nothing: one + b"garbage" * 9),
    "garbage between": (None, lambda one, two, nothing: one + b"garbage" * 9 + two),
    "a byte": (None, lambda one, two, nothing: one + b"x"),
}


@pytest.mark.parametrize("case", STREAMS)
@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_streams_are_read_to_the_end_or_refused(tmp_path, suffix, case):
    expected, join = STREAMS[case]
    path = tmp_path / f"text.txt{suffix}"
    path.write_bytes(join(*map(COMPRESS[suffix], (b"one\n" * 500, b"two\n" * 500, b""))))
    if expected is None:
        with pytest.raises(ValueError, match="is damaged or cut off"):
            read(str(path))
    else:
        words = "".join(document.text for document in read(str(path))).split()
        assert words == [word for word in expected.split() for _ in range(500)]


@pytest.mark.parametrize(("num_zeros", "is_valid"), [(4, True), (1 << 20, True), (3, False)])
def test_padding_of_xz_is_a_multiple_of_four_zeros(tmp_path, num_zeros, is_valid):
    path = tmp_path / "text.txt.xz"
    zeros = bytes(num_zeros)
    path.write_bytes(lzma.compress(b"one\n") + zeros + lzma.compress(b"two\n") + zeros)
    if is_valid:
        assert [document.text for document in read(str(path))] == ["one\ntwo\n"]
    else:
        with pytest.raises(ValueError, match="is damaged or cut off"):
            read(str(path))


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])  # Checksums are optional in .zst.
def test_no_flipped_bit_and_no_cut_changes_a_compressed_text_silently(tmp_path, suffix):
    rng, compress = random.Random(0), COMPRESS[suffix]
    texts = [rng.randbytes(150).hex().encode() + b"\n\n" for _ in range(3)]
    streams = [compress(text) for text in texts]
    content, path = b"".join(streams), tmp_path / f"text.txt{suffix}"
    path.write_bytes(content)
    expected, num_errors = read(str(path)), 0
    assert len(expected) == 3
    ends = list(itertools.accumulate(map(len, streams)))
    for number in range(250):
        damaged = bytearray(content)
        if number % 5:
            damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        else:
            del damaged[rng.choice([n for n in range(1, len(content)) if n not in ends]) :]
        path.write_bytes(damaged)
        try:
            assert read(str(path)) == expected  # Bits that mean nothing, such as a file's time.
        except ValueError:
            num_errors += 1
    assert num_errors > 200


def test_checksums_of_parquet_are_verified(tmp_path):
    path, texts = tmp_path / "text.parquet", [f"text {n}" for n in range(99)]
    table = pyarrow.table({"text": texts})
    options = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}
    parquet.write_table(table, path, **options)
    path.write_bytes(path.read_bytes().replace(b"text 77", b"text 87"))
    with pytest.raises(ValueError, match="is damaged or cut off"):
        read(str(path))


@pytest.mark.parametrize("folder", ["texts", ".texts"])
@pytest.mark.parametrize(
    "pattern",
    [
        "*.txt",
        "**/*.txt",
        "*/*.txt",
        ".*/*.txt",
        "**/.x.txt",
        "**/.*.txt",
        ".a/**/*.txt",
        "*/.b/*.txt",
        "[.ab]*/*.txt",
        "**",
    ],
)
def test_globs_leave_out_hidden_files_as_the_shell_does(tmp_path, monkeypatch, folder, pattern):
    rng, names = random.Random(0), ["a", ".a", "b", ".b"]
    for _ in range(40):
        directory = tmp_path.joinpath(folder, *rng.choices(names, k=rng.randrange(3)))
        directory.mkdir(parents=True, exist_ok=True)
        (directory / rng.choice(["x.txt", ".x.txt", "y.txt"])).write_text("A dog.")
    monkeypatch.chdir(tmp_path)
    for start in (folder, str(tmp_path / folder)):
        found = glob.glob(f"{start}/{pattern}", recursive=True)
        expected = sorted(filter(os.path.isfile, found))
        assert [source.path for source in find_inputs(f"{start}/{pattern}")] == expected


def test_hidden_files_are_counted_and_can_be_named(tmp_path, caplog):
    (tmp_path / ".notes").mkdir()
    for name in ("a.txt", ".b.txt", ".notes/c.txt"):
        (tmp_path / name).write_text("A dog.")
    assert len(find_inputs(f"{tmp_path}/**/*.txt")) == 1
    assert "left out 2 files that are hidden or in hidden folders, such as" in caplog.text
    assert len(find_inputs(f"{tmp_path}/.notes/*.txt,{tmp_path}/.b.txt")) == 2
    (tmp_path / "a.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"matches only 1 files that are hidden"):
        find_inputs(f"{tmp_path}/*.txt")


def test_damaged_stream_of_a_multistream_dump_is_a_clear_error(tmp_path):
    path = tmp_path / "wiki-multistream.xml.bz2"
    content = bytearray(multistream_dump(3, 2))
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"wiki-multistream.xml.bz2 is damaged at byte \d+"):
        read(str(path))


def test_inputs_on_a_bucket_are_found_and_read(monkeypatch):
    bucket = fsspec.filesystem("memory")
    bucket.pipe({f"/bucket/part-{n}.txt": f"one {n}\n\ntwo {n}".encode() for n in range(3)})
    monkeypatch.setattr(inputs, "UNIT_BYTES", 4)
    texts = [document.text for document in read("memory://bucket/*.txt")]
    assert texts == [f"{word} {n}\n" for n in range(3) for word in ("one", "two")]
    with pytest.raises(FileNotFoundError, match="matches no file"):
        read("memory://bucket/*.md")


def test_bucket_without_credentials_is_a_clear_error(monkeypatch):
    def refuse(*_):
        raise RuntimeError("401 Anonymous caller")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "glob", refuse)
    with pytest.raises(OSError, match=r"--input=memory://a: 401"):
        read("memory://a")


def damaged_dumps():
    content = multistream_dump(4, 2)
    begins = [match.start() for match in readers.BZIP2_START.finditer(content)]
    flipped = bytearray(content)
    flipped[begins[2] + 5] ^= 1  # The magic number of a stream.
    return {"flipped": bytes(flipped), "cut": content[: begins[4]], "page": b"<html>" * 100}


@pytest.mark.parametrize("damage", ["flipped", "cut", "page"])
@pytest.mark.parametrize("unit_bytes", [1 << 22, 100])
def test_no_stream_of_a_dump_is_lost_silently(tmp_path, monkeypatch, damage, unit_bytes):
    monkeypatch.setattr(inputs, "UNIT_BYTES", unit_bytes)
    (tmp_path / "wiki-multistream.xml.bz2").write_bytes(damaged_dumps()[damage])
    with pytest.raises(ValueError, match=r"is damaged at byte|does not begin as a bzip2 file"):
        read(f"{tmp_path}/wiki-multistream.xml.bz2")


@pytest.mark.parametrize("compress", [bz2.compress, gzip.compress])
def test_garbage_between_streams_is_a_clear_error(tmp_path, compress):
    suffix = "bz2" if compress is bz2.compress else "gz"
    content = compress(b"one\n") + b"garbage" * 9 + compress(b"two\n")
    (tmp_path / f"text.txt.{suffix}").write_bytes(content)
    with pytest.raises(ValueError, match="damaged or cut off"):
        read(f"{tmp_path}/text.txt.{suffix}")


def test_long_documents_of_all_formats_are_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 100)
    words = [f"word{n}" for n in range(200)]
    text = json.dumps({"text": " ".join(words)})
    (tmp_path / "text.jsonl").write_text(text + "\n" + '{"text": "' + "x" * 500 + '"}')
    documents = read(f"{tmp_path}/text.jsonl")
    long, unbroken = documents[:-5], documents[-5:]
    assert " ".join(document.text for document in long).split() == words
    assert [document.continues for document in long] == [False] + [True] * (len(long) - 1)
    assert max(len(document.text) for document in long) <= 100
    assert [document.text for document in unbroken] == ["x" * 100] * 5
    assert [document.continues for document in unbroken] == [False] + [True] * 4


def test_wrong_text_field_is_an_early_error(tmp_path):
    (tmp_path / "text.jsonl").write_text('{"body": "a"}\n' * 2000)
    with pytest.raises(ValueError, match=r"none of 1,000 lines has text in 'text': .*--text_field"):
        read(f"{tmp_path}/text.jsonl")


def test_half_a_surrogate_pair_is_replaced(tmp_path):
    (tmp_path / "text.jsonl").write_text(r'{"text": "a \ud83d b"}')
    assert [document.text for document in read(f"{tmp_path}/text.jsonl")] == ["a ? b"]


def test_vanished_file_is_not_reported_as_damaged(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one")
    (source,) = find_inputs(str(path))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        list(read_documents(Unit(source, 0, 1), collections.Counter()))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wiki-multistream-index.txt.bz2", "unknown suffix"),
        ("text.parquet.gz", "unknown suffix"),
        ("server.log", "if it is text, such as a log, rename it to *.txt"),
        ("folder/", "it is a directory"),
    ],
)
def test_files_that_are_not_text_are_clear_errors(tmp_path, name, message):
    (tmp_path / "folder").mkdir()
    if not name.endswith("/"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        find_inputs(f"{tmp_path}/{name}")
    with pytest.raises(ValueError, match="--input is empty"):
        find_inputs("")


def test_names_with_brackets_and_names_of_c4_are_found(tmp_path):
    for name in ("b [1].txt", "c4-train.00000-of-01024.json.gz"):
        write_compressed(f"{tmp_path}/{name}", b"x")
        (source,) = find_inputs(f"{tmp_path}/{name}")
        assert source.path.endswith(name)


def revision(text, timestamp=""):
    timestamp = f"<timestamp>{timestamp}</timestamp>" if timestamp else ""
    return f"<revision><id>1</id>{timestamp}<text>{text}</text></revision>"


@pytest.mark.parametrize(
    ("revisions", "expected"),
    [
        ([revision("old"), revision("new")], ["new"]),
        (
            [revision("old", "2001-02-03T04:05:06Z"), revision("new", "2010-01-01T00:00:00Z")],
            ["new"],
        ),
        (
            [revision("new", "2010-01-01T00:00:00Z"), revision("old", "2001-02-03T04:05:06Z")],
            ["new"],
        ),
        ([revision("old"), revision("")], []),  # The page was blanked.
    ],
)
def test_newest_revision_of_a_history_counts(tmp_path, revisions, expected):
    page = f"<page><title>T</title><ns>0</ns>{''.join(revisions)}</page>"
    (tmp_path / "history.xml").write_text(DUMP.format(pages=page))
    skipped = collections.Counter()
    documents = read(f"{tmp_path}/history.xml", skipped=skipped)
    assert [document.text for document in documents] == expected
    assert skipped == ({} if expected else {"pages_without_text": 1})


def test_long_history_is_read_in_little_memory(tmp_path):
    page = f"<page><title>T</title><ns>0</ns>{revision('word ' * 20_000) * 60}</page>"
    (tmp_path / "history.xml").write_text(DUMP.format(pages=page))  # 6 MB
    tracemalloc.start()
    assert len(read(f"{tmp_path}/history.xml")) == 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e6


def docs(numbers, end="\n"):
    """The output of WikiExtractor."""
    return "".join(
        f'<doc id="{n}" url="https://w.org/?curid={n}" title="A &amp; {n}">{end}A & {n}{end}{end}'
        f"The {n}. dog &lt;barks&gt;.{end}{end}It is old.{end}{end}</doc>{end}"
        for n in numbers
    )


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "dos"])
@pytest.mark.parametrize("name", ["wiki_00", "wiki_00.gz", "wiki_00.bz2", "docs.txt", "docs.xml"])
def test_output_of_wikiextractor_is_read_as_articles(tmp_path, monkeypatch, name, end):
    write_compressed(f"{tmp_path}/{name}", docs(range(40), end).encode())
    for unit_bytes in (1 << 22, 100):
        monkeypatch.setattr(inputs, "UNIT_BYTES", unit_bytes)
        documents = read(f"{tmp_path}/{name}")
        assert {document.markup for document in documents} == {"article"}
        sentences = [split_sentences(document) for document in documents]
        expected = [[f"The {n}.", "dog <barks>.", "It is old."] for n in range(40)]
        assert sorted(sentences, key=lambda s: int(s[0][4:-1])) == expected


def test_links_and_empty_articles_of_wikiextractor_are_dropped(tmp_path):
    head = '<doc id="1" url="u" title="T">\n'
    text = 'A <a href="B">dog</a> &lt;a href="C"&gt;barks&lt;/a&gt;.'
    (tmp_path / "wiki_00").write_text(f"{head}T\n\n{text}\n\n</doc>\n{head}T\n\n</doc>\n")
    skipped = collections.Counter()
    (document,) = read(f"{tmp_path}/wiki_00", skipped=skipped)
    assert document.text == "A dog barks." and skipped == {"pages_without_text": 1}


ARTICLE_HEADS = [
    '<doc url="u" id="1" title="T 1">',
    "<doc title='T 1' id='1'>",
    "<doc id=1 title=x>",
    "<doc id = '1'\ttitle=\"T 1\" >",
    "<doc>",
    '<doc title="a > "b" (c)" id="1">',
]


@pytest.mark.parametrize("head", ARTICLE_HEADS)
@pytest.mark.parametrize(
    "before", ["", "<docs>\n", '\ufeff<?xml version="1.0"?>\n<docs lang="x">\n']
)
@pytest.mark.parametrize(
    "end", [".\n</doc>\n", ".</doc>\n", ".\n</doc>", ".\n</doc >  ", ".</doc>"]
)
def test_every_form_of_doc_separates_articles(tmp_path, monkeypatch, head, before, end):
    articles = [f"{head}\nDog number {n}\nbarks{end}" for n in range(20)]
    text = before + "".join(articles) + ("</docs>\n" if before else "")
    (tmp_path / "wiki_00").write_text(text)
    for unit_bytes in (1 << 22, 100, 7):
        monkeypatch.setattr(inputs, "UNIT_BYTES", unit_bytes)
        skipped = collections.Counter()
        documents = read(f"{tmp_path}/wiki_00", skipped=skipped)
        assert {document.markup for document in documents} == {"article"}
        assert [document.text for document in documents] == [
            f"Dog number {n}\nbarks." for n in range(20)
        ]
        assert not skipped.total()


def test_text_in_the_line_of_doc_is_read_and_titles_are_dropped(tmp_path):
    (tmp_path / "a").write_text(
        '<doc title="T" id="1">It is <b>one</b></doc><doc id="2" title="U">U\n\nIt is two.\n'
        "The <doc> element.</doc>\n<doc id=3 title=V>\nV\nIt is three.\n</doc>"
    )
    texts = [document.text for document in read(f"{tmp_path}/a")]
    assert texts == ["It is <b>one</b>", "It is two.\nThe <doc> element.", "It is three."]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('<DOC id="1">\nA dog.\n</DOC>\n', "begins with '<DOC id='"),
        ("<DOC>\n<DOCNO> 1 </DOCNO>\nA dog.\n</DOC>\n", "begins with '<DOC>', which is not"),
        ('<doc\n  id="1">\nA dog.\n</doc>\n', "expected <doc ...> in one line before each"),
        ("<docs>\nA dog.\n</docs>\n", "begins with '<docs>', which is not"),
        ('<doc id="1"\nA dog.\n</doc>\n', "begins with '<doc id=', which is not"),
        ("<doc id=1>\nA.\n</doc>\n<doc id=2\nB.\n</doc>\n", "a, byte 21: the end of the tag in"),
        ('<doc id=1>\n</doc><doc id=2 title=""A">B.\n</doc>\n', "byte 11: the end of the tag in"),
        ("<doc id=1 title=T>\nA.<doc id=2>\nB.\n</doc>\n", "the <doc> of 'T' has no </doc>"),
    ],
)
def test_other_forms_of_doc_are_refused(tmp_path, content, message):
    (tmp_path / "a").write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        read(f"{tmp_path}/a")


TEXTS = ["One dog.\n\nIt barks.", 'Two "cats" [1], {2}', "é" * 99]
JSON_LINES = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("wiki_00", JSON_LINES),
        ("wiki_00.bz2", JSON_LINES),
        ("lines.txt", JSON_LINES),
        ("lines.json", "\ufeff" + JSON_LINES),
        ("lines", "\ufeff\n" + JSON_LINES),
        ("array.json", json.dumps([{"text": text} for text in TEXTS])),
        ("array.jsonl.gz", "\ufeff \n" + json.dumps([{"text": text} for text in TEXTS], indent=1)),
        ("array", json.dumps([{"text": text} for text in TEXTS], indent=2, ensure_ascii=False)),
        ("objects.json", "".join(json.dumps({"text": text}, indent=1) + "\n" for text in TEXTS)),
        ("joined.jsonl", "".join(json.dumps({"text": text}) for text in TEXTS)),
        ("joined", "  ".join(json.dumps({"text": text}) for text in TEXTS) + "\n"),
        ("commas.json", "".join(json.dumps({"text": text}) + ",\n" for text in TEXTS)),
        ("commas.txt.gz", "".join(json.dumps({"text": text}) + " ,\r\n" for text in TEXTS)),
    ],
)
def test_json_is_recognized_by_its_first_bytes(tmp_path, monkeypatch, name, content):
    write_compressed(f"{tmp_path}/{name}", content.encode())
    for unit_bytes, buffer_characters in ((1 << 22, 1 << 20), (40, 1)):
        monkeypatch.setattr(inputs, "UNIT_BYTES", unit_bytes)
        monkeypatch.setattr(json_values, "BUFFER_CHARACTERS", buffer_characters)
        skipped = collections.Counter()
        documents = read(f"{tmp_path}/{name}", skipped=skipped)
        assert sorted(document.text for document in documents) == sorted(TEXTS)
        assert {document.markup for document in documents} == {""} and skipped == {"lines": 3}


@pytest.mark.parametrize(
    "text",
    ["[1] A note.\n", "{a} set\n", '{"a": 1} is a set\n', "<b>bold</b>\n", "<doc> of\n", "[\n"],
)
def test_text_that_begins_with_a_bracket_stays_text(tmp_path, text):
    (tmp_path / "text.txt").write_text(text)
    assert read(f"{tmp_path}/text.txt") == [readers.Document(text)]


def test_dump_without_a_suffix_is_read_as_a_dump(tmp_path):
    for name in ("enwiki", "enwiki.txt"):
        (tmp_path / name).write_bytes(b'<?xml version="1.0"?>\n' + dump((0, False, "A '''dog'''.")))
        assert read(f"{tmp_path}/{name}") == [readers.Document("A '''dog'''.", "wikitext")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text", gzip.compress(b"a", mtime=0), "is compressed with gzip"),
        ("text.txt", bz2.compress(b"a"), "is compressed with bzip2"),
        ("wiki.xml", bz2.compress(b"a"), "is compressed with bzip2"),
        ("text.txt.gz", b"a", "does not begin as a gzip file"),
        ("text.txt.gz", bz2.compress(b"a"), "does not begin as a gzip file"),
        ("text.txt", "a dog".encode("utf-16"), "is UTF-16"),
        ("text.jsonl", "{}".encode("utf-16"), "is UTF-16"),
        ("text.txt.gz", gzip.compress("a".encode("utf-16"), mtime=0), "is UTF-16"),
        ("text.txt", "a dog".encode("utf-16-le"), "holds NUL bytes"),
        ("text", b"PAR1", "is Parquet"),
        ("text", b"PK\x03\x04", "is a ZIP archive"),
        ("text", b"%PDF-1.7", "is a PDF document"),
        ("text.csv", b"<!DOCTYPE html>\n<p>", "is an HTML page"),
        ("text.jsonl", b"<html>", "is an HTML page"),
        ("text.txt", b'<?xml version="1.0"?>\n<a/>', "is XML; expected UTF-8 text"),
        ("array.json", b'[{"text": "a"}, {"text": "b', "is damaged or cut off"),
        ("array.json", b'[{"text": "a"}, {"text": b}]', "is damaged or cut off"),
        ("array.json", b'[{"text": "a\xff"}]', "is not UTF-8"),
        ("wiki_00", docs([1, 2])[:-20].encode(), "the <doc> of 'A & 2' has no </doc>"),
        ("wiki_00", docs([1, 2]).replace("</doc>", "", 1).encode(), "of 'A & 1' has no </doc>"),
        (
            "wiki_00",
            docs([1]).encode().replace(b"old", b"\xff"),
            "line 6, byte 100: 0xff is not UTF",
        ),
    ],
)
def test_content_that_does_not_match_its_name_is_a_clear_error(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read(f"{tmp_path}/{name}")
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "unit",
    ["東京は日本の首都である。", "東京", "กรุงเทพ", "x", "A dog barks. ", "é", "彼は「はい。」"],
)
@pytest.mark.parametrize("kind", ["text", "jsonl", "lines"])
def test_documents_of_every_script_are_cut_at_the_size_limit(tmp_path, unit, kind):
    limit = readers.MAX_DOCUMENT_BYTES
    text = unit * (5 * limit // 2 // len(unit.encode()))
    path = tmp_path / ("text.jsonl" if kind == "jsonl" else "text.txt")
    if kind == "lines":
        text = "\n".join(text[start : start + 5000] for start in range(0, len(text), 5000))
    path.write_text(json.dumps({"text": text}) if kind == "jsonl" else text)
    documents = read(str(path))
    assert "".join(document.text for document in documents).split() == text.split()
    assert 2 < len(documents) < 5
    assert max(len(document.text.encode()) for document in documents) < limit + 15_002
    assert [document.continues for document in documents][1:] == [True] * (len(documents) - 1)
    if unit.endswith(("。", "。」")) and kind != "lines":
        assert all(document.text.rstrip().endswith(unit[-2:]) for document in documents)


def test_titles_of_wikiextractor_may_hold_quotation_marks(tmp_path):
    titles = ['"Heroes" (album)', "Berlin", 'The "Low" record']
    blocks = [
        f'<doc id="{n}" url="u?curid={n}" title="{title}">\n{title}\n\nIt is text {n}.\n\n</doc>\n'
        for n, title in enumerate(titles)
    ]
    path = tmp_path / "wiki_00"
    path.write_text("".join(blocks) + "left over\n")
    ((unit,),) = split_into_units(find_inputs(str(path)))
    skipped = collections.Counter()
    found = [document.text for document in read_documents(unit, skipped)]
    assert found == [f"It is text {n}." for n in range(3)]
    assert skipped["lines_outside_documents"] == 1


def test_array_that_is_cut_off_is_an_error(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a b c"}, {"text": "d e"}')
    ((unit,),) = split_into_units(find_inputs(str(path)))
    with pytest.raises(ValueError, match=r"damaged|cut off"):
        list(read_documents(unit, collections.Counter()))
