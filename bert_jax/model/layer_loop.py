"""The loop over stacked layers, with a gradient that writes each stacked array once.

The gradient of `jax.lax.scan` fills the stacks of what it saves, and of the parameters' gradients,
before it writes them: a quarter of a TPU's step if a chip has few rows. Here they start empty.
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
    return lax.fori_loop(
        0, _num_layers(params), lambda index, x: layer(_at(params, index), x, index, inputs), x
    )


def _forward(layer, params, x, inputs):
    rebuild_vjp = None

    def apply(index, x):
        """Returns the layer's output, and what its gradient needs besides parameters and inputs."""
        nonlocal rebuild_vjp
        layer_params = _at(params, index)
        y, vjp = jax.vjp(lambda params, x: layer(params, x, index, inputs), layer_params, x)
        leaves, tree = jax.tree.flatten(vjp)
        given = {id(leaf): n for n, leaf in enumerate(jax.tree.leaves((layer_params, inputs)))}
        sources = [given.get(id(leaf)) for leaf in leaves]

        def rebuild_vjp(saved, layer_params, inputs):
            saved, given = iter(saved), jax.tree.leaves((layer_params, inputs))
            leaves = [next(saved) if source is None else given[source] for source in sources]
            return jax.tree.unflatten(tree, leaves)

        return y, [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]

    def body(index, carry):
        x, stacks = carry
        x, saved = apply(index, x)
        return x, _write(stacks, index, saved)

    num_layers = _num_layers(params)
    stacks = _empty(num_layers, jax.eval_shape(apply, 0, x)[1])
    x, stacks = lax.fori_loop(0, num_layers, body, (x, stacks))
    return x, (params, inputs, jax.tree_util.Partial(rebuild_vjp, stacks))


def _backward(layer, residuals, dx):
    params, inputs, rebuild_vjp = residuals
    num_layers = _num_layers(params)

    def body(step, carry):
        dx, dstacks = carry
        index = num_layers - 1 - step
        saved = _at(*rebuild_vjp.args, index)
        dparams, dx = rebuild_vjp.func(saved, _at(params, index), inputs)(dx)
        return dx, _write(dstacks, index, dparams)

    dparams = _empty(num_layers, jax.eval_shape(lambda: _at(params, 0)))
    dx, dparams = lax.fori_loop(0, num_layers, body, (dx, dparams))
    return dparams, dx, None


run_layers.defvjp(_forward, _backward)


def _num_layers(params) -> int:
    return len(jax.tree.leaves(params)[0])


def _at(stacks, index):
    return jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, index, 0, False), stacks)


def _empty(num_layers, shapes):
    return jax.tree.map(lambda leaf: lax.empty((num_layers, *leaf.shape), leaf.dtype), shapes)


def _write(stacks, index, leaves):
    return jax.tree.map(
        lambda stack, leaf: lax.dynamic_update_index_in_dim(stack, leaf, index, 0), stacks, leaves
    )
