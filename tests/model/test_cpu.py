"""The forms of operations against NumPy in float64, and which form a platform gets."""

import functools

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
SCORES = RNG.normal(size=(2, 3, 6, 6)).astype(np.float32)
VALUES = RNG.normal(size=(2, 3, 6, 4)).astype(np.float32)
COLUMNS = RNG.integers(0, 7, (3, 5))
COLUMNS[0] = -100, -8, -1, 7, 50  # No columns: their values are 0.


def weighted_products(x, matrix):
    return jnp.sum(WEIGHTS * cpu.product_with_flat_gradient(jnp.matmul, x, matrix))


def sum_of_scores(query, key):
    return jnp.sum(cpu.attention_scores(query, key))


def sum_of_values(weights, value):
    return jnp.sum(cpu.weighted_values(weights, value))


@pytest.fixture(params=["cpu", "default"])
def chosen_form(request, monkeypatch):
    """Chooses one form of each operation, on any platform."""

    def choose(*operands, **forms):
        return forms[request.param](*operands)

    monkeypatch.setattr(cpu.lax, "platform_dependent", choose)


@pytest.mark.usefixtures("chosen_form")
@pytest.mark.parametrize("num_outputs", [4, 9])  # Fewer than the 7 inputs, and more.
def test_product_and_its_gradient_equal_float64(num_outputs):
    matrix = RNG.normal(size=(7, num_outputs)).astype(np.float32)
    weights = RNG.normal(size=(3, 5, num_outputs)).astype(np.float32)
    product, backward = jax.vjp(
        functools.partial(cpu.product_with_flat_gradient, jnp.matmul), X, matrix
    )
    dx, dmatrix = backward(weights)
    x, matrix, weights = (each.astype(np.float64) for each in (X, matrix, weights))
    np.testing.assert_allclose(product, x @ matrix, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dx, weights @ matrix.T, rtol=1e-5, atol=1e-6)
    expected = np.einsum("bli,blj->ij", x, weights)
    np.testing.assert_allclose(dmatrix, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("chosen_form")
def test_products_of_attention_and_their_gradients_equal_float64():
    query, key = VALUES, VALUES[::-1]
    scores, scores_backward = jax.vjp(cpu.attention_scores, query, key)
    values, values_backward = jax.vjp(cpu.weighted_values, SCORES, key)
    found = scores, *scores_backward(SCORES), values, *values_backward(query)
    query, key, weights = (each.astype(np.float64) for each in (query, key, SCORES))
    expected = {
        "scores": query @ key.swapaxes(2, 3),
        "dquery": weights @ key,
        "dkey": weights.swapaxes(2, 3) @ query,
        "values": weights @ key,
        "dweights": query @ key.swapaxes(2, 3),
        "dvalues": weights.swapaxes(2, 3) @ query,
    }
    for result, (name, reference) in zip(found, expected.items(), strict=True):
        np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (weighted_products, (X, MATRIX)),
        (sum_of_scores, (VALUES, VALUES)),
        (sum_of_values, (SCORES, VALUES)),
    ],
)
def test_gradients_have_the_dtypes_of_their_arguments(function, arguments):
    gradients = jax.grad(lambda *arguments: function(*arguments).astype(float), (0, 1))
    found = gradients(*(each.astype(jnp.bfloat16) for each in arguments))
    assert [each.dtype for each in found] == [jnp.bfloat16, jnp.bfloat16]


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
        (cpu.weighted_values, (SCORES, VALUES), "stablehlo.minimum"),
        (jax.grad(sum_of_scores, (0, 1)), (VALUES, VALUES), "stablehlo.minimum"),
        (jax.grad(sum_of_values, 1), (SCORES, VALUES), "stablehlo.minimum"),
        (jax.grad(weighted_products, 1), (X, MATRIX), "stablehlo.optimization_barrier"),
    ],
)
def test_only_a_cpu_gets_the_form_for_cpus(function, arguments, operation):
    def text(platform):
        traced = jax.jit(function).trace(*arguments)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert operation in text("cpu")
    assert operation not in text("tpu") + text("cuda")
