"""Global batches on the mesh. Batch `s` is a function of (seed, s), whichever hosts read it."""

import math
from collections.abc import Iterator

import grain
import jax
import numpy as np

from bert_jax.data.packing import row_dtype
from bert_jax.data.row_stream import RowStream
from bert_jax.data.rows import Rows


def make_global_batch(
    batch: dict[str, np.ndarray], sharding: jax.sharding.Sharding, batch_size: int
) -> dict[str, jax.Array]:
    """Builds global arrays on the devices from this process's rows, in ascending order."""
    return {
        name: jax.make_array_from_process_local_data(
            sharding, array, (batch_size, *array.shape[1:])
        )
        for name, array in batch.items()
    }


def abstract_rows(
    rows, num_rows: int, sharding: jax.sharding.Sharding | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes, dtypes and any sharding of a global batch of `num_rows` rows.

    `rows` is the corpus, or any object with its `max_seq_length` and `max_sequences`.
    """
    row = row_dtype(rows.max_seq_length, rows.max_sequences)
    fields = {name: row[name] for name in row.names}
    fields |= dict.fromkeys(("row_ids", "epochs", "stream_positions"), np.dtype(np.uint32))
    return {
        name: jax.ShapeDtypeStruct((num_rows, *field.shape), field.base, sharding=sharding)
        for name, field in fields.items()
    }


def local_row_ranges(sharding: jax.sharding.Sharding, batch_size: int) -> list[tuple[int, int]]:
    """Returns the rows of a global batch on this process's devices, as ascending [start, stop)."""
    slices = sharding.addressable_devices_indices_map((batch_size,)).values()
    ranges = []  # Several if this host's devices are not neighbors in the mesh.
    for start, stop in sorted({rows.indices(batch_size)[:2] for (rows,) in slices}):
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, stop))
    return ranges


def _read(
    rows: Rows | RowStream, first: int, ranges: list[tuple[int, int]]
) -> dict[str, np.ndarray]:
    """Reads `ranges` of the batch that starts at row `first`; an unshuffled split may end in it.

    Adds uint32 `stream_positions`, the positions of the rows in their stream, modulo 2^32.
    """
    end = math.inf if rows.shuffle_seed is not None else rows.num_rows
    parts = []
    for bounds in ranges:
        start, stop = (min(first + bound, end) for bound in bounds)
        positions = np.arange(start, stop).astype(np.uint32)
        parts.append(rows.read(start, stop) | {"stream_positions": positions})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def local_batches(
    rows: Rows | RowStream, ranges: list[tuple[int, int]], batch_size: int, start: int, stop: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields `ranges` of batches [start, stop) of the endless stream of rows, read by threads.

    No row is dropped: a batch may hold the end of one epoch and the beginning of the next.
    """
    steps = grain.MapDataset.range(start, stop)
    dataset = steps.map(lambda step: _read(rows, step * batch_size, ranges))
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))


def pretrain_batches(
    rows: Rows | RowStream, sharding: jax.sharding.Sharding, batch_size: int, start: int, stop: int
) -> Iterator[dict[str, jax.Array]]:
    """Yields batches [start, stop) of the endless shuffled stream of rows, on the devices."""
    ranges = local_row_ranges(sharding, batch_size)
    batches = local_batches(rows, ranges, batch_size, start, stop)
    return (make_global_batch(batch, sharding, batch_size) for batch in batches)


def heldout_batches(
    rows: Rows, sharding: jax.sharding.Sharding, batch_size: int, max_batches: int = 0
) -> Iterator[dict[str, jax.Array]]:
    """Yields the rows of a split once, in the order on disk; fills the last batch with empty rows.

    With `max_batches`, yields at most as many, the same in each evaluation. These rows are a random
    sample, because a corpus is shuffled when it is built. 0 means all rows.
    """
    ranges = local_row_ranges(sharding, batch_size)
    size = sum(stop - start for start, stop in ranges)
    num_batches = math.ceil(rows.num_rows / batch_size)
    if max_batches:
        num_batches = min(num_batches, max_batches)
    for index in range(num_batches):
        batch = _read(rows, index * batch_size, ranges)
        for array in batch.values():  # Pads with zeros at the end, as ranges ascend.
            array.resize((size, *array.shape[1:]), refcheck=False)
        yield make_global_batch(batch, sharding, batch_size)
