"""Dropout whose mask is a hash of (key, position): nothing is stored, every mesh draws the same.

JAX's generators spend more time on dropout bits than some of BERT's matrix products take. Here each
element hashes the index of its row in the global batch and its own index in the row, keyed by two
random words. That fuses into the operation that produced `x`, the backward pass recomputes it, and
it depends neither on the sharding of the batch nor on the number of microbatches.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np


def hashed_bits(words: jax.Array, rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns uint32 pseudo-random bits of the given shape, keyed by `words` (uint32 [2]).

    Two multiply-xorshift rounds over the index in the row, with the constants of Wellons' hash
    search ("lowbias32"). `rows` (int32 [shape[0]]) enter with the second word between the rounds,
    so that neither two keys nor two rows give shifted copies of one sequence. The bits repeat in
    rows of more than 2^32 elements.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for axis in range(1, len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        index = index + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    # Row indices are hashed first, which is cheap: words that differ in a few bits would give
    # similar rows.
    row_words = _mix(rows.astype(jnp.uint32), words[1], jnp.uint32(0))
    return _mix(index, words[0], row_words.reshape(-1, *[1] * (len(shape) - 1)))


def _mix(bits, first, second):
    bits = bits + first
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = bits ^ second
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return bits ^ (bits >> 16)


def dropout(key: jax.Array, x: jax.Array, rate: float, rows: jax.Array) -> jax.Array:
    """Zeroes each element of `x` with probability `rate` and scales the others.

    Args:
      key: a JAX PRNG key, used only for this call.
      x: `[batch, ...]`, any float dtype.
      rate: in [0, 1).
      rows: int32 `[batch]`, the index of each row in the global batch.
    """
    if rate == 0.0:
        return x
    return _masked(jax.random.bits(key, (2,), jnp.uint32), rows, x, rate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _masked(words, rows, x, rate):
    keep = hashed_bits(words, rows, x.shape) >= jnp.uint32(round(rate * 2**32))
    return jnp.where(keep, x * jnp.asarray(1.0 / (1.0 - rate), x.dtype), 0)


def _masked_forward(words, rows, x, rate):
    return _masked(words, rows, x, rate), (words, rows)


def _masked_backward(rate, residuals, dy):
    no_gradients = [np.zeros(each.shape, jax.dtypes.float0) for each in residuals]
    return *no_gradients, _masked(*residuals, dy, rate)


_masked.defvjp(_masked_forward, _masked_backward)
