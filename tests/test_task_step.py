"""How a batch of features is divided into what goes through the model at once."""

import pytest

from bert_jax.task_step import fit_chunks


@pytest.mark.parametrize("num_shards", [1, 2, 8])
def test_chunks_hold_a_batch_with_less_than_a_row_to_spare_for_each_chunk_and_device(num_shards):
    for most in range(num_shards, 8 * num_shards, num_shards):
        for rows in range(1, 100):
            chunk = fit_chunks(most, rows, num_shards)
            chunks = -(-rows // chunk)
            assert 0 < chunk <= most and chunk % num_shards == 0
            assert chunks <= -(-rows // most)
            assert rows <= chunks * chunk < rows + chunks * num_shards
