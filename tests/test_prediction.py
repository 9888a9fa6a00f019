"""A prediction-only run equals `bert_jax.load`, for every kind of head and length.

The heads were trained with other lengths and options than the defaults of the configurations, or
are imported ones, which store neither.
"""

import functools
import json
import random

import numpy as np
import pytest
from safetensors.numpy import load_file

import bert_jax
from bert_jax.configs.finetune import (
    feature_based,
    glue,
    retrieval,
    squad,
    swag,
    tagging,
    text_classification,
)
from bert_jax.runtime import command_line, main
from tests.helpers import commands
from tests.predictions import (
    check_answers,
    check_choices,
    check_classes,
    check_rankings,
    check_retrieval,
    check_tags,
    predict,
    read_lines,
    texts,
    write_head,
    write_lines,
)

pytestmark = pytest.mark.usefixtures("two_devices")


def slow(*values):
    """Returns values of a parameter that `make test` leaves out."""
    return [
        pytest.param(*(each if isinstance(each, tuple) else [each]), marks=pytest.mark.slow)
        for each in values
    ]


LENGTHS = (23, *slow(12, 64))
TRUNCATED = pytest.mark.filterwarnings("ignore:.*are truncated to")


def varies(predictions):
    """Returns whether not all predictions are the same: else, comparing them shows little."""
    return len(set(map(str, predictions))) > 1


def give(monkeypatch, *flags):
    """Marks fields as set on the command line."""
    monkeypatch.setattr(command_line, "given_fields", lambda: flags)


CLASSIFIERS = {
    "classification": {"labels": ["no", "yes", "maybe"]},
    "multi_label": {"labels": ["no", "yes", "maybe"], "label_separator": "|"},
    "regression": {"labels": ["value"], "target_mean": 3.5, "target_std": 0.25},
}


@TRUNCATED
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("task", "is_pair"),
    [
        ("classification", True),
        ("multi_label", False),
        ("regression", False),
        *slow(("classification", False), ("multi_label", True), ("regression", True)),
    ],
)
def test_classes_and_probabilities_match_load(task, is_pair, length, tmp_path):
    # A BiLSTM between encoder and head is described by the head's settings too.
    lstm = {"lstm_size": 4} if task == "classification" and is_pair else {}
    model = write_head(tmp_path, task=task, max_seq_length=length, **CLASSIFIERS[task], **lstm)
    assert varies(check_classes(task, is_pair, model, tmp_path))


@TRUNCATED
@pytest.mark.parametrize("task", ["classification", "multi_label"])
def test_imported_head_classifies_as_load_does(task, tmp_path):
    model = write_head(tmp_path, imported=True, task=task, labels=["no", "yes", "maybe"])
    assert bert_jax.load(model).head.keys() == {"task", "labels"}
    assert varies(check_classes(task, False, model, tmp_path))


def test_an_exported_regression_has_the_scale_of_the_labels_in_its_last_layer(tmp_path):
    """So that transformers, which knows no scale, and a new load give the values of the labels."""
    scale = {"target_mean": 1000.0, "target_std": 7.0}
    head = {"task": "regression", "labels": ["value"]}
    plain = bert_jax.load(write_head(tmp_path / "plain", **head))
    model = write_head(tmp_path / "scaled", **head, **scale)
    exported = write_head(tmp_path / "exported", imported=True, **head, **scale)
    inputs = texts(5)
    expected = [1000 + 7 * value for value in plain.classify(inputs)]
    assert varies(expected)
    assert bert_jax.load(model).classify(inputs) == pytest.approx(expected, rel=1e-6)
    assert bert_jax.load(exported).classify(inputs) == pytest.approx(expected, rel=1e-6)
    bert_jax.load(model).save(tmp_path / "again")
    assert bert_jax.load(tmp_path / "again").classify(inputs) == pytest.approx(expected, rel=1e-6)
    found = load_file(exported / "model.safetensors")
    kernel, bias = (plain.params["head"][name] for name in ("kernel", "bias"))
    np.testing.assert_allclose(found["classifier.weight"], 7 * np.transpose(kernel), rtol=1e-6)
    np.testing.assert_allclose(found["classifier.bias"], 1000 + 7 * bias, rtol=1e-6)


