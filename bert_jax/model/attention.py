"""Scaled dot-product attention among the positions of a row that may see each other."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.blocked_attention import CONTEXT, blocked_attention
from bert_jax.model.cpu import attention_scores, weighted_values
from bert_jax.model.dropout import AttentionDropout
from bert_jax.model.score_bias import ScoreBias

# Longer rows are read by blocks. On a CPU, attention in rows of 512 alone is faster by blocks, too,
# but no whole step of them was measured (docs/log/2026-11-modernbert.md).
LONGEST_PLAIN_ROW = 512


@jax.named_scope("attention")
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: AttentionMask,
    *,
    num_heads: int,
    dropout: AttentionDropout | None = None,
    bias: ScoreBias | None = None,
) -> jax.Array:
    """Computes attention (Vaswani et al., 2017, section 3.2.1) within each sequence of a row.

    Args:
      query, key, value: `[batch, length, hidden]`, any float dtype.
      mask: which positions attend to each other.
      num_heads: into which `hidden` is split.
      dropout: of the probabilities, or None.
      bias: what is added to the scores, or None.

    Returns:
      `[batch, length, hidden]` in the dtype of `value`. The softmax is in float32.
    """
    query, key, value = (split_heads(x, num_heads) for x in (query, key, value))
    query = query * jnp.asarray(1 / math.sqrt(query.shape[-1]), query.dtype)
    if query.shape[2] > LONGEST_PLAIN_ROW:
        context = blocked_attention(query, key, value, mask, dropout, bias)
    else:
        scores = attention_scores(query, key)
        if bias is not None:
            scores += bias.scores(query, key, distance=0)
        probabilities = attention_probabilities(scores, mask, key.dtype)
        if dropout is None:
            context = weighted_values(probabilities, value)
        else:
            context = _weighted_values_with_dropout(dropout, probabilities, value)
        context = checkpoint_name(context, CONTEXT)
    context = jnp.swapaxes(context, 1, 2)
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


def split_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """Returns `[batch, length, hidden]` as `[batch, heads, length, head_dim]`."""
    # With heads before length, products of all heads are plain batched matrix products.
    return jnp.swapaxes(x.reshape(*x.shape[:2], num_heads, -1), 1, 2)


def scaled_scores(
    query: jax.Array, key: jax.Array, num_heads: int, bias: ScoreBias | None = None
) -> jax.Array:
    """Returns the scores of all pairs of positions, float32 `[batch, heads, from, to]`.

    `query` and `key` are `[batch, length, hidden]`; `bias` is added to the scores.
    """
    query, key = split_heads(query, num_heads), split_heads(key, num_heads)
    products = jnp.einsum("bhqd,bhkd->bhqk", query, key, preferred_element_type=jnp.float32)
    scores = products / math.sqrt(query.shape[-1])
    if bias is None:
        return scores
    return scores + bias.scores(query / math.sqrt(query.shape[-1]), key, distance=0)


def attention_probabilities(scores: jax.Array, mask: AttentionMask, dtype) -> jax.Array:
    """Returns the softmax of scores, `[batch, heads, from, to]`, in `dtype`."""
    # Added rather than selected: XLA for CPUs fuses a product with an addition. Adding a score to
    # the minimum float32 rounds back to the minimum.
    bias = jnp.where(mask.pairs(), 0.0, jnp.finfo(jnp.float32).min)
    return _softmax(scores, bias, dtype, mask.may_hide_all)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _softmax(scores: jax.Array, bias: jax.Array, dtype, may_hide_all: bool) -> jax.Array:
    """Computes softmax in float32, returned and saved for the backward pass in `dtype`.

    The gradient does not need `bias`: at masked positions the probability is 0. If there may be
    rows with all positions masked, this is ensured for them, too.
    """
    probabilities = jax.nn.softmax(scores + bias, axis=-1)
    if may_hide_all:
        probabilities = jnp.where(bias < 0, 0.0, probabilities)
    return probabilities.astype(dtype)


def _softmax_backward(dtype, may_hide_all, probabilities, dy):
    probabilities, dy = probabilities.astype(jnp.float32), dy.astype(jnp.float32)
    weighted = probabilities * dy
    return weighted - probabilities * jnp.sum(weighted, axis=-1, keepdims=True), None


def _softmax_forward(scores, bias, dtype, may_hide_all):
    probabilities = _softmax(scores, bias, dtype, may_hide_all)
    return probabilities, probabilities


_softmax.defvjp(_softmax_forward, _softmax_backward)
