"""The output of a gated feed-forward network (Shazeer, 2020) in one TPU kernel for each direction.

    y = x + (activation(first half of the inputs) * second half) @ matrix

The kernels overlap the vector work with the product, and read and write the arrays that a loop over
layers saves, in place. A program takes one block of tokens and the whole matrix, which stays on the
chip. The backward kernel also writes what the gradient of the matrix multiplies.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.model.layers import gelu_and_slope
from bert_jax.model.tpu_kernels.blocks import LANES, BlockedArray, dot, kernel_name

MAX_BYTES = 14 * 2**20  # Of all blocks of the backward kernel, twice each but for the matrix.


class Options(NamedTuple):
    """What is static: `interpret` runs kernels on any device, for tests.

    `activation` is one of those of `sublayer_kernel`. The output of layer n is entry n + `offset`
    of `Stacks.outputs`.
    """

    activation: str
    offset: int = 0
    interpret: bool = False


class Stacks(NamedTuple):
    """Arrays with a leading axis of layers, which the kernels read and write in place.

    Attributes:
      inputs: `[layers, ..., 2 * inner]`.
      residuals: to which the product is added, `[layers, ..., hidden]`; None in the backward pass.
      outputs: `[layers, ..., hidden]`; None in the backward pass.
    """

    inputs: jax.Array
    residuals: jax.Array | None
    outputs: jax.Array | None


def block_size(num_tokens: int, inner: int, hidden: int, dtype) -> int | None:
    """Returns the tokens of a program; None if no size divides, or the blocks do not fit."""
    width = 2 * (hidden + 2 * inner + 2 * inner + inner)  # Of what the backward kernel moves.
    itemsize = jnp.dtype(dtype).itemsize
    sizes = [
        size
        for size in (512, 256, 128)
        # Two blocks or more, for chips of two cores.
        if num_tokens % size == 0 and num_tokens > size
        if (inner * hidden + size * width) * itemsize <= MAX_BYTES
    ]
    return sizes[0] if sizes and inner % LANES == 0 and hidden % LANES == 0 else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated_output(
    options: Options,
    stacks: Stacks,
    layer: int | jax.Array,
    inputs: jax.Array,
    x: jax.Array,
    matrix: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the output `[..., hidden]`, and `stacks.outputs` with this layer's.

    Args:
      options: see `Options`.
      stacks: the outputs are written in place.
      layer: index into `stacks`.
      inputs: `[..., 2 * inner]`, only to receive a gradient: the kernel reads `stacks.inputs`.
      x: `[..., hidden]`, only to receive a gradient: the kernel reads `stacks.residuals`.
      matrix: of this layer, `[inner, hidden]`.
    """
    return _forward(options, stacks, layer, inputs, x, matrix)[0]


def _forward(options, stacks, layer, inputs, x, matrix):
    arrays = _Arrays.from_shapes(stacks.inputs, matrix)
    (outputs,) = _call(
        _forward_kernel,
        options,
        layer,
        # Outputs share their memory with the result, which needs any block of it.
        given=[
            (arrays.inputs, stacks.inputs),
            (arrays.of_layers(stacks.residuals).spec, stacks.residuals),
            (pl.BlockSpec((None, 16, LANES), lambda *_: (0, 0, 0)), stacks.outputs),
            (arrays.matrix, matrix.astype(stacks.inputs.dtype)),
        ],
        outputs=[arrays.of_layers(stacks.outputs, options.offset)],
        aliases={3: 0},  # Operands are numbered from the layer.
    )
    outputs = outputs.reshape(stacks.outputs.shape)
    y = lax.dynamic_index_in_dim(outputs, layer + options.offset, 0, keepdims=False)
    read_backward = stacks._replace(residuals=None, outputs=None)
    return (y, outputs), (read_backward, layer, matrix)


def _backward(options, residuals, gradients):
    stacks, layer, matrix = residuals
    dy, _ = gradients
    arrays = _Arrays.from_shapes(stacks.inputs, matrix)
    flat = dy.reshape(-1, dy.shape[-1])
    dinputs, inner = _call(
        _backward_kernel,
        options,
        layer,
        given=[
            (arrays.inputs, stacks.inputs),
            (arrays.like_tokens(flat.shape[1]).spec, flat),
            (arrays.matrix, matrix.astype(dy.dtype)),
        ],
        outputs=[arrays.like_tokens(2 * len(matrix)), arrays.like_tokens(len(matrix))],
    )
    dmatrix = dot(inner, flat, 0, 0).astype(matrix.dtype)
    return None, None, dinputs.reshape(*dy.shape[:-1], -1), dy, dmatrix


