"""Pooling: one vector for each sequence of a packed row, and how vectors are compared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import csr_array, issparse
from scipy.spatial.distance import cdist

POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""The kinds of pooling of the last layer, by their names in sentence-transformers."""

SIMILARITIES = {
    "cosine": lambda first, second: unit_rows(first) @ unit_rows(second).T,
    "dot": lambda first, second: first @ second.T,
    "euclidean": lambda first, second: -cdist(first, second).astype(np.float32),
    "manhattan": lambda first, second: -cdist(first, second, "cityblock").astype(np.float32),
}
"""Functions of float32 `[N, size]` and `[M, size]` to `[N, M]`, by sentence-transformers' names."""
SPARSE_SIMILARITIES = ("dot", "cosine")
"""Those of `SIMILARITIES` that sparse arrays can have, the default first."""


def unit_rows(vectors: np.ndarray | csr_array) -> np.ndarray | csr_array:
    """Returns vectors `[N, size]`, or a sparse array of them, divided by their length."""
    if issparse(vectors):
        lengths = np.sqrt((vectors * vectors).sum(axis=1))
        return vectors.multiply(1 / np.maximum(lengths, 1e-12)[:, None]).tocsr()
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
            num_slots = inside.shape[1]
            slots = jnp.where(inside.any(1), jnp.argmax(inside, axis=1), num_slots)
            largest = max_by_slot(hidden, slots, num_slots)
            return jnp.where(inside.any(2, keepdims=True), largest, 0.0)
        if pooling == "weightedmean":
            return weighted_sum(position - start + 1) / (length * (length + 1) / 2)
        return weighted_sum(1) / (length if pooling == "mean" else jnp.sqrt(length))

    return jnp.concatenate([pool(pooling).astype(jnp.float32) for pooling in poolings], axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def max_by_slot(hidden: jax.Array, slots: jax.Array, num_slots: int) -> jax.Array:
    """Returns `[B, num_slots, H]`: the maximum over the positions of each slot, in each column.

    It reads `hidden`, `[B, L, H]`, once, whatever the number of slots: H may be the vocabulary. In
    the gradient, of equal values the first counts. `slots` are int32 `[B, L]`, the slot of each
    position; `num_slots` for none. A slot without positions has -inf.
    """
    return _max_and_position(hidden, slots, num_slots)[0]


def _max_and_position(hidden, slots, num_slots):
    """Returns the maxima, and int32 `[B, num_slots, H]`, the position of each."""
    rows = jnp.arange(len(hidden))

    def update(position, carry):
        largest, positions = carry
        values = jax.lax.dynamic_index_in_dim(hidden, position, axis=1, keepdims=False)
        slot = jax.lax.dynamic_index_in_dim(slots, position, axis=1, keepdims=False)
        own, own_position = largest[rows, slot], positions[rows, slot]
        own_position = jnp.where(values > own, position, own_position)
        largest = largest.at[rows, slot].set(jnp.maximum(own, values), mode="drop")
        return largest, positions.at[rows, slot].set(own_position, mode="drop")

    shape = (len(hidden), num_slots, hidden.shape[-1])
    start = jnp.full(shape, -jnp.inf, hidden.dtype), jnp.zeros(shape, jnp.int32)
    return jax.lax.fori_loop(0, hidden.shape[1], update, start)


def _max_by_slot_forward(hidden, slots, num_slots):
    largest, positions = _max_and_position(hidden, slots, num_slots)
    return largest, (slots, positions)


def _max_by_slot_backward(num_slots, residuals, gradient):
    slots, positions = residuals
    own = jnp.minimum(slots, num_slots - 1)
    own_positions, gradient = (jax.vmap(lambda x, i: x[i])(x, own) for x in (positions, gradient))
    is_largest = own_positions == jnp.arange(slots.shape[1])[:, None]
    return jnp.where(is_largest & (slots < num_slots)[..., None], gradient, 0), None


max_by_slot.defvjp(_max_by_slot_forward, _max_by_slot_backward)
