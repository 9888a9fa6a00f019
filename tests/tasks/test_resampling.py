"""Intervals by the bootstrap, and McNemar's exact test."""

import fractions
import math

import numpy as np
import pytest

from bert_jax.tasks import scores
from bert_jax.tasks.resampling import bootstrap_interval, mcnemar_exact


def test_interval_of_a_mean_is_that_of_the_normal_distribution():
    values = np.random.default_rng(0).normal(size=400)
    low, high = bootstrap_interval(lambda rows: values[rows].mean(), 400)
    half = 1.96 * values.std() / math.sqrt(400)
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)
    assert (low, high) == bootstrap_interval(lambda rows: values[rows].mean(), 400)
    assert (low, high) != bootstrap_interval(lambda rows: values[rows].mean(), 400, seed=1)


def test_level_and_several_scores_of_the_same_samples():
    rng = np.random.default_rng(0)
    predicted, expected = rng.integers(3, size=(2, 60))

    def score(rows):
        pair = predicted[rows], expected[rows]
        return np.array([scores.accuracy(*pair), scores.macro_f1(*pair)])

    wide, narrow = (bootstrap_interval(score, 60, level, 200) for level in (0.99, 0.5))
    assert (wide[0] < narrow[0]).all() and (narrow[0] < narrow[1]).all()
    assert (narrow[1] < wide[1]).all()
    alone = bootstrap_interval(lambda rows: score(rows)[1], 60, 0.5, 200)
    assert alone == (narrow[0][1], narrow[1][1])


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (5, 5), (2, 9), (9, 2), (0, 12)])
def test_p_value_is_the_exact_two_sided_one_of_a_fair_coin(first, second):
    right = np.array([(1, 0)] * first + [(0, 1)] * second + [(1, 1), (0, 0)] * 4, bool).T
    total, fewer = first + second, min(first, second)
    tail = sum(math.comb(total, k) for k in range(fewer + 1))
    expected = min(1, fractions.Fraction(2 * tail, 2**total))
    assert mcnemar_exact(*right) == (first, second, pytest.approx(float(expected), rel=1e-12))
