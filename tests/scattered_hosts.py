"""One of two processes whose devices take turns in the mesh: checks what each device is given.

`python -m tests.scattered_hosts CORPUS` with the flags that `helpers.launch` adds.
"""

import argparse
import pathlib

import jax
import numpy as np

from bert_jax import partitioning
from bert_jax.data.batches import eval_batches, train_batches
from bert_jax.data.rows import Rows
from bert_jax.runtime import distributed

BATCH = 16


def check(batch: dict, expected: dict) -> int:
    """Compares all that is on this process's devices; returns how many arrays that was."""
    compared = 0
    for name, values in expected.items():
        shards = batch[name].addressable_shards
        # The first of two processes has every other place of the mesh.
        starts = sorted(shard.index[0].start or 0 for shard in shards)
        assert starts == [4 * jax.process_index(), 8 + 4 * jax.process_index()], starts
        for shard in shards:
            np.testing.assert_array_equal(shard.data, values[shard.index])
            compared += 1
    return compared


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("corpus")
    parser.add_argument("--workdir", type=pathlib.Path)
    parser.add_argument("--coordinator")
    parser.add_argument("--num_processes", type=int)
    parser.add_argument("--process_id", type=int)
    given = parser.parse_args()
    distributed.join(
        coordinator=given.coordinator,
        num_processes=given.num_processes,
        process_id=given.process_id,
    )
    devices = np.array(jax.devices())[[0, 2, 1, 3]].reshape(4, 1, 1)
    sharding = partitioning.batch_sharding(jax.sharding.Mesh(devices, partitioning.AXES))
    train, heldout = Rows(given.corpus, "train", shuffle_seed=0), Rows(given.corpus, "heldout")
    compared = 0
    for step, batch in enumerate(train_batches(train, sharding, BATCH, 0, 2)):
        compared += check(batch, train.stream(step * BATCH, (step + 1) * BATCH))
    seen = 0.0
    for number, batch in enumerate(eval_batches(heldout, sharding, BATCH)):
        start, stop = number * BATCH, min((number + 1) * BATCH, heldout.num_rows)
        expected = heldout.stream(start, stop) | {"row_weights": np.ones(stop - start, np.float32)}
        filler = BATCH - (stop - start)
        compared += check(
            batch,
            {
                name: np.pad(values, [(0, filler), *[(0, 0)] * (values.ndim - 1)])
                for name, values in expected.items()
            },
        )
        seen += float(jax.jit(lambda x: x.sum())(batch["row_weights"]))
    assert seen == heldout.num_rows
    print(f"{compared} arrays are as expected")


if __name__ == "__main__":
    main()
