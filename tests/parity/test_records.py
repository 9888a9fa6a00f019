"""DataFrames of pandas and polars, and `datasets`, against the same examples as dicts."""

import math

import datasets
import pandas
import polars

from bert_jax.tasks.records import iterate_records

EXAMPLES = [
    {"text": "the river", "label": "b", "score": 1.5},
    {"text": None, "label": "a", "score": None},
]


def test_frames_and_datasets_hold_the_same_examples():
    of_pandas = pandas.DataFrame(EXAMPLES)
    assert math.isnan(of_pandas["score"][1])  # As pandas marks missing numbers.
    classes = datasets.Features(
        text=datasets.Value("string"),
        label=datasets.ClassLabel(names=["a", "b"]),
        score=datasets.Value("float64"),
    )
    for data in (
        of_pandas,
        of_pandas.convert_dtypes(),
        polars.DataFrame(EXAMPLES),
        datasets.Dataset.from_list(EXAMPLES),
        datasets.Dataset.from_list(EXAMPLES, features=classes),
    ):
        assert list(iterate_records(data)) == EXAMPLES


def test_hidden_class_of_a_dataset_is_unknown():
    features = datasets.Features(label=datasets.ClassLabel(names=["a", "b"]))
    data = datasets.Dataset.from_dict({"label": [0, -1]}, features=features)
    assert list(iterate_records(data)) == [{"label": "a"}, {"label": None}]


def test_classes_in_lists_are_given_by_name():
    features = datasets.Features(tags=datasets.List(datasets.ClassLabel(names=["O", "B"])))
    data = datasets.Dataset.from_dict({"tags": [[0, 1], []]}, features=features)
    assert list(iterate_records(data)) == [{"tags": ["O", "B"]}, {"tags": []}]
