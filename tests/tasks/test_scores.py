"""The metrics' values where they are easy to get wrong; tests/parity has random cases by the 1,000.

What is expected was computed by hand, or is scikit-learn's and SciPy's.
"""

import numpy as np
import pytest

from bert_jax.tasks import scores


@pytest.mark.parametrize(
    ("metric", "predicted", "expected", "value"),
    [
        (scores.accuracy, [1, 0, 2], [1, 1, 2], 2 / 3),
        (scores.f1, [1, 1, 0, 0], [1, 0, 1, 0], 0.5),
        (scores.f1, [0, 0], [0, 0], 0.0),  # No positive one anywhere.
        (scores.f1, [0, 0], [1, 0], 0.0),
        (scores.f1, [1, 1], [1, 1], 1.0),
        (scores.macro_f1, [0, 0, 0], [0, 0, 1], 0.4),  # A class that is never predicted counts.
        (scores.macro_f1, [0, 0, 2], [0, 0, 0], 0.4),  # And one that only is.
        (scores.macro_f1, [3, 3], [3, 3], 1.0),
        (scores.matthews, [1, 1, 0, 0], [1, 1, 0, 0], 1.0),
        (scores.matthews, [0, 0, 1, 1], [1, 1, 0, 0], -1.0),
        (scores.matthews, [1, 1, 1, 1], [1, 1, 0, 0], 0.0),  # Constant predictions.
        (scores.matthews, [1, 0, 1, 0], [1, 1, 1, 1], 0.0),  # One class.
        (scores.matthews, [1], [1], 0.0),
        (scores.matthews, [1, 1, 1, 0], [1, 1, 0, 0], 3**-0.5),
        (scores.matthews, [0, 1, 2, 2], [0, 1, 2, 0], 0.7),
        (scores.pearson, [1, 2, 3], [2, 4, 6], 1.0),
        (scores.pearson, [1, 2, 4], [3, 2, 1], -9 / 84**0.5),
        (scores.pearson, [2, 2, 2], [1, 2, 3], 0.0),  # Constant: not NaN.
        (scores.pearson, [1, 2, 3], [2, 2, 2], 0.0),
        (scores.pearson, [1], [2], 0.0),
        (scores.spearman, [1, 2, 300], [1, 2, 3], 1.0),
        (scores.spearman, [1, 1, 2], [1, 2, 3], 0.75**0.5),  # Ties share their mean rank.
        (scores.spearman, [7, 7], [1, 2], 0.0),
    ],
)
def test_values_of_nasty_cases(metric, predicted, expected, value):
    found = metric(np.array(predicted), np.array(expected))
    assert isinstance(found, float) and found == pytest.approx(value, abs=1e-12)


def test_f1_is_of_the_class_that_is_asked_for():
    predicted, expected = np.array([0, 0, 2, 1]), np.array([0, 2, 2, 0])
    assert [scores.f1(predicted, expected, each) for each in range(3)] == [0.5, 0.0, 2 / 3]
