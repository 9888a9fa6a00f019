"""Global batches on the mesh: batch `s` is a function of (seed, s), whatever reads it."""

import math
from collections.abc import Iterator

import grain
import jax
import numpy as np

from bert_jax.data.rows import Rows


def place(
    batch: dict[str, np.ndarray], sharding: jax.sharding.Sharding, batch_size: int
) -> dict[str, jax.Array]:
    """This process's rows (in order of their place in the batch) -> global device arrays."""
    return {
        name: jax.make_array_from_process_local_data(
            sharding, array, (batch_size, *array.shape[1:])
        )
        for name, array in batch.items()
    }


def local_rows(sharding: jax.sharding.Sharding, batch_size: int) -> list[tuple[int, int]]:
    """The rows of a global batch that the devices of this process hold: [start, stop), ascending.

    Several ranges, where neighbours in the mesh are not of one host: on TPU pods the mesh follows
    the links between the chips. Raises ValueError if `batch_size` is not divisible by the devices
    that share a batch.
    """
    # In a batch as large as the devices are many, each holds a slice of its number of copies.
    num_shards = sharding.num_devices // sharding.shard_shape((sharding.num_devices,))[0]
    if batch_size % num_shards:
        raise ValueError(
            f"batch_size {batch_size} is not divisible by the {num_shards} devices (mesh axes data "
            f"x fsdp) that share a batch: choose a multiple of {num_shards}"
        )
    slices = sharding.addressable_devices_indices_map((batch_size,)).values()
    ranges = []
    for start, stop in sorted({piece[0].indices(batch_size)[:2] for piece in slices}):
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, stop))
    return ranges


def take(array: np.ndarray, ranges: list[tuple[int, int]]) -> np.ndarray:
    """The rows of `array` in these `ranges`."""
    return np.concatenate([array[start:stop] for start, stop in ranges])


def _read(rows: Rows, first: int, ranges: list[tuple[int, int]]) -> dict[str, np.ndarray]:
    """The rows in these `ranges` of the batch that begins at `first`, as far as there are any."""
    most = math.inf if rows.shuffle_seed is not None else rows.num_rows
    parts = [rows.stream(*(min(first + place, most) for place in each)) for each in ranges]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class _LocalBatches:
    """Random access to this process's part of each training batch, for Grain to prefetch."""

    def __init__(self, rows: Rows, batch_size: int, num_steps: int, local: list[tuple[int, int]]):
        self.rows, self.batch_size, self.num_steps, self.local = rows, batch_size, num_steps, local

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        return _read(self.rows, step * self.batch_size, self.local)


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
    return (place(batch, sharding, batch_size) for batch in dataset)


def eval_batches(
    rows: Rows, sharding: jax.sharding.Sharding, batch_size: int
) -> Iterator[dict[str, jax.Array]]:
    """Every row of a split once, in order; `row_weights` is 0 where the last batch is filled up."""
    batches = local_eval_batches(rows, sharding, batch_size)
    return (place(batch, sharding, batch_size) for batch in batches)


def local_eval_batches(
    rows: Rows, sharding: jax.sharding.Sharding, batch_size: int
) -> Iterator[dict[str, np.ndarray]]:
    """This process's part of each evaluation batch; every process has as many, of one size."""
    local = local_rows(sharding, batch_size)
    size = sum(stop - start for start, stop in local)
    for first in range(0, rows.num_rows, batch_size):
        batch = _read(rows, first, local)
        batch["row_weights"] = np.ones(len(batch["row_ids"]), np.float32)
        filler = size - len(batch["row_ids"])  # What is missing are the last ones.
        yield {
            name: np.concatenate([array, np.zeros((filler, *array.shape[1:]), array.dtype)])
            for name, array in batch.items()
        }
