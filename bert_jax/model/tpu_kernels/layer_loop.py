"""The loop over layers, with a gradient that writes each stacked array once.

The gradient of `jax.lax.scan` fills the stacks of what it saves, and of the parameters' gradients,
with zeros before it writes them. Here they start empty.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from bert_jax.sharding.collectives import gather_data, has_shards

# The array of `SavedActivations` with the input of each layer, and the output of the last one.
INPUTS = "inputs"


class SavedActivations:
    """Arrays `[layers, ...]`, by name, of what the gradient needs of each layer.

    Layer `index` writes what it saves itself; `loop_over_layers` writes the rest, which the
    compiler may compute again or copy. `values` are the saved arrays of this layer alone. `params`
    are the parameters of all layers, for kernels that read them in place; None if they are shards,
    or if layers share them.

    The array INPUTS, `[layers + 1, ...]`, holds the input of each layer, at `index`. A layer may
    write its output there itself, at index + 1.
    """

    def __init__(self, arrays: dict[str, jax.Array], index: jax.Array, num_layers: int, params):
        self.arrays, self.values, self.index, self.num_layers = dict(arrays), {}, index, num_layers
        self.params, self.has_output = params, False

    def array(self, name: str, x: jax.Array) -> jax.Array:
        """Returns the array that saves `name`, for one like `x` of each layer."""
        return self.arrays.get(name, _empty(self.num_layers, x))

    def set_written(self, name: str, array: jax.Array, value: jax.Array) -> None:
        """Takes `array`, into which a kernel has written `value`, the output for INPUTS."""
        self.arrays[name] = array
        if name == INPUTS:
            self.has_output = True  # At index + 1, where the gradient of this layer does not read.
        else:
            self.values[name] = value

    def save(self, name: str, x: jax.Array, reread: bool = False) -> jax.Array:
        """Writes `x` and returns it behind a barrier, so that it is not computed again.

        With `reread`, returns `x` as read back from there, so that a large `x` is only there.
        """
        self.arrays[name], x = _save(self.array(name, x), self.index, x, reread)
        self.values[name] = x
        return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _save(stack, index, x, reread):
    stack = _write(stack, index, x)
    if not reread:
        return stack, lax.optimization_barrier(x)
    stack = lax.optimization_barrier(stack)
    return stack, _at(stack, index)


def _save_backward(reread, _, gradients):
    del reread
    _, dx = gradients  # Of the stack, which is not read for its gradient, and of `x`.
    return None, None, dx


_save.defvjp(lambda *args: (_save(*args), None), _save_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 6, 7))
def loop_over_layers(
    layer: Callable,
    saves: bool,
    params,
    x: jax.Array,
    shared,
    stacked=None,
    last_layer: Callable | None = None,
    repeats: int = 1,
) -> jax.Array:
    """Applies `layer(params, x, shared, stacked, saved)` with each layer's `params` and `stacked`.

    The last layer, whose output may have another shape, is `last_layer` if that is given: it runs
    after the loop, with None as `saved`. Sharded parameters are gathered in each layer, and in the
    loop again for its backward pass. Each entry of `params` belongs to `repeats`
    consecutive layers; its gradient is their sum, in float32 until it is complete.

    `shared` (the same for all layers) and `stacked` receive no gradient. `saved` are
    `SavedActivations` if there is a gradient and the layer `saves` some itself; else None.
    """
    num_layers = _num_in_loop(params, last_layer, repeats)

    def apply(layer, index, x):
        layer_params, layer_inputs = _at_layer(params, (stacked,), index, repeats)
        return layer(gather_data(layer_params, x.dtype), x, shared, layer_inputs, None)

    run = functools.partial(apply, layer)
    x = lax.fori_loop(0, num_layers, run, x, unroll=_unroll(params))
    return apply(last_layer, num_layers, x) if last_layer else x


def _forward(layer, saves, params, x, shared, stacked, last_layer, repeats):
    num_layers, rebuild_vjp = _num_in_loop(params, last_layer, repeats), None
    in_place = None if has_shards(params) or repeats > 1 else params

    def apply(index, arrays):
        """Writes the layer's output, and what its gradient needs, into the stacks."""
        nonlocal rebuild_vjp
        x = _at(arrays[INPUTS], index)
        layer_params, layer_inputs = _at_layer(params, (stacked,), index, repeats)
        layer_params = gather_data(layer_params, x.dtype)
        saved = SavedActivations(arrays, index, num_layers, in_place)

        def run(layer_params, x):
            y = layer(layer_params, x, shared, layer_inputs, saved if saves else None)
            return y, (saved.arrays, saved.values)

        y, vjp, (arrays, values) = jax.vjp(run, layer_params, x, has_aux=True)
        leaves, tree = jax.tree.flatten(vjp)
        given = layer_params, x, index, params, shared, layer_inputs, arrays, values
        # What the gradient reads is either given to it, or was computed here and is saved. JAX does
        # not say which leaf of `vjp` is which argument, but a leaf that is an argument is the same
        # object.
        found = {id(leaf) for leaf in jax.tree.leaves(given)}
        for n, leaf in enumerate(leaves):
            if id(leaf) not in found:
                found.add(id(leaf))
                arrays[f"{n}"] = _write(saved.array(f"{n}", leaf), index, leaf)
                values[f"{n}"] = leaf
        places = {id(leaf): n for n, leaf in enumerate(jax.tree.leaves(given))}
        sources, names = [places[id(leaf)] for leaf in leaves], tuple(values)

        def rebuild_vjp(layer_params, x, index, params, shared, layer_inputs, arrays):
            read = _at({name: arrays[name] for name in names}, index)
            given = layer_params, x, index, params, shared, layer_inputs, arrays, read
            leaves = jax.tree.leaves(given)
            return jax.tree.unflatten(tree, [leaves[n] for n in sources])

        if not saved.has_output:
            arrays[INPUTS] = _write(arrays[INPUTS], index + 1, y)
        return arrays

    inputs = {INPUTS: _write(_empty(num_layers + 1, x), 0, x)}
    shapes = jax.eval_shape(apply, jnp.int32(0), inputs)
    arrays = jax.tree.map(lambda stack: lax.empty(stack.shape, stack.dtype), shapes) | inputs
    # Hidden states are carried in this array only: a separate carry would be a copy.
    arrays = lax.fori_loop(0, num_layers, apply, arrays, unroll=_unroll(params))
    x = _at(arrays[INPUTS], num_layers)
    last_vjp = None
    if last_layer:
        last_params, last_inputs = _at_layer(params, (stacked,), num_layers, repeats)

        def run_last(params, x):
            return last_layer(gather_data(params, x.dtype), x, shared, last_inputs, None)

        x, last_vjp = jax.vjp(run_last, last_params, x)
    return x, (params, shared, stacked, jax.tree_util.Partial(rebuild_vjp, arrays), last_vjp)


