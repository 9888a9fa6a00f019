"""Checks that a prediction-only run predicts what `bert_jax.load` predicts, for each task."""

import json
import random

import flax
import numpy as np
import pytest
from scipy.special import softmax

import bert_jax
from bert_jax import finetune
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.huggingface import HEAD_KEY
from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.parameters import model_settings, parameter_shapes
from bert_jax.configs.finetune import (
    feature_based,
    retrieval,
    swag,
    tagging,
    text_classification,
)
from bert_jax.model.config import BertConfig
from bert_jax.tasks.conll import convert_tags
from bert_jax.tasks.tagging_scores import find_entities, find_runs
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import WORDS, write_vocabulary


def write_head(directory, imported=False, **head):
    """Writes a small random model with a head of these settings.

    If `imported`, it is transformers' directory, which has only the kind of head and its labels.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(write_vocabulary(directory / "vocab.txt"))
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32}
    config = BertConfig(tokenizer.vocab_size, **sizes, max_position_embeddings=64)
    rng = np.random.default_rng(0)
    params = {  # Large, and without biases, so that labels vary.
        path: np.float32(rng.normal(0, 1, leaf.shape) * (not path.endswith(("bias", "scale"))))
        + np.float32(path.endswith("scale"))
        for path, leaf in parameter_shapes(config, head).items()
        if not path.startswith(("mlm", "nsp"))
    }
    params = flax.traverse_util.unflatten_dict(params, sep="/")
    settings = model_settings(config, params) | {"head": head}
    model = directory / "model"
    if not imported:
        write_checkpoint(model, params, settings, tokenizer)
        return model
    save_huggingface(model, params, settings, tokenizer)
    values = json.loads((model / "config.json").read_text())
    del values[HEAD_KEY]
    (model / "config.json").write_text(json.dumps(values))
    return model


def predict(config, model, workdir, **data):
    """Runs the command's function without training data; returns the folder of predictions."""
    config.init_from = str(model)
    for name, value in data.items():
        config.data[name] = str(value)
    result = finetune.train_and_evaluate(config, workdir)
    assert result["steps"] == 0 and not (workdir / "best").exists()
    assert all((workdir / file).is_file() for file in result["predictions"])
    assert result["predictions"][-1].endswith((".jsonl", ".txt", "/predictions.json"))
    assert "metric" not in result  # It has selected nothing.
    return workdir / "predictions"


