"""Attention by blocks equals plain attention in float64, values and gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model.attention import LONGEST_PLAIN_ROW, attention
from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.blocked_attention import BLOCK, blocked_attention
from bert_jax.model.dropout import AttentionDropout, Dropout, attention_dropout
from bert_jax.model.execution import ExecutionPlan

BATCH, HEADS, HEAD_DIM = 2, 2, 4
WINDOW_AND_GLOBAL = {"window": 5, "has_global": True}
MASKS = (
    {},
    {"window": 5},
    {"window": 200},
    {"causal": True},
    {"causal": True, "window": 5},
    WINDOW_AND_GLOBAL,
    {"window": 200, "has_global": True, "causal": True},
    {"only_global_queries": True, "has_global": True},
    {"has_ranks": True},
    {"has_ranks": True, "sees_own_rank": False},
    {"has_hidden": True},
    {"has_hidden": True, "window": 5},
    {"has_ranks": True, "sees_own_rank": False, "window": 5, "has_global": True},
)
# With long rows; the others are in the exhaustive tier.
LONG_MASK = WINDOW_AND_GLOBAL
# Around one block, one span and two, and a row of several.
AROUND = {size + i for size in (BLOCK, 2 * BLOCK) for i in (-1, 0, 1)}
SHORT = tuple(sorted({1, *AROUND, 9 * BLOCK - 28}))
LONG = (16 * BLOCK, 32 * BLOCK + 1, 64 * BLOCK)


def make_inputs(length: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Returns scaled queries, keys, values and the gradient of the output, in float64."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(4, BATCH, HEADS, length, HEAD_DIM)).astype(np.float32)
    inputs[0] /= np.sqrt(HEAD_DIM)
    return tuple(inputs.astype(np.float64))


def make_mask(
    length: int,
    has_global: bool = False,
    has_ranks: bool = False,
    has_hidden: bool = False,
    **options,
) -> AttentionMask:
    """Returns the mask of three sequences and padding in a first row, and of two in the other.

    Global are the first position of each sequence and of the padding, and the last of the row. The
    ranks are a permutation, but for some equal ones, the smallest. Hidden are a third of the
    positions, and all of the last sequence.
    """
    ids = np.ones((BATCH, length), np.int32)
    ids[1, length // 2 :] = 2
    ids[0] = np.minimum(np.arange(length) * 4 // length + 1, 4) % 4  # 1, 2, 3, then padding.
    if has_global:
        is_global = np.diff(ids, axis=1, prepend=-1) != 0
        is_global[1:, -1:] = True
        options["is_global"] = jnp.asarray(is_global)
    if has_ranks:
        rng = np.random.default_rng(1)
        ranks = np.stack([rng.permutation(length) for _ in ids]).astype(np.int32)
        options["ranks"] = jnp.asarray(np.maximum(ranks, length // 4))
    if has_hidden:
        is_hidden = np.random.default_rng(2).random(ids.shape) < 1 / 3
        options["is_hidden"] = jnp.asarray(is_hidden | (ids == 2))
    return AttentionMask(jnp.asarray(ids), **options)


def visible_pairs(mask: AttentionMask, queries: np.ndarray) -> np.ndarray:
    """Returns bool `[batch, 1, queries, length]` for some positions, by the definition."""
    ids, query = np.asarray(mask.sequence_ids), queries[:, None]
    key = np.arange(ids.shape[1])
    sees = ids[:, queries, None] == ids[:, None]
    if mask.window is not None:
        in_window = (key >= query - mask.window) & (key <= query + mask.window)
        if mask.is_global is not None:
            is_global = np.asarray(mask.is_global)
            in_window = in_window | is_global[:, queries, None] | is_global[:, None]
        sees = sees & in_window
    if mask.only_global_queries:
        sees = sees & np.asarray(mask.is_global)[:, queries, None]
    if mask.causal:
        sees = sees & (key <= query)
    if mask.ranks is not None:
        ranks = np.asarray(mask.ranks)
        own, others = ranks[:, queries, None], ranks[:, None]
        sees = sees & (others <= own if mask.sees_own_rank else others < own)
    if mask.is_hidden is not None:
        sees = sees & ~np.asarray(mask.is_hidden)[:, None]
    return sees[:, None]


def kept_weights(dropout: AttentionDropout | None, queries: np.ndarray) -> np.ndarray | float:
    """Returns the factors of dropout for some queries, `[batch, heads, queries, length]`."""
    if dropout is None:
        return 1.0
    shape = BATCH, HEADS, len(queries), dropout.key_words.shape[-1]
    dropout = dropout._replace(words=dropout.words[..., queries])
    return np.asarray(dropout.apply(jnp.ones(shape)), np.float64)


def reference(inputs, mask: AttentionMask, dropout: AttentionDropout | None = None):
    """Returns the output and the gradients of queries, keys and values, in float64.

    By some queries at a time, so that long rows need little memory.
    """
    query, key, value, dy = inputs
    output, dquery, dkey, dvalue = (np.zeros(query.shape) for _ in range(4))
    for start in range(0, query.shape[2], 256):
        part = np.arange(start, min(start + 256, query.shape[2]))
        sees, kept = visible_pairs(mask, part), kept_weights(dropout, part)
        scores = query[:, :, part] @ key.swapaxes(2, 3)
        exponentials = np.where(sees, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
        totals = exponentials.sum(-1, keepdims=True)
        probabilities = exponentials / np.where(totals, totals, 1.0)  # All 0 for an empty query.
        dprobabilities = (dy[:, :, part] @ value.swapaxes(2, 3)) * kept
        weighted = probabilities * dprobabilities
        dscores = weighted - probabilities * weighted.sum(-1, keepdims=True)
        output[:, :, part] = (probabilities * kept) @ value
        dquery[:, :, part] = dscores @ key
        dkey += dscores.swapaxes(2, 3) @ query[:, :, part]
        dvalue += (probabilities * kept).swapaxes(2, 3) @ dy[:, :, part]
    return output, (dquery, dkey, dvalue)


def check(length: int, options: dict, rate: float) -> None:
    *inputs, dy = make_inputs(length)
    mask, dropout = make_mask(length, **options), None
    if rate:
        settings = Dropout(jax.random.key(0), jnp.arange(BATCH), rate)
        dropout = attention_dropout(settings, HEADS, length)

    @jax.jit
    def compute(inputs, dy, mask, dropout):
        output, backward = jax.vjp(lambda *each: blocked_attention(*each, mask, dropout), *inputs)
        return output, backward(dy)

    arrays = jax.tree.map(np.float32, (tuple(inputs), dy))
    expected = reference((*inputs, dy), mask, dropout)
    for found, exact in zip(
        jax.tree.leaves(compute(*arrays, mask, dropout)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(found, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "length", [pytest.param(n, marks=[pytest.mark.slow] * (n > 2 * BLOCK)) for n in SHORT]
)
@pytest.mark.parametrize("number", range(2))
def test_values_and_gradients_equal_float64(length, number):
    """Each length with two of the masks, one after the other."""
    place = 2 * SHORT.index(length) + number
    check(length, MASKS[place % len(MASKS)], rate=0.1 * (place // len(MASKS) % 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, marks=() if options == LONG_MASK else pytest.mark.exhaustive)
        for options in MASKS
    ],
    ids=str,
)
@pytest.mark.parametrize(("length", "rate"), [(LONG[0], 0.0), (LONG[1], 0.1)])
def test_values_and_gradients_of_long_rows_equal_float64(length, rate, options):
    check(length, options, rate)


@pytest.mark.exhaustive
@pytest.mark.parametrize("length", SHORT + LONG)
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_values_and_gradients_of_all_lengths_equal_float64(length, options, rate):
    check(length, options, rate)


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_short_rows_equal_float64(options):
    """Those that `attention` computes from the probabilities of all pairs."""
    length = 20
    *inputs, dy = make_inputs(length)
    mask = make_mask(length, **options)

    def compute(*inputs):
        joined = (each.swapaxes(1, 2).reshape(BATCH, length, -1) for each in inputs)
        output = attention(*joined, mask, num_heads=HEADS)
        return output.reshape(BATCH, length, HEADS, -1).swapaxes(1, 2)

    query, key, value, dy32 = (np.float32(each) for each in (*inputs, dy))
    output, backward = jax.vjp(compute, query * np.sqrt(np.float32(HEAD_DIM)), key, value)
    dquery, dkey, dvalue = backward(dy32)
    found = output, (dquery * np.sqrt(np.float32(HEAD_DIM)), dkey, dvalue)
    for each, exact in zip(
        jax.tree.leaves(found), jax.tree.leaves(reference((*inputs, dy), mask)), strict=True
    ):
        np.testing.assert_allclose(each, exact, atol=1e-5)


def test_pairs_of_a_window_with_global_positions():
    mask = AttentionMask(
        jnp.array([[1, 1, 1, 1, 1, 2, 2, 0]]),
        is_global=jnp.array([[False, False, False, True, False, False, False, False]]),
        window=1,
    )
    expected = """
        11.1....
        1111....
        .111....
        11111...
        ...11...
        .....11.
        .....11.
        .......1
    """
    found = ["".join(".1"[int(each)] for each in row) for row in np.asarray(mask.pairs()[0, 0])]
    assert found == expected.split()


def test_pairs_of_ranks_in_both_streams():
    """Of [0, 2, 1]: the second is predicted last, and the third from the first alone."""
    ids, ranks = jnp.array([[1, 1, 1, 0]]), jnp.array([[0, 2, 1, 0]])
    content = AttentionMask(ids, ranks=ranks)
    query = AttentionMask(ids, ranks=ranks, sees_own_rank=False)
    expected = [[1, 0, 0, 0], [1, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 1]]
    np.testing.assert_array_equal(content.pairs()[0, 0], np.array(expected, bool))
    expected = [[0, 0, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(query.pairs()[0, 0], np.array(expected, bool))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"window": 3}, MASKS[-1]], ids=str)
def test_a_row_of_padding_has_no_nan(options):
    length = BLOCK + 10
    query, key, value, dy = (np.float32(each) for each in make_inputs(length))
    mask = make_mask(length, **options)
    mask = dataclasses.replace(mask, sequence_ids=jnp.zeros((BATCH, length), jnp.int32))

    @jax.jit
    def compute(*inputs):
        output, backward = jax.vjp(lambda *each: blocked_attention(*each, mask), *inputs)
        return output, *backward(dy)

    assert all(np.isfinite(each).all() for each in compute(query, key, value))


@pytest.mark.slow
def test_masked_spans_are_not_read():
    """What another sequence holds, NaN included, does not matter where no block of it is read."""
    length = 4 * BLOCK
    query, key, value, _ = (np.float32(each) for each in make_inputs(length))
    ids = np.repeat(np.arange(1, 5, dtype=np.int32), BLOCK)[None].repeat(BATCH, 0)
    key[:, :, 3 * BLOCK :] = value[:, :, 3 * BLOCK :] = np.nan
    output = blocked_attention(query, key, value, AttentionMask(jnp.asarray(ids)))
    assert np.isfinite(output[:, :, : 3 * BLOCK]).all()


@pytest.mark.slow
def test_windows_with_global_positions_read_only_their_spans():
    """A global position in the third block: others read their window and that block alone."""
    length = 6 * BLOCK
    query, key, value, _ = (np.float32(each) for each in make_inputs(length))
    is_global = np.zeros((BATCH, length), bool)
    is_global[:, 2 * BLOCK + 7] = True
    mask = AttentionMask(
        jnp.ones_like(is_global, jnp.int32), window=3, is_global=jnp.asarray(is_global)
    )
    key[:, :, 4 * BLOCK :] = value[:, :, 4 * BLOCK :] = np.nan
    is_finite = np.isfinite(blocked_attention(query, key, value, mask)).all((0, 1, 3))
    # The third block reads all, and the fourth the first keys of the fifth.
    blocks = is_finite.reshape(6, BLOCK)
    assert blocks[:2].all() and not blocks[2:].any()


@pytest.mark.parametrize("window", [None, 100])
def test_gradient_keeps_no_array_of_pairs(window):
    length = 4 * BLOCK
    query, key, value, _ = (np.float32(each) for each in make_inputs(length))
    mask = AttentionMask(jnp.ones((BATCH, length), jnp.int32), window=window)

    def loss(query, key, value):
        return jnp.sum(blocked_attention(query, key, value, mask) ** 2)

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(query, key, value).compile()
    pairs = BATCH * HEADS * length**2 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < pairs / 2


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 100])
def test_remat_of_all_but_products_saves_the_result_and_runs_the_loop_once(window):
    """The policy sees the products within the loop, and must not save them, of all pairs."""
    length = LONGEST_PLAIN_ROW + BLOCK
    x = jnp.ones((BATCH, length, HEADS * HEAD_DIM))
    mask = AttentionMask(jnp.ones((BATCH, length), jnp.int32), window=window)

    def layer(x):
        return jnp.tanh(attention(x, x, x, mask, num_heads=HEADS))

    function = ExecutionPlan(remat="dots").with_remat(layer, in_loop=True)
    _, backward = jax.vjp(function, x)
    shapes = {leaf.shape for leaf in jax.tree.leaves(backward) if leaf.ndim == 4}
    assert shapes == {(BATCH, HEADS, length, HEAD_DIM), (BATCH, HEADS, length, 1)}
    text = str(jax.make_jaxpr(lambda x, dy: jax.vjp(function, x)[1](dy))(x, x))
    # Forward: of weights and of the rescaling; backward: of the probabilities.
    assert text.count(" = exp ") <= 3


@pytest.mark.slow
def test_attention_of_long_rows_equals_that_of_short_ones():
    """The same sequence, alone in a short row and after padding of a long one."""
    length, hidden = 96, HEADS * HEAD_DIM
    short = np.random.default_rng(0).normal(size=(3, 1, length, hidden)).astype(np.float32)
    long = np.zeros((3, 1, LONGEST_PLAIN_ROW + 60, hidden), np.float32)
    long[:, :, -length:] = short
    ids = np.zeros((1, long.shape[2]), np.int32)
    ids[:, -length:] = 1
    expected = attention(*short, AttentionMask(np.ones((1, length), np.int32)), num_heads=HEADS)
    found = attention(*long, AttentionMask(ids), num_heads=HEADS)[:, -length:]
    np.testing.assert_allclose(found, expected, atol=1e-6)
