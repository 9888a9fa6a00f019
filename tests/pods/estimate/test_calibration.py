"""Factors between estimated and measured times."""

import json
import statistics

import pytest

from bert_jax.pods.estimate import calibration
from bert_jax.pods.estimate.calibration import Calibration, TimedStep, calibration_of

V4 = Calibration("v4", factor=1.2, low=1.1, high=1.5, num_measurements=3, source="a test")


def publish(monkeypatch, **ratios: list[float]) -> list[dict]:
    measurements = [
        {
            "chip": chip,
            "is_product": False,
            "tokens_per_device": 1e4,
            "measured_seconds": 2 * each,
            "estimated_seconds": 2,
        }
        for chip, own in ratios.items()
        for each in own
    ]
    monkeypatch.setattr(calibration, "read_published", lambda: measurements)
    return measurements


def test_factor_and_range_are_median_and_extremes_of_a_chip(monkeypatch):
    publish(monkeypatch, v4=[1.5, 0.5, 1.1], v5e=[9.0, 8.0])
    found = calibration_of("v4")
    assert (found.low, found.factor, found.high) == pytest.approx((0.5, 1.1, 1.5))
    assert found.num_measurements == 3


def test_range_of_few_or_equal_measurements_is_not_narrow(monkeypatch):
    publish(monkeypatch, v5e=[2.0, 2.0], v5p=[2.0, 1.99, 2.01], v6e=[1.0, 2.0])
    for chip in ("v5e", "v5p"):
        found = calibration_of(chip)
        assert (found.low, found.factor, found.high) == pytest.approx((1.6, 2.0, 2.5))
    found = calibration_of("v6e")
    assert (found.low, found.factor, found.high) == pytest.approx((1.0, 1.5, 2.0))


def test_chip_without_measurements_has_the_range_of_all(monkeypatch):
    publish(monkeypatch, v4=[0.8, 1.0, 1.5], v5e=[2.0])
    found = calibration_of("v3")
    every = [0.8, 1.0, 1.5, 2.0]  # Also of v5e, as one step is too few.
    assert calibration_of("v5e").factor == found.factor
    assert (found.low, found.factor, found.high) == pytest.approx(
        (min(every), statistics.median(every), max(every))
    )
    assert not found.num_measurements
    assert calibration.why_not_calibrated(found, [TimedStep(100, 512, 10**8, 1.0, 0.0)])


@pytest.mark.parametrize("changes", [{"is_product": True}, {"tokens_per_device": 2048}])
def test_products_and_few_tokens_make_no_factor(monkeypatch, changes):
    measurements = publish(monkeypatch, v4=[1.5, 3.0, 1.5])
    measurements[1] |= changes
    found = calibration_of("v4")
    assert (found.factor, found.num_measurements) == (1.5, 2)


def test_range_scales_computation_alone():
    assert calibration.calibrated_range(V4, 10.0, 3.0) == pytest.approx((14.0, 15.0, 18.0))


@pytest.mark.parametrize(
    ("rows", "exposed", "num_reasons"),
    [(4, 0.0, 1), (5, 0.0, 0), (5, 0.06, 1), (1, 0.06, 2), (16, 0.05, 0)],
)
def test_few_tokens_and_exposed_communication_are_not_calibrated(rows, exposed, num_reasons):
    step = TimedStep(rows, 512, 10**8, 1.0, exposed)
    assert len(calibration.why_not_calibrated(V4, [step, step])) == num_reasons


def write_file(path, **changes) -> str:
    stored = {"chip": "v4", "date": "2026-11-30", "factor": 1.2, "low": 1.1, "high": 1.3}
    shapes = {"max_seq_length": 512, "tokens_per_device": 2048, "num_params": 10**8}
    stored["phases"] = [shapes | {"max_seq_length": 128}, shapes]
    path.write_text(json.dumps(stored | changes))
    return str(path)


def test_file_of_a_machine_replaces_published_factors(tmp_path):
    found = calibration_of("v4", write_file(tmp_path / "factor.json"))
    # The groups of one run are less apart than runs.
    assert (found.low, found.factor, found.high) == pytest.approx((1.2 / 1.25, 1.2, 1.5))
    assert found.num_measurements == 1 and "2026-11-30" in found.source


@pytest.mark.parametrize(
    "changes",
    [
        {"chip": "v5e"},
        {"low": 1.25},
        {"high": 1.0},
        {"low": 0},
        {"factor": "x"},
        {"phases": [{"max_seq_length": 512}]},
    ],
)
def test_file_of_another_chip_or_form_is_refused(tmp_path, changes):
    with pytest.raises(ValueError, match=r"--calibration=.*factor\.json"):
        calibration_of("v4", write_file(tmp_path / "factor.json", **changes))


@pytest.mark.parametrize(
    ("shapes", "is_measured"),
    [
        ((4, 512, 10**8), True),
        ((16, 128, 10**8), True),
        ((4, 512, 102 * 10**6), True),
        ((8, 512, 10**8), False),
        ((8, 256, 10**8), False),
        ((4, 512, 3 * 10**8), False),
    ],
)
def test_file_holds_for_the_shapes_of_the_phases_that_were_measured(tmp_path, shapes, is_measured):
    found = calibration_of("v4", write_file(tmp_path / "factor.json"))
    reasons = calibration.why_not_calibrated(found, [TimedStep(*shapes, 1.0, 0.0)])
    assert len(reasons) == 1 - is_measured
    assert is_measured or "2,048 tokens per device in rows of 512 with 100,000,000" in reasons[0]


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"missing\.json"):
        calibration_of("v4", str(tmp_path / "missing.json"))
