"""The output of a sublayer in one TPU kernel: LayerNorm(x + dropout(f(inputs) @ kernel + bias)).

`f` is GELU or nothing. The compiler runs GELU, the product and what follows it one after another;
in a kernel, the vector units work while the matrix units multiply. A program takes a block of rows
of tokens and, one after another, chunks of the product's inner dimension. The gradient
computes LayerNorm's statistics again from the saved sum, and dropout from the same words.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.model.dropout import HiddenDropout, column_words, random_bits
from bert_jax.model.layers import gelu_and_slope
from bert_jax.model.tpu.attention_kernel import LANES, dot

BLOCK_BYTES = 3 * 2**18  # Several such blocks fit into 16 MiB of on-chip memory.


class Settings(NamedTuple):
    """What is static: `epsilon` of LayerNorm; `interpret` runs kernels on any device, for tests."""

    has_gelu: bool
    epsilon: float
    interpret: bool = False


def block_sizes(num_tokens: int, inner: int, hidden: int, dtype) -> tuple[int, int] | None:
    """Returns the tokens and the inner size of a program's blocks; None if no size divides."""
    max_size = BLOCK_BYTES // jnp.dtype(dtype).itemsize
    fitting = [n for n in (512, 256) if n * hidden <= max_size and num_tokens % n == 0]
    # Two blocks or more, for chips of two cores.
    tokens = next((n for n in fitting if num_tokens > n), 0)
    chunks = [n for n in range(1024, 0, -LANES) if n * tokens <= max_size and inner % n == 0]
    return (tokens, chunks[0]) if tokens and chunks and hidden % LANES == 0 else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sublayer(
    settings: Settings,
    stacks: tuple[jax.Array, jax.Array, jax.Array | None],
    layer: int | jax.Array,
    dropout: HiddenDropout | None,
    inputs: jax.Array,
    x: jax.Array,
    params: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array]:
    """Returns the output `[tokens, hidden]`, and the stack of sums with that of this layer.

    Args:
      settings: see `Settings`.
      stacks: of inputs, `[layers, ..., inner]`; of sums before LayerNorm, `[layers, tokens,
        hidden]`, which is written in place; of matrices, `[layers, inner, hidden]`, or None.
      layer: index into the stacks.
      dropout: of the product, or None.
      inputs: `[tokens, inner]`, only to receive a gradient: values are read from `stacks`, as are
        those of the matrix if `stacks` has it.
      x: `[tokens, hidden]`, to which the product is added.
      params: matrix `[inner, hidden]`; its bias, and LayerNorm's scale and bias, `[hidden]`; with
        GELU, the bias of its inputs, `[inner]`.
    """
    return _sublayer_forward(settings, stacks, layer, dropout, inputs, x, params)[0]


def _sublayer_forward(settings, stacks, layer, dropout, inputs, x, params):
    y, sums = _call(_forward_kernel, settings, stacks, layer, dropout, x, params, "ys")
    return (y, sums), ((stacks[0], sums, stacks[2]), layer, dropout, params)


def _sublayer_backward(settings, residuals, gradients):
    stacks, layer, dropout, params = residuals
    arguments = settings, stacks, layer, dropout, gradients[0], params
    outputs = "yyibc" if settings.has_gelu else "yyib"
    dx, dproduct, dinputs, by_column, *dinner = _call(_backward_kernel, *arguments, outputs)
    inputs = stacks[0].reshape(len(stacks[0]), *dinputs.shape)
    inputs = lax.dynamic_index_in_dim(inputs, layer, 0, keepdims=False)
    if settings.has_gelu:
        inputs = inputs.astype(jnp.float32) + params[-1]
        inputs = gelu_and_slope(inputs, dx.dtype)[0].astype(dx.dtype)
    dmatrix = dot(inputs, dproduct, 0, 0)
    dparams = dmatrix, *jnp.sum(by_column, (0, 2)), *(jnp.sum(each, (0, 1)) for each in dinner)
    dparams = tuple(d.astype(p.dtype) for d, p in zip(dparams, params, strict=True))
    return None, None, None, dinputs, dx, dparams


sublayer.defvjp(_sublayer_forward, _sublayer_backward)