@TRUNCATED
@pytest.mark.parametrize("task", CLASSIFIERS)
def test_tables_are_predicted_and_scored_as_on_the_command_line(task, tmp_path, capsys):
    """A file and the same table as dicts, with labels."""
    temperature = {"calibration_temperature": 1.7} if task == "classification" else {}
    options = CLASSIFIERS[task] | temperature
    model = write_head(tmp_path, task=task, max_seq_length=23, **options)
    rng, names = random.Random(0), options["labels"]
    labels = {
        "classification": lambda: rng.choice(names),
        "multi_label": lambda: rng.sample(names, rng.randint(0, 3)),
        "regression": lambda: round(rng.random(), 3),
    }[task]
    rows = [{"key": f"row {i}", "body": text, "y": labels()} for i, text in enumerate(texts(20))]
    path, config = write_lines(tmp_path / "new.jsonl", rows), text_classification.get_config()
    columns = {"text": "body", "label": "y", "id": "key"}
    separator = {"label_separator": "|"} if task == "multi_label" else {}
    files = {"train": "", "test": path} | separator
    written = predict(config, model, tmp_path / "run", **files, **columns) / "test.jsonl"
    result = json.loads((tmp_path / "run/result.json").read_text())
    check_last_line(result, tmp_path / "run", written, capsys)
    result, loaded = result["test"], bert_jax.load(model)
    for table in (path, str(path), rows, iter(rows)):
        found = loaded.predict(table, **columns)
        assert found.scores | {"loss": result["loss"]} == pytest.approx(result, rel=1e-4, abs=1e-5)
        for row, line in zip(found.rows, read_lines(written), strict=True):
            assert row.keys() == line.keys()
            probabilities = pytest.approx(line.get("probabilities", {}), abs=1e-5)
            assert row.get("probabilities", {}) == probabilities
            for name in row.keys() - {"probabilities"}:
                is_float = isinstance(line[name], float)
                assert row[name] == (
                    pytest.approx(line[name], rel=1e-4) if is_float else line[name]
                )


def check_last_line(result, workdir, predictions, capsys):
    """Asserts that the last line of the printed result names the file of `predictions`."""
    main.print_result(result, str(workdir))
    assert capsys.readouterr().out.splitlines()[-1] == f"Predictions: {predictions}"


def test_dividing_the_head_by_its_temperature_calibrates_the_probabilities(tmp_path):
    temperature = {"calibration_temperature": 1.7}
    model = write_head(tmp_path, task="classification", labels=["no", "yes"], **temperature)
    model, rng = bert_jax.load(model), random.Random(0)
    table = [{"text": text, "label": rng.choice(["no", "yes"])} for text in texts(20)]
    before = model.predict(table).scores
    temperature, head = model.head.pop("calibration_temperature"), model.params["head"]
    model.params["head"] = {name: values / temperature for name, values in head.items()}
    model.save(tmp_path / "calibrated")
    after = bert_jax.load(tmp_path / "calibrated").predict(table).scores
    assert "calibrated_ece" not in after
    assert after["ece"] == pytest.approx(before["calibrated_ece"], abs=1e-6)
    assert after["ece"] != pytest.approx(before["ece"], abs=1e-3)


