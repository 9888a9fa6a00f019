"""Decides which trials of a stack stop before their last step, as Optuna's MedianPruner does."""

import math
import statistics
from collections.abc import Mapping

MIN_OTHERS = 4
"""With fewer others to be compared with, no trial is pruned, so that a few train to the end."""


def below_median(
    best: Mapping[int, float], scores: Mapping[int, float], num_diverged: int
) -> list[int]:
    """Returns the trials whose best score is below the median of the others' present scores.

    Args:
      best: number of a trial that may be pruned -> its best score up to this evaluation.
      scores: number of a trial -> its score at this evaluation, also of those that may not be
        pruned; trials that have ended before have none.
      num_diverged: trials that have diverged, whose score counts as lower than any other.
    """
    pruned = []
    for trial, score in best.items():
        others = [each for other, each in scores.items() if other != trial]
        others += [-math.inf] * num_diverged
        if len(others) >= MIN_OTHERS and score < statistics.median(others):
            pruned.append(trial)
    return pruned
