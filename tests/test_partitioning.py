"""Every parameter has a place on the mesh, and what does not fit says so."""

import jax
import jax.numpy as jnp
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
