"""Every parameter has a place on the mesh, and what does not fit says so."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from bert_jax import partitioning


def test_first_matching_rule_wins():
    mesh = partitioning.make_mesh(data=2, fsdp=2, tensor=2)
    tree = {"a": {"kernel": jnp.zeros((4, 4))}, "bias": jnp.zeros(4)}
    rules = ((r"^a/kernel$", P("fsdp", "tensor")), (r"kernel|bias", P()))
    placed = partitioning.shardings(tree, mesh, rules)
    assert placed["a"]["kernel"].spec == P("fsdp", "tensor")
    assert placed["bias"].spec == P()


def test_parameter_without_a_rule_is_an_error():
    mesh = partitioning.make_mesh()
    with pytest.raises(ValueError, match=r"no partitioning rule matches parameter 'adapter/w'"):
        partitioning.shardings({"adapter": {"w": jnp.zeros(3)}}, mesh)


def test_one_size_takes_what_the_others_leave():
    assert dict(partitioning.make_mesh(tensor=2).shape) == {"data": 4, "fsdp": 1, "tensor": 2}


def test_rule_that_matches_nothing_is_an_error():
    rules = ((r"adapter", P("fsdp")), (r"w$", P()))
    with pytest.raises(ValueError, match=r"rules 'adapter' match no parameter"):
        partitioning.shardings({"w": jnp.zeros(3)}, partitioning.make_mesh(), rules)


def test_parameter_that_the_mesh_does_not_divide_is_an_error():
    mesh = partitioning.make_mesh(fsdp=8)
    with pytest.raises(ValueError, match=r"'w' of shape \(12, 4\): axis 0 is not .* fsdp = 8"):
        partitioning.shardings({"w": jnp.zeros((12, 4))}, mesh, ((r"w", P("fsdp")),))


def test_data_divides_the_first_axis_that_it_can():
    mesh = partitioning.make_mesh(data=2, fsdp=4)
    tree = {
        "a": jnp.zeros((8, 3)),
        "b": jnp.zeros((3, 4)),
        "c": jnp.zeros((4, 2)),
        "d": jnp.zeros(()),
    }
    rules = ((r"[ac]$", P("fsdp")), (r"[bd]$", P()))
    layout = partitioning.shardings(tree, mesh, rules)
    divided = partitioning.divide_over_data(layout, tree)
    assert {name: sharding.spec for name, sharding in divided.items()} == {
        "a": P(("data", "fsdp"), None),
        "b": P(None, ("data",)),
        "c": P("fsdp", ("data",)),
        "d": P(),
    }


@dataclasses.dataclass(frozen=True)
class SliceDevice:
    """As much of a TPU device as a mesh over several slices looks at."""

    id: int
    slice_index: int
    process_index: int = 0
    platform: str = "cpu"
    device_kind: str = "fake"


def test_slices_lie_along_data_one_after_the_other():
    # As a runtime may give them: mixed.
    devices = [SliceDevice(id=index, slice_index=index % 2) for index in range(8)]
    mesh = partitioning.make_mesh(data=4, fsdp=2, devices=devices)
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert slices.shape == (4, 2, 1)
    assert np.all(slices[:2] == slices[0, 0, 0])
    assert np.all(slices[2:] == slices[2, 0, 0]) and slices[0, 0, 0] != slices[2, 0, 0]
    with pytest.raises(ValueError, match=r"data=1 must be a multiple of the 2 slices"):
        partitioning.make_mesh(data=1, fsdp=8, devices=devices)


@pytest.mark.parametrize("sizes", [{"data": 3}, {"data": 4}, {"data": -1, "fsdp": 3}])
def test_mesh_that_does_not_divide_the_devices_is_an_error(sizes):
    with pytest.raises(ValueError, match="does not divide the 8 devices"):
        partitioning.make_mesh(**sizes)


@pytest.mark.parametrize("sizes", [{"data": -1, "fsdp": -1}, {"data": 0}])
def test_mesh_sizes_that_mean_nothing_are_errors(sizes):
    with pytest.raises(ValueError, match="sizes are positive"):
        partitioning.make_mesh(**sizes)


def test_a_batch_is_divided_over_data_and_fsdp():
    mesh = partitioning.make_mesh(data=2, fsdp=2, tensor=2)
    rows = jax.device_put(jnp.zeros((8, 3)), partitioning.batch_sharding(mesh))
    assert {shard.data.shape for shard in rows.addressable_shards} == {(2, 3)}
