"""Dropout whose mask is a hash of (key, position): not stored, and the same on every mesh.

JAX's generators spend more time on dropout bits than some of BERT's matrix products take. Here each
element hashes two random words of its position with two of its column. The hash fuses into the
operation that produced `x`, and the backward pass repeats it, as does the kernel of attention.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Seeds the words of columns: fractional digits of the golden ratio, e, pi and sqrt(2).
COLUMN_SEED = np.array([[0x9E3779B9, 0xB7E15162], [0x243F6A88, 0x6A09E667]], np.uint32)


class Dropout(NamedTuple):
    """What dropout needs besides a key; a traced `rate` can change without recompilation.

    Attributes:
      rows: int32 `[batch]`, index of each row in the global batch, which seeds its dropout.
      rate: probability of each element to be zeroed, in [0, 1).
      attention_rate: that of attention probabilities; None means `rate`.
    """

    rows: jax.Array
    rate: float | jax.Array
    attention_rate: float | jax.Array | None = None


def random_words(seed: jax.Array, rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns int32 `[2, rows, *shape]`: two words per position, keyed by `seed` (uint32 [2, 2]).

    Two xorshift-multiply rounds over the position in the row, with the constants of Wellons' hash
    search ("lowbias32"). Each of `rows` (int32), hashed with the seed, sets the start and enters
    between the rounds: no two rows get the same words.
    """
    index = jnp.arange(math.prod(shape), dtype=jnp.uint32)
    return lax.bitcast_convert_type(_words(seed, rows, index), jnp.int32).reshape(2, -1, *shape)


def column_words(num_columns: int) -> np.ndarray:
    """Returns int32 `[2, columns]`, always the same: a constant of the program."""
    index = np.arange(num_columns, dtype=np.uint32)
    return _words(COLUMN_SEED, np.zeros(1, np.int32), index)[:, 0].view(np.int32)


def _words(seed, rows, index):
    start, between = _mix(rows.astype(np.uint32), seed[..., None], np.uint32(0)).swapaxes(0, 1)
    bits = _mix(index, start[..., None], between[..., None])
    return bits ^ (bits >> 16)


def _mix(bits, first, second):
    bits = bits + first
    bits = (bits ^ (bits >> 16)) * np.uint32(0x7FEB352D)
    bits = bits ^ second
    return (bits ^ (bits >> 15)) * np.uint32(0x846CA68B)


def random_bits(words, column_words) -> tuple[jax.Array, jax.Array]:
    """Returns two random int32 from two words of a position and two of a column.

    The high 16 bits of both are independent; the first has 32 random bits. Compare them with a
    threshold. Uses no multiplication of integers, which TPUs emulate.
    """
    bits = (words[0] ^ column_words[0]) + (words[1] ^ column_words[1])
    bits += bits << 7
    bits ^= lax.shift_right_logical(bits, jnp.int32(15))
    bits += bits << 10
    second = bits << 16
    return bits ^ second, second


class HiddenDropout(NamedTuple):
    """Dropout of hidden states, a function of (row, position, column).

    Attributes:
      words: two int32 `[batch, ...]`, of each position.
      threshold: int32 scalar; the share of int32 below it is the rate.
      scale: float32 scalar, 1 / (1 - rate).
    """

    words: tuple[jax.Array, jax.Array]
    threshold: jax.Array
    scale: jax.Array

    def apply(self, x: jax.Array) -> jax.Array:
        """Applies dropout to `[batch, ..., columns]`."""
        bits, _ = random_bits([words[..., None] for words in self.words], column_words(x.shape[-1]))
        return jnp.where(bits < self.threshold, 0, x * self.scale.astype(x.dtype))

    def at(self, positions: jax.Array) -> "HiddenDropout":
        """Returns the dropout of the hidden states at int32 `[batch, K]` positions."""
        chosen = [jnp.take_along_axis(words, positions, axis=1) for words in self.words]
        return self._replace(words=tuple(chosen))


def hidden_dropout(key: jax.Array, settings: Dropout, shape: tuple[int, ...]) -> HiddenDropout:
    """Returns dropout of hidden states `[batch, *shape, columns]` with a key."""
    words = random_words(jax.random.bits(key, (2, 2), jnp.uint32), settings.rows, shape)
    rate = jnp.asarray(settings.rate, jnp.float32)
    threshold = jnp.round((rate - 0.5) * 2.0**32).astype(jnp.int32)
    return HiddenDropout(tuple(words), threshold, 1.0 / (1.0 - rate))


