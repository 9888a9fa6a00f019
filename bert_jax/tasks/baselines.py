"""Scores predictors without a network, to compare a model with, by the metric of the task."""

import warnings
from collections.abc import Sequence

import numpy as np
from absl import logging
from scipy.special import logit

from bert_jax.data.features import NO_LABEL, ModelInput
from bert_jax.model.heads import Outputs
from bert_jax.tasks.task import Task

MAX_TRAIN = 20_000
"""Examples that TF-IDF is fitted on, evenly spaced in train."""
MAX_TERMS = 20_000
"""Tokens and pairs of tokens that TF-IDF weights, the most frequent ones."""
MAX_LABELS = 100
"""Number of labels up to which there is a TF-IDF baseline: the time is proportional to it."""
INVERSE_PENALTY = 10.0
"""C of the logistic regression: with scikit-learn's default, 1, it fits TF-IDF less well."""
_SMALLEST = 1e-9  # Probability, of a class without examples.


def score_baselines(task: Task) -> list[dict]:
    """Returns the score of each baseline on each split with labels; none for other tasks.

    `majority`, for classes and sets of labels, predicts how frequent they are in train; `mean`
    predicts the mean value; `most_frequent_tag` gives each word the tag that is most frequent in
    train for words that begin with the same token. `tf_idf` is a logistic regression of tokens and
    pairs of tokens, or a ridge regression, where scikit-learn is installed. All see the tokens that
    the model sees.
    """
    name = task.metric.rpartition("/")[-1]
    splits = [split for split in task.splits if split.score]
    kind = task.head.predicts
    found: dict[str, list[Outputs]] = {}
    if kind in ("class", "label_set", "value"):
        targets = np.array([feature.label for feature in task.train], np.float64)
        prior = _prior(kind, targets, len(task.labels))
        constant = [[prior] * len(split.features) for split in splits]
        found["mean" if kind == "value" else "majority"] = constant
        if len(task.labels) <= MAX_LABELS:
            found |= _tf_idf(task, [split.features for split in splits])
    elif kind == "tag":
        found["most_frequent_tag"] = _most_frequent_tags(task, [each.features for each in splits])
    return [
        {"split": split.name, "baseline": baseline, "metric": name, "score": scores[name]}
        for baseline, outputs in found.items()
        for split, each in zip(splits, outputs, strict=True)
        if name in (scores := split.score(each))
    ]


def _prior(kind: str, targets: np.ndarray, num_labels: int) -> np.ndarray:
    """Returns the output that fits `targets` best without looking at an input, `[outputs]`."""
    if kind == "value":
        return np.array([targets.mean()])
    if kind == "label_set":
        return logit(np.clip(targets.mean(axis=0), _SMALLEST, 1 - _SMALLEST))
    counts = np.bincount(targets.astype(int), minlength=num_labels)
    return np.log(np.maximum(counts / len(targets), _SMALLEST))


def _most_frequent_tags(task: Task, splits: Sequence[Sequence[ModelInput]]) -> list[Outputs]:
    """Returns outputs `[length, tags]`: the counts of each token's tags, and of all tokens' tags.

    The latter are less than 1, so that they only decide between equal counts.
    """
    tokens = np.concatenate([feature.sequences[0] for feature in task.train])
    labels = np.concatenate([feature.label for feature in task.train])
    is_first = labels != NO_LABEL
    highest = max(each.sequences[0].max() for part in (task.train, *splits) for each in part)
    counts = np.zeros((highest + 1, len(task.labels)))
    np.add.at(counts, (tokens[is_first], labels[is_first]), 1)
    total = counts.sum(axis=0)
    counts += total / (total.sum() + 1)
    return [[counts[feature.sequences[0]] for feature in features] for features in splits]


def _tf_idf(task: Task, splits: Sequence[Sequence[ModelInput]]) -> dict[str, list[Outputs]]:
    """Returns the outputs of "tf_idf"; {} without scikit-learn."""
    try:
        from sklearn.linear_model import LogisticRegression, Ridge
        from sklearn.multiclass import OneVsRestClassifier
    except ImportError:  # From the extra "baselines".
        return {}
    num_train = min(len(task.train), MAX_TRAIN)
    train = [task.train[index * len(task.train) // num_train] for index in range(num_train)]
    targets = np.array([feature.label for feature in train])
    if len(np.unique(targets, axis=0)) < 2:
        return {}
    logging.info("Fitting the TF-IDF baseline to %d examples", num_train)
    try:
        table, *tables = tf_idf_tables([_terms(part) for part in (train, *splits)])
    except ValueError as error:  # No text has any term.
        logging.info("No TF-IDF baseline: %s", error)
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of few iterations, and of labels that all or none have.
        if task.head.predicts == "value":
            model = Ridge().fit(table, targets)
            return {"tf_idf": [[*model.predict(each)[:, None]] for each in tables]}
        classifier = LogisticRegression(C=INVERSE_PENALTY)
        if task.head.predicts == "label_set":
            model = OneVsRestClassifier(classifier).fit(table, targets)
            outputs = (model.predict_proba(each) for each in tables)
            return {"tf_idf": [[*logit(np.clip(p, _SMALLEST, 1 - _SMALLEST))] for p in outputs]}
        model = classifier.fit(table, targets)
    logits = []
    for each in tables:
        probabilities = np.full((each.shape[0], len(task.labels)), _SMALLEST)
        probabilities[:, model.classes_] = model.predict_proba(each)
        logits.append([*np.log(np.maximum(probabilities, _SMALLEST))])
    return {"tf_idf": logits}


def _terms(features: Sequence[ModelInput]) -> list[str]:
    """Returns the tokens of each example as numbers, separated by spaces."""
    return [" ".join(map(str, np.concatenate(each.sequences).tolist())) for each in features]


def tf_idf_tables(parts: Sequence[Sequence[str]]) -> list:
    """Returns sparse weights `[texts, terms]` of each part; the first determines the terms.

    Terms are texts between white space and pairs of them, at most `MAX_TERMS`. Their weights are
    1 + log(count), times scikit-learn's inverse document frequency, and have norm 1 for each text.
    Raises ImportError without scikit-learn, from the extra "baselines".
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(
        lowercase=False,
        token_pattern=r"\S+",
        ngram_range=(1, 2),
        max_features=MAX_TERMS,
        sublinear_tf=True,
    )
    first, *others = parts
    return [vectorizer.fit_transform(first), *map(vectorizer.transform, others)]
