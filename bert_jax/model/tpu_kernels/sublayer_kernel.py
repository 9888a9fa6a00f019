"""The output of a sublayer in one TPU kernel: LayerNorm(x + dropout(f(inputs) @ matrix + bias)).

`f` is GELU, exact or in its tanh form, or nothing. The compiler runs GELU, the product and what
follows it one after another; in a kernel, the vector units work while the matrix units multiply. A
program takes a block of rows of tokens and, one after another, chunks of the product's inner
dimension. The gradient computes LayerNorm's statistics again from the saved sum, and dropout from
the same words.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.model.dropout import HiddenDropout
from bert_jax.model.layers import gelu_and_slope
from bert_jax.model.tpu_kernels.blocks import LANES, BlockedArray, dot, kernel_name
from bert_jax.model.tpu_kernels.kernel_dropout import apply_dropout_in_kernel, dropout_inputs

ACTIVATIONS = ("gelu", "gelu_tanh")
BLOCK_BYTES = 3 * 2**18  # Several such blocks fit into 16 MiB of on-chip memory.


class Options(NamedTuple):
    """What is static: `epsilon` of LayerNorm; `interpret` runs kernels on any device, for tests.

    `activation`, one of `ACTIVATIONS`, is applied to the inputs and their bias; None: the inputs
    are multiplied as they are. The output of layer n is entry n + `offset` of `Stacks.outputs`.
    """

    activation: str | None
    epsilon: float
    offset: int = 0
    interpret: bool = False


def block_sizes(num_tokens: int, inner: int, hidden: int, dtype) -> tuple[int, int] | None:
    """Returns the tokens and the inner size of a program's blocks; None if no size divides."""
    max_size = BLOCK_BYTES // jnp.dtype(dtype).itemsize
    fitting = [n for n in (512, 256) if n * hidden <= max_size and num_tokens % n == 0]
    # Two blocks or more, for chips of two cores.
    tokens = next((n for n in fitting if num_tokens > n), 0)
    chunks = [n for n in range(1024, 0, -LANES) if n * tokens <= max_size and inner % n == 0]
    return (tokens, chunks[0]) if tokens and chunks and hidden % LANES == 0 else None


class SublayerParams(NamedTuple):
    """The parameters of a sublayer's output, float32.

    Attributes:
      matrix: `[inner, hidden]`.
      bias: of the product, `[hidden]`.
      scale, shift: of LayerNorm, `[hidden]`.
      inner_bias: of the inputs, `[inner]`; None without an activation.
    """

    matrix: jax.Array
    bias: jax.Array
    scale: jax.Array
    shift: jax.Array
    inner_bias: jax.Array | None = None


