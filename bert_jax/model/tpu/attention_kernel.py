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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.model.dropout import AttentionDropout, random_bits

LANES = 128
MAX_LENGTH = 512
QUERY, KEY, VALUE = (slice(n * LANES, (n + 1) * LANES) for n in range(3))  # In a block of lanes.


def why_unsupported(length: int, hidden_size: int, head_dim: int) -> str:
    """Returns why the kernel cannot compute this attention; "" if it can."""
    if length > MAX_LENGTH:
        return f"rows of {length} tokens are longer than {MAX_LENGTH}"
    if LANES % head_dim or hidden_size % max(LANES, 2 * head_dim):
        return f"heads of {head_dim} in {hidden_size} lanes do not fill blocks of {LANES}"
    return ""


def needs_float32(device_kind: str) -> bool:
    """Returns whether the kernel is to compute on float32 copies of bfloat16 blocks.

    Kernels on v2 and v3 multiply no bfloat16 matrices, only float32 ones, which the matrix unit
    rounds. Each conversion takes them ten instructions, of which none overlap.
    """
    return device_kind in ("TPU v2", "TPU v3")


class _Settings(NamedTuple):
    head_dim: int
    causal: bool
    interpret: bool
    float32_blocks: bool


class _Inputs(NamedTuple):
    query_ids: jax.Array  # [batch, 1, length]
    key_ids: jax.Array  # [batch, length, 1]
    scale: jax.Array  # [1, 1]: of dropout, or 1.
    projections: jax.Array  # [layers, batch, length, 3 * hidden]
    bias: jax.Array  # [1, 3 * hidden], float32.
    query_words: jax.Array | None = None  # [batch, pairs of heads, 2, length]
    key_words: jax.Array | None = None  # [2, length, LANES]
    threshold: jax.Array | None = None  # [1, 1]


