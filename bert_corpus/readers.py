"""Reads documents from the forms of input, also on buckets.

An input is read in parts, each by one worker: a range of the bytes of plain text, JSON lines,
FASTA, WikiExtractor's output and multistream dumps, of the row groups of Parquet, of the examples
of TFDS. Compressed files, JSON arrays, tables and Arrow files cannot be read from the middle: each
worker reads all, and takes every n-th document.
"""

import bz2
import codecs
import collections
import contextlib
import io
import itertools
import json
import re
from collections.abc import Iterator
from xml.etree import ElementTree

from bert_corpus.columns import no_column, read_arrow, read_parquet, read_table
from bert_corpus.content import CONVERT
from bert_corpus.fasta import read_fasta
from bert_corpus.files import Document, damaged, decode_line, open_unit, read_lines
from bert_corpus.hub import open_hub
from bert_corpus.inputs import Unit, is_splittable
from bert_corpus.json_values import json_values
from bert_corpus.pages import read_html, read_markdown
from bert_corpus.wikiextractor import WRAPPERS, article_text, split_line
from bert_corpus.words import cut_text
from bert_jax.data.tfds import tfds_source

# Longer documents are cut, which bounds memory for files without blank lines.
MAX_DOCUMENT_BYTES = 1 << 20
MAX_LINES_WITHOUT_TEXT = 1000  # of JSON, at the beginning of a unit
# Each stream of a multistream dump begins so: a header, and the magic number of a block.
BZIP2_START = re.compile(rb"BZh[1-9]1AY&SY")
ARTICLE_SETS = ("wikipedia", "wiki40b")  # TFDS datasets of Wikipedia articles without markup


