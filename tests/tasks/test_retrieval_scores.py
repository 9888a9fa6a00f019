"""Ranks, scores and intervals against plain sorts and sums, with ties and graded relevance."""

import math

import numpy as np
import pytest

from bert_jax.tasks.retrieval_scores import (
    best_indices,
    bootstrap_intervals,
    find_ranks,
    query_scores,
    rank_scores,
)


def ranks_by_sorting(scores, grade_of, listed):
    """Ranks of the relevant passages: sorts by score, the passages with lower grades first."""
    order = sorted(listed, key=lambda index: (-scores[index], grade_of.get(index, 0)))
    return {index: order.index(index) + 1 if index in order else np.inf for index in grade_of}


def scores_by_counting(rank_of, grade_of, k):
    """The definitions, in loops over the passages that are found."""
    found = sorted(rank for rank in rank_of.values() if rank <= k)
    gain = sum(grade_of[i] / math.log2(rank + 1) for i, rank in rank_of.items() if rank <= k)
    best = sorted(grade_of.values(), reverse=True)[:k]
    return {
        f"mrr_at_{k}": 1 / found[0] if found else 0,
        f"ndcg_at_{k}": gain / sum(each / math.log2(i + 2) for i, each in enumerate(best)),
        f"map_at_{k}": sum((i + 1) / rank for i, rank in enumerate(found)) / len(rank_of),
        f"accuracy_at_{k}": float(bool(found)),
        f"recall_at_{k}": len(found) / len(rank_of),
        f"precision_at_{k}": len(found) / k,
    }


@pytest.mark.parametrize("seed", range(10))
def test_ranks_and_scores_equal_sorts_and_sums(seed):
    rng = np.random.default_rng(seed)
    ranks, grades, expected = [], [], []
    for _ in range(20):
        size = int(rng.integers(1, 40))
        scores = np.round(rng.normal(size=size), int(rng.integers(0, 3))).astype(np.float32)
        relevant = rng.permutation(size)[: int(rng.integers(1, size + 1))].tolist()
        grade_of = {index: int(rng.integers(1, 4)) for index in relevant}
        listed = rng.permutation(size)[: int(rng.integers(0, size + 1))].tolist()
        for each in (None, listed):
            found = find_ranks(scores, relevant, each, list(grade_of.values()))
            rank_of = dict(zip(relevant, found, strict=True))
            own = ranks_by_sorting(scores, grade_of, range(size) if each is None else each)
            # Equal passages, of one score and one grade, may change places.
            keys = [(scores[index], grade_of[index]) for index in relevant]
            assert sorted(zip(keys, rank_of.values(), strict=True)) == sorted(
                zip(keys, own.values(), strict=True)
            )
            ranks.append(found)
            grades.append(np.array(list(grade_of.values())))
            expected.append([scores_by_counting(own, grade_of, k) for k in (1, 3, 10)])
    means = {
        name: np.mean([each[column][name] for each in expected])
        for column in range(3)
        for name in expected[0][column]
    }
    assert rank_scores(ranks, grades, (1, 3, 10)) == pytest.approx(means)


def test_equal_scores_give_the_last_rank():
    assert find_ranks(np.zeros(3), [0]).tolist() == [3]
    assert sorted(find_ranks(np.zeros(4), [3, 0])) == [3, 4]
    assert find_ranks(np.zeros(4), [3, 0], grades=[2, 1]).tolist() == [4, 3]
    scores = rank_scores([np.array([1.0]), np.array([2.0]), np.array([11.0])])
    assert scores["mrr_at_10"] == pytest.approx(0.5)
    assert scores["accuracy_at_1"] == scores["recall_at_1"] == pytest.approx(1 / 3)
    assert scores["accuracy_at_10"] == scores["recall_at_10"] == pytest.approx(2 / 3)
    assert scores["recall_at_100"] == 1


def test_intervals_cover_the_mean_and_shrink_with_the_number_of_queries():
    rng = np.random.default_rng(0)
    covered, widths = 0, {}
    for size in (50, 200):
        for _ in range(50):
            ranks = [np.array([rank]) for rank in rng.integers(1, 3, size).astype(float)]
            values = {"mrr_at_10": query_scores(ranks)["mrr_at_10"]}
            low, high = bootstrap_intervals(values, num_samples=200)["mrr_at_10"]
            covered += low <= 0.75 <= high  # The ranks are 1 and 2, equally often.
            widths[size] = high - low
    assert 0.9 <= covered / 100 <= 0.98
    # The standard error is 0.25 / sqrt(size).
    assert widths[50] == pytest.approx(2 * 1.96 * 0.25 / math.sqrt(50), rel=0.2)
    assert widths[200] == pytest.approx(2 * 1.96 * 0.25 / math.sqrt(200), rel=0.2)
    again = bootstrap_intervals(values, num_samples=200)
    assert again["mrr_at_10"] == (low, high)
    assert bootstrap_intervals(values, num_samples=200, seed=1)["mrr_at_10"] != (low, high)


@pytest.mark.parametrize("count", [1, 4, 10, 12])
def test_best_indices_are_those_of_a_stable_sort(count):
    scores = np.random.default_rng(count).integers(0, 4, 10).astype(np.float32)
    expected = np.argsort(-scores, kind="stable")[:count]
    np.testing.assert_array_equal(best_indices(scores, count), expected)
