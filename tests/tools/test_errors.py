"""The mistakes and slices of a run, from what it has written."""

import csv
import json
import sys

import pytest

from bert_jax.configs.finetune.text_classification import get_config
from bert_jax.tools.errors import analyze, find_mistakes, find_slices
from tests.helpers.json_lines import read_lines, write_lines


def line(number, label, predicted, confidence=0.9, **columns):
    other = {"a": "b", "b": "a"}[predicted]
    values = {"id": str(number), "text": "word " * (number + 1), "Class": label} | columns
    probabilities = {predicted: confidence, other: 1 - confidence}
    return values | {"label": label, "prediction": predicted, "probabilities": probabilities}


LINES = [
    line(0, "a", "a", source="web"),
    line(1, "a", "b", 0.6, source="web"),
    line(2, "b", "b", source="mail"),
    line(3, "b", "a", 0.99, source="mail"),
    line(4, "b", "b", source="mail"),
    line(5, "b", "a", 0.7, source="web"),
]


def test_mistakes_of_each_kind_are_ordered_by_how_wrong_they_are():
    assert [each["id"] for each in find_mistakes(LINES)] == ["3", "5", "1"]
    sets = [
        {"label": ["a"], "prediction": ["a"], "probabilities": {"a": 0.9, "b": 0.4}},
        {"label": [], "prediction": ["a"], "probabilities": {"a": 0.6, "b": 0.1}},
        {"label": ["b", "c"], "prediction": ["b"], "probabilities": {"b": 0.8}},  # c: not listed.
    ]
    assert [each["wrongness"] for each in find_mistakes(sets)] == [1.0, 0.6]
    values = [{"label": 1.0, "prediction": 3.0}, {"label": 2.0, "prediction": -1.0}]
    assert [each["wrongness"] for each in find_mistakes(values)] == [3.0, 2.0]


def test_slices_are_by_class_length_and_other_columns():
    rows, left_out = find_slices(LINES, ["text"], ignored={"Class"})
    found = {row[:2]: row[2:4] for row in rows}
    assert found == {
        ("all", ""): (6, 0.5),
        ("label", "a"): (2, 0.5),
        ("label", "b"): (4, 0.5),
        ("words", "1: 1 to 3"): (3, pytest.approx(0.6667)),
        ("words", "2: 4 to 4"): (1, 0.0),
        ("words", "3: 5 to 5"): (1, 1.0),
        ("words", "4: 6 to 6"): (1, 0.0),
        ("source", "mail"): (3, pytest.approx(0.6667)),
        ("source", "web"): (3, pytest.approx(0.3333)),
    }
    assert not left_out and all(0 <= row[4] <= row[3] <= row[5] <= 1 for row in rows)
    many = [line(n, "a", "a", url=str(n)) for n in range(30)]
    assert find_slices(many, ["text"], {"Class"})[1] == ["url"]
    values = [{"label": float(n), "prediction": n + 0.5, "text": "a"} for n in range(8)]
    rows, _ = find_slices(values, ["text"])
    assert [row[0] for row in rows] == ["all", "words", *["label"] * 4]
    assert {row[3] for row in rows} == {0.5}


def test_lines_with_other_keys_have_empty_values_there():
    lines = [line(0, "a", "a"), line(1, "a", "b", source="web"), line(2, "b", "b", source="mail")]
    del lines[2]["text"]
    rows, _ = find_slices(lines, ["text"], ignored={"Class"})
    found = {row[:2]: row[2:4] for row in rows if row[0] in ("source", "words")}
    assert found == {
        ("source", ""): (1, 1.0),
        ("source", "web"): (1, 0.0),
        ("source", "mail"): (1, 1.0),
        ("words", "1: 0 to 1"): (2, 1.0),
        ("words", "2: 2 to 2"): (1, 0.0),
    }


def write_run(run, lines, **settings):
    (run / "predictions").mkdir(parents=True)
    write_lines(run / "predictions/dev.jsonl", lines)
    data = {"text": "text", "label": "Class"}
    settings = {"task": "text_classification", "data": data, "head": {"labels": "ab"}} | settings
    (run / "config.json").write_text(json.dumps(settings))
    return run


def test_files_and_what_is_not_searched_is_named(tmp_path, monkeypatch):
    train = write_lines(tmp_path / "train.jsonl", [{"text": "x", "Class": c} for c in "aabb"])
    data = get_config().data.to_dict() | {"label": "Class", "train": str(train)}
    most_wrong = {name: value for name, value in LINES[3].items() if name != "text"}
    run = write_run(tmp_path / "run", [*LINES[:3], most_wrong, *LINES[4:]], data=data)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    shown = analyze(run, "dev", 2)
    assert shown[1].split() == ["3:", "b", "->", "a", "(0.990):"]
    assert "bert_jax[baselines]" in shown[-1] and not (run / "errors/train_labels.jsonl").exists()
    assert [each["id"] for each in read_lines(run / "errors/dev_mistakes.jsonl")] == ["3", "5", "1"]
    with open(run / "errors/dev_slices.tsv", newline="") as stream:
        header, first, *_ = csv.reader(stream, delimiter="\t")
    assert header == ["slice", "value", "examples", "accuracy", "low", "high"]
    assert first[:4] == ["all", "", "6", "0.5"]
    glue = write_run(tmp_path / "glue", LINES, task="glue", data={"name": "rte"})
    analyze(glue, "dev", 2)
    assert {each.name for each in (glue / "errors").iterdir()} == {
        "dev_mistakes.jsonl",
        "dev_slices.tsv",
    }


def test_a_run_without_labeled_predictions_is_refused(tmp_path):
    run = write_run(tmp_path / "run", [{"id": "0", "text": "x", "prediction": "a"}])
    with pytest.raises(ValueError, match=r"dev\.jsonl"):
        analyze(run, "dev", 2)
    with pytest.raises(FileNotFoundError, match=r"test\.jsonl"):
        analyze(run, "test", 2)
