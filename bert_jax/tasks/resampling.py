"""Says how much a score depends on the choice of the examples: the bootstrap, and McNemar's test.

None of them shows how much it depends on the seed of the training.
"""

from collections.abc import Callable

import numpy as np
import scipy  # Imports scipy.stats, which is slow, on first use.

LEVEL = 0.95
"""Of an interval: how often it covers the score of all possible examples."""
NUM_SAMPLES = 1000


def bootstrap_interval(
    score: Callable[[np.ndarray], float | np.ndarray],
    num_examples: int,
    level: float = LEVEL,
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
) -> tuple[float | np.ndarray, float | np.ndarray]:
    """Returns the bounds of a score, by the percentile bootstrap.

    Each of `num_samples` draws as many examples as there are, with replacement (Efron and
    Tibshirani, 1993, chapter 13).

    Args:
      score: indices of examples, int `[num_examples]`, some of them repeated -> their score, or an
        array of scores. For a paired interval, the difference of two scores of the same examples.
    """
    rng = np.random.default_rng(seed)
    draws = (rng.integers(num_examples, size=num_examples) for _ in range(num_samples))
    low, high = np.quantile(list(map(score, draws)), [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def mcnemar_exact(first: np.ndarray, second: np.ndarray) -> tuple[int, int, float]:
    """Compares which examples two models predict correctly, by McNemar's exact test.

    Both are bool `[examples]`. Returns the numbers of examples that only the first and only the
    second model predicts correctly, and the two-sided p-value: the probability that a fair coin
    distributes these examples as unevenly.
    """
    only_first, only_second = int(np.sum(first & ~second)), int(np.sum(second & ~first))
    if not only_first + only_second:
        return 0, 0, 1.0
    test = scipy.stats.binomtest(only_first, only_first + only_second)
    return only_first, only_second, float(test.pvalue)
