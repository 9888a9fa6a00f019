"""Dropout whose mask is a hash of (key, position): not stored, and the same on every mesh.

JAX's generators spend more time on dropout bits than some of BERT's matrix products take. Here each
element hashes the index of its row in the global batch and its own index in the row, keyed by two
random words. The hash fuses into the operation that produced `x`, and the backward pass repeats it.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


def hashed_bits(words: jax.Array, rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns uint32 pseudo-random bits of the given shape, keyed by `words` (uint32 [2]).

    Two xorshift-multiply rounds over the index in the row, with the constants of Wellons' hash
    search ("lowbias32"). Each of `rows` (int32 [shape[0]]), hashed with the first word, sets the
    start index and, with the second, enters between the rounds: under one key, no two rows get the
    same bits, even shifted. Compare the values with a threshold instead of masking bits: the high
    bits are the most random. The values repeat in rows of more than 2^32 elements.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for axis in range(1, len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        index = index + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    rows = rows.astype(jnp.uint32).reshape(-1, *[1] * (len(shape) - 1))
    return _mix(index, *[_mix(rows, word, jnp.uint32(0)) for word in words])


def _mix(bits, first, second):
    bits = bits + first
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = bits ^ second
    return (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)


class Dropout(NamedTuple):
    """What dropout needs besides a key; a `rate` that is traced needs no recompilation.

    Attributes:
      rows: int32 `[batch]`, index of each row in the global batch, which seeds its dropout.
      rate: probability of each element to be zeroed, in [0, 1).
    """

    rows: jax.Array
    rate: float | jax.Array


def dropout(key: jax.Array, x: jax.Array, settings: Dropout) -> jax.Array:
    """Zeroes elements of `x`, `[batch, ...]`, at the rate of `settings`, and scales the others."""
    words = jax.random.bits(key, (2,), jnp.uint32)
    return _dropout(words, settings.rows, jnp.asarray(settings.rate, jnp.float32), x)


@jax.custom_vjp
def _dropout(words, rows, rate, x):
    keep = hashed_bits(words, rows, x.shape) >= jnp.round(rate * 2.0**32).astype(jnp.uint32)
    return jnp.where(keep, x * (1.0 / (1.0 - rate)).astype(x.dtype), 0)


def _dropout_backward(residuals, dy):
    return None, None, None, _dropout(*residuals, dy)


_dropout.defvjp(lambda *args: (_dropout(*args), args[:3]), _dropout_backward)
