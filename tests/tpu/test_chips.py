"""Names of topologies, and the chips' data sheets."""

import pytest

from bert_jax.tpu.chips import CHIPS, parse_topology
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


@pytest.mark.parametrize("topology", ["v9:2x2", "v4", "v4:4x4", "v4:2x2x1:0", "v4:2x2x1:", "4x4"])
def test_unknown_topology_is_rejected_with_examples(topology):
    with pytest.raises(ValueError, match=f"unknown topology '{topology}': .*v3:4x4, v4:4x4x4,"):
        parse_topology(topology)


def test_peak_flops_are_flops_per_cycle_times_the_clock():
    # 128 x 128 matrix units per device; each cell multiplies and adds in a cycle.
    units = {"TPU v3": 2, "TPU v4": 8, "TPU v5 lite": 4, "TPU v5p": 8, "TPU v6 lite": 16}
    units |= {"TPU7x": 16}
    for (device_kind, num_units), chip in zip(units.items(), CHIPS.values(), strict=True):
        peak = num_units * 128**2 * 2 * chip.clock_hz
        assert peak == pytest.approx(metrics.PEAK_FLOPS[device_kind], rel=0.005)
