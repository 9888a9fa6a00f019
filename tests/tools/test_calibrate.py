"""The factor of a machine, from steps that it runs."""

import collections
import json
import types

import jax
import pytest

from bert_jax.configs.pretrain import bert_tiny
from bert_jax.pods.estimate.calibration import calibration_of
from bert_jax.pods.estimate.roofline import device_peak
from bert_jax.tools import calibrate
from bert_jax.training.metrics import PEAK_FLOPS


def small_config(**changes):
    config = bert_tiny.get_config()
    config.batch_size = config.eval_batch_size = 8
    config.model.num_layers = 1
    config.update_from_flattened_dict(changes)
    return config


def test_each_group_of_steps_is_timed_after_two_others():
    ticks, steps = iter(range(100)), []

    def update(state, rows):
        steps.append(rows)
        return state + 1, {"loss": jax.numpy.zeros(())}

    seconds = calibrate.time_steps(update, 0, "rows", 8, clock=lambda: next(ticks))
    assert len(steps) == 2 + 8
    assert seconds == [1 / 2, 1 / 2, 1 / 2, 1, 1]  # Each group takes a tick.


def test_exposed_communication_is_not_part_of_the_factor():
    ratios = calibrate.ratios_of([2.5, 3.5, 4.5], computation=2.0, exposed=0.5)
    assert calibrate.spread(ratios) == {"factor": 1.5, "low": 1.0, "high": 2.0}


@pytest.mark.parametrize(("computation", "exposed"), [(2.0, 0.5), (0.0, 0.1)])
def test_estimate_that_no_step_can_be_compared_with_is_refused(computation, exposed):
    with pytest.raises(ValueError, match="nothing can be calibrated"):
        calibrate.ratios_of([0.4], computation, exposed)


def fake_cost(monkeypatch, **changes) -> list:
    figures = {"cycles": collections.Counter(part=2_100), "exposed_link_bytes": 3e11}
    figures |= {"without_estimate": {"sort": 1}, "loops_counted_once": []} | changes
    asked = []
    cost = types.SimpleNamespace(**figures)
    monkeypatch.setattr(calibrate, "step_cost", lambda *call: asked.append(call) or cost)
    return asked


def test_estimate_on_a_tpu_is_the_compilers_at_the_clock_of_its_chip(monkeypatch):
    asked = fake_cost(monkeypatch)
    found = calibrate.estimated_seconds("TPU v4", 4, 1e12, lambda: "HLO", None)
    assert found == pytest.approx((2e-6, 1.0)) and asked == [("HLO", "v4")]
    with pytest.raises(ValueError, match="--peak_flops has no effect on a v4"):
        calibrate.estimated_seconds("TPU v4", 4, 1e12, lambda: "HLO", 1e12)


@pytest.mark.parametrize(
    "changes", [{"loops_counted_once": ["while"]}, {"without_estimate": {"tpu_custom_call": 1}}]
)
def test_program_without_a_complete_estimate_is_refused(monkeypatch, changes):
    fake_cost(monkeypatch, **changes)
    with pytest.raises(ValueError, match="without an estimate"):
        calibrate.estimated_seconds("TPU v4", 4, 1e12, lambda: "HLO", None)


def test_estimate_elsewhere_is_the_flops_at_the_peak():
    assert calibrate.estimated_seconds("Fast GPU", 2, 1e12, None, 1e12) == (0.5, 0.0)
    with pytest.raises(ValueError, match="'Fast GPU' is known: give --peak_flops"):
        calibrate.estimated_seconds("Fast GPU", 2, 1e12, None, None)


@pytest.mark.slow
def test_file_of_this_machine_is_what_reports_read(tmp_path):
    device = jax.devices()[0]
    config = small_config(**{"long_phase.batch_size": 8})
    found = calibrate.calibrate(config, 2, (16, 32), peak_flops=1e9, devices=[device])
    assert found["chip"] == device.device_kind and found["num_devices"] == 1
    assert [phase["tokens_per_device"] for phase in found["phases"]] == [8 * 16, 8 * 32]
    for phase in found["phases"]:
        ratio = phase["measured_seconds"] / phase["estimated_seconds"]
        assert phase["factor"] == pytest.approx(ratio)
        assert found["low"] <= phase["low"] and phase["high"] <= found["high"]
    path = tmp_path / "factor.json"
    path.write_text(json.dumps(found))
    read = calibration_of(found["chip"], str(path))
    assert (
        read.factor == found["factor"] and read.low <= found["low"] and read.high >= found["high"]
    )
    assert [each["max_seq_length"] for each in read.measured] == [16, 32]
    with pytest.raises(ValueError, match="was measured on cpu, not on v4"):
        calibration_of("v4", str(path))


def test_every_kind_of_tpu_with_a_peak_has_its_chip():
    kinds = {kind for kind in PEAK_FLOPS if kind.startswith("TPU")}
    served = {kind for kind in kinds if kind != "TPU v2"}
    assert served == set(calibrate.DEVICE_KINDS)
    for kind, chip in calibrate.DEVICE_KINDS.items():
        assert PEAK_FLOPS[kind] == device_peak(chip)


def test_device_without_data_sheet_needs_its_peak():
    with pytest.raises(ValueError, match=r"'cpu'.*--peak_flops"):
        calibrate.calibrate(small_config(), steps=1, lengths=(16, 32))


def test_objective_with_a_teacher_is_refused():
    with pytest.raises(ValueError, match=r"config\.objective=distillation"):
        calibrate.calibrate(small_config(objective="distillation"), steps=1, lengths=(16, 32))
