"""Gradient accumulation over the microbatches of a batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def split_into_microbatches(
    rows: dict[str, jax.Array], num_microbatches: int
) -> dict[str, jax.Array]:
    """Returns arrays `[microbatches, rows, ...]`.

    Microbatch m takes row m and every `num_microbatches`-th row after it, so that rows keep their
    `fsdp` shard.
    """
    return jax.tree.map(
        lambda x: x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1), rows
    )


def microbatch_at(microbatches: dict[str, jax.Array], index) -> dict[str, jax.Array]:
    """Returns one of the `microbatches`, arrays with a leading axis of microbatches."""
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), microbatches
    )


def accumulate_gradients(
    loss_fn: Callable[[dict, dict], tuple[jax.Array, Any]],
    params: dict,
    microbatches: dict[str, jax.Array],
    num_microbatches: int | jax.Array,
) -> tuple[tuple[jax.Array, Any], dict]:
    """Returns ((loss, other values), gradients in float32), each summed over the microbatches.

    Args:
      loss_fn: (params, one microbatch) -> (its contribution to the loss, other values to sum).
      params: what the gradients are of; of any dtype.
      microbatches: arrays `[microbatches, rows, ...]`.
      num_microbatches: how many of them are used, the first ones. If it is traced, one program
        serves batches with different numbers of them.
    """

    def value_and_gradients(index):
        microbatch = microbatch_at(microbatches, index)
        values, gradients = jax.value_and_grad(loss_fn, has_aux=True)(params, microbatch)
        return values, jax.tree.map(lambda x: x.astype(jnp.float32), gradients)

    def add(index, total):
        return jax.tree.map(jnp.add, total, value_and_gradients(index))

    if isinstance(num_microbatches, int) and num_microbatches == 1:
        return value_and_gradients(0)  # Has no loop, and no zeros to add to.
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(value_and_gradients, 0))
    return jax.lax.fori_loop(0, num_microbatches, add, zeros)
