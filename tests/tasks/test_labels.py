"""Labels: numbers in any spelling, and texts."""

import numpy as np
import pytest

from bert_jax.tasks.labels import find_labels, match_labels, read_labels
from bert_jax.tasks.tables import Record, read_table


def records(*labels):
    return [Record({"label": label}, f"x.csv, line {n}") for n, label in enumerate(labels, 2)]


def classes(*texts):
    """Returns the labels found in `texts`, and the index of each text's."""
    labels = find_labels(records(*texts), "label", ())
    return labels, read_labels(records(*texts), "label", labels, required=True)


@pytest.mark.parametrize(
    ("texts", "labels", "indices"),
    [
        ("0 1.0 1", "0 1", [0, 1, 1]),
        ("0.0 1.0", "0 1", [0, 1]),
        ("0 1 1.0 01 1e0 10E-1 +1 1. 1.00", "0 1", [0] + [1] * 8),
        ("-1 -1.0 0 -0.0 1", "-1 0 1", [0, 0, 1, 1, 2]),
        ("0.5 .5 0.50 1.5", "0.5 1.5", [0, 0, 0, 1]),
        ("100 1e2 200", "100 200", [0, 0, 1]),
        ("01 02 10", "01 02 10", [0, 1, 2]),  # Codes keep their zeros.
        ("True true FALSE", "FALSE True", [1, 1, 0]),
        ("1 true 0 False", "0 1", [1, 1, 0, 0]),
        ("12345678901234567890 12345678901234567891", None, [0, 1]),
        # Labels that are not all numbers are texts.
        ("1 1.0 beta", "1 1.0 beta", [0, 1, 2]),
        ("True true mixed", "True mixed true", [0, 2, 1]),
        ("1 nan 1.0", "1 1.0 nan", [0, 2, 1]),
        ("1_0 10", "10 1_0", [1, 0]),
        ("1e999999999 1e1", "1e1 1e999999999", [1, 0]),
    ],
)
def test_equal_numbers_are_one_label(texts, labels, indices):
    labels = labels or texts
    assert classes(*texts.split()) == (tuple(labels.split()), indices)


def test_white_space_around_a_number_is_ignored():
    assert classes(" 1", "1", "0 ") == (("0", "1"), [1, 1, 0])
    with pytest.raises(ValueError, match=r"x\.csv, line 2: .* ' a'"):
        classes(" a", "1", "0 ")


def test_labels_written_in_several_ways_are_logged(caplog):
    with caplog.at_level("INFO"):
        classes("0", "1", "1.0", "2")
    (record,) = caplog.records
    message = "x.csv, column 'label': equal numbers are one label: '1' = '1.0'"
    assert record.getMessage() == message


@pytest.mark.parametrize("labels", [("0", "1"), ("0.0", "1.0"), ("false", "true"), ("00", "01")])
@pytest.mark.parametrize("text", ["1", "1.0", "True", " 1", "01", "1e0"])
def test_labels_of_a_head_match_a_file_with_other_spellings(labels, text):
    assert read_labels(records(text), "label", labels, required=True) == [1]


def test_given_labels_that_are_equal_numbers_are_texts():
    assert match_labels(["1.1", "1.10", "1.100"], ("1.1", "1.10"))["1.10"] == "1.10"
    with pytest.raises(ValueError, match=r"label '1\.100'"):
        read_labels(records("1.100"), "label", ("1.1", "1.10"), required=True)


def test_expected_labels_that_hold_commas_are_quoted():
    with pytest.raises(ValueError, match=r"label 'law', expected one of 'R&D, law', 'tax'$"):
        read_labels(records("law"), "label", ("R&D, law", "tax"), required=True)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_a_number_is_the_same_label_in_every_kind_of_file(tmp_path, suffix):
    path = tmp_path / f"table.{suffix}"
    if suffix == "jsonl":
        values = ("0", "1.0", "1", '"1"', '"1.0"', "true")
        path.write_text("".join(f'{{"text": "a", "label": {each}}}\n' for each in values))
    else:
        separator = "," if suffix == "csv" else "\t"
        rows = [
            ("text", "label"),
            *(("a", each) for each in ("0", "1.0", "1", " 1", "1e0", "true")),
        ]
        path.write_text("".join(separator.join(row) + "\n" for row in rows))
    table = read_table(path, ("text", "label"))
    assert find_labels(table, "label", ()) == ("0", "1")
    assert read_labels(table, "label", ("0", "1"), required=True) == [0, 1, 1, 1, 1, 1]


def test_each_of_several_labels_may_be_a_number():
    several = [Record({}, "line 2", labels=("1.0", "2")), Record({}, "line 3", labels=("3",))]
    first, second = read_labels(several, "label", ("1", "2", "3"), True, multi_label=True)
    assert first.tolist() == [1, 1, 0] and second.tolist() == [0, 0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_classes_that_are_numbers_are_in_numeric_order(seed):
    """As of np.unique, which sorts the integer labels of scikit-learn and transformers."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(-30, 3000, 40)
    labels, indices = classes(*map(str, numbers))
    expected, inverse = np.unique(numbers, return_inverse=True)
    assert labels == tuple(map(str, expected)) and indices == inverse.tolist()


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ("10 9 1.5 -2", "-2 1.5 9 10"),
        ("1e1 9 0.5", "0.5 9 10"),
        ("010 009 11", "009 010 11"),
        ("true false", "false true"),
        ("9 10 x", "10 9 x"),  # One is no number: texts.
        ("class10 class9", "class10 class9"),
    ],
)
def test_the_order_of_the_classes(texts, expected):
    assert classes(*texts.split())[0] == tuple(expected.split())
