"""Gradients accumulated over microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.training.gradients import accumulate_gradients, split_into_microbatches

ROWS = {"x": np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)}
WEIGHTS = np.array([0.5, -1.0, 2.0], np.float32)


def loss_fn(params, rows):
    """Sums (x . w)^2 over the rows, and counts them."""
    return jnp.sum((rows["x"] @ params) ** 2), len(rows["x"])


def expected(x: np.ndarray) -> tuple[float, np.ndarray]:
    """Returns the loss and its gradient in float64."""
    products = x.astype(float) @ WEIGHTS.astype(float)
    return np.sum(products**2), 2 * products @ x.astype(float)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_microbatches_give_the_loss_and_gradients_of_the_whole_batch(num_microbatches):
    microbatches = split_into_microbatches(ROWS, num_microbatches)
    (loss, count), gradients = accumulate_gradients(
        loss_fn, WEIGHTS, microbatches, num_microbatches
    )
    assert count == 12
    np.testing.assert_allclose(loss, expected(ROWS["x"])[0], rtol=1e-5)
    np.testing.assert_allclose(gradients, expected(ROWS["x"])[1], rtol=1e-5)


def test_one_program_uses_the_first_microbatches_of_a_batch():
    step = jax.jit(lambda rows, used: accumulate_gradients(loss_fn, WEIGHTS, rows, used))
    microbatches = split_into_microbatches(ROWS, 4)
    for used in (1, 3):
        (loss, count), gradients = step(microbatches, used)
        x = np.concatenate([ROWS["x"][index::4] for index in range(used)])
        assert count == len(x)
        np.testing.assert_allclose(loss, expected(x)[0], rtol=1e-5)
        np.testing.assert_allclose(gradients, expected(x)[1], rtol=1e-5)
    assert step._cache_size() == 1


def test_gradients_of_bfloat16_parameters_are_added_in_float32():
    """256 + 1 + 1 is 256 in bfloat16."""

    def linear(params, rows):
        return jnp.sum(rows["x"] * params), None

    microbatches = {"x": jnp.array([[256.0], [1.0], [1.0]], jnp.bfloat16)}
    _, gradients = accumulate_gradients(linear, jnp.ones(1, jnp.bfloat16), microbatches, 3)
    assert gradients.dtype == jnp.float32 and gradients[0] == 258
