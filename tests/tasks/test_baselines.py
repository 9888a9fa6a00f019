"""Baselines are scored by the task's metric, from what the training examples alone say."""

import numpy as np
import pytest

from bert_jax.configs.finetune import tagging as tagging_config
from bert_jax.configs.finetune import text_classification as text_config
from bert_jax.tasks import tagging, text_classification
from bert_jax.tasks.baselines import score_baselines
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import WORDS, write_vocabulary
from tests.helpers.json_lines import write_lines


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_vocabulary(tmp_path_factory.mktemp("v") / "vocab.txt"))


def read_task(directory, tokenizer, train, dev, **data):
    config = text_config.get_config()
    for name, labels in (("train", train), ("dev", dev)):
        lines = [{"text": WORDS[n % 9], "label": label} for n, label in enumerate(labels)]
        config.data[name] = str(write_lines(directory / f"{name}.jsonl", lines))
    config.data.update(data)
    return text_classification.get_task(config, tokenizer)


SETS = [["a"], ["a", "b"], ["a"], []]


@pytest.mark.parametrize(
    ("train", "dev", "data", "name", "score"),
    [
        (["a", "b", "b"], ["b", "a", "a", "b", "b"], {}, "majority", 0.6),
        (["a", "b", "b"], ["b", "b", "a"], {"metric": "macro_f1"}, "majority", 0.4),
        (["a", "b"], ["b", "a", "b"], {"metric": "roc_auc"}, "majority", 0.5),
        # "a" for each text: 2 of the 3 predictions are right, of 3 labels.
        (SETS, [["a"], ["a", "b"], []], {"label_separator": "|"}, "majority", 2 / 3),
        ([1.0, 2.0, 6.0], [2.0, 4.0], {"regression": True, "metric": "r2"}, "mean", 0.0),
        ([1.0, 2.0, 6.0], [2.0, 5.0], {"regression": True}, "mean", 0.0),
    ],
)
def test_constant_predictions(train, dev, data, name, score, tokenizer, tmp_path):
    task = read_task(tmp_path, tokenizer, train, dev, **data)
    found = score_baselines(task)[0]
    metric = task.metric.removeprefix("dev/")
    assert found == {
        "split": "dev",
        "baseline": name,
        "metric": metric,
        "score": pytest.approx(score),
    }


def test_words_get_the_most_frequent_tag_of_their_first_token(tokenizer, tmp_path):
    def write(name, *tagged):
        lines = [{"tokens": words.split(), "tags": tags.split()} for words, tags in tagged]
        return str(write_lines(tmp_path / f"{name}.jsonl", lines))

    config = tagging_config.get_config()
    config.data.scheme = "none"
    config.data.train = write("train", ("the king the", "D N D"), ("king king old", "N V D"))
    # "city" is not in train: it gets D, the most frequent tag.
    config.data.dev = write("dev", ("king the city", "N D N"), ("old king", "D V"))
    (found,) = score_baselines(tagging.get_task(config, tokenizer))
    assert (found["baseline"], found["score"]) == ("most_frequent_tag", pytest.approx(3 / 5))
    assert np.isfinite(found["score"])
