"""Disentangled attention (`model/deberta.py`) in one TPU kernel, in rows of up to 512 tokens.

As `attention_kernel.py` does, a program takes one block of 128 lanes (two heads of 64) of one row,
or of several short rows, and computes scores transposed, `[key, query]`. A score has two more
terms, of the content of one position and the distance to the other. Both come from products of a
block of 128 positions with the vectors of all distances from there, `[128, length + 128]`. In row a
of a block, what belongs to position n of the other side is at 128 - a + n:

    row 0    . . . . 0 1 2 3 4 5 6 7
    row 1    . . . 0 1 2 3 4 5 6 7 .      so row a is rotated by a lanes (`_align`)
    row 2    . . 0 1 2 3 4 5 6 7 . .

TPU v4 rotates the eight rows of a register by one number. In `_Terms`, a register therefore has row
a of eight blocks, which are two terms of 512 tokens; in bfloat16, both heads share a 32-bit word:

    memory row   9 a      9 a + 1  ...  9 a + 3  9 a + 4  ...  9 a + 7
                 term 0   term 0        term 0   term 1        term 1    (queries, then keys)
                 block 0  block 1       block 3  block 0       block 3

A block is stored and loaded with a stride of 9 rows, in one instruction per register; the compiler
makes four of one with a stride of 8.

The forward pass saves the weights before they are divided by their sum, `[key, query]`, with the
sign of what dropout drops: to recompute them would be to align all products again. They take
`2 * length**2` bytes per head and row in bfloat16. The gradients of scores take the same way back
to those of products. The gradients of the vectors of distances are sums over all rows: the grid is
over blocks of lanes, then over rows, so that they stay on the chip.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.model.dropout import AttentionDropout, random_bits
from bert_jax.model.tpu_kernels.attention_kernel import MAX_LENGTH
from bert_jax.model.tpu_kernels.blocks import LANES, BlockedArray, dot, kernel_name

QUERY, KEY, VALUE = (slice(n * LANES, (n + 1) * LANES) for n in range(3))  # In a block of lanes.
HEAD_DIM = 64
HEADS = slice(0, HEAD_DIM), slice(HEAD_DIM, LANES)  # The lanes of both heads of a block.
SUBLANES = 8  # Rows of a register.
FLOAT32_LENGTH = 384  # Longer rows do not fit on the chip in float32.
# What scores are multiplied by, so that they are base-2 logarithms.
QUERY_FACTOR = math.log2(math.e) / math.sqrt(3 * HEAD_DIM)


def why_unsupported(length: int, hidden_size: int, head_dim: int, dtype: str) -> str:
    """Returns why the kernel cannot compute this attention; "" if it can."""
    if length > MAX_LENGTH:
        return f"rows of {length} tokens are longer than {MAX_LENGTH}"
    if dtype == "float32" and length > FLOAT32_LENGTH:
        return f"rows of {length} tokens in float32 are longer than {FLOAT32_LENGTH}"
    if head_dim != HEAD_DIM:
        return f"heads of {head_dim} are not of {HEAD_DIM}"
    if hidden_size % LANES:
        return f"heads of {head_dim} in {hidden_size} lanes do not fill blocks of {LANES}"
    return ""


class Options(NamedTuple):
    causal: bool = False
    interpret: bool = False


class Inputs(NamedTuple):
    """What both kernels read; pods/estimate/hlo_cost.py knows the order of these operands."""

    ids: jax.Array  # [batch, 1, length]
    scale: jax.Array  # [1, 1]: of dropout, or 1.
    projections: jax.Array  # [layers, batch, length, 3 * hidden]
    bias: jax.Array  # [1, 3 * hidden], float32.
    key_table: jax.Array  # Of `_make_table`: column n is for distance length - n.
    query_table: jax.Array  # The same: column n is for distance n - length.
    threshold: jax.Array | None = None  # [1, 1]; None: there is no dropout.
    query_words: jax.Array | None = None  # [batch, pairs of heads, 2, length]; only forward.
    key_words: jax.Array | None = None  # [2, length, LANES]; only forward.


def attention(
    projections: jax.Array,
    bias: jax.Array,
    sequence_ids: jax.Array,
    dropout: AttentionDropout | None,
    saved: list[jax.Array] | None,
    layer: int | jax.Array,
    tables: tuple[jax.Array, jax.Array],
    *,
    options: Options,
) -> tuple[jax.Array, list[jax.Array]]:
    """Computes what `EncoderLayer.attend` of `model/deberta.py` does, of the projections.

    `tables` are the projected vectors of distances that keys and queries have, `[2N, hidden]`, in
    the order of `DistanceScores`, for rows of N tokens: `length` rounded up to whole blocks of 128.
    `saved` are the arrays of `saved_shapes`, each with a leading axis of layers. The other
    arguments and the results are those of `attention_kernel.attention`.
    """
    length = projections.shape[1]
    ids, padded = sequence_ids, projections
    end = (0, -length % LANES)  # Padding of the positions, before and after them.
    if length % LANES:  # Otherwise these stay inputs, which a loop over layers does not save.
        ids = jnp.pad(sequence_ids, ((0, 0), end), constant_values=-1)
        if dropout:
            key_words = jnp.pad(dropout.key_words, ((0, 0), end))
            words = jnp.pad(dropout.words, ((0, 0), (0, 0), (0, 0), end))
            dropout = dropout._replace(words=words, key_words=key_words)
        padded = jnp.pad(projections, ((0, 0), end, (0, 0)))
    saved = saved or [lax.empty((1, *x.shape), x.dtype) for x in saved_shapes(padded).values()]
    context, saved = _attention(options, saved, layer, ids, dropout, padded, bias, tables)
    return context[:, :length], saved


def saved_shapes(projections: jax.Array) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns what the kernels save of a layer, in whole blocks of 128 tokens.

    Weights are words as in `_Terms`, `[batch, keys, words of all heads * queries]`.
    """
    (batch, length, width), dtype = projections.shape, projections.dtype
    words, word = width // (3 * LANES) * _num_words(dtype), _word(dtype)
    return {
        "projections": jax.ShapeDtypeStruct(projections.shape, dtype),
        "context": jax.ShapeDtypeStruct((batch, length, width // 3), dtype),
        "weights": jax.ShapeDtypeStruct((batch, length, words * length), word),
    }


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, saved, *inputs):
    # Without a gradient, nobody reads the weights.
    return _run_forward(options, saved, *inputs, saves_weights=False)[0]


def _attention_forward(options, saved, *inputs):
    return _run_forward(options, saved, *inputs, saves_weights=True)


def _run_forward(
    options, saved, layer, ids, dropout, projections, bias, tables, saves_weights: bool
):
    saved_projections, saved_context, saved_weights = saved
    saved_projections = lax.dynamic_update_index_in_dim(saved_projections, projections, layer, 0)
    blocks = _Blocks.of(saved_projections, saved_context, saved_weights)
    # Not read: it is the memory of an output. pallas_call needs a block for it nevertheless.
    unread = pl.BlockSpec((None, 1, 16, LANES), lambda *_: (0, 0, 0, 0))
    given, outputs = [(unread, saved_context)], [blocks.saved_context]
    if saves_weights:
        given.append((unread, saved_weights))
        outputs.append(blocks.saved_weights)
    saved_context, *written, total = _call(
        _forward_kernel,
        options,
        layer,
        _make_inputs(ids, saved_projections, bias, tables, dropout),
        given=given,
        outputs=[*outputs, blocks.total],
        writes_in_place=True,
    )
    (saved_weights,) = written or (saved_weights,)
    context = lax.dynamic_index_in_dim(saved_context, layer, 0, keepdims=False)
    saved = [saved_projections, saved_context, saved_weights]
    return (context, saved), (saved, layer, ids, dropout, bias, tables, total)


def _attention_backward(options, residuals, gradients):
    saved, layer, ids, dropout, bias, tables, total = residuals
    saved_projections, saved_context, saved_weights = saved
    blocks = _Blocks.of(*saved)
    dcontext, _ = gradients
    inputs = _make_inputs(ids, saved_projections, bias, tables, dropout)
    dprojections, dbias, dkey_table, dquery_table = _call(
        _backward_kernel,
        options,
        layer,
        inputs._replace(query_words=None, key_words=None),
        given=[
            (blocks.saved_weights.spec, saved_weights),
            (blocks.saved_context.spec, saved_context),
            (blocks.total.spec, total),
            (blocks.context.spec, dcontext),
        ],
        outputs=[blocks.projections, blocks.bias, blocks.table, blocks.table],
    )
    dkey_table, dquery_table = (
        (x.T * factor).astype(tables[0].dtype)
        for x, factor in ((dkey_table, 1), (dquery_table, QUERY_FACTOR))
    )
    return (
        None,
        None,
        None,
        None,
        dprojections,
        jnp.sum(dbias, (0, 1)).astype(bias.dtype),
        (dkey_table, dquery_table),
    )


_attention.defvjp(_attention_forward, _attention_backward)


class _Blocks(NamedTuple):
    """The arrays of the kernels, each divided into blocks of rows and lanes."""

    saved_context: BlockedArray  # [layers, batch, length, hidden]
    saved_weights: BlockedArray  # [layers, batch, length, words * length]
    context: BlockedArray  # [batch, length, hidden]
    projections: BlockedArray  # [batch, length, 3 * hidden]
    total: BlockedArray  # [batch, blocks of lanes, heads in a block, length], float32
    bias: BlockedArray  # [programs, 1, 3 * hidden], float32: the gradient of each program.
    table: BlockedArray  # [hidden, 2 * length], float32: its gradient, of all rows.

    @classmethod
    def of(cls, saved_projections, saved_context, saved_weights) -> "_Blocks":
        (_, batch, length, hidden), dtype = saved_context.shape, saved_context.dtype
        rows, heads = _rows_per_program(batch, length), len(HEADS)
        float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        return cls(
            saved_context=BlockedArray(_layer_spec(rows, length, LANES), saved_context),
            saved_weights=BlockedArray(
                _layer_spec(rows, length, _num_words(dtype) * length), saved_weights
            ),
            context=BlockedArray(
                pl.BlockSpec((rows, length, LANES), lambda lanes, row, _: (row, 0, lanes)),
                jax.ShapeDtypeStruct(saved_context.shape[1:], dtype),
            ),
            projections=BlockedArray(
                pl.BlockSpec((rows, length, 3 * LANES), lambda lanes, row, _: (row, 0, lanes)),
                jax.ShapeDtypeStruct(saved_projections.shape[1:], dtype),
            ),
            total=BlockedArray(
                pl.BlockSpec((rows, 1, heads, length), lambda lanes, row, _: (row, lanes, 0, 0)),
                float32((batch, hidden // LANES, heads, length)),
            ),
            bias=BlockedArray(
                pl.BlockSpec((1, 1, 3 * LANES), lambda lanes, row, _: (row, 0, lanes)),
                float32((batch // rows, 1, 3 * hidden)),
            ),
            table=BlockedArray(
                pl.BlockSpec((LANES, 2 * length), lambda lanes, *_: (lanes, 0)),
                float32((hidden, 2 * length)),
            ),
        )


def _rows_per_program(batch: int, length: int) -> int:
    """Returns the rows of a program: several short ones, so that it has enough to do."""
    return math.gcd(batch, max(MAX_LENGTH // length, 1))


def _layer_spec(rows: int, length: int, size: int) -> pl.BlockSpec:
    """Returns the blocks of the current layer in `[layers, batch, length, ...]`."""
    block = None, rows, length, size
    return pl.BlockSpec(block, lambda lanes, row, layer: (layer[0], row, 0, lanes))


def _make_inputs(ids, saved_projections, bias, tables, dropout) -> Inputs:
    """Returns the inputs that both kernels read, in the layout of `Inputs`."""
    dtype = saved_projections.dtype
    key_table, query_table = tables
    query_table = query_table.astype(jnp.float32) * QUERY_FACTOR
    inputs = Inputs(
        ids=ids[:, None],
        scale=jnp.ones((1, 1)),
        projections=saved_projections,
        bias=bias.astype(dtype).astype(jnp.float32)[None],
        key_table=_make_table(key_table.astype(dtype)),
        query_table=_make_table(query_table.astype(dtype)),
    )
    if dropout is None:
        return inputs
    key_words = dropout.key_words[..., None]
    return inputs._replace(
        scale=dropout.scale.reshape(1, 1),
        threshold=dropout.threshold.reshape(1, 1),
        query_words=dropout.words,
        key_words=jnp.broadcast_to(key_words, (*key_words.shape[:2], LANES)),
    )


def _make_table(table: jax.Array) -> jax.Array:
    """Returns `[hidden, 2 * length]` of the transposed; in bfloat16, two rows in 32-bit words.

    So they are in whole registers, without a conversion at each use.
    """
    if table.dtype == jnp.float32:
        return table.T
    pairs = jnp.moveaxis(table.T.reshape(-1, 2, len(table)), 1, -1)
    return lax.bitcast_convert_type(pairs, jnp.uint32)


def _input_specs(inputs: Inputs) -> Inputs:
    """Returns the blocks of each input."""
    _, batch, length, width = inputs.projections.shape
    rows, once = _rows_per_program(batch, length), pl.Buffered(1)
    scalar = pl.BlockSpec((1, 1), lambda *_: (0, 0), memory_space=pltpu.SMEM)
    table = pl.BlockSpec(
        (len(inputs.key_table) * 3 * LANES // width, 2 * length),
        lambda lanes, *_: (lanes, 0),
        pipeline_mode=once,
    )
    return Inputs(
        ids=pl.BlockSpec((rows, 1, length), lambda lanes, row, _: (row, 0, 0)),
        scale=scalar,
        projections=_layer_spec(rows, length, 3 * LANES),
        bias=pl.BlockSpec((1, 3 * LANES), lambda lanes, *_: (0, lanes)),
        key_table=table,
        query_table=table,
        threshold=scalar,
        query_words=pl.BlockSpec((rows, 1, 2, length), lambda lanes, row, _: (row, lanes, 0, 0)),
        key_words=pl.BlockSpec((2, length, LANES), lambda *_: (0, 0, 0), pipeline_mode=once),
    )


def _call(
    kernel: Callable,
    options: Options,
    layer: int | jax.Array,
    inputs: Inputs,
    *,
    given: list[tuple[pl.BlockSpec, jax.Array]],
    outputs: list[BlockedArray],
    writes_in_place: bool = False,
) -> list[jax.Array]:
    """Runs `kernel` for each block of lanes of each row.

    It reads the `inputs`, then the arrays that are `given` with their blocks. If it
    `writes_in_place`, the first outputs are these, changed at `layer`.
    """
    _, batch, length, width = inputs.projections.shape
    specs = _input_specs(inputs)
    used = [index for index, x in enumerate(inputs) if x is not None]
    num_inputs = len(used) + len(given)

    def run(_, *refs):
        arrays = dict(zip(used, refs, strict=False))
        read = () if writes_in_place else refs[len(used) : num_inputs]
        kernel(
            options,
            Inputs(*(arrays.get(index) for index in range(len(specs)))),
            *read,
            *refs[num_inputs:-1],
            terms=_Terms(refs[-1], length),
        )

    return pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(width // (3 * LANES), batch // _rows_per_program(batch, length)),
            in_specs=[*(specs[index] for index in used), *(spec for spec, _ in given)],
            out_specs=[output.spec for output in outputs],
            scratch_shapes=[_Terms.allocate(length, inputs.projections.dtype)],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape.shape, x.shape.dtype) for x in outputs],
        input_output_aliases=(
            {1 + len(used) + n: n for n in range(len(given))} if writes_in_place else {}
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=options.interpret,
        name=kernel_name(kernel, f"distances_{HEAD_DIM}", has_dropout=inputs.threshold is not None),
    )(
        jnp.full(1, layer, jnp.int32),
        *(inputs[index] for index in used),
        *(array for _, array in given),
    )


def _forward_kernel(options: Options, inputs: Inputs, out_ref, *refs, terms: "_Terms"):
    *weights_refs, total_ref = refs  # The first: one or none.
    rows, length, _ = inputs.projections.shape
    dtype = inputs.projections.dtype
    _compute_terms(options, inputs, terms)
    for row in range(rows):
        value = _with_bias(inputs, row, VALUE).T.astype(dtype)
        # One block ahead, so that the compiler overlaps its products with the rest.
        for queries, scores in _ahead(_score_blocks(options, inputs, terms, row)):
            maximum = [
                functools.reduce(jnp.maximum, (jnp.max(x, axis=0, keepdims=True) for x in tiles))
                for tiles in zip(*scores, strict=True)
            ]
            total, output = [0.0, 0.0], [0.0, 0.0]
            for keys, own_scores in zip(_tiles(length), scores, strict=True):
                is_dropped, signed = _is_dropped(inputs, row, keys, queries), []
                for head, lanes in enumerate(HEADS):
                    weights = jnp.exp2(own_scores[head] - maximum[head])
                    total[head] += jnp.sum(weights, axis=0, keepdims=True)
                    kept = weights
                    if is_dropped:
                        kept = jnp.where(is_dropped[head], 0.0, weights)
                        weights = jnp.where(is_dropped[head], -weights, weights)
                    signed.append(weights)
                    output[head] += dot(value[lanes, keys], kept.astype(dtype), 1, 0)
                for ref in weights_refs:
                    for word, x in enumerate(_pack(options, signed, dtype)):
                        ref[row, keys, _columns(length, word, queries)] = x
            for head in range(len(HEADS)):
                total_ref[row, 0, pl.ds(head, 1), queries] = total[head]
                output[head] *= inputs.scale[0, 0] / total[head]
            out_ref[row, queries, :] = jnp.concatenate(output).T.astype(dtype)


def _backward_kernel(
    options: Options,
    inputs: Inputs,
    weights_ref,
    out_ref,
    total_ref,
    dout_ref,
    gradient_ref,
    dbias_ref,
    dkey_table_ref,
    dquery_table_ref,
    terms: "_Terms",
):
    scale, dtype = inputs.scale[0, 0], gradient_ref.dtype
    num_rows, length, _ = inputs.projections.shape

    @pl.when(pl.program_id(1) == 0)
    def _():
        dkey_table_ref[...] = jnp.zeros_like(dkey_table_ref)
        dquery_table_ref[...] = jnp.zeros_like(dquery_table_ref)

    dbias_ref[...] = jnp.zeros_like(dbias_ref)

    def write(row, part, positions, gradient):
        gradient_ref[row, positions, part] = gradient.astype(dtype)
        dbias_ref[0, :, part] += jnp.sum(gradient, axis=0, keepdims=True)

    dcontents = []  # Of each row: the gradients of its blocks of queries and keys.
    for row in range(num_rows):
        key = inputs.projections[row, :, KEY].astype(jnp.float32).T.astype(dtype)
        blocks = [
            _QueryBlock.of(inputs, row, queries, out_ref, total_ref, dout_ref)
            for queries in _tiles(length)
        ]
        # All of these are transposed, [lanes, positions].
        dqueries, dkeys = [0.0] * len(blocks), []
        for tile, keys in enumerate(_tiles(length)):
            dkey = dvalue = 0.0
            # One block ahead, so that the compiler overlaps its products with the rest.
            given = _ahead(_weights_and_gradients(inputs, weights_ref, row, keys, blocks))
            for n, (block, (words, dweights)) in enumerate(zip(blocks, given, strict=True)):
                dscores, to_key, to_value, to_query = [], [], [], []
                for head, lanes in enumerate(HEADS):
                    weights = kept = _unpack(words, dtype)[head]
                    dweight = dweights[head]
                    if inputs.threshold is not None:
                        # The sign, not a comparison: a weight may be -0.
                        is_dropped = lax.bitcast_convert_type(weights, jnp.int32) < 0
                        dweight = jnp.where(is_dropped, 0.0, dweight)
                        weights, kept = jnp.abs(weights), jnp.maximum(weights, 0.0)
                    dscores.append(weights * (dweight - block.mean[head]))
                    rounded = dscores[head].astype(dtype)
                    to_key.append(dot(block.query[lanes], rounded, 1, 1))
                    to_value.append(dot(block.dout[head], kept.astype(dtype), 1, 1))
                    to_query.append(dot(key[lanes, keys], rounded, 1, 0))
                dkey += jnp.concatenate(to_key)
                dvalue += jnp.concatenate(to_value)
                dqueries[n] += jnp.concatenate(to_query)
                for word, x in enumerate(_pack(options, dscores, dtype)):
                    terms.of_query(row, n, tile, word)[...] = x.T
                    terms.of_key(row, n, tile, word)[...] = x
            write(row, VALUE, keys, dvalue.T * scale)
            dkeys.append(dkey)
        dcontents.append((dqueries, dkeys))
    _undo_align(options, terms)
    # The query, or its table, had a factor of log2(e).
    query_scale, key_scale = scale / math.sqrt(3 * HEAD_DIM), scale * math.log(2)
    tables = inputs.key_table, inputs.query_table
    dtables = dkey_table_ref, dquery_table_ref
    for row, dcontent in enumerate(dcontents):
        for term, (part, factor, out_scale) in enumerate(
            ((QUERY, QUERY_FACTOR, query_scale), (KEY, 1.0, key_scale))
        ):
            for block, positions in enumerate(_tiles(length)):
                x = _with_bias(inputs, row, part, positions) * (factor * key_scale)
                x, dx = x.T.astype(dtype), dcontent[term][block]
                for tile, columns in enumerate(_tiles(2 * length)[_window(length, block)]):
                    table, to_x = _read_table(tables[term], columns, dtype), []
                    dproducts = terms.load_heads(row, term, block, tile, dtype)
                    for lanes, own in zip(HEADS, dproducts, strict=True):
                        dtables[term][lanes, columns] += dot(x[lanes], own, 1, 0)
                        to_x.append(dot(table[lanes], own, 1, 1))
                    dx += jnp.concatenate(to_x)
                write(row, part, positions, dx.T * out_scale)


class _QueryBlock(NamedTuple):
    """What the backward pass reads of 128 queries."""

    query: jax.Array  # [LANES, 128], scaled.
    dout: list[jax.Array]  # [HEAD_DIM, 128] of each head, divided by the sums of its weights.
    dout_alone: list[jax.Array]  # The same in [LANES, 128], with zeros for the other head.
    # [1, 128] of each head, float32: the sum over keys of probability times its gradient (Dao et
    # al., 2022, section 3.1), divided as `dout` is.
    mean: list[jax.Array]

    @classmethod
    def of(cls, inputs: Inputs, row: int, queries: slice, out_ref, total_ref, dout_ref):
        dtype = inputs.projections.dtype
        dout = dout_ref[row, queries, :].astype(jnp.float32).T
        weighted = dout * out_ref[row, queries, :].astype(jnp.float32).T / inputs.scale[0, 0]
        douts, mean = [], []
        for head, lanes in enumerate(HEADS):
            inverse = 1.0 / total_ref[row, 0, pl.ds(head, 1), queries]
            mean.append(jnp.sum(weighted[lanes], axis=0, keepdims=True) * inverse)
            douts.append((dout[lanes] * inverse).astype(dtype))
        zeros = jnp.zeros_like(douts[0])
        return cls(
            query=(_with_bias(inputs, row, QUERY, queries) * QUERY_FACTOR).T.astype(dtype),
            dout=douts,
            dout_alone=[jnp.concatenate(x) for x in ([douts[0], zeros], [zeros, douts[1]])],
            mean=mean,
        )


def _weights_and_gradients(inputs: Inputs, weights_ref, row: int, keys: slice, blocks):
    """Yields words of weights and the gradients of both heads' weights, for each of `blocks`."""
    length, dtype = inputs.projections.shape[1], inputs.projections.dtype
    value = _with_bias(inputs, row, VALUE, keys).astype(dtype)
    for queries, block in zip(_tiles(length), blocks, strict=True):
        words = [
            weights_ref[row, keys, _columns(length, word, queries)]
            for word in range(_num_words(dtype))
        ]
        yield words, [dot(value, dout, 1, 0) for dout in block.dout_alone]


class _Terms(NamedTuple):
    """Memory of a program for the terms of scores, or their gradients, and for products.

    `[tiles of 128, 128 * stride, LANES]`: words of bfloat16 of both heads, the first in the low
    half, or float32. Row a of a block is in the rows from a * stride on, as the module says; in
    float32, two registers have them.
    """

    ref: jax.Array
    length: int

    @staticmethod
    def allocate(length: int, dtype):
        rows = LANES * (SUBLANES * _num_words(dtype) + 1)
        return pltpu.VMEM((length // LANES + 1, rows, LANES), _word(dtype))

    @property
    def stride(self) -> int:
        return self.ref.shape[1] // LANES

    @property
    def num_words(self) -> int:
        return self.stride // SUBLANES

    def at(self, row: int, term: int, block: int, tile: int, word: int):
        """Returns a tile of a block of a row, `[128, LANES]`; term 0 is of queries, 1 of keys."""
        first = ((2 * row + term) * (self.length // LANES) + block) * self.num_words + word
        return self.ref.at[tile].at[pl.ds(first, LANES, stride=self.stride), :]

    def of_query(self, row: int, queries: int, keys: int, word: int):
        """Returns the term `[query, key]` of a block of queries and one of keys."""
        return self.at(row, 0, queries, keys, word)

    def of_key(self, row: int, queries: int, keys: int, word: int):
        """Returns the term `[key, query]` of a block of queries and one of keys."""
        return self.at(row, 1, keys, queries, word)

    def load_heads(self, row: int, term: int, block: int, tile: int, dtype) -> list[jax.Array]:
        """Returns a tile of both heads in `dtype`."""
        words = [self.at(row, term, block, tile, n)[...] for n in range(self.num_words)]
        if dtype == jnp.float32:
            return words
        (word,) = words  # Half as many instructions as through float32.
        return [lax.bitcast_convert_type(x.astype(jnp.uint16), dtype) for x in (word, word >> 16)]

    def rotated_registers(self, a: int) -> list[pl.Slice]:
        """Returns the rows of the registers that need a rotation by `a`."""
        return [pl.ds(a * self.stride + n * SUBLANES, SUBLANES) for n in range(self.num_words)]


def _num_words(dtype) -> int:
    """Returns how many 32-bit words have an entry of both heads."""
    return 1 if dtype == jnp.bfloat16 else 2


def _word(dtype):
    return jnp.uint32 if dtype == jnp.bfloat16 else jnp.float32


def _pack(options: Options, heads: list[jax.Array], dtype) -> list[jax.Array]:
    """Returns the words of float32 entries of both heads."""
    if dtype == jnp.float32:
        return heads
    if options.interpret:  # Which has no rule for the one instruction.
        low, high = (lax.bitcast_convert_type(x.astype(dtype), jnp.uint16) for x in heads)
        return [low.astype(jnp.uint32) | high.astype(jnp.uint32) << 16]
    return [pltpu.pack_elementwise(heads, packed_dtype=dtype)]


def _unpack(words: list[jax.Array], dtype) -> list[jax.Array]:
    """Returns float32 entries of both heads."""
    if dtype == jnp.float32:
        return words
    (word,) = words
    halves = word << 16, word & np.uint32(0xFFFF0000)
    return [lax.bitcast_convert_type(x, jnp.float32) for x in halves]


def _compute_terms(options: Options, inputs: Inputs, terms: _Terms) -> None:
    """Computes both terms of all scores, which are base-2 logarithms."""
    num_rows, length, _ = inputs.projections.shape
    dtype = inputs.projections.dtype
    of_term = (QUERY, QUERY_FACTOR, inputs.key_table), (KEY, 1.0, inputs.query_table)
    for row in range(num_rows):
        for term, (part, factor, table_ref) in enumerate(of_term):
            for block, positions in enumerate(_tiles(length)):
                x = _with_bias(inputs, row, part, positions) * factor
                x = jnp.concatenate([_only(lanes, x).astype(dtype) for lanes in HEADS])
                window = _tiles(2 * length)[_window(length, block)]
                columns = slice(window[0].start, window[-1].stop)
                products = dot(x, _read_table(table_ref, columns, dtype), 1, 0)
                for tile, lanes in enumerate(_tiles(products.shape[1])):
                    heads = [products[:LANES, lanes], products[LANES:, lanes]]
                    for word, own in enumerate(_pack(options, heads, dtype)):
                        terms.at(row, term, block, tile, word)[...] = own
    _align(options, terms)


def _align(options: Options, terms: _Terms) -> None:
    """Makes `[128, length]` of `[128, length + 128]`: entry (a, n) was entry (a, 128 - a + n)."""
    ref, last = terms.ref, terms.ref.shape[0] - 1

    def align_row(a):
        lane = lax.broadcasted_iota(jnp.int32, (1, SUBLANES, LANES), 2)
        for rows in terms.rotated_registers(a):
            tiles = pltpu.roll(ref[:, rows, :], a, 2)
            ref[:last, rows, :] = jnp.where(lane >= a, tiles[1:], tiles[:-1])

    _for_each_row(options, align_row)


def _undo_align(options: Options, terms: _Terms) -> None:
    """Does the transposed of `_align`, for gradients."""
    ref, last = terms.ref, terms.ref.shape[0] - 1

    def align_row(a):
        lane = lax.broadcasted_iota(jnp.int32, (1, SUBLANES, LANES), 2)
        zeros = jnp.zeros(lane.shape, ref.dtype)
        for rows in terms.rotated_registers(a):
            tiles = ref[:last, rows, :]
            before, after = (jnp.concatenate(x) for x in ([zeros, tiles], [tiles, zeros]))
            ref[:, rows, :] = pltpu.roll(
                jnp.where(lane >= a, before, after), (LANES - a) % LANES, 2
            )

    _for_each_row(options, align_row)


def _for_each_row(options: Options, function: Callable) -> None:
    if options.interpret:  # Which compiles each step of what is unrolled.
        lax.fori_loop(0, LANES, lambda row, _: function(row), None)
        return
    for row in range(LANES):
        function(row)


def _score_blocks(
    options: Options, inputs: Inputs, terms: _Terms, row: int
) -> Iterator[tuple[slice, list[list[jax.Array]]]]:
    """Yields the positions of each block of queries, and its scores for each block of keys.

    Scores are of both heads, `[key, query]`, base-2 logarithms.
    """
    length, dtype = inputs.projections.shape[1], inputs.projections.dtype
    key_ids = [
        jnp.broadcast_to(inputs.ids[row, :, keys], (LANES, LANES)).T for keys in _tiles(length)
    ]
    for block, queries in enumerate(_tiles(length)):
        query = _with_bias(inputs, row, QUERY, queries) * QUERY_FACTOR
        head_queries, scores = [_only(lanes, query).astype(dtype) for lanes in HEADS], []
        for tile, keys in enumerate(_tiles(length)):
            is_visible = key_ids[tile] == inputs.ids[row, :, queries]
            if options.causal:
                key_position, query_position = (
                    lax.broadcasted_iota(jnp.int32, is_visible.shape, axis) for axis in (0, 1)
                )
                is_visible &= key_position + keys.start <= query_position + queries.start
            bias, words = jnp.where(is_visible, 0.0, -1e30), range(terms.num_words)
            of_query = _unpack([terms.of_query(row, block, tile, n)[...].T for n in words], dtype)
            of_key = _unpack([terms.of_key(row, block, tile, n)[...] for n in words], dtype)
            # The bias of keys adds the same to all scores of a query: it has no effect here.
            key = inputs.projections[row, keys, KEY]
            scores.append(
                [
                    dot(key, head_query, 1, 1) + (one + other) + bias
                    for head_query, one, other in zip(head_queries, of_query, of_key, strict=True)
                ]
            )
        yield queries, scores


def _is_dropped(inputs: Inputs, row: int, keys: slice, queries: slice) -> list[jax.Array]:
    """Returns which weights are dropped, `[key, query]` of both heads; [] without dropout."""
    if inputs.threshold is None:
        return []
    words = (inputs.query_words[row, 0, pl.ds(n, 1), queries] for n in (0, 1))
    bits = random_bits(tuple(words), inputs.key_words[:, keys])
    return [x < inputs.threshold[0, 0] for x in bits]


def _ahead(items: Iterable) -> Iterator:
    """Yields `items`, each after the next one was computed."""
    items = iter(items)
    current = next(items)
    for following in items:
        yield current
        current = following
    yield current


def _tiles(size: int) -> list[slice]:
    return [slice(start, start + LANES) for start in range(0, size, LANES)]


def _window(length: int, block: int) -> slice:
    """Returns the tiles of a table of the distances between a block and all positions of a row."""
    num_blocks = length // LANES
    return slice(num_blocks - 1 - block, 2 * num_blocks - block)


def _columns(length: int, word: int, queries: slice) -> slice:
    """Returns where a word of the weights of `queries` is."""
    return slice(word * length + queries.start, word * length + queries.stop)


def _read_table(ref, columns: slice, dtype) -> jax.Array:
    """Returns `[LANES, columns]` of what `_make_table` made."""
    words = ref[:, columns]
    return words if dtype == jnp.float32 else pltpu.bitcast(words, dtype)


def _with_bias(inputs: Inputs, row: int, part: slice, positions=slice(None)) -> jax.Array:
    return inputs.projections[row, positions, part].astype(jnp.float32) + inputs.bias[:, part]


def _only(lanes: slice, x: jax.Array) -> jax.Array:
    """Sets all other lanes to 0, which costs less than moving the lanes of a head."""
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where((lane >= lanes.start) & (lane < lanes.stop), x, 0.0)
