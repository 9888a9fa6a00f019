"""How arrays lie on the mesh: one ordered table of (path regex, PartitionSpec), first match wins.

The mesh has the axes `data` (copies of the model), `fsdp` (parameters divided, gathered where
used) and `tensor` (matrix products divided). A batch is divided over `data` and `fsdp`.
"""

import math
import re
from collections.abc import Callable

import jax
from absl import logging
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor")

# Axis 0 of everything under `layers` is the stacked layer. Optimizer moments end in the path of
# the parameter they belong to, so the same rules lay them out.
RULES = (
    (r"token_embedding$", P(("tensor", "fsdp"))),  # By rows: a lookup moves only what it finds.
    (r"(position|segment)_embedding$", P()),
    (r"layers/(query|key|value|intermediate)/kernel$", P(None, "fsdp", "tensor")),
    (r"layers/(query|key|value|intermediate)/bias$", P(None, "tensor")),
    (r"layers/(attention_output|output)/kernel$", P(None, "tensor", "fsdp")),
    (r"(pooler|transform)/kernel$", P("fsdp", "tensor")),
    (r"mlm/bias$", P("tensor")),
    (r"(bias|scale)$", P()),
    (r"nsp/kernel$", P()),
    (r"(step|count)$", P()),
)
# The same for a task's model: its small head, and the pooler where there is one, lie everywhere.
TASK_RULES = (
    *(rule for rule in RULES if rule[0].startswith(("token", "(position", "layers"))),
    (r"(kernel|bias|scale|step|count)$", P()),
)


