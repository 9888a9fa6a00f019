"""Runs the layers of an encoder as their architecture defines them, in loops or unrolled.

An architecture lists its layers, `encoder_layers`, as Flax modules. Equal modules share one
compiled body. If layers alternate, as global and local attention do, the loop is over periods of
layers. Parameters are stacked: every array has a leading axis of the layers that have it, in order.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from bert_jax.model.architecture import architecture_of
from bert_jax.model.dropout import LayerDropout, finishing_dropout
from bert_jax.model.execution import ExecutionPlan, run_fast_path
from bert_jax.model.layers import gather_positions
from bert_jax.sharding.collectives import gather_data


class LayerGroup(NamedTuple):
    """A period of consecutive layers, repeated `repeats` times."""

    period: tuple[nn.Module, ...]
    repeats: int = 1


@functools.lru_cache  # Compares all layers with each other.
def group_layers(layers: tuple[nn.Module, ...], loops: bool) -> tuple[LayerGroup, ...]:
    """Groups the layers; with `loops`, so that the fewest are compiled.

    These are some first layers, a period that repeats, and what is left after it.
    """
    if not loops or len(layers) < 2:
        return (LayerGroup(layers),) if layers else ()
    kinds = [layers.index(layer) for layer in layers]

    def whole_periods(first: int, size: int) -> int:
        same = itertools.takewhile(
            lambda i: kinds[i] == kinds[first + (i - first) % size], range(first, len(layers))
        )
        return sum(1 for _ in same) // size

    def num_compiled(choice: tuple[int, int]) -> int:
        first, size = choice
        return len(layers) - size * (whole_periods(first, size) - 1)

    choices = ((first, size) for first in range(len(layers)) for size in range(1, len(layers)))
    fitting = (choice for choice in choices if sum(choice) <= len(layers))
    first, size = min(fitting, key=num_compiled)
    repeats = whole_periods(first, size)
    if repeats == 1:
        return (LayerGroup(layers),)
    end = first + size * repeats
    groups = (
        LayerGroup(layers[:first]),
        LayerGroup(layers[first : first + size], repeats),
        LayerGroup(layers[end:]),
    )
    return tuple(group for group in groups if group.period)


def num_stacked_layers(config) -> int:
    """Returns how many layers have parameters of their own: all, unless the config says fewer."""
    return getattr(config, "num_stacked_layers", config.num_layers)


def share_layers(config, params: dict) -> dict:
    """Returns the parameters of all layers, stacked, of which consecutive ones may be equal.

    Layers that share parameters (Lan et al., 2019, section 3.1) store them once. The gradient sums
    over the copies.
    """
    repeats = config.num_layers // num_stacked_layers(config)
    if repeats == 1:
        return params
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, repeats, axis=0), params)


def init_layers(key: jax.Array, config, dtype: str) -> dict:
    """Initializes the stacked parameters of the layers, whose hidden states have `dtype`."""
    layers = architecture_of(config).encoder_layers(config)
    x, inputs = _dummy_inputs(config, dtype)
    layers = layers[:: config.num_layers // num_stacked_layers(config)]
    keys = jax.random.split(key, len(layers))
    found = {}  # Path of a parameter -> numbers of layers, and their values.
    for kind in dict.fromkeys(layers):
        numbers = np.array([i for i, layer in enumerate(layers) if layer == kind])
        init = jax.vmap(lambda key, kind=kind: kind.init(key, x, inputs, {})["params"])
        for path, values in flatten_dict(init(keys[numbers])).items():
            found.setdefault(path, []).append((numbers, values))
    stacked = {}
    for path, parts in found.items():
        order = np.argsort(np.concatenate([numbers for numbers, _ in parts]))
        stacked[path] = jnp.concatenate([values for _, values in parts])[order]
    return unflatten_dict(stacked)


def _dummy_inputs(config, dtype: str) -> tuple:
    """Returns hidden states of one token, and what layers read beside them, all zeros."""
    architecture = architecture_of(config)
    embeddings = architecture.Embeddings(config, dtype, parent=None)
    layer_inputs = architecture.LayerInputs(config, parent=None)
    key, ids = jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
    batch = dict.fromkeys(("tokens", "segment_ids", "position_ids", "sequence_ids"), ids)
    x, _ = jax.eval_shape(embeddings.init_with_output, key, ids, ids, ids)
    inputs, _ = jax.eval_shape(layer_inputs.init_with_output, key, batch)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (x, inputs))


def run_layers(
    config,
    plan: ExecutionPlan,
    params: dict,
    x,
    inputs,
    dropout: LayerDropout,
    positions: jax.Array | None = None,
):
    """Runs all layers on hidden states `[B, L, H]`; with int32 `[B, K]` positions: `[B, K, H]`.

    `params` and `dropout` are stacked over layers. `x` may be a tree of such hidden states, and
    `inputs`, what all layers read beside them, is of any type: the architecture's layers take both.
    """
    if plan.path(config, jax.tree.leaves(x)[0].shape[1]) == "fast":
        return run_fast_path(plan, config, params, x, inputs, dropout, positions)
    layers = architecture_of(config).encoder_layers(config)
    if positions is not None:
        x, own = run_to_last_layer(config, plan, params, x, inputs, dropout)
        finish = _layer_function(plan, layers[-1], inputs, in_loop=False, positions=positions)
        return finish(x, own)
    groups = group_layers(layers, plan.scans_layers)
    stacks = _split(config, params, dropout, groups)
    for group, stack in zip(groups, stacks, strict=True):
        x, _ = _run_group(plan, group, stack, x, inputs, keeps_outputs=False)
    return x


def run_to_last_layer(
    config, plan: ExecutionPlan, params: dict, x, inputs, dropout: LayerDropout
) -> tuple:
    """Returns the input of the last layer, and its `LayerVariables`.

    Takes what `run_layers` takes; the layers run as they are defined.
    """
    layers = architecture_of(config).encoder_layers(config)
    groups = group_layers(layers[:-1], plan.scans_layers)
    *stacks, last = _split(config, params, dropout, [*groups, LayerGroup(layers[-1:])])
    for group, stack in zip(groups, stacks, strict=True):
        x, _ = _run_group(plan, group, stack, x, inputs, keeps_outputs=False)
    (own,) = _unstack(last, 1)
    return x, own


def layer_outputs(
    config, plan: ExecutionPlan, params: dict, x: jax.Array, inputs, dropout: LayerDropout
) -> jax.Array:
    """Returns the output of each layer, `[num_layers, B, L, H]`; takes what `run_layers` takes."""
    groups = group_layers(architecture_of(config).encoder_layers(config), plan.scans_layers)
    stacks, outputs = _split(config, params, dropout, groups), []
    for group, stack in zip(groups, stacks, strict=True):
        x, states = _run_group(plan, group, stack, x, inputs, keeps_outputs=True)
        outputs.append(states)
    return jnp.concatenate(outputs)


def layer_params(config, params: dict) -> list[dict]:
    """Returns the parameters of each layer, from those of all."""
    groups = group_layers(architecture_of(config).encoder_layers(config), loops=False)
    (stack,) = _split(config, params, {}, groups)
    return [own.params for own in _unstack(stack, config.num_layers)]


class _Stack(NamedTuple):
    """The stacked parameters and dropout of the layers of a group.

    Attributes:
      arrays: ("params" or "dropout", *path) -> array or tree of arrays, with a leading axis of the
        layers that have it.
      owners: the same keys -> the layers of a period that have it, by their number in the period.
    """

    arrays: dict[tuple[str, ...], object]
    owners: Mapping[tuple[str, ...], Sequence[int]]


class LayerVariables(NamedTuple):
    """The parameters and the dropout of one layer."""

    params: dict
    dropout: LayerDropout


def split_by_place(
    config, params: dict, dropout: LayerDropout, groups: Sequence[LayerGroup]
) -> list[list[LayerVariables]]:
    """Returns, for each group and each layer of its period, the stacks over its repeats."""
    places = []
    for group, stack in zip(groups, _split(config, params, dropout, groups), strict=True):
        arrays = jax.tree.map(functools.partial(_split_axis, group.repeats), stack.arrays)
        places.append(_unstack(stack._replace(arrays=arrays), len(group.period), axis=1))
    return places


def _split(
    config, params: dict, dropout: LayerDropout, groups: Sequence[LayerGroup]
) -> list[_Stack]:
    """Splits the stacks of all layers into those of each group."""
    arrays = flatten_dict({"params": share_layers(config, params), "dropout": dropout})
    owners = {path: range(config.num_layers) for path in arrays}
    for path, tree in arrays.items():
        if len(jax.tree.leaves(tree)[0]) < config.num_layers:
            owners[path] = layers_with(config)[path[1:]]
    stacks, first = [_Stack({}, {}) for _ in groups], 0
    counts = {path: [] for path in arrays}  # Of the layers that have it, in each group.
    for group, stack in zip(groups, stacks, strict=True):
        size = len(group.period)
        for path, layers in owners.items():
            in_period = [layer - first for layer in layers if first <= layer < first + size]
            stack.owners[path] = in_period
            counts[path].append(len(in_period) * group.repeats)
        first += size * group.repeats
    for path, tree in arrays.items():
        sizes = [count for count in counts[path] if count]
        having = [stack for stack in stacks if stack.owners[path]]
        leaves, structure = jax.tree.flatten(tree)
        split = [jax.lax.split(leaf, sizes) for leaf in leaves]
        for stack, parts in zip(having, zip(*split, strict=True), strict=True):
            stack.arrays[path] = structure.unflatten(parts)
    return stacks


@functools.lru_cache  # Traces each kind of layer.
def layers_with(config) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Returns path of a parameter in a layer -> the numbers of the layers that have it."""
    x, inputs = _dummy_inputs(config, "float32")
    found = {}
    paths = {}  # Kind of layer -> paths of its parameters.
    for number, layer in enumerate(architecture_of(config).encoder_layers(config)):
        if layer not in paths:
            variables = jax.eval_shape(layer.init, jax.random.key(0), x, inputs, {})
            paths[layer] = list(flatten_dict(variables["params"]))
        for path in paths[layer]:
            found[path] = (*found.get(path, ()), number)
    return found


