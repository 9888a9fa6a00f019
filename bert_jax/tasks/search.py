"""Finds the vectors that are most similar to a query, exactly, block by block on JAX's device."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MIN_BLOCK = 8192  # Vectors that are compared together; more if many are to be found.
SCORES_AT_ONCE = 2**23  # 32 MB, which stay in a CPU's caches better than more.


class Found(NamedTuple):
    """The best vectors of each query, best first, in the arrays and the order of FAISS.

    Attributes:
      scores: float32 `[num_queries, top_k]`, the dot products; `[top_k]` for a single query.
      indices: int64 of the same shape, the rows of `vectors`.
    """

    scores: np.ndarray
    indices: np.ndarray


def search(
    query_vectors: np.ndarray, vectors: np.ndarray | Sequence[np.ndarray], top_k: int = 10
) -> Found:
    """Finds the `top_k` rows of `vectors` with the largest dot products with each query.

    Vectors of length 1, as of `encode(..., normalize=True)`, are thus compared by their cosine.
    Of equal scores, the first row comes first. Fewer are found if there are fewer vectors. Products
    are computed in float32. The device holds two blocks of vectors at a time, so that they may be
    larger than its memory, and mapped from a file.

    Args:
      query_vectors: `[num_queries, size]`, or `[size]` for one query.
      vectors: `[num_vectors, size]`, or a list of such arrays, whose rows are numbered in order.

    Raises ValueError for other shapes or types, values that are not finite, and `top_k` below 1.
    """
    queries = np.asarray(query_vectors)
    is_list = isinstance(vectors, list | tuple) and vectors and np.ndim(vectors[0]) == 2
    shards = [np.asarray(each) for each in (vectors if is_list else [vectors])]
    for shard in shards:
        if shard.ndim != 2 or queries.ndim not in (1, 2) or queries.shape[-1] != shard.shape[1]:
            shapes = f"{list(queries.shape)} and {list(shard.shape)}"
            raise ValueError(f"expected queries [num, size] and vectors [num, size], got {shapes}")
    if not isinstance(top_k, int | np.integer) or top_k < 1:
        raise ValueError(f"top_k must be a whole number, at least 1, got {top_k!r}")
    rows, count = np.atleast_2d(queries).astype(np.float32), min(top_k, sum(map(len, shards)))
    scores = np.empty((len(rows), count), np.float32)
    indices = np.empty((len(rows), count), np.int64)
    block_size = max(MIN_BLOCK, 1 << (64 * count - 1).bit_length()) if count else 1
    step = max(1, SCORES_AT_ONCE // block_size)
    for start in range(0, len(rows) if count else 0, step):
        part = slice(start, start + step)
        scores[part], indices[part] = _search_blocks(rows[part], shards, count, block_size)
    return Found(scores[0], indices[0]) if queries.ndim == 1 else Found(scores, indices)


def _search_blocks(
    queries: np.ndarray, shards: Sequence[np.ndarray], count: int, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scores and indices of the best `count` vectors of each query."""
    rows = jnp.asarray(queries)
    best = jnp.full((len(rows), count), -jnp.inf), jnp.zeros((len(rows), count), jnp.int32)
    is_finite, before = jnp.isfinite(rows).all(), None
    offset = 0  # Of the first vector of the shard.
    for shard in shards:
        for start, num_seen, block in _blocks(shard, block_size):
            *best, is_finite = _merge_block(
                rows, jnp.asarray(block), num_seen, offset + start, *best, is_finite
            )
            if before is not None:
                before.block_until_ready()  # Two blocks are on the device, not all.
            before = is_finite
        offset += len(shard)
    scores, indices = map(np.asarray, best)
    if not is_finite or not np.isfinite(scores).all():
        raise ValueError("query_vectors or vectors have values that are not finite")
    return scores, indices


def _blocks(shard: np.ndarray, block_size: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields the first row of each block, how many of its rows were in the one before, and it.

    All blocks of a shard have the same size, for which alone JAX compiles.
    """
    size = min(block_size, len(shard))
    for start in range(0, len(shard), block_size):
        first = min(start, len(shard) - size)
        yield first, start - first, shard[first : first + size]


@functools.partial(jax.jit, donate_argnums=(4, 5))
def _merge_block(
    queries: jax.Array,
    block: jax.Array,
    num_seen: jax.Array,
    offset: jax.Array,
    scores: jax.Array,
    indices: jax.Array,
    is_finite: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Merges the vectors of a block, but not its first `num_seen`, into the best found so far.

    Sorting all scores would take longer than to compute them. The best `count` are among the
    `count` groups of neighbours with the largest maxima: any other vector is behind the maxima of
    these groups. Of equal values `top_k` takes the first, and so does the order of groups.
    """
    num_queries, count = scores.shape
    block = block.astype(jnp.float32)
    is_finite &= jnp.isfinite(block).all()
    products = jax.lax.dot_general(  # TPUs and GPUs would otherwise round to fewer bits.
        queries, block, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST
    )
    products = jnp.where(jnp.arange(len(block)) < num_seen, -jnp.inf, products)
    group = 1 << max(0, round(math.log2(len(block) / count) / 2))
    num_groups = -(-len(block) // group)
    padding = num_groups * group - len(block)
    products = jnp.pad(products, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    products = products.reshape(num_queries, num_groups, group)
    _, groups = jax.lax.top_k(_without_sign_of_0(products.max(-1)), min(count, num_groups))
    groups = jnp.sort(groups, axis=1)[:, :, None]
    found = jnp.take_along_axis(products, groups, axis=1).reshape(num_queries, -1)
    places = (groups * group + jnp.arange(group)).reshape(num_queries, -1) + offset
    scores, chosen = jax.lax.top_k(
        jnp.concatenate([scores, _without_sign_of_0(found)], axis=1), count
    )
    indices = jnp.take_along_axis(jnp.concatenate([indices, places], axis=1), chosen, axis=1)
    return scores, indices, is_finite


def _without_sign_of_0(values: jax.Array) -> jax.Array:
    """Returns 0 for -0, which `top_k` takes for smaller."""
    return jnp.where(values == 0, 0.0, values)
