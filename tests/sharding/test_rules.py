"""Every parameter has a sharding."""

import re

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from bert_jax.checkpoints.parameters import parameter_shapes
from bert_jax.model.bert import RULES
from bert_jax.model.config import BertConfig
from bert_jax.sharding.mesh import make_mesh
from bert_jax.sharding.rules import infer_shardings, shard_over_data


def test_first_matching_rule_wins():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    tree = {"a": {"kernel": jnp.zeros((4, 4))}, "bias": jnp.zeros(4)}
    rules = ((r"^a/kernel$", P("fsdp", "tensor")), (r"kernel|bias", P()))
    shardings = infer_shardings(tree, mesh, rules)
    assert shardings["a"]["kernel"].spec == P("fsdp", "tensor")
    assert shardings["bias"].spec == P()


def test_parameter_without_a_rule_is_an_error():
    mesh = make_mesh()
    with pytest.raises(ValueError, match=r"no sharding rule matches parameter 'adapter/w'"):
        infer_shardings({"adapter": {"w": jnp.zeros(3)}}, mesh, RULES)


def test_every_rule_decides_for_a_parameter_of_bert():
    remaining = dict(RULES)
    for path in parameter_shapes(BertConfig()):
        matching = (pattern for pattern, _ in RULES if re.search(pattern, path))
        remaining.pop(next(matching), None)
    assert not remaining


def test_parameter_not_divisible_by_the_mesh_is_an_error():
    mesh = make_mesh(fsdp=8)
    with pytest.raises(ValueError, match=r"'w': choose .* mesh sizes: .* 8 times, .* size is 12"):
        infer_shardings({"w": jnp.zeros((12, 4))}, mesh, ((r"w", P("fsdp")),))


def test_shard_over_data_never_takes_the_axis_of_layers():
    mesh = make_mesh(data=8)
    tree = {"layers": {"kernel": jnp.zeros((8, 3, 16)), "bias": jnp.zeros((8, 3))}}
    shardings = infer_shardings(tree, mesh, ((r".", P()),))
    sharded = shard_over_data(shardings, tree)["layers"]
    assert sharded["kernel"].spec == P(None, None, ("data",)) and sharded["bias"].spec == P()


def test_shard_over_data_takes_the_first_divisible_axis():
    mesh = make_mesh(data=2, fsdp=4)
    tree = {
        "a": jnp.zeros((8, 3)),
        "b": jnp.zeros((3, 4)),
        "c": jnp.zeros((4, 2)),
        "d": jnp.zeros(()),
    }
    rules = ((r"[ac]$", P("fsdp")), (r"[bd]$", P()))
    shardings = infer_shardings(tree, mesh, rules)
    sharded = shard_over_data(shardings, tree)
    assert {name: sharding.spec for name, sharding in sharded.items()} == {
        "a": P(("data", "fsdp"), None),
        "b": P(None, ("data",)),
        "c": P("fsdp", ("data",)),
        "d": P(),
    }
