"""Official metrics of classification and regression, as fractions (not percent)."""

from collections.abc import Sequence

import numpy as np
import scipy  # Imports scipy.stats, which is slow, on first use.
from absl import logging

MAX_CONFUSION = 100
"""Maximum number of labels for which a table of scores by class has the confusion matrix."""
MAX_CONFUSED = 5
"""Number of confused labels that are named for each class if there are more labels."""


def accuracy(predicted: np.ndarray, expected: np.ndarray) -> float:
    """Returns the fraction of equal entries; both `[examples]`."""
    return float(np.mean(np.asarray(predicted) == np.asarray(expected)))


def f1(predicted: np.ndarray, expected: np.ndarray, positive=1) -> float:
    """Returns 2 tp / (2 tp + fp + fn) for `positive`; 0 for 0 / 0. Micro F1 for several labels."""
    predicted, expected = np.asarray(predicted) == positive, np.asarray(expected) == positive
    total = np.sum(predicted) + np.sum(expected)
    return float(2 * np.sum(predicted & expected) / total) if total else 0.0


def macro_f1(predicted: np.ndarray, expected: np.ndarray) -> float:
    """Returns the mean of `f1` over the classes that occur in either argument.

    For label sets, both 0 or 1 `[examples, labels]`, returns the mean over all labels.
    """
    if np.ndim(predicted) == 2:
        return float(np.mean(list(map(f1, predicted.T, expected.T))))
    classes, codes = np.unique(np.concatenate([predicted, expected]), return_inverse=True)
    predicted, expected = np.split(codes, 2)
    counts = np.bincount(codes, minlength=len(classes))  # tp + fp + tp + fn
    correct = np.bincount(predicted[predicted == expected], minlength=len(classes))
    return float(np.mean(2 * correct / counts))


def class_table(
    predicted: np.ndarray | scipy.sparse.sparray,
    expected: np.ndarray | scipy.sparse.sparray,
    labels: Sequence,
    multi_label: bool = False,
) -> list[tuple]:
    """Returns a header, and a row of each label: its examples, scores (0 for 0 / 0) and confusions.

    `predicted` and `expected` are `[examples, labels]`, bool or 0 and 1, dense or sparse. For one
    label per example, a row ends with its row of the confusion matrix, which counts the labels
    predicted for its examples; with more than `MAX_CONFUSION` labels, it ends with the wrong labels
    that are predicted most, as text. If `multi_label`, a wrong label does not replace another, so a
    row ends with how often the label is predicted, and how often correctly.
    """
    predicted, expected = (scipy.sparse.csr_array(x, dtype=np.int64) for x in (predicted, expected))
    counts = predicted.sum(axis=0), expected.sum(axis=0)
    correct = predicted.multiply(expected).sum(axis=0)
    precision, recall = (correct / np.maximum(count, 1) for count in counts)
    f1 = 2 * correct / np.maximum(sum(counts), 1)
    header = ["label", "examples", "precision", "recall", "f1"]
    columns = [labels, counts[1].tolist()]
    columns += [score.round(4).tolist() for score in (precision, recall, f1)]
    if multi_label:
        header += ["predicted", "correct"]
        columns += [counts[0].tolist(), correct.tolist()]
        return [tuple(header), *zip(*columns, strict=True)]
    confusion = (expected.T @ predicted).tocsr()
    if len(labels) <= MAX_CONFUSION:
        header += labels
        columns += confusion.toarray().T.tolist()
    else:
        header.append("confused_with")
        columns.append([_most_confused(confusion, row, labels) for row in range(len(labels))])
    return [tuple(header), *zip(*columns, strict=True)]


def note_low_precision(table: Sequence[tuple], split: str, field: str) -> None:
    """Logs the labels of a `class_table` whose precision is below half of their recall.

    That is what too large weights of the loss do: the label is predicted where it is improbable.
    `field` names the weights in the note; "": there are none, and no note.
    """
    for label, examples, precision, recall, *_ in table[1:]:
        if field and examples and precision < recall / 2:
            logging.warning(
                "%s: with %s the precision of %r is %.4f, less than half of its recall, %.4f: "
                "use a smaller weight, such as its square root",
                *(split, field, label, precision, recall),
            )


def _most_confused(confusion: scipy.sparse.csr_array, row: int, labels: Sequence) -> str:
    """Returns the wrong labels that are predicted most for a label, such as "b (3), c (1)"."""
    cells = slice(*confusion.indptr[row : row + 2])
    pairs = zip(confusion.indices[cells].tolist(), confusion.data[cells].tolist(), strict=True)
    wrong = sorted((-count, column) for column, count in pairs if column != row and count)
    return ", ".join(f"{labels[column]} ({-count})" for count, column in wrong[:MAX_CONFUSED])


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


def r2(predicted: np.ndarray, expected: np.ndarray) -> float:
    """Returns the fraction of the labels' variance that the predictions explain, R²; at most 1.

    0 if the labels are constant, or 1 if they are also predicted exactly, as in scikit-learn.
    """
    residuals = np.sum((predicted - expected) ** 2)
    total = np.sum((expected - np.mean(expected)) ** 2)
    return float(1 - residuals / total) if total else float(residuals == 0)


def mean_absolute_error(predicted: np.ndarray, expected: np.ndarray) -> float:
    """Returns the mean of the absolute differences; both `[examples]`."""
    return float(np.mean(np.abs(predicted - expected)))


def mean_squared_error(predicted: np.ndarray, expected: np.ndarray) -> float:
    """Returns the mean of the squared differences; both `[examples]`."""
    return float(np.mean((predicted - expected) ** 2))
