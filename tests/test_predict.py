"""The program `predict`: its files, its scores, and what it refuses.

`test_predict_equals_load.py` compares its predictions with those of `load` for every kind of head.
"""

import csv
import importlib
import itertools
import json
import pkgutil
import random
import re
import subprocess
import sys
import time

import numpy as np
import pytest

import bert_jax
from bert_jax import predict as program
from bert_jax import tasks
from bert_jax.inference import predictions
from bert_jax.tasks.squad_scores import normalize
from tests.helpers.commands import ended, free_port
from tests.helpers.corpora import WORDS, texts
from tests.helpers.json_lines import read_lines, write_lines
from tests.helpers.models import write_head
from tests.helpers.predict_equals_load import predict

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
    monkeypatch.setattr(predictions, "BLOCK", 7)
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
    scores = predict(model, path, tmp_path / "out/found.jsonl", columns)
    expected = bert_jax.load(model).predict(path, **columns)
    assert scores["found.jsonl"] == expected.scores and expected.scores["examples"] == 20
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["found.jsonl"]
    assert read_lines(tmp_path / "out/found.jsonl") == expected.rows


@pytest.mark.filterwarnings("ignore:.*are truncated to")
def test_columns_of_0_and_1_are_scored_as_lists_of_labels(tmp_path):
    labels = ["no", "yes", "maybe"]
    model = write_head(tmp_path, task="multi_label", labels=labels, max_seq_length=23)
    loaded = bert_jax.load(model)
    loaded.settings |= {"task": "text_classification", "data": {"label_columns": labels[::-1]}}
    loaded.save(tmp_path / "trained")  # As a run with these columns stores it.
    rng = random.Random(0)
    sets = [rng.sample(labels, number % 4) for number in range(9)]
    lists = [{"text": a, "label": b} for a, b in zip(texts(9), sets, strict=True)]
    rows = [{"text": a["text"]} | {name: int(name in a["label"]) for name in labels} for a in lists]
    expected = loaded.predict(lists)
    path = write_table(tmp_path / "new.csv", [*rows, dict.fromkeys(rows[0])])
    scores = predict(tmp_path / "trained", path, tmp_path / "found.jsonl")["found.jsonl"]
    by_flag = {"label_columns": "yes,no,maybe"}
    assert predict(model, path, tmp_path / "flag.jsonl", by_flag)["flag.jsonl"] == scores
    with pytest.warns(UserWarning, match="rows without any field"):
        found = loaded.predict(path, label_columns=labels)
    assert scores == expected.scores == found.scores
    assert read_lines(tmp_path / "found.jsonl") == found.rows
    assert [row["label"] for row in found.rows] == [row["label"] for row in expected.rows]
    # Without the columns, or with another one.
    unlabeled = write_table(tmp_path / "unlabeled.csv", [{"text": text} for text in texts(3)])
    assert predict(tmp_path / "trained", unlabeled, tmp_path / "unlabeled_found.jsonl") == {}
    listed = [{"text": text, "y": "no|yes"} for text in texts(3)]
    path = write_table(tmp_path / "listed.csv", listed)
    scores = predict(tmp_path / "trained", path, tmp_path / "listed_found.jsonl", {"label": "y"})
    assert scores["listed_found.jsonl"]["examples"] == 3


@pytest.mark.parametrize(
    ("task", "options", "place"),
    [
        ("multi_label", {"label_columns": "no,yes"}, "label_columns=no,yes"),
        ("multi_label", {"label_columns": "no,yes,maybe", "label": "y"}, "label=y"),
        ("multi_label", {"label_columns": "no,yes,maybe"}, "new.jsonl, line 1: no column 'no'"),
        ("classification", {"label_columns": "no,yes,maybe"}, "label_columns=no,yes,maybe"),
    ],
)
def test_columns_of_labels_that_the_head_does_not_have_are_refused(task, options, place, tmp_path):
    model = write_head(tmp_path, task=task, labels=["no", "yes", "maybe"])
    path = write_lines(tmp_path / "new.jsonl", [{"text": "the river"}])
    with pytest.raises(ValueError, match=re.escape(place)):
        predict(model, path, tmp_path / "found.jsonl", options)


