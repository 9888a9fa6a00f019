"""How batches of features are divided into what goes through the model at once."""

import pytest

from bert_jax.task_step import fit_chunks


def padding(chunk: int, rows: list[int]) -> int:
    return sum(-count % chunk for count in rows)


@pytest.mark.parametrize("num_shards", [1, 2, 8])
def test_a_chunk_is_divided_among_the_devices_and_no_larger_than_fits(num_shards):
    for most in range(num_shards, 8 * num_shards, num_shards):
        for rows in range(1, 100):
            chunk = fit_chunks(most, [rows], num_shards)
            assert 0 < chunk <= most and chunk % num_shards == 0
            assert padding(chunk, [rows]) <= padding(most, [rows])


@pytest.mark.parametrize(
    ("rows", "chunk"),
    [
        ([3, 3, 3], 3),  # No padding for short texts.
        ([14, 15, 14, 14], 15),
        ([14, 14, 15, 14, 13, 14, 14, 14, 14, 17], 15),  # Two chunks for the rare one.
        ([20, 20], 10),  # Even ones, not 16 and 4.
        ([64, 64], 16),  # And as few as fit.
    ],
)
def test_chunks_hold_batches_with_little_padding(rows, chunk):
    assert fit_chunks(16, rows, 1) == chunk
