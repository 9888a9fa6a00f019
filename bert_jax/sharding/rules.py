"""The sharding of parameters and optimizer state: an ordered table of regex and PartitionSpec."""

import re

import jax
from absl import logging
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

EMBEDDING_SPEC = P(("tensor", "fsdp"))
# For optimizer state that belongs to no parameter. The path of an optimizer moment ends with its
# parameter's path, so the same rules apply to it.
REPLICATED_RULES = ((r"(^|/)(step|count)$", P()),)
# For fine-tuning: the pooler, and what a task adds to an encoder.
TASK_RULES = ((r"(^|/)(pooler|head|lora|lstm|projection_\d+)/", P()),)


def path_name(path) -> str:
    """Returns "a/b/c" for a JAX key path."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def infer_shardings(tree, mesh: Mesh, rules: tuple[tuple[str, P], ...]):
    """Returns the NamedSharding of each leaf (array or ShapeDtypeStruct) of `tree`; logs them.

    The first of `rules` that matches a path decides: rules of an objective or a task come before
    the architecture's. Raises ValueError for a leaf that no rule matches, and for an indivisible
    leaf.
    """
    device, rules = mesh.devices.flat[0].device_kind, (*rules, *REPLICATED_RULES)
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    layout = f", as {axes}; --verbosity=1 lists how parameters are sharded" if axes else ""
    logging.info("Devices: %d (%s)%s", mesh.size, device, layout)

    def infer(path, leaf):
        name = path_name(path)
        matches = ((pattern, spec) for pattern, spec in rules if re.search(pattern, name))
        pattern, spec = next(matches, (None, None))
        if pattern is None:
            raise ValueError(f"no sharding rule matches parameter {name!r}: add one to the rules")
        sharding = NamedSharding(mesh, spec)
        try:
            sharding.shard_shape(leaf.shape)
        except ValueError as error:
            raise ValueError(f"parameter {name!r}: choose other mesh sizes: {error}") from error
        if not name.startswith("opt_state"):  # Moments are sharded like parameters.
            logging.debug("  %-64s %-20s %s", name, leaf.shape, spec)
        return sharding

    return jax.tree_util.tree_map_with_path(infer, tree)


def stack_shardings(shardings):
    """Returns the shardings of trees that are stacked on a new leading axis of trials."""
    return jax.tree.map(
        lambda sharding: NamedSharding(sharding.mesh, P("trial", *sharding.spec)), shardings
    )


def with_shardings(shapes, shardings):
    """Returns the ShapeDtypeStructs of `shapes`, each with its sharding."""
    return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), shapes, shardings)


def shard_over_data(shardings, tree):
    """Returns `shardings` with each leaf of `tree` also sharded over `data`, where divisible.

    Along its first divisible axis, but not along the axis of layers: each device has a shard of
    each layer. For parameters and optimizer state (Xu et al., 2020, "Automatic cross-replica
    sharding of weight update"; ZeRO-1): each replica updates its shard, and all gather them for the
    next step.
    """

    def shard(path, sharding, leaf):
        is_stacked = "/layers/" in f"/{path_name(path)}" and leaf.ndim > 1
        mesh = sharding.mesh
        spec = list(sharding.spec) + [None] * (leaf.ndim - len(sharding.spec))
        for axis, size in enumerate(sharding.shard_shape(leaf.shape)):
            if size % mesh.shape["data"] == 0 and not (is_stacked and axis == 0):
                names = (spec[axis],) if isinstance(spec[axis], str) else spec[axis] or ()
                spec[axis] = ("data", *names)  # The order that `sum_over_data` produces.
                return NamedSharding(mesh, P(*spec))
        return sharding  # A scalar or a small vector.

    return jax.tree_util.tree_map_with_path(shard, shardings, tree)


def data_axes(sharding: NamedSharding) -> P:
    """Returns the PartitionSpec of a sharding over `data` alone."""
    axes = []
    for names in sharding.spec:
        names = (names,) if isinstance(names, str) else names or ()
        axes.append("data" if "data" in names else None)
    return P(*axes)
