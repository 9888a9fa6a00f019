"""The table of encoders in the documentation says what is so."""

import pathlib

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.parity.encoders import ENCODERS, outcome

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "encoders.md"


@pytest.mark.parametrize("name", ENCODERS)
def test_row_of_the_table_is_true(name):
    rows = PAGE.read_text(encoding="utf-8").splitlines()
    expected = f"| {name} | {ENCODERS[name]['model_type']} | {outcome(ENCODERS[name])} |"
    assert expected in rows
