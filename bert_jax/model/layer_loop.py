"""The loop over stacked layers, with a gradient that writes each stacked array once.

The gradient of `jax.lax.scan` fills the stacks of what it saves, and of the parameters' gradients,
with zeros before it writes them. Here they start empty.
"""

import functools
from collections.abc import Callable

import jax
from jax import lax


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_layers(layer: Callable, params, x: jax.Array, inputs) -> jax.Array:
    """Applies `layer(params, x, index, inputs)` for each index of the stacked `params`, in a loop.

    `inputs` are the same for all layers, and constants for the gradient.
    """
    return _forward(layer, params, x, inputs)[0]


def _forward(layer, params, x, inputs):
    rebuild_vjp = None

    def apply(index, x):
        """Returns the layer's output, and what its gradient needs besides what it is given."""
        nonlocal rebuild_vjp
        layer_params = _at(params, index)
        y, vjp = jax.vjp(lambda params, x: layer(params, x, index, inputs), layer_params, x)
        leaves, tree = jax.tree.flatten(vjp)
        given = {id(leaf): n for n, leaf in enumerate(jax.tree.leaves((layer_params, x, inputs)))}
        sources = [given.get(id(leaf)) for leaf in leaves]

        def rebuild_vjp(saved, *given):
            saved, given = iter(saved), jax.tree.leaves(given)
            leaves = [next(saved) if source is None else given[source] for source in sources]
            return jax.tree.unflatten(tree, leaves)

        return y, [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]

    def body(index, carry):
        x, xs, stacks = carry
        x, saved = apply(index, x)
        # The output is written where it is computed, not as the input of the next layer.
        return x, _write(xs, index + 1, x), _write(stacks, index, saved)

    num_layers = len(jax.tree.leaves(params)[0])
    stacks = _empty(num_layers, jax.eval_shape(apply, 0, x)[1])
    xs = _write(_empty(num_layers + 1, x), 0, x)
    x, xs, stacks = lax.fori_loop(0, num_layers, body, (x, xs, stacks))
    return x, (params, inputs, jax.tree_util.Partial(rebuild_vjp, xs, stacks))


def _backward(layer, residuals, dx):
    params, inputs, rebuild_vjp = residuals
    num_layers = len(jax.tree.leaves(params)[0])

    def body(step, carry):
        dx, dstacks = carry
        index = num_layers - 1 - step
        x, saved = _at(rebuild_vjp.args, index)
        dparams, dx = rebuild_vjp.func(saved, _at(params, index), x, inputs)(dx)
        return dx, _write(dstacks, index, dparams)

    dparams = _empty(num_layers, jax.eval_shape(lambda: _at(params, 0)))
    dx, dparams = lax.fori_loop(0, num_layers, body, (dx, dparams))
    return dparams, dx, None


run_layers.defvjp(_forward, _backward)


def _at(stacks, index):
    return jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, index, 0, False), stacks)


def _empty(num_layers, shapes):
    return jax.tree.map(lambda leaf: lax.empty((num_layers, *leaf.shape), leaf.dtype), shapes)


def _write(stacks, index, leaves):
    return jax.tree.map(
        lambda stack, leaf: lax.dynamic_update_index_in_dim(stack, leaf, index, 0), stacks, leaves
    )
