"""A run that only predicts gives what `bert_jax.load` gives, for every kind of head and length.

The heads were trained with other lengths and options than the defaults of the configurations.
"""

import dataclasses
import json
import random

import flax
import numpy as np
import pytest

import bert_jax
from bert_jax import finetune
from bert_jax.interop.parameters import parameter_shapes
from bert_jax.model.config import BertConfig
from bert_jax.runtime import command_line
from bert_jax.tokenization import load_tokenizer
from bert_jax.training.checkpoint import write_checkpoint
from configs.finetune import (
    feature_based,
    retrieval,
    squad,
    swag,
    tagging,
    text_classification,
)
from tests.helpers import WORDS, write_vocabulary

LENGTHS = (12, 23, 64)


def write_head(directory, seed=0, **head):
    """Writes a small random model with a head of these settings."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(write_vocabulary(directory / "vocab.txt"))
    config = BertConfig(tokenizer.vocab_size, 16, 2, 2, 32, max_position_embeddings=64)
    rng = np.random.default_rng(seed)
    params = {
        path: rng.normal(0, 1.0 if path.startswith("head") else 0.3, leaf.shape).astype(np.float32)
        + path.endswith("scale")
        for path, leaf in parameter_shapes(config, head).items()
        if not path.startswith(("mlm", "nsp"))
    }
    settings = {"bert": dataclasses.asdict(config), "absent": ["mlm", "nsp"], "head": head}
    params = flax.traverse_util.unflatten_dict(params, sep="/")
    write_checkpoint(directory / "model", params, settings, tokenizer)
    return directory / "model"


def predict(config, model, workdir, **data):
    """Runs the command's function without training data; returns the folder of predictions."""
    config.init_from = str(model)
    for name, value in data.items():
        config.data[name] = str(value)
    result = finetune.train_and_evaluate(config, workdir)
    assert result["steps"] == 0 and not (workdir / "best").exists()
    assert all((workdir / file).is_file() for file in result["predictions"])
    return workdir / "predictions"


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(count, seed=0):
    """Texts of 1 to 40 words: some are longer than every head's length but the last."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 40))) for _ in range(count)]


@pytest.mark.filterwarnings("ignore:.* texts are truncated")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", ["classification", "multi_label", "regression"])
@pytest.mark.parametrize("is_pair", [False, True])
def test_classes_and_probabilities_are_those_of_load(task, length, is_pair, tmp_path):
    labels = ["value"] if task == "regression" else ["no", "yes", "maybe"]
    head = {"task": task, "labels": labels, "max_seq_length": length}
    if task == "multi_label":
        head["label_separator"] = "|"
    model = write_head(tmp_path, **head)
    first, second = texts(20), texts(20, seed=1)
    columns = {"text": first} | ({"text_pair": second} if is_pair else {})
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    (tmp_path / "new.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = text_classification.get_config()
    config.data.text_pair = "text_pair" if is_pair else ""
    lines = read_lines(
        predict(config, model, tmp_path / "run", train="", test=tmp_path / "new.jsonl")
        / "test.jsonl"
    )
    inputs = list(zip(first, second, strict=True)) if is_pair else first
    loaded = bert_jax.load(model)
    if task == "regression":
        found = [line["prediction"] for line in lines]
        np.testing.assert_allclose(found, loaded.classify(inputs), rtol=1e-5, atol=1e-6)
        return
    for line, ranked in zip(lines, loaded.classify(inputs, top_k=3), strict=True):
        assert line["probabilities"] == pytest.approx(dict(ranked), abs=1e-6)
    expected = loaded.classify(inputs)
    if task == "classification":
        assert [line["prediction"] for line in lines] == [best.label for best in expected]
    else:
        found = [{label for label, _ in each} for each in expected]
        assert [set(line["prediction"]) for line in lines] == found


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", ["tagging", "feature_based"])
def test_tags_are_those_of_load(task, length, tmp_path):
    head = {"task": task, "labels": ["O", "B-X", "I-X"], "max_seq_length": length}
    head |= {"scheme": "iob2", "document_context": False}
    config = tagging.get_config()
    if task == "feature_based":
        head |= {"features": "last", "lstm_size": 8}
        config = feature_based.get_config()
    model = write_head(tmp_path, **head)
    sentences = [text.split() for text in texts(15)]
    lines = "\n\n".join("\n".join(sentence) for sentence in sentences)
    (tmp_path / "new.txt").write_text(lines + "\n")
    files = {"train": "", "dev": "", "test": tmp_path / "new.txt"}
    written = predict(config, model, tmp_path / "run", **files)
    blocks = (written / "test.txt").read_text().strip().split("\n\n")
    found = [[line.split()[-1] for line in block.splitlines()] for block in blocks]
    tagged = bert_jax.load(model).tag([tuple(sentence) for sentence in sentences])
    assert found == [[word.tag for word in each.words] for each in tagged]
    assert len({tag for tags in found for tag in tags}) > 1


@pytest.mark.parametrize("length", LENGTHS[1:])
@pytest.mark.parametrize("null_threshold", [None, -2.0, 1.5])
def test_answers_are_those_of_load(length, null_threshold, tmp_path):
    null_answers = null_threshold is not None
    head = {"task": "span", "labels": ["start", "end"], "max_seq_length": length}
    head |= {"doc_stride": 5, "max_query_length": 7, "max_answer_length": 4}
    head |= {"null_answers": null_answers, "null_threshold": null_threshold or 0.0}
    model = write_head(tmp_path, **head)
    questions = [text[:60] for text in texts(12)]
    contexts = texts(12, seed=1)
    rows = [
        {"id": str(number), "question": question, "context": context}
        for number, (question, context) in enumerate(zip(questions, contexts, strict=True))
    ]
    (tmp_path / "new.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = squad.get_config("v1")
    written = predict(config, model, tmp_path / "run", train="", test=tmp_path / "new.jsonl")
    predictions = json.loads((written / "test/predictions.json").read_text())
    nbest = json.loads((written / "test/nbest_predictions.json").read_text())
    answers = bert_jax.load(model).answer(questions, contexts, top_k=3)
    for number, best in enumerate(answers):
        assert predictions[str(number)] == best[0].text
        found = {each["text"]: each["probability"] for each in reversed(nbest[str(number)])}
        spans = [answer for answer in best if answer.text]
        assert not null_answers or len(spans) < 3 or "" not in {answer.text for answer in best}
        if not null_answers:
            expected = {each.text: each.probability for each in reversed(spans)}
            assert {text: found[text] for text in expected} == pytest.approx(expected, abs=1e-5)


@pytest.mark.filterwarnings("ignore:.* texts are truncated")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("cls", False), ("max", True)])
def test_scores_of_a_bi_encoder_are_those_of_load(length, pooling, normalize, tmp_path):
    head = {"task": "embedding", "labels": [], "max_seq_length": length, "max_query_length": 6}
    head |= {"pooling": pooling, "normalize": normalize, "temperature": 1.0}
    model = write_head(tmp_path, **head)
    queries, passages = texts(6), texts(8, seed=1)
    lines = "".join(f"{json.dumps({'query': query})}\n" for query in queries)
    (tmp_path / "queries.jsonl").write_text(lines)
    lines = "".join(f"{json.dumps({'text': passage})}\n" for passage in passages)
    (tmp_path / "passages.jsonl").write_text(lines)
    files = {"test": tmp_path / "queries.jsonl", "passages": tmp_path / "passages.jsonl"}
    config = retrieval.get_config("bi_encoder")
    written = predict(config, model, tmp_path / "run", train="", **files)
    loaded = bert_jax.load(model)
    vectors = loaded.encode(queries, max_length=6)
    scores = vectors @ loaded.encode(passages).T
    for line, row in zip(read_lines(written / "test.jsonl"), scores, strict=True):
        np.testing.assert_allclose(line["scores"], np.sort(row)[::-1], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.* texts are truncated")
@pytest.mark.parametrize("length", LENGTHS)
def test_scores_of_a_cross_encoder_are_those_of_load(length, tmp_path):
    head = {"task": "multiple_choice", "labels": ["score"], "max_seq_length": length}
    model = write_head(tmp_path, **head, max_query_length=5)
    queries, passages = texts(5), texts(4, seed=1)
    lines = [json.dumps({"query": query, "negatives": passages}) for query in queries]
    (tmp_path / "new.jsonl").write_text("\n".join(lines) + "\n")
    config = retrieval.get_config("cross_encoder")
    written = predict(config, model, tmp_path / "run", train="", test=tmp_path / "new.jsonl")
    rankings = bert_jax.load(model).rank(queries, passages)
    for line, ranked in zip(read_lines(written / "test.jsonl"), rankings, strict=True):
        assert line["negatives"] == [each.text for each in ranked]
        np.testing.assert_allclose(line["scores"], [each.score for each in ranked], atol=1e-5)


@pytest.mark.filterwarnings("ignore:.* texts are truncated")
@pytest.mark.parametrize("length", LENGTHS)
def test_choices_are_those_of_load(length, tmp_path):
    head = {"task": "multiple_choice", "labels": ["score"], "max_seq_length": length}
    model = write_head(tmp_path, **head)
    stories, endings = texts(9), texts(36, seed=1)
    columns = (
        "video-id fold-ind startphrase sent1 sent2 gold-source ending0 ending1 ending2 ending3"
    )
    rows = [[*columns.split(), "label"]]
    for number, story in enumerate(stories):
        own = endings[4 * number : 4 * number + 4]
        rows.append(["v", str(number), story, story, "", "gold", *own, "0"])
    (tmp_path / "swag").mkdir()
    text = "\n".join(",".join(["", *row]) for row in rows) + "\n"
    for name in ("train.csv", "val.csv"):
        (tmp_path / "swag" / name).write_text(text)
    config = swag.get_config()
    config.num_epochs = 0.0
    written = predict(config, model, tmp_path / "run", directory=tmp_path / "swag")
    found = [int(line["prediction"]) for line in read_lines(written / "dev.jsonl")]
    loaded = bert_jax.load(model)
    expected = [
        loaded.rank(story, endings[4 * number : 4 * number + 4])[0].index
        for number, story in enumerate(stories)
    ]
    assert found == expected


def test_flag_that_contradicts_the_head_is_refused(tmp_path, monkeypatch):
    head = {"task": "classification", "labels": ["no", "yes"], "max_seq_length": 12}
    model = write_head(tmp_path, **head)
    (tmp_path / "new.csv").write_text("text\nthe river\n")
    given = {"max_seq_length": 32, "data.regression": True}
    for name, value in given.items():
        monkeypatch.setattr(
            command_line, "given_fields", lambda name=name, value=value: {name: value}
        )
        config = text_classification.get_config()
        config.update_from_flattened_dict({name: value})
        with pytest.raises(ValueError, match=rf"--config\.{name}={value}: the head in .*: remove"):
            predict(config, model, tmp_path / "run", train="", test=tmp_path / "new.csv")
    config = text_classification.get_config()
    config.max_seq_length = 12
    monkeypatch.setattr(command_line, "given_fields", lambda: {"max_seq_length": 12})
    predict(config, model, tmp_path / "run", train="", test=tmp_path / "new.csv")