def write_lines(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(count, seed=0):
    """Texts of 1 to 60 words: some are longer than every length."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 60))) for _ in range(count)]


def check_classes(task, is_pair, model, tmp_path):
    """Compares the labels of the command line with the labels of load, and returns them."""
    first, second = texts(20), texts(20, seed=1)
    pairs = list(zip(first, second, strict=True))
    rows = [{"text": a, "text_pair": b} if is_pair else {"text": a} for a, b in pairs]
    path = write_lines(tmp_path / "new.jsonl", rows)
    config = text_classification.get_config()
    config.data.text_pair = "text_pair" if is_pair else ""
    lines = read_lines(predict(config, model, tmp_path / "run", train="", test=path) / "test.jsonl")
    inputs, loaded = pairs if is_pair else first, bert_jax.load(model)
    found, expected = [line["prediction"] for line in lines], loaded.classify(inputs)
    if task == "regression":
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        return found
    ranking = loaded.classify(inputs, top_k=len(loaded.head["labels"]))
    for line, ranked in zip(lines, ranking, strict=True):
        assert line["probabilities"] == pytest.approx(dict(ranked), abs=1e-5)
    if task == "classification":
        assert found == [best.label for best in expected]
    else:
        assert list(map(set, found)) == [{label for label, _ in each} for each in expected]
    return found


def check_tags(model, tmp_path, kind, documents=None):
    """Compares the tags of the command line with the tags of load, and returns them."""
    sentences = [text.split() for text in texts(15)]
    names = documents or [str(number) for number in range(15)]  # A text alone is a document.
    rows = [
        {"tokens": words, "document": name} for words, name in zip(sentences, names, strict=True)
    ]
    files = {"train": "", "dev": "", "test": write_lines(tmp_path / "new.jsonl", rows)}
    config = (feature_based if kind == "features" else tagging).get_config()
    written = predict(config, model, tmp_path / "run", **files)
    blocks = (written / "test.txt").read_text().strip().split("\n\n")
    found = [[line.split()[-1] for line in block.splitlines()] for block in blocks]
    tagged = bert_jax.load(model).tag([tuple(words) for words in sentences], documents)
    expected = [[word.tag for word in each.words] for each in tagged]
    if kind in ("bioes", "bilou", "plain"):  # The file is in IOB2, for conlleval.
        find = find_runs if kind == "plain" else find_entities
        expected = [list(convert_tags(tags, "iob2", find)) for tags in expected]
    assert found == expected
    return found


def check_answers(model, tmp_path, config, **options):
    pairs = list(zip(texts(12), texts(12, seed=1), strict=True))
    rows = [{"id": str(n), "question": q, "context": c} for n, (q, c) in enumerate(pairs)]
    path = write_lines(tmp_path / "new.jsonl", rows)
    written = predict(config, model, tmp_path / "run", train="", test=path) / "test"
    predictions = json.loads((written / "predictions.json").read_text())
    nbest = json.loads((written / "nbest_predictions.json").read_text())
    questions, contexts = map(list, zip(*pairs, strict=True))
    answers = bert_jax.load(model).answer(questions, contexts, top_k=20, **options)
    for number, ranked in enumerate(answers):
        assert predictions[str(number)] == ranked[0].text
        found = {each["text"]: each["probability"] for each in nbest[str(number)]}
        # `top_k` is at most 20, and the file has "no answer" besides the 20 best.
        assert {answer.text for answer in ranked} <= found.keys()
        for answer in ranked:
            assert found[answer.text] == pytest.approx(answer.probability, abs=1e-5)


def check_retrieval(model, tmp_path, **query_options):
    queries, passages = texts(6), texts(8, seed=1)
    files = {
        "test": write_lines(tmp_path / "queries.jsonl", [{"query": each} for each in queries]),
        "passages": write_lines(tmp_path / "passages.jsonl", [{"text": each} for each in passages]),
    }
    config = retrieval.get_config("bi_encoder")
    lines = read_lines(predict(config, model, tmp_path / "run", train="", **files) / "test.jsonl")
    loaded = bert_jax.load(model)
    scores = loaded.encode(queries, **query_options) @ loaded.encode(passages).T
    for line, row in zip(lines, scores, strict=True):
        found = [row[passages.index(passage)] for passage in line["negatives"]]
        np.testing.assert_allclose(line["scores"], found, rtol=1e-4, atol=1e-5)
        assert sorted(line["negatives"]) == sorted(passages)


def check_rankings(model, tmp_path):
    queries, passages = texts(5), texts(4, seed=1)
    lines = [{"query": query, "negatives": passages} for query in queries]
    path = write_lines(tmp_path / "new.jsonl", lines)
    config = retrieval.get_config("cross_encoder")
    written = predict(config, model, tmp_path / "run", train="", test=path)
    rankings = bert_jax.load(model).rank(queries, passages)
    for line, ranked in zip(read_lines(written / "test.jsonl"), rankings, strict=True):
        assert line["negatives"] == [each.text for each in ranked]
        np.testing.assert_allclose(line["scores"], [each.score for each in ranked], atol=1e-4)


def check_choices(model, tmp_path):
    stories, endings = texts(9), texts(36, seed=1)
    own = [endings[4 * number : 4 * number + 4] for number in range(9)]
    header = ["sent1", "sent2", *(f"ending{n}" for n in range(4)), "label"]
    rows = [[story, "", *each, "0"] for story, each in zip(stories, own, strict=True)]
    (tmp_path / "swag").mkdir()
    text = "".join(f"{','.join(row)}\n" for row in (header, *rows))
    (tmp_path / "swag/val.csv").write_text(text)
    config = swag.get_config()
    config.num_epochs = 0.0
    written = predict(config, model, tmp_path / "run", directory=tmp_path / "swag")
    loaded = bert_jax.load(model)
    for line, story, each in zip(read_lines(written / "dev.jsonl"), stories, own, strict=True):
        scores = [x.score for x in sorted(loaded.rank(story, each), key=lambda x: x.index)]
        assert int(line["prediction"]) == int(np.argmax(scores))
        expected = dict(zip("0123", softmax(scores).tolist(), strict=True))
        assert line["probabilities"] == pytest.approx(expected, abs=1e-5)
