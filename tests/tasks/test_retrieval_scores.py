"""Ranks and their means against a plain sort, with ties and any number of relevant passages."""

import numpy as np
import pytest

from bert_jax.tasks.retrieval_scores import find_ranks, rank_scores


def ranks_by_sorting(scores, relevant, listed):
    """Ranks of the relevant passages: sorts (score, is not relevant) pairs."""
    order = sorted(listed, key=lambda index: (-scores[index], index in relevant))
    return sorted(order.index(index) + 1 if index in order else np.inf for index in relevant)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_and_scores_equal_a_sort(seed):
    rng = np.random.default_rng(seed)
    found, expected = [], []
    for _ in range(20):
        size = int(rng.integers(1, 40))
        scores = np.round(rng.normal(size=size), int(rng.integers(0, 3))).astype(np.float32)
        relevant = rng.permutation(size)[: int(rng.integers(1, size + 1))].tolist()
        listed = rng.permutation(size)[: int(rng.integers(0, size + 1))].tolist()
        for each in (None, listed):
            ranks = find_ranks(scores, relevant, each)
            of_sort = ranks_by_sorting(scores, relevant, range(size) if each is None else each)
            assert sorted(ranks) == of_sort
            # A passage with a higher score has a better rank.
            better = scores[relevant][:, None] > scores[relevant]
            assert not np.any(better & (ranks[:, None] > ranks) & np.isfinite(ranks[:, None]))
            found.append(ranks)
            expected.append(of_sort)
    means = {
        "mrr_at_10": np.mean([1 / each[0] if each[0] <= 10 else 0 for each in expected]),
        "accuracy_at_1": np.mean([each[0] == 1 for each in expected]),
        "accuracy_at_10": np.mean([each[0] <= 10 for each in expected]),
        "recall_at_1": np.mean([(each[0] == 1) / len(each) for each in expected]),
        "recall_at_10": np.mean(
            [sum(rank <= 10 for rank in each) / len(each) for each in expected]
        ),
    }
    assert rank_scores(found) == pytest.approx(means)


def test_equal_scores_give_the_last_rank():
    assert find_ranks(np.zeros(3), [0]).tolist() == [3]
    assert sorted(find_ranks(np.zeros(4), [3, 0])) == [3, 4]
    scores = rank_scores([np.array([1.0]), np.array([2.0]), np.array([11.0])])
    assert scores == pytest.approx(
        {
            "mrr_at_10": 0.5,
            "accuracy_at_1": 1 / 3,
            "accuracy_at_10": 2 / 3,
            "recall_at_1": 1 / 3,
            "recall_at_10": 2 / 3,
        }
    )
