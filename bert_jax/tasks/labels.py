"""Labels: the classes given by flags or found in a file, and the label of each example."""

import math
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from bert_jax.tasks.tables import Record


def given_labels(config: ConfigDict) -> tuple[str, ...]:
    """Returns `config.data.labels` as text; () if none are given.

    The flag parser reads `neg,pos` as one label and `0,1` as two numbers.
    """
    labels = tuple(map(str, config.data.labels))
    if len(labels) == 1:
        labels = tuple(label.strip() for label in labels[0].split(",") if label.strip())
    return labels


def find_labels(records: Sequence[Record], column: str, given: Sequence[str]) -> tuple[str, ...]:
    """Returns the labels `given`, or with none those in `column`, sorted.

    Raises ValueError for fewer than two labels, a duplicate, or surrounding white space.
    """
    labels = tuple(given) or tuple(sorted({record.columns[column] for record in records}))
    for record in () if given else records:
        if (label := record.columns[column]) != label.strip():
            raise ValueError(f"{record.place}: remove the white space around the label {label!r}")
    if len(set(labels)) < max(len(labels), 2):
        source = "--config.data.labels"
        if records and not given:
            source = f"{records[0].place.rpartition(', line')[0]}: column {column!r}"
        found = ", ".join(labels) or "none"
        raise ValueError(f"{source}: expected two or more different labels, found {found}")
    return labels


def read_labels(
    records: Sequence[Record],
    column: str,
    labels: Sequence[str],
    required: bool,
    unlabeled: Sequence[str] = ("",),
    aliases: Mapping[str, str] | None = None,
    hint: str = "",
) -> list[int | float | None]:
    """Returns the index of each record's label in `labels`, or with no `labels` its value.

    None for a record without the column, or with one of the `unlabeled` values in it.

    Args:
      required: as for `check_labeled`.
      aliases: other texts for a label -> the label.
      hint: end of the message of the ValueError for any other text.
    """
    values = []
    for record in records:
        text = record.columns.get(column, "")
        name = (aliases or {}).get(text, text)
        if text in unlabeled:
            values.append(None)
        elif not labels:
            values.append(_finite_number(text, column, record.place))
        elif name in labels:
            values.append(labels.index(name))
        else:
            expected = ", ".join(labels)
            raise ValueError(f"{record.place}: label {text!r}, expected one of {expected}{hint}")
    check_labeled(records, values, column, required)
    return values


def _finite_number(text: str, column: str, place: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{place}: {column} is {text!r}, expected a finite number")
    return value


def check_labeled(
    examples: Sequence, labels: Sequence[object], column: str, required: bool
) -> None:
    """Raises ValueError if an example has no label, unless none has and none is `required`."""
    unknown = [label is None for label in labels]
    if any(unknown) and (required or not all(unknown)):
        expected = "every example needs one" if required else "label all examples, or none"
        raise ValueError(f"{examples[unknown.index(True)].place}: no {column!r}: {expected}")
