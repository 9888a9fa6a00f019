"""Calibration: the temperature that minimizes the loss, and the error that remains."""

import csv
import pathlib

import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from bert_jax.data.features import ModelInput
from bert_jax.tasks.calibration import (
    expected_calibration_error,
    fit_temperature,
    reliability,
    with_calibration,
)
from bert_jax.tasks.task import Split


def overconfident(count: int, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns logits whose probabilities are correct once divided by `temperature`."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1, (count, 3))
    drawn = (rng.random((count, 1)) > softmax(logits, axis=-1).cumsum(-1)).sum(-1)
    return logits * temperature, np.minimum(drawn, 2)


def test_fitted_temperature_has_the_lowest_loss_and_recovers_the_true_one():
    logits, expected = overconfident(20_000, 2.5)

    def loss(temperature):
        return -np.mean(log_softmax(logits / temperature, axis=-1)[np.arange(20_000), expected])

    fitted = fit_temperature(logits, expected)
    assert fitted == pytest.approx(2.5, rel=0.05)
    assert loss(fitted) <= min(loss(fitted * 0.999), loss(fitted * 1.001))


def test_examples_without_an_error_have_the_lowest_temperature():
    assert fit_temperature(np.eye(2), np.arange(2)) == pytest.approx(0.05, rel=1e-3)


def test_error_is_the_mean_gap_of_confidence_and_accuracy_of_the_bins():
    probabilities = np.array([[0.9, 0.1], [0.93, 0.07], [0.4, 0.6], [0.5, 0.5]])
    expected = np.array([0, 1, 1, 1])
    rows = reliability(probabilities, expected)
    bins = [
        (7 / 15, 8 / 15, 1, 0.5, 0),
        (8 / 15, 9 / 15, 1, 0.6, 1),
        (13 / 15, 14 / 15, 2, 0.915, 0.5),
    ]
    np.testing.assert_allclose(rows, bins)
    error = expected_calibration_error(probabilities, expected)
    assert error == pytest.approx((0.5 + 0.4 + 2 * 0.415) / 4)


def test_split_scores_and_writes_both_calibrations(tmp_path):
    logits, expected = overconfident(2_000, 3.0)
    features = [ModelInput((np.zeros(2),), (2,), label) for label in expected]

    def write(outputs, directory: pathlib.Path) -> None:
        (directory / "own").write_text("")

    split = Split("dev", features, lambda outputs: {"accuracy": 0.5}, write)
    split = with_calibration(split, fits=True)
    assert list(split.score(logits)) == ["accuracy", "ece"]
    tuned = split.tune(logits)
    calibrated = split.with_settings(tuned)
    scores = calibrated.score(logits)
    assert scores["calibrated_ece"] < 0.04 < 0.2 < scores["ece"]
    calibrated.write(logits, tmp_path)
    assert (tmp_path / "own").exists()
    with open(tmp_path / "dev_calibration.tsv", newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t"))
    temperatures = [1.0, round(tuned["calibration_temperature"], 4)]
    for temperature, error in zip(temperatures, ("ece", "calibrated_ece"), strict=True):
        bins = [row for row in rows if float(row["temperature"]) == temperature]
        gaps = [
            int(row["examples"]) * abs(float(row["confidence"]) - float(row["accuracy"]))
            for row in bins
        ]
        assert sum(gaps) / len(expected) == pytest.approx(scores[error], abs=1e-4)
    assert with_calibration(split, fits=False).tune is None
