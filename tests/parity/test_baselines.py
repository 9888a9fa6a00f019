"""TF-IDF baselines equal a pipeline of scikit-learn over the words of the texts."""

import random

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline

from bert_jax.configs.finetune.text_classification import get_config
from bert_jax.tasks import scores, text_classification
from bert_jax.tasks.baselines import score_baselines
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import WORDS, write_vocabulary
from tests.helpers.json_lines import write_lines


def examples(kind, count, seed):
    """Returns texts with words of their label, and of others."""
    rng = random.Random(seed)
    lines = []
    for _ in range(count):
        group = rng.randrange(3)
        words = rng.choices(WORDS[group::3], k=3) + rng.choices(WORDS, k=6)
        label = "abc"[group]
        if kind == "sets":
            label = [
                name for name, present in zip("ab", (group > 0, group < 2), strict=True) if present
            ]
        if kind == "values":
            label = group + rng.random()
        lines.append({"text": " ".join(words), "label": label})
    return lines


@pytest.mark.parametrize("kind", ["classes", "sets", "values"])
def test_scores_are_those_of_a_pipeline(kind, tmp_path):
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    train, dev = examples(kind, 200, seed=0), examples(kind, 100, seed=1)
    config = get_config()
    config.data.train = str(write_lines(tmp_path / "train.jsonl", train))
    config.data.dev = str(write_lines(tmp_path / "dev.jsonl", dev))
    config.data.regression = kind == "values"
    config.data.label_separator = "|" if kind == "sets" else ""
    constant, found = score_baselines(text_classification.get_task(config, tokenizer))

    model = {
        "classes": LogisticRegression(C=10),
        "sets": OneVsRestClassifier(LogisticRegression(C=10)),
        "values": Ridge(),
    }[kind]
    # Each word is a token; [CLS] and [SEP] are the first and the last one.
    texts = [[f"[CLS] {line['text']} [SEP]" for line in part] for part in (train, dev)]
    labels = [[line["label"] for line in part] for part in (train, dev)]
    if kind == "sets":
        labels = [np.array([["a" in each, "b" in each] for each in part], int) for part in labels]
    vectorizer = TfidfVectorizer(token_pattern=r"\S+", ngram_range=(1, 2), sublinear_tf=True)
    pipeline = make_pipeline(vectorizer, model).fit(texts[0], labels[0])
    metric = {"classes": scores.accuracy, "sets": scores.f1, "values": scores.pearson}[kind]
    expected = metric(pipeline.predict(texts[1]), np.array(labels[1]))
    assert found["baseline"] == "tf_idf" and found["score"] == pytest.approx(expected, abs=1e-6)
    assert found["score"] > constant["score"] + 0.1
