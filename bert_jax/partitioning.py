"""The device mesh, and the sharding of parameters: an ordered table of (path regex, PartitionSpec).

The mesh has the axes `trial` (independent runs), `data` (replicas of the model), `fsdp` (sharded
parameters, gathered where they are used) and `tensor` (sharded matrix products). Batches are
sharded over `data` and `fsdp`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from absl import logging
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("trial", "data", "fsdp", "tensor")

EMBEDDING_SPEC = P(("tensor", "fsdp"))
# The first match wins. Axis 0 of everything under `layers` is the stacked layer. The path of an
# optimizer moment ends with that of its parameter, so the same rules apply.
RULES = (
    (r"token_embedding$", EMBEDDING_SPEC),
    (r"(position|segment)_embedding$", P()),
    (r"layers/(query|key|value|intermediate)/kernel$", P(None, "fsdp", "tensor")),
    (r"layers/(query|key|value|intermediate)/bias$", P(None, "tensor")),
    (r"layers/(attention_output|output)/kernel$", P(None, "tensor", "fsdp")),
    (r"(pooler|transform)/kernel$", P("fsdp", "tensor")),
    (r"mlm/bias$", P("tensor")),
    (r"(bias|scale|nsp/kernel|step|count)$", P()),
)
# The same for fine-tuning, where the pooler and the small task head are replicated.
TASK_RULES = (
    *(rule for rule in RULES if rule[0].startswith(("token", "(position", "layers"))),
    (r"(kernel|bias|scale|step|count)$", P()),
)

# The device kinds of v5p and v6e, whose SparseCores run collectives beside the matrix units.
SPARSE_CORE_KINDS = ("TPU v5", "TPU v6 lite")
SPARSE_CORE_COLLECTIVES = (
    *("reduce_scatter", "nd_reduce_scatter", "all_gather", "2d_all_gather", "3d_all_gather"),
)

# A batch of rows is sharded over both axes; inside `sum_over_data`, only over `fsdp`.
BATCH_SPEC, FSDP_BATCH_SPEC = P(("data", "fsdp")), P("fsdp")
REPLICATED = P()


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, trial: int = 1, devices=None) -> Mesh:
    """Builds a mesh over `devices` (None: all); one size may be -1, to use the remaining devices.

    TPU slices are ordered along `data`: only gradients and, with `shard_weight_update`, parameters
    cross the slow network between them. Raises ValueError for sizes that do not fit the devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [trial, data, fsdp, tensor]
    mesh = f"mesh (trial={trial}, data={data}, fsdp={fsdp}, tensor={tensor})"
    if -1 in sizes:
        sizes[sizes.index(-1)] = len(devices) // math.prod(size for size in sizes if size > 0)
    if min(sizes) < 1 or math.prod(sizes) != len(devices):
        fix = f"choose sizes whose product is {len(devices)}, or set one of them to -1"
        raise ValueError(f"{mesh} does not divide the {len(devices)} devices of this run: {fix}")
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    if sizes[1] % num_slices:
        raise ValueError(
            f"{mesh}: data={sizes[1]} must be a multiple of the {num_slices} slices: choose a "
            "smaller fsdp or tensor"
        )
    # Otherwise JAX refuses sizes that are not products of the torus's axes.
    options = {"devices": devices, "allow_split_physical_axes": True}
    try:
        if num_slices == 1:
            array = mesh_utils.create_device_mesh(sizes, **options)
        else:
            within = (trial, sizes[1] // num_slices, *sizes[2:])
            array = mesh_utils.create_hybrid_device_mesh(within, (1, num_slices, 1, 1), **options)
    except (AssertionError, NotImplementedError) as error:
        raise ValueError(f"{mesh} does not fit the links of these devices: {error}") from error
    return Mesh(array, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


def compiler_options(mesh: Mesh, hidden_size: int, in_layers: bool = False) -> dict:
    """Returns, and logs, the compiler's options for update steps on a mesh.

    By default, the compiler gathers parameters as an all-reduce of shards padded with zeros. An
    all-gather avoids this, but costs a copy per layer if shards do not fill tiles of 16 rows. The
    collectives of `in_layers` are asynchronous only with options: those of v5p and v6e run on the
    SparseCores, those of v4 and v5e are all-to-alls, and start too late without the last option.
    On v5e and v5p, matrix products use 16 MiB of on-chip memory by default; 32 give larger tiles.
    """
    kind, options = mesh.devices.flat[0].device_kind, {}
    on_sparse_cores = in_layers and kind in SPARSE_CORE_KINDS
    if on_sparse_cores or (kind == "TPU v4" and hidden_size // mesh.shape["data"] % 16 == 0):
        names = "xla_enable_async_all_gather", "xla_tpu_prefer_async_allgather_to_allreduce"
        options |= dict.fromkeys(names, True)
    if kind in ("TPU v5 lite", "TPU v5"):
        options["xla_tpu_scoped_vmem_limit_kib"] = 32 * 1024
    if on_sparse_cores:
        for name in SPARSE_CORE_COLLECTIVES:
            options[f"xla_tpu_enable_sparse_core_collective_offload_{name}"] = True
    elif in_layers and kind.startswith("TPU"):
        options["xla_tpu_enable_async_all_to_all"] = True
    if in_layers and kind.startswith("TPU"):
        options["xla_max_concurrent_async_all_gathers"] = 8
        options["xla_lhs_prioritize_async_depth_over_stall"] = True
    if options:
        logging.info("Options of the TPU compiler: %s", options)
    return options


def can_exchange_in_layers(mesh: Mesh) -> bool:
    """Returns whether `mesh` is data-parallel, and its collectives in layers can be asynchronous.

    The compiler for v5e refuses all-to-alls between more than 16 chips.
    """
    is_v5e = mesh.devices.flat[0].device_kind == "TPU v5 lite"
    return 1 < mesh.shape["data"] == mesh.size and not (is_v5e and mesh.size > 16)


def product_options(mesh: Mesh) -> dict:
    """Returns, and logs, the compiler's options for matrix products on a mesh.

    The compiler for TPUs can choose by estimated cost in which order a product adds its parts, in
    float32 either way. By default it does not, and short sums over many outputs take up to twice as
    long: the gradients of kernels at few rows per device, and products of small models.
    """
    if not mesh.devices.flat[0].device_kind.startswith("TPU"):
        return {}
    options = {"xla_tpu_break_of_accum_cost_heuristic": True}
    logging.info("Options of the TPU compiler for products: %s", options)
    return options


def fsdp_size() -> int:
    """Returns the size of `fsdp` inside a computation over a mesh; elsewhere 1."""
    return jax.sharding.get_abstract_mesh().shape.get("fsdp", 1)


def map_fsdp_shards(
    function: Callable,
    in_specs: tuple,
    *arrays,
    out_specs: P = FSDP_BATCH_SPEC,
    axes: tuple = ("fsdp",),
) -> jax.Array:
    """Runs `function` on the shards of `arrays` over `axes`; if `fsdp` is 1, on whole arrays.

    On its own, the compiler sometimes gathers activations rather than parameters. The backward pass
    recomputes `function`, so no gathered parameters are kept.
    """
    if fsdp_size() == 1:
        return function(*arrays)
    function = jax.checkpoint(function, prevent_cse=False)
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes), check_vma=False
    )(*arrays)


def all_gather(shard: jax.Array, dtype, axis: int) -> jax.Array:
    """Gathers a parameter over `fsdp` in `dtype`, and reduce-scatters its gradient in float32."""
    return shard if fsdp_size() == 1 else _all_gather(shard, dtype, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_gather(shard, dtype, axis):
    whole = jax.lax.all_gather(shard.astype(dtype), "fsdp", axis=axis, tiled=True)
    return whole.astype(shard.dtype)


def _all_gather_backward(dtype, axis, _, dy):
    return (_reduce_scatter(dy.astype(jnp.float32), "fsdp", axis).astype(dy.dtype),)


_all_gather.defvjp(lambda *args: (_all_gather(*args), None), _all_gather_backward)


def _reduce_scatter(x, name, axis):
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        # The CPU's reduce-scatter between processes is not deterministic.
        total, size = jax.lax.psum(x, name), x.shape[axis] // jax.lax.axis_size(name)
        start = jax.lax.axis_index(name) * size
        return jax.lax.dynamic_slice_in_dim(total, start, size, axis)
    return jax.lax.psum_scatter(x, name, scatter_dimension=axis, tiled=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shard:
    """One device's shard of a stack of parameters, `[layers, ...]`, over `data` on `axis`."""

    value: jax.Array
    axis: int = dataclasses.field(metadata={"static": True})


def gather_shards(layer_params, dtype):
    """Gathers the `Shard`s of one layer in `dtype`; their gradients are float32 sums over `data`.

    Both collectives are asynchronous on TPU, so that they overlap with the rest of the layer.
    """

    def gather(leaf):
        return _gather(leaf.value, dtype, leaf.axis - 1) if _is_shard(leaf) else leaf

    return jax.tree.map(gather, layer_params, is_leaf=_is_shard)


def has_shards(params) -> bool:
    """Returns whether some parameters are `Shard`s."""
    return any(map(_is_shard, jax.tree.leaves(params, is_leaf=_is_shard)))


def _is_shard(leaf) -> bool:
    return isinstance(leaf, Shard)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(shard, dtype, axis):
    return jax.lax.all_gather(shard.astype(dtype), "data", axis=axis, tiled=True)


def _gather_backward(dtype, axis, _, dy):
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device and device.device_kind in SPARSE_CORE_KINDS:
        return (_reduce_scatter(dy.astype(jnp.float32), "data", axis),)
    # Without SparseCores there is no asynchronous reduce-scatter, but an asynchronous all-to-all.
    size = jax.lax.axis_size("data")
    parts = jax.lax.all_to_all(dy, "data", axis, axis, tiled=True)
    # These sums fuse; a sum over an axis takes twice as long.
    parts = [part.astype(jnp.float32) for part in jnp.split(parts, size, axis)]
    return (functools.reduce(jnp.add, parts),)


_gather.defvjp(lambda *args: (_gather(*args), None), _gather_backward)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of rows over all devices that hold different data."""
    return NamedSharding(mesh, BATCH_SPEC)


def sum_over_data(function: Callable, mesh: Mesh, shardings, param_specs=REPLICATED) -> Callable:
    """Runs `function(params, batch, *rest)` on each data-parallel shard and sums the results.

    The sum over `data` is taken once, not in each layer. `shardings` holds a NamedSharding for
    each result or subtree; where one shards an axis over `data`, the sum is reduce-scattered along
    it. The compiler handles the other mesh axes. Parameters that `param_specs` shard over `data`
    arrive as `Shard`s, and so do their gradients, already summed.
    """

    def out_spec(sharding):
        return P(*("data" if "data" in (names or ()) else None for names in sharding.spec))

    def reduce(spec, tree):
        if _is_shard(tree):
            return tree.value
        if mesh.shape["data"] == 1:  # The partitioner fails on a sum over one shard.
            return tree
        if "data" not in spec:
            return jax.lax.psum(tree, "data")
        return _reduce_scatter(tree, "data", tuple(spec).index("data"))

    def wrap(spec, tree):
        return Shard(tree, tuple(spec).index("data")) if "data" in spec else tree

    def run(params, *rest):
        params = jax.tree.map(wrap, param_specs, params)
        return jax.tree.map(reduce, out_specs, function(params, *rest))

    out_specs = jax.tree.map(out_spec, shardings)
    return lambda params, batch, *rest: jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(param_specs, P("data"), *[P()] * len(rest)),
        out_specs=out_specs,
        axis_names={"data"},
        check_vma=False,
    )(params, batch, *rest)


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
            raise ValueError(f"no partitioning rule matches parameter {name!r}: add one to RULES")
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
        raise ValueError(f"partitioning rules match no parameter: {', '.join(unused)}")
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
