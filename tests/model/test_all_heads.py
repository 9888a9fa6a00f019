"""Every head holds what the suite of heads demands."""

import pytest

from bert_jax.model.heads import HEADS
from tests.suites import heads


@pytest.mark.parametrize("holds", heads.HEAD)
@pytest.mark.parametrize("case", heads.CASES.values(), ids=heads.CASES.keys())
def test_head(case, holds, tmp_path):
    holds(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("holds", heads.HEAD)
@pytest.mark.parametrize("case", heads.CASES.values(), ids=heads.CASES.keys())
def test_head_on_modernbert(case, holds, tmp_path):
    holds(heads.on_modernbert(case), tmp_path)


def test_every_head_has_a_case():
    assert {case.settings["task"] for case in heads.CASES.values()} == HEADS.keys()
