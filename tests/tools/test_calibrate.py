"""The factor of a machine, from steps that it runs."""

import collections
import json
import types

import jax
import numpy as np
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
    found = calibrate.factors([2.5, 3.5, 4.5], computation=2.0, exposed=0.5)
    assert found == {"factor": 1.5, "low": 1.0, "high": 2.0}
    with pytest.raises(ValueError, match="less than"):
        calibrate.factors([0.4], computation=2.0, exposed=0.5)


def test_estimate_on_a_tpu_is_the_compilers_at_the_clock_of_its_chip(monkeypatch):
    cost = types.SimpleNamespace(cycles=collections.Counter(part=2_100), exposed_link_bytes=3e11)
    asked = []
    monkeypatch.setattr(calibrate, "step_cost", lambda *call: asked.append(call) or cost)
    devices = np.array([types.SimpleNamespace(device_kind="TPU v4")])
    setup = types.SimpleNamespace(mesh=types.SimpleNamespace(devices=devices))
    assert calibrate.estimated_seconds(setup, lambda: "HLO", None) == pytest.approx((2e-6, 1.0))
    assert asked == [("HLO", "v4")]


@pytest.mark.slow
def test_file_of_this_machine_is_what_reports_read(tmp_path):
    peak = 1e9
    device = jax.devices()[0]
    found = calibrate.calibrate(small_config(), 2, length=16, peak_flops=peak, devices=[device])
    assert found["chip"] == device.device_kind and found["num_devices"] == 1
    assert found["tokens_per_device"] == 8 * 16
    estimated = found["estimated_seconds"]
    assert found["factor"] == pytest.approx(found["measured_seconds"] / estimated)
    path = tmp_path / "factor.json"
    path.write_text(json.dumps(found))
    read = calibration_of(found["chip"], str(path))
    assert read.factor == found["factor"] and read.low < found["low"] and read.high > found["high"]
    assert read.measured == {name: found[name] for name in read.measured}
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
        calibrate.calibrate(small_config(), steps=1, length=16)


def test_objective_with_a_teacher_is_refused():
    with pytest.raises(ValueError, match=r"config\.objective=distillation"):
        calibrate.calibrate(small_config(objective="distillation"), steps=1, length=16)
