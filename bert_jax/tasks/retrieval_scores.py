"""Computes the MRR, accuracy and recall of rankings, for queries with any number of answers."""

from collections.abc import Sequence

import numpy as np

TOP = 10
"""The last rank at which a passage counts as found."""


def find_ranks(
    scores: np.ndarray, relevant: Sequence[int], listed: Sequence[int] | None = None
) -> np.ndarray:
    """Returns the rank, from 1, of each relevant passage in the order of descending scores.

    In a tie, passages that are not relevant come first.

    Args:
      scores: `[passages]`, of one query.
      relevant: distinct indices of the passages that answer it.
      listed: distinct indices of the passages to rank; None: all. The others have rank infinity.

    Returns:
      float64 `[relevant]`, in the order of `relevant`.
    """
    relevant = np.asarray(relevant, int)
    if listed is None:
        is_listed, wrong = np.ones(len(relevant), bool), np.delete(scores, relevant)
    else:
        listed = np.asarray(listed, int)
        is_listed, wrong = np.isin(relevant, listed), scores[np.setdiff1d(listed, relevant)]
    own = scores[relevant]
    order = np.argsort(-own, kind="stable")
    order = order[is_listed[order]]
    ranks = np.full(len(relevant), np.inf)
    num_wrong_above = [np.sum(wrong >= score) for score in own[order]]
    ranks[order] = np.arange(1, len(order) + 1) + num_wrong_above
    return ranks


def rank_scores(ranks: Sequence[np.ndarray]) -> dict[str, float]:
    """Computes means over queries, each given by the ranks of all its relevant passages.

    They are defined as in sentence-transformers' InformationRetrievalEvaluator: `mrr_at_k` is the
    reciprocal rank of the first relevant passage, 0 beyond k; `accuracy_at_k` is 1 if any of them
    is among the first k; `recall_at_k` is the share of them that are. For queries with a single
    relevant passage, accuracy and recall are equal.
    """
    first = np.array([np.min(each) for each in ranks])
    result = {f"mrr_at_{TOP}": float(np.mean(np.where(first <= TOP, 1 / first, 0)))}
    result |= {f"accuracy_at_{k}": float(np.mean(first <= k)) for k in (1, TOP)}
    for k in (1, TOP):
        shares = [np.mean(np.asarray(each) <= k) for each in ranks]
        result[f"recall_at_{k}"] = float(np.mean(shares))
    return result
