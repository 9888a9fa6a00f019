"""The compiler's options depend on the chip and the mesh."""

import math
import re
import types

import numpy as np
import pytest

from bert_jax.configs.pretrain import pod_base, pod_large
from bert_jax.sharding.compiler_options import (
    compiler_options,
    product_options,
    why_not_overlapped,
)


@pytest.mark.parametrize(
    ("kind", "hidden_size", "has_options"),
    [("TPU v4", 1024, True), ("TPU v4", 768, False), ("TPU v5e", 1024, False), ("cpu", 32, False)],
)
def test_compiler_gathers_shards_of_whole_tiles_on_v4(kind, hidden_size, has_options):
    device = types.SimpleNamespace(device_kind=kind)
    mesh = types.SimpleNamespace(devices=np.array([device]), shape={"data": 64})
    options = compiler_options(mesh, hidden_size)
    assert options.get("xla_enable_async_all_gather", False) == has_options
    assert ("xla_msa_max_repacks" in options) == (kind == "TPU v4")


@pytest.mark.parametrize(
    ("kind", "has_options"),
    [
        ("TPU v3", True),
        ("TPU v4", True),
        ("TPU v5 lite", True),
        ("TPU7x", True),
        ("cpu", False),
        ("H100", False),
    ],
)
def test_compiler_orders_the_sums_of_products_by_cost_on_tpu(kind, has_options):
    mesh = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(device_kind=kind)]))
    options = product_options(mesh)
    assert options.get("xla_tpu_break_of_accum_cost_heuristic", False) == has_options
    # On tpu7x, arrays of bfloat16 would otherwise be copied for each kernel.
    assert ("xla_tpu_control_large_2nd_minor_layout_for_x16" in options) == (kind == "TPU7x")


def test_matrix_products_get_more_memory_on_v5():
    for kind in ("TPU v5 lite", "TPU v5", "TPU v4"):
        device = types.SimpleNamespace(device_kind=kind)
        mesh = types.SimpleNamespace(devices=np.array([device]), shape={"data": 1})
        options = compiler_options(mesh, 768)
        assert options.get("xla_tpu_scoped_vmem_limit_kib", 0) == 32768 * ("v5" in kind)


def test_collectives_in_layers_run_on_sparse_cores_or_as_all_to_alls():
    offload = "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter"
    expected = {"TPU v4": False, "TPU v5 lite": False, "TPU v5": True, "TPU v6 lite": True}
    expected |= {"TPU7x": True}
    for kind, on_sparse_cores in expected.items():
        device = types.SimpleNamespace(device_kind=kind)
        mesh = types.SimpleNamespace(devices=np.array([device]), shape={"data": 64})
        options = compiler_options(mesh, 1024, overlap_collectives=True)
        assert (offload in options) == on_sparse_cores
        assert ("xla_tpu_enable_async_all_to_all" in options) != on_sparse_cores
        assert options.get("xla_enable_async_all_gather", False) == (kind != "TPU v5 lite")
        assert offload not in compiler_options(mesh, 1024)
    device.device_kind = "cpu"
    assert compiler_options(mesh, 1024, overlap_collectives=True) == {}


@pytest.mark.parametrize(
    ("kind", "sizes", "hidden_size", "num_microbatches", "reason"),
    [
        ("TPU v4", {"data": 64}, 1024, 1, ""),
        ("TPU v4", {"data": 1}, 1024, 1, "one device has nothing to exchange"),
        (
            "TPU v4",
            {"data": 32, "fsdp": 2},
            1024,
            1,
            "the mesh .* is sharded over other axes than data",
        ),
        ("TPU v4", {"data": 64}, 1024, 2, "once, after the last of 2 microbatches"),
        ("TPU v4", {"data": 64}, 768, 1, "hidden size 768 is not a multiple of 16 times data=64"),
        ("TPU7x", {"data": 128}, 1024, 1, ""),
        ("TPU7x", {"data": 32}, 768, 1, ""),
        ("TPU7x", {"data": 64}, 768, 1, "hidden size 768 is not a multiple of 8 times data=64"),
        ("TPU v5 lite", {"data": 16}, 1024, 1, ""),
        (
            "TPU v5 lite",
            {"data": 64},
            1024,
            1,
            "no all-to-alls between more than 16 chips",
        ),
    ],
)
def test_collectives_overlap_or_the_reason_is_given(
    kind, sizes, hidden_size, num_microbatches, reason
):
    device = types.SimpleNamespace(device_kind=kind)
    mesh = types.SimpleNamespace(
        devices=np.array([device]), shape=sizes, size=math.prod(sizes.values())
    )
    refusal = why_not_overlapped(mesh, hidden_size, num_microbatches)
    assert re.search(reason, refusal) and bool(refusal) == bool(reason)


def test_large_model_exchanges_in_layers_where_that_overlaps():
    overlapping = [
        chip for chip in pod_base.CHIPS if pod_large.get_config(chip).overlap_collectives
    ]
    assert overlapping == ["v4", "v5p", "v6e", "tpu7x"]
