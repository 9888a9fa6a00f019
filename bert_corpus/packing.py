"""Packs sentence pairs into rows."""

import random
from array import array

import numpy as np

from bert_corpus.pairs import Pair
from bert_jax.data.packing import pack_lengths, row_dtype


def pack_pairs(
    pairs: list[Pair],
    max_seq_length: int,
    max_sequences: int,
    special_ids: tuple[int, int, int],
    rng: random.Random,
    typecode: str = "H",
) -> np.ndarray:
    """Packs pairs into rows of `row_dtype`; `special_ids` are of [PAD], [CLS] and [SEP].

    `typecode` is of the arrays of token ids: "H" (uint16) or "I" (uint32).
    Shuffles `pairs` in place, so that pairs of one document share a row only by chance.
    """
    pad_id, cls_id, sep_id = special_ids
    rng.shuffle(pairs)
    lengths = [len(p.first) + 2 + len(p.second) + bool(p.second) for p in pairs]
    packed = pack_lengths(lengths, max_seq_length, max_sequences)
    rows = np.zeros(len(packed), row_dtype(max_seq_length, max_sequences, np.dtype(typecode).name))
    rows["tokens"] = pad_id
    for row, members in zip(rows, packed, strict=True):
        tokens = array(typecode)
        for slot, member in enumerate(members):
            first, second, nsp_label, *_ = pairs[member]
            start = len(tokens)
            tokens.append(cls_id)
            tokens.extend(first)
            tokens.append(sep_id)
            if second:
                tokens.extend(second)
                tokens.append(sep_id)
            row["sequence_bounds"][slot] = (start, start + len(first) + 2, len(tokens))
            row["nsp_labels"][slot] = nsp_label
        row["tokens"][: len(tokens)] = tokens
    return rows
