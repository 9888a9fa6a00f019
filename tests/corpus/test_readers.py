import bz2
import sys
import types

import pytest

from bert_jax.corpus import readers
from bert_jax.corpus.readers import find_inputs, read_documents

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
    (tmp_path / "other.txt").write_bytes(content.replace(b"\n", end))
    unix, other = (list(read_documents(str(tmp_path / f"{n}.txt"))) for n in ("unix", "other"))
    assert [document.text for document in unix] == [document.text for document in other]
    assert [document.text for document in unix] == ["one\ntwo\x85\u2028\n", "thrée\n"]
    assert sum(document.bytes_read for document in other) == (tmp_path / "other.txt").stat().st_size


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
    assert all(document.is_wikitext for document in documents)


def test_inputs_of_several_globs_are_found_in_sorted_order(tmp_path):
    for name in ("b.txt", "a.txt", "c", "d.xml"):
        (tmp_path / name).write_text("x")
    found = find_inputs(f"{tmp_path}/*.txt,{tmp_path}/c,{tmp_path}/d.xml,tfds:wiki")
    assert [path.rsplit("/")[-1] for path in found] == ["a.txt", "b.txt", "c", "d.xml", "tfds:wiki"]


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
        for found in find_inputs(str(path)):
            list(read_documents(found))
    assert str(path) in str(caught.value)


def test_missing_tfds_package_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ImportError, match="pip install tensorflow-datasets"):
        list(read_documents("tfds:wikipedia/20230601.en"))


def test_tfds_yields_the_text_field(monkeypatch):
    examples = [{"text": "première".encode()}, {"text": b"second"}]
    fake = types.SimpleNamespace(data_source=lambda name, split: examples)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", fake)
    assert [document.text for document in read_documents("tfds:fake")] == ["première", "second"]


def test_overlong_line_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 10)
    path = tmp_path / "text.txt"
    path.write_text("x" * 30)
    with pytest.raises(ValueError, match="line of over 10 bytes"):
        list(read_documents(str(path)))