def _unstack(stack: _Stack, num_layers: int, axis: int = 0) -> list[LayerVariables]:
    """Returns the variables of each layer of a period; the gradients of all are stacked once."""
    kinds = {"params": [{} for _ in range(num_layers)], "dropout": [{} for _ in range(num_layers)]}
    for (kind, *path), tree in stack.arrays.items():
        leaves, structure = jax.tree.flatten(tree)
        parts = zip(*(jnp.unstack(leaf, axis=axis) for leaf in leaves), strict=True)
        for layer, part in zip(stack.owners[(kind, *path)], parts, strict=True):
            kinds[kind][layer][tuple(path)] = structure.unflatten(part)
    return [
        LayerVariables(unflatten_dict(params), unflatten_dict(dropout))
        for params, dropout in zip(*kinds.values(), strict=True)
    ]


def _run_group(
    plan: ExecutionPlan, group: LayerGroup, stack: _Stack, x, inputs, keeps_outputs: bool
) -> tuple:
    """Returns the hidden states after a group, and with `keeps_outputs` those after each layer."""
    is_loop = group.repeats > 1
    layers = [_layer_function(plan, layer, inputs, in_loop=is_loop) for layer in group.period]

    def run_period(x, arrays):
        outputs = []
        variables = _unstack(stack._replace(arrays=arrays), len(layers))
        for run, own in zip(layers, variables, strict=True):
            x = run(x, own)
            outputs.append(x)
        return x, jnp.stack(outputs) if keeps_outputs else None

    if not is_loop:
        return run_period(x, stack.arrays)

    split = functools.partial(_split_axis, group.repeats)
    x, outputs = jax.lax.scan(run_period, x, jax.tree.map(split, stack.arrays))
    return x, outputs.reshape(-1, *outputs.shape[2:]) if keeps_outputs else None


def _split_axis(repeats: int, leaf: jax.Array) -> jax.Array:
    """Splits the axis of the layers of a group into its repeats, and the layers of a period."""
    return leaf.reshape(repeats, -1, *leaf.shape[1:])


def _layer_function(
    plan: ExecutionPlan,
    layer: nn.Module,
    inputs,
    in_loop: bool,
    positions: jax.Array | None = None,
) -> Callable:
    """Returns the function (hidden states, variables of the layer) -> hidden states.

    With positions, it returns the hidden states there.
    """

    def run(x, own: LayerVariables):
        variables = {"params": gather_data(own.params, jax.tree.leaves(x)[0].dtype)}
        if positions is None:
            return layer.apply(variables, x, inputs, own.dropout)
        context = layer.apply(variables, x, inputs, own.dropout, method="attend")
        length = jax.tree.leaves(x)[0].shape[1]

        def gather(leaf):  # A query stream may be at these positions already.
            return gather_positions(leaf, positions) if leaf.shape[1] == length else leaf

        x, context = jax.tree.map(gather, (x, context))
        dropout = finishing_dropout(own.dropout, positions)
        return layer.apply(variables, x, context, dropout, method="finish")

    return plan.with_remat(run, in_loop=in_loop)
