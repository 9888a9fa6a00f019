"""Finds the vectors that are most similar to a query, exactly, in NumPy."""

from typing import NamedTuple

import numpy as np

SCORES_AT_ONCE = 2**24  # 64 MB: similarities that are computed and sorted together.


class Found(NamedTuple):
    """The best vectors of each query, best first, in the arrays and the order of FAISS.

    Attributes:
      scores: float32 `[num_queries, top_k]`, the dot products; `[top_k]` for a single query.
      indices: int64 of the same shape, the rows of `vectors`.
    """

    scores: np.ndarray
    indices: np.ndarray


def search(query_vectors: np.ndarray, vectors: np.ndarray, top_k: int = 10) -> Found:
    """Finds the `top_k` rows of `vectors` with the largest dot products with each query.

    Vectors of length 1, as of `encode(..., normalize=True)`, are thus compared by their cosine.
    Of equal scores, the first row comes first. Fewer are found if there are fewer vectors.

    Args:
      query_vectors: `[num_queries, size]`, or `[size]` for one query.
      vectors: `[num_vectors, size]`.

    Raises ValueError for other shapes or types, values that are not finite, and `top_k` below 1.
    """
    queries, vectors = np.asarray(query_vectors), np.asarray(vectors)
    if vectors.ndim != 2 or queries.ndim not in (1, 2) or queries.shape[-1] != vectors.shape[1]:
        shapes = f"{list(queries.shape)} and {list(vectors.shape)}"
        raise ValueError(f"expected queries [num, size] and vectors [num, size], got {shapes}")
    if not isinstance(top_k, int | np.integer) or top_k < 1:
        raise ValueError(f"top_k must be a whole number, at least 1, got {top_k!r}")
    count, rows = min(top_k, len(vectors)), np.atleast_2d(queries).astype(np.float32)
    scores = np.empty((len(rows), count), np.float32)
    indices = np.empty((len(rows), count), np.int64)
    step = max(1, SCORES_AT_ONCE // max(len(vectors), 1))
    for start in range(0, len(rows) if count else 0, step):
        part = slice(start, start + step)
        similar = rows[part] @ vectors.T.astype(np.float32, copy=False)
        if not np.isfinite(similar).all():
            raise ValueError("query_vectors or vectors have values that are not finite")
        for row, values in enumerate(similar, start):
            # All that are as large as the k-th largest, so that ties are in the order of rows.
            best = np.flatnonzero(values >= np.partition(values, -count)[-count])
            best = best[np.argsort(-values[best], kind="stable")][:count]
            scores[row], indices[row] = values[best], best
    return Found(scores[0], indices[0]) if queries.ndim == 1 else Found(scores, indices)
