"""Sequences without next-sentence pairs: of whole sentences, or of any consecutive tokens."""

from array import array
from collections.abc import Iterable


def make_full_sentences(
    documents: Iterable[list[array]],
    max_tokens: int,
    sep_id: int,
    crosses_documents: bool,
    typecode: str = "H",
) -> list[array]:
    """Returns sequences of consecutive sentences, of at most `max_tokens` token ids each.

    From Liu et al. (2019), section 4.2.
    A sequence ends where the next sentence does not fit; only a sentence of more than `max_tokens`
    is cut. If `crosses_documents`, a sequence continues after `sep_id` in the next document;
    otherwise it ends with its document.
    """
    sequences, current = [], array(typecode)
    for document in documents:
        if not crosses_documents:
            sequences.append(current)
            current = array(typecode)
        separator = [sep_id]
        for sentence in document:
            for start in range(0, len(sentence), max_tokens):
                piece = sentence[start : start + max_tokens]
                if current and len(current) + len(separator) + len(piece) > max_tokens:
                    sequences.append(current)
                    current = array(typecode)
                if current:
                    current.extend(separator)
                current.extend(piece)
                separator = []
    return [sequence for sequence in (*sequences, current) if sequence]


def make_segments(
    documents: Iterable[list[array]], max_tokens: int, typecode: str = "H"
) -> list[array]:
    """Returns segments of `max_tokens` consecutive token ids of a document; its last is the rest.

    From Joshi et al. (2020), section 3.3, which trains on single segments.
    """
    segments = []
    for document in documents:
        tokens = array(typecode)
        for sentence in document:
            tokens.extend(sentence)
        segments += (tokens[n : n + max_tokens] for n in range(0, len(tokens), max_tokens))
    return segments
