"""The metrics against scikit-learn and SciPy, over 1,000 cases each (`make parity`)."""

import warnings

import numpy as np
import pytest

from bert_jax.tasks import scores

CASES = 1000


def classes(rng: np.random.Generator, binary: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns random predicted and expected classes, some skewed, constant or equal."""
    size, count = int(rng.integers(1, 200)), 2 if binary else int(rng.integers(1, 9))
    predicted, expected = (
        rng.choice(count, size, p=rng.dirichlet(np.full(count, rng.choice([0.1, 1, 10]))))
        for _ in range(2)
    )
    case = rng.integers(6)
    if case == 0:
        predicted[:] = predicted[0]
    elif case == 1:
        expected[:] = expected[0]
    elif case == 2:
        predicted = expected.copy()
    return predicted, expected


def values(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns predicted (float32, any scale) and expected values, with ties, neither constant."""
    size = int(rng.integers(2, 200))
    expected = np.round(rng.uniform(0, 5, size), int(rng.integers(0, 3)))
    predicted = rng.choice([0.0, 1.0, -1.0]) * expected + rng.normal(0, 1, size)
    predicted = np.round(predicted, int(rng.integers(0, 6))) * 10.0 ** rng.integers(-6, 7)
    predicted = predicted.astype(np.float32).astype(np.float64)
    if np.ptp(predicted) == 0 or np.ptp(expected) == 0:
        return values(rng)
    return predicted, expected


@pytest.mark.parametrize("name", ["accuracy", "f1", "macro_f1", "matthews"])
def test_classification_metrics_equal_scikit_learn(name):
    metrics = pytest.importorskip("sklearn.metrics")
    reference = {
        "accuracy": metrics.accuracy_score,
        "f1": lambda expected, predicted: metrics.f1_score(expected, predicted, zero_division=0),
        "macro_f1": lambda expected, predicted: metrics.f1_score(
            expected, predicted, average="macro", zero_division=0
        ),
        "matthews": metrics.matthews_corrcoef,
    }[name]
    rng, worst = np.random.default_rng(0), 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # For undefined values, which are 0 in both.
        for _ in range(CASES):
            predicted, expected = classes(rng, binary=name == "f1")
            actual = getattr(scores, name)(predicted, expected)
            worst = max(worst, abs(actual - reference(expected, predicted)))
    print(f"{name}: at most {worst:.1e} apart in {CASES:,} cases")
    assert worst < 1e-12


@pytest.mark.parametrize("name", ["roc_auc", "average_precision"])
def test_ranking_metrics_equal_scikit_learn(name):
    metrics = pytest.importorskip("sklearn.metrics")
    rng, worst = np.random.default_rng(0), 0.0
    reference = getattr(
        metrics, "roc_auc_score" if name == "roc_auc" else "average_precision_score"
    )
    for _ in range(CASES):
        margins, _ = values(rng)
        is_positive = rng.random(len(margins)) < rng.random()
        if is_positive.any() and not is_positive.all():  # Undefined otherwise.
            actual = getattr(scores, name)(margins, is_positive)
            worst = max(worst, abs(actual - reference(is_positive, margins)))
    print(f"{name}: at most {worst:.1e} apart in {CASES:,} cases")
    assert worst < 1e-12


@pytest.mark.parametrize("multi_label", [False, True])
def test_class_table_equals_scikit_learn(multi_label):
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    for _ in range(CASES):
        if multi_label:
            predicted, expected = rng.random((2, int(rng.integers(1, 99)), 5)) < rng.random()
        else:
            numbers = classes(rng, binary=False)
            predicted, expected = (np.eye(8, dtype=bool)[each] for each in numbers)
        rows = scores.class_table(predicted, expected, range(predicted.shape[1]), multi_label)[1:]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # For labels that are never expected.
            reference = metrics.precision_recall_fscore_support(
                expected, predicted, zero_division=0
            )
        actual = np.array([row[1:5] for row in rows])
        np.testing.assert_allclose(actual[:, 0], reference[3])
        np.testing.assert_allclose(actual[:, 1:], np.transpose(reference[:3]), atol=5.1e-5)
        if multi_label:
            matrices = metrics.multilabel_confusion_matrix(expected, predicted)
            counts = np.stack([matrices[:, :, 1].sum(1), matrices[:, 1, 1]], axis=1)
            np.testing.assert_array_equal([row[5:] for row in rows], counts)
        else:
            matrix = metrics.confusion_matrix(*reversed(numbers), labels=range(8))
            np.testing.assert_array_equal([row[5:] for row in rows], matrix)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("r2", "r2_score"),
        ("mean_absolute_error", "mean_absolute_error"),
        ("mean_squared_error", "mean_squared_error"),
    ],
)
def test_scores_of_values_equal_scikit_learn(name, reference):
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    for _ in range(CASES):
        predicted, expected = values(rng)
        if len(expected) > 1:
            actual = getattr(scores, name)(predicted, expected)
            assert actual == pytest.approx(getattr(metrics, reference)(expected, predicted))


@pytest.mark.parametrize("name", ["pearson", "spearman"])
def test_correlations_equal_scipy(name):
    import scipy.stats

    rng, worst = np.random.default_rng(0), 0.0
    for _ in range(CASES):
        predicted, expected = values(rng)
        reference = getattr(scipy.stats, f"{name}r")(predicted, expected).statistic
        worst = max(worst, abs(getattr(scores, name)(predicted, expected) - reference))
    print(f"{name}: at most {worst:.1e} apart in {CASES:,} cases")
    assert worst < 1e-12