def dropout(key: jax.Array, x: jax.Array, settings: Dropout) -> jax.Array:
    """Zeroes elements of `x`, `[batch, ...]`, at the rate of `settings`, and scales the others."""
    return _dropout(hidden_dropout(key, settings, x.shape[1:-1]), x)


@jax.custom_vjp
def _dropout(mask, x):
    return mask.apply(x)


_dropout.defvjp(lambda mask, x: (mask.apply(x), mask), lambda mask, dy: (None, mask.apply(dy)))


def add_dropout(
    mask: HiddenDropout | None, x: jax.Array, y: jax.Array, bias: jax.Array
) -> jax.Array:
    """Returns x + dropout(y + bias), without dropout if `mask` is None.

    The gradients of all three are computed in one pass, and no operation computes them again.
    """
    return _add_dropout(mask, x, y, bias) if mask else x + (y + bias.astype(y.dtype))


@jax.custom_vjp
def _add_dropout(mask, x, y, bias):
    return x + mask.apply(y + bias.astype(y.dtype))


def _add_dropout_backward(mask, dx):
    dy = mask.apply(dx)
    dbias = jnp.sum(dy.astype(jnp.float32), tuple(range(dy.ndim - 1)))
    return None, *lax.optimization_barrier((dx, dy, dbias))


_add_dropout.defvjp(lambda *args: (_add_dropout(*args), args[0]), _add_dropout_backward)


class AttentionDropout(NamedTuple):
    """Dropout of attention probabilities, a function of (row, head, query, key).

    Attributes:
      words: int32 `[batch, pairs of heads, 2, length]`, of each query; the two heads of a
        pair share one hash.
      key_words: int32 `[2, length]`.
      threshold: int32 scalar; the share of int32 below it is the rate, a multiple of 2^-16.
      scale: float32 scalar, 1 / (1 - rate).
    """

    words: jax.Array
    key_words: jax.Array
    threshold: jax.Array
    scale: jax.Array

    def apply(self, probabilities: jax.Array) -> jax.Array:
        """Applies dropout to attention probabilities, `[batch, heads, query, key]`."""
        num_heads, dtype = probabilities.shape[1], probabilities.dtype
        words = jnp.repeat(self.words, 2, axis=1)[:, :num_heads, :, :, None]
        even, odd = random_bits((words[:, :, 0], words[:, :, 1]), self.key_words)
        bits = jnp.where(jnp.arange(num_heads)[:, None, None] % 2, odd, even)
        return jnp.where(bits < self.threshold, 0, probabilities * self.scale.astype(dtype))


def attention_dropout(
    key: jax.Array, settings: Dropout, num_heads: int, length: int
) -> AttentionDropout:
    """Returns dropout of attention probabilities with a key."""
    seed = jax.random.bits(key, (2, 2), jnp.uint32)
    words = random_words(seed, settings.rows, (-(-num_heads // 2), length))
    rate = settings.rate if settings.attention_rate is None else settings.attention_rate
    steps = jnp.minimum(jnp.round(rate * 2.0**16), 2.0**16 - 1)
    threshold = (steps.astype(jnp.int32) - 2**15) << 16
    words = jnp.moveaxis(words, 0, 2), column_words(length)
    return AttentionDropout(*words, threshold, 2.0**16 / (2.0**16 - steps))


def layer_dropouts(
    key: jax.Array, settings: Dropout, num_layers: int, num_heads: int, length: int
) -> tuple[AttentionDropout | HiddenDropout, ...]:
    """Returns dropout of attention and of both sublayers, `words` stacked over layers.

    Drawn for all layers at once: in each layer, it would be some thirty small operations.
    """

    def draw(key):
        keys = jax.random.split(key, 3)
        hidden = (hidden_dropout(key, settings, (length,)) for key in keys[1:])
        return attention_dropout(keys[0], settings, num_heads, length), *hidden

    axes = AttentionDropout(0, None, None, None), *[HiddenDropout(0, None, None)] * 2
    return jax.vmap(draw, out_axes=axes)(jax.random.split(key, num_layers))
