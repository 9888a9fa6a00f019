"""Attention by blocks equals plain attention in float64, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model.attention import LONGEST_PLAIN_ROW, attention
from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.blocked_attention import BLOCK, SPAN, blocked_attention
from bert_jax.model.dropout import Dropout, attention_dropout
from bert_jax.model.execution import ExecutionPlan

BATCH, HEADS, HEAD_DIM = 2, 2, 4


def make_inputs(length: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Returns scaled queries, keys, values and the gradient of the output, in float64."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(4, BATCH, HEADS, length, HEAD_DIM)).astype(np.float32)
    inputs[0] /= np.sqrt(HEAD_DIM)
    return tuple(inputs.astype(np.float64))


def make_mask(length: int, **options) -> AttentionMask:
    """Returns the mask of three sequences and padding in a first row, and of one in the others."""
    ids = np.ones((BATCH, length), np.int32)
    ids[0] = np.minimum(np.arange(length) * 4 // length + 1, 4) % 4  # 1, 2, 3, then padding.
    return AttentionMask(jnp.asarray(ids), **options)


def visible_pairs(mask: AttentionMask) -> np.ndarray:
    """Returns bool `[batch, 1, length, length]`, by the definition."""
    ids, length = np.asarray(mask.sequence_ids), mask.sequence_ids.shape[1]
    query, key = np.arange(length)[:, None], np.arange(length)
    sees = ids[:, :, None] == ids[:, None]
    if mask.causal:
        sees = sees & (key <= query)
    if mask.window is not None:
        sees = sees & (key >= query - mask.window) & (key <= query + mask.window)
    return sees[:, None]


def reference(inputs, sees, kept):
    """Returns the output and the gradients of queries, keys and values, in float64."""
    query, key, value, dy = inputs
    scores = np.where(sees, query @ key.swapaxes(2, 3), -np.inf)
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    probabilities = exponentials / exponentials.sum(-1, keepdims=True)
    output = (probabilities * kept) @ value
    dprobabilities = (dy @ value.swapaxes(2, 3)) * kept
    weighted = probabilities * dprobabilities
    dscores = weighted - probabilities * weighted.sum(-1, keepdims=True)
    dvalue = (probabilities * kept).swapaxes(2, 3) @ dy
    return output, (dscores @ key, dscores.swapaxes(2, 3) @ query, dvalue)


@pytest.mark.parametrize(
    ("length", "rate"),
    [
        (1, None),
        (BLOCK, 0.1),
        (BLOCK + 1, None),
        (SPAN, None),
        (SPAN + 1, 0.1),
        (2 * SPAN + 100, None),
    ],
)
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"window": 200}, {"causal": True}], ids=str)
def test_values_and_gradients_equal_float64(length, options, rate):
    *inputs, dy = make_inputs(length)
    mask, dropout, kept = make_mask(length, **options), None, 1.0
    if rate:
        settings = Dropout(jax.random.key(0), jnp.arange(BATCH), rate)
        dropout = attention_dropout(settings, HEADS, length)
        kept = np.asarray(dropout.apply(jnp.ones((BATCH, HEADS, length, length))), np.float64)

    @jax.jit
    def compute(inputs, dy):
        output, backward = jax.vjp(lambda *each: blocked_attention(*each, mask, dropout), *inputs)
        return output, backward(dy)

    arrays = jax.tree.map(np.float32, (tuple(inputs), dy))
    expected = reference((*inputs, dy), visible_pairs(mask), kept)
    for found, exact in zip(
        jax.tree.leaves(compute(*arrays)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(found, exact, atol=1e-5)


def test_a_row_of_padding_has_no_nan():
    length = SPAN + 10
    query, key, value, dy = (np.float32(each) for each in make_inputs(length))
    mask = AttentionMask(jnp.zeros((BATCH, length), jnp.int32), window=3)
    output, backward = jax.vjp(lambda *each: blocked_attention(*each, mask), query, key, value)
    assert all(np.isfinite(each).all() for each in (output, *backward(dy)))


def test_masked_spans_are_not_read():
    """What another sequence holds, NaN included, does not matter where no block of it is read."""
    length = 4 * SPAN
    query, key, value, _ = (np.float32(each) for each in make_inputs(length))
    ids = np.repeat(np.arange(1, 5, dtype=np.int32), SPAN)[None].repeat(BATCH, 0)
    key[:, :, 3 * SPAN :] = value[:, :, 3 * SPAN :] = np.nan
    output = blocked_attention(query, key, value, AttentionMask(jnp.asarray(ids)))
    assert np.isfinite(output[:, :, : 3 * SPAN]).all()


@pytest.mark.parametrize("window", [None, 100])
def test_gradient_keeps_no_array_of_pairs(window):
    length = 4 * SPAN
    query, key, value, _ = (np.float32(each) for each in make_inputs(length))
    mask = AttentionMask(jnp.ones((BATCH, length), jnp.int32), window=window)

    def loss(query, key, value):
        return jnp.sum(blocked_attention(query, key, value, mask) ** 2)

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(query, key, value).compile()
    pairs = BATCH * HEADS * length**2 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < pairs / 2


@pytest.mark.parametrize("window", [None, 100])
def test_remat_of_all_but_products_saves_the_result_and_runs_the_loop_once(window):
    """The policy sees the products within the loop, and must not save them, of all pairs."""
    length = 2 * SPAN
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
