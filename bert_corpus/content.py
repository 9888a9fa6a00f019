"""Detects the format of a file from its first bytes, because names can be wrong."""

import bz2
import json
import lzma
import re
import zlib

from bert_corpus.wikiextractor import is_docs

HEAD_BYTES = 1 << 14  # of a file, in which its format shows
# A bzip2 file can only be read in blocks of up to 900 kB.
COMPRESSED_HEAD_BYTES = {".gz": HEAD_BYTES, ".bz2": 1 << 20, ".zst": 1 << 18, ".xz": 1 << 18}
COMPRESSIONS = {
    ".gz": (b"\x1f\x8b", "gzip"),
    ".bz2": (b"BZh", "bzip2"),
    ".zst": (b"\x28\xb5\x2f\xfd", "zstd"),
    ".xz": (b"\xfd7zXZ\0", "xz"),
}
OTHER_KINDS = {
    b"PAR1": "Parquet; expected the suffix .parquet",
    b"PK\x03\x04": "a ZIP archive; unpack it",
    b"7z\xbc\xaf": "a 7z archive; unpack it",
    b"%PDF": "a PDF document; expected UTF-8 text",
    b"{\\rtf": "an RTF document; expected UTF-8 text",
    b"\xff\xfe": "UTF-16; convert it with iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16; convert it with iconv -f UTF-16 -t UTF-8",
}
CONVERT = "convert it with iconv -f ENCODING -t UTF-8, with the encoding that it has"
MARKUP_START = re.compile(rb"<(\?xml|!doctype\s+html|html)\b", re.IGNORECASE)
# A header, then a line of one-letter codes. Quoted text would begin with "> ".
FASTA_START = re.compile(rb">\S[^\n]*\n(?:[A-Z*-]{10,}|[a-z*-]{10,})\s")
PRETTY_OBJECT = re.compile(rb"\{\s*[\r\n]\s*[\"}]")  # an object that fills several lines
ARRAY_OF_OBJECTS = re.compile(rb"\[\s*\{\s*[\"}]")
OBJECT = re.compile(rb"\{\s*\"(?:[^\"\\]|\\.)*\"\s*:")


def recognize(path: str, named: str, compression: str, head: bytes) -> str:
    """Returns the format of a file: `named`, or another one that its first bytes show.

    `named` is the format that its name says and `compression` its suffix; `head` holds up to
    `COMPRESSED_HEAD_BYTES` of the file. Further formats are "docs", the output of WikiExtractor,
    and "json", an array, or objects that are not one per line. Text that begins as an HTML page is
    one.

    Raises ValueError for a compression that the name does not show, and for content that is not
    text.
    """
    for suffix, (magic, name) in COMPRESSIONS.items():
        if compression == suffix and not head.startswith(magic):
            raise ValueError(
                f"{path} does not begin as a {name} file; download it again, or remove {suffix} "
                "from its name"
            )
        if not compression and head.startswith(magic):
            raise ValueError(f"{path} is compressed with {name}; add {suffix} to its name")
    if named == "dump" and compression:
        return named  # what else it can be is told by the XML parser
    head = _decompressed(head, compression)[:HEAD_BYTES]
    for magic, kind in OTHER_KINDS.items():
        if head.startswith(magic) and named != "dump":
            raise ValueError(f"{path} is {kind}")
    if b"\0" in head and named != "dump":
        raise ValueError(
            f"{path} holds NUL bytes, so it is UTF-16 or no text; expected UTF-8: convert it with "
            "iconv -f UTF-16 -t UTF-8"
        )
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if named == "fasta" and not start.startswith(b">"):
        raise ValueError(
            f"{path} begins with {start[:1].decode('latin-1')!r}; expected FASTA, whose sequences "
            "follow headers that begin with '>'"
        )
    if named in ("fasta", "html", "markdown"):
        return named
    first_line, _, rest = start.partition(b"\n")
    try:
        if is_docs(start.decode("latin-1")):
            return "docs"
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
    if named == "dump" or re.search(rb"<mediawiki\b", head):
        return "dump"
    if match := MARKUP_START.match(start):
        is_page = match[1] != b"?xml" or re.search(rb"<html\b", head)
        if is_page and named == "text":
            return "html"
        kind = "an HTML page" if is_page else "XML"
        raise ValueError(f"{path} is {kind}; expected UTF-8 text, JSON lines or a Wikipedia dump")
    if named == "text" and FASTA_START.match(start):
        raise ValueError(f"{path} looks like FASTA, whose headers ('>') are no text: name it *.fa")
    if named == "table":
        return named
    if PRETTY_OBJECT.match(start) or ARRAY_OF_OBJECTS.match(start):
        return "json"
    if OBJECT.match(start):
        after = _after_object(first_line)
        if after is not None and after.startswith((",", "{")):
            return "json"
        is_cut_off = not rest and len(head) == HEAD_BYTES
        if named == "text" and (is_cut_off or after == ""):
            return "jsonl"
    return named


def _after_object(line: bytes) -> str | None:
    """Returns what follows the JSON object that begins a line, or None if there is none."""
    text = line.decode(errors="replace")
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return text[end:].strip()


def _decompressed(head: bytes, compression: str) -> bytes:
    """Returns the beginning of the content, or as much of it as can be decompressed."""
    try:
        if compression == ".gz":
            return zlib.decompressobj(wbits=31).decompress(head, HEAD_BYTES)
        if compression == ".bz2":
            return bz2.BZ2Decompressor().decompress(head, HEAD_BYTES)
        if compression == ".xz":
            return lzma.LZMADecompressor().decompress(head, HEAD_BYTES)
        if compression == ".zst":
            import pyarrow  # here, because the import takes long

            with pyarrow.CompressedInputStream(pyarrow.BufferReader(head), "zstd") as stream:
                return stream.read(HEAD_BYTES)
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError):
        return b""  # It is damaged, which reading it reports.
    return head