class Stacks(NamedTuple):
    """Arrays with a leading axis of layers, which the kernels read and write in place.

    Attributes:
      inputs: `[layers, ..., inner]`.
      residuals: to which the product is added, `[layers, ..., hidden]`; None in the backward pass.
      sums: of both, before LayerNorm, `[layers, tokens, hidden]`.
      outputs: `[layers, ..., hidden]`; None in the backward pass.
      matrices: `[layers, inner, hidden]`, or None.
    """

    inputs: jax.Array
    residuals: jax.Array | None
    sums: jax.Array
    outputs: jax.Array | None
    matrices: jax.Array | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sublayer(
    options: Options,
    stacks: Stacks,
    layer: int | jax.Array,
    dropout: HiddenDropout | None,
    inputs: jax.Array,
    x: jax.Array,
    params: SublayerParams,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the output `[..., hidden]`, and `stacks.sums` and `stacks.outputs` with this layer's.

    Args:
      options: see `Options`.
      stacks: the sums and outputs are written in place.
      layer: index into `stacks`.
      dropout: of the product, or None.
      inputs: `[..., inner]`, only to receive a gradient: the kernel reads `stacks.inputs`.
      x: `[..., hidden]`, only to receive a gradient: the kernel reads `stacks.residuals`.
      params: of this layer; the kernel reads `stacks.matrices`, if it is there.
    """
    return _sublayer_forward(options, stacks, layer, dropout, inputs, x, params)[0]


def _sublayer_forward(options, stacks, layer, dropout, inputs, x, params):
    arrays = _Arrays.from_shapes(stacks)
    # What is written only shares its memory with the output, which needs any block of it.
    any_block = pl.BlockSpec((None, 16, LANES), lambda *_: (0, 0, 0))
    sums, outputs = _call(
        _forward_kernel,
        options,
        layer,
        stacks,
        params,
        dropout,
        given=[
            _Given(stacks.sums, any_block, output=0),
            _Given(_by_tokens(stacks.residuals), arrays.of_layers(stacks.residuals).spec),
            _Given(_by_tokens(stacks.outputs), any_block, output=1),
        ],
        outputs=[
            arrays.of_layers(stacks.sums),
            arrays.of_layers(stacks.outputs, options.offset),
        ],
        buffer_dtype=jnp.float32,
    )
    outputs = outputs.reshape(stacks.outputs.shape)
    y = lax.dynamic_index_in_dim(outputs, layer + options.offset, 0, keepdims=False)
    read_backward = stacks._replace(residuals=None, sums=sums, outputs=None)
    return (y, sums, outputs), (read_backward, layer, dropout, params)


def _by_tokens(array: jax.Array) -> jax.Array:
    """Joins the axes between the first and the last: `[layers, tokens, columns]`."""
    return array.reshape(len(array), -1, array.shape[-1])


def _sublayer_backward(options, residuals, gradients):
    stacks, layer, dropout, params = residuals
    dy, *_ = gradients
    arrays = _Arrays.from_shapes(stacks)
    outputs = [arrays.like_x, arrays.like_x, arrays.like_inputs, arrays.column_sums]
    if options.activation:
        outputs.append(arrays.inner_sums)
    dx, dproduct, dinputs, column_sums, *inner_sums = _call(
        _backward_kernel,
        options,
        layer,
        stacks,
        params,
        dropout,
        given=[
            _Given(stacks.sums, arrays.of_layers(stacks.sums).spec),
            _Given(dy.reshape(arrays.like_x.shape.shape), arrays.like_x.spec),
        ],
        outputs=outputs,
        buffer_dtype=dy.dtype,
    )
    inputs = lax.dynamic_index_in_dim(_by_tokens(stacks.inputs), layer, 0, keepdims=False)
    if options.activation:
        inputs = inputs.astype(jnp.float32) + params.inner_bias
        inputs = gelu_and_slope(options.activation, inputs, dx.dtype)[0].astype(dx.dtype)
    dbias, dscale, dshift = jnp.sum(column_sums, (0, 2))
    dparams = SublayerParams(
        matrix=dot(inputs, dproduct, 0, 0),
        bias=dbias,
        scale=dscale,
        shift=dshift,
        inner_bias=jnp.sum(inner_sums[0], (0, 1)) if options.activation else None,
    )
    dparams = jax.tree.map(lambda d, param: d.astype(param.dtype), dparams, params)
    dinputs = dinputs.reshape(*dy.shape[:-1], -1)
    return None, None, None, dinputs, dx.reshape(dy.shape), dparams


sublayer.defvjp(_sublayer_forward, _sublayer_backward)


class _Arrays(NamedTuple):
    """The arrays of the kernels, in blocks of tokens and chunks of the inner dimension."""

    like_x: BlockedArray  # [tokens, hidden]
    like_inputs: BlockedArray  # [tokens, inner]
    column_sums: BlockedArray  # [blocks, 3, 8, hidden], float32: sums over tokens.
    inner_sums: BlockedArray  # [blocks, 8, inner], float32: sums over tokens.

    @classmethod
    def from_shapes(cls, stacks: Stacks) -> "_Arrays":
        (_, num_tokens, hidden), inner = stacks.sums.shape, stacks.inputs.shape[-1]
        dtype = stacks.sums.dtype
        tokens, chunk = block_sizes(num_tokens, inner, hidden, dtype)
        blocks = num_tokens // tokens
        return cls(
            like_x=BlockedArray(
                pl.BlockSpec((tokens, hidden), lambda block, *_: (block, 0)),
                jax.ShapeDtypeStruct((num_tokens, hidden), dtype),
            ),
            like_inputs=BlockedArray(
                pl.BlockSpec((tokens, chunk), lambda block, n, _: (block, n)),
                jax.ShapeDtypeStruct((num_tokens, inner), dtype),
            ),
            column_sums=BlockedArray(
                pl.BlockSpec((None, 3, 8, hidden), lambda block, *_: (block, 0, 0, 0)),
                jax.ShapeDtypeStruct((blocks, 3, 8, hidden), jnp.float32),
            ),
            inner_sums=BlockedArray(
                pl.BlockSpec((None, 8, chunk), lambda block, n, _: (block, 0, n)),
                jax.ShapeDtypeStruct((blocks, 8, inner), jnp.float32),
            ),
        )

    def of_layers(self, array: jax.Array, offset: int = 0) -> BlockedArray:
        """Describes `[layers, tokens, hidden]`, of which a program has layer + offset."""
        (num_tokens, hidden), dtype = self.like_x.shape.shape, self.like_x.shape.dtype
        tokens, _ = self.like_x.spec.block_shape
        block = None, tokens, hidden
        return BlockedArray(
            pl.BlockSpec(block, lambda block, n, layer: (layer[0] + offset, block, 0)),
            jax.ShapeDtypeStruct((len(array), num_tokens, hidden), dtype),
        )


class _Given(NamedTuple):
    """An array that a kernel reads, in blocks; or of which `output` is a changed version."""

    array: jax.Array
    spec: pl.BlockSpec
    output: int | None = None


def _call(
    kernel: Callable,
    options: Options,
    layer: int | jax.Array,
    stacks: Stacks,
    params: SublayerParams,
    dropout: HiddenDropout | None,
    *,
    given: list[_Given],
    outputs: list[BlockedArray],
    buffer_dtype,
) -> list[jax.Array]:
    """Runs `kernel` for all blocks of tokens and chunks.

    It reads the inputs of the product, the arrays that are `given`, and the parameters; its buffer
    is `[tokens of a block, hidden]`.
    """
    (_, num_tokens, hidden), dtype = stacks.sums.shape, stacks.sums.dtype
    inner = stacks.inputs.shape[-1]
    tokens, chunk = block_sizes(num_tokens, inner, hidden, dtype)
    num_chunks = inner // chunk
    matrices = params.matrix[None] if stacks.matrices is None else stacks.matrices

    def matrix_index(block, n, layer):
        return layer[0] if len(matrices) > 1 else 0, n, 0

    vector = pl.BlockSpec((1, hidden), lambda *_: (0, 0))
    vectors = [params.bias, params.scale, params.shift]
    in_specs = [
        pl.BlockSpec((None, tokens, chunk), lambda block, n, layer: (layer[0], block, n)),
        *[each.spec for each in given],
        pl.BlockSpec((None, chunk, hidden), matrix_index),
        vector,
        vector,
        vector,
    ]
    if options.activation:
        in_specs.append(pl.BlockSpec((1, chunk), lambda block, n, _: (0, n)))
        vectors.append(params.inner_bias)
    arrays = [_by_tokens(stacks.inputs), *[each.array for each in given], matrices.astype(dtype)]
    arrays += [vector.astype(jnp.float32)[None] for vector in vectors]
    num_given = len(arrays)
    if dropout is not None:
        specs, words = dropout_inputs(dropout, num_tokens, tokens, hidden)
        in_specs += specs
        arrays += words

    def run(_, *refs):
        drop = functools.partial(apply_dropout_in_kernel, refs[num_given : len(arrays)])
        kernel(options, num_chunks, drop, refs[:num_given], *refs[len(arrays) :])

    # Operands are numbered from the layer and the inputs of the product.
    aliases = {2 + n: each.output for n, each in enumerate(given) if each.output is not None}
    return pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_tokens // tokens, num_chunks),
            in_specs=in_specs,
            out_specs=[output.spec for output in outputs],
            scratch_shapes=[pltpu.VMEM((tokens, hidden), buffer_dtype)],
        ),
        out_shape=[output.shape for output in outputs],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=options.interpret,
        name=kernel_name(kernel, options.activation or "linear", dropout is not None),
    )(jnp.full(1, layer, jnp.int32), *arrays)


def _forward_kernel(options, num_chunks, drop, input_refs, sum_ref, y_ref, buffer):
    inputs_ref, _, x_ref, _, matrix_ref, *vector_refs = input_refs
    bias_ref, scale_ref, shift_ref, *inner_bias_ref = vector_refs
    chunk, last = pl.program_id(1), num_chunks - 1

    def product():
        inputs = inputs_ref[...]
        if options.activation:
            biased = inputs.astype(jnp.float32) + inner_bias_ref[0][...]
            activated, _ = gelu_and_slope(options.activation, biased, inputs.dtype)
            inputs = activated.astype(inputs.dtype)
        return dot(inputs, matrix_ref[...], 1, 0)

    def add(is_first):
        buffer[...] = product() if is_first else buffer[...] + product()

    def finish():
        whole = product() + (buffer[...] if last else 0.0)
        for rows in _parts(x_ref.shape[0]):
            total = x_ref[rows, :].astype(jnp.float32) + drop(rows, whole[rows] + bias_ref[...])
            sum_ref[rows, :] = total.astype(sum_ref.dtype)
            normalized, _ = _normalize(options, sum_ref[rows, :])
            y_ref[rows, :] = (normalized * scale_ref[...] + shift_ref[...]).astype(y_ref.dtype)

    if last == 0:
        finish()
    else:
        pl.when(chunk == last)(finish)
        pl.when(chunk == 0)(lambda: add(True))
        pl.when((chunk > 0) & (chunk < last))(lambda: add(False))


def _backward_kernel(
    options, num_chunks, drop, input_refs, dx_ref, dproduct_ref, dinputs_ref, by_column_ref, *rest
):
    inputs_ref, sum_ref, dy_ref, matrix_ref, _, scale_ref, _, *inner_bias_ref = input_refs
    *dinner_ref, buffer = rest

    def start():
        totals = [0.0] * 3
        for rows in _parts(sum_ref.shape[0]):
            normalized, inverse_std = _normalize(options, sum_ref[rows, :])
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
        dinputs = dot(buffer[...], matrix_ref[...], 1, 1)
        if options.activation:
            biased = inputs_ref[...].astype(jnp.float32) + inner_bias_ref[0][...]
            dinputs *= gelu_and_slope(options.activation, biased, inputs_ref.dtype)[1]
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


def _normalize(options, total):
    total = total.astype(jnp.float32)
    centered = total - jnp.mean(total, axis=1, keepdims=True)
    variance = jnp.mean(centered * centered, axis=1, keepdims=True)
    inverse_std = lax.rsqrt(variance + options.epsilon)
    return centered * inverse_std, inverse_std