BAD_LABELS = {  # Ones that the head does not have, and missing ones.
    "classification": ["no", "maybe", "", "yes", "no", None],
    "multi_label": ["no;yes", "no;perhaps", "", "maybe", ["no", "yes"], None],
    "regression": ["1.5", "many", "", "3", "0.25", None],
}


@pytest.mark.parametrize("task", BAD_LABELS)
@pytest.mark.slow
def test_a_table_with_errors_is_predicted_and_scored_as_load_does(task, tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "BLOCK", 4)
    model = write_head(tmp_path, task=task, max_seq_length=12, **CLASSIFIERS[task])
    rows = [
        {"text": text, "label": label, "other": "x"}
        for text, label in zip(["", *texts(5)], BAD_LABELS[task], strict=True)
    ]
    rows.insert(3, {"text": None, "label": None})  # As spreadsheets append.
    path = write_lines(tmp_path / "new.jsonl", rows)
    scores = predict(model, path, tmp_path / "found.jsonl")["found.jsonl"]
    loaded = bert_jax.load(model)
    for table in (path, rows):
        with pytest.warns(UserWarning) as warned:
            expected = loaded.predict(table)
        assert expected == (read_lines(tmp_path / "found.jsonl"), scores)
        messages = [str(each.message) for each in warned]
        assert "table columns that are not used (other)" in messages
        assert "rows without any field, skipped: 1 of 6" in messages
        assert "examples with an empty text: 1 of 6" in messages
        assert any("the head does not have" in x or "is no number" in x for x in messages)
    assert scores["examples"] == {"classification": 3, "multi_label": 4, "regression": 3}[task]


def test_a_list_of_labels_that_was_written_as_text_is_an_error(tmp_path):
    """As pandas writes it in a CSV."""
    model = write_head(tmp_path, task="multi_label", labels=["no", "yes"])
    rows = [{"text": "the", "label": "['no', 'yes']"}]
    path = write_table(tmp_path / "in.csv", rows)
    message = "a list that was written as text: write its labels with '|' between them"
    for table in (path, rows):
        with pytest.raises(ValueError, match=message.replace("|", r"\|")):
            bert_jax.load(model).predict(table)
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        predict(model, path, tmp_path / "out.jsonl")


def test_labels_that_the_head_lacks_are_predicted_but_not_scored(tmp_path):
    model = write_head(tmp_path, task="classification", labels=["no", "yes"])
    labels = ["no", "maybe", "", "yes", "no"]
    rows = [{"text": a, "label": b} for a, b in zip(texts(5), labels, strict=True)]
    path = write_table(tmp_path / "new.csv", rows)
    scores = predict(model, path, tmp_path / "all.jsonl")["all.jsonl"]
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
    assert predict(model, tmp_path / "in", tmp_path / "out") == {}
    for number, name in enumerate(("a.jsonl", "b.jsonl")):
        expected = bert_jax.load(model).classify(texts(3, seed=number), top_k=2)
        lines = read_lines(tmp_path / "out" / name)
        assert [line["probabilities"] for line in lines] == list(
            map(dict, expected)
        )  # In all bits.


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("task", ["classification", "span"])
@pytest.mark.slow
def test_rows_over_two_devices_give_the_same_predictions(task, tmp_path):
    labels = {"classification": ["no", "yes"], "span": ["start", "end"]}[task]
    model = write_head(tmp_path, task=task, labels=labels)
    pairs = zip(texts(11), texts(11, seed=1), strict=True)
    rows = [{"text": a, "question": b, "context": a} for a, b in pairs]
    path = write_lines(tmp_path / "in.jsonl", rows)
    for count in (1, 2):
        predict(model, path, tmp_path / f"{count}.jsonl", num_devices=count)
    one, two = (read_lines(tmp_path / f"{count}.jsonl") for count in (1, 2))
    for left, right in zip(one, two, strict=True):
        assert left["prediction"] == right["prediction"]
        if task == "classification":
            assert left["probabilities"] == pytest.approx(right["probabilities"], abs=1e-5)
    with pytest.raises(ValueError, match="num_devices=99: there are"):
        predict(model, path, tmp_path / "out.jsonl", num_devices=99)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return write_head(tmp_path_factory.mktemp("model"), task="classification", labels=["no", "yes"])