def _backward(layer, saves, last_layer, repeats, residuals, dx):
    params, shared, stacked, rebuild_vjp, last_vjp = residuals
    num_layers = _num_in_loop(params, last_layer, repeats)

    def write(dstacks, index, dparams):
        """Writes the gradients of a layer, or adds them up for layers that share parameters."""
        if repeats == 1:
            return _write(dstacks, index, dparams)
        total = jax.tree.map(jnp.add, _at(dstacks, index // repeats), dparams)
        return _write(dstacks, index // repeats, total)

    def body(step, carry):
        dx, dstacks = carry
        index = num_layers - 1 - step
        (arrays,) = rebuild_vjp.args
        stacks = arrays[INPUTS], stacked
        layer_params, x, layer_inputs = _at_layer(params, stacks, index, repeats)
        layer_params, scatter = jax.vjp(lambda shards: gather_data(shards, x.dtype), layer_params)
        given = layer_params, x, index, params, shared, layer_inputs, arrays
        dparams, dx = rebuild_vjp.func(*given)(dx)
        return dx, write(dstacks, index, *scatter(dparams))

    if repeats == 1:
        dparams = jax.tree.map(lambda leaf: lax.empty(leaf.shape, leaf.dtype), params)
    else:
        dparams = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
    if last_layer:
        last_dparams, dx = last_vjp(dx)
        dparams = write(dparams, num_layers, last_dparams)
    dx, dparams = lax.fori_loop(0, num_layers, body, (dx, dparams))
    return jax.tree.map(lambda d, leaf: d.astype(leaf.dtype), dparams, params), dx, None, None


loop_over_layers.defvjp(_forward, _backward)


def _unroll(params) -> int:
    """Returns how many layers an iteration runs.

    In a longer body, the all-gathers for the next layers overlap this one. Without shards, it does
    not help.
    """
    return 4 if has_shards(params) else 1


def _num_in_loop(params, last_layer, repeats):
    return repeats * len(jax.tree.leaves(params)[0]) - (last_layer is not None)


def _at_layer(params, stacks, index, repeats):
    """Returns what layer `index` reads: `repeats` layers share an entry of `params`."""
    return _at(params, index if repeats == 1 else index // repeats), *_at(stacks, index)


def _at(stacks, index):
    return jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, index, 0, False), stacks)


def _empty(num_layers, shapes):
    return jax.tree.map(lambda leaf: lax.empty((num_layers, *leaf.shape), leaf.dtype), shapes)


def _write(stacks, index, leaves):
    return jax.tree.map(
        lambda stack, leaf: lax.dynamic_update_index_in_dim(stack, leaf, index, 0), stacks, leaves
    )
