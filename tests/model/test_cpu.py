"""The forms of operations against NumPy in float64, and which form a platform gets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model import cpu
from bert_jax.model.layers import cross_entropy

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 5, 7)).astype(np.float32)
MATRIX = RNG.normal(size=(7, 4)).astype(np.float32)
WEIGHTS = RNG.normal(size=(3, 5, 4)).astype(np.float32)
COLUMNS = RNG.integers(0, 7, (3, 5))
COLUMNS[0] = -100, -8, -1, 7, 50  # No columns: their values are 0.


def weighted_products(x, matrix):
    return jnp.sum(WEIGHTS * cpu.product_with_flat_gradient(jnp.matmul, x, matrix))


@pytest.mark.parametrize("is_flat", [True, False])
def test_product_and_its_gradient_equal_float64(is_flat, monkeypatch):
    form = "cpu" if is_flat else "default"
    monkeypatch.setattr(
        cpu.lax, "platform_dependent", lambda *operands, **forms: forms[form](*operands)
    )
    loss, (dx, dmatrix) = jax.value_and_grad(weighted_products, (0, 1))(X, MATRIX)
    x, matrix, weights = (each.astype(np.float64) for each in (X, MATRIX, WEIGHTS))
    np.testing.assert_allclose(loss, np.sum(weights * (x @ matrix)), rtol=1e-5)
    np.testing.assert_allclose(dx, weights @ matrix.T, rtol=1e-5, atol=1e-6)
    expected = np.einsum("bli,blj->ij", x, weights)
    np.testing.assert_allclose(dmatrix, expected, rtol=1e-5, atol=1e-6)


def test_gradients_have_the_dtypes_of_their_arguments():
    x, matrix = X.astype(jnp.bfloat16), MATRIX.astype(jnp.bfloat16)
    gradients = jax.grad(lambda *arguments: weighted_products(*arguments).astype(float), (0, 1))
    assert [each.dtype for each in gradients(x, matrix)] == [jnp.bfloat16, jnp.bfloat16]


@pytest.mark.parametrize(
    "form", [cpu.product_with_ones, cpu.plain_sum, jax.jit(cpu.sum_over_positions)]
)
def test_sum_over_positions_equals_float64(form):
    expected = X.astype(np.float64).sum((0, 1))
    np.testing.assert_allclose(form(X), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", [cpu.gather, cpu.masked_sum, jax.jit(cpu.values_at)])
def test_values_are_those_of_the_columns(form):
    expected = np.take_along_axis(X, COLUMNS.clip(0, 6)[..., None], -1)[..., 0]
    expected[0] = 0
    np.testing.assert_array_equal(form(X, COLUMNS), expected)


def test_targets_that_are_no_class_change_nothing_with_a_weight_of_0():
    def loss(logits):
        losses, _ = cross_entropy(logits, COLUMNS)
        return jnp.sum(losses[1:]) + jnp.sum(0.0 * losses[0])

    value, gradient = jax.value_and_grad(loss)(X)
    expected = jnp.sum(cross_entropy(X[1:], COLUMNS[1:])[0])
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert not gradient[0].any() and gradient[1:].all()


@pytest.mark.parametrize(
    ("function", "arguments", "operation"),
    [
        (cpu.values_at, (X, COLUMNS), "stablehlo.gather"),
        (cpu.sum_over_positions, (X,), "stablehlo.dot_general"),
        (jax.grad(weighted_products, 1), (X, MATRIX), "tensor<15x7xf32>"),
    ],
)
def test_only_a_cpu_gets_the_form_for_cpus(function, arguments, operation):
    def text(platform):
        traced = jax.jit(function).trace(*arguments)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert operation in text("cpu")
    assert operation not in text("tpu") + text("cuda")
