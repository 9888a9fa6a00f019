"""Opens the files of inputs: decompressed, in lines, and decoded."""

import contextlib
import io
import lzma
import math
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import fsspec

from bert_corpus.content import CONVERT
from bert_corpus.inputs import Unit, format_of

MAX_LINE_BYTES = 1 << 26
# Python's own decompressors ignore garbage after a stream, some also that one is cut off.
CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
COMPRESSED_BYTES = 1 << 16  # of a .xz file, read at once


class Document(NamedTuple):
    """One document, as read from its source."""

    text: str
    # "wikitext" (a dump), "article" (of Wikipedia, without markup), "sequence" (of letters, one
    # sentence), or "": lines.
    markup: str = ""
    continues: bool = False  # a further part of the previous document, which was too long


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
def open_unit(unit: Unit, decompresses: bool = True) -> Iterator[tuple[BinaryIO, int, int]]:
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
        raise_if_unreadable(error)
        raise damaged(unit.source.path, error) from error


def raise_if_unreadable(error: Exception) -> None:
    """Raises an error of the file system or the network: the file may be intact."""
    # Arrow raises a plain OSError without a number for damage.
    if isinstance(error, OSError) and (type(error) is not OSError or error.errno):
        raise error


def damaged(path: str, error: Exception) -> ValueError:
    return ValueError(f"{path} is damaged or cut off ({error}); download it again")


def read_lines(unit: Unit) -> Iterator[tuple[int, int, bytes]]:
    """Yields (offset, where the unit ends, line) for lines that begin in a unit, and all after.

    Raises ValueError for a line that is too long to be text.
    """
    with open_unit(unit) as (stream, start, stop):
        if unit.count == 1:
            stop = math.inf  # The compressed size is no bound of the text.
        # Latin-1 maps each byte to one character, so bytes can be counted; "\r" also ends a line.
        offset = max(start - 1, 0)
        if offset:
            stream.seek(offset)
        lines = io.TextIOWrapper(stream, encoding="latin-1", newline="")
        while line := lines.readline(MAX_LINE_BYTES).encode("latin-1"):
            if len(line) == MAX_LINE_BYTES:
                # Longer than any header, which must not be folded.
                is_fasta = unit.source.format == "fasta"
                fix = "break it with `fold -w 1000000`" if is_fasta else "is it text?"
                raise ValueError(
                    f"{unit.source.path} has a line of over {MAX_LINE_BYTES:,} bytes at byte "
                    f"{offset}; {fix}"
                )
            if offset >= start:
                yield offset, stop, line
            offset += len(line)


def decode_line(line: bytes, offset: int, unit: Unit) -> str:
    """Returns the text of a line that begins at `offset`. Raises ValueError if it is not UTF-8."""
    try:
        return line.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{line_at(unit, offset)}, byte {offset + error.start}: "
            f"0x{line[error.start]:02x} is not UTF-8; {CONVERT}"
        ) from None


def line_at(unit: Unit, offset: int) -> str:
    """Returns "FILE, line N" for the line that begins at an offset."""
    number = 1 + sum(start < offset for start, *_ in read_lines(unit.whole()))
    return f"{unit.source.path}, line {number}"
