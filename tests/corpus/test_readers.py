import bz2
import sys

import pytest
import tensorflow_datasets

from bert_jax.corpus import readers
from bert_jax.corpus.build import CorpusConfig, build_corpus
from bert_jax.corpus.readers import find_inputs, input_bytes, read_documents
from bert_jax.corpus.sentences import split_sentences
from bert_jax.tokenization import load_tokenizer
from tests.helpers import random_text, write_tfds, write_vocabulary

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


def test_blank_lines_separate_documents(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffone\ntwo\n\n \nthrée\n\n\n".encode())
    documents = list(read_documents(str(path)))
    assert [document.text for document in documents] == ["one\ntwo\n", "thrée\n"]
    assert not any(document.continues for document in documents)


@pytest.mark.parametrize("end", [b"\r\n", b"\r"], ids=["dos", "old_mac"])
def test_all_line_endings_give_the_same_documents(tmp_path, end):
    content = "one\ntwo\x85\u2028\n\n\nthrée".encode()
    (tmp_path / "unix.txt").write_bytes(content)
    (tmp_path / "other_end.txt").write_bytes(content.replace(b"\n", end))
    unix, other_end = (
        list(read_documents(str(tmp_path / f"{name}.txt"))) for name in ("unix", "other_end")
    )
    assert [document.text for document in unix] == [document.text for document in other_end]
    assert [document.text for document in unix] == ["one\ntwo\x85\u2028\n", "thrée\n"]
    assert (
        sum(document.bytes_read for document in other_end)
        == (tmp_path / "other_end.txt").stat().st_size
    )


def test_long_document_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 8)
    path = tmp_path / "text.txt"
    path.write_text("aaaa\nbbbb\ncccc\n\ndddd\n")
    documents = list(read_documents(str(path)))
    assert [document.text for document in documents] == ["aaaa\nbbbb\n", "cccc\n", "dddd\n"]
    assert [document.continues for document in documents] == [False, True, False]


def test_document_that_ends_at_the_size_limit_does_not_continue(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 8)
    path = tmp_path / "text.txt"
    path.write_text("aaaa\nbbbb\n\ncccc\n")
    documents = list(read_documents(str(path)))
    assert [document.continues for document in documents] == [False, False]


@pytest.mark.parametrize("name", ["wiki.xml", "wiki.xml.bz2", "wiki1.xml-p1p99.bz2"])
def test_dump_yields_only_articles(tmp_path, name):
    content = dump((0, False, "First &amp; best."), (0, True, "#REDIRECT"), (1, False, "Talk."))
    content = content.replace(b"</mediawiki>", dump((0, False, "Last."))[57:])
    path = tmp_path / name
    path.write_bytes(bz2.compress(content) if name.endswith(".bz2") else content)
    documents = list(read_documents(str(path)))
    assert [document.text for document in documents] == ["First & best.", "Last."]
    assert {document.markup for document in documents} == {"wikitext"}


def test_inputs_of_several_globs_are_found_in_sorted_order(tmp_path):
    for name in ("b.txt", "a.txt", "c", "d.xml"):
        (tmp_path / name).write_text("x")
    inputs = find_inputs(f"{tmp_path}/*.txt,{tmp_path}/c,{tmp_path}/d.xml,tfds:wiki")
    assert [path.rsplit("/")[-1] for path in inputs] == [
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
        ("text.pdf", b"x", ValueError, "unknown suffix; expected UTF-8 text"),
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
        for file in find_inputs(str(path)):
            list(read_documents(file))
    assert str(path) in str(caught.value)


def test_tfds_yields_the_text_field_without_tensorflow(tmp_path):
    texts = ["première\n\nfin", "second"]
    write_tfds(tmp_path, "news", {"train": [{"text": text} for text in texts]}, {"text": TEXT})
    documents = list(read_documents("tfds:news", str(tmp_path)))
    assert sorted(document.text for document in documents) == texts
    assert {document.markup for document in documents} == {""}
    num_bytes = sum(document.bytes_read for document in documents)
    assert num_bytes == len("".join(texts).encode())
    assert input_bytes("tfds:news", str(tmp_path)) >= num_bytes
    assert "tensorflow" not in sys.modules


def test_corpus_of_a_tfds_data_set_has_the_documents_of_the_text_file(tmp_path):
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
        ("wikipedia/en", WIKIPEDIA, ["The stream runs south.", "It is old.", "A mill stood here."]),
        ("news/en", "One\nsentence.\n\nTwo.", ["One sentence.", "Two."]),
    ],
)
def test_articles_of_tfds_lose_their_headings_and_marks(tmp_path, name, text, expected):
    write_tfds(tmp_path, name, {"train": [{"text": text}]}, {"text": TEXT})
    (document,) = read_documents(f"tfds:{name}", str(tmp_path))
    assert split_sentences(document) == expected


@pytest.mark.parametrize(
    ("name", "field", "prepared", "error", "message"),
    [
        ("news", "body", True, ValueError, "tfds:news has the fields body; expected 'text'"),
        (
            "news",
            "text",
            False,
            ValueError,
            "tfds:news is prepared as tfrecord in .*/news/1.0.0; expected array_record: prepare it "
            "again with `tfds build news --file_format=array_record --overwrite`",
        ),
        ("olds", "text", True, FileNotFoundError, "no prepared dataset tfds:olds in .*; prepare"),
        ("news:2.0.0", "text", True, FileNotFoundError, "no prepared dataset tfds:news:2.0.0 in"),
    ],
)
def test_tfds_that_cannot_be_read_is_a_clear_error(tmp_path, name, field, prepared, error, message):
    write_tfds(tmp_path, "news", {"train": [{field: "a"}]}, {field: TEXT}, prepared)
    with pytest.raises(error, match=message):
        list(read_documents(f"tfds:{name}", str(tmp_path)))


def test_unknown_tfds_split_is_a_clear_error(tmp_path):
    write_tfds(tmp_path, "news", {"train": [{"text": "a"}]}, {"text": TEXT})
    with pytest.raises(ValueError, match=r"tfds:news in .*: Unknown split 'dev'.* \['train'\]"):
        readers.tfds_source("news", "dev", str(tmp_path))


def test_overlong_line_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 10)
    path = tmp_path / "text.txt"
    path.write_text("x" * 30)
    with pytest.raises(ValueError, match="line of over 10 bytes"):
        list(read_documents(str(path)))
