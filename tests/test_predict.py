"""`python -m bert_jax.predict` writes what `bert_jax.load` returns, and refuses what it cannot."""

import csv
import json
import random

import pytest

import bert_jax
from bert_jax import predict
from tests.helpers.corpora import WORDS
from tests.predictions import read_lines, texts, write_head, write_lines

CLASSIFIERS = {
    "classification": {"labels": ["no", "yes"], "calibration_temperature": 1.7},
    "multi_label": {"labels": ["no", "yes", "maybe"], "label_separator": ";"},
    "regression": {"labels": ["value"], "target_mean": 3.5, "target_std": 0.25},
}


def write_table(path, rows):
    """Writes a .csv, .tsv or .jsonl file of dicts with the same keys."""
    if path.suffix == ".jsonl":
        return write_lines(path, rows)
    with open(path, "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, rows[0], delimiter="," if path.suffix == ".csv" else "\t")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.filterwarnings("ignore:.*are truncated to")
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
@pytest.mark.parametrize("task", CLASSIFIERS)
def test_blocks_of_a_table_are_predicted_and_scored_as_load_does(
    task, suffix, tmp_path, monkeypatch
):
    monkeypatch.setattr(predict, "BLOCK", 7)
    options = CLASSIFIERS[task]
    model = write_head(tmp_path, task=task, max_seq_length=23, **options)
    rng, names = random.Random(0), options["labels"]
    labels = {
        "classification": lambda: rng.choice(names),
        "multi_label": lambda: ";".join(rng.sample(names, rng.randint(0, 3))),
        "regression": lambda: round(rng.random(), 3),
    }[task]
    rows = [{"key": f"row {i}", "body": text, "y": labels()} for i, text in enumerate(texts(20))]
    path = write_table(tmp_path / f"new{suffix}", rows)
    columns = {"text": "body", "label": "y", "id": "key"}
    scores = predict.predict(model, path, tmp_path / "out/found.jsonl", columns)
    expected = bert_jax.load(model).predict(path, **columns)
    assert scores["found.jsonl"] == pytest.approx(expected.scores | {"examples": 20}, abs=1e-5)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["found.jsonl"]
    lines = read_lines(tmp_path / "out/found.jsonl")
    for line, row in zip(lines, expected.rows, strict=True):
        assert line.keys() == row.keys()
        for name in line.keys() - {"probabilities", "prediction"}:
            assert line[name] == row[name]
        assert line["prediction"] == pytest.approx(row["prediction"], abs=1e-5)
        assert line.get("probabilities", {}) == pytest.approx(
            row.get("probabilities", {}), abs=1e-5
        )


def test_labels_that_the_head_lacks_are_predicted_but_not_scored(tmp_path):
    model = write_head(tmp_path, task="classification", labels=["no", "yes"])
    labels = ["no", "maybe", "", "yes", "no"]
    rows = [{"text": a, "label": b} for a, b in zip(texts(5), labels, strict=True)]
    path = write_table(tmp_path / "new.csv", rows)
    scores = predict.predict(model, path, tmp_path / "all.jsonl")["all.jsonl"]
    lines = read_lines(tmp_path / "all.jsonl")
    assert [line["label"] for line in lines] == labels
    known = [line for line in lines if line["label"] in ("no", "yes")]
    assert scores["examples"] == len(known) == 3
    assert scores["accuracy"] == sum(x["label"] == x["prediction"] for x in known) / 3


def test_each_file_of_a_folder_is_predicted_into_a_folder(tmp_path):
    model = write_head(tmp_path, task="classification", labels=["no", "yes"])
    (tmp_path / "in").mkdir()
    for number, name in enumerate(("a.csv", "b.jsonl")):
        write_table(tmp_path / "in" / name, [{"text": text} for text in texts(3, seed=number)])
    assert predict.predict(model, tmp_path / "in", tmp_path / "out") == {}
    for number, name in enumerate(("a.jsonl", "b.jsonl")):
        expected = bert_jax.load(model).classify(texts(3, seed=number), top_k=2)
        lines = read_lines(tmp_path / "out" / name)
        assert [line["probabilities"] for line in lines] == list(
            map(dict, expected)
        )  # In all bits.


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return write_head(tmp_path_factory.mktemp("model"), task="classification", labels=["no", "yes"])


@pytest.mark.parametrize(
    ("files", "options", "output", "error", "message"),
    [
        ({}, {}, "out.jsonl", FileNotFoundError, "--input=.*in.csv does not exist"),
        ({"in.csv": ""}, {}, "out.jsonl", ValueError, "in.csv holds no examples"),
        ({"in.csv": "text\n"}, {}, "out.jsonl", ValueError, "in.csv holds no examples"),
        ({"in.csv": "body\nx\n"}, {}, "out.jsonl", ValueError, "line 2: no column 'text'; found"),
        ({"in.csv": "text\nx\n"}, {"label": "y"}, "out.jsonl", ValueError, "no column 'y'; found"),
        ({"in.csv": "text\nx\n"}, {}, "in.csv", FileExistsError, "--output=.*in.csv exists"),
        ({"in.csv": "text\nx\n"}, {}, "out.txt", ValueError, "expected a file with the suffix"),
        ({"in.csv": "text\nx\n"}, {}, "gs://a/out.jsonl", ValueError, "expected a local path"),
        ({"in.txt": "the O\n"}, {}, "out.jsonl", ValueError, "in.txt has an unknown suffix"),
        ({"in.csv": "text\nx\ny,z\n"}, {}, "out.jsonl", ValueError, "line 3: expected 1 fields"),
        ({"in.csv": "text\nx\n"}, {"top_k": 3}, "out.jsonl", ValueError, "--top_k is for other m"),
    ],
)  # fmt: skip
def test_bad_input_is_an_error_that_leaves_no_output(
    files, options, output, error, message, classifier, tmp_path
):
    source = tmp_path / next(iter(files), "in.csv")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    target = output if "://" in output else tmp_path / output
    with pytest.raises(error, match=message):
        predict.predict(classifier, source, target, options)
    assert {path.name for path in tmp_path.iterdir()} == files.keys()


def test_error_in_a_later_block_leaves_no_output(classifier, tmp_path, monkeypatch):
    monkeypatch.setattr(predict, "BLOCK", 2)
    path = write_lines(tmp_path / "in.jsonl", [{"text": "the"}] * 4 + [{"body": "the"}])
    with pytest.raises(ValueError, match="line 5: no column 'text'"):
        predict.predict(classifier, path, tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("kind", ["no model", "no head"])
def test_directory_without_a_trained_head_is_an_error(kind, tmp_path):
    (tmp_path / "in.csv").write_text("text\nthe\n")
    if kind == "no head":
        model = bert_jax.load(write_head(tmp_path, task="classification", labels=["no", "yes"]))
        del model.settings["head"], model.params["head"]
        model.save(tmp_path / "encoder")
    message = {"no model": "holds no complete checkpoint", "no head": "has no fine-tuned head"}
    directory = tmp_path / ("encoder" if kind == "no head" else "")
    with pytest.raises((ValueError, FileNotFoundError), match=message[kind]):
        predict.predict(directory, tmp_path / "in.csv", tmp_path / "out.jsonl")


def test_json_of_words_is_kept_as_written(classifier, tmp_path):
    rows = [{"text": " ".join(WORDS[:3]), "n": 1.50, "flag": True}]
    path = write_lines(tmp_path / "in.jsonl", rows)
    predict.predict(classifier, path, tmp_path / "out.jsonl")
    line = json.loads((tmp_path / "out.jsonl").read_text())
    assert (line["id"], line["n"], line["flag"]) == ("0", "1.5", "true")
