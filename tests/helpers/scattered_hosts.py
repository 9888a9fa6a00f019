"""Checks the rows on each device when the devices of two processes alternate in the mesh.

`python -m tests.helpers.scattered_hosts CORPUS` with the flags that `commands.launch` adds.
"""

import argparse
import pathlib

import jax
import numpy as np

from bert_jax.data.batches import heldout_batches, pretrain_batches
from bert_jax.data.row_stream import RowStream
from bert_jax.data.rows import Rows
from bert_jax.runtime import distributed
from bert_jax.sharding.mesh import batch_sharding, make_mesh

BATCH = 16


def check(batch: dict, expected: dict) -> int:
    """Compares the shards on this process's devices, and returns their number."""
    compared = 0
    for name, values in expected.items():
        shards = batch[name].addressable_shards
        # Each of the two processes has every other device of the mesh.
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
    args = parser.parse_args()
    distributed.initialize(
        coordinator=args.coordinator,
        num_processes=args.num_processes,
        process_id=args.process_id,
    )
    mesh = make_mesh(devices=[jax.devices()[index] for index in (0, 2, 1, 3)])
    sharding = batch_sharding(mesh)
    heldout = Rows(args.corpus, "heldout")
    mixed = [Rows(args.corpus, split, shuffle_seed=0) for split in ("train", "heldout")]
    train = RowStream(mixed, weights=(0.7, 0.3), first_rows=(0, 0))
    compared = 0
    for step, batch in enumerate(pretrain_batches(train, sharding, BATCH, 0, 2)):
        compared += check(batch, train.read(step * BATCH, (step + 1) * BATCH))
    seen = 0.0
    for number, batch in enumerate(heldout_batches(heldout, sharding, BATCH)):
        start, stop = number * BATCH, min((number + 1) * BATCH, heldout.num_rows)
        expected = heldout.read(start, stop)
        padding = BATCH - (stop - start)
        compared += check(
            batch,
            {
                name: np.pad(values, [(0, padding), *[(0, 0)] * (values.ndim - 1)])
                for name, values in expected.items()
            },
        )
        seen += float(jax.jit(lambda x: x.sum())(batch["tokens"].any(axis=1)))
    assert seen == heldout.num_rows
    print(f"{compared} arrays are as expected")


if __name__ == "__main__":
    main()
