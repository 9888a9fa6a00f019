"""Pooling of packed rows, against NumPy on each sequence."""

import jax
import numpy as np
import pytest

from bert_jax.model.pooling import POOLINGS, pool_tokens

EXPECTED = {
    "cls": lambda x: x[0],
    "max": lambda x: x.max(0),
    "mean": lambda x: x.mean(0),
    "mean_sqrt_len_tokens": lambda x: x.sum(0) / np.sqrt(len(x)),
    "weightedmean": lambda x: np.average(x, axis=0, weights=np.arange(1, len(x) + 1)),
    "lasttoken": lambda x: x[-1],
}
HIDDEN = np.random.default_rng(0).normal(size=(2, 12, 5)).astype(np.float32) - 3.0
BOUNDS = np.array([[[0, 3, 5], [5, 5, 11], [0, 0, 0]], [[0, 12, 12], [0, 0, 0], [0, 0, 0]]])


def expected(poolings):
    result = np.zeros((2, 3, 5 * len(poolings)), np.float32)
    for row, slot in ((0, 0), (0, 1), (1, 0)):
        start, _, end = BOUNDS[row, slot]
        parts = [EXPECTED[pooling](HIDDEN[row, start:end]) for pooling in poolings]
        result[row, slot] = np.concatenate(parts)
    return result


@pytest.mark.parametrize("poolings", [*[(name,) for name in POOLINGS], ("max", "mean"), POOLINGS])
def test_each_sequence_is_pooled_by_itself_and_unused_slots_are_zero(poolings):
    pooled = jax.jit(pool_tokens, static_argnums=2)(HIDDEN, BOUNDS, poolings)
    assert pooled.dtype == np.float32
    np.testing.assert_allclose(pooled, expected(poolings), rtol=1e-5, atol=1e-6)


def test_gradient_of_the_maximum_reaches_its_first_position():
    hidden = np.round(HIDDEN)  # With ties.
    gradients = np.random.default_rng(1).normal(size=(2, 3, 5)).astype(np.float32)
    found = jax.jit(jax.grad(lambda x: (pool_tokens(x, BOUNDS, ("max",)) * gradients).sum()))(
        hidden
    )
    wanted = np.zeros_like(hidden)
    for row, slot in ((0, 0), (0, 1), (1, 0)):
        start, _, end = BOUNDS[row, slot]
        first = start + hidden[row, start:end].argmax(0)
        wanted[row, first, np.arange(5)] = gradients[row, slot]
    np.testing.assert_array_equal(found, wanted)
