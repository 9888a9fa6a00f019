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
MIN_GAP = 100
# In an assembly: unknown bases, often of unknown number.
GAP = re.compile(rb"N{%d,}" % MIN_GAP)
# Codes of the IUPAC, "*" of a stop codon, and "-" or "." of a gap in an alignment.
SYMBOLS = string.ascii_letters.encode() + b"*-."
LOWER_CASE = string.ascii_lowercase.encode()


def read_fasta(unit: Unit, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the sequences whose headers (">") begin in a unit, in upper case.

    A sequence is split at gaps, which are left out; parts of over `MAX_LETTERS` letters are cut
    into documents of that length. "*", the stop, is left out at the end of a sequence. Counts the
    headers and what is left out or changed. Raises ValueError for a character that is not valid in
    a sequence.
    """
    letters, is_empty, is_ours = bytearray(), False, unit.index == 0
    for offset, stop, line in itertools.chain(read_lines(unit), [(0, 0, b">")]):  # At the end.
        line = line.removeprefix(codecs.BOM_UTF8)
        is_header = line.startswith(b">")
        if is_header and is_ours:
            sequence = letters.rstrip(b"*")
            skipped["stops_at_the_end"] += len(letters) - len(sequence)
            documents, _ = _cut(sequence, skipped, is_end=True)
            yield from documents
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
        if len(letters) > MAX_LETTERS:
            documents, letters = _cut(letters, skipped, is_end=False)
            yield from documents


def _check_symbols(symbols: bytes, unit: Unit, offset: int) -> None:
    """Raises ValueError, naming the line at `offset`, for what is not valid in a sequence."""
    if other := symbols.translate(None, SYMBOLS):
        raise ValueError(
            f"{line_at(unit, offset)}: {other[:1].decode('latin-1')!r} is not a valid sequence "
            "character; expected letters, '*', '-' or '.', and headers that begin with '>'"
        )


def _cut(
    letters: bytearray, skipped: collections.Counter, is_end: bool
) -> tuple[list[Document], bytearray]:
    """Returns the parts of a sequence between gaps, cut into documents, and the letters left.

    Before the end of the sequence, what may continue is left: `MIN_GAP` letters of a gap, or up to
    `MAX_LETTERS` of a part and any "N" that follow. Counts the letters in gaps.
    """
    *parts, last = GAP.split(letters)
    rest = b""
    if is_end:
        parts.append(last)
    elif not last:
        rest = b"N" * MIN_GAP
    else:
        # One letter or more remains, so that a trailing "*" can be stripped at the end.
        num_pieces = max(len(last.rstrip(b"N")) - 1, 0) // MAX_LETTERS
        parts.append(last[: num_pieces * MAX_LETTERS])
        rest = last[num_pieces * MAX_LETTERS :]
    skipped["letters_in_gaps"] += len(letters) - sum(map(len, parts)) - len(rest)
    documents = [
        Document(part[start : start + MAX_LETTERS].decode(), "sequence")
        for part in parts
        for start in range(0, len(part), MAX_LETTERS)
    ]
    return documents, bytearray(rest)
