"""Attention in rows of more than 512 tokens, in one TPU kernel for each direction.

    long_attention(projections, bias, mask, dropout, rotation, head_dim=64) -> context

reads the fused projections where the product left them, `[batch, length, 3 * hidden]`, and writes
`[batch, length, hidden]`; `long_attention_in_stack` does so in arrays of all layers. A program
takes one block of 128 lanes (two heads of 64) of one row. Groups of queries attend to blocks of
keys, with a running softmax (Dao et al., 2022); blocks in which they see no key are skipped. With a
narrow window, a tile of queries reads only the keys around it. As in `attention_kernel`, scores are
transposed, `[key, query]`, and base-2 logarithms.

Positions are divided into tiles of 128, which are the first axis of arrays whose lanes are
positions: only there can a program choose one as it runs. The tiles of queries of a window start
half a tile earlier, so that the keys that they see fill whole tiles; the first one holds the last
positions of the row, too.

Of a row that does not fit on the chip, a program has one segment of keys and one of queries at a
time, and keeps what it has summed up for the queries. With a window, the first tile of each segment
of queries holds all that see the keys of another segment.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.dropout import AttentionDropout, random_bits
from bert_jax.model.tpu_kernels.attention_kernel import KEY, QUERY, VALUE
from bert_jax.model.tpu_kernels.blocks import (
    LANES,
    BlockedArray,
    dot,
    kernel_name,
    needs_float32,
)

# Chosen by compiled cycles, in docs/log/2026-11-modernbert.md.
QUERIES, KEYS = 256, 512  # Of one head, in a product.
BAND_GROUP = 512  # Queries that are computed together, with a window.
MAX_LENGTH = 8192
# The longest rows of which all fits into the on-chip memory of a core: 16 MiB on v4, 64 on v5p and
# tpu7x. A program takes about 6 KiB per token in bfloat16, and 11 in float32.
WHOLE_LENGTHS = {
    ("TPU v4", "bfloat16"): 2048,
    ("TPU v4", "float32"): 512,
    **{(device_kind, "float32"): 4096 for device_kind in ("TPU v5", "TPU v5p", "TPU7x")},
}
MAX_BAND = 4  # Tiles of keys around a tile of queries.
DEFAULT_BYTES, SPILLED_BYTES = 16 * 2**20, 4 * 2**20  # Of on-chip memory.
LOWEST = -1e30  # The score of a key that a query does not see.


class Segments(NamedTuple):
    """The positions that a program has at a time of rows that do not fit, multiples of LANES."""

    forward_queries: int  # A multiple of those of the gradient, which needs more memory.
    queries: int
    keys: int
    band: int  # Of queries and of keys, with a narrow window.


SEGMENTS = {"bfloat16": Segments(1024, 512, 2048, 2048), "float32": Segments(512, 512, 1024, 512)}


def choose_segments(
    length: int, device_kind: str, dtype: str, has_dropout: bool
) -> Segments | None:
    """Returns the segments for rows of a length; None if they fit on the chip.

    `device_kind` is JAX's, such as "TPU v4".
    """
    if length <= WHOLE_LENGTHS.get((device_kind, dtype), MAX_LENGTH):
        return None
    if not has_dropout:
        return SEGMENTS[dtype]
    _, queries, keys, band = SEGMENTS[dtype]
    return Segments(queries, queries, keys // 2, band // 2)  # Random bits take memory, too.


def why_unsupported(length: int, hidden_size: int, head_dim: int, device_kind: str) -> str:
    """Returns why the kernel cannot compute this attention; "" if it can.

    `device_kind` is JAX's, such as "TPU v4". On what is no TPU, the kernel is interpreted.
    """
    if needs_float32(device_kind):
        return f"the attention kernel for long rows does not run on {device_kind}"
    if length > MAX_LENGTH:
        rows = f"rows of {length} tokens are longer than {MAX_LENGTH}"
        return f"{rows}, the limit of the attention kernel"
    if LANES % head_dim or hidden_size % max(LANES, 2 * head_dim):
        return f"heads of {head_dim} in {hidden_size} lanes do not fill blocks of {LANES}"
    return ""


class Options(NamedTuple):
    """What is static of a kernel; `make_options` chooses it."""

    head_dim: int
    group: int  # Queries that are computed together.
    queries: int  # Of a head in a product: a tile of queries.
    keys: int  # In a product; of a band, all that its queries see.
    joins_heads: bool  # Whether one matrix product covers all heads of the block.
    is_band: bool  # Whether queries see only the keys around them.
    interpret: bool
    segments: tuple[int, int] | None = None  # Positions of queries and of keys; None: whole rows.
    forward_queries: int = 0  # Those of a segment of queries in the forward kernel.

    def of_forward(self) -> "Options":
        """Returns the options of the forward kernel."""
        if not self.segments:
            return self
        return self._replace(segments=(self.forward_queries, self.segments[1]))


class _Inputs(NamedTuple):
    """What both kernels read. `tiles` are those of LANES positions, whose lanes they fill.

    In a program, the projections are `[positions, LANES]`; rows that are not in segments have
    `keys`, `values` and `key_rotation` only there.
    """

    queries: jax.Array  # [layers, batch, length, 3 * hidden]
    bounds: jax.Array  # int32 [batch, tiles, 2, LANES]: a query's first key, and their number.
    scale: jax.Array  # [1, 1]: of dropout, or 1.
    bias: jax.Array | None = None  # [1, 3 * hidden], float32.
    rotation: jax.Array | None = None  # [batch, tiles, head_dim, LANES]: cosines, then sines.
    query_words: jax.Array | None = None  # [batch, pairs of heads, tiles, 2, LANES]
    key_words: jax.Array | None = None  # [tiles, 2, LANES]
    threshold: jax.Array | None = None  # [1, 1]
    keys: jax.Array | None = None  # The same array as `queries`, as are the values.
    values: jax.Array | None = None
    key_rotation: jax.Array | None = None  # The same array as `rotation`.


class _Spans(NamedTuple):
    """Which queries see which keys.

    `first` and `end` are of the blocks of keys that some query of a group sees, int32
    `[batch, groups]`; `first_group` and `end_group` of the groups that see some key of a segment,
    `[batch, segments]`, or None of rows that are not in segments.
    """

    first: jax.Array
    end: jax.Array
    first_group: jax.Array | None = None
    end_group: jax.Array | None = None


class Prepared(NamedTuple):
    """What the kernels read of a mask and of a rotation; `prepare` computes it once for all layers.

    Attributes:
      bounds: int32 `[batch, tiles, 2, LANES]`: a query's first key, and their number.
      spans: of each group of queries.
      rotation: float32 `[batch, tiles, head_dim, LANES]`, cosines, then sines; or None.
    """

    bounds: jax.Array
    spans: _Spans
    rotation: jax.Array | None


class _Visit(NamedTuple):
    """Which segments a program has, and what it does with them; by default a whole row.

    Those of queries may lie outside of the row, with a window: then they are not visited.
    """

    query: int | jax.Array = 0
    key: int | jax.Array = 0
    first_key: int | jax.Array = 0  # The position.
    is_inside: bool | jax.Array = True  # Whether there is this segment of queries.
    starts_queries: bool | jax.Array = True
    ends_queries: bool | jax.Array = True
    starts_keys: bool | jax.Array = True
    ends_keys: bool | jax.Array = True


class _Program(NamedTuple):
    """What a program reads: its row, its block of lanes, the inputs and the spans of all rows."""

    row: jax.Array
    lanes: jax.Array
    inputs: _Inputs
    spans: _Spans
    visit: _Visit


def long_attention(
    projections: jax.Array,
    bias: jax.Array | None,
    mask: AttentionMask,
    dropout: AttentionDropout | None = None,
    rotation: tuple[jax.Array, jax.Array] | None = None,
    *,
    head_dim: int,
    segments: Segments | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes what `bert_jax.model.attention.attention` does, in one kernel for each direction.

    Args:
      projections: queries, keys and values, interleaved: `[batch, length, 3 * hidden]`, float32 or
        bfloat16.
      bias: of the projections, `[3 * hidden]`, or None. Adding it here gives its gradient without
        another pass. Without a rotation, that of keys has no effect and the gradient 0.
      mask: which positions attend to each other, without global positions and ranks. The positions
        of a sequence are consecutive, as in packed rows.
      dropout: of the probabilities, or None.
      rotation: cosines and sines by which queries and keys rotate, float32
        `[batch, length, head_dim / 2]`, as `modernbert.rotate` does; or None.
      head_dim: the size of a head.
      segments: what a program has of a row at a time; None: all of it.
      interpret: runs the kernel on any device, for tests.

    Returns:
      `[batch, length, hidden]` in the dtype of `projections`.

    Raises:
      ValueError: the mask has global positions or ranks.
    """
    context, _ = long_attention_in_stack(
        None,
        0,
        projections,
        bias,
        mask,
        dropout,
        rotation,
        head_dim=head_dim,
        segments=segments,
        interpret=interpret,
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
    prepared: Prepared | None = None,
    *,
    head_dim: int,
    segments: Segments | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, list[jax.Array]]:
    """Computes `long_attention`; also writes projections and result to `layer` of `saved`.

    `saved` are two arrays `[layers, ...]`, which it returns: the kernels read and write them there,
    so that a loop over layers copies nothing. None: arrays of one layer. The length must be a
    multiple of 128, if they are given. `prepared` is what `prepare` returns for mask, rotation and
    segments; None: computed here, and saved for the gradient.
    """
    prepared = prepared or prepare(mask, rotation, segments)
    batch, length, width = projections.shape
    if padding := -length % LANES:
        end = (0, padding)
        projections = jnp.pad(projections, ((0, 0), end, (0, 0)))
        if dropout is not None:
            words = jnp.pad(dropout.words, ((0, 0), (0, 0), (0, 0), end))
            key_words = jnp.pad(dropout.key_words, ((0, 0), end))
            dropout = dropout._replace(words=words, key_words=key_words)
    options = make_options(
        length + padding, mask.window, head_dim, dropout is not None, segments, interpret
    )
    saved = saved or [
        lax.empty((1, batch, length + padding, size), projections.dtype)
        for size in (width, width // 3)
    ]
    context, saved = _attention(options, saved, layer, prepared, dropout, projections, bias)
    return context[:, :length], saved


def _padded(mask: AttentionMask, rotation):
    """Returns both for rows of whole tiles."""
    padding = -mask.sequence_ids.shape[1] % LANES
    if not padding:
        return mask, rotation
    ids = jnp.pad(mask.sequence_ids, ((0, 0), (0, padding)), constant_values=-1)
    if rotation is not None:
        rotation = tuple(jnp.pad(x, ((0, 0), (0, padding), (0, 0))) for x in rotation)
    return dataclasses.replace(mask, sequence_ids=ids), rotation


def prepare(
    mask: AttentionMask,
    rotation: tuple[jax.Array, jax.Array] | None = None,
    segments: Segments | None = None,
) -> Prepared:
    """Returns what the kernels read of a mask and of a rotation, for a loop over layers.

    Within the loop, the compiler would compute it in each layer. Raises ValueError if the mask has
    global or hidden positions, or ranks.
    """
    for name in ("is_global", "is_hidden", "ranks"):
        if getattr(mask, name) is not None:
            raise ValueError(f"the kernel for long rows does not support {name} of a mask")
    mask, rotation = _padded(mask, rotation)
    bounds, spans = _visible(mask, segments)
    table = None
    if rotation is not None:
        table = jnp.concatenate(rotation, axis=-1).astype(jnp.float32)
        table = _by_tiles(jnp.swapaxes(table, 1, 2), 1)
    return Prepared(_by_tiles(bounds, 1), spans, table)


def _by_tiles(x: jax.Array, axis: int) -> jax.Array:
    """Moves tiles of LANES positions, the last axis, to `axis`."""
    return jnp.moveaxis(x.reshape(*x.shape[:-1], -1, LANES), -2, axis)


def attention(
    projections: jax.Array,
    bias: jax.Array,
    sequence_ids: jax.Array,
    dropout: AttentionDropout | None = None,
    saved: list[jax.Array] | None = None,
    layer: int | jax.Array = 0,
    prepared: Prepared | None = None,
    *,
    head_dim: int,
    causal: bool = False,
    segments: Segments | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, list[jax.Array]]:
    """Computes `long_attention_in_stack` with the arguments of `attention_kernel.attention`."""
    mask = AttentionMask(sequence_ids, causal)
    return long_attention_in_stack(
        saved,
        layer,
        projections,
        bias,
        mask,
        dropout,
        prepared=prepared,
        head_dim=head_dim,
        segments=segments,
        interpret=interpret,
    )


def make_options(
    length: int,
    window: int | None,
    head_dim: int,
    has_dropout: bool,
    segments: Segments | None = None,
    interpret: bool = False,
) -> Options:
    """Returns the options for rows of a length, a multiple of LANES."""
    if window is not None:
        size = _largest_divisor(length, segments.band) if segments else length
        group = _largest_divisor(size, BAND_GROUP)
        tiles = 2 * -(-(window + LANES // 2) // LANES)
        # With four, more than the first tile of a segment would see keys of another.
        if tiles <= min(2 if segments else MAX_BAND, size // LANES):
            sizes = (size, size) if segments else None
            keys = tiles * LANES
            return Options(head_dim, group, LANES, keys, True, True, interpret, sizes, size)
    sizes, forward_queries = None, 0
    if segments:
        sizes = tuple(_largest_divisor(length, n) for n in (segments.queries, segments.keys))
        forward_queries = _largest_divisor(length, segments.forward_queries, sizes[0])
    num_queries, num_keys = sizes or (length, length)
    # What does not fit into registers of two tiles is too much in long rows on v4.
    group = _largest_divisor(num_queries, 2 * QUERIES if num_queries <= 1024 else QUERIES)
    # Pairs of heads share the hash of dropout.
    queries = LANES if has_dropout else _largest_divisor(group, QUERIES)
    keys = _largest_divisor(num_keys, KEYS)
    return Options(
        head_dim, group, queries, keys, has_dropout, False, interpret, sizes, forward_queries
    )


def _largest_divisor(size: int, limit: int, multiple: int = LANES) -> int:
    """Returns the largest multiple of a number up to `limit` that divides `size`."""
    return next(n for n in range(limit - limit % multiple, 0, -multiple) if size % n == 0)


def _visible(mask: AttentionMask, segments: Segments | None) -> tuple[jax.Array, _Spans]:
    """Returns the bounds of `_Inputs`, int32 `[batch, 2, length]`, and the spans of each group."""
    ids = mask.sequence_ids
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
    options = make_options(length, mask.window, LANES, has_dropout=False, segments=segments)
    groups, keys = (batch, -1, options.group), options.keys
    spans = _Spans(
        jnp.min(first.reshape(groups), axis=-1) // keys,
        -(-jnp.max(end.reshape(groups), axis=-1) // keys),
    )
    if options.segments:
        starts = jnp.arange(0, length, options.segments[1])[:, None] // keys
        ends = starts + options.segments[1] // keys
        sees = (spans.first[:, None] < ends) & (spans.end[:, None] > starts)
        group = jnp.arange(sees.shape[-1])
        spans = spans._replace(
            first_group=jnp.min(jnp.where(sees, group, len(group)), axis=-1),
            end_group=jnp.max(jnp.where(sees, group + 1, 0), axis=-1),
        )
    return bounds, jax.tree.map(lambda x: x.astype(jnp.int32), spans)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, saved, layer, prepared, dropout, projections, bias):
    return _attention_forward(options, saved, layer, prepared, dropout, projections, bias)[0]


def _attention_forward(options, saved, layer, prepared, dropout, projections, bias):
    options = options.of_forward()
    saved_projections, saved_context = saved
    saved_projections = lax.dynamic_update_index_in_dim(saved_projections, projections, layer, 0)
    arrays = _Arrays.from_shapes(options, saved_projections, saved_context, is_written=True)
    keys = arrays.tiles_of_keys(projections.dtype)
    saved_context, log_sum = _call(
        _forward_kernel,
        options,
        layer,
        *_kernel_inputs(options, prepared, dropout, saved_projections, bias),
        # Not read: it is the memory of the output. pallas_call needs a block for it nevertheless.
        given=[(pl.BlockSpec((None, 1, 16, LANES), lambda *_: (0, 0, 0, 0)), saved_context)],
        outputs=[arrays.saved_context, arrays.log_sum],
        scratch=[keys, keys, *arrays.states(1, 1, options.head_dim)],
        writes_in_place=True,
    )
    context = lax.dynamic_index_in_dim(saved_context, layer, 0, keepdims=False)
    saved = [saved_projections, saved_context]
    return (context, saved), (saved, layer, prepared, dropout, bias, log_sum)


def _attention_backward(options, residuals, gradients):
    (saved_projections, saved_context), layer, prepared, dropout, bias, log_sum = residuals
    dtype = saved_projections.dtype
    arrays = _Arrays.from_shapes(options, saved_projections, saved_context, is_written=False)
    dcontext, _ = gradients
    keys, sums = arrays.tiles_of_keys(dtype), arrays.tiles_of_keys(jnp.float32)
    staged = []
    if options.segments:
        num_queries, num_keys = options.segments
        staged = [((num_queries, LANES), dtype), ((num_keys, 2 * LANES), dtype)]
    results = _call(
        _backward_kernel,
        options,
        layer,
        *_kernel_inputs(options, prepared, dropout, saved_projections, bias),
        given=[
            (arrays.saved_context.spec, saved_context),
            (arrays.log_sum.spec, log_sum),
            (arrays.context, dcontext),
        ],
        outputs=[arrays.projections, *([] if bias is None else [arrays.bias])],
        scratch=[keys, keys, sums, sums, *staged, *arrays.states(options.head_dim)],
    )
    dprojections, dbias = results[0], None
    if bias is not None:
        dbias = jnp.sum(results[1], (0, 1)).astype(bias.dtype)
    return None, None, None, None, dprojections, dbias


_attention.defvjp(_attention_forward, _attention_backward)


def _kernel_inputs(
    options: Options, prepared: Prepared, dropout, saved_projections, bias
) -> tuple[_Spans, _Inputs]:
    """Returns what both kernels read."""
    if bias is not None:
        bias = bias.astype(saved_projections.dtype).astype(jnp.float32)[None]
    inputs = _Inputs(saved_projections, prepared.bounds, jnp.ones((1, 1)), bias, prepared.rotation)
    if dropout is not None:
        inputs = inputs._replace(
            scale=dropout.scale.reshape(1, 1),
            query_words=_by_tiles(dropout.words, 2),
            key_words=_by_tiles(dropout.key_words, 0),
            threshold=dropout.threshold.reshape(1, 1),
        )
    if options.segments:
        inputs = inputs._replace(
            keys=saved_projections, values=saved_projections, key_rotation=prepared.rotation
        )
    return prepared.spans, inputs


class _Place(NamedTuple):
    """The blocks of a program, by their index."""

    row: jax.Array
    lanes: jax.Array
    layer: jax.Array
    query: int | jax.Array = 0
    read: int | jax.Array = 0  # Of queries, where they are visited; else one that is at hand.
    written: int | jax.Array = 0  # Of results, the last of its visits; else one that comes later.
    key: int | jax.Array = 0


def _place(options: Options, length: int, row, lanes, *rest) -> _Place:
    """Returns the place of a program, from what pallas gives to index maps."""
    if not options.segments:
        layer, *_ = rest
        return _Place(row, lanes, layer[0])
    key, number, layer, _, _, first_group, end_group = rest
    num_queries, num_keys = (length // size for size in options.segments)
    is_last = key == num_keys - 1
    if options.is_band:
        query = read = jnp.clip(key + number - 1, 0, num_queries - 1)
        written = jnp.where(is_last & (number > 0), num_queries - 1, jnp.maximum(key - 1, 0))
    else:
        query, groups = number, options.segments[0] // options.group
        first, last = first_group[row, key] // groups, (end_group[row, key] - 1) // groups
        read = jnp.clip(query, first, last)
        written = jnp.where(is_last, query, 0)
    return _Place(row, lanes, layer[0], query, read, written, key)


def _visit(options: Options, length: int) -> _Visit:
    """Returns what the current program does."""
    if not options.segments:
        return _Visit()
    key, number = pl.program_id(2), pl.program_id(3)
    num_queries, num_keys = (length // size for size in options.segments)
    query, is_inside, starts, ends = number, True, key == 0, key == num_keys - 1
    if options.is_band:
        query = key + number - 1
        is_inside = (query >= 0) & (query < num_queries)
        starts = is_inside & (key == jnp.maximum(query - 1, 0))
        ends = is_inside & (key == jnp.minimum(query + 1, num_keys - 1))
    return _Visit(
        query,
        key,
        first_key=key * options.segments[1],
        is_inside=is_inside,
        starts_queries=starts,
        ends_queries=ends,
        starts_keys=number == 0,
        ends_keys=number == pl.num_programs(3) - 1,
    )


class _Arrays(NamedTuple):
    """The arrays of the kernels, each divided into blocks of rows and lanes."""

    options: Options
    length: int
    saved_context: BlockedArray  # [layers, batch, length, hidden]
    context: pl.BlockSpec  # [batch, length, hidden]
    projections: BlockedArray  # [batch, length, 3 * hidden]
    log_sum: BlockedArray  # [batch, blocks of lanes, tiles of queries, heads in a block, LANES]
    bias: BlockedArray  # [batch, 1, 3 * hidden], float32: the gradient of each row.

    @classmethod
    def from_shapes(
        cls, options: Options, saved_projections, saved_context, is_written: bool
    ) -> "_Arrays":
        """Describes arrays of which the kernel reads or writes the blocks of queries."""
        (_, batch, length, hidden), dtype = saved_context.shape, saved_context.dtype
        heads, tiles = LANES // options.head_dim, length // LANES
        num_queries, _ = options.segments or (length, length)
        spec = functools.partial(_spec, options, length)

        def query(at: _Place):
            return at.written if is_written else at.read

        gradient = spec((None, length, 3 * LANES), lambda at: (at.row, 0, at.lanes))
        if options.segments:  # The kernel copies each part when it is complete.
            gradient = pl.BlockSpec(memory_space=pl.ANY)
        return cls(
            options,
            length,
            saved_context=BlockedArray(
                spec(
                    (None, None, num_queries, LANES),
                    lambda at: (at.layer, at.row, query(at), at.lanes),
                ),
                saved_context,
            ),
            context=spec((None, num_queries, LANES), lambda at: (at.row, query(at), at.lanes)),
            projections=BlockedArray(
                gradient, jax.ShapeDtypeStruct(saved_projections.shape[1:], dtype)
            ),
            log_sum=BlockedArray(
                spec(
                    (None, None, num_queries // LANES, heads, LANES),
                    lambda at: (at.row, at.lanes, query(at), 0, 0),
                ),
                jax.ShapeDtypeStruct((batch, hidden // LANES, tiles, heads, LANES), jnp.float32),
            ),
            bias=BlockedArray(
                spec((None, 1, 3 * LANES), lambda at: (at.row, 0, at.lanes)),
                jax.ShapeDtypeStruct((batch, 1, 3 * hidden), jnp.float32),
            ),
        )

    def tiles_of_keys(self, dtype) -> tuple[tuple[int, ...], jnp.dtype]:
        """Returns the shape and dtype of what a program has of its keys, transposed or not."""
        _, num_keys = self.options.segments or (self.length, self.length)
        return (num_keys // LANES, LANES, LANES), dtype

    def states(self, *rows: int) -> list[tuple[tuple[int, ...], jnp.dtype]]:
        """Returns shapes and dtypes of the states of all units of a row, if it is in segments."""
        width = len(_units(self.options)[0].heads) * self.options.queries
        units = self.length * (LANES // self.options.head_dim) // width
        return [((units, n, width), jnp.float32) for n in rows if self.options.segments]


def _spec(options: Options, length: int, block: tuple, index: Callable, **more) -> pl.BlockSpec:
    """Returns blocks whose `index` is a function of the place of a program."""
    return pl.BlockSpec(block, lambda *grid: index(_place(options, length, *grid)), **more)


def _input_specs(options: Options, length: int) -> _Inputs:
    """Returns the blocks of each input."""
    head_dim = options.head_dim
    heads = LANES // head_dim
    lanes_per_pair, pairs = max(2 // heads, 1), max(heads // 2, 1)
    num_queries, num_keys = options.segments or (length, length)
    query_tiles, key_tiles = num_queries // LANES, num_keys // LANES
    scalar = pl.BlockSpec((1, 1), lambda *_: (0, 0), memory_space=pltpu.SMEM)
    spec = functools.partial(_spec, options, length)
    keys = None, None, num_keys, LANES
    seldom = {"pipeline_mode": pl.Buffered(1)}  # Of segments that many programs share.
    specs = _Inputs(
        queries=spec(
            (None, None, num_queries, 3 * LANES), lambda at: (at.layer, at.row, 0, at.lanes)
        ),
        bounds=spec((None, query_tiles, 2, LANES), lambda at: (at.row, at.read, 0, 0)),
        scale=scalar,
        bias=spec((1, 3 * LANES), lambda at: (0, at.lanes)),
        rotation=spec((None, query_tiles, head_dim, LANES), lambda at: (at.row, at.query, 0, 0)),
        query_words=spec(
            (None, pairs, query_tiles, 2, LANES),
            lambda at: (at.row, at.lanes // lanes_per_pair, at.read, 0, 0),
        ),
        key_words=spec((key_tiles, 2, LANES), lambda at: (at.key, 0, 0)),
        threshold=scalar,
        keys=spec(keys, lambda at: (at.layer, at.row, at.key, 3 * at.lanes + 1), **seldom),
        values=spec(keys, lambda at: (at.layer, at.row, at.key, 3 * at.lanes + 2), **seldom),
        key_rotation=spec(
            (None, key_tiles, head_dim, LANES), lambda at: (at.row, at.key, 0, 0), **seldom
        ),
    )
    if not options.segments:
        return specs
    queries = spec(
        (None, None, num_queries, LANES), lambda at: (at.layer, at.row, at.read, 3 * at.lanes)
    )
    return specs._replace(queries=queries)


def variant(options: Options, rotates: bool) -> str:
    """Returns what the name of a kernel says of it, by which `hlo_cost` finds it."""
    rotary, keys = "_rotary" * rotates, "band" if options.is_band else "keys"
    segments = "_segments{}x{}".format(*options.segments) if options.segments else ""
    return f"long_{options.head_dim}{rotary}{segments}_{keys}{options.keys}"


def _call(
    kernel: Callable,
    options: Options,
    layer: int | jax.Array,
    spans: _Spans,
    inputs: _Inputs,
    *,
    given: list[tuple[pl.BlockSpec, jax.Array]],
    outputs: list[BlockedArray],
    scratch: list[tuple[tuple[int, ...], jnp.dtype]],
    writes_in_place: bool = False,
) -> list[jax.Array]:
    """Runs `kernel` for each block of lanes of each row.

    It reads the `inputs`, then the arrays that are `given` with their blocks. If it
    `writes_in_place`, the first output is the first of these, changed at `layer`. It has memory of
    each shape and dtype in `scratch`.
    """
    _, batch, length, width = inputs.queries.shape
    specs = _input_specs(options, length)
    used = [index for index, x in enumerate(inputs) if x is not None]
    names = [_Inputs._fields[index] for index in used]
    scalars = [x for x in spans if x is not None]
    grid = batch, width // (3 * LANES)
    order = "parallel", "parallel"
    if options.segments:
        num_queries, num_keys = (length // size for size in options.segments)
        grid += num_keys, 3 if options.is_band else num_queries
        order += "arbitrary", "arbitrary"

    def run(_, *refs):
        spans, refs = _Spans(*refs[: len(scalars)]), refs[len(scalars) :]
        read = _Inputs(**dict(zip(names, refs[: len(names)], strict=True)))
        if not options.segments:
            parts = [read.queries.at[:, part] for part in (QUERY, KEY, VALUE)]
            queries, keys, values = parts
            read = read._replace(
                queries=queries, keys=keys, values=values, key_rotation=read.rotation
            )
        row, lanes = pl.program_id(0), pl.program_id(1)
        program = _Program(row, lanes, read, spans, _visit(options, length))
        kernel(options, program, *refs[len(names) :])

    in_specs = [*(specs[index] for index in used), *(spec for spec, _ in given)]
    arrays = [*(inputs[index] for index in used), *(array for _, array in given)]
    specs = in_specs + [output.spec for output in outputs]
    dtypes = [x.dtype for x in arrays + [output.shape for output in outputs]]
    # By default, blocks have two buffers; the compiler adds what does not fit into registers.
    num_bytes = SPILLED_BYTES + sum(
        (1 if spec.pipeline_mode else 2)
        * math.prod(size or 1 for size in spec.block_shape)
        * dtype.itemsize
        for spec, dtype in zip(specs, dtypes, strict=True)
        if spec.block_shape
    )
    num_bytes += sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in scratch)
    return pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(scalars),
            grid=grid,
            in_specs=in_specs,
            out_specs=[output.spec for output in outputs],
            scratch_shapes=[pltpu.VMEM(shape, dtype) for shape, dtype in scratch],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape.shape, x.shape.dtype) for x in outputs],
        input_output_aliases={1 + len(scalars) + len(used): 0} if writes_in_place else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=order,
            vmem_limit_bytes=max(num_bytes, DEFAULT_BYTES),
        ),
        interpret=options.interpret,
        name=kernel_name(
            kernel, variant(options, inputs.rotation is not None), inputs.key_words is not None
        ),
    )(jnp.full(1, layer, jnp.int32), *scalars, *arrays)


class _Unit(NamedTuple):
    """Heads of a tile of queries, side by side: `width` lanes. The state of a unit is theirs."""

    n: int  # Of the tile in its group.
    heads: tuple[int, ...]


def _units(options: Options) -> list[_Unit]:
    heads = tuple(range(LANES // options.head_dim))
    parts = [heads] if options.joins_heads else [(head,) for head in heads]
    return [_Unit(n, part) for n in range(options.group // options.queries) for part in parts]


def _tiles_of_group(options: Options, group) -> list:
    """Returns the tiles of queries that are computed together."""
    size = options.group // options.queries
    return [group * size + n for n in range(size)]


def _forward_kernel(
    options: Options, program: _Program, _, out_ref, log_sum_ref, key_ref, value_ref, *state_refs
):
    inputs, dtype = program.inputs, out_ref.dtype

    def prepare(tile):
        _prepare_keys(options, inputs, tile, key_ref, None)
        value = _part(inputs, inputs.values, VALUE, _positions(tile))
        value_ref[tile] = value.T.astype(dtype)

    _for_each_tile(key_ref.shape[0], program.visit.starts_keys, prepare)

    def attend(options, index, states):
        units, tiles = _units(options), _tiles_of_group(options, index)
        queries = []
        for tile in tiles:
            heads = _only_heads(options, _query(options, inputs, tile), 0)
            queries.append([x.astype(dtype) for x in heads])

        def add_keys(number, states):
            def scores_of(unit):
                query = _side_by_side([queries[unit.n][head] for head in unit.heads])
                keys = _key_tiles(options, inputs, tiles[unit.n], number)
                scores = dot(_join(key_ref, keys, 0), query, 1, 0)
                return _mask(options, program, scores, tiles[unit.n], keys)

            new_states = []
            for (unit, scores), state in zip(_one_ahead(scores_of, units), states, strict=True):
                maximum, total, weighted = state
                keys = _key_tiles(options, inputs, tiles[unit.n], number)
                new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=0, keepdims=True))
                # Until a query's first visible key, these sums hold garbage: this is then 0.
                rescale = jnp.exp2(maximum - new_maximum)
                weights = jnp.exp2(scores - new_maximum)
                total = total * rescale + jnp.sum(weights, axis=0, keepdims=True)
                is_dropped = _is_dropped(options, program, unit, tiles, keys)
                weights = _drop(weights, is_dropped).astype(dtype)
                values = [
                    dot(_join(value_ref, keys, 1, lanes), part, 1, 0)
                    for lanes, part in _by_head(options, unit, weights)
                ]
                weighted = weighted * rescale + _side_by_side(values)
                new_states.append((new_maximum, total, weighted))
            return new_states

        return _loop_over_keys(options, program, index, add_keys, states)

    def finish(index, states, _):
        tiles = _tiles_of_group(options, index)
        outputs = [[] for _ in tiles]
        for unit, (maximum, total, weighted) in zip(_units(options), states, strict=True):
            log_sums = _by_head(options, unit, maximum + jnp.log2(total))
            result = _by_head(options, unit, weighted * (inputs.scale[0, 0] / total))
            for head, (_, log_sum), (_, part) in zip(unit.heads, log_sums, result, strict=True):
                _store_log_sum(options, log_sum_ref, tiles[unit.n], head, log_sum)
                outputs[unit.n].append(part)
        for tile, parts in zip(tiles, outputs, strict=True):
            _store(options, out_ref, tile, jnp.concatenate(parts).T.astype(dtype))
        return 0

    width = len(_units(options)[0].heads) * options.queries
    row, zeros = (1, width), jnp.zeros((options.head_dim, width))
    initial = jnp.full(row, LOWEST), jnp.zeros(row), zeros
    _for_each_group(options, program, initial, attend, finish, state_refs, 0)


def _backward_kernel(
    options: Options, program: _Program, out_ref, log_sum_ref, dout_ref, gradient_ref, *refs
):
    inputs, visit, num_heads = program.inputs, program.visit, LANES // options.head_dim
    has_bias = inputs.bias is not None
    dbias_refs, scratch = refs[:has_bias], refs[has_bias:]
    key_ref, key_transposed_ref, dkey_ref, dvalue_ref, *scratch = scratch
    scale, dtype = inputs.scale[0, 0], gradient_ref.dtype
    if options.segments:
        query_gradient, key_gradients, *state_refs = scratch
        dkey_out, dvalue_out = (key_gradients.at[:, part] for part in (QUERY, KEY))
    else:
        query_gradient, dkey_out, dvalue_out = (
            gradient_ref.at[:, part] for part in (QUERY, KEY, VALUE)
        )
        state_refs = []

    def prepare(tile):
        _prepare_keys(options, inputs, tile, key_ref, key_transposed_ref)
        dkey_ref[tile] = jnp.zeros((LANES, LANES))
        dvalue_ref[tile] = jnp.zeros((LANES, LANES))

    _for_each_tile(key_ref.shape[0], visit.starts_keys, prepare)

    def attend(options, index, states):
        units, tiles = _units(options), _tiles_of_group(options, index)
        queries, douts, transposed, means, log_sums = [], [], [], [], []
        for tile in tiles:
            query = _query(options, inputs, tile)
            queries.append([x.astype(dtype) for x in _only_heads(options, query.T, 1)])
            dout = _load(options, dout_ref, tile)
            douts.append([x.astype(dtype) for x in _only_heads(options, dout, 1)])
            dout = dout.T
            transposed.append((query.astype(dtype), dout.astype(dtype)))
            # The sum over keys of probability times its gradient (Dao et al., 2022, section 3.1).
            weighted = dout * _load(options, out_ref, tile).T / scale
            lanes = [_lanes(options, head) for head in range(num_heads)]
            means.append([jnp.sum(weighted[each], axis=0, keepdims=True) for each in lanes])
            log_sums.append(_load_log_sums(options, log_sum_ref, tile))

        def add_keys(number, states):
            def products_of(unit):
                keys = _key_tiles(options, inputs, tiles[unit.n], number)
                query, dout = (
                    jnp.concatenate([x[unit.n][head] for head in unit.heads])
                    for x in (queries, douts)
                )
                scores = dot(_join(key_ref, keys, 0), query, 1, 1)
                scores = _mask(options, program, scores, tiles[unit.n], keys)
                value = [_part(inputs, inputs.values, VALUE, _positions(tile)) for tile in keys]
                return scores, dot(jnp.concatenate(value).astype(dtype), dout, 1, 1)

            new_states = []
            dkeys, dvalues = [0.0] * num_heads, [0.0] * num_heads
            ahead = _one_ahead(products_of, units)
            for (unit, (scores, dweights)), (old_dquery,) in zip(ahead, states, strict=True):
                keys = _key_tiles(options, inputs, tiles[unit.n], number)
                log_sum, mean = (
                    _side_by_side([x[unit.n][head] for head in unit.heads])
                    for x in (log_sums, means)
                )
                probabilities = jnp.exp2(scores - log_sum)
                is_dropped = _is_dropped(options, program, unit, tiles, keys)
                dscores = probabilities * (_drop(dweights, is_dropped) - mean)
                dscores = dscores.astype(dtype)
                weights = _drop(probabilities, is_dropped).astype(dtype)
                # The sums are transposed: a product with 64 columns takes as long as one with 128.
                query, dout = transposed[unit.n]
                for head, (lanes, part) in zip(
                    unit.heads, _by_head(options, unit, weights), strict=True
                ):
                    dvalues[head] += dot(dout[lanes], part, 1, 1)
                dquery = []
                for head, (lanes, part) in zip(
                    unit.heads, _by_head(options, unit, dscores), strict=True
                ):
                    dkeys[head] += dot(query[lanes], part, 1, 1)
                    dquery.append(dot(_join(key_transposed_ref, keys, 1, lanes), part, 1, 0))
                new_states.append((old_dquery + _side_by_side(dquery),))
                # In a band, each tile of queries has other keys.
                if options.is_band or unit is units[-1]:
                    _add_to_tiles(dkey_ref, keys, jnp.concatenate(dkeys))
                    _add_to_tiles(dvalue_ref, keys, jnp.concatenate(dvalues))
                    dkeys, dvalues = [0.0] * num_heads, [0.0] * num_heads
            return new_states

        return _loop_over_keys(options, program, index, add_keys, states)

    def finish(index, states, dbias):
        tiles = _tiles_of_group(options, index)
        gradients = [[] for _ in tiles]
        for unit, (dquery,) in zip(_units(options), states, strict=True):
            gradients[unit.n] += [part for _, part in _by_head(options, unit, dquery)]
        for tile, parts in zip(tiles, gradients, strict=True):
            gradient = jnp.concatenate(parts) * (scale / math.sqrt(options.head_dim))
            gradient = _rotate(options, gradient, *_angles(options, inputs, tile), back=True).T
            _store(options, query_gradient, tile, gradient.astype(dtype))
            if has_bias:
                dbias += jnp.sum(gradient, axis=0, keepdims=True)
        return dbias

    zeros = jnp.zeros((1, LANES))
    width = len(_units(options)[0].heads) * options.queries
    initial = (jnp.zeros((options.head_dim, width)),)
    dquery_sum = _for_each_group(options, program, initial, attend, finish, state_refs, zeros)

    def finish_keys(tile, sums):
        dkey_sum, dvalue_sum = sums
        positions = _positions(tile)
        # The query had a factor of log2(e).
        dkey = dkey_ref[tile] * (scale * math.log(2))
        if inputs.rotation is not None:
            dkey = _rotate(options, dkey, *_key_angles(options, inputs, tile), back=True)
        dkey = dkey.T
        dkey_out[positions, :] = dkey.astype(dtype)
        dvalue = dvalue_ref[tile].T * scale
        dvalue_out[positions, :] = dvalue.astype(dtype)
        if has_bias:
            dvalue_sum += jnp.sum(dvalue, axis=0, keepdims=True)
            if inputs.rotation is not None:
                dkey_sum += jnp.sum(dkey, axis=0, keepdims=True)
        return dkey_sum, dvalue_sum

    dkey_sum, dvalue_sum = _for_each_tile(
        key_ref.shape[0], visit.ends_keys, finish_keys, (zeros, zeros)
    )
    for dbias_ref in dbias_refs:
        dbias = jnp.concatenate([dquery_sum, dkey_sum, dvalue_sum], axis=1)
        if options.segments:
            is_first = (visit.key == 0) & visit.starts_keys
            dbias += jnp.where(is_first, 0.0, dbias_ref[...])
        dbias_ref[...] = dbias
    if options.segments:
        _copy_gradients(options, program, query_gradient, key_gradients, gradient_ref)


def _copy_gradients(options: Options, program: _Program, query_gradient, key_gradients, out_ref):
    """Copies the gradients of the segments that are complete to `[batch, length, 3 * hidden]`."""
    row, lanes, *_, visit = program

    def copy(ref, segment, first_part):
        size, width = ref.shape
        positions = pl.ds(pl.multiple_of(segment * size, size), size)
        first = pl.multiple_of((3 * lanes + first_part) * LANES, LANES)
        pltpu.sync_copy(ref, out_ref.at[row, positions, pl.ds(first, width)])

    pl.when(visit.ends_queries)(lambda: copy(query_gradient, visit.query, 0))
    pl.when(visit.ends_keys)(lambda: copy(key_gradients, visit.key, 1))


def _for_each_group(
    options: Options,
    program: _Program,
    initial: tuple[jax.Array, ...],
    attend: Callable,
    finish: Callable,
    state_refs: list,
    sums,
):
    """Runs `attend` and `finish` for the groups of queries.

    `attend(options, index, states)` adds keys to the states of the units of a group, of which each
    is `initial` before. `finish(index, states, sums)` returns the new `sums`, as this does. States
    of segments are kept in `state_refs` from visit to visit.
    """
    visit, units = program.visit, _units(options)
    num_queries = program.inputs.queries.shape[0]
    num_groups = num_queries // options.group
    if not options.segments:

        def run(index, sums):
            return finish(index, attend(options, index, [initial] * len(units)), sums)

        return lax.fori_loop(0, num_groups, run, sums)

    def places(options, index):
        num_units = len(_units(options))
        group = visit.query * (num_queries // options.group) + index
        return [group * num_units + n for n in range(num_units)]

    def load(options, index):
        return [tuple(ref[n] for ref in state_refs) for n in places(options, index)]

    def store(options, index, states):
        for n, state in zip(places(options, index), states, strict=True):
            for ref, x in zip(state_refs, state, strict=True):
                ref[n] = x

    def start(index, _):
        store(options, index, [initial] * len(units))
        return 0

    def adding(options):
        def add(index, _):
            store(options, index, attend(options, index, load(options, index)))
            return 0

        return add

    lax.fori_loop(0, jnp.where(visit.starts_queries, num_groups, 0), start, 0)
    if options.is_band:
        is_own = visit.query == visit.key
        lax.fori_loop(0, jnp.where(is_own, num_groups, 0), adding(options), 0)
        sees_next = visit.is_inside & ~is_own
        first_tile = options._replace(group=LANES)
        lax.fori_loop(0, jnp.where(sees_next, 1, 0), adding(first_tile), 0)
    else:
        spans = program.spans
        first, end = (
            jnp.clip(groups[program.row, visit.key] - visit.query * num_groups, 0, num_groups)
            for groups in (spans.first_group, spans.end_group)
        )
        lax.fori_loop(first, end, adding(options), 0)
    return lax.fori_loop(
        0,
        jnp.where(visit.ends_queries, num_groups, 0),
        lambda index, sums: finish(index, load(options, index), sums),
        sums,
    )


def _for_each_tile(num_tiles: int, is_run, run: Callable, state=None):
    """Runs `run(tile, state)`, or `run(tile)` without a state, for all tiles of LANES positions.

    If `is_run` is False, does nothing.
    """
    at_once = 2 - num_tiles % 2

    def body(number, state):
        for n in range(at_once):
            tile = number * at_once + n
            state = run(tile) if state is None else run(tile, state)
        return state

    trips = num_tiles // at_once
    return lax.fori_loop(0, trips if is_run is True else jnp.where(is_run, trips, 0), body, state)


def _join(ref, tiles: list, axis: int, rows: slice = slice(None)) -> jax.Array:
    """Returns `rows` of some tiles of `[tiles, LANES, LANES]`, one after another along `axis`."""
    return jnp.concatenate([ref[tile, rows, :] for tile in tiles], axis=axis)


def _add_to_tiles(ref, tiles: list, x: jax.Array):
    """Adds `[LANES, positions]` to some tiles of `[tiles, LANES, LANES]`."""
    for n, tile in enumerate(tiles):
        ref[tile] += x[:, n * LANES : (n + 1) * LANES]


def _side_by_side(parts: list) -> jax.Array:
    return jnp.concatenate(parts, axis=1)


def _by_head(options: Options, unit: _Unit, x: jax.Array) -> list[tuple[slice, jax.Array]]:
    """Returns, for each head of a unit, its lanes in the projections and its part of `x`."""
    return [
        (_lanes(options, head), x[:, n * options.queries : (n + 1) * options.queries])
        for n, head in enumerate(unit.heads)
    ]


def _mask(
    options: Options, program: _Program, scores: jax.Array, tile, key_tiles: list
) -> jax.Array:
    """Returns the scores of a unit, with LOWEST for invisible keys."""
    bounds = program.inputs.bounds
    first, count = (_rows_of(options, bounds, tile, slice(n, n + 1)) for n in (0, 1))
    key = lax.broadcasted_iota(jnp.int32, (LANES, options.queries), 0)
    smallest = -(2**31)
    start = smallest + program.visit.first_key
    # Offsets below 0 are large as unsigned integers.
    is_visible = jnp.concatenate(
        [key + (start + key_tile * LANES - first) < count + smallest for key_tile in key_tiles]
    )
    size = options.queries
    parts = [scores[:, n : n + size] for n in range(0, scores.shape[1], size)]
    return _side_by_side([jnp.where(is_visible, part, LOWEST) for part in parts])


def _prepare_keys(options: Options, inputs: _Inputs, tile, key_ref, transposed_ref):
    """Writes a tile of rotated keys to `key_ref`, and transposed, if it is given, to the other."""
    dtype = key_ref.dtype
    if inputs.rotation is None:  # Then a bias of keys has no effect.
        key = inputs.keys[_positions(tile), :]
        key_ref[tile] = key
        if transposed_ref is not None:
            transposed_ref[tile] = key.astype(jnp.float32).T.astype(dtype)
        return
    key = _part(inputs, inputs.keys, KEY, _positions(tile)).T
    key = _rotate(options, key, *_key_angles(options, inputs, tile))
    key_ref[tile] = key.T.astype(dtype)
    if transposed_ref is not None:
        transposed_ref[tile] = key.astype(dtype)


def _one_ahead(compute: Callable, units: list) -> Iterator:
    """Yields each of `units` with `compute(unit)`, which is computed before the last is yielded.

    So the compiler overlaps the products of the next one with the rest of this one.
    """
    ahead = None
    for unit in units:
        computed = unit, compute(unit)
        if ahead:
            yield ahead
        ahead = computed
    yield ahead


def _key_tiles(options: Options, inputs: _Inputs, query_tile, number) -> list:
    """Returns the tiles of keys of an iteration; of a band, those around the queries."""
    size = options.keys // LANES
    if not options.is_band:
        return [number * size + n for n in range(size)]
    first, num_tiles = query_tile - size // 2, inputs.bounds.shape[0]
    return [_wrap(first + n, num_tiles) for n in range(size)]


def _wrap(tile, num_tiles: int):
    tile = jnp.where(tile < 0, tile + num_tiles, tile)
    return jnp.where(tile >= num_tiles, tile - num_tiles, tile)


def _loop_over_keys(options: Options, program: _Program, group, add_keys: Callable, state):
    if options.is_band:
        return add_keys(0, state)
    spans, row, visit = program.spans, program.row, program.visit
    if not options.segments:
        return lax.fori_loop(spans.first[row, group], spans.end[row, group], add_keys, state)
    num_queries, num_keys = options.segments
    group += visit.query * (num_queries // options.group)
    num_blocks = num_keys // options.keys
    first, end = (
        jnp.clip(blocks[row, group] - visit.key * num_blocks, 0, num_blocks)
        for blocks in (spans.first, spans.end)
    )
    return lax.fori_loop(first, end, add_keys, state)


def _positions(tile):
    return pl.ds(pl.multiple_of(tile * LANES, LANES), LANES)


def _row_slices(options: Options, tile, length: int) -> list:
    """Returns where the queries of a tile are: those of a band start half a tile earlier."""
    if not options.is_band:
        size = options.queries
        return [pl.ds(pl.multiple_of(tile * size, size), size)]
    half = LANES // 2
    start = tile * LANES
    before = jnp.where(tile == 0, length, start) - half
    return [pl.ds(pl.multiple_of(x, half), half) for x in (before, start)]


def _load(options: Options, ref, tile) -> jax.Array:
    """Returns float32 `[query_tile, LANES]` of the queries of a tile."""
    slices = _row_slices(options, tile, ref.shape[0])
    return jnp.concatenate([ref[each, :].astype(jnp.float32) for each in slices])


def _store(options: Options, ref, tile, x):
    slices = _row_slices(options, tile, ref.shape[0])
    for each, part in zip(slices, jnp.split(x, len(slices)), strict=True):
        ref[each, :] = part


def _store_log_sum(options: Options, ref, tile, head: int, log_sum: jax.Array):
    """Stores float32 `[1, queries]`; those of a band stay where its tiles start earlier."""
    size = options.queries // LANES
    for n in range(size):
        part = log_sum[:, n * LANES : (n + 1) * LANES]
        ref[tile * size + n, pl.ds(head, 1), :] = part


def _load_log_sums(options: Options, ref, tile) -> list[jax.Array]:
    """Returns float32 `[1, queries]` of each head."""
    size = options.queries // LANES
    tiles = [tile * size + n for n in range(size)]
    return [_join(ref, tiles, 1, slice(head, head + 1)) for head in range(ref.shape[1])]


def _rows_of(options: Options, ref, tile, rows: slice) -> jax.Array:
    """Returns `[rows, queries]` of the queries of a tile from `[tiles of LANES, rows, LANES]`."""
    if not options.is_band:
        size = options.queries // LANES
        return jnp.concatenate([ref[tile * size + n, rows, :] for n in range(size)], axis=1)
    num_tiles = ref.shape[0]
    own, before = ref[tile, rows, :], ref[_wrap(tile - 1, num_tiles), rows, :]
    half = LANES // 2
    lane = lax.broadcasted_iota(jnp.int32, own.shape, 1)
    return pltpu.roll(jnp.where(lane < half, own, before), half, 1)


def _part(inputs: _Inputs, ref, part: slice, positions) -> jax.Array:
    """Returns float32 `[positions, LANES]` of a part of the projections, with its bias."""
    x = ref[positions, :].astype(jnp.float32)
    return x if inputs.bias is None else x + inputs.bias[:, part]


def _query(options: Options, inputs: _Inputs, tile) -> jax.Array:
    """Returns a tile of rotated queries, float32 `[LANES, queries]`, scaled."""
    query = _load(options, inputs.queries, tile)
    if inputs.bias is not None:
        query += inputs.bias[:, QUERY]
    query = query.T * (math.log2(math.e) / math.sqrt(options.head_dim))
    if inputs.rotation is None:
        return query
    return _rotate(options, query, *_angles(options, inputs, tile))


def _angles(options, inputs, tile):
    if inputs.rotation is None:
        return None, None
    half = options.head_dim // 2
    return tuple(
        _rows_of(options, inputs.rotation, tile, slice(n * half, (n + 1) * half)) for n in (0, 1)
    )


def _key_angles(options, inputs, tile):
    half = options.head_dim // 2
    return inputs.key_rotation[tile, :half, :], inputs.key_rotation[tile, half:, :]


def _rotate(options: Options, x: jax.Array, cosines, sines, back: bool = False):
    """Rotates the heads of float32 `[LANES, positions]`, or `back`."""
    if cosines is None:
        return x
    half = options.head_dim // 2
    if back:
        sines = -sines
    parts = []
    for start in range(0, LANES, options.head_dim):
        first, second = x[start : start + half], x[start + half : start + 2 * half]
        parts += [first * cosines - second * sines, second * cosines + first * sines]
    return jnp.concatenate(parts)


def _only_heads(options, x: jax.Array, axis: int) -> list[jax.Array]:
    """Returns `x` for each head, with 0 in place of the others along `axis`."""
    if options.head_dim == LANES:
        return [x]
    index = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    heads = [_lanes(options, head) for head in range(LANES // options.head_dim)]
    return [jnp.where((index >= h.start) & (index < h.stop), x, 0.0) for h in heads]


def _lanes(options: Options, head: int) -> slice:
    return slice(head * options.head_dim, (head + 1) * options.head_dim)


def _is_dropped(options: Options, program: _Program, unit: _Unit, tiles, key_tiles):
    """Returns bool `[keys, lanes of the unit]`, or None without dropout."""
    inputs = program.inputs
    if inputs.threshold is None:
        return None
    key_words = [_key_words(options, inputs, key_tiles, n) for n in (0, 1)]
    bits = []
    for pair in range(inputs.query_words.shape[0]):
        words = inputs.query_words.at[pair]
        words = [_rows_of(options, words, tiles[unit.n], slice(n, n + 1)) for n in (0, 1)]
        bits += random_bits(words, key_words)
    if options.head_dim == LANES:
        bits = [jnp.where(program.lanes % 2 == 0, *bits)]
    return _side_by_side([bits[head] for head in unit.heads]) < inputs.threshold[0, 0]


def _drop(x: jax.Array, is_dropped: jax.Array | None) -> jax.Array:
    return x if is_dropped is None else jnp.where(is_dropped, 0.0, x)


def _key_words(options: Options, inputs: _Inputs, key_tiles: list, word: int) -> jax.Array:
    """Returns int32 `[keys, queries]`: a word of each key in all lanes."""
    rows = [inputs.key_words[tile, pl.ds(word, 1), :] for tile in key_tiles]
    column = jnp.concatenate([jnp.broadcast_to(row, (LANES, LANES)).T for row in rows])
    return _side_by_side([column] * (options.queries // LANES))
