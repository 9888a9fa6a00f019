"""Dropout whose mask is a hash of (key, position): nothing is stored, every mesh draws the same.

A general-purpose generator spends more time on a BERT's dropout bits than some of its matrix
products take. Here each element hashes its own index, keyed by two random words: the arithmetic
fuses into the operation that produced `x`, the backward pass computes the mask again instead of
keeping it, and an element's bit does not depend on how the array is sharded.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np


def hashed_bits(words: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """uint32 `shape`: pseudo-random bits for each index, keyed by `words` (uint32 [2]).

    Two multiply-xorshift rounds over the linear index, with the constants of Wellons' hash search
    ("lowbias32"). The second word enters between the rounds, so that two keys never give shifted
    copies of one sequence. An array of over 2^32 elements sees the bits repeat.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        index = index + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    bits = index + words[0]
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = bits ^ words[1]
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return bits ^ (bits >> 16)


def dropout(key: jax.Array, x: jax.Array, rate: float) -> jax.Array:
    """Zeroes each element of `x` (any shape) with probability `rate`; scales the rest.

    `key` is a JAX PRNG key, used for this one call.
    """
    if rate == 0.0:
        return x
    return _masked(jax.random.bits(key, (2,), jnp.uint32), x, rate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _masked(words, x, rate):
    keep = hashed_bits(words, x.shape) >= jnp.uint32(round(rate * 2**32))
    return jnp.where(keep, x * jnp.asarray(1.0 / (1.0 - rate), x.dtype), 0)


def _masked_forward(words, x, rate):
    return _masked(words, x, rate), words


def _masked_backward(rate, words, gradient):
    return np.zeros(words.shape, jax.dtypes.float0), _masked(words, gradient, rate)


_masked.defvjp(_masked_forward, _masked_backward)
