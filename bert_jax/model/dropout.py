"""Dropout whose mask is a hash of (key, row, position, column), the same on every mesh.

Each element hashes two random words of its position with two of its column. The mask is not stored:
the backward pass repeats the hash, as do the attention kernels. (JAX's own generators take longer
than some of BERT's matrix products.)
"""

import math
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Seeds the words of columns: fractional digits of the golden ratio, e, pi and sqrt(2).
COLUMN_SEED = np.array([[0x9E3779B9, 0xB7E15162], [0x243F6A88, 0x6A09E667]], np.uint32)


class Dropout(NamedTuple):
    """The dropout of one step; a traced `rate` can change without recompilation.

    Attributes:
      key: PRNG key, from which each place in the model derives its own by name.
      rows: int32 `[batch]`, index of each row in the global batch, which seeds its dropout; None
        until the rows of a microbatch are known.
      rate: probability of each element to be zeroed, in [0, 1).
      attention_rate: probability of each attention weight to be zeroed; None means `rate`.
    """

    key: jax.Array
    rows: jax.Array | None
    rate: float | jax.Array
    attention_rate: float | jax.Array | None = None

    def rate_of(self, name: str) -> float | jax.Array:
        """Returns the field `name`, one of the rates, or its default."""
        rate = getattr(self, name)
        return self.rate if rate is None else rate

    def at_place(self, name: str) -> "Dropout":
        """Returns the dropout of the place `name` in the model, with a key of its own.

        The names decide what is dropped: a renamed place drops other elements.
        """
        return self._replace(key=jax.random.fold_in(self.key, zlib.crc32(name.encode())))


def as_dropout(module: nn.Module, dropout: Dropout | float | None, num_rows: int) -> Dropout | None:
    """Returns the dropout of a rate, with the key `rngs={"dropout": key}` of the Flax module.

    Any other `dropout` is returned as it is. Raises ValueError for a rate outside of [0, 1).
    """
    if dropout is None or isinstance(dropout, Dropout):
        return dropout
    if not isinstance(dropout, jax.core.Tracer) and not 0 <= dropout < 1:
        raise ValueError(f"dropout must be a rate in [0, 1), got {dropout}")
    return Dropout(module.make_rng("dropout"), jnp.arange(num_rows), dropout)


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
        scaled = (x.astype(jnp.float32) * self.scale).astype(x.dtype)  # bfloat16 rounds the scale.
        return jnp.where(bits < self.threshold, 0, scaled)

    def at(self, positions: jax.Array) -> "HiddenDropout":
        """Returns the dropout of the hidden states at int32 `[batch, K]` positions."""
        chosen = [jnp.take_along_axis(words, positions, axis=1) for words in self.words]
        return self._replace(words=tuple(chosen))


def is_zero(rate: float | jax.Array) -> bool:
    """Returns whether a rate is the number 0: nothing is drawn; a traced one may be any."""
    return isinstance(rate, int | float) and rate == 0


def hidden_dropout(dropout: Dropout, shape: tuple[int, ...]) -> HiddenDropout | None:
    """Returns dropout of hidden states `[batch, *shape, columns]`; None if its rate is zero."""
    if is_zero(dropout.rate):
        return None
    words = random_words(jax.random.bits(dropout.key, (2, 2), jnp.uint32), dropout.rows, shape)
    rate = jnp.asarray(dropout.rate, jnp.float32)
    threshold = jnp.round((rate - 0.5) * 2.0**32).astype(jnp.int32)
    return HiddenDropout(tuple(words), threshold, 1.0 / (1.0 - rate))


def dropout_at(dropout: Dropout | None, name: str, x: jax.Array) -> jax.Array:
    """Applies `dropout` to `x`, `[batch, ..., columns]`, at the place `name` in the model."""
    if dropout is None:
        return x
    return apply_dropout(x, hidden_dropout(dropout.at_place(name), x.shape[1:-1]))


def apply_dropout(x: jax.Array, dropout: HiddenDropout | None) -> jax.Array:
    """Zeroes elements of `x`, `[batch, ..., columns]`, and scales the others; None: keeps all."""
    return x if dropout is None else _dropout(dropout, x)


@jax.custom_vjp
def _dropout(mask, x):
    return mask.apply(x)


_dropout.defvjp(lambda mask, x: (mask.apply(x), mask), lambda mask, dy: (None, mask.apply(dy)))


def add_with_dropout(x: jax.Array, y: jax.Array, dropout: HiddenDropout | None) -> jax.Array:
    """Returns x + dropout(y): the residual connection of a sublayer."""
    return x + y if dropout is None else _add_with_dropout(dropout, x, y)


