"""Every head holds what the suite of heads demands."""

import pytest

from bert_jax.model.heads import HEADS
from tests.suites import heads

# Of a text, and of each token. The exhaustive tier has all heads.
SLOW_ON_MODERNBERT = ("classification", "tagging")


@pytest.mark.parametrize("holds", heads.HEAD)
@pytest.mark.parametrize("case", heads.CASES.values(), ids=heads.CASES.keys())
def test_head(case, holds, tmp_path):
    holds(case, tmp_path)


ON_MODERNBERT = [
    pytest.param(case, id=name, marks=() if name in SLOW_ON_MODERNBERT else pytest.mark.exhaustive)
    for name, case in heads.CASES.items()
]


@pytest.mark.slow
@pytest.mark.parametrize("holds", heads.HEAD)
@pytest.mark.parametrize("case", ON_MODERNBERT)
def test_head_on_modernbert(case, holds, tmp_path):
    holds(heads.on_modernbert(case), tmp_path)


def test_every_head_has_a_case():
    assert {case.settings["task"] for case in heads.CASES.values()} == HEADS.keys()
