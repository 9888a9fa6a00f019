"""Attention in one TPU kernel: nothing of size length x length reaches memory.

A program takes one block of 128 lanes (two heads of 64, where the projections left them) of one
row, or of several short rows. All scores of a head fit on the chip, so there is no tiling over
keys. They are transposed, `[key, query]`: sums over keys add whole registers, and what belongs to a
query (maximum, sum, dropout words) is a row of lanes. The backward pass recomputes the
probabilities from the saved logarithms of their sums, and dropout from the same words.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.model.dropout import AttentionDropout, random_bits
from bert_jax.model.tpu_kernels.blocks import LANES, BlockedArray, Float32Copy, dot, kernel_name

MAX_LENGTH = 512
QUERY, KEY, VALUE = (slice(n * LANES, (n + 1) * LANES) for n in range(3))  # In a block of lanes.


def why_unsupported(length: int, hidden_size: int, head_dim: int) -> str:
    """Returns why the kernel cannot compute this attention; "" if it can."""
    if length > MAX_LENGTH:
        return f"rows of {length} tokens are longer than {MAX_LENGTH}"
    if LANES % head_dim or hidden_size % max(LANES, 2 * head_dim):
        return f"heads of {head_dim} in {hidden_size} lanes do not fill blocks of {LANES}"
    return ""


class _Options(NamedTuple):
    head_dim: int
    causal: bool
    interpret: bool
    float32_blocks: bool


class _Inputs(NamedTuple):
    """What both kernels read; pods/estimate/hlo_cost.py knows the order of these operands."""

    query_ids: jax.Array  # [batch, 1, length]
    key_ids: jax.Array  # [batch, length, 1]
    scale: jax.Array  # [1, 1]: of dropout, or 1.
    projections: jax.Array  # [layers, batch, length, 3 * hidden]
    bias: jax.Array  # [1, 3 * hidden], float32.
    query_words: jax.Array | None = None  # [batch, pairs of heads, 2, length]
    key_words: jax.Array | None = None  # [2, length, LANES]
    threshold: jax.Array | None = None  # [1, 1]


def attention(
    projections: jax.Array,
    bias: jax.Array,
    sequence_ids: jax.Array,
    dropout: AttentionDropout | None = None,
    saved: list[jax.Array] | None = None,
    layer: int | jax.Array = 0,
    *,
    head_dim: int,
    causal: bool = False,
    interpret: bool = False,
    float32_blocks: bool = False,
) -> tuple[jax.Array, list[jax.Array]]:
    """Computes what `bert_jax.model.attention.attention` does, in one kernel for each direction.

    `projections` are queries, keys and values, interleaved: `[batch, length, 3 * hidden]`, float32
    or bfloat16, as is the result, `[batch, length, hidden]`; `bias` is `[3 * hidden]`. Adding it
    here gives its gradient without another pass. That of keys has no effect and the gradient 0.
    `interpret` runs the kernel on any device, for tests; `float32_blocks`: see `needs_float32`.

    Also writes projections and result to `layer` of the two arrays `saved`, `[layers, ...]`, which
    it returns: the kernels read and write them there, so that a loop over layers copies nothing.
    """
    batch, length, width = projections.shape
    ids, padded = sequence_ids, projections
    end = (0, -length % LANES)  # Padding of the positions, before and after them.
    if length % LANES:  # Otherwise these stay inputs, which a loop over layers does not save.
        ids = jnp.pad(sequence_ids, ((0, 0), end), constant_values=-1)
        if dropout:
            key_words = jnp.pad(dropout.key_words, ((0, 0), end))
            words = jnp.pad(dropout.words, ((0, 0), (0, 0), (0, 0), end))
            dropout = dropout._replace(words=words, key_words=key_words)
        padded = jnp.pad(projections, ((0, 0), end, (0, 0)))
    options = _Options(head_dim, causal, interpret, float32_blocks)
    saved = saved or [
        lax.empty((1, batch, ids.shape[1], size), padded.dtype) for size in (width, width // 3)
    ]
    context, saved = _attention(options, saved, layer, ids, dropout, padded, bias)
    return context[:, :length], saved


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, saved, layer, ids, dropout, projections, bias):
    return _attention_forward(options, saved, layer, ids, dropout, projections, bias)[0]


def _attention_forward(options, saved, layer, ids, dropout, projections, bias):
    saved_projections, saved_context = saved
    saved_projections = lax.dynamic_update_index_in_dim(saved_projections, projections, layer, 0)
    arrays = _Arrays.from_shapes(saved_projections, saved_context, options.head_dim)
    inputs = _make_inputs(ids, saved_projections, bias, dropout)
    saved_context, log_sum = _call(
        _forward_kernel,
        options,
        layer,
        inputs,
        # Not read: it is the memory of the output. pallas_call needs a block for it nevertheless.
        given=[(pl.BlockSpec((None, 1, 16, LANES), lambda *_: (0, 0, 0, 0)), saved_context)],
        outputs=[arrays.saved_context, arrays.log_sum],
        writes_in_place=True,
    )
    context = lax.dynamic_index_in_dim(saved_context, layer, 0, keepdims=False)
    saved = [saved_projections, saved_context]
    return (context, saved), (saved, layer, ids, dropout, bias, log_sum)


def _attention_backward(options, residuals, gradients):
    (saved_projections, saved_context), layer, ids, dropout, bias, log_sum = residuals
    arrays = _Arrays.from_shapes(saved_projections, saved_context, options.head_dim)
    dcontext, _ = gradients
    dprojections, dbias = _call(
        _backward_kernel,
        options,
        layer,
        _make_inputs(ids, saved_projections, bias, dropout),
        given=[
            (arrays.saved_context.spec, saved_context),
            (arrays.log_sum.spec, log_sum),
            (arrays.context.spec, dcontext),
        ],
        outputs=[arrays.projections, arrays.bias],
    )
    return None, None, None, None, dprojections, jnp.sum(dbias, (0, 1)).astype(bias.dtype)


_attention.defvjp(_attention_forward, _attention_backward)


class _Arrays(NamedTuple):
    """The arrays of the kernels, each divided into blocks of rows and lanes."""

    saved_context: BlockedArray  # [layers, batch, length, hidden]
    context: BlockedArray  # [batch, length, hidden]
    projections: BlockedArray  # [batch, length, 3 * hidden]
    log_sum: BlockedArray  # [batch, blocks of lanes, heads in a block, length], float32
    bias: BlockedArray  # [programs, 1, 3 * hidden], float32: the gradient of each program.

    @classmethod
    def from_shapes(cls, saved_projections, saved_context, head_dim: int) -> "_Arrays":
        (_, batch, length, hidden), dtype = saved_context.shape, saved_context.dtype
        rows, heads = _rows_per_program(batch, length), LANES // head_dim
        log_sum_shape = batch, hidden // LANES, heads, length
        bias_shape = batch // rows, 1, 3 * hidden
        return cls(
            saved_context=BlockedArray(_layer_spec(rows, length, LANES), saved_context),
            context=BlockedArray(
                pl.BlockSpec((rows, length, LANES), lambda row, lanes, _: (row, 0, lanes)),
                jax.ShapeDtypeStruct(saved_context.shape[1:], dtype),
            ),
            projections=BlockedArray(
                pl.BlockSpec((rows, length, 3 * LANES), lambda row, lanes, _: (row, 0, lanes)),
                jax.ShapeDtypeStruct(saved_projections.shape[1:], dtype),
            ),
            log_sum=BlockedArray(
                pl.BlockSpec((rows, 1, heads, length), lambda row, lanes, _: (row, lanes, 0, 0)),
                jax.ShapeDtypeStruct(log_sum_shape, jnp.float32),
            ),
            bias=BlockedArray(
                pl.BlockSpec((1, 1, 3 * LANES), lambda row, lanes, _: (row, 0, lanes)),
                jax.ShapeDtypeStruct(bias_shape, jnp.float32),
            ),
        )


def _rows_per_program(batch: int, length: int) -> int:
    """Returns the rows of a program: several short ones, so that it has enough to do."""
    return math.gcd(batch, max(MAX_LENGTH // length, 1))


def _layer_spec(rows: int, length: int, size: int) -> pl.BlockSpec:
    """Returns the blocks of the current layer in `[layers, batch, length, ...]`."""
    block = None, rows, length, size
    return pl.BlockSpec(block, lambda row, lanes, layer: (layer[0], row, 0, lanes))


def _make_inputs(ids, saved_projections, bias, dropout: AttentionDropout | None) -> _Inputs:
    """Returns the inputs that both kernels read, in the layout of `_Inputs`."""
    bias = bias.astype(saved_projections.dtype).astype(jnp.float32)[None]
    inputs = _Inputs(ids[:, None], ids[..., None], jnp.ones((1, 1)), saved_projections, bias)
    if dropout is None:
        return inputs
    key_words = dropout.key_words[..., None]
    return inputs._replace(
        scale=dropout.scale.reshape(1, 1),
        query_words=dropout.words,
        key_words=jnp.broadcast_to(key_words, (*key_words.shape[:2], LANES)),
        threshold=dropout.threshold.reshape(1, 1),
    )


def _input_specs(rows: int, length: int, head_dim: int) -> _Inputs:
    """Returns the blocks of each input."""
    heads = LANES // head_dim
    blocks_per_pair, pairs = max(2 // heads, 1), max(heads // 2, 1)
    scalar = pl.BlockSpec((1, 1), lambda *_: (0, 0), memory_space=pltpu.SMEM)
    return _Inputs(
        query_ids=pl.BlockSpec((rows, 1, length), lambda row, lanes, _: (row, 0, 0)),
        key_ids=pl.BlockSpec((rows, length, 1), lambda row, lanes, _: (row, 0, 0)),
        scale=scalar,
        projections=_layer_spec(rows, length, 3 * LANES),
        bias=pl.BlockSpec((1, 3 * LANES), lambda row, lanes, _: (0, lanes)),
        query_words=pl.BlockSpec(
            (rows, pairs, 2, length), lambda row, lanes, _: (row, lanes // blocks_per_pair, 0, 0)
        ),
        key_words=pl.BlockSpec((2, length, LANES), lambda *_: (0, 0, 0)),
        threshold=scalar,
    )


def _call(
    kernel: Callable,
    options: _Options,
    layer: int | jax.Array,
    inputs: _Inputs,
    *,
    given: list[tuple[pl.BlockSpec, jax.Array]],
    outputs: list[BlockedArray],
    writes_in_place: bool = False,
) -> list[jax.Array]:
    """Runs `kernel` for each block of lanes of each row.

    It reads the `inputs`, then the arrays that are `given` with their blocks. If it
    `writes_in_place`, the first output is the first of these, changed at `layer`.
    """
    _, batch, length, width = inputs.projections.shape
    rows = _rows_per_program(batch, length)
    specs = _input_specs(rows, length, options.head_dim)
    used = [index for index, x in enumerate(inputs) if x is not None]
    in_specs = [*(specs[index] for index in used), *(spec for spec, _ in given)]
    arrays = [*(inputs[index] for index in used), *(array for _, array in given)]
    blocks = in_specs + [output.spec for output in outputs]
    dtypes = [x.dtype for x in arrays + [output.shape for output in outputs]]
    copied = [n for n, x in enumerate(dtypes) if options.float32_blocks and x == jnp.bfloat16]

    def run(_, *refs):
        refs, buffers = list(refs[: len(blocks)]), refs[len(blocks) :]
        for n, buffer in zip(copied, buffers, strict=True):
            refs[n] = Float32Copy(refs[n], buffer)
            if n < len(in_specs):
                refs[n].unpack()
        kernel(options, _Inputs(*refs[: len(used)]), *refs[len(used) :])
        for n in copied:
            if n >= len(in_specs):
                refs[n].pack()

    return pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch // rows, width // (3 * LANES)),
            in_specs=in_specs,
            out_specs=[output.spec for output in outputs],
            scratch_shapes=[Float32Copy.allocate(blocks[n]) for n in copied],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape.shape, x.shape.dtype) for x in outputs],
        input_output_aliases={1 + len(used): 0} if writes_in_place else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=options.interpret,
        name=kernel_name(kernel, options.head_dim, has_dropout=inputs.key_words is not None),
    )(jnp.full(1, layer, jnp.int32), *arrays)


def _forward_kernel(options: _Options, inputs: _Inputs, _, out_ref, log_sum_ref):
    for row, start, heads in _blocks(options, inputs):
        if start == 0:
            value = _with_bias(inputs, row, VALUE).T.astype(inputs.projections.dtype)
        queries, outputs = pl.ds(start, LANES), []
        for lanes, _, scores, is_dropped in heads:
            maximum = jnp.max(scores, axis=0, keepdims=True)
            weights = jnp.exp2(scores - maximum)
            total = jnp.sum(weights, axis=0, keepdims=True)
            log_sum_ref[row, 0, pl.ds(len(outputs), 1), queries] = maximum + jnp.log2(total)
            weights = _drop(weights, is_dropped).astype(value.dtype)
            outputs.append(dot(value[lanes], weights, 1, 0) * (inputs.scale[0, 0] / total))
        out_ref[row, queries, :] = jnp.concatenate(outputs).T.astype(out_ref.dtype)


def _backward_kernel(
    options: _Options, inputs: _Inputs, out_ref, log_sum_ref, dout_ref, gradient_ref, dbias_ref
):
    scale, dtype = inputs.scale[0, 0], gradient_ref.dtype
    dquery_sum, dvalue_sum = 0.0, 0.0
    for row, start, heads in _blocks(options, inputs):
        if start == 0:
            key = inputs.projections[row, :, KEY].astype(jnp.float32).T.astype(dtype)
            value = _with_bias(inputs, row, VALUE).astype(dtype)
            dkey = dvalue = 0.0
        queries, dqueries = pl.ds(start, LANES), []
        dout = dout_ref[row, queries, :].astype(jnp.float32)
        dout_transposed = dout.T
        # The sum over keys of probability times its gradient (Dao et al., 2022, section 3.1).
        weighted = dout_transposed * out_ref[row, queries, :].astype(jnp.float32).T / scale
        for lanes, query, scores, is_dropped in heads:
            head = len(dqueries)
            log_sum = log_sum_ref[row, 0, pl.ds(head, 1), queries]
            probabilities = jnp.exp2(scores - log_sum)
            head_dout = _only(lanes, dout).astype(dtype)
            dweights = dot(value, head_dout, 1, 1)
            mean = jnp.sum(weighted[lanes], axis=0, keepdims=True)
            dscores = probabilities * (_drop(dweights, is_dropped) - mean)
            dscores = dscores.astype(dtype)
            weights = _drop(probabilities, is_dropped).astype(dtype)
            dvalue += dot(weights, head_dout, 1, 0)
            dkey += dot(dscores, query, 1, 0)
            dqueries.append(dot(key[lanes], dscores, 1, 0))
        gradient = jnp.concatenate(dqueries).T * (scale / math.sqrt(options.head_dim))
        gradient_ref[row, queries, QUERY] = gradient.astype(dtype)
        dquery_sum += jnp.sum(gradient, axis=0, keepdims=True)
        if start + LANES == gradient_ref.shape[1]:
            # The query had a factor of log2(e).
            gradient = dkey * (scale * math.log(2))
            gradient_ref[row, :, KEY] = gradient.astype(dtype)
            gradient = dvalue * scale
            gradient_ref[row, :, VALUE] = gradient.astype(dtype)
            dvalue_sum += jnp.sum(gradient, axis=0, keepdims=True)
    dbias_ref[0] = jnp.concatenate([dquery_sum, jnp.zeros_like(dquery_sum), dvalue_sum], axis=1)


def _blocks(options: _Options, inputs: _Inputs):
    """Yields the row, the start and the `_heads` of each block of queries.

    These are computed one block ahead, so that the compiler overlaps products with the rest.
    """
    rows, length, _ = inputs.projections.shape
    ahead = None
    for row, start in itertools.product(range(rows), range(0, length, LANES)):
        block = row, start, list(_heads(options, inputs, row, start))
        if ahead:
            yield ahead
        ahead = block
    yield ahead


def _heads(options: _Options, inputs: _Inputs, row: int, start: int):
    """Yields the lanes of each head, its scaled queries from `start`, scores, and what is dropped.

    Of the queries, only the lanes of the head are not 0. Scores `[key, query]` are base-2 logs.
    """
    head_dim, queries = options.head_dim, pl.ds(start, LANES)
    query = _with_bias(inputs, row, QUERY, queries)
    query *= math.log2(math.e) / math.sqrt(head_dim)
    key = inputs.projections[row, :, KEY]
    is_visible = inputs.key_ids[row] == inputs.query_ids[row, :, queries]
    if options.causal:
        key_position, query_position = (
            lax.broadcasted_iota(jnp.int32, is_visible.shape, axis) for axis in (0, 1)
        )
        is_visible &= key_position <= query_position + start
    bias = jnp.where(is_visible, 0.0, -1e30)
    for head in range(LANES // head_dim):
        lanes, is_dropped = slice(head * head_dim, (head + 1) * head_dim), None
        if inputs.threshold is not None:
            if head % 2 == 0:
                words = (inputs.query_words[row, head // 2, pl.ds(n, 1), queries] for n in (0, 1))
                bits = random_bits(tuple(words), inputs.key_words)
                if head_dim == LANES:
                    bits = (jnp.where(pl.program_id(1) % 2 == 0, *bits),)
            is_dropped = bits[head % 2] < inputs.threshold[0, 0]
        head_query = _only(lanes, query).astype(key.dtype)
        yield lanes, head_query, dot(key, head_query, 1, 1) + bias, is_dropped


def _with_bias(inputs: _Inputs, row: int, part: slice, positions=slice(None)):
    return inputs.projections[row, positions, part].astype(jnp.float32) + inputs.bias[:, part]


def _drop(x, is_dropped):
    return x if is_dropped is None else jnp.where(is_dropped, 0.0, x)


def _only(lanes: slice, x):
    """Sets all other lanes to 0, which costs less than moving the lanes of a head."""
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where((lane >= lanes.start) & (lane < lanes.stop), x, 0.0)
