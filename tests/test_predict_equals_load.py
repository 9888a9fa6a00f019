"""The program `predict` equals the methods of `load`, for every kind of head and length.

The heads were trained with other lengths and options than the defaults, or are imported ones, which
store neither.
"""

import pytest

import bert_jax
from tests.helpers.corpora import texts
from tests.helpers.json_lines import read_lines, write_lines
from tests.helpers.models import write_head
from tests.helpers.predict_equals_load import (
    check_answers,
    check_choices,
    check_classes,
    check_rankings,
    check_retrieval,
    check_tags,
    predict,
)

pytestmark = pytest.mark.usefixtures("two_devices")


def slow(*values, mark=pytest.mark.slow):
    """Returns values of a parameter that `make test` leaves out."""
    return [
        pytest.param(*(each if isinstance(each, tuple) else [each]), marks=mark) for each in values
    ]


LENGTHS = (23, *slow(12, 64))
TRUNCATED = pytest.mark.filterwarnings("ignore:.*are truncated to")


def varies(predictions):
    """Returns whether not all predictions are the same: else, comparing them shows little."""
    return len(set(map(str, predictions))) > 1


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
        *slow(("classification", False), ("regression", False)),
        *slow(("multi_label", True), ("regression", True), mark=pytest.mark.exhaustive),
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


@pytest.mark.slow
def test_model_saved_from_python_predicts(tmp_path):
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
    for split in ("dev", "test"):
        header = ["index", "sentence1", "sentence2", *(["label"] if split == "dev" else [])]
        rows = [[str(n), a, b, "entailment"] for n, (a, b) in enumerate(pairs)]
        lines = ["\t".join(row[: len(header)]) for row in (header, *rows)]
        (tmp_path / f"RTE/{split}.tsv").write_text("\n".join(lines) + "\n")
    model = bert_jax.load(write_head(tmp_path, task="classification", labels=labels))
    model.settings |= {"task": "glue", "data": {"name": "rte"}}
    model.save(tmp_path / "rte")
    scores = predict(tmp_path / "rte", tmp_path, tmp_path / "found")
    expected = [best.label for best in model.classify(pairs)]
    lines = (tmp_path / "found/RTE.tsv").read_text().splitlines()
    assert lines == ["index\tprediction", *(f"{n}\t{label}" for n, label in enumerate(expected))]
    accuracy = sum(label == "entailment" for label in expected) / len(expected)
    assert scores == {"dev.jsonl": {"accuracy": pytest.approx(accuracy), "examples": 6}}
    columns = {"text": "a", "text_pair": "b"}  # And a table of one's own.
    path = write_lines(tmp_path / "new.jsonl", [{"a": a, "b": b} for a, b in pairs])
    predict(tmp_path / "rte", path, tmp_path / "found.jsonl", columns)
    assert [line["prediction"] for line in read_lines(tmp_path / "found.jsonl")] == expected


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
@pytest.mark.slow
def test_tags_match_load(kind, length, tmp_path):
    task, labels, options = TAGGERS[kind]
    model = write_head(tmp_path, task=task, labels=labels, max_seq_length=length, **options)
    assert varies(check_tags(model, tmp_path))


IMPORTED = {  # Scheme, which is not stored -> tags.
    "iob2": ["O", "B-X", "I-X"],
    "bioes": ["O", "B-X", "I-X", "E-X", "S-X"],
    "bilou": ["O", "B-X", "I-X", "L-X", "U-X"],
    "plain": ["O", "PER", "LOC"],
}


@pytest.mark.parametrize("scheme", IMPORTED)
def test_imported_head_tags_as_load_does(scheme, tmp_path):
    model = write_head(tmp_path, imported=True, task="tagging", labels=IMPORTED[scheme])
    assert varies(check_tags(model, tmp_path))


def test_entities_of_an_imported_head_with_plain_tags_are_scored(tmp_path):
    model = write_head(tmp_path, imported=True, task="tagging", labels=IMPORTED["plain"])
    sentences = [tuple(text.split()) for text in texts(15)]
    tags = [[word.tag for word in each.words] for each in bert_jax.load(model).tag(sentences)]
    rows = [{"tokens": a, "tags": b} for a, b in zip(sentences, tags, strict=True)]
    path = write_lines(tmp_path / "new.jsonl", [*rows, {"tokens": ["the"], "tags": ["NOUN"]}])
    scores = predict(model, path, tmp_path / "found.jsonl")["found.jsonl"]
    assert scores["f1"] == scores["strict_f1"] == scores["accuracy"] == 1
    assert scores["sentences"] == 15  # Not the one with a tag that the head does not have.


@pytest.mark.parametrize("length", LENGTHS)
def test_tags_of_documents_of_several_sentences_match_load(length, tmp_path):
    labels, options = TAGGERS["context"][1:]
    model = write_head(tmp_path, task="tagging", labels=labels, max_seq_length=length, **options)
    documents = [str(number // 4) for number in range(15)]
    together = check_tags(model, tmp_path, documents)
    assert varies(together)
    loaded = bert_jax.load(model)
    alone = loaded.tag([tuple(text.split()) for text in texts(15)])
    assert together != [[word.tag for word in each.words] for each in alone]
    with pytest.raises(ValueError, match="2 documents and 1 texts"):
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
    check_answers(model, tmp_path)


@TRUNCATED
def test_imported_head_answers_as_load_does(tmp_path):
    model = write_head(tmp_path, imported=True, task="span", labels=["start", "end"])
    check_answers(model, tmp_path)


@pytest.mark.slow
def test_imported_head_reads_long_contexts_in_windows_as_load_does(tmp_path):
    """Windows of 384 tokens, the paper's, although there are more positions."""
    labels = ["start", "end"]
    model = write_head(tmp_path, imported=True, positions=512, task="span", labels=labels)
    check_answers(model, tmp_path, copies=15)


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
@pytest.mark.slow
def test_scores_of_a_bi_encoder_match_load(pooling, normalize, length, tmp_path):
    options = {"pooling": pooling, "normalize": normalize, "temperature": 1.0}
    lengths = {"max_seq_length": length, "max_query_length": 6}
    model = write_head(tmp_path, task="embedding", labels=[], **lengths, **options)
    check_retrieval(model, tmp_path, max_length=6)


@pytest.mark.slow
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


@pytest.mark.slow
@TRUNCATED
@pytest.mark.parametrize("length", [*LENGTHS, None])
def test_choices_match_load(length, tmp_path):
    lengths = {"max_seq_length": length} if length else {"imported": True}
    model = write_head(tmp_path, task="multiple_choice", labels=["score"], **lengths)
    check_choices(model, tmp_path)