def _call(kernel, settings: Settings, stacks, layer, dropout, x, params, outputs: str):
    """Runs `kernel` for all blocks of tokens and chunks.

    The letters of `outputs` are "y" (like `x`), "s" (the stack of sums), "i" (like the inputs), and
    sums over tokens, "b" `[blocks, 3, 8, hidden]` and "c" `[blocks, 8, inner]`.
    """
    (inputs, sums, matrices), (matrix, *vectors) = stacks, params
    matrices = (matrix[None] if matrices is None else matrices).astype(x.dtype)
    (num_tokens, hidden), inner, dtype = x.shape, inputs.shape[-1], x.dtype
    tokens, chunk = block_sizes(num_tokens, inner, hidden, dtype)
    num_blocks, num_chunks, is_forward = num_tokens // tokens, inner // chunk, "s" in outputs

    def stack_spec(size, at):
        block = None, tokens, size
        return pl.BlockSpec(block, lambda block, n, layer: (layer[0], block, n * at))

    def matrix_index(block, n, layer):
        return layer[0] if len(matrices) > 1 else 0, n, 0

    like_x = pl.BlockSpec((tokens, hidden), lambda block, *_: (block, 0))
    vector = pl.BlockSpec((1, hidden), lambda *_: (0, 0))
    # Forward, the sums are passed only to be aliased with the output, not read.
    unread = pl.BlockSpec((None, 16, LANES), lambda *_: (0, 0, 0))
    in_specs = [
        *(stack_spec(chunk, 1), unread if is_forward else stack_spec(hidden, 0), like_x),
        pl.BlockSpec((None, chunk, hidden), matrix_index),
        *[vector] * 3,
        *[pl.BlockSpec((1, chunk), lambda block, n, _: (0, n))] * settings.has_gelu,
    ]
    arrays = [inputs.reshape(-1, num_tokens, inner), sums, x, matrices]
    arrays += [vector.astype(jnp.float32)[None] for vector in vectors]
    num_given = len(arrays)
    if dropout:
        words = jnp.stack([word.reshape(num_blocks, tokens) for word in dropout.words], axis=1)
        scalar = pl.BlockSpec((1, 1), lambda *_: (0, 0), memory_space=pltpu.SMEM)
        in_specs += [
            pl.BlockSpec((1, 2, tokens), lambda block, *_: (block, 0, 0)),
            pl.BlockSpec((2, hidden), lambda *_: (0, 0)),
            *[scalar] * 2,
        ]
        arrays += [words, jnp.asarray(column_words(hidden))]
        arrays += [x.reshape(1, 1) for x in (dropout.threshold, dropout.scale)]
    kinds = {
        "y": (like_x, x.shape, dtype),
        "s": (stack_spec(hidden, 0), sums.shape, dtype),
        "i": (
            pl.BlockSpec((tokens, chunk), lambda block, n, _: (block, n)),
            *((num_tokens, inner), dtype),
        ),
        "b": (
            pl.BlockSpec((None, 3, 8, hidden), lambda block, *_: (block, 0, 0, 0)),
            *((num_blocks, 3, 8, hidden), jnp.float32),
        ),
        "c": (
            pl.BlockSpec((None, 8, chunk), lambda block, n, _: (block, 0, n)),
            *((num_blocks, 8, inner), jnp.float32),
        ),
    }

    def run(_, *refs):
        drop = functools.partial(_drop, *refs[num_given : len(arrays)])
        kernel(settings, num_chunks, drop, refs[:num_given], *refs[len(arrays) :])

    variant = "gelu" if settings.has_gelu else "linear"
    return pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_blocks, num_chunks),
            in_specs=in_specs,
            out_specs=[kinds[kind][0] for kind in outputs],
            scratch_shapes=[pltpu.VMEM((tokens, hidden), jnp.float32 if is_forward else dtype)],
        ),
        out_shape=[jax.ShapeDtypeStruct(*kinds[kind][1:]) for kind in outputs],
        input_output_aliases={2: 1} if is_forward else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=settings.interpret,
        name=f"{kernel.__name__.strip('_')}_{variant}",  # For tpu/hlo_cost.py.
    )(jnp.full(1, layer, jnp.int32), *arrays)


