"""Scores of pairs against all thresholds one by one, and of triplets."""

import numpy as np
import pytest

from bert_jax.tasks.similarity_scores import correlation_scores, pair_scores, triplet_accuracy


@pytest.mark.parametrize("seed", range(20))
def test_pair_scores_are_the_best_of_all_thresholds(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 30))
    similarities = np.round(rng.normal(size=size), int(rng.integers(0, 3)))
    labels = rng.random(size) < 0.4
    labels[rng.integers(size)] = True
    found = pair_scores(similarities, labels)
    accuracies, f1 = [np.mean(~labels)], [0.0]
    for threshold in np.unique(similarities):
        predicted = similarities >= threshold
        accuracies.append(np.mean(predicted == labels))
        f1.append(2 * np.sum(predicted & labels) / (predicted.sum() + labels.sum()))
    assert (found["accuracy"], found["f1"]) == pytest.approx((max(accuracies), max(f1)))
    # The thresholds reach the scores.
    at_accuracy = similarities >= found["accuracy_threshold"]
    assert np.mean(at_accuracy == labels) == pytest.approx(found["accuracy"])
    predicted = similarities >= found["f1_threshold"]
    assert found["precision"] == pytest.approx(np.mean(labels[predicted]))
    assert found["recall"] == pytest.approx(np.mean(predicted[labels]))


def test_correlations_and_triplets():
    labels = np.arange(5.0)
    assert correlation_scores(np.exp(labels), labels)["spearman"] == pytest.approx(1)
    assert correlation_scores(1 - 2 * labels, labels)["pearson"] == pytest.approx(-1)
    assert triplet_accuracy(np.array([0.5, 0.2, 0.3]), np.array([0.4, 0.2, 0.9])) == 1 / 3
