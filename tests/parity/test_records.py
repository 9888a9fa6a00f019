"""DataFrames of pandas and polars, and `datasets`, against the same examples as dicts."""

import math

import datasets
import jax
import numpy as np
import pandas
import polars

import bert_jax
from bert_jax.configs.finetune.text_classification import get_config
from bert_jax.tasks import tables, text_classification
from bert_jax.tasks.records import iterate_records
from tests.helpers.corpora import WORDS, write_vocabulary
from tests.helpers.models import write_weights

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


def test_columns_of_labels_in_frames_and_datasets_are_those_of_a_csv(tmp_path):
    rows = [
        {"text": "the river", "red": True, "blue": 0},
        {"text": "a king", "red": False, "blue": 1},
        {"text": "war", "red": False, "blue": 0},
    ]
    data = get_config().data
    data.label_columns = ("red", "blue")
    pandas.DataFrame(rows).to_csv(tmp_path / "train.csv", index=False)
    with_missing = pandas.DataFrame([*rows, {"text": "a town"}])  # Floats, and NaN.

    def labels_of(source):
        records = text_classification.read_records(source, "test", data, {})
        return [(record.columns["text"], record.labels) for record in records]

    expected = labels_of(str(tmp_path / "train.csv"))
    assert [labels for _, labels in expected] == [("red",), ("blue",), ()]
    dataset = datasets.Dataset.from_list(rows)
    frames = pandas.DataFrame(rows), pandas.DataFrame(rows).convert_dtypes(), polars.DataFrame(rows)
    for number, frame in enumerate((*frames, dataset, with_missing)):
        assert labels_of(frame)[:3] == expected
        # As `bert_jax.fit` does.
        path = tmp_path / f"{number}.jsonl"
        tables.write_json_lines(path, (values for values, _ in tables.check_objects(frame)))
        assert labels_of(str(path))[:3] == expected
    assert labels_of(with_missing)[3:] == [("a town", None)]
    dataset.save_to_disk(tmp_path / "set")
    assert labels_of(f"hub:{tmp_path / 'set'}") == expected


def test_fit_of_frames_a_dataset_and_a_file_gives_the_same_bits(tmp_path):
    write_weights(tmp_path / "weights", write_vocabulary(tmp_path / "vocab.txt"))
    rows = [
        {"text": f"the {word} {WORDS[-number]}", "label": "ab"[number % 2]}
        for number, word in enumerate(WORDS)
    ]
    frame = pandas.DataFrame(rows)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    forms = {
        "file": tmp_path / "rows.csv",
        "pandas": frame,
        "polars": polars.DataFrame(rows),
        "dataset": datasets.Dataset.from_list(rows),
    }
    fields = {"max_seq_length": 8, "batch_size": 8, "num_epochs": 1.0, "learning_rate": 1e-3}
    runs = {
        name: bert_jax.fit(tmp_path / "weights", data, data, workdir=tmp_path / name, **fields)
        for name, data in forms.items()
    }
    expected, scores = runs.pop("file")
    for model, result in runs.values():
        assert result["dev"] == scores["dev"]
        jax.tree.map(np.testing.assert_array_equal, model.params, expected.params)
