"""Operations with a faster form on a CPU, chosen when a program is lowered.

Both forms have the same finite values, up to the order of sums. docs/log/2026-11-cpu-step.md says
what each saves. Lowering chooses, not model/execution.py: a setting would have to pass through
every layer and loss, and a program that is lowered for several platforms would have the same form
on all.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product_with_flat_gradient(product: Callable, x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns `product(x, matrix)` for `x`, `[..., features]`.

    On a CPU, the gradient flattens the leading axes of `x` and of the result first: to sum over
    both batch and length, XLA would copy and transpose them there.
    """
    return product(x, matrix)


def _product_backward(product, residuals, dy):
    def flat_gradients(x, matrix, dy):
        flat_x, flat_dy = _flatten_positions(x), _flatten_positions(dy)
        if x.shape[-1] > dy.shape[-1]:
            # For dense layers with more inputs than outputs, the transpose of the gradient is
            # faster. Without the barrier, XLA swaps the operands back.
            def transposed_product(x, transposed):
                return product(x, transposed.T)

            dx, transposed = _gradients(transposed_product, flat_x, matrix.T, flat_dy)
            dmatrix = lax.optimization_barrier(transposed).T
        else:
            dx, dmatrix = _gradients(product, flat_x, matrix, flat_dy)
        return dx.reshape(x.shape), dmatrix

    default = functools.partial(_gradients, product)
    return lax.platform_dependent(*residuals, dy, cpu=flat_gradients, default=default)


product_with_flat_gradient.defvjp(
    lambda product, x, matrix: (product(x, matrix), (x, matrix)), _product_backward
)


def _gradients(product, first, second, dy):
    _, backward = jax.vjp(product, first, second)  # XLA removes this product: nothing uses it.
    return backward(dy)


@jax.custom_vjp
def attention_scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """Returns `query @ key^T`, float32 `[batch, heads, length, length]`.

    `query` and `key` are `[batch, heads, length, head_dim]`. On a CPU, the products of the gradient
    use all cores.
    """
    return _scores(query, key)


def _scores(query, key):
    return jnp.einsum("bhqd,bhkd->bhqk", query, key, preferred_element_type=jnp.float32)


def _scores_backward(residuals, dscores):
    def gradients(query, key, dscores):
        dquery = _parallel_matmul(dscores, key)
        # Contracts over the last axis of the first operand, which XLA computes on all cores.
        dkey = _parallel_matmul(query.mT, dscores).mT
        return dquery.astype(query.dtype), dkey.astype(key.dtype)

    default = functools.partial(_gradients, _scores)
    return lax.platform_dependent(*residuals, dscores, cpu=gradients, default=default)


attention_scores.defvjp(lambda *args: (_scores(*args), args), _scores_backward)


@jax.custom_vjp
def weighted_values(weights: jax.Array, value: jax.Array) -> jax.Array:
    """Returns `weights @ value`, `[batch, heads, length, head_dim]`.

    `weights` is `[batch, heads, length, length]`, in the dtype of `value`. On a CPU, this product
    and those of the gradient use all cores.
    """
    return lax.platform_dependent(weights, value, cpu=_parallel_matmul, default=_values)


def _values(weights, value):
    return jnp.einsum("bhqk,bhkd->bhqd", weights, value)


def _values_backward(residuals, dy):
    def gradients(weights, value, dy):
        dweights = jnp.einsum("bhqd,bhkd->bhqk", dy, value)  # XLA fuses it with the softmax.
        return dweights, _parallel_matmul(dy.mT, weights).mT

    default = functools.partial(_gradients, _values)
    return lax.platform_dependent(*residuals, dy, cpu=gradients, default=default)


weighted_values.defvjp(lambda *args: (weighted_values(*args), args), _values_backward)


def parallel_matmul(first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns `first @ second`, float32 `[..., rows, columns]`; on a CPU, it uses all cores."""

    default = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    on_cpu = functools.partial(_parallel_matmul, dtype=jnp.float32)
    return lax.platform_dependent(first, second, cpu=on_cpu, default=default)


def _parallel_matmul(first, second, dtype=None):
    """Returns `first @ second`, batched.

    The minimum with the maximum of the row leaves the values unchanged, but spreads a NaN over its
    row. It is a reduction that reads the product: without one, XLA of jax 0.10 computes a batched
    product on one core (that of jax 0.12 does not).
    """
    product = jnp.matmul(first, second, preferred_element_type=dtype)
    return jnp.minimum(product, jnp.max(product, axis=-1, keepdims=True))


def sum_over_positions(x: jax.Array) -> jax.Array:
    """Returns the sum of `x`, `[..., features]`, over all but the last axis.

    On a CPU, a product with ones, which uses all cores; elsewhere a plain sum, which fuses with
    its input.
    """
    return lax.platform_dependent(x, cpu=product_with_ones, default=plain_sum)


def product_with_ones(x: jax.Array) -> jax.Array:
    positions = _flatten_positions(x)
    return jnp.ones(len(positions), x.dtype) @ positions


def plain_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=tuple(range(x.ndim - 1)))


def values_at(x: jax.Array, columns: jax.Array) -> jax.Array:
    """Returns `x`, `[..., C]`, at int32 `[...]` columns: `[...]`; 0 for columns not in [0, C).

    On a CPU, a gather; elsewhere a masked sum, because accelerators gather one element at a time.
    Where `tensor` shards the columns it is a masked sum, too: XLA's partitioner fails on a gather.
    """
    if jax.sharding.get_abstract_mesh().shape.get("tensor", 1) > 1:
        return masked_sum(x, columns)
    return lax.platform_dependent(x, columns, cpu=gather, default=masked_sum)


def gather(x: jax.Array, columns: jax.Array) -> jax.Array:
    values = jnp.take_along_axis(x, columns[..., None], axis=-1, mode="clip")[..., 0]
    return jnp.where((columns >= 0) & (columns < x.shape[-1]), values, 0.0)


def masked_sum(x: jax.Array, columns: jax.Array) -> jax.Array:
    is_chosen = jnp.arange(x.shape[-1]) == columns[..., None]
    return jnp.sum(jnp.where(is_chosen, x, 0.0), axis=-1)


def _flatten_positions(x):
    return x.reshape(-1, x.shape[-1])
