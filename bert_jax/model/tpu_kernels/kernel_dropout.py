"""Dropout of hidden states inside a TPU kernel."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.model.dropout import HiddenDropout, column_words, random_bits
from bert_jax.model.tpu_kernels.blocks import LANES


def dropout_inputs(
    dropout: HiddenDropout, num_tokens: int, tokens: int, hidden: int
) -> tuple[list[pl.BlockSpec], list[jax.Array]]:
    """Returns the blocks and the arrays that `apply_dropout_in_kernel` reads."""
    words = [word.reshape(num_tokens // tokens, tokens) for word in dropout.words]
    scalar = pl.BlockSpec((1, 1), lambda *_: (0, 0), memory_space=pltpu.SMEM)
    specs = [
        pl.BlockSpec((1, 2, tokens), lambda block, *_: (block, 0, 0)),
        pl.BlockSpec((2, hidden), lambda *_: (0, 0)),
        scalar,
        scalar,
    ]
    arrays = [
        jnp.stack(words, axis=1),
        jnp.asarray(column_words(hidden)),
        dropout.threshold.reshape(1, 1),
        dropout.scale.reshape(1, 1),
    ]
    return specs, arrays


def apply_dropout_in_kernel(refs: Sequence, rows: slice, x: jax.Array) -> jax.Array:
    """Applies the dropout of `HiddenDropout` to `rows` of a block, float32 `[rows, hidden]`.

    `refs` are those of `dropout_inputs`; none: keeps all.
    """
    if not refs:
        return x
    words_ref, columns_ref, threshold_ref, scale_ref = refs
    words = [words_ref[0, n : n + 1, rows] for n in (0, 1)]
    # From lanes to rows, each in all lanes.
    words = [jnp.broadcast_to(word, (LANES, LANES)).T for word in words]
    result = []
    for start in range(0, x.shape[1], LANES):
        lanes = slice(start, start + LANES)
        columns = [columns_ref[n : n + 1, lanes] for n in (0, 1)]
        bits, _ = random_bits(words, columns)
        result.append(jnp.where(bits < threshold_ref[0, 0], 0.0, x[:, lanes] * scale_ref[0, 0]))
    return jnp.concatenate(result, axis=1)
