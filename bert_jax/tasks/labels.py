"""Labels: the classes given by flags or found in a file, and the label of each example."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from bert_jax.tasks.tables import Record


def labels_from_config(config: ConfigDict) -> tuple[str, ...]:
    """Returns `config.data.labels` as text; () if none are given.

    The flag parser reads `neg,pos` as one label and `0,1` as two numbers.
    """
    labels = tuple(map(str, config.data.labels))
    if len(labels) == 1:
        labels = tuple(label.strip() for label in labels[0].split(",") if label.strip())
    return labels


def find_labels(records: Sequence[Record], column: str, labels: tuple[str, ...]) -> tuple[str, ...]:
    """Returns `labels`, or if empty the sorted labels in `column`. Raises ValueError."""
    source = "--config.data.labels"
    if records and not labels:
        source = f"{records[0].location.rpartition(', ')[0]}, column {column!r}"
        labels = tuple(sorted({record.columns[column] for record in records}))
        for record in records:
            if (label := record.columns[column]) != label.strip():
                raise ValueError(f"{record.location}: remove the white space around {label!r}")
    if len(set(labels)) < max(len(labels), 2):
        names = ", ".join(labels) or "none"
        raise ValueError(f"{source}: expected two or more different labels, found {names}")
    return labels


def read_labels(
    records: Sequence[Record],
    column: str,
    labels: Sequence[str],
    required: bool,
    aliases: Mapping[str, str] | None = None,
    hint: str = "",
    separator: str = "",
) -> list[int | float | np.ndarray | None]:
    """Returns the index in `labels` of each record's label, or its value if `labels` is empty.

    Returns None for a record without the column or with "" in it. `aliases` maps other texts to
    labels, or to ""; `hint` ends the ValueError message for an unknown label. With a `separator`,
    a record may have several labels or none: if any has, returns float32 `[labels]` of 0s and 1s.
    """
    split = split_labels(records, column, separator) if separator else []
    if any(split):
        options = required, aliases, hint
        label_sets = [read_labels(copies, column, labels, *options) for copies in split]
        return [np.isin(range(len(labels)), each).astype(np.float32) for each in label_sets]
    values = []
    for record in records:
        text = record.columns.get(column, "")
        name = (aliases or {}).get(text, text)
        if not name:
            values.append(None)
        elif name in labels:
            values.append(labels.index(name))
        elif labels:
            expected = ", ".join(labels)
            raise ValueError(f"{record.location}: label {text!r}, expected one of {expected}{hint}")
        else:
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not math.isfinite(value):
                problem = f"{column} is {text!r}"
                raise ValueError(f"{record.location}: {problem}, expected a finite number")
            values.append(value)
    check_labeled(records, values, column, required)
    return values


def split_labels(records: Sequence[Record], column: str, separator: str) -> list[list[Record]]:
    """Returns, for each record, one copy per label in its `column`."""
    copies = []
    for record in records:
        labels = map(str.strip, record.columns.get(column, "").split(separator))
        rows = [record.columns | {column: label} for label in labels if label]
        copies.append([record._replace(columns=row) for row in rows])
    return copies


def check_labeled(examples: Sequence, labels: Sequence, column: str, required: bool) -> None:
    """Raises ValueError if an example has no label; unless `required`, all may have none."""
    unknown = [label is None for label in labels]
    if any(unknown) and (required or not all(unknown)):
        expected = "every example needs one" if required else "label all examples, or none"
        raise ValueError(f"{examples[unknown.index(True)].location}: no {column!r}: {expected}")
