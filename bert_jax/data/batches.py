"""Global batches on the mesh: batch `s` is a function of (seed, s), whatever reads it."""

import itertools
from collections.abc import Iterator

import grain
import jax
import numpy as np

from bert_jax.data.rows import Rows


def place(batch: dict[str, np.ndarray], sharding: jax.sharding.Sharding) -> dict[str, jax.Array]:
    """This process's rows (in order of their place in the batch) -> global device arrays."""
    return {
        name: jax.make_array_from_process_local_data(sharding, array)
        for name, array in batch.items()
    }


def local_rows(sharding: jax.sharding.Sharding, batch_size: int) -> tuple[int, int]:
    """The rows [start, stop) of a global batch that the devices of this process hold.

    Raises ValueError if `batch_size` is not divisible by the devices that share a batch, or if
    the process's devices do not hold neighbouring rows.
    """
    # In a batch as large as the devices are many, each holds a slice of its number of copies.
    num_shards = sharding.num_devices // sharding.shard_shape((sharding.num_devices,))[0]
    if batch_size % num_shards:
        raise ValueError(
            f"batch_size {batch_size} is not divisible by the {num_shards} devices (mesh axes data "
            f"x fsdp) that share a batch: choose a multiple of {num_shards}"
        )
    slices = sharding.addressable_devices_indices_map((batch_size,)).values()
    bounds = sorted({piece[0].indices(batch_size)[:2] for piece in slices})
    for (_, stop), (start, _) in itertools.pairwise(bounds):
        if stop != start:
            raise ValueError(f"this process's devices hold rows {bounds}, which do not adjoin")
    return bounds[0][0], bounds[-1][1]


class _LocalBatches:
    """Random access to this process's part of each training batch, for Grain to prefetch."""

    def __init__(self, rows: Rows, batch_size: int, num_steps: int, local: tuple[int, int]):
        self.rows, self.batch_size, self.num_steps, self.local = rows, batch_size, num_steps, local

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        first = step * self.batch_size
        return self.rows.stream(first + self.local[0], first + self.local[1])


def train_batches(
    rows: Rows, sharding: jax.sharding.Sharding, batch_size: int, start: int, stop: int
) -> Iterator[dict[str, jax.Array]]:
    """Batches `start` to `stop` of the endless shuffled stream of rows, read ahead by threads.

    Each is what `Rows.stream` returns for rows `[s * batch_size, (s + 1) * batch_size)`. No row of
    an epoch is dropped: a batch may hold the end of one and the beginning of the next.
    """
    source = _LocalBatches(rows, batch_size, stop, local_rows(sharding, batch_size))
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    dataset = grain.MapDataset.source(source).slice(slice(start, stop)).to_iter_dataset(options)
    return (place(batch, sharding) for batch in dataset)


def eval_batches(
    rows: Rows, sharding: jax.sharding.Sharding, batch_size: int
) -> Iterator[dict[str, jax.Array]]:
    """Every row of a split once, in order; `row_weights` is 0 where the last batch is filled up."""
    return (place(batch, sharding) for batch in local_eval_batches(rows, sharding, batch_size))


def local_eval_batches(
    rows: Rows, sharding: jax.sharding.Sharding, batch_size: int
) -> Iterator[dict[str, np.ndarray]]:
    """This process's part of each evaluation batch; every process has as many, of one size."""
    start, stop = local_rows(sharding, batch_size)
    for first in range(0, rows.num_rows, batch_size):
        ends = [min(first + place, rows.num_rows) for place in (start, stop)]
        batch = rows.stream(*ends)
        filler = (stop - start) - (ends[1] - ends[0])
        batch["row_weights"] = np.ones(ends[1] - ends[0], np.float32)
        yield {
            name: np.concatenate([array, np.zeros((filler, *array.shape[1:]), array.dtype)])
            for name, array in batch.items()
        }
