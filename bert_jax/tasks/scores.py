"""Official metrics of classification and regression, as fractions (not percent)."""

from collections.abc import Sequence

import numpy as np
import scipy  # Imports scipy.stats, which is slow, on first use.


def accuracy(predicted: np.ndarray, expected: np.ndarray) -> float:
    """Returns the fraction of equal entries; both `[examples]`."""
    return float(np.mean(np.asarray(predicted) == np.asarray(expected)))


def f1(predicted: np.ndarray, expected: np.ndarray, positive=1) -> float:
    """Returns 2 tp / (2 tp + fp + fn) for `positive`; 0 for 0 / 0. Micro F1 for several labels."""
    predicted, expected = np.asarray(predicted) == positive, np.asarray(expected) == positive
    total = np.sum(predicted) + np.sum(expected)
    return float(2 * np.sum(predicted & expected) / total) if total else 0.0


def macro_f1(predicted: np.ndarray, expected: np.ndarray) -> float:
    """Returns the mean of `f1` over the classes that occur in either argument."""
    classes = np.union1d(predicted, expected)
    return float(np.mean([f1(predicted, expected, positive) for positive in classes]))


def multi_label_f1(predicted: np.ndarray, expected: np.ndarray) -> float:
    """Returns the mean of the `f1` of each label; both 0 or 1 `[examples, labels]`."""
    return float(np.mean(list(map(f1, predicted.T, expected.T))))


def class_table(predicted: np.ndarray, expected: np.ndarray, labels: Sequence) -> list[tuple]:
    """Returns a header, and each label's scores (0 for 0 / 0) and row of the confusion matrix.

    A row counts the labels predicted for examples that have its label. `predicted` and `expected`
    are bool `[examples, labels]`.
    """
    confusion = expected.T.astype(int) @ predicted
    counts, correct = (predicted.sum(0), expected.sum(0)), np.diag(confusion)
    precision, recall = (correct / np.maximum(count, 1) for count in counts)
    f1 = 2 * correct / np.maximum(sum(counts), 1)
    header = ("label", "examples", "precision", "recall", "f1", *labels)
    columns = (score.round(4).tolist() for score in (precision, recall, f1))
    return [header, *zip(labels, counts[1].tolist(), *columns, *confusion.T.tolist(), strict=True)]


def matthews(predicted: np.ndarray, expected: np.ndarray) -> float:
    """Returns Matthews' correlation of two or more classes; 0 where it is undefined."""
    classes = np.union1d(predicted, expected)
    one_hot = (np.asarray(x)[:, None] == classes for x in (predicted, expected))
    return pearson(*((x - x.mean(axis=0)).ravel() for x in one_hot))


def roc_auc(scores: np.ndarray, is_positive: np.ndarray) -> float:
    """Returns the area under the ROC curve: how often a positive example has the higher score.

    Equal scores count half. 0.5 if only one class occurs. Both arguments are `[examples]`.
    """
    is_positive = np.asarray(is_positive, bool)
    positives = int(is_positive.sum())
    negatives = len(is_positive) - positives
    if not positives or not negatives:
        return 0.5
    ranks = scipy.stats.rankdata(scores)[is_positive].sum()  # Mann and Whitney's U.
    return float((ranks - positives * (positives + 1) / 2) / (positives * negatives))


def average_precision(scores: np.ndarray, is_positive: np.ndarray) -> float:
    """Returns the mean precision at the score of each positive example; 0 if there is none.

    Examples with equal scores are retrieved at once. Both arguments are `[examples]`.
    """
    order = np.argsort(-np.asarray(scores), kind="stable")
    found = np.cumsum(np.asarray(is_positive, bool)[order])
    if not found[-1]:
        return 0.0
    ends = np.append(np.flatnonzero(np.diff(np.asarray(scores)[order])), len(order) - 1)
    return float(np.sum(np.diff(found[ends], prepend=0) * found[ends] / (ends + 1)) / found[-1])


def pearson(predicted: np.ndarray, expected: np.ndarray) -> float:
    """Returns Pearson's correlation; 0 if one side is constant."""
    is_constant = np.ptp(predicted) == 0 or np.ptp(expected) == 0
    return 0.0 if is_constant else float(scipy.stats.pearsonr(predicted, expected).statistic)


def spearman(predicted: np.ndarray, expected: np.ndarray) -> float:
    """Returns Spearman's rank correlation; 0 if one side is constant."""
    return pearson(scipy.stats.rankdata(predicted), scipy.stats.rankdata(expected))


def mean_squared_error(predicted: np.ndarray, expected: np.ndarray) -> float:
    """Returns the mean of the squared differences; both `[examples]`."""
    return float(np.mean((predicted - expected) ** 2))
