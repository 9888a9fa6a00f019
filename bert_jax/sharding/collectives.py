"""Gathers of parameters that are sharded over `fsdp` or `data`, and sums over `data`.

Parameters are gathered in the dtype of the computation; their gradients are summed in float32.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from bert_jax.sharding.compiler_options import SPARSE_CORE_KINDS
from bert_jax.sharding.mesh import FSDP_BATCH_SPEC, REPLICATED
from bert_jax.sharding.rules import data_axes


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
    sharded = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes))
    return sharded(*arrays)


def gather_fsdp(shard: jax.Array, dtype, axis: int) -> jax.Array:
    """Gathers a parameter over `fsdp` in `dtype`, and reduce-scatters its gradient in float32."""
    return shard if fsdp_size() == 1 else _gather_fsdp(shard, dtype, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather_fsdp(shard, dtype, axis):
    whole = jax.lax.all_gather(shard.astype(dtype), "fsdp", axis=axis, tiled=True)
    return whole.astype(shard.dtype)


def _gather_fsdp_backward(dtype, axis, _, dy):
    return (_reduce_scatter(dy.astype(jnp.float32), "fsdp", axis).astype(dy.dtype),)


_gather_fsdp.defvjp(lambda *args: (_gather_fsdp(*args), None), _gather_fsdp_backward)


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
    """One device's shard of a stack of parameters, `[layers, ...]`, over `data` on `axis`.

    `axis` counts the axis of layers, also where `value` is of one layer.
    """

    value: jax.Array
    axis: int = dataclasses.field(metadata={"static": True})


def gather_data(layer_params, dtype):
    """Gathers the `Shard`s of one layer in `dtype`; their gradients are float32 sums over `data`.

    Both collectives are asynchronous on TPU, so that they overlap with the rest of the layer.
    """

    def gather(leaf):
        return _gather_data(leaf.value, dtype, leaf.axis - 1) if _is_shard(leaf) else leaf

    return jax.tree.map(gather, layer_params, is_leaf=_is_shard)


def has_shards(params) -> bool:
    """Returns whether some parameters are `Shard`s."""
    return any(map(_is_shard, jax.tree.leaves(params, is_leaf=_is_shard)))


def _is_shard(leaf) -> bool:
    return isinstance(leaf, Shard)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather_data(shard, dtype, axis):
    return jax.lax.all_gather(shard.astype(dtype), "data", axis=axis, tiled=True)


def _gather_data_backward(dtype, axis, _, dy):
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device and device.device_kind in SPARSE_CORE_KINDS:
        return (_reduce_scatter(dy.astype(jnp.float32), "data", axis),)
    # Without SparseCores there is no asynchronous reduce-scatter, but an asynchronous all-to-all.
    size = jax.lax.axis_size("data")
    parts = jax.lax.all_to_all(dy, "data", axis, axis, tiled=True)
    # These sums fuse; a sum over an axis takes twice as long.
    parts = [part.astype(jnp.float32) for part in jnp.split(parts, size, axis)]
    return (functools.reduce(jnp.add, parts),)


_gather_data.defvjp(lambda *args: (_gather_data(*args), None), _gather_data_backward)


def sum_over_data(function: Callable, mesh: Mesh, shardings, param_specs=REPLICATED) -> Callable:
    """Runs `function(params, batch, *rest)` on each data-parallel shard and sums the results.

    The sum over `data` is taken once, not in each layer. `shardings` holds a NamedSharding for
    each result or subtree; where one shards an axis over `data`, the sum is reduce-scattered along
    it. The compiler handles the other mesh axes. Parameters that `param_specs` shard over `data`
    arrive as `Shard`s, and so do their gradients, already summed.
    """

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

    out_specs = jax.tree.map(data_axes, shardings)
    return lambda params, batch, *rest: jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(param_specs, P("data"), *[P()] * len(rest)),
        out_specs=out_specs,
        axis_names={"data"},
        check_vma=False,  # With it, each layer would sum its gradients; kernels refuse it.
    )(params, batch, *rest)
