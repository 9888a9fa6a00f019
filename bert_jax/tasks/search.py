"""Finds the vectors that are most similar to a query, exactly, block by block on JAX's device."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import csr_array

from bert_jax.tasks.retrieval_scores import best_indices

MIN_BLOCK = 16384  # Vectors that are compared together; more if many are to be found.
QUERIES_AT_ONCE = 2**16  # On the device, with what was found for them.
SCORES_AT_ONCE = 2**22  # 16 MB, which stay in a CPU's caches better than more.


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

    Raises ValueError for other shapes or types, values or products that are not finite, and `top_k`
    below 1.
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
    for start in range(0, len(rows) if count else 0, QUERIES_AT_ONCE):
        part = slice(start, start + QUERIES_AT_ONCE)
        scores[part], indices[part] = _search_blocks(rows[part], shards, count)
    return Found(scores[0], indices[0]) if queries.ndim == 1 else Found(scores, indices)


def _search_blocks(
    queries: np.ndarray, shards: Sequence[np.ndarray], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scores and indices of the best `count` vectors of each query."""
    block_size = max(MIN_BLOCK, 1 << (64 * count - 1).bit_length())
    # About as many groups in a block as vectors in `count` groups, which is the least to sort.
    group = 1 << round(math.log2(block_size / count) / 2)
    step = max(1, SCORES_AT_ONCE // block_size)
    parts = [jnp.asarray(queries[start : start + step]) for start in range(0, len(queries), step)]
    best = [
        (jnp.full((len(part), count), -jnp.inf), jnp.zeros((len(part), count), jnp.int32))
        for part in parts
    ]
    is_finite, before = [jnp.isfinite(queries).all()], None
    for first, num_valid, rows in _blocks(shards, block_size, group):
        block = jnp.asarray(rows)
        merged = [
            _merge_block(part, block, num_valid, first, *found, group=group)
            for part, found in zip(parts, best, strict=True)
        ]
        best = [(scores, indices) for scores, indices, _ in merged]
        is_finite.append(merged[0][2])
        jax.block_until_ready(before)  # Two blocks are on the device, not all.
        before = best
    scores, indices = (np.concatenate(arrays) for arrays in zip(*best, strict=True))
    if not all(is_finite) or not np.isfinite(scores).all():
        raise ValueError(
            "query_vectors or vectors have values that are not finite, or of which products are not"
        )
    return scores, indices


def _blocks(
    shards: Sequence[np.ndarray], block_size: int, group: int
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields the index of the first row of each block, its number of rows, and the block.

    The last block of an array is filled with copies of its last row, so that all have one size, for
    which alone JAX compiles; a small array is one block, of whole groups.
    """
    before = 0
    for shard in shards:
        size = min(block_size, -(-len(shard) // group) * group)
        for start in range(0, len(shard), block_size):
            block = shard[start : start + size]
            missing = size - len(block)
            filled = np.pad(block, ((0, missing), (0, 0)), mode="edge") if missing else block
            yield before + start, len(block), filled
        before += len(shard)


@functools.partial(jax.jit, static_argnames="group")
def _merge_block(
    queries: jax.Array,
    block: jax.Array,
    num_valid: jax.Array,
    first: jax.Array,
    scores: jax.Array,
    indices: jax.Array,
    *,
    group: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Merges a block, up to the copies of its last valid row, into the best found so far.

    Returns scores, indices and whether all values of the block are finite: one that is not makes
    its row's product with any query infinite or NaN.

    To sort all scores would take longer than to compute them. The best `count` are among the
    `count` groups of `group` neighbours with the largest maxima: any other vector comes after the
    maxima of these groups. Of equal values `top_k` takes the first, in groups as in vectors.
    """
    count = scores.shape[1]
    products = jax.lax.dot_general(  # TPUs and GPUs would otherwise round to fewer bits.
        queries,
        block.astype(jnp.float32),
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
    ).reshape(len(queries), -1, group)
    is_finite = jnp.isfinite(products[0]).all()
    starts = jnp.arange(0, len(block), group)
    # Copies do not change the maximum of a group that has the row itself.
    maxima = jnp.where(starts < num_valid, _without_sign_of_0(products.max(-1)), -jnp.inf)
    groups = jnp.sort(jax.lax.top_k(maxima, min(count, len(starts)))[1], axis=1)
    places = (starts[groups][:, :, None] + jnp.arange(group)).reshape(len(queries), -1)
    found = jnp.take_along_axis(products, groups[:, :, None], axis=1).reshape(places.shape)
    found = jnp.where(places < num_valid, _without_sign_of_0(found), -jnp.inf)
    # First of the block alone: to sort twice is faster than to sort a concatenation of all.
    found, chosen = jax.lax.top_k(found, min(count, found.shape[1]))
    places = jnp.take_along_axis(places, chosen, axis=1) + first
    scores, chosen = jax.lax.top_k(jnp.concatenate([scores, found], axis=1), count)
    indices = jnp.concatenate([indices, places], axis=1)
    return scores, jnp.take_along_axis(indices, chosen, axis=1), is_finite


def _without_sign_of_0(values: jax.Array) -> jax.Array:
    """Returns 0 for -0, which `top_k` takes for smaller."""
    return jnp.where(values == 0, 0.0, values)


def search_sparse(queries: csr_array, vectors: Sequence[csr_array], top_k: int) -> Found:
    """Finds the `top_k` rows of sparse `vectors` with the largest dot products with each query.

    It is `search` of several arrays, computed by SciPy: a block of vectors, transposed, is an
    inverted index, of which a query reads the rows of its own columns. Products of columns that a
    query and a vector do not share are 0. `queries` and `vectors` are `[num, size]`.
    """
    best = [(np.zeros(0, np.float32), np.zeros(0, np.int64))] * queries.shape[0]
    first = 0
    for shard in vectors:
        for start in range(0, shard.shape[0], MIN_BLOCK):
            index = shard[start : start + MIN_BLOCK].T.tocsr()
            places = np.arange(index.shape[1]) + first
            for row, (scores, indices) in enumerate(best):
                candidates = np.append(scores, (queries[[row]] @ index).toarray()[0])
                chosen = best_indices(candidates, top_k)
                best[row] = candidates[chosen], np.append(indices, places)[chosen]
            first += index.shape[1]
    return Found(*map(np.stack, zip(*best, strict=True)))
