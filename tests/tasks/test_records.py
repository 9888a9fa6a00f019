"""Examples in memory: dicts, and tables of Arrow; tests/parity/test_records.py has DataFrames."""

import numpy as np
import pyarrow
import pytest

from bert_jax.tasks.records import iterate_records


def test_values_of_numpy_become_those_of_python():
    examples = ({"text": f"text {n}", "label": np.int64(n), "score": np.float32(n)} for n in (1, 2))
    records = list(iterate_records(examples))
    assert records[0] == {"text": "text 1", "label": 1, "score": 1.0}
    assert [type(value) for value in records[1].values()] == [str, int, float]
    assert list(iterate_records([{"tags": np.arange(2)}])) == [{"tags": [0, 1]}]


def test_rows_of_a_table_of_arrow_are_dicts():
    table = pyarrow.table({"text": ["a", None], "label": [1, 2]})
    expected = [{"text": "a", "label": 1}, {"text": None, "label": 2}]
    assert list(iterate_records(table)) == expected


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ({"text": ["a"], "label": [1]}, "dict"),
        ("train.csv", "str"),
        ([("a", 1)], "example 0 .*tuple"),
        ([{"text": "a"}, "b"], "example 1 .*str"),
    ],
    ids=str,
)
def test_other_examples_are_refused(examples, message):
    with pytest.raises(TypeError, match=message):
        list(iterate_records(examples))
