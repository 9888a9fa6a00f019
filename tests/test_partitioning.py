"""Every parameter has a sharding, and a mesh that does not fit gives a clear error."""

import dataclasses
import importlib.util
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import mesh_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax import partitioning
from bert_jax.data.batches import local_row_ranges
from bert_jax.data.masking import Masking
from bert_jax.model.bert import BertForPreTraining
from bert_jax.model.config import BertConfig
from bert_jax.tools import hlo_cost
from bert_jax.tools import tpu_compile as tpu
from bert_jax.training import pretrain_step
from configs.pretrain import adamw_2k, lamb_64k, pod_base, pod_large


def test_first_matching_rule_wins():
    mesh = partitioning.make_mesh(data=2, fsdp=2, tensor=2)
    tree = {"a": {"kernel": jnp.zeros((4, 4))}, "bias": jnp.zeros(4)}
    rules = ((r"^a/kernel$", P("fsdp", "tensor")), (r"kernel|bias", P()))
    shardings = partitioning.infer_shardings(tree, mesh, rules)
    assert shardings["a"]["kernel"].spec == P("fsdp", "tensor")
    assert shardings["bias"].spec == P()


def test_parameter_without_a_rule_is_an_error():
    mesh = partitioning.make_mesh()
    with pytest.raises(ValueError, match=r"no partitioning rule matches parameter 'adapter/w'"):
        partitioning.infer_shardings({"adapter": {"w": jnp.zeros(3)}}, mesh)


def test_size_minus_one_uses_the_remaining_devices():
    sizes = {"trial": 1, "data": 4, "fsdp": 1, "tensor": 2}
    assert dict(partitioning.make_mesh(tensor=2).shape) == sizes


def test_rule_that_matches_no_parameter_is_an_error():
    rules = ((r"adapter", P("fsdp")), (r"w$", P()))
    with pytest.raises(ValueError, match="partitioning rules match no parameter: adapter"):
        partitioning.infer_shardings({"w": jnp.zeros(3)}, partitioning.make_mesh(), rules)


def test_parameter_not_divisible_by_the_mesh_is_an_error():
    mesh = partitioning.make_mesh(fsdp=8)
    with pytest.raises(ValueError, match=r"'w': choose .* mesh sizes: .* 8 times, .* size is 12"):
        partitioning.infer_shardings({"w": jnp.zeros((12, 4))}, mesh, ((r"w", P("fsdp")),))


def test_shard_over_data_takes_the_first_divisible_axis():
    mesh = partitioning.make_mesh(data=2, fsdp=4)
    tree = {
        "a": jnp.zeros((8, 3)),
        "b": jnp.zeros((3, 4)),
        "c": jnp.zeros((4, 2)),
        "d": jnp.zeros(()),
    }
    rules = ((r"[ac]$", P("fsdp")), (r"[bd]$", P()))
    shardings = partitioning.infer_shardings(tree, mesh, rules)
    sharded = partitioning.shard_over_data(shardings, tree)
    assert {name: sharding.spec for name, sharding in sharded.items()} == {
        "a": P(("data", "fsdp"), None),
        "b": P(None, ("data",)),
        "c": P("fsdp", ("data",)),
        "d": P(),
    }


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
    mesh = partitioning.make_mesh(data=4, fsdp=2, devices=devices)
    (slices,) = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert slices.shape == (4, 2, 1)
    assert np.all(slices[:2] == slices[0, 0, 0])
    assert np.all(slices[2:] == slices[2, 0, 0]) and slices[0, 0, 0] != slices[2, 0, 0]
    with pytest.raises(ValueError, match=r"data=1 must be a multiple of the 2 slices"):
        partitioning.make_mesh(data=1, fsdp=8, devices=devices)


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


