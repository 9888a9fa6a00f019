"""Packs sentence pairs into rows."""

import random
from array import array

import numpy as np

from bert_corpus.pairs import Pair
from bert_jax.data.packing import pack_lengths, row_dtype
from bert_jax.tokenizers.stored import Layout

BERT_LAYOUT = Layout()


def pack_pairs(
    pairs: list[Pair],
    max_seq_length: int,
    max_sequences: int,
    special_ids: tuple[int, int, int],
    rng: random.Random,
    typecode: str = "H",
    layout: Layout = BERT_LAYOUT,
) -> np.ndarray:
    """Packs pairs into rows of `row_dtype`; `special_ids` are of [PAD], [CLS] and [SEP].

    `typecode` is of the arrays of token ids: "H" (uint16) or "I" (uint32). `layout` is the
    tokenizer's.
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
            if not layout.cls_last:
                tokens.append(cls_id)
            tokens.extend(first)
            tokens.append(sep_id)
            second_start = len(tokens)
            if second:
                tokens.extend(second)
                tokens.append(sep_id)
            if layout.cls_last:  # In segment 1, beside one text.
                tokens.append(cls_id)
            if not second and not (layout.cls_last and layout.has_segments):
                second_start = len(tokens)
            row["sequence_bounds"][slot] = (start, second_start, len(tokens))
            row["nsp_labels"][slot] = nsp_label
        row["tokens"][: len(tokens)] = tokens
    return rows