def test_table_without_labels_is_only_predicted(tmp_path):
    model = bert_jax.load(write_head(tmp_path, task="classification", labels=["no", "yes"]))
    with pytest.warns(UserWarning, match="^examples with an empty text: 1 of 2$"):
        rows, scores = model.predict([{"text": "the river"}, {"text": " "}])
    assert [row["id"] for row in rows] == ["0", "1"] and scores == {}
    assert rows[0]["prediction"] == model.classify("the river").label
    assert model.predict([]) == ([], {})
    with pytest.warns(UserWarning, match="^examples truncated: 1 of 2$"):
        model.predict([{"text": "the " * 99}, {"text": "the"}])


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        ("nowhere.csv", FileNotFoundError, r"no file nowhere\.csv: expected a \.csv"),
        ("", ValueError, "the path of the table is empty"),
        ([{"body": "the"}], ValueError, "example 0: no column 'text'; found body: set the correct "
         "name in text, text_pair, label or id$"),
        ([{"text": "the", "label": "no"}, {"text": "war", "label": "maybe"}], ValueError,
         "example 1: label 'maybe', expected one of no, yes$"),
        ([{"text": "the", "label": "no"}, {"text": "war"}], ValueError, "example 1: no 'label': "
         "label all examples, or none"),
        ([{"text": float("nan")}], ValueError, "example 0: .*expected text, numbers, or None"),
        ([{"text": b"the"}], ValueError, "example 0: .*expected text, numbers, or None"),
        (["the river"], TypeError, r"example 0 is a str: expected a path or a list of dicts; of a "
         r"DataFrame, its to_dict\('records'\)"),
        ({"text": "the"}, TypeError, "example 0 is a str: expected a path or a list of dicts"),
    ],
)  # fmt: skip
def test_wrong_table_is_an_error_with_the_reason(table, error, message, headed):
    with pytest.raises(error, match=message):
        headed.predict(table)


@pytest.fixture(scope="module")
def headed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("headed")
    return bert_jax.load(write_head(directory, task="classification", labels=["no", "yes"]))


def test_model_without_such_a_head_predicts_no_tables(tmp_path):
    model = bert_jax.load(write_head(tmp_path, task="span", labels=["start", "end"]))
    with pytest.raises(ValueError, match="a head for span, so it cannot predict tables: load one"):
        model.predict([{"text": "the"}])


def test_model_saved_from_python_is_accepted_as_init_from(tmp_path):
    written = write_head(tmp_path, task="classification", labels=["no", "yes"], max_seq_length=12)
    model = bert_jax.load(written)
    model.params["head"]["kernel"] *= -1
    model.save(tmp_path / "saved")
    assert bert_jax.load(written).classify("the river") != model.classify("the river")
    assert varies(check_classes("classification", False, tmp_path / "saved", tmp_path))


@TRUNCATED
@pytest.mark.parametrize(
    "labels",
    [["not_entailment", "entailment"], *slow(["entailment", "not_entailment"])],
    ids=["other order", "order of the task"],
)
def test_order_of_glue_classes_comes_from_the_head(labels, tmp_path):
    pairs = list(zip(texts(6), texts(6, seed=1), strict=True))
    (tmp_path / "RTE").mkdir()
    lines = ["index\tsentence1\tsentence2", *(f"{n}\t{a}\t{b}" for n, (a, b) in enumerate(pairs))]
    (tmp_path / "RTE/test.tsv").write_text("\n".join(lines) + "\n")
    head = {"task": "classification", "labels": labels, "max_seq_length": 23}
    model = write_head(tmp_path, **head)
    config = glue.get_config("rte")
    config.num_epochs = 0.0
    written = predict(config, model, tmp_path / "run", directory=tmp_path)
    found = [line.split("\t")[1] for line in (written / "RTE.tsv").read_text().splitlines()]
    assert found[1:] == [best.label for best in bert_jax.load(model).classify(pairs)]