@pytest.mark.parametrize(
    ("files", "options", "output", "error", "message"),
    [
        ({}, {}, "out.jsonl", FileNotFoundError, "input=.*in.csv does not exist"),
        ({"in.csv": ""}, {}, "out.jsonl", ValueError, "in.csv holds no examples"),
        ({"in.csv": "text\n"}, {}, "out.jsonl", ValueError, "in.csv holds no examples"),
        ({"in.csv": "body\nx\n"}, {}, "out.jsonl", ValueError, "line 2: no column 'text'; found"),
        ({"in.csv": "text\nx\n"}, {"label": "y"}, "out.jsonl", ValueError, "no column 'y'; found"),
        ({"in.csv": "text\nx\n"}, {}, "in.csv", FileExistsError, "output=.*in.csv exists"),
        ({"in.csv": "text\nx\n"}, {}, "out.txt", ValueError, "expected a file with the suffix"),
        ({"in.csv": "text\nx\n"}, {}, "gs://a/out.jsonl", ValueError, "expected a local path"),
        ({"in.txt": "the O\n"}, {}, "out.jsonl", ValueError, "in.txt has an unknown suffix"),
        ({"in.csv": "text\nx\ny,z\n"}, {}, "out.jsonl", ValueError, "line 3: expected 1 fields"),
        ({"in.csv": "text\nx\n"}, {"top_k": 3}, "out.jsonl", ValueError, "top_k=3 is for other m"),
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
        predict(classifier, source, target, options)
    assert {path.name for path in tmp_path.iterdir()} == files.keys()


def test_error_in_a_later_block_leaves_no_output(classifier, tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "BLOCK", 2)
    path = write_lines(tmp_path / "in.jsonl", [{"text": "the"}] * 4 + [{"body": "the"}])
    with pytest.raises(ValueError, match="line 5: no column 'text'"):
        predict(classifier, path, tmp_path / "out.jsonl")
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
        predict(directory, tmp_path / "in.csv", tmp_path / "out.jsonl")


def test_json_of_words_is_kept_as_written(classifier, tmp_path):
    rows = [{"text": " ".join(WORDS[:3]), "n": 1.50, "flag": True}]
    path = write_lines(tmp_path / "in.jsonl", rows)
    predict(classifier, path, tmp_path / "out.jsonl")
    line = json.loads((tmp_path / "out.jsonl").read_text())
    assert (line["id"], line["n"], line["flag"]) == ("0", "1.5", "true")


def write_questions(path, pairs, answers, null):
    """Writes SQuAD's JSON with the best of the answers, but for the first none or a wrong one."""
    questions = []
    for number, ((question, context), (best, *_)) in enumerate(zip(pairs, answers, strict=True)):
        gold = [{"text": best.text, "answer_start": best.start}] if best.text else []
        if number == 0:
            gold = [] if null else [{"text": "xylophone", "answer_start": 0}]
        entry = {"id": f"q{number}", "question": question, "answers": gold}
        questions.append({"context": context, "qas": [entry]})
    path.write_text(json.dumps({"data": [{"paragraphs": questions}], "version": "1"}))
    return path


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_answers_are_scored_by_the_official_rules(suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "BLOCK", 3)
    head = {"max_seq_length": 32, "doc_stride": 8, "max_query_length": 8, "max_answer_length": 3}
    model = write_head(tmp_path, task="span", labels=["start", "end"], **head)
    pairs = [("the old king", text) for text in texts(8, seed=4)]
    answers = bert_jax.load(model).answer(*map(list, zip(*pairs, strict=True)))
    path = write_questions(tmp_path / "in.json", pairs, answers, null=False)
    scores = predict(model, path, tmp_path / f"out{suffix}")[f"out{suffix}"]
    texts_of = [best.text for best, *_ in answers[1:]]  # The official F1 of "the" is 0.
    f1 = sum(bool(normalize(text)) for text in texts_of)
    assert scores == {"exact": 7 / 8, "f1": f1 / 8, "questions": 8}
    # A head that always answers is not scored on questions without an answer.
    path = write_questions(tmp_path / "second.json", pairs, answers, null=True)
    scores = predict(model, path, tmp_path / f"null{suffix}")[f"null{suffix}"]
    assert scores == {"exact": 1, "f1": f1 / 7, "questions": 7}


@pytest.mark.slow
def test_run_of_a_bi_encoder_is_scored_by_the_ranks_of_the_positives(tmp_path):
    options = {"pooling": "mean", "normalize": True, "max_seq_length": 32, "max_query_length": 16}
    model = write_head(tmp_path, task="embedding", labels=[], **options)
    passages = texts(30, seed=1)
    path = write_table(tmp_path / "passages.csv", [{"text": text} for text in passages])
    predict(model, path, tmp_path / "vectors.npy")
    queries = texts(8, seed=2)
    positives = [*random.Random(0).choices(passages, k=7), "not among the passages"]
    rows = [{"query": q, "positive": p} for q, p in zip(queries, positives, strict=True)]
    path = write_lines(tmp_path / "queries.jsonl", [*rows, {"query": "the"}])
    columns = {"passages": str(tmp_path / "vectors.npy"), "top_k": 30}
    scores = predict(model, path, tmp_path / "run.txt", columns)["run.txt"]
    loaded = bert_jax.load(model)
    similar = loaded.encode(queries, max_length=16) @ loaded.encode(passages).T
    ranks = [
        1 + sum(row > row[passages.index(positive)])
        for row, positive in zip(similar, positives[:7], strict=False)
    ]
    assert scores["queries"] == 8 and "recall_at_100" not in scores
    assert scores["mrr_at_10"] == pytest.approx(sum(1 / x for x in ranks if x <= 10) / 8)


def test_vectors_replace_no_file_beside_them(tmp_path):
    """Neither the passages themselves, nor the ids of vectors that were removed."""
    model = write_head(tmp_path, task="embedding", labels=[], max_seq_length=32)
    path = write_lines(tmp_path / "passages.jsonl", [{"text": text} for text in texts(3, seed=1)])
    before = (tmp_path / "passages.jsonl").read_bytes()
    predict(model, path, str(tmp_path / "passages.npy"))
    assert (tmp_path / "passages.jsonl").read_bytes() == before
    ids = tmp_path / "passages.ids.jsonl"
    assert [json.loads(line)["id"] for line in ids.read_text().splitlines()] == ["0", "1", "2"]
    (tmp_path / "passages.npy").unlink()
    with pytest.raises(FileExistsError, match=r"passages\.ids\.jsonl"):
        predict(model, path, str(tmp_path / "passages.npy"))
    assert not (tmp_path / "passages.npy").exists()


def read_shards(folder):
    """Returns the vectors and the ids and texts of all shards."""
    paths = sorted(folder.glob("*.npy"))
    vectors = np.concatenate([np.load(path) for path in paths])
    names = [read_lines(path.with_suffix(".ids.jsonl")) for path in paths]
    return vectors, list(itertools.chain.from_iterable(names))


def test_shards_are_the_whole_whatever_processes_complete_them(tmp_path, caplog):
    options = {"pooling": "mean", "normalize": True, "max_seq_length": 32}
    model = write_head(tmp_path, task="embedding", labels=[], **options)
    rows = [{"id": f"p{n}", "text": text} for n, text in enumerate(texts(11))]
    path = write_lines(tmp_path / "corpus.jsonl", rows)
    predict(model, path, tmp_path / "whole.npy")
    folder, options = tmp_path / "shards", {"shard_size": 4}
    predict(model, path, folder, options, process_id=1, num_processes=2)
    (first,) = folder.glob("*.npy")
    assert first.name == "corpus-00001.npy"
    written = first.stat().st_mtime_ns
    # As a killed process leaves them: one shard half written, one of whose files one is in place.
    (folder / ".corpus-00000.npy.7.incomplete").mkdir()
    (folder / ".corpus-00000.npy.7.incomplete/corpus-00000.npy").write_bytes(b"")
    (folder / "corpus-00002.ids.jsonl").write_text("{")
    with caplog.at_level("INFO"):
        predict(model, path, folder, options | {"dtype": "float32"})  # The default.
    assert "3 shards (2 written now, 1 of earlier runs)" in caplog.text
    assert first.stat().st_mtime_ns == written
    assert {each.name for each in folder.iterdir()} == {
        "shards.json",
        *(f"corpus-0000{n}{suffix}" for n in range(3) for suffix in (".npy", ".ids.jsonl")),
    }
    vectors, names = read_shards(folder)
    np.testing.assert_allclose(vectors, np.load(tmp_path / "whole.npy"), atol=1e-6)
    assert names == rows

    queries = write_lines(tmp_path / "queries.jsonl", [{"query": each} for each in texts(3, 1)])
    for passages in ("whole.npy", "shards"):
        columns = {"passages": str(tmp_path / passages), "top_k": 11}
        predict(model, queries, tmp_path / f"{passages}.jsonl", columns)
    whole, found = (read_lines(tmp_path / f"{name}.jsonl") for name in ("whole.npy", "shards"))
    assert [[each["id"] for each in line["passages"]] for line in found] == [
        [each["id"] for each in line["passages"]] for line in whole
    ]
    for changed in ({"shard_size": 3}, {"shard_size": 4, "dtype": "float16"}):
        with pytest.raises(ValueError, match="|".join(changed)):
            predict(model, path, folder, changed)
    write_lines(path, rows[1:])
    with pytest.raises(ValueError, match="input"):
        predict(model, path, folder, options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_connected", [False, True])
def test_shards_of_processes_that_are_killed_are_those_of_one(is_connected, tmp_path):
    """Both are killed at a random moment, six times at most, and then complete the folder."""
    model = write_head(tmp_path, task="embedding", labels=[], pooling="mean", normalize=True)
    path = write_lines(tmp_path / "corpus.jsonl", [{"text": text} for text in texts(2000)])
    predict(model, path, tmp_path / "whole.npy")
    command = [sys.executable, "-m", "bert_jax.predict", f"--model={model}", f"--input={path}"]
    folder = tmp_path / "shards"
    command += [f"--output={folder}", "--shard_size=50", "--num_processes=2"]
    rng, num_kills, codes, ages = random.Random(0), 0, [1], {}

    def is_running(processes):
        return any(process.poll() is None for process in processes)

    while any(codes):
        port = [f"--coordinator=localhost:{free_port()}"] if is_connected else []
        processes = [
            subprocess.Popen([*command, *port, f"--process_id={number}"]) for number in range(2)
        ]
        with ended(processes):
            enough = len(ages) + rng.randint(1, 8) if num_kills < 5 else 41
            while len([*folder.glob("*.npy")]) < enough and is_running(processes):
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.1))
            num_kills += is_running(processes)
        codes = [process.returncode for process in processes]
        for shard in folder.glob("*.npy"):
            age = shard.stat().st_mtime_ns
            assert ages.setdefault(shard.name, age) == age, "it was computed again"
    assert num_kills > 1 and len(ages) == 40
    vectors, names = read_shards(folder)
    np.testing.assert_allclose(vectors, np.load(tmp_path / "whole.npy"), atol=1e-6)
    assert names == read_lines(tmp_path / "whole.ids.jsonl")


def test_vectors_in_half_precision(tmp_path):
    model = write_head(tmp_path, task="embedding", labels=[], pooling="mean", normalize=True)
    path = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in texts(3)])
    predict(model, path, tmp_path / "half.npy", {"dtype": "float16"})
    vectors = np.load(tmp_path / "half.npy")
    assert vectors.dtype == np.float16
    np.testing.assert_array_equal(vectors, bert_jax.load(model).encode(texts(3)).astype("f2"))