@jax.custom_vjp
def _add_with_dropout(dropout, x, y):
    return x + dropout.apply(y)


def _add_with_dropout_backward(dropout, dx):
    # Computes dy once: else each of the products that read it would compute it again.
    return None, *lax.optimization_barrier((dx, dropout.apply(dx)))


_add_with_dropout.defvjp(
    lambda *args: (_add_with_dropout(*args), args[0]), _add_with_dropout_backward
)


class AttentionDropout(NamedTuple):
    """Dropout of attention probabilities, a function of (row, head, query, key).

    Attributes:
      words: int32 `[batch, pairs of heads, 2, length]`, of each query; the two heads of a
        pair share one hash.
      key_words: int32 `[2, length]`, of each position that is attended to.
      threshold: int32 scalar; the share of int32 below it is the rate, a multiple of 2^-16.
      scale: float32 scalar, 1 / (1 - rate).
    """

    words: jax.Array
    key_words: jax.Array
    threshold: jax.Array
    scale: jax.Array

    def apply(self, probabilities: jax.Array) -> jax.Array:
        """Applies dropout to attention probabilities, `[batch, heads, query, key]`."""
        num_heads = probabilities.shape[1]
        words = jnp.repeat(self.words, 2, axis=1)[:, :num_heads, :, :, None]
        even, odd = random_bits((words[:, :, 0], words[:, :, 1]), self.key_words)
        bits = jnp.where(jnp.arange(num_heads)[:, None, None] % 2, odd, even)
        factors = jnp.where(bits < self.threshold, 0, self.scale)
        return (probabilities.astype(jnp.float32) * factors).astype(probabilities.dtype)


def attention_dropout(dropout: Dropout, num_heads: int, length: int) -> AttentionDropout:
    """Returns dropout of attention probabilities."""
    seed = jax.random.bits(dropout.key, (2, 2), jnp.uint32)
    query_words = random_words(seed, dropout.rows, (-(-num_heads // 2), length))
    steps = jnp.minimum(jnp.round(dropout.rate_of("attention_rate") * 2.0**16), 2.0**16 - 1)
    threshold = (steps.astype(jnp.int32) - 2**15) << 16
    scale = 2.0**16 / (2.0**16 - steps)
    return AttentionDropout(
        jnp.moveaxis(query_words, 0, 2), jnp.asarray(column_words(length)), threshold, scale
    )


class OfTable(NamedTuple):
    """The rate of a place that drops elements of a table, the same ones for all rows of a batch.

    Attributes:
      rate: the name of a rate of `Dropout`, or a number.
      num_rows: of the table.
    """

    rate: str | float
    num_rows: int


LayerDropout = dict[str, HiddenDropout | AttentionDropout]
"""Dropout of an encoder layer by the name of its place; nothing is dropped at places without one.

"attention" is of attention probabilities, all others are of `[batch, length, columns]` or, of a
table, `[1, num_rows, columns]`. For all layers together, every array has a leading axis of layers.
"""


def finishing_dropout(dropout: LayerDropout, positions: jax.Array) -> LayerDropout:
    """Returns the dropout of a layer that finishes only int32 `[batch, K]` positions.

    Attention still covers all positions.
    """
    return {
        place: each.at(positions) if isinstance(each, HiddenDropout) else each
        for place, each in dropout.items()
    }


def layer_dropout(
    dropout: Dropout,
    places: Mapping[str, str | float | OfTable],
    num_layers: int,
    num_heads: int,
    length: int,
) -> LayerDropout:
    """Returns the dropout of all layers, stacked, without the places whose rate is zero.

    `places` has the rate of each: the name of one of `Dropout`, or a number; or `OfTable`.

    Drawn for all layers at once: in each layer, it would be some thirty small operations.
    """

    def draw(key):
        drawn = {}
        keys = jax.random.split(key, len(places))
        for (place, rate), own_key in zip(places.items(), keys, strict=True):
            rows, shape = dropout.rows, (length,)
            if isinstance(rate, OfTable):
                rows, shape, rate = jnp.zeros(1, jnp.int32), (rate.num_rows,), rate.rate
            rate = dropout.rate_of(rate) if isinstance(rate, str) else rate
            if is_zero(rate):
                continue
            own = Dropout(own_key, rows, rate)
            if place == "attention":
                drawn[place] = attention_dropout(own, num_heads, length)
            else:
                drawn[place] = hidden_dropout(own, shape)
        return drawn

    return jax.vmap(draw)(jax.random.split(dropout.key, num_layers))
