"""Predicts the examples of a task, block by block, and tables from Python.

`bert_jax.predict` and `PretrainedModel.predict` both take this way.
"""

import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bert_jax.data.features import ModelInput
from bert_jax.model.heads import Outputs
from bert_jax.tasks import text_classification
from bert_jax.tasks.labels import split_names
from bert_jax.tasks.records import iterate_records
from bert_jax.tasks.tables import check_unique, note_unused_columns
from bert_jax.tasks.task import Predictor, TrainedHead

BLOCK = 4096
"""Examples that are predicted together."""


class Predictions(NamedTuple):
    """What a model predicts for a table.

    Attributes:
      rows: a dict for each example, as `bert_jax.predict` writes it: its "id", its columns as text,
        "label" if the head has it, "prediction", and the "probabilities" of all classes, best
        first; with more than 100 classes only the 10 best, and "num_other_labels".
      scores: the scores by name, and the number of "examples" that have such a label; empty if none
        has.
    """

    rows: list[dict]
    scores: dict[str, float]


def predict_blocks(
    apply: Callable[[Sequence[ModelInput]], Outputs], predictor: Predictor, examples: Iterable
) -> Iterator[Sequence]:
    """Yields the predictions of each block of examples; `apply` computes the head's outputs."""
    for block in split_into_blocks(examples):
        yield predictor.describe(block, apply(predictor.features(block)))


def split_into_blocks(examples: Iterable) -> Iterator[list]:
    """Yields lists of at most `BLOCK` examples."""
    examples = iter(examples)
    while block := list(itertools.islice(examples, BLOCK)):
        yield block


def predict_table(
    table: object,
    columns: Mapping[str, str | int],
    trained: TrainedHead,
    apply: Callable[[Sequence[ModelInput]], Outputs],
) -> Predictions:
    """Predicts and scores a table of texts, as documented in `PretrainedModel.predict`.

    `columns` has a value for each of `text_classification.PREDICT_OPTIONS`.
    """
    is_path = isinstance(table, str | os.PathLike)
    source = os.fspath(table) if is_path else list(iterate_records(table))
    if not source:
        if is_path:
            raise ValueError("the path of the table is empty")
        return Predictions([], {})
    # The table may lack the column of labels, as if it was named by no flag of `bert_jax.predict`.
    predictor = text_classification.get_predictor(trained, columns, given=set())
    records = check_unique(list(predictor.read(source)))
    unused: dict[str, int] = {}
    labels = split_names(columns["label_columns"]) or (columns["label"],)
    used = {columns["text"], columns["text_pair"], columns["id"], *labels}
    note_unused_columns(records, used, "table", unused)
    rows = list(itertools.chain.from_iterable(predict_blocks(apply, predictor, records)))
    counts = (
        f"{what}: {count} of {len(rows)}"
        for what, count in predictor.notes.items()
        if count and not (count == len(rows) and "without labels" in what)
    )
    for message in (*unused, *counts):
        warnings.warn(message, stacklevel=3)
    return Predictions(rows, predictor.scores())
