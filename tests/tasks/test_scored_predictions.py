"""Scores of the files of predictions equal those of the outputs that were written there."""

import itertools
import json
import random

import numpy as np
import pytest

from bert_jax.configs.finetune import glue as glue_config
from bert_jax.configs.finetune import retrieval as retrieval_config
from bert_jax.configs.finetune import squad as squad_config
from bert_jax.configs.finetune import tagging as tagging_config
from bert_jax.configs.finetune import text_classification as text_config
from bert_jax.tasks import glue, retrieval, squad, tagging, text_classification
from bert_jax.tasks.scored_predictions import read_scored
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import WORDS, write_vocabulary
from tests.helpers.json_lines import write_lines


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_vocabulary(tmp_path_factory.mktemp("v") / "vocab.txt"))


def texts(labels):
    """Returns an example for each label."""
    rng = random.Random(0)
    return [{"text": " ".join(rng.choices(WORDS, k=4)), "label": label} for label in labels]


def text_task(directory, tokenizer, given, **data):
    config = text_config.get_config()
    config.data.train = config.data.dev = str(write_lines(directory / "t.jsonl", texts(given)))
    config.data.update(data)
    return text_classification.get_task(config, tokenizer), config


def two_classes(directory, tokenizer):
    return text_task(directory, tokenizer, ["no", "yes", "no", "no", "yes"] * 8)


def number_classes(directory, tokenizer):
    return text_task(directory, tokenizer, ["10", "9"] * 20, labels=("10", "9"))


def label_sets(directory, tokenizer):
    labels = [[], ["a"], ["a", "b"], ["c"]] * 10
    return text_task(directory, tokenizer, labels, label_separator="|", labels=tuple("abcd"))


def values(directory, tokenizer):
    labels = np.random.default_rng(1).normal(size=40).round(2).tolist()
    return text_task(directory, tokenizer, labels, regression=True)


def tags(directory, tokenizer, scheme="iob2", tags=("O", "B-A", "I-A", "B-B")):
    rng = random.Random(0)
    lines = [{"tokens": rng.choices(WORDS, k=6), "tags": ["O"] * 6} for _ in range(20)]
    for line in lines:
        line["tags"][1:4] = [tags[1], tags[2], tags[3]]
    lines[3]["tokens"][2] = "new york"
    config = tagging_config.get_config()
    config.data.train = config.data.dev = str(write_lines(directory / "t.jsonl", lines))
    config.data.scheme = scheme
    return tagging.get_task(config, tokenizer), config


def bioes_tags(directory, tokenizer):
    return tags(directory, tokenizer, "bioes", ("O", "B-A", "E-A", "S-B"))


def plain_tags(directory, tokenizer):
    return tags(directory, tokenizer, "none", ("DET", "NOUN", "VERB", "ADJ"))


def mrpc(directory, tokenizer):
    lines = [f"{n % 3 % 2}\t1\t2\t{WORDS[n]} king\tthe {WORDS[n]}" for n in range(20)]
    text = "\n".join(["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", *lines]) + "\n"
    (directory / "MRPC").mkdir()
    for name in ("train", "dev"):
        (directory / f"MRPC/{name}.tsv").write_text(text)
    config = glue_config.get_config("mrpc")
    config.data.directory = str(directory)
    return glue.get_task(config, tokenizer), config


def answers(directory, tokenizer, version="v1"):
    context = "the old king built a road north of the river"
    lines = [{"id": str(n), "question": WORDS[n], "context": context} for n in range(20)]
    for number, line in enumerate(lines):
        word = context.split()[number % 10]
        line["answers"] = [{"text": word, "answer_start": context.index(word)}]
        if version == "v2" and number % 3 == 0:
            line["answers"] = []
    config = squad_config.get_config(f"{version},runlocal")
    config.data.train = config.data.dev = str(write_lines(directory / "q.jsonl", lines))
    task = squad.get_task(config, tokenizer)
    return task.with_settings({"null_threshold": 0.5} if version == "v2" else {}), config


def answers_or_none(directory, tokenizer):
    return answers(directory, tokenizer, "v2")


def queries(directory, tokenizer):
    lines = [{"query": word, "positive": f"the {word}"} for word in WORDS[:12]]
    config = retrieval_config.get_config("bi_encoder,runlocal")
    config.data.train = config.data.dev = str(write_lines(directory / "r.jsonl", lines))
    return retrieval.get_task(config, tokenizer), config


def random_outputs(task, split):
    """Returns outputs of the head's shape; those of vectors, `[1, size]`."""
    rng = np.random.default_rng(0)
    kind, size = task.head.predicts, max(len(task.labels), 2)
    shapes = [(size,)] * len(split.features)
    if kind == "value":
        shapes = [(1,)] * len(shapes)
    if kind in ("tag", "span"):
        shapes = [(len(feature), size) for feature in split.features]
    if kind == "vector":
        shapes = [(1, 6)] * len(shapes)
    return [(4 * rng.normal(size=shape)).astype(np.float32) for shape in shapes]


CASES = (
    (two_classes, "accuracy macro_f1 matthews roc_auc average_precision"),
    (number_classes, "roc_auc average_precision macro_f1"),
    (label_sets, "micro_f1 macro_f1"),
    (values, "pearson spearman r2 mean_squared_error"),
    (tags, "f1 accuracy"),
    (bioes_tags, "f1"),
    (plain_tags, "accuracy"),
    (mrpc, "f1 accuracy"),
    (answers, "f1 exact"),
    (answers_or_none, "f1 exact"),
    (queries, "mrr_at_10 ndcg_at_10"),
)


