"""How arrays lie on the mesh: one ordered table of (path regex, PartitionSpec), first match wins.

The mesh has the axes `data` (copies of the model), `fsdp` (parameters divided, gathered where
used) and `tensor` (matrix products divided). A batch is divided over `data` and `fsdp`.
"""

import math
import re

import jax
from absl import logging
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor")

# Axis 0 of everything under `layers` is the stacked layer. Optimizer moments end in the path of
# the parameter they belong to, so the same rules lay them out.
RULES = (
    (r"token_embedding$", P("tensor", "fsdp")),
    (r"(position|segment)_embedding$", P(None, "fsdp")),
    (r"layers/(query|key|value|intermediate)/kernel$", P(None, "fsdp", "tensor")),
    (r"layers/(query|key|value|intermediate)/bias$", P(None, "tensor")),
    (r"layers/(attention_output|output)/kernel$", P(None, "tensor", "fsdp")),
    (r"(pooler|transform)/kernel$", P("fsdp", "tensor")),
    (r"mlm/bias$", P("tensor")),
    (r"(bias|scale)$", P()),
    (r"nsp/kernel$", P()),
    (r"(step|count)$", P()),
)


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices=None) -> Mesh:
    """A mesh over `devices` (all, if None); one size may be -1: what the others leave.

    Raises ValueError if the sizes do not multiply to the number of devices.
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
    return jax.make_mesh(sizes, AXES, axis_types=axis_types, devices=devices)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows divided over all devices that hold different data."""
    return NamedSharding(mesh, P(("data", "fsdp")))


def path_name(path) -> str:
    """ "a/b/c" for a JAX key path."""
    return "/".join(
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path
    )


def shardings(tree, mesh: Mesh, rules=RULES):
    """NamedSharding for each leaf (array or ShapeDtypeStruct) of `tree`, by its path.

    Raises ValueError for a leaf that no rule matches. Logs the table.
    """
    table = []

    def place(path, leaf):
        name = path_name(path)
        for pattern, spec in rules:
            if re.search(pattern, name):
                if not name.startswith("opt_state"):  # Moments lie as their parameters do.
                    table.append(f"  {name:<64} {leaf.shape!s:<20} {spec}")
                return NamedSharding(mesh, spec)
        raise ValueError(
            f"no partitioning rule matches parameter {name!r} of shape {leaf.shape}: add a line "
            f"to RULES in {__name__}"
        )

    placed = jax.tree_util.tree_map_with_path(place, tree)
    logging.info("Layout over %s:\n%s", dict(mesh.shape), "\n".join(table))
    return placed
