"""Computes scores of the similarities of text pairs and triplets."""

import numpy as np

from bert_jax.tasks import scores


def correlation_scores(similarities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns the correlations of similarities and labels, both `[pairs]`: Spearman's first.

    Spearman's is the score of the STS benchmarks, since it does not depend on the scale.
    """
    return {
        "spearman": scores.spearman(similarities, labels),
        "pearson": scores.pearson(similarities, labels),
    }


def pair_scores(similarities: np.ndarray, is_positive: np.ndarray) -> dict[str, float]:
    """Returns the scores of finding positive pairs by a threshold on the similarity.

    A pair is predicted as positive if its similarity is at least the threshold. The thresholds are
    the best ones for these pairs: `accuracy` and `f1` are the largest that any reaches, `precision`
    and `recall` those at the threshold of `f1`. `average_precision` needs no threshold. Of equally
    good thresholds the highest is returned.

    Args:
      similarities: float `[pairs]`.
      is_positive: bool `[pairs]`, with at least one positive.
    """
    similarities = np.asarray(similarities, np.float64)
    is_positive = np.asarray(is_positive, bool)
    order = np.argsort(-similarities, kind="stable")
    ranked = similarities[order]
    # Equal similarities are on one side of any threshold. The first threshold is above all.
    ends = np.append(np.flatnonzero(np.diff(ranked)), len(order) - 1)
    thresholds = np.append(np.nextafter(ranked[0], np.inf), ranked[ends])
    num_predicted = np.append(0, ends + 1)
    correct = np.append(0, np.cumsum(is_positive[order])[ends])
    num_positive, count = int(is_positive.sum()), len(order)
    accuracies = (count - num_positive - num_predicted + 2 * correct) / count
    f1 = 2 * correct / (num_predicted + num_positive)
    best, best_f1 = int(np.argmax(accuracies)), int(np.argmax(f1))
    return {
        "average_precision": scores.average_precision(similarities, is_positive),
        "accuracy": float(accuracies[best]),
        "accuracy_threshold": float(thresholds[best]),
        "f1": float(f1[best_f1]),
        "f1_threshold": float(thresholds[best_f1]),
        "precision": float(correct[best_f1] / num_predicted[best_f1]),
        "recall": float(correct[best_f1] / num_positive),
    }


def triplet_accuracy(positive: np.ndarray, negative: np.ndarray) -> float:
    """Returns how often the anchor is more similar to its positive than to its negative.

    Both are similarities with the anchor, `[triplets]`. Equal ones are not correct.
    """
    return float(np.mean(np.asarray(positive) > np.asarray(negative)))