def _forward_kernel(settings, num_chunks, drop, given, y_ref, sum_ref, buffer):
    inputs_ref, _, x_ref, kernel_ref, bias_ref, scale_ref, shift_ref, *inner_bias_ref = given
    chunk, last = pl.program_id(1), num_chunks - 1

    def product():
        inputs = inputs_ref[...]
        if settings.has_gelu:
            biased = inputs.astype(jnp.float32) + inner_bias_ref[0][...]
            inputs = gelu_and_slope(biased, inputs.dtype)[0].astype(inputs.dtype)
        return dot(inputs, kernel_ref[...], 1, 0)

    def add(is_first):
        buffer[...] = product() if is_first else buffer[...] + product()

    def finish():
        whole = product() + (buffer[...] if last else 0.0)
        for rows in _parts(x_ref.shape[0]):
            total = x_ref[rows, :].astype(jnp.float32) + drop(rows, whole[rows] + bias_ref[...])
            sum_ref[rows, :] = total.astype(sum_ref.dtype)
            normalized, _ = _normalize(settings, sum_ref[rows, :])
            y_ref[rows, :] = (normalized * scale_ref[...] + shift_ref[...]).astype(y_ref.dtype)

    if last == 0:
        finish()
    else:
        pl.when(chunk == last)(finish)
        pl.when(chunk == 0)(lambda: add(True))
        pl.when((chunk > 0) & (chunk < last))(lambda: add(False))


def _backward_kernel(
    settings, num_chunks, drop, given, dx_ref, dproduct_ref, dinputs_ref, by_column_ref, *rest
):
    inputs_ref, sum_ref, dy_ref, kernel_ref, _, scale_ref, _, *inner_bias_ref = given
    *dinner_ref, buffer = rest

    def start():
        totals = [0.0] * 3
        for rows in _parts(sum_ref.shape[0]):
            normalized, inverse_std = _normalize(settings, sum_ref[rows, :])
            dy = dy_ref[rows, :].astype(jnp.float32)
            scaled = dy * scale_ref[...]
            mean = jnp.mean(scaled, axis=1, keepdims=True)
            weighted = jnp.mean(scaled * normalized, axis=1, keepdims=True)
            dx = inverse_std * (scaled - mean - normalized * weighted)
            dx_ref[rows, :] = dx.astype(dx_ref.dtype)
            dproduct = drop(rows, dx)
            buffer[rows, :] = dproduct_ref[rows, :] = dproduct.astype(buffer.dtype)
            for n, values in enumerate((dproduct, dy * normalized, dy)):
                totals[n] += _sum_rows(values)
        for n, total in enumerate(totals):
            by_column_ref[n] = total
        finish()

    def finish():
        dinputs = dot(buffer[...], kernel_ref[...], 1, 1)
        if settings.has_gelu:
            biased = inputs_ref[...].astype(jnp.float32) + inner_bias_ref[0][...]
            dinputs *= gelu_and_slope(biased, inputs_ref.dtype)[1]
            dinner_ref[0][...] = _sum_rows(dinputs)
        dinputs_ref[...] = dinputs.astype(dinputs_ref.dtype)

    if num_chunks == 1:
        start()
    else:  # In a branch with `start`, the compiler overlaps the first product with it.
        pl.when(pl.program_id(1) == 0)(start)
        pl.when(pl.program_id(1) > 0)(finish)


def _parts(tokens):
    return [slice(start, start + LANES) for start in range(0, tokens, LANES)]


def _sum_rows(x):
    """Sums whole registers: `[rows, columns]` to `[8, columns]`."""
    return sum(x[start : start + 8] for start in range(0, x.shape[0], 8))


def _normalize(settings, total):
    total = total.astype(jnp.float32)
    centered = total - jnp.mean(total, axis=1, keepdims=True)
    variance = jnp.mean(centered * centered, axis=1, keepdims=True)
    inverse_std = lax.rsqrt(variance + settings.epsilon)
    return centered * inverse_std, inverse_std


def _drop(*args):
    """Applies the dropout of `HiddenDropout`; without its words, returns the last argument."""
    *refs, rows, x = args
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