BATCH = P(("data", "fsdp"))
"""Of everything with a leading axis of rows."""
ROWS = P("fsdp")
"""The same inside `sum_over_data`."""


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices=None) -> Mesh:
    """A mesh over `devices` (all, if None); one size may be -1: what the others leave.

    Devices of several TPU slices lie along `data`, slice after slice. Raises ValueError if the
    sizes do not multiply to the number of devices, or JAX cannot lay them over the links.
    """
    sizes = [data, fsdp, tensor]
    devices = jax.devices() if devices is None else devices
    described = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"mesh ({described}): sizes are positive, and at most one of them is -1")
    known = math.prod(size for size in sizes if size != -1)
    if len(devices) % known or (-1 not in sizes and known != len(devices)):
        raise ValueError(
            f"mesh ({described}) does not divide the {len(devices)} devices of this run: choose "
            f"sizes whose product is {len(devices)}, or give one of them as -1"
        )
    sizes = [len(devices) // known if size == -1 else size for size in sizes]
    axis_types = (jax.sharding.AxisType.Auto,) * len(AXES)
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    # Between slices the network is slow: only gradients cross it, so only `data` does.
    if sizes[0] % num_slices:
        raise ValueError(
            f"mesh ({described}): data={sizes[0]} must be a multiple of the {num_slices} slices, "
            "so that fsdp and tensor stay within one: make them smaller"
        )
    within, between = [sizes[0] // num_slices, *sizes[1:]], [num_slices, 1, 1]
    # Without this JAX refuses what is not a product of the torus's axes.
    split = {"allow_split_physical_axes": True}
    try:
        if num_slices == 1:
            array = mesh_utils.create_device_mesh(sizes, devices, **split)
        else:
            array = mesh_utils.create_hybrid_device_mesh(within, between, devices, **split)
    except (AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"mesh ({described}): JAX cannot lay it over the links of these {len(devices)} "
            f"devices, choose other sizes: {error}"
        ) from error
    return Mesh(array, AXES, axis_types=axis_types)


def constrain(x: jax.Array, spec: P) -> jax.Array:
    """Lays `x` out as `spec` says inside a computation over a mesh; as it is where there is none.

    Without it the compiler may choose to move activations where moving parameters is cheaper.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows divided over all devices that hold different data."""
    return NamedSharding(mesh, BATCH)


def sum_over_data(function: Callable, mesh: Mesh, layout) -> Callable:
    """Runs `function(params, batch, *rest)` at each place of the `data` axis on its own rows.

    What it returns is summed over the places, once: not in each layer. `layout` is a NamedSharding
    of each result, or of all of a subtree; where one divides an axis over `data`, each place gets
    its part of the sum and no more. The other axes stay the compiler's.
    """

    def axis_over_data(sharding):
        found = (axis for axis, axes in enumerate(sharding.spec) if "data" in (axes or ()))
        return next(found, None)

    def add(sharding, tree):
        axis = axis_over_data(sharding)
        if mesh.shape["data"] == 1:  # The partitioner does not bear a sum over one place.
            return tree
        if axis is None:
            return jax.lax.psum(tree, "data")
        if jax.process_count() > 1 and mesh.devices.flat[0].platform == "cpu":
            # Between processes the CPU's reduce-scatter gives other sums in every run.
            total = jax.lax.psum(tree, "data")
            size = total.shape[axis] // mesh.shape["data"]
            start = jax.lax.axis_index("data") * size
            return jax.lax.dynamic_slice_in_dim(total, start, size, axis)
        return jax.lax.psum_scatter(tree, "data", scatter_dimension=axis, tiled=True)

    def spec(sharding):
        axis = axis_over_data(sharding)
        return P() if axis is None else P(*[None] * axis, "data")

    return lambda params, batch, *rest: jax.shard_map(
        lambda *args: jax.tree.map(add, layout, function(*args)),
        mesh=mesh,
        in_specs=(P(), P("data"), *[P()] * len(rest)),
        out_specs=jax.tree.map(spec, layout),
        axis_names={"data"},
        check_vma=False,
    )(params, batch, *rest)


def path_name(path) -> str:
    """ "a/b/c" for a JAX key path."""
    return "/".join(
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path
    )


def shardings(tree, mesh: Mesh, rules=RULES):
    """NamedSharding for each leaf (array or ShapeDtypeStruct) of `tree`, by its path.

    Raises ValueError for a leaf that no rule matches, or does not divide as its rule says, and for
    a rule that matches no leaf. Logs the table.
    """
    table, unused = [], dict(rules)

    def place(path, leaf):
        name = path_name(path)
        for pattern, spec in rules:
            if re.search(pattern, name):
                unused.pop(pattern, None)
                check_divides(name, leaf.shape, spec)
                if not name.startswith("opt_state"):  # Moments lie as their parameters do.
                    table.append(f"  {name:<64} {leaf.shape!s:<20} {spec}")
                return NamedSharding(mesh, spec)
        raise ValueError(
            f"no partitioning rule matches parameter {name!r} of shape {leaf.shape}: add a line "
            f"to RULES in {__name__}"
        )

    def check_divides(name, shape, spec):
        for axis, (size, axes) in enumerate(zip(shape, spec, strict=False)):
            axes = (axes,) if isinstance(axes, str) else axes or ()
            parts = math.prod(mesh.shape[each] for each in axes)
            if size % parts:
                raise ValueError(
                    f"parameter {name!r} of shape {shape}: axis {axis} is not divisible by "
                    f"{' x '.join(axes)} = {parts} devices: choose mesh sizes that divide {size}"
                )

    placed = jax.tree_util.tree_map_with_path(place, tree)
    if unused:
        raise ValueError(
            f"the partitioning rules {', '.join(map(repr, unused))} match no parameter: correct "
            "the expression, or remove them"
        )
    logging.info("Layout over %s:\n%s", dict(mesh.shape), "\n".join(table))
    return placed


def placed(tree, layout):
    """The shapes and dtypes of `tree`, each with its sharding of `layout`."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        layout,
    )


def divide_over_data(layout, tree):
    """`layout` of `tree`, with `data` dividing each leaf too, along the first axis that it can.

    For parameters and optimizer state (Xu et al., 2020, "Automatic cross-replica sharding of weight
    update"): each place on `data` then updates its part, and all gather them for the next step.
    """

    def divide(sharding, leaf):
        mesh = sharding.mesh
        spec = [*sharding.spec, *[None] * (leaf.ndim - len(sharding.spec))]
        for axis, axes in enumerate(spec):
            axes = (axes,) if isinstance(axes, str) else axes or ()
            parts = math.prod(mesh.shape[each] for each in axes) * mesh.shape["data"]
            if leaf.shape[axis] % parts == 0:
                spec[axis] = ("data", *axes)  # The order that `sum_over_data` leaves.
                return NamedSharding(mesh, P(*spec))
        return sharding  # A scalar or a small vector.

    return jax.tree.map(divide, layout, tree)
