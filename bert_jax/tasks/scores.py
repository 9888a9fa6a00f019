"""Official metrics of classification and regression, as fractions (not percent)."""

import numpy as np
import scipy.stats


def accuracy(predicted: np.ndarray, expected: np.ndarray) -> float:
    """Returns the share of equal entries; both `[examples]`."""
    return float(np.mean(np.asarray(predicted) == np.asarray(expected)))


def f1(predicted: np.ndarray, expected: np.ndarray, positive=1) -> float:
    """Returns 2 tp / (2 tp + fp + fn) for the class `positive`; 0 for 0 / 0."""
    predicted, expected = np.asarray(predicted) == positive, np.asarray(expected) == positive
    found = np.sum(predicted & expected)
    total = np.sum(predicted) + np.sum(expected)
    return float(2 * found / total) if total else 0.0


def macro_f1(predicted: np.ndarray, expected: np.ndarray) -> float:
    """Returns the mean of `f1` over the classes that occur in either."""
    classes = np.union1d(predicted, expected)
    return float(np.mean([f1(predicted, expected, each) for each in classes]))


def matthews(predicted: np.ndarray, expected: np.ndarray) -> float:
    """Returns Matthews' correlation of two or more classes; 0 where it is undefined."""
    classes = np.union1d(predicted, expected)
    one_hot = [np.asarray(each)[:, None] == classes for each in (predicted, expected)]
    predicted, expected = (each.astype(np.float64) for each in one_hot)
    predicted, expected = predicted - predicted.mean(0), expected - expected.mean(0)
    variance = np.sum(predicted**2) * np.sum(expected**2)
    return float(np.sum(predicted * expected) / np.sqrt(variance)) if variance else 0.0


def pearson(predicted: np.ndarray, expected: np.ndarray) -> float:
    """Returns Pearson's correlation; 0 if one side is constant."""
    return _correlation(scipy.stats.pearsonr, predicted, expected)


def spearman(predicted: np.ndarray, expected: np.ndarray) -> float:
    """Returns Spearman's rank correlation; 0 if one side is constant."""
    return _correlation(scipy.stats.spearmanr, predicted, expected)


def mean_squared_error(predicted: np.ndarray, expected: np.ndarray) -> float:
    """Returns the mean of the squared differences; both `[examples]`."""
    return float(np.mean((predicted - expected) ** 2))


def _correlation(function, predicted, expected) -> float:
    if len(predicted) < 2 or np.ptp(predicted) == 0 or np.ptp(expected) == 0:
        return 0.0
    return float(function(predicted, expected).statistic)