def test_candidates_of_a_cross_encoder_are_scored(tmp_path):
    head = {"labels": ["score"], "max_seq_length": 32, "max_query_length": 8}
    model = write_head(tmp_path, task="multiple_choice", **head)
    passages = texts(5, seed=1)
    rankings = bert_jax.load(model).rank(texts(6, seed=2), passages)
    rows = [
        {
            "query": query,
            "positive": ranked[number % 5].text,
            "negatives": [each.text for each in ranked if each != ranked[number % 5]],
        }
        for number, (query, ranked) in enumerate(zip(texts(6, seed=2), rankings, strict=True))
    ]
    path = write_lines(tmp_path / "in.jsonl", rows)
    scores = predict(model, path, tmp_path / "out.jsonl")["out.jsonl"]
    ranks = [number % 5 + 1 for number in range(6)]
    assert scores["mrr_at_10"] == pytest.approx(sum(1 / rank for rank in ranks) / 6)
    assert [line["rank"] for line in read_lines(tmp_path / "out.jsonl")] == ranks


FORMS = {
    "table": ("in.csv", "text\nthe\n"),
    "words": ("in.txt", "the O\nriver O\n"),
    "questions": ("in.json", '{"data": []}'),
    "objects": ("in.jsonl", '{"title": "the"}\n'),
}
TASKS = {
    "tagging": ({"labels": ["O", "X"]}, "jsonl", ("table", "questions", "objects")),
    "span": ({"labels": ["start", "end"]}, "jsonl", ("table", "words", "questions", "objects")),
    "embedding": ({"labels": []}, "npy", ("words", "questions", "objects")),
    "multiple_choice": ({"labels": ["score"]}, "jsonl", ("table", "words", "objects")),
}


