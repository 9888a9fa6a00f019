"""SQuAD's scores equal the official scripts' scores on random cases."""

import math

import numpy as np
import pytest

from bert_jax.tasks.squad_scores import evaluate_v1, evaluate_v2
from tests.golden import make_squad_scores as golden


@pytest.mark.parametrize(
    ("name", "evaluate", "cases", "names"),
    [
        ("v1", evaluate_v1, golden.cases_v1, golden.V1),
        ("v2", evaluate_v2, lambda: golden.cases_v2(seed=3), golden.V2),
    ],
)
def test_scores_equal_the_official_ones_over_1000_cases(name, evaluate, cases, names):
    with np.load(golden.PATH) as file:
        expected = file[name]
    percent = np.array([1 if each.endswith("thresh") else 100 for each in names])
    found = [evaluate(*case) for case in cases()]
    assert {key for scores in found for key in scores} == set(names)
    rows = [[scores.get(each, math.nan) for each in names] for scores in found]
    np.testing.assert_allclose(rows * percent, expected, rtol=0, atol=1e-9)
