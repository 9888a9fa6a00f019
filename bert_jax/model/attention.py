"""Scaled dot-product attention within each sequence of a row."""

import functools
import math

import jax
import jax.numpy as jnp

from bert_jax.model.dropout import dropout


@jax.named_scope("attention")
def attention(
    query, key, value, sequence_ids, *, causal=False, dropout_key=None, dropout_settings=None
) -> jax.Array:
    """Computes attention (Vaswani et al., 2017, section 3.2.1) within each sequence of a row.

    Args:
      query, key, value: `[batch, length, heads, head_dim]`, any float dtype.
      sequence_ids: int32 `[batch, length]`; positions attend to each other if their ids are equal.
        Padding has the id 0 and attends only to padding, so that no softmax is empty.
      causal: whether positions attend only to themselves and earlier ones.
      dropout_key, dropout_settings: for dropout of the probabilities; None disables it.

    Returns:
      `[batch, length, heads, head_dim]` in the dtype of `value`. The softmax is in float32.
    """
    probabilities = attention_probabilities(query, key, sequence_ids, causal)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def weighted_sum(probabilities, value):
        """Recomputes dropout in the backward pass, so that the layer loop saves `probabilities`."""
        if dropout_settings:
            probabilities = dropout(dropout_key, probabilities, dropout_settings)
        return jnp.einsum("bhqk,bhkd->bhqd", probabilities, value)

    return jnp.swapaxes(weighted_sum(probabilities, jnp.swapaxes(value, 1, 2)), 1, 2)


def attention_probabilities(query, key, sequence_ids, causal: bool) -> jax.Array:
    """Returns attention probabilities, `[batch, heads, from, to]` in the dtype of `key`."""
    # With heads before length, both products are plain batched matrix products.
    query, key = (jnp.swapaxes(x, 1, 2) for x in (query, key))
    query = query * jnp.asarray(1 / math.sqrt(query.shape[-1]), query.dtype)
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key, preferred_element_type=jnp.float32)
    is_visible = sequence_ids[:, None, :, None] == sequence_ids[:, None, None, :]
    if causal:
        position = jnp.arange(scores.shape[-1])
        is_visible &= position[:, None] >= position
    scores = jnp.where(is_visible, scores, jnp.finfo(jnp.float32).min)
    return _softmax(scores, key.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _softmax(scores: jax.Array, dtype) -> jax.Array:
    """Computes softmax in float32, returned and saved for the backward pass in `dtype`."""
    return jax.nn.softmax(scores, axis=-1).astype(dtype)


def _softmax_backward(dtype, probabilities, dy):
    probabilities, dy = probabilities.astype(jnp.float32), dy.astype(jnp.float32)
    weighted = probabilities * dy
    return (weighted - probabilities * jnp.sum(weighted, axis=-1, keepdims=True),)


_softmax.defvjp(lambda *args: (_softmax(*args),) * 2, _softmax_backward)
