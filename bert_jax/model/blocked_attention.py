"""Attention that never holds the probabilities of all pairs of positions, on any device.

A block of queries at a time attends to blocks of keys, with a running softmax (Milakov and
Gimelshein, 2018; Dao et al., 2022), so that memory is linear in the length of rows. Blocks in which
no pair of any row may attend are skipped: those of other sequences, and with a window all but one,
and those with global positions. The gradient computes the probabilities of each block again.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.cpu import parallel_matmul
from bert_jax.model.dropout import AttentionDropout
from bert_jax.model.score_bias import ScoreBias

BLOCK = 128  # Queries that are computed at a time, and keys that they read.
CONTEXT = "context"
"""The name of attention's result for `jax.checkpoint`."""


class _Rows(NamedTuple):
    """The rows, or some consecutive positions of them: queries or keys."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    mask: AttentionMask
    dropout: AttentionDropout | None

    @property
    def length(self) -> int:
        return self.query.shape[2]

    def at(self, start: jax.Array, size: int) -> "_Rows":
        def cut(x, axis):
            return lax.dynamic_slice_in_dim(x, start, size, axis)

        return self._map(cut)

    def padded(self, size: int) -> "_Rows":
        def pad(x, axis):
            widths = [(0, 0)] * x.ndim
            widths[axis] = 0, size - x.shape[axis]
            return jnp.pad(x, widths)

        rows = self._map(pad)
        is_row = jnp.arange(size) < self.length
        ids = jnp.where(is_row, rows.mask.sequence_ids, -1)  # Positions that are added here.
        return rows._replace(mask=dataclasses.replace(rows.mask, sequence_ids=ids))

    def _map(self, change) -> "_Rows":
        """Applies `change(array, axis of positions)` to all arrays."""
        mask, dropout = jax.tree.map(lambda x: change(x, 1), self.mask), self.dropout
        if dropout is not None:
            words, key_words = change(dropout.words, 3), change(dropout.key_words, 1)
            dropout = dropout._replace(words=words, key_words=key_words)
        return _Rows(*(change(x, 2) for x in (self.query, self.key, self.value)), mask, dropout)


def blocked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: AttentionMask,
    dropout: AttentionDropout | None = None,
    bias: ScoreBias | None = None,
) -> jax.Array:
    """Computes attention of queries, which are scaled already, to keys and values.

    All are `[batch, heads, length, head_dim]`, and so is the result, in the dtype of `value`. The
    softmax is in float32. `bias` is added to the scores.
    """
    rows = _Rows(query, key, value, mask, dropout)
    padded = rows.padded(-(-rows.length // BLOCK) * BLOCK)
    return _attention(padded, bias)[:, :, : rows.length]


@jax.custom_vjp
def _attention(rows: _Rows, bias: ScoreBias | None) -> jax.Array:
    return _forward(rows, bias)[0]


def _forward(rows: _Rows, bias: ScoreBias | None):
    spans = _key_spans(rows)

    def attend(block):
        """Returns the result of a block of queries, and the log of the sum of exp(scores)."""
        queries = rows.at(block * BLOCK, BLOCK)

        def add_span(start, size, is_new, state):
            maximum, total, weighted = state
            keys = rows.at(start, size)
            scores = _scores(queries, block * BLOCK, keys, start, is_new, bias)
            new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1, keepdims=True))
            # Until a query's first visible key, these sums hold garbage. Then this factor is 0: the
            # maximum so far was the minimum float32.
            rescale = jnp.exp(maximum - new_maximum)
            weights = jnp.exp(scores - new_maximum)
            total = total * rescale + jnp.sum(weights, axis=-1, keepdims=True)
            kept = _drop(queries, keys, weights).astype(rows.value.dtype)
            return new_maximum, total, weighted * rescale + parallel_matmul(kept, keys.value)

        shape = queries.value.shape  # Queries may be longer vectors.
        state = (
            jnp.full((*shape[:3], 1), jnp.finfo(jnp.float32).min),
            jnp.zeros((*shape[:3], 1)),
            jnp.zeros(shape),
        )
        maximum, total, weighted = spans.loop(block, add_span, state)
        log_total = maximum + jnp.log(total)
        if rows.mask.may_hide_all:
            is_empty = maximum == jnp.finfo(jnp.float32).min
            weighted = jnp.where(is_empty, 0.0, weighted)
            total = jnp.where(is_empty, 1.0, total)  # It is 0 if the block has read no keys.
            log_total = jnp.where(is_empty, jnp.inf, log_total)  # All probabilities are 0.
        return (weighted / total).astype(rows.value.dtype), log_total

    outputs, log_totals = lax.map(attend, jnp.arange(rows.length // BLOCK))
    # Named, so that `jax.checkpoint` can save them, and not run the loop again for the gradient.
    outputs = checkpoint_name(_join_blocks(outputs), CONTEXT)
    log_totals = checkpoint_name(_join_blocks(log_totals), CONTEXT)
    return outputs, (rows, bias, outputs, log_totals)


def _backward(residuals, dy):
    rows, bias, outputs, log_totals = residuals
    spans = _key_spans(rows)
    # The sum over keys of each probability times its gradient.
    delta = jnp.sum(dy.astype(jnp.float32) * outputs.astype(jnp.float32), axis=-1, keepdims=True)

    def block_gradients(state, block):
        queries = rows.at(block * BLOCK, BLOCK)
        block_dy, block_delta, log_total = (
            lax.dynamic_slice_in_dim(x, block * BLOCK, BLOCK, axis=2)
            for x in (dy, delta, log_totals)
        )

        def add_span(start, size, is_new, state):
            dquery, dkey, dvalue, dbias = state
            keys = rows.at(start, size)
            scores = _scores(queries, block * BLOCK, keys, start, is_new, bias)
            probabilities = jnp.exp(scores - log_total)
            kept = _drop(queries, keys, probabilities).astype(dy.dtype)
            dkept = parallel_matmul(block_dy, keys.value.mT)
            dscores = probabilities * (_drop(queries, keys, dkept) - block_delta)
            if bias is not None:
                distance = start - block * BLOCK
                of_bias = _bias_gradients(bias, queries.query, keys.key, distance, dscores)
                dbias = jax.tree.map(jnp.add, dbias, of_bias[0])
                dquery, dkey = dquery + of_bias[1], _add_at(dkey, start, of_bias[2])
            dscores = dscores.astype(rows.query.dtype)
            return (
                dquery + parallel_matmul(dscores, keys.key),
                _add_at(dkey, start, parallel_matmul(queries.query.mT, dscores).mT),
                _add_at(dvalue, start, parallel_matmul(block_dy.mT, kept).mT),
                dbias,
            )

        dquery = jnp.zeros(queries.query.shape)
        dquery, *state = spans.loop(block, add_span, (dquery, *state))
        return tuple(state), dquery

    dbias = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), bias)
    state = jnp.zeros(rows.key.shape), jnp.zeros(rows.value.shape), dbias
    blocks = jnp.arange(rows.length // BLOCK)
    (dkey, dvalue, dbias), dquery = lax.scan(block_gradients, state, blocks)
    dquery = _join_blocks(dquery)
    dtype = rows.query.dtype
    gradients = dquery.astype(dtype), dkey.astype(dtype), dvalue.astype(rows.value.dtype)
    dbias = jax.tree.map(lambda leaf, gradient: gradient.astype(leaf.dtype), bias, dbias)
    return _Rows(*gradients, None, None), dbias


_attention.defvjp(_forward, _backward)


class _KeySpans(NamedTuple):
    """The keys that each block of queries reads: a band, and then blocks of a list.

    Attributes:
      band_starts: int32 `[blocks]`; None without a band.
      band_size: of the band.
      starts: int32 `[blocks, blocks of keys]`; None without a list.
      counts: int32 `[blocks]`, how many of its list a block of queries reads.
    """

    band_starts: jax.Array | None
    band_size: int
    starts: jax.Array | None
    counts: jax.Array | None

    def loop(self, block: jax.Array, add_span, state):
        """Calls `add_span(start, size, is new, state)` for each span, which returns the state.

        The third is bool `[size]`, False for keys that were in the band; None: all are new.
        """
        if self.band_starts is not None:
            state = add_span(self.band_starts[block], self.band_size, None, state)
        if self.starts is None:
            return state

        def add_listed(index, state):
            start, is_new = self.starts[block, index], None
            if self.band_starts is not None:
                place = start + jnp.arange(BLOCK) - self.band_starts[block]
                is_new = (place < 0) | (place >= self.band_size)
            return add_span(start, BLOCK, is_new, state)

        return lax.fori_loop(0, self.counts[block], add_listed, state)


def _key_spans(rows: _Rows) -> _KeySpans:
    """Returns the spans that hold all keys that some query of each block sees."""
    mask, length = rows.mask, rows.length
    first_keys, band_starts, band_size = jnp.arange(0, length, BLOCK), None, 0
    if mask.window is not None:
        after = 0 if mask.causal else mask.window
        band_size = min(mask.window + BLOCK + after, length)
        band_starts = jnp.clip(first_keys - mask.window, 0, length - band_size)
        if mask.is_global is None:
            return _KeySpans(band_starts, band_size, None, None)
    is_read = _may_attend(mask)
    if band_starts is not None:
        is_before = first_keys < band_starts[:, None]
        is_after = first_keys + BLOCK > band_starts[:, None] + band_size
        is_read &= is_before | is_after  # Not within the band.
    starts = jnp.argsort(~is_read, axis=1, stable=True) * BLOCK
    return _KeySpans(band_starts, band_size, starts, jnp.sum(is_read, axis=1))


def _may_attend(mask: AttentionMask) -> jax.Array:
    """Returns bool `[blocks, blocks]`: whether a query of a block may see a key of another.

    With a window, only those count that see all of their sequence, or are seen by all of it; and
    without one, but only global queries, those of blocks with a global position.
    """

    def in_blocks(x):
        return x.reshape(len(x), -1, BLOCK)

    # In any row, if their ranges of ids overlap. In packed rows, where ids rise and padding is
    # last, this is exact.
    ids = in_blocks(jnp.where(mask.sequence_ids > 0, mask.sequence_ids, jnp.iinfo(jnp.int32).max))
    first, last = ids.min(-1), ids.max(-1)
    may = (first[:, :, None] <= last[:, None]) & (last[:, :, None] >= first[:, None])
    if mask.window is not None or mask.only_global_queries:
        has_global = in_blocks(mask.is_global).any(-1)
        may &= has_global[:, :, None] | (has_global[:, None] & ~mask.only_global_queries)
    may = jnp.any(may, axis=0)
    return jnp.tril(may) if mask.causal else may


def _scores(
    queries: _Rows,
    first_query: jax.Array,
    keys: _Rows,
    first_key: jax.Array,
    is_new: jax.Array | None,
    bias: ScoreBias | None,
) -> jax.Array:
    """Returns float32 `[batch, heads, queries, keys]`; the minimum float32 for invisible keys."""
    visible = queries.mask.pairs_with(
        keys.mask,
        first_query + jnp.arange(queries.length),
        first_key + jnp.arange(keys.length),
    )
    if is_new is not None:
        visible &= is_new
    scores = parallel_matmul(queries.query, keys.key.mT)
    if bias is not None:
        scores += bias.scores(queries.query, keys.key, first_key - first_query)
    # Adding a score to the minimum float32 rounds back to the minimum.
    return scores + jnp.where(visible, 0.0, jnp.finfo(jnp.float32).min)


def _bias_gradients(
    bias: ScoreBias, query: jax.Array, key: jax.Array, distance: jax.Array, dscores: jax.Array
) -> tuple:
    """Returns the gradients of a bias, and those of the queries and keys through it."""

    def scores(bias, query, key):
        return jnp.broadcast_to(bias.scores(query, key, distance), dscores.shape)

    _, backward = jax.vjp(scores, bias, query, key)
    return backward(dscores)


def _drop(queries: _Rows, keys: _Rows, probabilities: jax.Array) -> jax.Array:
    """Applies the dropout of these queries and keys to `[batch, heads, queries, keys]`."""
    if queries.dropout is None:
        return probabilities
    dropout = queries.dropout._replace(key_words=keys.dropout.key_words)
    return dropout.apply(probabilities)


def _add_at(total: jax.Array, start: jax.Array, x: jax.Array) -> jax.Array:
    """Adds `x` to `total`, `[batch, heads, length, head_dim]`, from position `start` on."""
    own = lax.dynamic_slice_in_dim(total, start, x.shape[2], axis=2)
    return lax.dynamic_update_slice_in_dim(total, own + x, start, axis=2)


def _join_blocks(x: jax.Array) -> jax.Array:
    """Returns `[blocks, batch, heads, BLOCK, n]` as `[batch, heads, length, n]`."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])
