"""Dropout's hashed mask behaves like independent draws, and the gradient has the same mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model.dropout import (
    Dropout,
    apply_dropout,
    column_words,
    hidden_dropout,
    layer_dropout,
    random_bits,
    random_words,
)
from bert_jax.model.modernbert import ModernBertConfig, encoder_layers

SHAPE = (32, 128, 256)
SIZE = 32 * 128 * 256
ROWS = np.arange(32)


def dropout(key, x, rows, rate):
    return apply_dropout(x, hidden_dropout(Dropout(key, rows, rate), x.shape[1:-1]))


jitted_dropout = jax.jit(dropout)


@functools.cache
def mask(seed: int) -> np.ndarray:
    """Returns True where an element is kept."""
    ones = np.ones(SHAPE, np.float32)
    return np.asarray(jitted_dropout(jax.random.key(seed), ones, ROWS, 0.1)) > 0


@functools.partial(jax.jit, static_argnames=("shape", "stride"))
def signed_bits(seed, rows, shape, stride):
    words = random_words(seed, rows, shape[:-1])
    return random_bits(words[..., None], column_words(shape[-1])[:, ::stride])[0]


def bits(rows, shape: tuple[int, ...], seed=((7, 11), (13, 17)), stride: int = 1) -> np.ndarray:
    """Returns uniform uint32 of rows of a shape, from which masks are drawn.

    With a `stride`, returns only every `stride`-th column.
    """
    drawn = signed_bits(np.array(seed, np.uint32), np.asarray(rows), shape, stride)
    return np.asarray(drawn).astype(np.int64) + 2**31


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.corrcoef(first.ravel(), second.ravel())[0, 1])


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_fraction_dropped_is_the_rate_and_the_mean_is_unchanged(rate):
    dropped = np.asarray(jitted_dropout(jax.random.key(0), np.ones(SHAPE, np.float32), ROWS, rate))
    sigma = np.sqrt(rate * (1 - rate) / SIZE)
    assert abs(np.mean(dropped == 0) - rate) < 4 * sigma
    assert abs(np.mean(dropped, dtype=np.float64) - 1) < 4 * sigma / (1 - rate)
    # The rate is float32.
    assert set(np.unique(dropped)) == {0, 1 / (1 - np.float32(rate))}


def test_rate_zero_changes_nothing():
    x = np.arange(6, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(jitted_dropout(jax.random.key(0), x, np.arange(6), 0.0), x)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_each_slice_along_an_axis_keeps_the_rate(axis):
    shares = np.mean(mask(3), axis=tuple({0, 1, 2} - {axis}))
    sigma = np.sqrt(0.1 * 0.9 * SHAPE[axis] / SIZE)
    assert np.max(np.abs(shares - 0.9)) < 5 * sigma
    assert 0.6 * sigma < np.std(shares) < 1.4 * sigma


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("distance", [1, 2, 3, 4, 8, 16])
def test_neighbors_are_independent(axis, distance):
    kept = mask(1)
    away = np.roll(kept, distance, axis)
    assert abs(correlation(kept, away)) < 5 / np.sqrt(SIZE)


@pytest.mark.parametrize("other", [1, 2, 3, 256, 2**31])
def test_keys_are_independent_of_each_other_at_every_shift(other):
    one, two = mask(0), mask(other)
    for shift in (0, 1, -1, 2, 256, -256):
        assert abs(correlation(one, np.roll(two.ravel(), shift))) < 5 / np.sqrt(SIZE)


@pytest.mark.slow
@pytest.mark.parametrize("word", range(4))
def test_seeds_that_differ_in_one_word_give_independent_masks(word):
    rng, shape = np.random.default_rng(word), (SIZE // 256, 256)
    for difference in (1, 100, 2**16):
        seed = rng.integers(0, 2**32, 4, np.uint32)
        other = seed + np.uint32(difference) * (np.arange(4, dtype=np.uint32) == word)
        one, two = (bits([0], shape, each.reshape(2, 2)).ravel() for each in (seed, other))
        one, two = (each >= 0.1 * 2**32 for each in (one, two))
        for shift in (0, 1, 100, 256, 25600):
            assert abs(correlation(one[shift:], two[: SIZE - shift])) < 5 / np.sqrt(SIZE)


def test_every_bit_is_set_half_of_the_time():
    drawn = bits([0], (1024, SIZE // 1024))
    shares = [np.mean((drawn >> bit) & 1) for bit in range(32)]
    assert np.max(np.abs(np.array(shares) - 0.5)) < 5 * 0.5 / np.sqrt(SIZE)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradient_is_dropped_where_the_value_was(dtype):
    key = jax.random.key(5)
    x = jax.random.normal(jax.random.key(6), (64, 48)).astype(dtype)

    @jax.jit
    def value_and_gradient(x):
        value, vjp_fn = jax.vjp(lambda x: dropout(key, x, np.arange(64), 0.3), x)
        return value, vjp_fn(x)[0]

    value, gradient = value_and_gradient(x)
    assert value.dtype == dtype
    # The function is linear, with a diagonal matrix: its gradient is itself.
    np.testing.assert_array_equal(gradient, value)


@pytest.mark.slow
def test_under_jit_and_vmap_and_scan_the_mask_is_the_same():
    keys = jax.random.split(jax.random.key(0), 4)
    x = jnp.ones((16, 8))

    def drop(key, x):
        return dropout(key, x, jnp.arange(16), 0.5)

    plain = np.stack([drop(key, x) for key in keys])
    mapped = jax.jit(jax.vmap(lambda key: drop(key, x)))(keys)
    _, scanned = jax.lax.scan(lambda _, key: (None, drop(key, x)), None, keys)
    np.testing.assert_array_equal(mapped, plain)
    np.testing.assert_array_equal(scanned, plain)


def test_a_row_keeps_its_mask_wherever_it_is_computed():
    x = np.ones((16, 8, 4), np.float32)
    whole = np.asarray(jitted_dropout(jax.random.key(0), x, np.arange(16), 0.5))
    indices = np.array([11, 3, 4])
    selected = jitted_dropout(jax.random.key(0), x[:3], indices, 0.5)
    np.testing.assert_array_equal(selected, whole[indices])


def scores(kept: np.ndarray) -> np.ndarray:
    """Returns the correlation of each pair of rows, in standard deviations of independent ones."""
    correlations = np.corrcoef(kept, dtype=np.float32)
    return correlations[np.triu_indices(len(kept), 1)] * np.sqrt(kept.shape[1])


CONSECUTIVE = np.arange(256)
FAR_APART = np.unique([number << bits for number in range(64) for bits in (0, 8, 16, 24)])


@pytest.mark.parametrize(
    ("rows", "rate", "shape"),
    [
        pytest.param(CONSECUTIVE, 0.1, (128, 192), id="a quarter of the columns"),
        pytest.param(CONSECUTIVE, 0.1, (128, 768), id="consecutive", marks=pytest.mark.slow),
        pytest.param(CONSECUTIVE, 0.5, (128, 768), id="half", marks=pytest.mark.slow),
        pytest.param(CONSECUTIVE + 10**6, 0.1, (128, 768), id="late", marks=pytest.mark.slow),
        pytest.param(FAR_APART, 0.1, (128, 768), id="far apart", marks=pytest.mark.slow),
    ],
)
def test_no_two_of_256_rows_are_correlated(rows, rate, shape):
    kept = (bits(rows, shape) >= rate * 2**32).reshape(len(rows), -1)
    row_scores = scores(kept)
    # Of 32,640 pairs of independent rows one in 53 batches has a score above 5.
    assert np.max(np.abs(row_scores)) < 5
    assert abs(np.mean(row_scores**2) - 1) < 0.05
    shares = (kept.mean(axis=1) - (1 - rate)) / np.sqrt(rate * (1 - rate) / kept.shape[1])
    assert np.max(np.abs(shares)) < 5 and 0.6 < np.mean(shares**2) < 1.4


@pytest.mark.parametrize("stride", [1, 64])
def test_no_two_of_256_columns_are_correlated(stride):
    drawn = bits(np.arange(2048), (256 * stride,), stride=stride)
    assert drawn.shape == (2048, 256)
    assert np.max(np.abs(scores(drawn.T >= 0.1 * 2**32))) < 5


def test_no_two_of_the_layers_and_steps_are_correlated():
    keys = jax.random.split(jax.random.key(0), 256)
    x = np.ones((1, 128, 256), np.float32)
    kept = jax.jit(jax.vmap(lambda key: dropout(key, x, np.array([3]), 0.1)[0] > 0))(keys)
    assert np.max(np.abs(scores(np.asarray(kept).reshape(256, -1)))) < 5


@pytest.mark.parametrize(("rate", "attention_rate"), [(0.5, 0.0), (0.0, 0.5), (0.1, None)])
def test_attention_has_its_own_rate(rate, attention_rate):
    @jax.jit
    def drop():
        settings = Dropout(jax.random.key(0), np.arange(8), rate, attention_rate)
        places = {"attention": "attention_rate", "attention_output": "rate", "output": "rate"}
        stacked = layer_dropout(settings, places, num_layers=1, num_heads=4, length=32)
        shapes = {"attention": (8, 4, 32, 32)}
        return {
            place: each.apply(jnp.ones(shapes.get(place, (8, 32, 64))))
            for place, each in jax.tree.map(lambda leaf: leaf[0], stacked).items()
        }

    dropped = jax.device_get(drop())
    rates = {"attention": rate if attention_rate is None else attention_rate}
    rates |= {"attention_output": rate, "output": rate}
    assert dropped.keys() == {place for place, expected in rates.items() if expected}
    for place, values in dropped.items():
        assert abs(np.mean(values == 0) - rates[place]) < 0.02


@pytest.mark.slow
def test_output_of_attention_may_have_a_rate_of_its_own():
    for rates, of_output, expected in (
        ((0.0, None), 0.5, {"attention_output": 0.5}),
        ((0.5, None), 0.0, {"attention": 0.5, "feed_forward": 0.5}),
        ((0.0, 0.5), None, {"attention": 0.5, "attention_output": 0.5}),
        ((0.5, 0.0), None, {"feed_forward": 0.5}),
        ((0.0, 0.0), None, {}),
    ):
        config = ModernBertConfig(attention_output_dropout_rate=of_output)
        places = encoder_layers(config)[0].dropout_places
        dropout = Dropout(jax.random.key(0), np.arange(2), *rates)
        found = layer_dropout(dropout, places, num_layers=1, num_heads=2, length=4)
        assert {place: 1 - 1 / float(each.scale[0]) for place, each in found.items()} == expected
