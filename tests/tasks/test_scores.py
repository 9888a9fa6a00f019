"""Metrics of cases that are easy to get wrong; tests/parity has 1,000 random ones of each.

Expected values were computed by hand, or by scikit-learn and SciPy.
"""

import collections

import numpy as np
import pytest
import scipy

from bert_jax.tasks import scores


@pytest.mark.parametrize(
    ("metric", "predicted", "expected", "value"),
    [
        (scores.accuracy, [1, 0, 2], [1, 1, 2], 2 / 3),
        (scores.f1, [1, 1, 0, 0], [1, 0, 1, 0], 0.5),
        (scores.f1, [0, 0], [0, 0], 0.0),  # No positives at all.
        (scores.f1, [0, 0], [1, 0], 0.0),
        (scores.f1, [1, 1], [1, 1], 1.0),
        (scores.macro_f1, [0, 0, 0], [0, 0, 1], 0.4),  # A class that is never predicted counts.
        (scores.macro_f1, [0, 0, 2], [0, 0, 0], 0.4),  # And one that is never expected.
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
        (scores.r2, [1, 2, 3], [1, 2, 3], 1.0),
        (scores.r2, [2, 2, 2], [1, 2, 3], 0.0),  # As good as their mean.
        (scores.r2, [3, 2, 1], [1, 2, 3], -3.0),
        (scores.r2, [1, 2], [2, 2], 0.0),
        (scores.r2, [2, 2], [2, 2], 1.0),
        (scores.mean_absolute_error, [1, 2, 4], [2, 2, 2], 1.0),
    ],
)
def test_metrics_of_edge_cases(metric, predicted, expected, value):
    found = metric(np.array(predicted), np.array(expected))
    assert isinstance(found, float) and found == pytest.approx(value, abs=1e-12)


def test_ranking_metrics_equal_their_definitions():
    """Over pairs of examples, and over thresholds; scores of few values have many ties."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        count = int(rng.integers(2, 30))
        margins = rng.integers(0, 6, count).astype(np.float64)
        is_positive = rng.random(count) < 0.4
        if is_positive.all() or not is_positive.any():
            continue
        gaps = margins[is_positive][:, None] - margins[~is_positive]
        wins = np.mean((gaps > 0) + 0.5 * (gaps == 0))
        assert scores.roc_auc(margins, is_positive) == pytest.approx(wins, abs=1e-12)
        precisions = [is_positive[margins >= each].mean() for each in margins[is_positive]]
        found = scores.average_precision(margins, is_positive)
        assert found == pytest.approx(np.mean(precisions), abs=1e-12)


@pytest.mark.parametrize(("classes", "auc", "precision"), [([1, 1], 0.5, 1.0), ([0, 0], 0.5, 0.0)])
def test_ranking_metrics_of_a_single_class(classes, auc, precision):
    margins = np.array([1.0, 2.0])
    assert scores.roc_auc(margins, classes) == auc
    assert scores.average_precision(margins, classes) == precision


def test_class_table_has_the_scores_and_confusions_of_each_label():
    one_hot = np.eye(3, dtype=bool)
    table = scores.class_table(one_hot[[0, 0, 1, 1, 0]], one_hot[[0, 0, 0, 1, 1]], ("a", "b", "c"))
    assert table == [
        ("label", "examples", "precision", "recall", "f1", "a", "b", "c"),
        ("a", 3, 0.6667, 0.6667, 0.6667, 2, 1, 0),
        ("b", 2, 0.5, 0.5, 0.5, 1, 1, 0),
        ("c", 0, 0.0, 0.0, 0.0, 0, 0, 0),  # Neither expected nor predicted.
    ]


def test_class_table_of_several_labels_counts_each_label_alone():
    """No label takes the place of another, so that there is no confusion matrix."""
    several = np.array([[1, 1], [0, 1]], bool), np.array([[1, 0], [1, 1]], bool)
    assert scores.class_table(*several, ("a", "b"), multi_label=True) == [
        ("label", "examples", "precision", "recall", "f1", "predicted", "correct"),
        ("a", 2, 1.0, 0.5, 0.6667, 1, 1),
        ("b", 1, 0.5, 1.0, 0.6667, 2, 1),
    ]


@pytest.mark.parametrize("multi_label", [False, True])
def test_class_table_of_a_thousand_labels_equals_counting_one_by_one(multi_label):
    rng, num_labels = np.random.default_rng(0), 1000
    labels = list(map(str, range(num_labels)))
    classes = rng.integers(0, num_labels, (2, 4000)) // rng.integers(1, 300, (2, 4000))
    predicted, expected = (
        scipy.sparse.coo_array(
            (np.ones(4000, bool), (np.arange(4000), each)), shape=(4000, num_labels)
        ).toarray()
        for each in classes
    )
    if multi_label:
        predicted |= expected & (rng.random(expected.shape) < 0.5)
        expected |= rng.random(expected.shape) < 0.01
    header, *rows = scores.class_table(predicted, expected, labels, multi_label)
    assert len(header) == (7 if multi_label else 6) == len(rows[0])
    for index in range(num_labels):
        of_label = [each[:, index] for each in (predicted, expected)]
        both = int(np.sum(of_label[0] & of_label[1]))
        num_predicted, num_expected = (int(each.sum()) for each in of_label)
        precision = both / num_predicted if num_predicted else 0.0
        recall = both / num_expected if num_expected else 0.0
        f1 = 2 * both / (num_predicted + num_expected) if num_predicted + num_expected else 0.0
        assert rows[index][:2] == (labels[index], num_expected)
        assert rows[index][2:5] == pytest.approx((precision, recall, f1), abs=5.1e-5)
        if multi_label:
            assert rows[index][5:] == (num_predicted, both)
            continue
        wrong = collections.Counter(map(int, classes[0][of_label[1]]))
        del wrong[index]
        best = sorted(wrong.items(), key=lambda pair: (-pair[1], pair[0]))[:5]
        assert rows[index][5] == ", ".join(f"{label} ({count})" for label, count in best)


def test_f1_is_of_the_given_class():
    predicted, expected = np.array([0, 0, 2, 1]), np.array([0, 2, 2, 0])
    assert [scores.f1(predicted, expected, each) for each in range(3)] == [0.5, 0.0, 2 / 3]