gated_output.defvjp(_forward, _backward)


class _Arrays(NamedTuple):
    """The blocks of the kernels."""

    tokens: int  # Of a block.
    num_tokens: int
    dtype: jnp.dtype
    inputs: pl.BlockSpec  # [layers, tokens, 2 * inner]
    matrix: pl.BlockSpec  # [inner, hidden]

    @classmethod
    def from_shapes(cls, inputs: jax.Array, matrix: jax.Array) -> "_Arrays":
        num_tokens = inputs[0].size // inputs.shape[-1]
        tokens = block_size(num_tokens, *matrix.shape, inputs.dtype)
        block = None, tokens, inputs.shape[-1]
        return cls(
            tokens,
            num_tokens,
            inputs.dtype,
            inputs=pl.BlockSpec(block, lambda block, layer: (layer[0], block, 0)),
            # Read once: it needs no second buffer.
            matrix=pl.BlockSpec(matrix.shape, lambda *_: (0, 0), pipeline_mode=pl.Buffered(1)),
        )

    def of_layers(self, array: jax.Array, offset: int = 0) -> BlockedArray:
        """Describes `[layers, tokens, columns]`, of which a program has layer + offset."""
        columns = array.shape[-1]
        block = None, self.tokens, columns
        return BlockedArray(
            pl.BlockSpec(block, lambda block, layer: (layer[0] + offset, block, 0)),
            jax.ShapeDtypeStruct((len(array), self.num_tokens, columns), self.dtype),
        )

    def like_tokens(self, columns: int) -> BlockedArray:
        """Describes `[tokens, columns]`."""
        return BlockedArray(
            pl.BlockSpec((self.tokens, columns), lambda block, *_: (block, 0)),
            jax.ShapeDtypeStruct((self.num_tokens, columns), self.dtype),
        )


def _call(
    kernel: Callable,
    options: Options,
    layer: int | jax.Array,
    given: list[tuple[pl.BlockSpec, jax.Array]],
    outputs: list[BlockedArray],
    aliases: dict[int, int] | None = None,
) -> list[jax.Array]:
    """Runs `kernel` for all blocks of tokens."""
    specs, arrays = zip(*given, strict=True)
    num_tokens, (tokens, _) = outputs[-1].shape.shape[-2], outputs[-1].spec.block_shape[-2:]
    return pl.pallas_call(
        lambda _, *refs: kernel(options, *refs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_tokens // tokens,),
            in_specs=specs,
            out_specs=[output.spec for output in outputs],
        ),
        out_shape=[output.shape for output in outputs],
        input_output_aliases=aliases or {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=options.interpret,
        name=kernel_name(kernel, f"gated_{options.activation}", has_dropout=False),
    )(jnp.full(1, layer, jnp.int32), *[_by_tokens(array) for array in arrays])


def _by_tokens(array: jax.Array) -> jax.Array:
    """Joins the axes between the first and the last: `[layers, tokens, columns]`."""
    return array if array.ndim < 4 else array.reshape(len(array), -1, array.shape[-1])


def _forward_kernel(options, inputs_ref, x_ref, _, matrix_ref, y_ref):
    inner = len(matrix_ref)
    activated, _ = gelu_and_slope(
        options.activation, inputs_ref[:, :inner].astype(jnp.float32), inputs_ref.dtype
    )
    gated = (activated * inputs_ref[:, inner:].astype(jnp.float32)).astype(inputs_ref.dtype)
    y = x_ref[...].astype(jnp.float32) + dot(gated, matrix_ref[...], 1, 0)
    y_ref[...] = y.astype(y_ref.dtype)


def _backward_kernel(options, inputs_ref, dy_ref, matrix_ref, dinputs_ref, gated_ref):
    inner, dtype = len(matrix_ref), inputs_ref.dtype
    dgated = dot(dy_ref[...], matrix_ref[...], 1, 1)
    activated, slope = gelu_and_slope(
        options.activation, inputs_ref[:, :inner].astype(jnp.float32), dtype
    )
    gate = inputs_ref[:, inner:].astype(jnp.float32)
    gated_ref[...] = (activated * gate).astype(dtype)
    dinputs_ref[:, :inner] = (dgated * gate * slope).astype(dtype)
    dinputs_ref[:, inner:] = (dgated * activated).astype(dtype)
