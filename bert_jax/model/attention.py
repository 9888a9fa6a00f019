"""Scaled dot-product attention within each sequence of a row."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bert_jax.model.cpu import attention_scores, weighted_values
from bert_jax.model.dropout import AttentionDropout

# The name of attention's result for `jax.checkpoint`, whose policies do not look into a custom_vjp.
CONTEXT = "context"


@jax.named_scope("attention")
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sequence_ids: jax.Array,
    *,
    num_heads: int,
    causal: bool = False,
    dropout: AttentionDropout | None = None,
) -> jax.Array:
    """Computes attention (Vaswani et al., 2017, section 3.2.1) within each sequence of a row.

    Args:
      query, key, value: `[batch, length, hidden]`, any float dtype.
      sequence_ids: int32 `[batch, length]`; positions attend to each other if their ids are equal.
        Padding has the id 0 and attends only to padding, so that no softmax is empty.
      num_heads: into which `hidden` is split.
      causal: whether each position attends only to itself and earlier ones.
      dropout: of the probabilities, or None.

    Returns:
      `[batch, length, hidden]` in the dtype of `value`. The softmax is in float32.
    """
    query, key, value = (
        x.reshape(*x.shape[:2], num_heads, -1) for x in (query, key, value)
    )  # [batch, length, heads, head_dim]
    probabilities = attention_probabilities(query, key, sequence_ids, causal)
    value = jnp.swapaxes(value, 1, 2)
    if dropout is None:
        context = weighted_values(probabilities, value)
    else:
        context = _weighted_values_with_dropout(dropout, probabilities, value)
    context = jnp.swapaxes(checkpoint_name(context, CONTEXT), 1, 2)
    return context.reshape(*context.shape[:2], -1)


@jax.custom_vjp
def _weighted_values_with_dropout(dropout, probabilities, value):
    """Saves only the probabilities before dropout; the backward pass applies dropout again."""
    return weighted_values(dropout.apply(probabilities), value)


def _weighted_values_backward(residuals, dy):
    dropout, probabilities, value = residuals
    _, backward = jax.vjp(weighted_values, dropout.apply(probabilities), value)
    dkept, dvalue = backward(dy)
    return None, dropout.apply(dkept), dvalue


_weighted_values_with_dropout.defvjp(
    lambda *args: (_weighted_values_with_dropout(*args), args), _weighted_values_backward
)


def attention_probabilities(
    query: jax.Array, key: jax.Array, sequence_ids: jax.Array, causal: bool
) -> jax.Array:
    """Returns attention probabilities, `[batch, heads, from, to]` in the dtype of `key`.

    `query` and `key` are `[batch, length, heads, head_dim]`.
    """
    # With heads before length, both products are plain batched matrix products.
    query, key = (jnp.swapaxes(x, 1, 2) for x in (query, key))
    query = query * jnp.asarray(1 / math.sqrt(query.shape[-1]), query.dtype)
    scores = attention_scores(query, key)
    is_visible = sequence_ids[:, None, :, None] == sequence_ids[:, None, None, :]
    if causal:
        position = jnp.arange(scores.shape[-1])
        is_visible &= position[:, None] >= position
    # Added rather than selected: XLA for CPUs fuses a product with an addition. Adding a score to
    # the minimum float32 rounds back to the minimum.
    bias = jnp.where(is_visible, 0.0, jnp.finfo(jnp.float32).min)
    return _softmax(scores, bias, key.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _softmax(scores: jax.Array, bias: jax.Array, dtype) -> jax.Array:
    """Computes softmax in float32, returned and saved for the backward pass in `dtype`.

    The gradient does not need `bias`: at masked positions the probability is 0.
    """
    return jax.nn.softmax(scores + bias, axis=-1).astype(dtype)


def _softmax_backward(dtype, probabilities, dy):
    probabilities, dy = probabilities.astype(jnp.float32), dy.astype(jnp.float32)
    weighted = probabilities * dy
    return weighted - probabilities * jnp.sum(weighted, axis=-1, keepdims=True), None


def _softmax_forward(scores, bias, dtype):
    probabilities = _softmax(scores, bias, dtype)
    return probabilities, probabilities


_softmax.defvjp(_softmax_forward, _softmax_backward)