PODS = {
    topology
    for module in (pod_base, pod_large, adamw_2k, lamb_64k)
    for topology in module.TOPOLOGIES.values()
}


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("topology", [*sorted(PODS), "v4:2x2x2:2", "v5e:4x4:2", "v3:4x4:2"])
def test_pod_mesh_has_each_device_once_and_its_hosts_read_each_row(topology, monkeypatch):
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # Do not look for a TPU.
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v4-8")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    _, devices = tpu.describe_topology(topology)
    hosts = {device.process_index for device in devices}
    for fsdp, tensor in ((1, 1), (4, 1), (8, 1), (1, 2), (4, 2)):
        mesh = partitioning.make_mesh(fsdp=fsdp, tensor=tensor, devices=devices)
        assert mesh.devices.shape == (1, len(devices) // fsdp // tensor, fsdp, tensor)
        assert set(mesh.devices.flat) == set(devices)
        sharding, num_hosts = partitioning.batch_sharding(mesh), np.zeros(2 * len(devices), int)
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
        partitioning.make_mesh(fsdp=4)


@pytest.mark.parametrize(
    "sizes",
    [{"data": 3}, {"data": 4}, {"fsdp": 3}, {"fsdp": -1}, {"data": 0}, {"fsdp": 0}, {"fsdp": -2}],
)
def test_mesh_that_does_not_divide_the_devices_is_an_error(sizes):
    with pytest.raises(ValueError, match="does not divide the 8 devices"):
        partitioning.make_mesh(**sizes)


@pytest.mark.parametrize(
    ("kind", "hidden_size", "has_options"),
    [("TPU v4", 1024, True), ("TPU v4", 768, False), ("TPU v5e", 1024, False), ("cpu", 32, False)],
)
def test_compiler_gathers_shards_of_whole_tiles_on_v4(kind, hidden_size, has_options):
    device = types.SimpleNamespace(device_kind=kind)
    mesh = types.SimpleNamespace(devices=np.array([device]), shape={"data": 64})
    assert bool(partitioning.compiler_options(mesh, hidden_size)) == has_options


@pytest.mark.parametrize(
    ("kind", "has_options"),
    [("TPU v3", True), ("TPU v4", True), ("TPU v5 lite", True), ("cpu", False), ("H100", False)],
)
def test_compiler_orders_the_sums_of_products_by_cost_on_tpu(kind, has_options):
    mesh = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(device_kind=kind)]))
    options = partitioning.product_options(mesh)
    assert options == ({"xla_tpu_break_of_accum_cost_heuristic": True} if has_options else {})


def test_matrix_products_get_more_memory_on_v5():
    for kind in ("TPU v5 lite", "TPU v5", "TPU v4"):
        device = types.SimpleNamespace(device_kind=kind)
        mesh = types.SimpleNamespace(devices=np.array([device]), shape={"data": 1})
        options = partitioning.compiler_options(mesh, 768)
        assert options.get("xla_tpu_scoped_vmem_limit_kib", 0) == 32768 * ("v5" in kind)


def test_collectives_in_layers_run_on_sparse_cores_or_as_all_to_alls():
    offload = "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter"
    expected = {"TPU v4": False, "TPU v5 lite": False, "TPU v5": True, "TPU v6 lite": True}
    for kind, on_sparse_cores in expected.items():
        device = types.SimpleNamespace(device_kind=kind)
        mesh = types.SimpleNamespace(devices=np.array([device]), shape={"data": 64})
        options = partitioning.compiler_options(mesh, 1024, in_layers=True)
        assert (offload in options) == on_sparse_cores
        assert ("xla_tpu_enable_async_all_to_all" in options) != on_sparse_cores
        assert options.get("xla_enable_async_all_gather", False) == (kind != "TPU v5 lite")
        assert offload not in partitioning.compiler_options(mesh, 1024)
    device.device_kind = "cpu"
    assert partitioning.compiler_options(mesh, 1024, in_layers=True) == {}


@pytest.mark.parametrize(
    ("kind", "data", "size", "can"),
    [
        *[("TPU v4", 64, 64, True), ("TPU v4", 32, 64, False), ("TPU v4", 1, 1, False)],
        *[("TPU v5 lite", 16, 16, True), ("TPU v5 lite", 64, 64, False)],
    ],
)
def test_layers_exchange_where_the_compiler_can(kind, data, size, can):
    device = types.SimpleNamespace(device_kind=kind)
    mesh = types.SimpleNamespace(devices=np.array([device]), shape={"data": data}, size=size)
    assert partitioning.can_exchange_in_layers(mesh) == can


def test_large_model_exchanges_in_layers_where_that_overlaps():
    chips = pod_large.TOPOLOGIES
    in_layers = [chip for chip in chips if pod_large.get_config(chip).exchange_in_layers]
    assert in_layers == ["v4", "v5p", "v6e"]