def read_documents(unit: Unit, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the documents of a unit, in order and in constant memory; counts what it skips.

    Raises ValueError for a damaged file, and OSError.
    """
    readers = {
        "text": _read_text,
        "lines": _read_text_lines,
        "file": _read_text,
        "docs": _read_docs,
        "jsonl": _read_json_lines,
        "json": _read_json_values,
        "dump": _read_dump,
        "parquet": read_parquet,
        "arrow": read_arrow,
        "table": read_table,
        "fasta": read_fasta,
        "html": read_html,
        "markdown": read_markdown,
        "tfds": _read_tfds,
        "hub": _read_hub,
    }
    read = readers[unit.source.format]
    if is_splittable(unit.source):
        documents = read(unit, skipped)
    else:
        # All workers of the file skip the same: the first counts it.
        whole = read(unit.whole(), skipped if unit.index == 0 else collections.Counter())
        documents = _every_nth(whole, unit)
    for document in documents:
        # A character has at most four bytes.
        is_short = len(document.text) <= MAX_DOCUMENT_BYTES // 2
        is_parsed = document.markup in ("wikitext", "article")
        if is_parsed or is_short or len(document.text.encode()) <= 2 * MAX_DOCUMENT_BYTES:
            yield document
            continue
        pieces = cut_text(document.text, MAX_DOCUMENT_BYTES)
        for number, piece in enumerate(filter(str.strip, pieces)):
            yield Document(piece, document.markup, document.continues or number > 0)


def _every_nth(documents: Iterator[Document], unit: Unit) -> Iterator[Document]:
    number = -1
    for document in documents:
        number += not document.continues
        if number % unit.count == unit.index:
            yield document


def _read_text(unit: Unit, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the documents of a UTF-8 file: between blank lines, or (format "file") all of it.

    A document belongs to the unit in which the blank line before it begins. Raises ValueError if a
    byte is not valid UTF-8.
    """
    del skipped
    is_one_document = unit.source.format == "file"
    lines, document_bytes, continues = [], 0, False
    is_ours = unit.index == 0
    for offset, stop, line in itertools.chain(read_lines(unit), [(0, 0, b"")]):  # At the end.
        text = decode_line(line, offset, unit)
        is_blank = not text.strip()
        separates = is_blank and not (is_one_document and line)
        if is_ours and not separates and (lines or not is_blank):
            lines.append(text.rstrip("\r\n") + "\n")
            document_bytes += len(line)
        if (separates and lines) or document_bytes >= MAX_DOCUMENT_BYTES:
            yield Document("".join(lines), continues=continues)
            lines, document_bytes, continues = [], 0, True
        continues = continues and not separates
        if separates:
            is_ours = offset < stop
            if not is_ours:
                return
        elif not is_ours and offset >= stop:
            return


def _read_text_lines(unit: Unit, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the lines of a UTF-8 file that are not blank. Raises ValueError as `_read_text`."""
    del skipped
    for offset, stop, line in read_lines(unit):
        if offset >= stop:
            return
        if text := decode_line(line, offset, unit).strip():
            yield Document(f"{text}\n")


def _read_docs(unit: Unit, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the articles of WikiExtractor's output, `<doc ...>` to `</doc>`, without their titles.

    An article belongs to the unit in which the line of its `<doc>` begins. Raises ValueError for an
    article that is not closed, or as `split_line`.
    """
    lines: list[str] | None = None  # of the article that is open
    title, has_begun = "", False
    for offset, stop, line in read_lines(unit):
        if lines is None and offset >= stop:
            return
        decoded, place = decode_line(line, offset, unit), f"{unit.source.path}, byte {offset}"
        for kind, text in split_line(decoded, place):
            if kind == "start" and lines is not None:
                raise _unclosed(unit, title)
            if kind == "start" and offset >= stop:
                return
            if kind == "start":
                title, lines, has_begun = text, [], True
            elif lines is None:
                # Before the first article of a unit are lines of the one before.
                is_left_over = has_begun and text.strip() and not WRAPPERS.fullmatch(text)
                skipped["lines_outside_documents"] += bool(is_left_over)
            elif kind == "text":
                lines.append(text)
            else:
                if content := article_text(lines, title):
                    yield Document(content, "article")
                else:
                    skipped["pages_without_text"] += 1
                lines = None
    if lines is not None:
        raise _unclosed(unit, title)


def _unclosed(unit: Unit, title: str) -> ValueError:
    return ValueError(
        f"{unit.source.path} is damaged or cut off: the <doc> of {title!r} has no </doc>; "
        "extract it again"
    )


def _read_json_lines(unit: Unit, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the text field of each line; counts lines that are not JSON objects with text."""
    for offset, stop, line in read_lines(unit):
        if offset >= stop:
            return
        line = line.removeprefix(codecs.BOM_UTF8)
        if not line or line.isspace():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        yield from _document_of_json(value, unit, skipped)


def _read_json_values(unit: Unit, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the text field of the objects of an array, or of objects over any number of lines.

    Raises ValueError if they are not JSON.
    """
    with open_unit(unit) as (stream, *_):
        try:
            for value in json_values(io.TextIOWrapper(stream, encoding="utf-8-sig")):
                yield from _document_of_json(value, unit, skipped)
        except UnicodeDecodeError as error:
            raise ValueError(f"{unit.source.path} is not UTF-8 ({error}); {CONVERT}") from None
        except (json.JSONDecodeError, RecursionError) as error:
            raise damaged(unit.source.path, error) from None


def _document_of_json(
    value: object, unit: Unit, skipped: collections.Counter
) -> Iterator[Document]:
    """Yields the text field of an object, if it has one, and counts the object."""
    field = unit.source.text_field
    if skipped["lines_without_text"] == skipped["lines"] == MAX_LINES_WITHOUT_TEXT:
        raise ValueError(
            f"{unit.source.path}: none of {MAX_LINES_WITHOUT_TEXT:,} lines has text in {field!r}: "
            "expected one JSON object per line, or an array of objects; name the field with "
            "--text_field"
        )
    skipped["lines"] += 1
    text = value.get(field) if isinstance(value, dict) else None
    if isinstance(text, str):
        # JSON may hold half of a surrogate pair, which is no character.
        yield Document(text.encode(errors="replace").decode())
    else:
        skipped["lines_without_text"] += 1


def _read_dump(unit: Unit, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the articles of a MediaWiki dump, and counts redirects and pages of other kinds.

    Raises ValueError if the file is damaged, or not a MediaWiki dump.
    """
    path, num_pages = unit.source.path, 0
    try:
        for stream in _streams(unit) if is_splittable(unit.source) else [open_unit(unit)]:
            with stream as (content, *_):
                events = ElementTree.iterparse(content, events=("start", "end"))
                _, root = next(events)
                timestamp, text = "", None
                for event, element in events:
                    name = element.tag.rpartition("}")[2]
                    if (event, name) == ("start", "page"):
                        page, timestamp, text = element, "", None
                    elif (event, name) == ("end", "revision"):
                        # A page's history is too long for memory; the newest revision counts.
                        written = element.findtext("{*}timestamp", "")
                        if written >= timestamp:
                            timestamp, text = written, element.findtext("{*}text")
                        page.remove(element)
                    elif (event, name) == ("end", "page"):
                        num_pages += 1
                        if element.findtext("{*}ns") != "0":
                            skipped["pages_of_other_namespaces"] += 1
                        elif element.find("{*}redirect") is not None:
                            skipped["redirects"] += 1
                        elif text:
                            yield Document(text, "wikitext")
                        else:
                            skipped["pages_without_text"] += 1
                        root.clear()  # The root would otherwise keep every page.
    except ElementTree.ParseError as error:
        raise ValueError(
            f"{path} is damaged or cut off after {num_pages} pages ({error}); download it again"
        ) from error
    if not num_pages and unit.count == 1:
        raise ValueError(f"{path} holds no <page>; expected a MediaWiki XML export")


def _streams(unit: Unit) -> Iterator[contextlib.AbstractContextManager]:
    """Yields the streams of a multistream dump that begin in a unit, each as an XML document."""
    with open_unit(unit, decompresses=False) as (stream, start, stop):
        stream.seek(start)
        content, begins, tail = stream.read(stop - start), [], b"-"
        # The last stream of the unit ends where the first of the next unit begins.
        while tail and not (begins and begins[-1] >= stop - start):
            tail = stream.read(1 << 20)
            content += tail
            begins = [match.start() for match in BZIP2_START.finditer(content)]
    if start == 0 and begins[:1] != [0]:
        raise ValueError(f"{unit.source.path} does not begin as a bzip2 file; download it again")
    for begin, after in itertools.pairwise([*begins, len(content)]):
        if begin >= stop - start:
            return
        decompressor, problem = bz2.BZ2Decompressor(), "it is cut off"
        try:
            pages = decompressor.decompress(content[begin:after])
        except (OSError, ValueError, EOFError) as error:
            problem = str(error)
        is_last = start + after == unit.source.size
        # A damaged beginning of a stream looks like garbage after the stream before.
        is_whole = decompressor.eof and not decompressor.unused_data
        if not is_whole or (is_last and not pages.rstrip().endswith(b"</mediawiki>")):
            raise ValueError(
                f"{unit.source.path} is damaged at byte {start + begin} ({problem}); download it "
                "again"
            )
        # The first stream opens the root element, the last closes it.
        pages = re.search(rb"<page>.*</page>|$", pages, re.DOTALL)[0]
        yield contextlib.nullcontext((io.BytesIO(b"<pages>" + pages + b"</pages>"), 0, 0))


def _read_tfds(unit: Unit, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the text field of the examples of a unit, from the train split."""
    del skipped
    name, field = unit.source.path, unit.source.text_field
    source = tfds_source(name, "train", unit.source.data_dir)
    if field not in (fields := source.dataset_info.features):
        raise ValueError(f"{name} has the fields {', '.join(fields)}; expected {field!r}")
    markup = "article" if re.split("[:/]", name)[1] in ARTICLE_SETS else ""
    for index in range(*unit.bounds(len(source))):
        try:
            yield Document(source[index][field].decode(), markup)
        except (AttributeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{name}, {field!r} of example {index}: {error}; expected text"
            ) from None


def _read_hub(unit: Unit, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the text field of the examples of a unit: of some of the files of a dataset."""
    address, field = unit.source.path, unit.source.text_field
    builder, dataset = open_hub(address)
    if builder.hash != unit.source.version:
        raise ValueError(f"{address} was changed while it was read: run the same command again")
    if dataset.column_names and field not in dataset.column_names:
        raise no_column(address, dataset.column_names, field)
    if dataset.column_names:  # They are known before the data are read.
        if getattr(kind := dataset.features[field], "dtype", "") not in ("string", "large_string"):
            raise ValueError(f"column {field!r} of {address} is {kind}; expected string")
        dataset = dataset.select_columns([field])
    for example in dataset.shard(unit.count, unit.index):
        skipped["lines"] += 1
        text = example.get(field)
        if isinstance(text, str):
            yield Document(text)
        else:
            skipped["lines_without_text"] += 1
