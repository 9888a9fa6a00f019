"""The sharding of parameters and optimizer state: an ordered table of regex and PartitionSpec."""

import re

import jax
from absl import logging
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

EMBEDDING_SPEC = P(("tensor", "fsdp"))
# The first match wins. Axis 0 of everything under `layers` is the stacked layer. The path of an
# optimizer moment ends with that of its parameter, so the same rules apply.
ENCODER_RULES = (
    (r"token_embedding$", EMBEDDING_SPEC),
    (r"(position|segment)_embedding$", P()),
    (r"layers/(query|key|value|intermediate)/kernel$", P(None, "fsdp", "tensor")),
    (r"layers/(query|key|value|intermediate)/bias$", P(None, "tensor")),
    (r"layers/(attention_output|output)/kernel$", P(None, "tensor", "fsdp")),
)
RULES = (
    *ENCODER_RULES,
    (r"(pooler|transform)/kernel$", P("fsdp", "tensor")),
    (r"mlm/bias$", P("tensor")),
    (r"(bias|scale|nsp/kernel|step|count)$", P()),
)
# In fine-tuning, the pooler and the small task head are replicated.
TASK_RULES = (*ENCODER_RULES, (r"(kernel|bias|scale|step|count)$", P()))


def path_name(path) -> str:
    """Returns "a/b/c" for a JAX key path."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def infer_shardings(tree, mesh: Mesh, rules=RULES):
    """Returns the NamedSharding of each leaf (array or ShapeDtypeStruct) of `tree`; logs them.

    Raises ValueError for a leaf that no rule matches, an indivisible leaf, or an unused rule.
    """
    device, unused = mesh.devices.flat[0].device_kind, dict(rules)
    logging.info("Shardings over %s of device %s; --verbosity=1 lists it", dict(mesh.shape), device)

    def infer(path, leaf):
        name = path_name(path)
        matches = ((pattern, spec) for pattern, spec in rules if re.search(pattern, name))
        pattern, spec = next(matches, (None, None))
        if pattern is None:
            raise ValueError(f"no sharding rule matches parameter {name!r}: add one to the rules")
        unused.pop(pattern, None)
        sharding = NamedSharding(mesh, spec)
        try:
            sharding.shard_shape(leaf.shape)
        except ValueError as error:
            raise ValueError(f"parameter {name!r}: choose other mesh sizes: {error}") from error
        if not name.startswith("opt_state"):  # Moments are sharded like parameters.
            logging.debug("  %-64s %-20s %s", name, leaf.shape, spec)
        return sharding

    shardings = jax.tree_util.tree_map_with_path(infer, tree)
    if unused:
        raise ValueError(f"sharding rules match no parameter: {', '.join(unused)}")
    return shardings


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

    For parameters and optimizer state (Xu et al., 2020, "Automatic cross-replica sharding of weight
    update"; ZeRO-1): each replica updates its shard, and all gather them for the next step.
    """

    def shard(sharding, leaf):
        mesh, spec = sharding.mesh, [*sharding.spec, *[None] * (leaf.ndim - len(sharding.spec))]
        for axis, size in enumerate(sharding.shard_shape(leaf.shape)):
            if size % mesh.shape["data"] == 0:
                names = (spec[axis],) if isinstance(spec[axis], str) else spec[axis] or ()
                spec[axis] = ("data", *names)  # The order that `sum_over_data` produces.
                return NamedSharding(mesh, P(*spec))
        return sharding  # A scalar or a small vector.

    return jax.tree.map(shard, shardings, tree)
