"""The device mesh, and the sharding of batches over it.

The mesh has the axes `trial` (independent runs), `data` (replicas of the model), `fsdp` (sharded
parameters, gathered where they are used) and `tensor` (sharded matrix products). Batches are
sharded over `data` and `fsdp`.
"""

import math

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("trial", "data", "fsdp", "tensor")
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


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of rows over all devices that hold different data."""
    return NamedSharding(mesh, BATCH_SPEC)


def mesh_and_device() -> tuple[AbstractMesh, jax.Device]:
    """Returns the mesh of the current computation, and a device like those it consists of."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh, mesh.abstract_device or jax.devices()[0]
