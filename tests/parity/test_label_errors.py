"""Out-of-fold probabilities of scikit-learn, and flipped labels that are found with them."""

import random
import re

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import PredefinedSplit, cross_val_predict
from sklearn.pipeline import make_pipeline

from bert_jax.configs.finetune.text_classification import get_config
from bert_jax.tasks.label_errors import _fold_of_each, out_of_fold
from bert_jax.tools.errors import find_label_errors
from tests.helpers.corpora import WORDS
from tests.helpers.json_lines import write_lines


def make_texts(count):
    """Returns texts, and for each the group of which most of its words are."""
    rng = random.Random(0)
    groups = [rng.randrange(3) for _ in range(count)]
    words = [rng.choices(WORDS[group::3], k=6) + rng.choices(WORDS, k=2) for group in groups]
    return [" ".join(each).capitalize() + "!" for each in words], groups


def test_probabilities_are_those_of_cross_validation():
    texts, groups = make_texts(150)
    classes = np.array(groups)
    vectorizer = TfidfVectorizer(
        tokenizer=lambda text: re.findall(r"\w+|[^\w\s]", text),
        token_pattern=None,
        ngram_range=(1, 2),
        sublinear_tf=True,
    )
    expected = cross_val_predict(
        make_pipeline(vectorizer, LogisticRegression(C=10)),
        texts,
        classes,
        cv=PredefinedSplit(_fold_of_each(classes, 0)),
        method="predict_proba",
    )
    np.testing.assert_allclose(out_of_fold(texts, classes), expected, atol=1e-5)


def test_fewer_texts_than_folds_are_judged():
    probabilities = out_of_fold(["king", "king", "river", "river"], np.array([0, 0, 1, 1]))
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    assert probabilities.argmax(axis=1).tolist() == [0, 0, 1, 1]


def test_flipped_labels_are_listed_first_with_their_place_in_the_file(tmp_path):
    texts, groups = make_texts(300)
    flipped = set(random.Random(1).sample(range(300), 15))
    lines = [
        {"text": text, "label": "abc"[(group + (number in flipped)) % 3]}
        for number, (text, group) in enumerate(zip(texts, groups, strict=True))
    ]
    lines.append({"text": "the only one", "label": "d"})  # Nothing to compare it with.
    config = get_config()
    config.data.train = str(write_lines(tmp_path / "train.jsonl", lines))
    found = find_label_errors(config.data, ())
    assert len(found) == 30
    numbers = [int(line["location"].rpartition(" ")[2]) - 1 for line in found]
    assert len(flipped & set(numbers[:15])) >= 13 and 300 not in numbers
    for number, line in zip(numbers, found, strict=True):
        assert (line["text"], line["label"]) == (texts[number], lines[number]["label"])
        if number in flipped:
            assert line["suggested"] == "abc"[groups[number]]
