"""Names of topologies, and the chips' data sheets."""

import math
import random

import pytest

from bert_jax.pods.chips import (
    CHIPS,
    CORES_IN_NAME,
    accelerator_type,
    both_names,
    default_shape,
    format_shape,
    nearest_shapes,
    num_hosts,
    parse_accelerator_type,
    parse_topology,
    shape_name,
    slice_shapes,
)
from bert_jax.pods.launch.cloud_tpu import RUNTIME_VERSIONS
from bert_jax.training import metrics


@pytest.mark.parametrize(
    ("topology", "parsed"),
    [
        ("v4:2x2x4", ("v4", [2, 2, 4], 1)),
        ("v5e:4x4:3", ("v5e", [4, 4], 3)),
        ("tpu7x:2x2x1", ("tpu7x", [2, 2, 1], 1)),
    ],
)
def test_topology_is_chip_slice_shape_and_number_of_slices(topology, parsed):
    assert parse_topology(topology) == parsed


@pytest.mark.parametrize(
    "topology",
    [
        "v9:2x2",
        "v4",
        "v4:4x4",
        "v4:2x2x1:0",
        "v4:2x2x1:",
        "4x4",
        "v2-8",
        "tpu7x-8",
        "v4-32:",
        "v9-8",
    ],
)
def test_unknown_topology_is_rejected_with_examples(topology):
    with pytest.raises(ValueError, match=f"unknown topology '{topology}': .*v3:4x4, v4:4x4x4,"):
        parse_topology(topology)


@pytest.mark.parametrize(
    ("topology", "nearest"),
    [
        ("v5e:3x5", "v5e:2x4 (v5litepod-8) or v5e:4x4 (v5litepod-16)"),
        ("v4:1x1x3", "v4:2x2x1 (v4-8)"),
        ("v4:4x2x2", "v4:2x2x4 (v4-32)"),
        ("v4:4x4x6", "v4:4x4x4 (v4-128) or v4:4x4x8 (v4-256)"),
        ("v5p:8x4x12", "v5p:4x8x12 (v5p-768)"),
        ("v4:32x32x32", "v4:12x16x16 (v4-6144)"),
        ("v6e:16x32:2", "v6e:16x16 (v6e-256)"),
        ("v3:2x4", "v3:2x2 (v3-8) or v3:4x4 (v3-32)"),
        ("tpu7x:2x2x3", "tpu7x:2x2x2 or tpu7x:2x2x4"),
        ("v4:0x4x4", "v4:2x2x1 (v4-8)"),
    ],
)
def test_slice_that_does_not_exist_is_refused_with_the_nearest(topology, nearest):
    with pytest.raises(ValueError) as error:
        parse_topology(topology)
    assert str(error.value) == f"topology '{topology}' does not exist: try {nearest}, the nearest"


@pytest.mark.parametrize(
    ("name", "shape", "both"),
    [
        ("v4-32", "v4:2x2x4", "v4:2x2x4 (v4-32)"),
        ("v4-32:2", "v4:2x2x4:2", "v4:2x2x4:2 (2 x v4-32)"),
        ("v5litepod-8", "v5e:2x4", "v5e:2x4 (v5litepod-8)"),
        ("v5e-8", "v5e:2x4", "v5e:2x4 (v5litepod-8)"),
        ("v6e-1", "v6e:1x1", "v6e:1x1 (v6e-1)"),
        ("v5p-8", "v5p:2x2x1", "v5p:2x2x1 (v5p-8)"),
        ("v3-8", "v3:2x2", "v3:2x2 (v3-8)"),
    ],
)
def test_accelerator_type_is_a_topology_and_a_topology_has_both_names(name, shape, both):
    assert parse_topology(name) == parse_topology(shape)
    assert shape_name(name) == shape_name(shape) == shape
    assert both_names(name) == both_names(shape) == both


def test_tpu7x_has_no_accelerator_type():
    assert both_names("tpu7x:2x2x4") == "tpu7x:2x2x4"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("v4-12", "v4:2x2x1 (v4-8) or v4:2x2x2 (v4-16)"),
        ("v4-33", "v4:2x2x4 (v4-32)"),
        ("v5e-12", "v5e:2x4 (v5litepod-8) or v5e:4x4 (v5litepod-16)"),
        ("v6e-8000", "v6e:16x16 (v6e-256)"),
    ],
)
def test_accelerator_type_that_does_not_exist_is_refused_with_the_nearest(name, nearest):
    with pytest.raises(ValueError) as error:
        parse_topology(name)
    message = f"accelerator type '{name}' does not exist: try {nearest}, the nearest"
    assert str(error.value) == message


# From Google's pages, as accelerator types and as shapes.
DOCUMENTED = {
    "v2-8": "2x2",
    "v3-2048": "32x32",
    "v4-8": "2x2x1",
    "v4-64": "2x4x4",
    "v4-512": "4x8x8",
    "v4-1536": "8x8x12",
    "v4-4096": "8x16x16",
    "v5litepod-1": "1x1",
    "v5litepod-256": "16x16",
    "v5p-384": "4x4x12",
    "v5p-2048": "8x8x16",
    "v5p-12288": "16x16x24",
    "v6e-8": "2x4",
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_accelerator_type_has_the_documented_shape(name):
    chip, num_chips = parse_accelerator_type(name)
    assert format_shape(default_shape(chip, num_chips)) == DOCUMENTED[name]
    assert accelerator_type(chip, num_chips) == name


@pytest.mark.parametrize("chip", [*CHIPS, "v2"])
def test_nearest_slice_exists_and_one_that_exists_is_its_own_nearest(chip):
    shapes = slice_shapes(chip)
    assert len(set(shapes)) == len(shapes)
    for shape in shapes:
        assert nearest_shapes(chip, math.prod(shape), shape) == [shape]
        if chip in CHIPS:
            assert parse_topology(f"{chip}:{format_shape(shape)}")[1] == list(shape)
    rng = random.Random(0)
    for _ in range(100):
        sizes = tuple(rng.choice([0, 1, 2, 3, 4, 6, 8, 16, 33]) for _ in shapes[0])
        found = nearest_shapes(chip, math.prod(sizes), sizes)
        assert found and set(found) <= set(shapes)


def test_every_served_accelerator_has_a_runtime_version():
    assert RUNTIME_VERSIONS.keys() == CORES_IN_NAME.keys()


def test_peak_flops_are_flops_per_cycle_times_the_clock():
    # 128 x 128 matrix units per device; each cell multiplies and adds in a cycle.
    units = {"TPU v3": 2, "TPU v4": 8, "TPU v5 lite": 4, "TPU v5p": 8, "TPU v6 lite": 16}
    units |= {"TPU7x": 16}
    for (device_kind, num_units), chip in zip(units.items(), CHIPS.values(), strict=True):
        peak = num_units * 128**2 * 2 * chip.clock_hz
        assert peak == pytest.approx(metrics.PEAK_FLOPS[device_kind], rel=0.005)


@pytest.mark.parametrize(
    ("chip", "size", "hosts"),
    [("v5e", 1, 1), ("v5e", 8, 1), ("v6e", 8, 1), ("v5e", 16, 4), ("v4", 8, 2), ("tpu7x", 4, 1)],
)
def test_hosts_of_v5e_and_v6e_have_eight_chips_in_slices_of_one_host(chip, size, hosts):
    assert num_hosts(chip, size) == hosts