@pytest.mark.parametrize("task", TASKS)
def test_input_of_another_form_is_an_error(task, tmp_path):
    options, suffix, forms = TASKS[task]
    model = write_head(tmp_path / "model", task=task, **options)
    for form in forms:
        name, text = FORMS[form]
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            predict(model, tmp_path / name, tmp_path / f"out.{suffix}")
        assert not (tmp_path / f"out.{suffix}").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"passages": "nowhere.npy"}, "passages=nowhere.npy"),
        ({"passages": "passages.jsonl"}, "passages=passages.jsonl"),
        ({"dtype": "int8"}, "dtype=int8"),
        ({"passages": "x.npy", "shard_size": 3}, "shard_size"),
        ({"label": "y"}, "label=y is for other models: this one has a head for embedding"),
    ],
)
def test_wrong_option_of_a_bi_encoder_is_an_error(options, message, tmp_path):
    model = write_head(tmp_path, task="embedding", labels=[])
    path = write_lines(tmp_path / "in.jsonl", [{"query": "the"}])
    with pytest.raises(ValueError, match=message):
        predict(model, path, tmp_path / "out.txt", options)


def test_columns_but_not_header_lines_are_those_of_the_run(tmp_path):
    model = bert_jax.load(write_head(tmp_path, task="classification", labels=["no", "yes"]))
    data = {"text": "Body", "label": "Topic", "header_lines": 3}
    model.settings |= {"task": "text_classification", "data": data}
    model.save(tmp_path / "run")
    (tmp_path / "in.csv").write_text("Body,Topic\nthe,no\nriver,no\nking,yes\n")
    scores = predict(tmp_path / "run", tmp_path / "in.csv", tmp_path / "out.jsonl")
    assert scores["out.jsonl"]["examples"] == len(read_lines(tmp_path / "out.jsonl")) == 3


def test_every_option_of_a_task_is_a_flag_and_every_flag_is_one_of_a_task():
    names = [each.name for each in pkgutil.iter_modules(tasks.__path__, "bert_jax.tasks.")]
    taken = [getattr(importlib.import_module(name), "PREDICT_OPTIONS", {}) for name in names]
    assert set().union(*taken) == program.OPTIONS.keys()


@pytest.mark.slow
def test_program_imports_own_modules_first_and_names_flags_in_errors(tmp_path):
    (tmp_path / "own.py").write_text("print('imported')")
    flags = ("--import=own", "--model=.", "--input=nothing.csv", "--output=found.jsonl")
    command = [sys.executable, "-m", "bert_jax.predict", *flags]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (1, "imported\n")
    assert "predict: --input=nothing.csv does not exist" in run.stderr
