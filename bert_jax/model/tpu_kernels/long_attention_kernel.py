"""Attention in rows of more than 512 tokens, in one TPU kernel for each direction.

    long_attention(projections, bias, mask, dropout, rotation, head_dim=64) -> context

reads the fused projections where the product left them, `[batch, length, 3 * hidden]`, and writes
`[batch, length, hidden]`; `long_attention_in_stack` does so in arrays of all layers. A program
takes one block of 128 lanes (two heads of 64) of one row. 128 queries at a time attend to blocks of
keys, with a running softmax (Dao et al., 2022); blocks in which they see no key are skipped. With a
narrow window, all keys that 128 queries see are one block. As in `attention_kernel`, scores are
transposed, `[key, query]`, and base-2 logarithms.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.dropout import AttentionDropout, random_bits
from bert_jax.model.tpu_kernels.attention_kernel import KEY, QUERY, VALUE
from bert_jax.model.tpu_kernels.blocks import LANES, BlockedArray, dot, kernel_name

MAX_LENGTH = 8192
KEYS = (512, 384, 256, 128)  # Of a block: the first size that divides the length.
QUERIES = (256, 128)  # Computed together.
LOWEST = -1e30  # The score of a key that a query does not see.


def why_unsupported(length: int, hidden_size: int, head_dim: int) -> str:
    """Returns why the kernel cannot compute this attention; "" if it can."""
    if length > MAX_LENGTH:
        return f"rows of {length} tokens are longer than {MAX_LENGTH}"
    if LANES % head_dim or hidden_size % max(LANES, 2 * head_dim):
        return f"heads of {head_dim} in {hidden_size} lanes do not fill blocks of {LANES}"
    return ""


class _Options(NamedTuple):
    head_dim: int
    queries: int  # Computed together, a multiple of LANES.
    keys: int  # Of a block.
    is_band: bool  # Whether one block holds all keys that LANES queries see.
    interpret: bool


class _Inputs(NamedTuple):
    """What both kernels read. `blocks` are those of LANES positions, whose lanes they fill."""

    projections: jax.Array  # [layers, batch, length, 3 * hidden]
    bounds: jax.Array  # int32 [batch, blocks, 2, LANES]: a query's first key, and their number.
    scale: jax.Array  # [1, 1]: of dropout, or 1.
    bias: jax.Array | None = None  # [1, 3 * hidden], float32.
    rotation: jax.Array | None = None  # [batch, blocks, head_dim, LANES]: cosines, then sines.
    query_words: jax.Array | None = None  # [batch, pairs of heads, blocks, 2, LANES]
    key_words: jax.Array | None = None  # [blocks, 2, LANES]
    threshold: jax.Array | None = None  # [1, 1]


class _Spans(NamedTuple):
    """The blocks of keys that some query of a group sees, int32 `[batch, groups]`."""

    first: jax.Array
    end: jax.Array


class _Program(NamedTuple):
    """What a program reads: its row, its block of lanes, the inputs and the spans of all rows."""

    row: jax.Array
    lanes: jax.Array
    inputs: _Inputs
    spans: _Spans


def long_attention(
    projections: jax.Array,
    bias: jax.Array | None,
    mask: AttentionMask,
    dropout: AttentionDropout | None = None,
    rotation: tuple[jax.Array, jax.Array] | None = None,
    *,
    head_dim: int,
    interpret: bool = False,
) -> jax.Array:
    """Computes what `bert_jax.model.attention.attention` does, in one kernel for each direction.

    Args:
      projections: queries, keys and values, interleaved: `[batch, length, 3 * hidden]`, float32 or
        bfloat16.
      bias: of the projections, `[3 * hidden]`, or None. Adding it here gives its gradient without
        another pass. Without a rotation, that of keys has no effect and the gradient 0.
      mask: which positions attend to each other; the positions of a sequence are consecutive, as in
        packed rows.
      dropout: of the probabilities, or None.
      rotation: cosines and sines by which queries and keys rotate, float32
        `[batch, length, head_dim / 2]`, as `modernbert.rotate` does; or None.
      head_dim: the size of a head.
      interpret: runs the kernel on any device, for tests.

    Returns:
      `[batch, length, hidden]` in the dtype of `projections`.
    """
    context, _ = long_attention_in_stack(
        None, 0, projections, bias, mask, dropout, rotation, head_dim=head_dim, interpret=interpret
    )
    return context


def long_attention_in_stack(
    saved: list[jax.Array] | None,
    layer: int | jax.Array,
    projections: jax.Array,
    bias: jax.Array | None,
    mask: AttentionMask,
    dropout: AttentionDropout | None = None,
    rotation: tuple[jax.Array, jax.Array] | None = None,
    *,
    head_dim: int,
    interpret: bool = False,
) -> tuple[jax.Array, list[jax.Array]]:
    """Computes `long_attention`; also writes projections and result to `layer` of `saved`.

    `saved` are two arrays `[layers, ...]`, which it returns: the kernels read and write them there,
    so that a loop over layers copies nothing. None: arrays of one layer. The length must be a
    multiple of 128, if they are given.
    """
    batch, length, width = projections.shape
    padding = -length % LANES
    ids = jnp.pad(mask.sequence_ids, ((0, 0), (0, padding)), constant_values=-1)
    options = _options(mask, head_dim, length + padding, interpret)
    bounds, spans = _visible(mask, ids, options)
    inputs = _Inputs(None, _by_blocks(bounds, 1), jnp.ones((1, 1)))
    if rotation is not None:
        table = jnp.concatenate(rotation, axis=-1).astype(jnp.float32)
        inputs = inputs._replace(rotation=_by_blocks(jnp.swapaxes(table, 1, 2), 1))
    if dropout is not None:
        inputs = inputs._replace(
            scale=dropout.scale.reshape(1, 1),
            query_words=_by_blocks(dropout.words, 2),
            key_words=_by_blocks(dropout.key_words, 0),
            threshold=dropout.threshold.reshape(1, 1),
        )
    if padding:  # Otherwise it stays an input, which a loop over layers does not save.
        projections = jnp.pad(projections, ((0, 0), (0, padding), (0, 0)))
    saved = saved or [
        lax.empty((1, batch, length + padding, size), projections.dtype)
        for size in (width, width // 3)
    ]
    context, saved = _attention(options, saved, layer, spans, inputs, projections, bias)
    return context[:, :length], saved


def _by_blocks(x: jax.Array, axis: int) -> jax.Array:
    """Pads positions, the last axis, and moves blocks of LANES of them to `axis`."""
    x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, -x.shape[-1] % LANES),))
    return jnp.moveaxis(x.reshape(*x.shape[:-1], -1, LANES), -2, axis)


def _options(mask: AttentionMask, head_dim: int, length: int, interpret: bool) -> _Options:
    queries = next(size for size in QUERIES if length % size == 0)
    keys, is_band = next(size for size in KEYS if length % size == 0), False
    if mask.window is not None:
        # Blocks of whole registers, at half a window before the first query.
        band = LANES + 2 * -(-mask.window // (LANES // 2)) * (LANES // 2)
        if band <= min(KEYS[0], length):
            keys, is_band = band, True
    return _Options(head_dim, queries, keys, is_band, interpret)


def _visible(mask: AttentionMask, ids: jax.Array, options: _Options) -> tuple[jax.Array, _Spans]:
    """Returns the bounds of `_Inputs`, int32 `[batch, 2, length]`, and the spans of each group."""
    batch, length = ids.shape
    position = jnp.arange(length)
    changes = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    first = lax.cummax(jnp.where(changes, position, 0), axis=1)
    starts = jnp.where(changes, position, length)
    next_starts = jnp.pad(starts[:, 1:], ((0, 0), (0, 1)), constant_values=length)
    end = lax.cummin(next_starts, axis=1, reverse=True)
    if mask.window is not None:
        first = jnp.maximum(first, position - mask.window)
        end = jnp.minimum(end, position + mask.window + 1)
    if mask.causal:
        end = jnp.minimum(end, position + 1)
    bounds = jnp.stack([first, end - first], axis=1).astype(jnp.int32)
    groups = batch, -1, options.queries
    spans = _Spans(
        jnp.min(first.reshape(groups), axis=-1) // options.keys,
        -(-jnp.max(end.reshape(groups), axis=-1) // options.keys),
    )
    return bounds, jax.tree.map(lambda x: x.astype(jnp.int32), spans)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, saved, layer, spans, inputs, projections, bias):
    return _attention_forward(options, saved, layer, spans, inputs, projections, bias)[0]


def _attention_forward(options, saved, layer, spans, inputs, projections, bias):
    saved_projections, saved_context = saved
    saved_projections = lax.dynamic_update_index_in_dim(saved_projections, projections, layer, 0)
    arrays = _Arrays.from_shapes(saved_projections, saved_context, options.head_dim)
    dtype, length = saved_context.dtype, saved_context.shape[2]
    saved_context, log_sum = _call(
        _forward_kernel,
        options,
        layer,
        spans,
        _complete(inputs, saved_projections, bias),
        # Not read: it is the memory of the output. pallas_call needs a block for it nevertheless.
        given=[(pl.BlockSpec((None, 1, 16, LANES), lambda *_: (0, 0, 0, 0)), saved_context)],
        outputs=[arrays.saved_context, arrays.log_sum],
        scratch=[
            pltpu.VMEM((length, LANES), dtype),
            pltpu.VMEM(_transposed_shape(options, length), dtype),
        ],
        writes_in_place=True,
    )
    context = lax.dynamic_index_in_dim(saved_context, layer, 0, keepdims=False)
    saved = [saved_projections, saved_context]
    return (context, saved), (saved, layer, spans, inputs, bias, log_sum)


def _attention_backward(options, residuals, gradients):
    (saved_projections, saved_context), layer, spans, inputs, bias, log_sum = residuals
    arrays = _Arrays.from_shapes(saved_projections, saved_context, options.head_dim)
    dtype, length = saved_context.dtype, saved_context.shape[2]
    dcontext, _ = gradients
    results = _call(
        _backward_kernel,
        options,
        layer,
        spans,
        _complete(inputs, saved_projections, bias),
        given=[
            (arrays.saved_context.spec, saved_context),
            (arrays.log_sum.spec, log_sum),
            (arrays.context.spec, dcontext),
        ],
        outputs=[arrays.projections, *([] if bias is None else [arrays.bias])],
        scratch=[
            pltpu.VMEM((length, LANES), dtype),
            pltpu.VMEM(_transposed_shape(options, length), dtype),
            pltpu.VMEM((length, LANES), jnp.float32),
            pltpu.VMEM((length, LANES), jnp.float32),
        ],
    )
    dprojections, dbias = results[0], None
    if bias is not None:
        dbias = jnp.sum(results[1], (0, 1)).astype(bias.dtype)
    return None, None, None, None, dprojections, dbias


_attention.defvjp(_attention_forward, _attention_backward)


def _transposed_shape(options: _Options, length: int) -> tuple[int, int, int]:
    """Returns the shape of keys or values with a block's positions as lanes; not for bands."""
    return (1, 8, LANES) if options.is_band else (length // options.keys, LANES, options.keys)


def _complete(inputs: _Inputs, saved_projections: jax.Array, bias: jax.Array | None) -> _Inputs:
    if bias is not None:
        bias = bias.astype(saved_projections.dtype).astype(jnp.float32)[None]
    return inputs._replace(projections=saved_projections, bias=bias)


class _Arrays(NamedTuple):
    """The arrays of the kernels, each divided into blocks of rows and lanes."""

    saved_context: BlockedArray  # [layers, batch, length, hidden]
    context: BlockedArray  # [batch, length, hidden]
    projections: BlockedArray  # [batch, length, 3 * hidden]
    log_sum: BlockedArray  # [batch, blocks of lanes, blocks of queries, heads in one, LANES]
    bias: BlockedArray  # [batch, 1, 3 * hidden], float32: the gradient of each row.

    @classmethod
    def from_shapes(cls, saved_projections, saved_context, head_dim: int) -> "_Arrays":
        (_, batch, length, hidden), dtype = saved_context.shape, saved_context.dtype
        heads, blocks = LANES // head_dim, length // LANES
        return cls(
            saved_context=BlockedArray(_layer_spec(length, LANES), saved_context),
            context=BlockedArray(
                pl.BlockSpec((None, length, LANES), lambda row, lanes, *_: (row, 0, lanes)),
                jax.ShapeDtypeStruct(saved_context.shape[1:], dtype),
            ),
            projections=BlockedArray(
                pl.BlockSpec((None, length, 3 * LANES), lambda row, lanes, *_: (row, 0, lanes)),
                jax.ShapeDtypeStruct(saved_projections.shape[1:], dtype),
            ),
            log_sum=BlockedArray(
                pl.BlockSpec(
                    (None, None, blocks, heads, LANES), lambda row, lanes, *_: (row, lanes, 0, 0, 0)
                ),
                jax.ShapeDtypeStruct((batch, hidden // LANES, blocks, heads, LANES), jnp.float32),
            ),
            bias=BlockedArray(
                pl.BlockSpec((None, 1, 3 * LANES), lambda row, lanes, *_: (row, 0, lanes)),
                jax.ShapeDtypeStruct((batch, 1, 3 * hidden), jnp.float32),
            ),
        )


def _layer_spec(length: int, size: int) -> pl.BlockSpec:
    """Returns the blocks of the current layer in `[layers, batch, length, ...]`."""
    block = None, None, length, size
    return pl.BlockSpec(block, lambda row, lanes, layer, *_: (layer[0], row, 0, lanes))


def _input_specs(length: int, head_dim: int) -> _Inputs:
    """Returns the blocks of each input."""
    heads, blocks = LANES // head_dim, length // LANES
    lanes_per_pair, pairs = max(2 // heads, 1), max(heads // 2, 1)
    scalar = pl.BlockSpec((1, 1), lambda *_: (0, 0), memory_space=pltpu.SMEM)
    return _Inputs(
        projections=_layer_spec(length, 3 * LANES),
        bounds=pl.BlockSpec((None, blocks, 2, LANES), lambda row, lanes, *_: (row, 0, 0, 0)),
        scale=scalar,
        bias=pl.BlockSpec((1, 3 * LANES), lambda row, lanes, *_: (0, lanes)),
        rotation=pl.BlockSpec(
            (None, blocks, head_dim, LANES), lambda row, lanes, *_: (row, 0, 0, 0)
        ),
        query_words=pl.BlockSpec(
            (None, pairs, blocks, 2, LANES),
            lambda row, lanes, *_: (row, lanes // lanes_per_pair, 0, 0, 0),
        ),
        key_words=pl.BlockSpec((blocks, 2, LANES), lambda *_: (0, 0, 0)),
        threshold=scalar,
    )


def _call(
    kernel: Callable,
    options: _Options,
    layer: int | jax.Array,
    spans: _Spans,
    inputs: _Inputs,
    *,
    given: list[tuple[pl.BlockSpec, jax.Array]],
    outputs: list[BlockedArray],
    scratch: list,
    writes_in_place: bool = False,
) -> list[jax.Array]:
    """Runs `kernel` for each block of lanes of each row.

    It reads the `inputs`, then the arrays that are `given` with their blocks. If it
    `writes_in_place`, the first output is the first of these, changed at `layer`.
    """
    _, batch, length, width = inputs.projections.shape
    specs = _input_specs(length, options.head_dim)
    used = [index for index, x in enumerate(inputs) if x is not None]
    names = [_Inputs._fields[index] for index in used]

    def run(_, first_ref, end_ref, *refs):
        read = _Inputs(**dict(zip(names, refs[: len(names)], strict=True)))
        program = _Program(pl.program_id(0), pl.program_id(1), read, _Spans(first_ref, end_ref))
        kernel(options, program, *refs[len(names) :])

    in_specs = [*(specs[index] for index in used), *(spec for spec, _ in given)]
    arrays = [*(inputs[index] for index in used), *(array for _, array in given)]
    return pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, width // (3 * LANES)),
            in_specs=in_specs,
            out_specs=[output.spec for output in outputs],
            scratch_shapes=scratch,
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape.shape, x.shape.dtype) for x in outputs],
        input_output_aliases={3 + len(used): 0} if writes_in_place else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=options.interpret,
        name=kernel_name(kernel, options.head_dim, has_dropout=inputs.key_words is not None),
    )(jnp.full(1, layer, jnp.int32), *spans, *arrays)


def _forward_kernel(
    options: _Options, program: _Program, _, out_ref, log_sum_ref, key_ref, value_ref
):
    inputs, dtype = program.inputs, out_ref.dtype
    _prepare_keys(options, inputs, key_ref, None)
    if not options.is_band:
        _transpose_values(options, inputs, value_ref)

    def group(index, _):
        blocks = _group_blocks(options, index)
        queries = [_heads(options.head_dim, _query(options, inputs, block)) for block in blocks]

        def add_keys(number, states):
            start, new_states = number * options.keys, []
            for block, heads, old in zip(blocks, queries, states, strict=True):
                if options.is_band:
                    start = _band_start(options, inputs, block)
                    value = _part(inputs, VALUE, start, options.keys).T.astype(dtype)
                else:
                    value = value_ref[number]
                key = key_ref[pl.ds(start, options.keys), :]
                is_visible = _is_visible(options, inputs, block, start)
                is_dropped = _is_dropped(options, program, block, start)
                new = []
                for head, (query, state) in enumerate(zip(heads, old, strict=True)):
                    maximum, total, weighted = state
                    scores = dot(key, query.astype(dtype), 1, 0)
                    scores = jnp.where(is_visible, scores, LOWEST)
                    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=0, keepdims=True))
                    # Until a query's first visible key, these sums hold garbage: this is then 0.
                    rescale = jnp.exp2(maximum - new_maximum)
                    weights = jnp.exp2(scores - new_maximum)
                    total = total * rescale + jnp.sum(weights, axis=0, keepdims=True)
                    weights = _drop(weights, is_dropped[head]).astype(dtype)
                    lanes = _lanes(options, head)
                    weighted = weighted * rescale + dot(value[lanes], weights, 1, 0)
                    new.append((new_maximum, total, weighted))
                new_states.append(new)
            return new_states

        heads = LANES // options.head_dim
        row = (1, LANES)
        state = jnp.full(row, LOWEST), jnp.zeros(row), jnp.zeros((options.head_dim, LANES))
        states = [[state] * heads for _ in blocks]
        states = _loop_over_keys(options, program, index, add_keys, states)
        for block, state in zip(blocks, states, strict=True):
            outputs = []
            for head, (maximum, total, weighted) in enumerate(state):
                log_sum_ref[block, pl.ds(head, 1), :] = maximum + jnp.log2(total)
                outputs.append(weighted * (inputs.scale[0, 0] / total))
            output = jnp.concatenate(outputs).T
            out_ref[_positions(block), :] = output.astype(dtype)
        return 0

    lax.fori_loop(0, out_ref.shape[0] // options.queries, group, 0)


def _backward_kernel(
    options: _Options, program: _Program, out_ref, log_sum_ref, dout_ref, gradient_ref, *refs
):
    inputs = program.inputs
    dbias_refs, (key_ref, key_transposed_ref, dkey_ref, dvalue_ref) = refs[:-4], refs[-4:]
    scale, dtype, length = inputs.scale[0, 0], gradient_ref.dtype, gradient_ref.shape[0]
    _prepare_keys(options, inputs, key_ref, key_transposed_ref)
    dkey_ref[...] = jnp.zeros_like(dkey_ref)
    dvalue_ref[...] = jnp.zeros_like(dvalue_ref)

    def group(index, dbias):
        blocks = _group_blocks(options, index)
        queries, douts, means, log_sums = [], [], [], []
        for block in blocks:
            query = _query(options, inputs, block)
            queries.append([x.T.astype(dtype) for x in _heads(options.head_dim, query)])
            dout = dout_ref[_positions(block), :].astype(jnp.float32).T
            douts.append([x.T.astype(dtype) for x in _heads(options.head_dim, dout)])
            # The sum over keys of probability times its gradient (Dao et al., 2022, section 3.1).
            weighted = dout * out_ref[_positions(block), :].astype(jnp.float32).T / scale
            heads = [_lanes(options, head) for head in range(LANES // options.head_dim)]
            means.append([jnp.sum(weighted[lanes], axis=0, keepdims=True) for lanes in heads])
            log_sums.append([log_sum_ref[block, pl.ds(n, 1), :] for n in range(len(heads))])

        def add_keys(number, dqueries):
            start, new_dqueries = number * options.keys, []
            if not options.is_band:
                dkey = dvalue = 0.0
            for n, block in enumerate(blocks):
                if options.is_band:
                    start, dkey, dvalue = _band_start(options, inputs, block), 0.0, 0.0
                positions = pl.ds(start, options.keys)
                key = key_ref[positions, :]
                if options.is_band:
                    key_transposed = key.astype(jnp.float32).T.astype(dtype)
                else:
                    key_transposed = key_transposed_ref[number]
                value = _part(inputs, VALUE, start, options.keys).astype(dtype)
                is_visible = _is_visible(options, inputs, block, start)
                is_dropped = _is_dropped(options, program, block, start)
                new = []
                for head, (query, dout) in enumerate(zip(queries[n], douts[n], strict=True)):
                    scores = jnp.where(is_visible, dot(key, query, 1, 1), LOWEST)
                    probabilities = jnp.exp2(scores - log_sums[n][head])
                    dweights = _drop(dot(value, dout, 1, 1), is_dropped[head])
                    dscores = (probabilities * (dweights - means[n][head])).astype(dtype)
                    weights = _drop(probabilities, is_dropped[head]).astype(dtype)
                    dvalue += dot(weights, dout, 1, 0)
                    dkey += dot(dscores, query, 1, 0)
                    dquery = dot(key_transposed[_lanes(options, head)], dscores, 1, 0)
                    new.append(dqueries[n][head] + dquery)
                new_dqueries.append(new)
                if options.is_band:
                    dkey_ref[positions, :] += dkey
                    dvalue_ref[positions, :] += dvalue
            if not options.is_band:
                dkey_ref[positions, :] += dkey
                dvalue_ref[positions, :] += dvalue
            return new_dqueries

        zeros = jnp.zeros((options.head_dim, LANES))
        dqueries = [[zeros] * (LANES // options.head_dim) for _ in blocks]
        dqueries = _loop_over_keys(options, program, index, add_keys, dqueries)
        for block, dquery in zip(blocks, dqueries, strict=True):
            gradient = jnp.concatenate(dquery) * (scale / math.sqrt(options.head_dim))
            gradient = _rotate(options, inputs, gradient, block, back=True).T
            gradient_ref[_positions(block), QUERY] = gradient.astype(dtype)
            if dbias_refs:
                dbias += jnp.sum(gradient, axis=0, keepdims=True)
        return dbias

    zeros = jnp.zeros((1, LANES))
    dquery_sum = lax.fori_loop(0, length // options.queries, group, zeros)

    def finish(block, sums):
        dkey_sum, dvalue_sum = sums
        positions = _positions(block)
        # The query had a factor of log2(e).
        dkey = dkey_ref[positions, :] * (scale * math.log(2))
        if inputs.rotation is not None:
            dkey = _rotate(options, inputs, dkey.T, block, back=True).T
        gradient_ref[positions, KEY] = dkey.astype(dtype)
        dvalue = dvalue_ref[positions, :] * scale
        gradient_ref[positions, VALUE] = dvalue.astype(dtype)
        if dbias_refs:
            dvalue_sum += jnp.sum(dvalue, axis=0, keepdims=True)
            if inputs.rotation is not None:
                dkey_sum += jnp.sum(dkey, axis=0, keepdims=True)
        return dkey_sum, dvalue_sum

    dkey_sum, dvalue_sum = lax.fori_loop(0, length // LANES, finish, (zeros, zeros))
    for dbias_ref in dbias_refs:
        dbias_ref[...] = jnp.concatenate([dquery_sum, dkey_sum, dvalue_sum], axis=1)


def _prepare_keys(options: _Options, inputs: _Inputs, key_ref, transposed_ref):
    """Writes rotated keys to `key_ref`, and transposed to `transposed_ref` if it is given.

    Bands are transposed where they are read.
    """
    dtype, length = key_ref.dtype, key_ref.shape[0]
    transposes = transposed_ref is not None and not options.is_band
    unit = options.keys if transposes else LANES

    def prepare(number, _):
        for n in range(unit // LANES):
            block = number * (unit // LANES) + n
            if inputs.rotation is None:  # Then a bias of keys has no effect.
                key = inputs.projections[_positions(block), KEY]
                key_ref[_positions(block), :] = key
                transposed = key.astype(jnp.float32).T if transposes else None
            else:
                key = _part(inputs, KEY, block * LANES, LANES)
                transposed = _rotate(options, inputs, key.T, block)
                key_ref[_positions(block), :] = transposed.T.astype(dtype)
            if transposes:
                lanes = slice(n * LANES, (n + 1) * LANES)
                transposed_ref[number, :, lanes] = transposed.astype(dtype)
        return 0

    lax.fori_loop(0, length // unit, prepare, 0)


def _transpose_values(options: _Options, inputs: _Inputs, value_ref):
    def transpose(number, _):
        value = _part(inputs, VALUE, number * options.keys, options.keys)
        value_ref[number] = value.T.astype(value_ref.dtype)
        return 0

    lax.fori_loop(0, value_ref.shape[0], transpose, 0)


def _group_blocks(options: _Options, index) -> list:
    """Returns which blocks of LANES queries are computed together."""
    size = options.queries // LANES
    return [index * size + n for n in range(size)]


def _loop_over_keys(options: _Options, program: _Program, group, add_keys: Callable, state):
    if options.is_band:
        return add_keys(0, state)
    spans, row = program.spans, program.row
    return lax.fori_loop(spans.first[row, group], spans.end[row, group], add_keys, state)


def _band_start(options: _Options, inputs: _Inputs, block):
    """Returns the first of the keys that a block of queries sees."""
    length = inputs.projections.shape[0]
    start = block * LANES - (options.keys - LANES) // 2
    return pl.multiple_of(jnp.clip(start, 0, length - options.keys), LANES // 2)


def _positions(block):
    return pl.ds(pl.multiple_of(block * LANES, LANES), LANES)


def _part(inputs: _Inputs, part: slice, start, size: int) -> jax.Array:
    """Returns float32 `[size, LANES]`: queries, keys or values, with their bias."""
    x = inputs.projections[pl.ds(start, size), part].astype(jnp.float32)
    return x if inputs.bias is None else x + inputs.bias[:, part]


def _query(options: _Options, inputs: _Inputs, block) -> jax.Array:
    """Returns a block of rotated queries, float32 `[LANES of heads, LANES queries]`, scaled."""
    query = _part(inputs, QUERY, block * LANES, LANES).T
    query *= math.log2(math.e) / math.sqrt(options.head_dim)
    return _rotate(options, inputs, query, block)


def _rotate(options: _Options, inputs: _Inputs, x: jax.Array, block, back: bool = False):
    """Rotates the heads of float32 `[LANES, LANES positions]` of a block, or `back`."""
    if inputs.rotation is None:
        return x
    half = options.head_dim // 2
    cosines, sines = inputs.rotation[block, :half, :], inputs.rotation[block, half:, :]
    if back:
        sines = -sines
    parts = []
    for start in range(0, LANES, options.head_dim):
        first, second = x[start : start + half], x[start + half : start + 2 * half]
        parts += [first * cosines - second * sines, second * cosines + first * sines]
    return jnp.concatenate(parts)


def _heads(head_dim: int, x: jax.Array) -> list[jax.Array]:
    """Returns `[LANES, positions]` for each head, with 0 in place of the others."""
    row = lax.broadcasted_iota(jnp.int32, x.shape, 0) // head_dim
    return [jnp.where(row == head, x, 0.0) for head in range(LANES // head_dim)]


def _lanes(options: _Options, head: int) -> slice:
    return slice(head * options.head_dim, (head + 1) * options.head_dim)


def _is_visible(options: _Options, inputs: _Inputs, block, start) -> jax.Array:
    """Returns bool `[keys, LANES]`: whether the block's queries see the keys from `start` on."""
    first, count = inputs.bounds[block, 0:1, :], inputs.bounds[block, 1:2, :]
    key = lax.broadcasted_iota(jnp.int32, (options.keys, LANES), 0)
    offset = key - (first - start)
    return (offset >= 0) & (offset < count)


def _is_dropped(options: _Options, program: _Program, block, start) -> list[jax.Array | None]:
    """Returns for each head bool `[keys, LANES]`, or None without dropout."""
    inputs, heads = program.inputs, LANES // options.head_dim
    if inputs.threshold is None:
        return [None] * heads
    words = [_key_words(options, inputs, start, n) for n in (0, 1)]
    dropped = []
    for pair in range(max(heads // 2, 1)):
        query_words = [inputs.query_words[pair, block, pl.ds(n, 1), :] for n in (0, 1)]
        dropped += [bits < inputs.threshold[0, 0] for bits in random_bits(query_words, words)]
    if heads == 1:
        return [jnp.where(program.lanes % 2 == 0, *dropped)]
    return dropped


def _key_words(options: _Options, inputs: _Inputs, start, word: int) -> jax.Array:
    """Returns a word of each key from `start` on in all lanes, int32 `[keys, LANES]`."""
    # A band may start in the middle of a block.
    half, columns = LANES // 2, []
    if not options.is_band:
        first = start // LANES
        blocks = [
            inputs.key_words[first + n, pl.ds(word, 1), :] for n in range(options.keys // LANES)
        ]
        return jnp.concatenate([_as_column(row) for row in blocks])
    first = start // LANES
    for n in range(options.keys // LANES + 1):
        block = jnp.minimum(first + n, inputs.key_words.shape[0] - 1)
        columns.append(_as_column(inputs.key_words[block, pl.ds(word, 1), :]))
    columns = jnp.concatenate(columns)
    is_middle = start % LANES != 0
    return jnp.where(is_middle, columns[half : half + options.keys], columns[: options.keys])


def _as_column(row: jax.Array) -> jax.Array:
    return jnp.broadcast_to(row, (LANES, LANES)).T


def _drop(x, is_dropped):
    return x if is_dropped is None else jnp.where(is_dropped, 0.0, x)
