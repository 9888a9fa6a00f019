"""Scaled dot-product attention within each sequence of a row."""

import math

import jax
import jax.numpy as jnp

from bert_jax.dropout import dropout


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sequence_ids: jax.Array,
    *,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_rows: jax.Array | None = None,
) -> jax.Array:
    """Plain attention (Vaswani et al., 2017, section 3.2.1); a position sees its own sequence.

    Args:
      query, key, value: `[batch, length, heads, head_dim]`, any float dtype.
      sequence_ids: int32 `[batch, length]`; positions attend to each other where their ids agree.
        Padding shares the id 0, so it sees padding alone and no softmax is over nothing.
      dropout_rate: of the attention probabilities, as in the released code.
      dropout_key, dropout_rows: see `dropout`; None switches it off.

    Returns:
      `[batch, length, heads, head_dim]` in the dtype of `value`. The softmax is in float32.
    """
    # Heads before length: both products are then plain batched matrix products.
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    query = query * jnp.asarray(1 / math.sqrt(query.shape[-1]), query.dtype)
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key, preferred_element_type=jnp.float32)
    same_sequence = sequence_ids[:, None, :, None] == sequence_ids[:, None, None, :]
    scores = jnp.where(same_sequence, scores, jnp.finfo(jnp.float32).min)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    if dropout_rows is not None:
        probabilities = dropout(dropout_key, probabilities, dropout_rate, dropout_rows)
    context = jnp.einsum("bhqk,bhkd->bhqd", probabilities, value)
    return jnp.swapaxes(context, 1, 2)
