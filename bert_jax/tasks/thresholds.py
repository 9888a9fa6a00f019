"""Thresholds of a multi-label head, above whose log-odds a label is predicted."""

from collections.abc import Sequence

import numpy as np


def exceed_thresholds(logits: np.ndarray, logit_thresholds: Sequence[float]) -> np.ndarray:
    """Returns which labels are predicted, bool, for `[..., labels]`; without thresholds, above 0.

    Thresholds are log-odds, so that those near a probability of 0 or 1 lose no precision.
    """
    return np.asarray(logits) > np.asarray(logit_thresholds or 0.0, np.float64)


def best_thresholds(logits: np.ndarray, expected: np.ndarray) -> list[float]:
    """Returns the threshold of each label with the highest F1, and of equal ones that nearest to 0.

    A threshold is the mean of two neighboring logits, or for predicting all examples one below the
    lowest. A label without positive examples has 0, a probability of 0.5. Both arguments are
    `[examples, labels]`; `expected` is 0 or 1.
    """
    thresholds = []
    for scores, positive in zip(np.float64(logits).T, np.asarray(expected).T > 0, strict=True):
        if not positive.any():
            thresholds.append(0.0)
            continue
        order = np.argsort(-scores)
        scores, correct = scores[order], np.cumsum(positive[order])
        f1 = 2 * correct / (np.arange(1, len(scores) + 1) + positive.sum())
        below = np.append(scores[1:], min(scores[-1] - 2, 0.0))
        candidates = (scores + below) / 2
        f1[scores == below] = -1  # Equal logits cannot be separated.
        best = np.flatnonzero(f1 == f1.max())
        # 0 itself, if it lies between the same logits.
        values = np.where((below[best] <= 0) & (scores[best] > 0), 0.0, candidates[best])
        thresholds.append(float(values[np.argmin(np.abs(values))]))
    return thresholds
