import random

import numpy as np

from bert_corpus.packing import pack_pairs
from bert_corpus.pairs import Pair
from bert_jax.data.packing import pack_lengths, row_dtype
from bert_jax.tokenizers.stored import Layout


def random_pairs(count, longest=60, seed=0):
    rng = random.Random(seed)
    return [
        Pair(
            [rng.randrange(5, 100) for _ in range(rng.randint(1, longest))],
            [rng.randrange(5, 100) for _ in range(rng.randint(1, longest))],
            rng.randrange(2),
        )
        for _ in range(count)
    ]


def test_row_dtype_has_the_documented_layout():
    dtype = row_dtype(128, 8)
    assert dtype.names == ("tokens", "sequence_bounds", "nsp_labels")
    assert dtype["tokens"].shape == (128,) and dtype["tokens"].base == np.dtype("<u2")
    assert dtype["sequence_bounds"].shape == (8, 3) and dtype["sequence_bounds"].base == np.dtype(
        "<u2"
    )
    assert dtype["nsp_labels"].shape == (8,) and dtype["nsp_labels"].base == np.uint8
    assert dtype.itemsize == 128 * 2 + 8 * 3 * 2 + 8


def test_rows_hold_every_pair_once_and_unchanged():
    pairs = random_pairs(500)
    expected = sorted(pairs)
    rows = pack_pairs(list(pairs), 128, 4, (9, 2, 3), random.Random(0))
    unpacked = []
    for row in rows:
        previous_end = 0
        for (start, second_start, end), label in zip(
            row["sequence_bounds"].tolist(), row["nsp_labels"].tolist(), strict=True
        ):
            if end == 0:
                assert (start, second_start, label) == (0, 0, 0)
                continue
            tokens = row["tokens"].tolist()
            assert start == previous_end
            assert tokens[start] == 2 and tokens[second_start - 1] == 3 and tokens[end - 1] == 3
            unpacked.append(
                Pair(tokens[start + 1 : second_start - 1], tokens[second_start : end - 1], label)
            )
            previous_end = end
        assert (row["tokens"][previous_end:] == 9).all()
    assert sorted(unpacked) == expected


def test_cls_ends_a_sequence_where_the_tokenizer_puts_it():
    pairs = [Pair([5, 6], [7], 1), Pair([8, 9, 10, 11], [], 0)]
    for layout, seconds in (
        (Layout(cls_last=True), (3, 5)),
        (Layout(1, False, cls_last=True), (3, 6)),
    ):
        (row,) = pack_pairs(list(pairs), 16, 2, (0, 2, 3), random.Random(0), layout=layout)
        assert row["tokens"].tolist() == [5, 6, 3, 7, 3, 2, 8, 9, 10, 11, 3, 2, 0, 0, 0, 0] or (
            row["tokens"].tolist() == [8, 9, 10, 11, 3, 2, 5, 6, 3, 7, 3, 2, 0, 0, 0, 0]
        )
        for start, second, end in row["sequence_bounds"].tolist():
            is_pair = row["tokens"][start] == 5
            assert (second - start, end - start) == (seconds[not is_pair], 6)


def test_packing_respects_row_length_and_number_of_pairs():
    rng = random.Random(0)
    lengths = [rng.randint(1, 50) for _ in range(2000)]
    rows = pack_lengths(lengths, 50, 5)
    assert sorted(item for row in rows for item in row) == list(range(2000))
    assert max(sum(lengths[item] for item in row) for row in rows) <= 50
    assert max(len(row) for row in rows) <= 5


def test_packing_fills_rows_to_97_percent():
    rng = random.Random(0)
    lengths = [rng.randint(5, 128) for _ in range(2000)]
    rows = pack_lengths(lengths, 128, 8)
    assert sum(lengths) / (128 * len(rows)) > 0.97


def test_no_pairs_give_no_rows():
    assert pack_pairs([], 16, 2, (0, 2, 3), random.Random(0)).shape == (0,)
