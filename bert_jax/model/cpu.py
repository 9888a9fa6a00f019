"""Operations with a faster form on a CPU, chosen when a program is lowered.

Both forms have the same values, up to the order of sums. docs/results.md says what each saves.
Lowering chooses, not model/execution.py: a setting would have to pass through every layer and loss,
and a program that is lowered for several platforms would have the same form on all of them.
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
    def gradients(x, matrix, dy):
        _, backward = jax.vjp(product, x, matrix)  # XLA removes this product: nothing uses it.
        return backward(dy)

    def flat_gradients(x, matrix, dy):
        dx, dmatrix = gradients(_flatten_positions(x), matrix, _flatten_positions(dy))
        return dx.reshape(x.shape), dmatrix

    return lax.platform_dependent(*residuals, dy, cpu=flat_gradients, default=gradients)


product_with_flat_gradient.defvjp(
    lambda product, x, matrix: (product(x, matrix), (x, matrix)), _product_backward
)


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
