"""Pooling: one vector for each sequence of a packed row, and how vectors are compared."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.spatial.distance import cdist

POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""The kinds of pooling of the last layer, by their names in sentence-transformers."""

SIMILARITIES = {
    "cosine": lambda first, second: _unit_rows(first) @ _unit_rows(second).T,
    "dot": lambda first, second: first @ second.T,
    "euclidean": lambda first, second: -cdist(first, second).astype(np.float32),
    "manhattan": lambda first, second: -cdist(first, second, "cityblock").astype(np.float32),
}
"""Functions of float32 `[N, size]` and `[M, size]` to `[N, M]`, by sentence-transformers' names."""


def _unit_rows(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def tokens_of_sequences(
    vectors: jax.Array, first_tokens: jax.Array, num_tokens: jax.Array, max_tokens: int
) -> jax.Array:
    """Returns `[..., max_tokens, size]`: the vectors of the tokens of some sequences, then 0.

    `vectors` are `[tokens, size]` of all; `first_tokens` and `num_tokens` int32 `[...]`, of each
    sequence. A sequence that begins after the last token has no vectors.
    """
    place = jnp.arange(max_tokens)
    index = jnp.where(place < num_tokens[..., None], first_tokens[..., None] + place, len(vectors))
    return vectors.at[index].get(mode="fill", fill_value=0)


def pool_tokens(
    hidden: jax.Array, sequence_bounds: jax.Array, poolings: tuple[str, ...]
) -> jax.Array:
    """Returns float32 `[B, S, len(poolings) * H]`: the pooled tokens of S sequences, joined.

    Each of `poolings` is one of `POOLINGS`: the first token ([CLS]); the maximum, in each column;
    the mean; the sum divided by the square root of the length; the mean weighted by the position,
    counted from 1; the last token ([SEP]). `hidden` are `[B, L, H]`; `sequence_bounds` are int32
    `[B, S, 3]`, as in `row_dtype`; unused slots give 0.
    """
    position = jnp.arange(hidden.shape[1])
    start, _, end = jnp.moveaxis(sequence_bounds[..., None], -2, 0)  # [B, S, 1]
    length = jnp.maximum(end - start, 1)
    inside = (position >= start) & (position < end)  # [B, S, L]

    def weighted_sum(weights):
        weights = (weights * inside).astype(hidden.dtype)
        return jnp.einsum("bsl,blh->bsh", weights, hidden, preferred_element_type=jnp.float32)

    def pool(pooling):
        if pooling == "cls":
            return weighted_sum(position == start)
        if pooling == "lasttoken":
            return weighted_sum(position == end - 1)
        if pooling == "max":
            # One sequence at a time: all at once would take S times the memory of `hidden`.
            def masked_max(inside):
                values = jnp.where(inside[..., None], hidden, -jnp.inf)
                return jnp.where(inside.any(1, keepdims=True), values.max(1), 0.0)

            return jax.lax.map(masked_max, inside.swapaxes(0, 1)).swapaxes(0, 1)
        if pooling == "weightedmean":
            return weighted_sum(position - start + 1) / (length * (length + 1) / 2)
        return weighted_sum(1) / (length if pooling == "mean" else jnp.sqrt(length))

    return jnp.concatenate([pool(pooling).astype(jnp.float32) for pooling in poolings], axis=-1)
