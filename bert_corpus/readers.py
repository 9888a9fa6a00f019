"""Reads documents from text, JSON, Parquet, Wikipedia dumps and TFDS, also on buckets.

An input is read in parts, each by one worker: a range of the bytes of plain text, JSON lines,
WikiExtractor's output and multistream dumps, of the row groups of Parquet, of the examples of TFDS.
Other compressed files and JSON arrays cannot be read from the middle: each worker reads all, and
takes every n-th document.
"""

import bz2
import codecs
import collections
import contextlib
import io
import itertools
import json
import lzma
import math
import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple
from xml.etree import ElementTree

import fsspec

from bert_corpus.content import CONVERT
from bert_corpus.inputs import Unit, format_of, is_splittable
from bert_corpus.json_values import json_values
from bert_corpus.wikiextractor import WRAPPERS, article_text, split_line
from bert_corpus.words import cut_text
from bert_jax.data.tfds import tfds_source

# Longer documents are cut, which bounds memory for files without blank lines.
MAX_DOCUMENT_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 26
MAX_LINES_WITHOUT_TEXT = 1000  # of JSON, at the beginning of a unit
# Each stream of a multistream dump begins so: a header, and the magic number of a block.
BZIP2_START = re.compile(rb"BZh[1-9]1AY&SY")
# Python's own decompressors ignore garbage after a stream, some also that one is cut off.
CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
COMPRESSED_BYTES = 1 << 16  # of a .xz file, read at once
ARTICLE_SETS = ("wikipedia", "wiki40b")  # TFDS datasets of Wikipedia articles without markup


class Document(NamedTuple):
    """One document, as read from its source."""

    text: str
    markup: str = ""  # "wikitext" (a dump), "article" (`ARTICLE_SETS`), or "": lines
    continues: bool = False  # a further part of the previous document, which was too long


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
        "parquet": _read_parquet,
        "tfds": _read_tfds,
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


