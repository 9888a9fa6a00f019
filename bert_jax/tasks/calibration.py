"""Calibration of a classifier: whether its probabilities are frequencies (Guo et al., 2017)."""

import csv
import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np
import scipy  # Imports scipy.optimize, which is slow, on first use.
from scipy.special import log_softmax, softmax

from bert_jax.tasks.task import Outputs, Split

NUM_BINS = 15  # As in the paper, section 5.
TEMPERATURES = (0.05, 20.0)  # Examples that are all classified correctly would have 0.
COLUMNS = ("temperature", "from", "to", "examples", "confidence", "accuracy")


def fit_temperature(logits: np.ndarray, expected: np.ndarray) -> float:
    """Returns the temperature in `TEMPERATURES` by which to divide logits for the lowest loss.

    `logits` are `[examples, classes]`, `expected` the classes, int `[examples]`.
    """
    logits = np.asarray(logits, np.float64)

    def loss(log_temperature: float) -> float:
        log_probabilities = log_softmax(logits / np.exp(log_temperature), axis=-1)
        return -np.mean(np.take_along_axis(log_probabilities, expected[:, None], axis=-1))

    bounds = tuple(np.log(TEMPERATURES))
    fitted = scipy.optimize.minimize_scalar(loss, bounds=bounds, options={"xatol": 1e-6})
    return float(np.exp(fitted.x))


def reliability(probabilities: np.ndarray, expected: np.ndarray) -> list[tuple]:
    """Returns (from, to, examples, mean confidence, accuracy) of each bin with examples.

    A bin holds the examples whose confidence, the probability of the predicted class, is in
    (from, to]. `probabilities` are `[examples, classes]`, `expected` int `[examples]`.
    """
    return reliability_of(probabilities.max(-1), probabilities.argmax(-1) == expected)


def reliability_of(confidence: np.ndarray, correct: np.ndarray) -> list[tuple]:
    """Returns the `reliability` of confidences and whether each prediction is correct."""
    bin_of_example = np.ceil(confidence * NUM_BINS).astype(int) - 1
    rows = []
    for index in np.unique(bin_of_example).tolist():
        members = bin_of_example == index
        means = float(confidence[members].mean()), float(correct[members].mean())
        rows.append((index / NUM_BINS, (index + 1) / NUM_BINS, int(members.sum()), *means))
    return rows


def expected_calibration_error(probabilities: np.ndarray, expected: np.ndarray) -> float:
    """Returns the mean difference of confidence and accuracy of the bins of `reliability`."""
    return mean_gap(reliability(probabilities, expected))


def mean_gap(rows: Sequence[tuple]) -> float:
    """Returns the mean difference of confidence and accuracy of bins, weighted by examples."""
    gaps = (count * abs(confidence - accuracy) for _, _, count, confidence, accuracy in rows)
    return sum(gaps) / sum(row[2] for row in rows)


def with_calibration(
    split: Split, fits: bool, calibration_temperature: float | None = None
) -> Split:
    """Returns a labeled classification split whose calibration is also scored and written.

    Adds the expected calibration error to the scores: "ece" and, for logits divided by a given
    temperature, "calibrated_ece". Writes NAME_calibration.tsv, the bins of both. If it `fits`, it
    chooses the temperature.
    """
    expected = np.array([feature.label for feature in split.features])
    temperatures, current = {"ece": 1.0}, {}
    if calibration_temperature is not None:
        temperatures["calibrated_ece"] = calibration_temperature
        current["calibration_temperature"] = calibration_temperature

    def probabilities(outputs: Outputs) -> dict[str, np.ndarray]:
        logits = np.stack(outputs).astype(np.float64)
        return {name: softmax(logits / value, axis=-1) for name, value in temperatures.items()}

    def score(outputs: Outputs) -> dict[str, float]:
        errors = {
            name: expected_calibration_error(values, expected)
            for name, values in probabilities(outputs).items()
        }
        return split.score(outputs) | errors

    def write(outputs: Outputs, directory: pathlib.Path) -> pathlib.Path:
        path = split.write(outputs, directory)
        with open(
            directory / f"{split.name}_calibration.tsv", "w", newline="", encoding="utf-8"
        ) as stream:
            writer = csv.writer(stream, delimiter="\t")
            writer.writerow(COLUMNS)
            for name, values in probabilities(outputs).items():
                for row in reliability(values, expected):
                    writer.writerow([round(value, 4) for value in (temperatures[name], *row)])
        return path

    def tune(outputs: Outputs) -> dict:
        return {"calibration_temperature": fit_temperature(np.stack(outputs), expected)}

    return dataclasses.replace(
        split,
        score=score,
        write=write,
        tune=tune if fits else None,
        with_settings=lambda tuned: with_calibration(split, fits, **(current | tuned)),
    )