TAGGERS = {  # Kind -> task, tags, and what the head was trained with.
    "iob2": ("tagging", ["O", "B-X", "I-X"], {"scheme": "iob2", "document_context": False}),
    "bioes": ("tagging", ["O", "B-X", "I-X", "E-X", "S-X"], {"scheme": "bioes"}),
    "plain": ("tagging", ["O", "X", "Y"], {"scheme": "io"}),
    "parts of speech": ("tagging", ["NOUN", "VERB", "DET"], {"scheme": "none"}),
    "context": ("tagging", ["O", "B-X", "I-X"], {"scheme": "iob2", "document_context": True}),
    "features": (
        "feature_based",
        ["O", "B-X", "I-X"],
        {"scheme": "iob2", "features": "last", "lstm_size": 8},
    ),
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", TAGGERS)
def test_tags_match_load(kind, length, tmp_path):
    task, labels, options = TAGGERS[kind]
    model = write_head(tmp_path, task=task, labels=labels, max_seq_length=length, **options)
    assert varies(check_tags(model, tmp_path, kind))


IMPORTED = {  # Scheme, which is not stored -> tags.
    "iob2": ["O", "B-X", "I-X"],
    "bioes": ["O", "B-X", "I-X", "E-X", "S-X"],
    "bilou": ["O", "B-X", "I-X", "L-X", "U-X"],
    "plain": ["O", "PER", "LOC"],
}


@pytest.mark.parametrize("scheme", IMPORTED)
def test_imported_head_tags_as_load_does(scheme, tmp_path):
    model = write_head(tmp_path, imported=True, task="tagging", labels=IMPORTED[scheme])
    assert varies(check_tags(model, tmp_path, scheme))


def test_entities_of_an_imported_head_with_plain_tags_are_scored(tmp_path):
    model = write_head(tmp_path, imported=True, task="tagging", labels=IMPORTED["plain"])
    sentences = [tuple(text.split()) for text in texts(15)]
    tags = [[word.tag for word in each.words] for each in bert_jax.load(model).tag(sentences)]
    rows = [{"tokens": a, "tags": b} for a, b in zip(sentences, tags, strict=True)]
    files = {"train": "", "dev": "", "test": write_lines(tmp_path / "new.jsonl", rows)}
    predict(tagging.get_config(), model, tmp_path / "run", **files)
    scores = json.loads((tmp_path / "run/result.json").read_text())["test"]
    assert scores["f1"] == scores["strict_f1"] == scores["accuracy"] == 1


def test_scheme_none_is_kept_for_an_imported_head_whose_tags_mark_no_entities(tmp_path):
    labels = ["NOUN", "VERB", "DET"]
    model = write_head(tmp_path, imported=True, task="tagging", labels=labels)
    config = tagging.get_config()
    config.data.scheme = "none"
    path = write_lines(tmp_path / "new.jsonl", [{"tokens": text.split()} for text in texts(5)])
    written = predict(config, model, tmp_path / "run", train="", dev="", test=path) / "test.txt"
    found = {line.split()[1] for line in written.read_text().splitlines() if line}
    assert found <= set(labels)


@pytest.mark.parametrize("length", LENGTHS)
def test_tags_of_documents_of_several_sentences_match_load(length, tmp_path):
    labels, options = TAGGERS["context"][1:]
    model = write_head(tmp_path, task="tagging", labels=labels, max_seq_length=length, **options)
    documents = [str(number // 4) for number in range(15)]
    together = check_tags(model, tmp_path, "context", documents)
    assert varies(together)
    loaded = bert_jax.load(model)
    alone = loaded.tag([tuple(text.split()) for text in texts(15)])
    assert together != [[word.tag for word in each.words] for each in alone]
    with pytest.raises(ValueError, match="2 documents and 1 texts: expected the document of each"):
        loaded.tag(["the river"], documents=["a", "b"])


def test_head_without_document_context_refuses_documents(tmp_path):
    model = write_head(tmp_path, imported=True, task="tagging", labels=["O", "B-X", "I-X"])
    with pytest.raises(ValueError, match="documents cannot be used: the head was trained without"):
        bert_jax.load(model).tag(["the river"], documents=["a"])


@TRUNCATED
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("null_threshold", [-2.0, *slow(None, 1.5)])
def test_answers_match_load(null_threshold, length, tmp_path):
    options = {"null_answers": null_threshold is not None, "null_threshold": null_threshold or 0.0}
    options |= {"doc_stride": 5, "max_query_length": 7, "max_answer_length": 4}
    labels = ["start", "end"]
    model = write_head(tmp_path, task="span", labels=labels, max_seq_length=length, **options)
    check_answers(model, tmp_path, squad.get_config("v1"))


@TRUNCATED
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_imported_head_answers_as_load_does(version, tmp_path):
    model = write_head(tmp_path, imported=True, task="span", labels=["start", "end"])
    config, options = squad.get_config(version), {}
    if version == "v2":  # Nothing in the model says whether it may leave a question unanswered.
        config.data.null_threshold = options["null_threshold"] = 1.5
    check_answers(model, tmp_path, config, **options)


@TRUNCATED
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("pooling", "normalize"),
    [
        ("mean", False),
        ("max", True),  # Of "cls", see the imported one.
        *slow(("mean", True), ("cls", False)),
    ],
)
def test_scores_of_a_bi_encoder_match_load(pooling, normalize, length, tmp_path):
    options = {"pooling": pooling, "normalize": normalize, "temperature": 1.0}
    lengths = {"max_seq_length": length, "max_query_length": 6}
    model = write_head(tmp_path, task="embedding", labels=[], **lengths, **options)
    check_retrieval(model, tmp_path, max_length=6)


@TRUNCATED
def test_imported_bi_encoder_finds_what_load_finds(tmp_path):
    # As from a directory of sentence-transformers: one length for all texts.
    options = {"pooling": "cls", "normalize": True, "max_seq_length": 40}
    model = write_head(tmp_path, task="embedding", labels=[], **options)
    check_retrieval(model, tmp_path)


@TRUNCATED
@pytest.mark.parametrize("length", LENGTHS)
def test_scores_of_a_cross_encoder_match_load(length, tmp_path):
    head = {"task": "multiple_choice", "labels": ["score"], "max_seq_length": length}
    check_rankings(write_head(tmp_path, **head, max_query_length=5), tmp_path)


@TRUNCATED
@pytest.mark.parametrize("length", [*LENGTHS, None])
def test_choices_match_load(length, tmp_path):
    lengths = {"max_seq_length": length} if length else {"imported": True}
    model = write_head(tmp_path, task="multiple_choice", labels=["score"], **lengths)
    check_choices(model, tmp_path)


@pytest.mark.parametrize(
    ("config", "lengths", "fix"),
    [
        (swag.get_config(), {"max_query_length": 5}, "retrieval.py:cross_encoder"),
        (retrieval.get_config("cross_encoder"), {}, "swag.py"),
    ],
)
def test_head_of_the_other_kind_of_choice_is_refused(config, lengths, fix, tmp_path):
    head = {"task": "multiple_choice", "labels": ["score"], "max_seq_length": 12}
    model = write_head(tmp_path, **head, **lengths)
    config.num_epochs = 0.0
    with pytest.raises(ValueError, match=rf"not trained for task=.*: use configs/finetune/{fix}"):
        predict(config, model, tmp_path / "run")


# The settings of heads, and for each task fields with values that contradict them. Configurations
# never set the fields of the second table; flags set the fields of the first.
HEADS = {
    "classification": {"max_seq_length": 12, "lstm_size": 8},
    "multi_label": {"label_separator": "|"},
    "tagging": {"scheme": "bioes", "document_context": False},
    "span": {"doc_stride": 5, "max_answer_length": 5, "null_answers": False, "null_threshold": 1.5},
    "embedding": {"pooling": "cls", "normalize": False, "max_query_length": 6},
    "feature_based": {"features": "last", "lstm_size": 8},
}
FLAGS = {
    "max_seq_length": ("classification", 32),
    "data.scheme": ("tagging", "iob1"),
    "data.doc_stride": ("span", 6),
    "data.max_answer_length": ("span", 6),
    "similarity.pooling": ("embedding", "mean"),
    "similarity.normalize": ("embedding", True),
    "data.max_query_length": ("embedding", 7),
    "features": ("feature_based", "embeddings"),
    "lstm_size": ("feature_based", 4),
}
FIELDS = {
    "data.regression": ("classification", True),
    "data.label_separator": ("multi_label", ";"),
    "data.document_context": ("tagging", True),
    "data.null_answers": ("span", True),
    "data.null_threshold": ("span", 0.0),
    "model.lstm_size": ("classification", 4),
}
CONFIGS = {
    "tagging": tagging,
    "feature_based": feature_based,
    "span": squad,
    "embedding": retrieval,
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Writes each head when it is first needed: task -> its directory."""

    @functools.cache
    def write(task):
        directory = tmp_path_factory.mktemp(task)
        return write_head(directory, task=task, labels=["O", "X"], **HEADS[task])

    return write


@pytest.mark.parametrize("field", [*FLAGS, *FIELDS])
def test_setting_that_contradicts_the_head_is_refused(field, heads, tmp_path, monkeypatch):
    task, value = (FLAGS | FIELDS)[field]
    config = CONFIGS.get(task, text_classification).get_config()
    config.update_from_flattened_dict({field: value})
    if field in FLAGS:
        give(monkeypatch, field)
    message = (
        rf"--config\.{field}={value}: the head in .* was trained with .*, and must predict with"
    )
    with pytest.raises(ValueError, match=message):
        predict(config, heads(task), tmp_path / "run", train="", test=tmp_path / "new.csv")


@pytest.mark.parametrize("imported", [False, True])
def test_flag_that_equals_the_head_or_that_it_does_not_store_is_used(
    imported, tmp_path, monkeypatch
):
    lengths = {"imported": True} if imported else {"max_seq_length": 12}
    model = write_head(tmp_path, task="classification", labels=["no", "yes"], **lengths)
    (tmp_path / "new.csv").write_text("text\nthe river\n")
    give(monkeypatch, "max_seq_length")
    config = text_classification.get_config()
    config.max_seq_length = 12
    predict(config, model, tmp_path / "run", train="", test=tmp_path / "new.csv")
    assert json.loads((tmp_path / "run/config.json").read_text())["max_seq_length"] == 12


def test_head_of_another_task_is_refused_unless_it_is_to_be_ignored(tmp_path):
    model = write_head(tmp_path, task="multiple_choice", labels=["score"], max_seq_length=12)
    path = write_lines(tmp_path / "new.jsonl", [{"query": "king", "negatives": ["old", "river"]}])
    config = retrieval.get_config("bi_encoder")
    config.max_seq_length, config.data.max_query_length = 12, 6
    with pytest.raises(ValueError, match=r"a head for multiple_choice, not for embedding: use the"):
        predict(config, model, tmp_path / "run", train="", test=path)
    config.new_head = True
    predict(config, model, tmp_path / "run", train="", test=path)


@pytest.mark.slow
def test_command_names_its_files_last_and_two_processes_predict_as_one(tmp_path):
    head = {"task": "classification", "labels": ["no", "yes"], "max_seq_length": 12}
    model = write_head(tmp_path, **head)
    rows = [{"text": text, "label": "no"} for text in texts(9)]
    path = write_lines(tmp_path / "new.jsonl", rows)
    command = ["bert_jax.finetune", "--config=configs/finetune/text_classification.py"]
    command += [f"--config.init_from={model}", "--config.data.train=", f"--config.data.test={path}"]
    scores = []
    for name, count in (("one", 1), ("two", 2)):
        with commands.ended(
            commands.launch(command, tmp_path / name, num_processes=count, devices_per_process=2)
        ) as started:
            statuses = commands.finish(started)
        log = commands.log_of(tmp_path / name).read_text()
        assert not any(statuses), log[-3000:]
        printed = [line for line in log.splitlines() if line.startswith("Predictions: ")]
        assert printed == [f"Predictions: {tmp_path / name / 'predictions/test.jsonl'}"]
        assert "training step" not in log and "max_seq_length=12" in log
        scores.append(json.loads((tmp_path / name / "result.json").read_text())["test"])
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)
