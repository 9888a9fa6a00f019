"""A mesh that does not fit the devices gives a clear error."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import NamedSharding

from bert_jax.data.batches import local_row_ranges
from bert_jax.pods.estimate import compilation
from bert_jax.pods.estimate.pod_table import PODS, default_topology
from bert_jax.sharding.mesh import batch_sharding, make_mesh


def test_size_minus_one_uses_the_remaining_devices():
    sizes = {"trial": 1, "data": 4, "fsdp": 1, "tensor": 2}
    assert dict(make_mesh(tensor=2).shape) == sizes


@dataclasses.dataclass(frozen=True)
class SliceDevice:
    """The attributes of a TPU device that a mesh over several slices depends on."""

    id: int
    slice_index: int
    process_index: int = 0
    platform: str = "cpu"
    device_kind: str = "fake"


def test_slices_are_ordered_along_data():
    # The runtime may list them in any order.
    devices = [SliceDevice(id=index, slice_index=index % 2) for index in range(8)]
    mesh = make_mesh(data=4, fsdp=2, devices=devices)
    (slices,) = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert slices.shape == (4, 2, 1)
    assert np.all(slices[:2] == slices[0, 0, 0])
    assert np.all(slices[2:] == slices[2, 0, 0]) and slices[0, 0, 0] != slices[2, 0, 0]
    with pytest.raises(ValueError, match=r"data=1 must be a multiple of the 2 slices"):
        make_mesh(data=1, fsdp=8, devices=devices)


@dataclasses.dataclass(frozen=True)
class HostSharding:
    """A sharding as seen by `local_row_ranges` on one of several hosts."""

    sharding: NamedSharding
    host: int

    def __getattr__(self, name):
        return getattr(self.sharding, name)

    def addressable_devices_indices_map(self, shape):
        indices = self.sharding.devices_indices_map(shape).items()
        return {device: index for device, index in indices if device.process_index == self.host}


TOPOLOGIES = {default_topology(name) for name in PODS}


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("topology", [*sorted(TOPOLOGIES), "v4:2x2x2:2", "v5e:4x4:2", "v3:4x4:2"])
def test_pod_mesh_has_each_device_once_and_its_hosts_read_each_row(topology, monkeypatch):
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # Do not look for a TPU.
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v4-8")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    _, devices = compilation.describe_topology(topology)
    hosts = {device.process_index for device in devices}
    for fsdp, tensor in ((1, 1), (4, 1), (8, 1), (1, 2), (4, 2)):
        if len(devices) % (fsdp * tensor):
            continue
        mesh = make_mesh(fsdp=fsdp, tensor=tensor, devices=devices)
        assert mesh.devices.shape == (1, len(devices) // fsdp // tensor, fsdp, tensor)
        assert set(mesh.devices.flat) == set(devices)
        sharding, num_hosts = batch_sharding(mesh), np.zeros(2 * len(devices), int)
        for host in hosts:
            for start, stop in local_row_ranges(HostSharding(sharding, host), num_hosts.size):
                num_hosts[start:stop] += 1
        # Devices along `tensor` hold the same rows, and may belong to several hosts.
        assert 1 <= num_hosts.min() <= num_hosts.max() <= tensor


def test_mesh_that_jax_cannot_map_to_the_links_is_an_error(monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("no assignment")

    monkeypatch.setattr(mesh_utils, "create_device_mesh", refuse)
    with pytest.raises(ValueError, match=r"fsdp=4, .* links of these devices: no assignment"):
        make_mesh(fsdp=4)


@pytest.mark.parametrize(
    "sizes",
    [{"data": 3}, {"data": 4}, {"fsdp": 3}, {"fsdp": -1}, {"data": 0}, {"fsdp": 0}, {"fsdp": -2}],
)
def test_mesh_that_does_not_divide_the_devices_is_an_error(sizes):
    with pytest.raises(ValueError, match="does not divide the 8 devices"):
        make_mesh(**sizes)


def test_batch_is_sharded_over_data_and_fsdp():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    rows = jax.device_put(jnp.zeros((8, 3)), batch_sharding(mesh))
    assert {shard.data.shape for shard in rows.addressable_shards} == {(2, 3)}
