"""The layout of a row, which holds as many sequences as fit, and how sequences are packed."""

import numpy as np


def token_dtype(vocab_size: int) -> str:
    """Returns the name of the smallest dtype, uint16 or uint32, that holds all token ids."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def row_dtype(max_seq_length: int, max_sequences: int, token_dtype: str = "uint16") -> np.dtype:
    """Returns the dtype of a row.

    Fields:
      tokens: `[CLS] first [SEP] second [SEP]`, or `[CLS] first [SEP]`, for each pair, or what the
        layout of the tokenizer has instead; then padding.
      sequence_bounds: (start, second_start, end) of each pair: the positions of its first token, of
        the first token of its second segment (`end` if there is none; beside one text, a [CLS] that
        is last may be one), and one past its last token. All zero in an unused slot.
      nsp_labels: 0 is IsNext, 1 is NotNext; 0 without a second span.
    """
    fields = [
        ("tokens", np.dtype(token_dtype).newbyteorder("<"), (max_seq_length,)),
        ("sequence_bounds", "<u2", (max_sequences, 3)),
        ("nsp_labels", "u1", (max_sequences,)),
    ]
    return np.dtype(fields)


def pack_lengths(lengths: list[int], capacity: int, max_items: int) -> list[list[int]]:
    """Packs items by best fit decreasing; returns the indices of the items in each row.

    A bit set finds the open row with the smallest sufficient room in constant time. Items of equal
    length keep their order, so shuffle them to mix their sources.
    """
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by remaining room
    rooms = 0  # bit r is set if some open row has room r
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        length = lengths[item]
        if sufficient := rooms >> length:
            room = length + (sufficient & -sufficient).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(item)
        room -= length
        if room and len(rows[row]) < max_items:
            open_rows[room].append(row)
            rooms |= 1 << room
    return rows
