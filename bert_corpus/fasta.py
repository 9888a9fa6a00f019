"""Reads FASTA files: sequences of nucleotides or amino acids, each after a header."""

import codecs
import collections
import itertools
import re
import string
from collections.abc import Iterator

from bert_corpus.files import Document, line_at, read_lines
from bert_corpus.inputs import Unit

# About twice the longest protein. A chromosome becomes many documents, some of which can be held
# out, and no row is longer.
MAX_LETTERS = 1 << 16
GAP = re.compile(r"N{100,}")  # in an assembly: unknown bases, often of unknown number
# Codes of the IUPAC, "*" of a stop codon, and "-" or "." of a gap in an alignment.
SYMBOLS = string.ascii_letters.encode() + b"*-."
LOWER_CASE = string.ascii_lowercase.encode()


def read_fasta(unit: Unit, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the sequences whose headers (">") begin in a unit, in upper case.

    One of more than `MAX_LETTERS` letters is cut into documents of that length, and at gaps, which
    are left out. So is "*", the stop, at the end of a sequence. Counts the headers and what is left
    out or changed. Raises ValueError for a character that is no symbol of a sequence.
    """
    letters, is_empty, is_ours = bytearray(), False, unit.index == 0
    for offset, stop, line in itertools.chain(read_lines(unit), [(0, 0, b">")]):  # At the end.
        line = line.removeprefix(codecs.BOM_UTF8)
        is_header = line.startswith(b">")
        if is_header and is_ours:
            sequence = letters.rstrip(b"*")
            skipped["stops_at_the_end"] += len(letters) - len(sequence)
            yield from _documents(sequence, skipped)
            skipped["headers_without_sequence"] += is_empty
        if is_header:
            letters, is_empty, is_ours = bytearray(), True, offset < stop
            skipped["sequence_headers"] += is_ours
        elif is_ours:
            symbols = b"".join(line.split())
            _check_symbols(symbols, unit, offset)
            skipped["letters_in_lower_case"] += len(symbols) - len(
                symbols.translate(None, LOWER_CASE)
            )
            letters += symbols.upper()
            is_empty = is_empty and not symbols
        if not is_ours and offset >= stop:
            return
        while len(letters) > MAX_LETTERS:  # So that the last letter is there at the end.
            yield from _documents(letters[:MAX_LETTERS], skipped)
            del letters[:MAX_LETTERS]


def _check_symbols(symbols: bytes, unit: Unit, offset: int) -> None:
    """Raises ValueError, naming the line at `offset`, for what is no symbol of a sequence."""
    if other := symbols.translate(None, SYMBOLS):
        raise ValueError(
            f"{line_at(unit, offset)}: {other[:1].decode('latin-1')!r} is no symbol of a sequence; "
            "expected letters, '*', '-' or '.', and headers that begin with '>'"
        )


def _documents(sequence: bytes, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the parts of a sequence between gaps; counts the letters of these."""
    parts = GAP.split(sequence.decode())
    skipped["letters_in_gaps"] += len(sequence) - sum(map(len, parts))
    for part in filter(None, parts):
        yield Document(part, "sequence")
