"""Sequences of whole sentences, without next-sentence pairs (Liu et al., 2019, section 4.2)."""

from array import array
from collections.abc import Iterable


def make_full_sentences(
    documents: Iterable[list[array]], max_tokens: int, sep_id: int, crosses_documents: bool
) -> list[array]:
    """Returns sequences of consecutive sentences, of at most `max_tokens` token ids each.

    A sequence ends where the next sentence does not fit; only a sentence of more than `max_tokens`
    is cut. If `crosses_documents`, a sequence continues after `sep_id` in the next document;
    otherwise it ends with its document.
    """
    sequences, current = [], array("H")
    for document in documents:
        if not crosses_documents:
            sequences.append(current)
            current = array("H")
        separator = [sep_id]
        for sentence in document:
            for start in range(0, len(sentence), max_tokens):
                piece = sentence[start : start + max_tokens]
                if current and len(current) + len(separator) + len(piece) > max_tokens:
                    sequences.append(current)
                    current = array("H")
                if current:
                    current.extend(separator)
                current.extend(piece)
                separator = []
    return [sequence for sequence in (*sequences, current) if sequence]