@pytest.mark.parametrize(("make", "metrics"), CASES, ids=lambda each: getattr(each, "__name__", ""))
def test_score_of_all_examples_is_that_of_the_outputs(make, metrics, tokenizer, tmp_path):
    task, config = make(tmp_path, tokenizer)
    split = task.splits[0]
    outputs = random_outputs(task, split)
    found = split.score(outputs)
    split.write(outputs, tmp_path)
    settings = config.to_dict()
    settings["head"] = {"labels": list(task.labels)} | task.head_settings
    for metric in metrics.split():
        scored = read_scored(tmp_path, split.name, metric, settings)
        rows = np.arange(len(scored.examples))
        assert scored.score(rows) == pytest.approx(found[metric], abs=2e-6)
        # The same examples twice have the same score, in any order.
        twice = np.random.default_rng(0).permutation(np.tile(rows, 2))
        assert scored.score(twice) == pytest.approx(found[metric], abs=2e-6)
        assert scored.is_correct is None or scored.is_correct.mean() == found["accuracy"]
    with pytest.raises(ValueError, match="no_metric"):
        read_scored(tmp_path, split.name, "no_metric", settings)


def write_sets(directory, names, predicted, expected):
    """Writes predictions of sets of labels, bool `[examples, labels]`; returns the settings."""
    lines = [
        {"id": str(n), **{key: [names[i] for i in np.flatnonzero(row)] for key, row in pair}}
        for n, *rows in zip(itertools.count(), predicted, expected)
        for pair in [[*zip(("prediction", "label"), rows, strict=True)]]
    ]
    write_lines(directory / "dev.jsonl", lines)
    return {"head": {"labels": names}}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("metric", ["micro_f1", "macro_f1"])
def test_f1_of_label_sets_is_that_of_scores_in_every_sample(metric, seed, tmp_path):
    rng = np.random.default_rng(seed)
    predicted, expected = rng.random((2, 30, 7)) < rng.random(7) ** 2  # Some labels are rare.
    expected[:, 0] = predicted[:, 0] = False
    settings = write_sets(tmp_path, list("abcdefg"), predicted, expected)
    score = read_scored(tmp_path, "dev", metric, settings).score
    for rows in (np.arange(30), [0], *rng.integers(30, size=(10, 30))):
        assert score(rows) == text_classification.SCORES[metric](predicted[rows], expected[rows])


def test_unknown_label_of_a_set_is_refused(tmp_path):
    settings = write_sets(tmp_path, ["a", "b"], np.eye(2), np.eye(2))
    settings["head"]["labels"] = ["a"]
    with pytest.raises(ValueError, match=r"dev\.jsonl: label 'b'"):
        read_scored(tmp_path, "dev", "macro_f1", settings)


def test_macro_f1_has_the_same_classes_in_every_sample(tmp_path):
    pairs = ("aa", "ab", "bb", "cc")  # Predicted, expected.
    lines = [
        {"id": str(n), "prediction": predicted, "label": expected}
        for n, (predicted, expected) in enumerate(pairs)
    ]
    write_lines(tmp_path / "dev.jsonl", lines)
    score = read_scored(tmp_path, "dev", "macro_f1", {"head": {"labels": list("abcd")}}).score
    assert score(np.arange(4)) == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)
    assert score(np.array([0, 0, 2, 2])) == pytest.approx(2 / 3)  # Of c there is none: 0.


def test_a_blank_line_ends_a_sentence_also_one_without_words(tmp_path):
    (tmp_path / "dev.txt").write_text("a O O\n\n\nb\tB-X\tO\nc\tO\tO\n\n")
    expected = [(("a",), ("O",)), ((), ()), (("b", "c"), ("B-X", "O"))]
    scored = read_scored(tmp_path, "dev", "accuracy", {})
    assert scored.examples == expected
    assert [scored.score([row]) for row in range(3)] == [1.0, 0.0, 0.5]
    (tmp_path / "dev.txt").write_text("a O O\n\n\n")
    assert read_scored(tmp_path, "dev", "accuracy", {}).examples == expected[:2]
    (tmp_path / "dev.txt").write_text("a O O")  # Without the blank line.
    assert read_scored(tmp_path, "dev", "accuracy", {}).examples == expected[:1]


def test_examples_are_what_the_model_was_given(tokenizer, tmp_path):
    task, config = two_classes(tmp_path, tokenizer)
    settings = config.to_dict() | {"head": {"labels": list(task.labels)}}
    found = []
    for seed in range(2):
        outputs = list(np.random.default_rng(seed).normal(size=(40, 2)))
        task.splits[0].write(outputs, tmp_path)
        found.append(read_scored(tmp_path, "dev", "accuracy", settings))
    assert found[0].examples == found[1].examples
    assert found[0].examples[0].keys() == {"id", "text", "label"}
    (tmp_path / "dev.jsonl").write_text(json.dumps({"id": "1", "prediction": "a"}) + "\n")
    with pytest.raises(ValueError, match=r"dev\.jsonl"):
        read_scored(tmp_path, "dev", "accuracy", settings)
    with pytest.raises(FileNotFoundError, match="test"):
        read_scored(tmp_path, "test", "accuracy", settings)
