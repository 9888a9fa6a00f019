"""Every head holds what the suite of heads demands."""

import pytest

from bert_jax.model.heads import HEADS
from tests.suites import heads

# The exhaustive tier has all heads on all architectures.
IN_SLOW_TIER = "tagging"
SLOW = [each for each in heads.HEAD if each.marks]
FAST = [each for each in heads.HEAD if not each.marks]


@pytest.mark.parametrize("holds", FAST)
@pytest.mark.parametrize("case", heads.CASES.values(), ids=heads.CASES.keys())
def test_head(case, holds, tmp_path):
    holds(case, tmp_path)


@pytest.mark.parametrize("holds", SLOW)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.exhaustive] * (name != IN_SLOW_TIER))
        for name, case in heads.CASES.items()
    ],
)
def test_training_with_a_head(case, holds, tmp_path):
    holds(case, tmp_path)


ON_OTHERS = [
    pytest.param(heads.on_architecture(case, architecture), id=f"{name} on {architecture}")
    for name, case in heads.CASES.items()
    for architecture in heads.ARCHITECTURES
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("holds", heads.HEAD)
@pytest.mark.parametrize("case", ON_OTHERS)
def test_head_on_other_architectures(case, holds, tmp_path):
    holds(case, tmp_path)


def test_every_head_has_a_case():
    assert {case.settings["task"] for case in heads.CASES.values()} == HEADS.keys()