def interleave(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Joins arrays `[..., hidden]`: 128 lanes of each, then the next, `[..., 3 * hidden]`.

    So one product computes queries, keys and values, and those of a head are in one block.
    """
    starts = range(0, query.shape[-1], LANES)  # Slices take half of the cycles of a transposition.
    blocks = [x[..., start : start + LANES] for start in starts for x in (query, key, value)]
    return jnp.concatenate(blocks, axis=-1)


def attention(
    projections: jax.Array,
    bias: jax.Array,
    sequence_ids: jax.Array,
    dropout: AttentionDropout | None = None,
    stacks: list[jax.Array] | None = None,
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

    Also writes projections and result to `layer` of the two `stacks`, which it returns: the kernels
    read and write them there, so that a loop over layers copies nothing.
    """
    batch, length, width = projections.shape
    ids, padded, end = sequence_ids, projections, (0, -length % LANES)
    if any(end):  # Otherwise these stay inputs, which a loop over layers does not save.
        ids = jnp.pad(sequence_ids, ((0, 0), end), constant_values=-1)
        if dropout:
            key_words = jnp.pad(dropout.key_words, ((0, 0), end))
            words = jnp.pad(dropout.words, (*[(0, 0)] * 3, end))
            dropout = dropout._replace(words=words, key_words=key_words)
        padded = jnp.pad(projections, ((0, 0), end, (0, 0)))
    settings = _Settings(head_dim, causal, interpret, float32_blocks)
    stacks = stacks or [
        lax.empty((1, batch, ids.shape[1], size), padded.dtype) for size in (width, width // 3)
    ]
    out, stacks = _attention(settings, stacks, layer, ids, dropout, padded, bias)
    return out[:, :length], stacks


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings, stacks, layer, ids, dropout, projections, bias):
    return _attention_forward(settings, stacks, layer, ids, dropout, projections, bias)[0]


def _attention_forward(settings, stacks, layer, ids, dropout, projections, bias):
    stacks[0] = lax.dynamic_update_index_in_dim(stacks[0], projections, layer, 0)
    shared = layer, ids, dropout, bias
    stacks[1], log_sum = _call(_forward_kernel, settings, stacks, shared, (), "sl")
    out = lax.dynamic_index_in_dim(stacks[1], layer, 0, keepdims=False)
    return (out, stacks), (stacks, shared, log_sum)


def _attention_backward(settings, residuals, gradients):
    stacks, shared, log_sum = residuals
    rest = ("l", log_sum), ("x", gradients[0])
    dprojections, dbias = _call(_backward_kernel, settings, stacks, shared, rest, "pb")
    return *[None] * 4, dprojections, jnp.sum(dbias, (0, 1)).astype(shared[-1].dtype)


_attention.defvjp(_attention_forward, _attention_backward)


def _call(kernel, settings: _Settings, stacks, shared, rest, outputs: str) -> list[jax.Array]:
    """Runs `kernel` for each block of lanes of each row.

    `rest` are inputs after the result, of "x" (like it) or "l" (`[batch, blocks, heads, length]`).
    The letters of `outputs` are these, "s" (the stack of results, written in place), "p" (like the
    projections) or "b" (`[programs, 1, 3 * hidden]`, a row of each program).
    """
    layer, ids, dropout, bias = shared
    bias = bias.astype(stacks[0].dtype).astype(jnp.float32)[None]
    scale, words = jnp.ones((1, 1)), ()
    if dropout:
        scale, key_words = dropout.scale.reshape(1, 1), dropout.key_words[..., None]
        key_words = jnp.broadcast_to(key_words, (*key_words.shape[:2], LANES))
        words = dropout.words, key_words, dropout.threshold.reshape(1, 1)
    inputs = _Inputs(ids[:, None], ids[..., None], scale, stacks[0], bias, *words)
    (_, batch, length, hidden), dtype = stacks[1].shape, stacks[1].dtype
    rows = math.gcd(batch, max(MAX_LENGTH // length, 1))  # So that a program has enough to do.
    heads = LANES // settings.head_dim

    def spec(*block, at):
        return pl.BlockSpec((rows, *block), lambda row, lanes, _: (row, *at(lanes)))

    def stack_spec(size):
        block = None, rows, length, size
        return pl.BlockSpec(block, lambda row, lanes, layer: (layer[0], row, 0, lanes))

    specs = {
        "s": stack_spec(LANES),
        "p": spec(length, 3 * LANES, at=lambda lanes: (0, lanes)),
        "x": spec(length, LANES, at=lambda lanes: (0, lanes)),
        "l": spec(1, heads, length, at=lambda lanes: (lanes, 0, 0)),
        "b": pl.BlockSpec((1, 1, 3 * LANES), lambda row, lanes, _: (row, 0, lanes)),
    }
    shapes = {
        "s": jax.ShapeDtypeStruct(stacks[1].shape, dtype),
        "p": jax.ShapeDtypeStruct(stacks[0].shape[1:], dtype),
        "l": jax.ShapeDtypeStruct((batch, hidden // LANES, heads, length), jnp.float32),
        "b": jax.ShapeDtypeStruct((batch // rows, 1, 3 * hidden), jnp.float32),
    }
    scalar = pl.BlockSpec((1, 1), lambda *_: (0, 0), memory_space=pltpu.SMEM)
    blocks_per_pair, pairs = max(2 // heads, 1), max(heads // 2, 1)
    input_specs = (
        spec(1, length, at=lambda _: (0, 0)),
        spec(length, 1, at=lambda _: (0, 0)),
        *(scalar, stack_spec(3 * LANES)),
        pl.BlockSpec((1, 3 * LANES), lambda row, lanes, _: (0, lanes)),
        spec(pairs, 2, length, at=lambda lanes: (lanes // blocks_per_pair, 0, 0)),
        pl.BlockSpec((2, length, LANES), lambda *_: (0, 0, 0)),
        scalar,
    )
    given, is_forward = [x for x in inputs if x is not None], outputs[0] == "s"
    # Forward, only what shares its memory with the output: any block of it.
    unread = pl.BlockSpec((None, 1, 16, LANES), lambda *_: (0, 0, 0, 0))
    result_spec = unread if is_forward else specs["s"]
    in_specs = [*input_specs[: len(given)], result_spec, *(specs[kind] for kind, _ in rest)]
    arrays = [*given, stacks[1], *(x for _, x in rest)]
    blocks = in_specs + [specs[kind] for kind in outputs]
    dtypes = [x.dtype for x in arrays + [shapes[kind] for kind in outputs]]
    copied = [n for n, x in enumerate(dtypes) if settings.float32_blocks and x == jnp.bfloat16]

    def run(_, *refs):
        refs, buffers = list(refs[: len(blocks)]), refs[len(blocks) :]
        for n, buffer in zip(copied, buffers, strict=True):
            refs[n] = _Float32Copy(refs[n], buffer)
            if n < len(in_specs):
                refs[n].unpack()
        kernel(settings, _Inputs(*refs[: len(given)]), *refs[len(given) :])
        for n in copied:
            if n >= len(in_specs):
                refs[n].pack()

    return pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch // rows, hidden // LANES),
            in_specs=in_specs,
            out_specs=blocks[len(in_specs) :],
            scratch_shapes=[_Float32Copy.allocate(blocks[n]) for n in copied],
        ),
        out_shape=[shapes[kind] for kind in outputs],
        input_output_aliases={1 + len(given): 0} if is_forward else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=settings.interpret,
        name=f"{kernel.__name__.strip('_')}_{settings.head_dim}",  # For tpu/hlo_cost.py.
    )(jnp.full(1, layer, jnp.int32), *arrays)


class _Float32Copy:
    """A bfloat16 block `[rows, length, lanes]`, copied so that kernels read and write float32.

    A 32-bit word of the block holds two positions, the odd one in its high bits. `buffer` is
    `[parts, rows, length, LANES]`: only arrays of LANES lanes have strides.
    """

    def __init__(self, block, buffer):
        self.block, self.buffer = block, buffer
        self.shape, self.dtype = block.shape, buffer.dtype

    @staticmethod
    def allocate(spec: pl.BlockSpec):
        """Returns the buffer for the block of `spec`."""
        *_, rows, length, lanes = spec.block_shape
        return pltpu.VMEM((lanes // LANES, rows, length, LANES), jnp.float32)

    def __getitem__(self, index):
        return self.buffer[self._place(*index)]

    def __setitem__(self, index, x):
        self.buffer[self._place(*index)] = x

    def _place(self, row, positions, lanes):
        return (lanes.start or 0) // LANES, row, positions

    def unpack(self):
        """Copies the block to the buffer."""
        for words, halves in self._words():
            bits = pltpu.bitcast(self.block[words], jnp.int32)
            for (copy, positions), x in zip(halves, (bits << 16, bits & -(2**16)), strict=True):
                copy[positions, :] = lax.bitcast_convert_type(x, jnp.float32)

    def pack(self):
        """Copies the buffer to the block, rounded to nearest, ties to even."""
        for words, halves in self._words():
            bits = (lax.bitcast_convert_type(x[at, :], jnp.int32) for x, at in halves)
            even, odd = (x + 2**15 - 1 + (lax.shift_right_logical(x, 16) & 1) for x in bits)
            bits = lax.shift_right_logical(even, 16) | (odd & -(2**16))
            self.block[words] = pltpu.bitcast(bits, self.block.dtype)

    def _words(self):
        """Yields the place of each tile in the block, and where its even and odd positions are."""
        parts, rows, length, _ = self.buffer.shape
        for part, row, start in itertools.product(range(parts), range(rows), range(0, length, 8)):
            halves = [
                (self.buffer.at[part, row], pl.ds(start + first, 4, stride=2)) for first in (0, 1)
            ]
            lanes = slice(part * LANES, (part + 1) * LANES)
            yield (row, pl.ds(start, 8), lanes), halves


def _forward_kernel(settings: _Settings, inputs: _Inputs, _, out_ref, log_sum_ref):
    for row, start, heads in _blocks(settings, inputs):
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
    settings: _Settings, inputs: _Inputs, out_ref, log_sum_ref, dout_ref, gradient_ref, dbias_ref
):
    scale, dtype = inputs.scale[0, 0], gradient_ref.dtype
    dquery_sum, dvalue_sum = 0.0, 0.0
    for row, start, heads in _blocks(settings, inputs):
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
        gradient = jnp.concatenate(dqueries).T * (scale / math.sqrt(settings.head_dim))
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


def _blocks(settings: _Settings, inputs: _Inputs):
    """Yields the row, the start and the `_heads` of each block of queries.

    These are computed one block ahead, so that the compiler overlaps products with the rest.
    """
    rows, length, _ = inputs.projections.shape
    ahead = None
    for row, start in itertools.product(range(rows), range(0, length, LANES)):
        block = row, start, list(_heads(settings, inputs, row, start))
        if ahead:
            yield ahead
        ahead = block
    yield ahead


def _heads(settings: _Settings, inputs: _Inputs, row: int, start: int):
    """Yields the lanes of each head, its scaled queries from `start`, scores, and what is dropped.

    Of the queries, only the lanes of the head are not 0. Scores `[key, query]` are base-2 logs.
    """
    head_dim, queries = settings.head_dim, pl.ds(start, LANES)
    query = _with_bias(inputs, row, QUERY, queries)
    query *= math.log2(math.e) / math.sqrt(head_dim)
    key = inputs.projections[row, :, KEY]
    is_visible = inputs.key_ids[row] == inputs.query_ids[row, :, queries]
    if settings.causal:
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


def dot(left, right, left_axis: int, right_axis: int):
    """Returns the float32 product of matrices, summed over an axis of each."""
    axes = ((left_axis,), (right_axis,)), ((), ())
    return lax.dot_general(left, right, axes, preferred_element_type=jnp.float32)