@pytest.mark.parametrize("collective", ["all_to_all", "reduce_scatter"])
@pytest.mark.parametrize("axis", [1, 2])
def test_shards_are_gathered_in_bfloat16_and_their_gradients_summed_in_float32(
    axis, collective, monkeypatch
):
    if collective == "reduce_scatter":
        monkeypatch.setattr(partitioning, "SPARSE_CORE_KINDS", ("cpu",))
    mesh = partitioning.make_mesh(data=8)
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(2, 8, 16)).astype(np.float32), "bias": np.ones(3)}
    specs = {"kernel": P(*[None] * axis, "data"), "bias": P()}
    factors = jnp.asarray(rng.normal(size=(8, 8, 16)), jnp.bfloat16)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}

    def gradients(params, factors):
        def loss(params):
            layer = jax.tree.map(lambda x: x[1], params)
            whole = partitioning.gather_shards(layer, jnp.bfloat16)["kernel"]
            assert (whole.shape, whole.dtype) == ((8, 16), jnp.bfloat16)
            return jnp.sum((whole * factors[0]).astype(jnp.float32)) + jnp.sum(params["bias"])

        return jax.grad(loss)(params)

    run = partitioning.sum_over_data(gradients, mesh, shardings, specs)
    arguments = jax.device_put(params, shardings), factors
    collectives = {"all_to_all", "reduce_scatter"}
    text = jax.jit(run).lower(*arguments).as_text()
    assert {name for name in collectives if f"stablehlo.{name}" in text} == {collective}
    actual = jax.jit(run)(*arguments)
    assert actual["kernel"].sharding.spec[axis] == "data" and actual["kernel"].dtype == jnp.float32
    expected = np.asarray(factors, np.float32).sum(0)
    np.testing.assert_allclose(actual["kernel"], np.stack([0 * expected, expected]), rtol=1e-6)
    np.testing.assert_array_equal(actual["bias"], 8 * np.ones(3))


def test_batch_is_sharded_over_data_and_fsdp():
    mesh = partitioning.make_mesh(data=2, fsdp=2, tensor=2)
    rows = jax.device_put(jnp.zeros((8, 3)), partitioning.batch_sharding(mesh))
    assert {shard.data.shape for shard in rows.addressable_shards} == {(2, 3)}


@pytest.mark.parametrize(
    "mesh",
    [{"data": 2, "fsdp": 4}, pytest.param({"data": 1, "fsdp": 8}, marks=pytest.mark.slow)],
    ids=str,
)
def test_fsdp_gathers_no_activations_and_sums_gradients_in_float32(mesh):
    vocab, hidden, length, rows = 384, 64, 32, 16 * mesh["data"]
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 2 * hidden}
    sizes |= {"num_layers": 1, "num_heads": 2, "max_position_embeddings": length}
    model = BertForPreTraining(BertConfig(**sizes, dtype="bfloat16"))
    optimizer = optax.adamw(1e-3)
    key = jax.random.key(0)
    shapes = jax.eval_shape(lambda: pretrain_step.init_state(key, model, optimizer))
    shardings = partitioning.infer_shardings(shapes, partitioning.make_mesh(**mesh))
    masking = Masking((0, 1, 2, 3, 4), 4, vocab, (True,) * vocab, max_predictions=5)
    step = pretrain_step.make_pretrain_step(model, optimizer, shardings, masking, seed=0)
    phase = types.SimpleNamespace(
        train=types.SimpleNamespace(max_seq_length=length, max_pairs=2), batch_size=rows
    )
    batch = tpu.abstract_batch(phase, partitioning.batch_sharding(shardings.step.mesh))
    lowered = step.lower(partitioning.with_shardings(shapes, shardings), batch)

    # The CPU computes bfloat16 in float32; before its compiler, the dtypes are those of a TPU.
    text = lowered.as_text()
    gathered = set(re.findall(r"stablehlo.all_gather.*-> tensor<(.*)>", text))
    summed = re.findall(
        r"stablehlo\.(?:reduce_scatter|all_reduce).*?\}\) : \(tensor<(.*?)>", text, re.DOTALL
    )
    assert f"{vocab}x{hidden}xbf16" in gathered and all(each.endswith("xbf16") for each in gathered)
    assert f"{vocab}x{hidden}xf32" in summed and all(each.endswith("f32") for each in summed)

    # What the compiler adds are sums of small vectors: it neither gathers the rows, nor sums the
    # gradient of the embedding twice.
    collectives = hlo_cost.step_cost(lowered.compile().as_text()).largest_collectives
    largest = {
        name: max(math.prod(map(int, size.split(","))) for size in re.findall(r"\[(\d.*?)\]", name))
        for name in collectives
        if re.search(r"\[\d", name)
    }
    assert max(largest.values()) == vocab * hidden < rows // mesh["data"] * length * hidden
    assert collectives[f"reduce-scatter f32[{vocab},{hidden}]"]["count"] == 1
