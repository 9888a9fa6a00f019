"""What some models add to attention scores by how far apart two positions are.

An architecture hands `attention` a `ScoreBias`, such as the one of `model/mpnet.py`.
"""

from typing import Protocol

import jax


class ScoreBias(Protocol):
    """A tree of float arrays, which have gradients, with the method `scores`.

    In long rows, attention and its gradient ask for some queries and keys at a time, so that the
    scores of all pairs are never held.
    """

    def scores(self, query: jax.Array, key: jax.Array, distance: jax.Array | int) -> jax.Array:
        """Returns what is added to the scores of consecutive queries and keys.

        Args:
          query: `[batch, heads, queries, head_dim]`, divided by the square root of `head_dim`.
          key: `[batch, heads, keys, head_dim]`.
          distance: the position of the first key in the row, less that of the first query.

        Returns:
          float32 that broadcasts to `[batch, heads, queries, keys]`.
        """


def align_distances(x: jax.Array, num_keys: int) -> jax.Array:
    """Returns `[..., queries, keys]` from what each query has for each distance.

    Entry (i, j) of the result is entry (i, queries + j - i) of `x`, `[..., queries, queries +
    keys]`: entry (i, n) of `x` is for the key at distance n - queries. Needs no gather, nor does
    its gradient.
    """
    num_queries, size = x.shape[-2:]
    # In a row-major array, rows that are one entry shorter begin one entry earlier, each time.
    flat = x.reshape(*x.shape[:-2], -1)[..., num_queries:]
    return flat.reshape(*x.shape[:-2], num_queries, size - 1)[..., :num_keys]
