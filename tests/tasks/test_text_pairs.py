"""Pairs of texts with a number: reading, scores and predictions."""

import numpy as np
import pytest
import scipy.stats

from bert_jax.configs.finetune import retrieval as config_file
from bert_jax.tasks import retrieval
from bert_jax.tasks.text_pairs import read_pairs
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import write_vocabulary
from tests.helpers.json_lines import read_lines, write_lines

PAIRS = [
    {"id": "x", "sentence1": "a king", "sentence2": "the king", "score": 4.5},
    {"id": "y", "sentence1": "old river", "sentence2": "the war", "score": 0.5},
    {"id": "z", "sentence1": "a road", "sentence2": "north", "score": 2.0},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_vocabulary(tmp_path_factory.mktemp("v") / "vocab.txt"))


def make_split(tmp_path, tokenizer, pairs, role="bi_encoder", **fields):
    config = config_file.get_config(f"{role},runlocal")
    config.data.dev = str(write_lines(tmp_path / "pairs.jsonl", pairs))
    config.data.update({"evaluation": "similarity"} | fields)
    task = retrieval.get_task(config, tokenizer)
    return task, *task.splits


def test_cosines_or_scores_are_compared_with_the_labels(tmp_path, tokenizer):
    rng = np.random.default_rng(0)
    labels = [pair["score"] for pair in PAIRS]
    for role in retrieval.ROLES:
        task, split = make_split(tmp_path, tokenizer, PAIRS, role)
        assert task.metric == "dev/spearman" and split.counts == {"pairs": 3}
        if role == "bi_encoder":
            vectors = rng.normal(size=(6, 4))
            outputs = [vector[None] for vector in vectors]
            units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
            expected = np.sum(units[:3] * units[3:], axis=1)
        else:
            expected = rng.normal(size=3)
            outputs = [np.array([score]) for score in expected]
        assert len(split.features) == len(outputs)
        found = split.score(outputs)
        assert found["spearman"] == pytest.approx(scipy.stats.spearmanr(expected, labels)[0])
        assert found["pearson"] == pytest.approx(scipy.stats.pearsonr(expected, labels)[0])
        assert "f1" not in found
        lines = read_lines(split.write(outputs, tmp_path))
        assert [line["id"] for line in lines] == ["x", "y", "z"]
        assert [line["prediction"] for line in lines] == pytest.approx(expected)


def test_pairs_of_two_classes_have_the_scores_of_a_classification(tmp_path, tokenizer):
    pairs = [pair | {"score": label} for pair, label in zip(PAIRS, (1, 0, 1), strict=True)]
    _, split = make_split(tmp_path, tokenizer, pairs, "cross_encoder", metric="average_precision")
    found = split.score([np.array([score]) for score in (2.0, 1.0, 0.5)])
    assert found["accuracy"] == pytest.approx(2 / 3) and found["f1"] == pytest.approx(0.8)
    assert found["average_precision"] == pytest.approx((1 + 2 / 3) / 2)


def test_pairs_without_labels_are_predicted(tmp_path, tokenizer):
    pairs = [{"query": "king", "passage": ""}, {"query": "a", "passage": "b", "topic": "c"}]
    task, split = make_split(tmp_path, tokenizer, pairs)
    assert split.score is None
    assert {name: count for name, count in task.notes.items() if count} == {
        "dev lines with 'topic', which is not used": 1,
        "dev examples with an empty text": 1,
    }
    lines = read_lines(split.write([np.ones((1, 2))] * 4, tmp_path))
    assert [line["prediction"] for line in lines] == pytest.approx([1, 1])


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([PAIRS[0] | {"score": "high"}], "line 1: 'score'"),
        ([PAIRS[0], {"sentence1": "a", "sentence2": "b"}], "line 2: .*'label'"),
        ([PAIRS[0], PAIRS[0]], "line 2: .*'x'"),
        ([{"sentence1": "a", "score": 1}], "line 1: 'positive'"),
    ],
)
def test_bad_pair_is_named(pairs, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_pairs(write_lines(tmp_path / "pairs.jsonl", pairs))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"evaluation": "sts"}, "config.data.evaluation=sts"),
        ({"metric": "mrr_at_10"}, "config.data.metric=mrr_at_10"),
        ({"metric": "f1"}, r"config\.data\.metric=f1: .*pairs\.jsonl"),
        ({"queries": "q.jsonl", "passages": "p.jsonl"}, "config.data.evaluation=similarity"),
    ],
)
def test_bad_field_is_named(fields, message, tmp_path, tokenizer):
    with pytest.raises(ValueError, match=message):
        make_split(tmp_path, tokenizer, PAIRS, **fields)
