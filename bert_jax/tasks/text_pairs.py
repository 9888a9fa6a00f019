"""Pairs of texts with a number: how similar they are (STS), or 1 and 0 (paraphrases or not)."""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.data.features import ModelInput
from bert_jax.model.pooling import unit_rows
from bert_jax.tasks import tables
from bert_jax.tasks.labels import check_labeled
from bert_jax.tasks.queries import (
    LABEL_NAMES,
    PASSAGE_NAMES,
    QUERY_NAMES,
    Inputs,
    find_name,
    read_id,
    read_number,
)
from bert_jax.tasks.retrieval_scores import join_vectors
from bert_jax.tasks.similarity_scores import correlation_scores, pair_scores
from bert_jax.tasks.task import Outputs, Split

BINARY_METRICS = ("average_precision", "accuracy", "f1")
"""Scores of pairs whose labels are 0 and 1."""
PAIR_METRICS = ("spearman", "pearson", *BINARY_METRICS)
"""Scores that may select a checkpoint."""


class TextPair(NamedTuple):
    """Two texts, and their label; None if unknown."""

    id: str
    first: str
    second: str
    label: float | None
    location: str


def read_pairs(
    path: str | pathlib.Path,
    is_training: bool = False,
    empty_texts: bool = False,
    unused: dict[str, int] | None = None,
) -> list[TextPair]:
    """Reads text pairs from a table; all must have a label, or (unless `is_training`) none.

    The texts are in the columns of a query and of a passage, such as `sentence1` and `sentence2`,
    the label in `label` or `score`. `unused` receives, for each other key, the number of lines that
    have it. Raises ValueError for a bad line.
    """
    pairs, unused = [], {} if unused is None else unused
    for number, (values, location) in enumerate(tables.iterate_rows(path)):
        names = [find_name(values, each) for each in (QUERY_NAMES, PASSAGE_NAMES, LABEL_NAMES)]
        for key in tables.find_unused_keys([(values, location)], names):
            unused[key] = unused.get(key, 0) + 1
        texts = [tables.text_field(values, name, location, empty_texts) for name in names[:2]]
        label = values.get(names[2])
        if label is not None:
            label = read_number(values, names[2], location)
        id_ = read_id(values, location, number)
        pairs.append(TextPair(id_, *texts, label, location))
    check_labeled(pairs, [pair.label for pair in pairs], "label", is_training)
    return tables.check_unique(pairs)


def check_metric_of_pairs(metric: str, pairs: Sequence[TextPair], path: str) -> None:
    """Raises ValueError if the labels of dev, read from `path`, do not have the score `metric`."""
    labels = {pair.label for pair in pairs}
    if metric in BINARY_METRICS and not labels <= {None} and labels != {0, 1}:
        found = ", ".join(f"{label:g}" for label in sorted(labels)[:5])
        raise ValueError(
            f"config.data.metric={metric}: expected both labels 0 and 1, and no other, in {path}, "
            f"found {found}: select by spearman, or change the labels"
        )


def make_pair_split(name: str, pairs: Sequence[TextPair], inputs: Inputs) -> Split:
    """Builds a split that scores the cosines of a bi-encoder, or a cross-encoder's scores.

    `inputs` have the first texts as queries, the second as passages.
    """
    if inputs.is_bi_encoder:
        sequences = inputs.singles((pair.first for pair in pairs), (pair.second for pair in pairs))
    else:
        sequences = [each for pair in pairs for each in inputs.pairs(pair.first, [pair.second])]
    features = [ModelInput((tokens,), (second_start,)) for tokens, second_start in sequences]

    def similarities(outputs: Outputs) -> np.ndarray:
        if not inputs.is_bi_encoder:
            return np.concatenate(outputs).astype(np.float64)
        vectors = unit_rows(join_vectors(outputs).astype(np.float64))
        return (vectors[: len(pairs)] * vectors[len(pairs) :]).sum(axis=1)

    def score(outputs: Outputs) -> dict[str, float]:
        found, labels = similarities(outputs), np.array([pair.label for pair in pairs])
        result = correlation_scores(found, labels)
        if set(labels) == {0, 1}:
            result |= pair_scores(found, labels == 1)
        return result

    def write(outputs: Outputs, directory: pathlib.Path) -> pathlib.Path:
        path = directory / f"{name}.jsonl"
        rows = zip(pairs, similarities(outputs).tolist(), strict=True)
        lines = (
            {"id": pair.id, "sentence1": pair.first, "sentence2": pair.second}
            | ({} if pair.label is None else {"label": pair.label})
            | {"prediction": value}
            for pair, value in rows
        )
        tables.write_json_lines(path, lines)
        return path

    counts = {"pairs": len(pairs)}
    is_labeled = pairs[0].label is not None
    return Split(name, features, score if is_labeled else None, write, counts=counts)
