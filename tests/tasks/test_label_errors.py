"""Confident learning from its definition; its model is tested in tests/parity."""

import numpy as np
import pytest

from bert_jax.tasks.label_errors import NUM_FOLDS, _fold_of_each, rank_label_errors


def expected_errors(probabilities, labels):
    """Equation 1 of Northcutt et al. (2021), example by example."""
    num_classes = len(probabilities[0])
    thresholds = []
    for j in range(num_classes):
        own = [p[j] for p, label in zip(probabilities, labels, strict=True) if label == j]
        thresholds.append(sum(own) / len(own) if own else float("inf"))
    errors = []
    for p, label in zip(probabilities, labels, strict=True):
        confident = [j for j in range(num_classes) if p[j] >= thresholds[j]]
        errors.append(bool(confident) and max(confident, key=lambda j: p[j]) != label)
    return errors


@pytest.mark.parametrize("num_classes", [2, 5])
def test_errors_are_those_of_the_confident_joint_and_come_first(num_classes):
    rng = np.random.default_rng(0)
    labels = rng.integers(num_classes, size=200)
    labels[labels == 4] = 3  # A class without examples.
    logits = 2 * rng.normal(size=(200, num_classes)) + 2 * np.eye(num_classes)[labels]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    order, is_error, other = rank_label_errors(probabilities, labels)
    assert is_error.tolist() == expected_errors(probabilities.tolist(), labels.tolist())
    assert 0 < is_error.sum() < 200 and sorted(order) == list(range(200))
    assert is_error[order[: is_error.sum()]].all()
    margins = []
    for p, label, best in zip(probabilities.tolist(), labels, other, strict=True):
        rest = [value for j, value in enumerate(p) if j != label]
        assert p[best] == max(rest) and best != label
        margins.append(p[label] - max(rest))
    for part in np.split(order, [is_error.sum()]):
        assert (np.diff(np.array(margins)[part]) >= 0).all()


def test_each_fold_has_its_share_of_every_class():
    classes = np.repeat([0, 1, 2], [50, 23, 2])
    folds = _fold_of_each(classes, seed=0)
    for index, size in enumerate((50, 23, 2)):
        counts = np.bincount(folds[classes == index], minlength=NUM_FOLDS)
        assert counts.max() - counts.min() <= 1 and counts.sum() == size
    assert (folds != _fold_of_each(classes, seed=1)).any()