class XzReader(io.RawIOBase):
    """Reads a .xz file to its end as `xz -d` does: one stream after another, with any padding.

    Python's LZMAFile mistakes a damaged start of a later stream for the end of the file. Raises
    LZMAError or EOFError for a file that is damaged or truncated.
    """

    def __init__(self, compressed: BinaryIO):
        self._compressed = compressed
        self._decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        content = b""
        while not content:
            if self._decompressor.eof:
                data = self._next_stream()
                if not data:
                    break
                self._decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ)
            elif self._decompressor.needs_input:
                data = self._compressed.read(COMPRESSED_BYTES)
                if not data:
                    raise EOFError("its last stream is truncated")
            else:
                data = b""
            content = self._decompressor.decompress(data, len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def _next_stream(self) -> bytes:
        """Returns the beginning of the next stream, b"" at the end of the file."""
        data, num_zeros = self._decompressor.unused_data, 0
        while data := data or self._compressed.read(COMPRESSED_BYTES):
            stream = data.lstrip(b"\0")
            num_zeros += len(data) - len(stream)
            data = b""
            if stream:
                break
        else:
            stream = b""
        if num_zeros % 4:
            raise lzma.LZMAError(f"{num_zeros} zeros after a stream, expected a multiple of 4")
        return stream


@contextlib.contextmanager
def _open(unit: Unit, decompresses: bool = True) -> Iterator[tuple[BinaryIO, int, int]]:
    """Opens a file, decompressed; yields it, and the bytes at which a unit begins and ends."""
    suffix = format_of(unit.source.path)[1] if decompresses else ""
    try:
        with fsspec.open(unit.source.path, "rb") as stream:
            if suffix == ".xz":
                stream = io.BufferedReader(XzReader(stream), COMPRESSED_BYTES)
            elif suffix:
                import pyarrow  # here, because the import takes long

                stream = pyarrow.CompressedInputStream(stream, CODECS[suffix])
            yield stream, *unit.bounds(unit.source.size)
    except (OSError, EOFError, lzma.LZMAError) as error:
        _raise_if_unreadable(error)
        raise _damaged(unit.source.path, error) from error


def _raise_if_unreadable(error: Exception) -> None:
    """Raises an error of the file system or the network: the file may be intact."""
    # Arrow raises a plain OSError without a number for damage.
    if isinstance(error, OSError) and (type(error) is not OSError or error.errno):
        raise error


def _damaged(path: str, error: Exception) -> ValueError:
    return ValueError(f"{path} is damaged or cut off ({error}); download it again")


def _read_lines(unit: Unit) -> Iterator[tuple[int, int, bytes]]:
    """Yields (offset, where the unit ends, line) for lines that begin in a unit, and all after.

    Raises ValueError for a line that is too long to be text.
    """
    with _open(unit) as (stream, start, stop):
        if unit.count == 1:
            stop = math.inf  # The compressed size is no bound of the text.
        # Latin-1 maps each byte to one character, so bytes can be counted; "\r" also ends a line.
        offset = max(start - 1, 0)
        if offset:
            stream.seek(offset)
        lines = io.TextIOWrapper(stream, encoding="latin-1", newline="")
        while line := lines.readline(MAX_LINE_BYTES).encode("latin-1"):
            if len(line) == MAX_LINE_BYTES:
                raise ValueError(
                    f"{unit.source.path} has a line of over {MAX_LINE_BYTES:,} bytes at byte "
                    f"{offset}; is it text?"
                )
            if offset >= start:
                yield offset, stop, line
            offset += len(line)


def _read_text(unit: Unit, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the documents of a UTF-8 file: between blank lines, or (format "file") all of it.

    A document belongs to the unit in which the blank line before it begins. Raises ValueError if a
    byte is not valid UTF-8.
    """
    del skipped
    is_one_document = unit.source.format == "file"
    lines, document_bytes, continues = [], 0, False
    is_ours = unit.index == 0
    for offset, stop, line in itertools.chain(_read_lines(unit), [(0, 0, b"")]):  # At the end.
        text = _decode(line, offset, unit)
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
    for offset, stop, line in _read_lines(unit):
        if offset >= stop:
            return
        if text := _decode(line, offset, unit).strip():
            yield Document(f"{text}\n")


def _decode(line: bytes, offset: int, unit: Unit) -> str:
    """Returns the text of a line that begins at `offset`. Raises ValueError if it is not UTF-8."""
    try:
        return line.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        line_number = 1 + sum(start < offset for start, *_ in _read_lines(unit.whole()))
        raise ValueError(
            f"{unit.source.path}, line {line_number}, byte {offset + error.start}: "
            f"0x{line[error.start]:02x} is not UTF-8; {CONVERT}"
        ) from None


def _read_docs(unit: Unit, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the articles of WikiExtractor's output, `<doc ...>` to `</doc>`, without their titles.

    An article belongs to the unit in which the line of its `<doc>` begins. Raises ValueError for an
    article that is not closed, or as `split_line`.
    """
    lines: list[str] | None = None  # of the article that is open
    title, has_begun = "", False
    for offset, stop, line in _read_lines(unit):
        if lines is None and offset >= stop:
            return
        decoded, place = _decode(line, offset, unit), f"{unit.source.path}, byte {offset}"
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
    for offset, stop, line in _read_lines(unit):
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
    with _open(unit) as (stream, *_):
        try:
            for value in json_values(io.TextIOWrapper(stream, encoding="utf-8-sig")):
                yield from _document_of_json(value, unit, skipped)
        except UnicodeDecodeError as error:
            raise ValueError(f"{unit.source.path} is not UTF-8 ({error}); {CONVERT}") from None
        except (json.JSONDecodeError, RecursionError) as error:
            raise _damaged(unit.source.path, error) from None


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


def _read_parquet(unit: Unit, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the text field of the row groups of a unit."""
    import pyarrow  # here, because the imports take long
    from pyarrow import parquet

    strings = pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()
    path, field = unit.source.path, unit.source.text_field
    try:
        with fsspec.open(path, "rb") as stream:
            file = parquet.ParquetFile(stream, page_checksum_verification=True)
            names = file.schema_arrow.names
            if field not in names:
                raise ValueError(
                    f"{path} has the columns {', '.join(names)}; expected {field!r}: name the "
                    "column with --text_field"
                )
            kind = file.schema_arrow.field(field).type
            kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if not any(map(kind.equals, strings)):
                raise ValueError(f"column {field!r} of {path} is {kind}; expected string")
            groups = range(*unit.bounds(file.num_row_groups))
            for batch in file.iter_batches(1024, groups, [field]):
                for text in batch.column(0).to_pylist():
                    skipped["lines"] += 1
                    if isinstance(text, str):
                        yield Document(text)
                    else:
                        skipped["lines_without_text"] += 1
    except (OSError, pyarrow.ArrowException) as error:
        _raise_if_unreadable(error)
        raise _damaged(path, error) from error


def _read_dump(unit: Unit, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the articles of a MediaWiki dump, and counts redirects and pages of other kinds.

    Raises ValueError if the file is damaged, or not a MediaWiki dump.
    """
    path, num_pages = unit.source.path, 0
    try:
        for stream in _streams(unit) if is_splittable(unit.source) else [_open(unit)]:
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
    with _open(unit, decompresses=False) as (stream, start, stop):
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
