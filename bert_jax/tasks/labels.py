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
    if len(set(given)) < len(given):
        raise ValueError(f"--config.data.labels={','.join(given)}: a label is listed twice")
    for record in () if given else records:
        if (label := record.columns[column]) != label.strip():
            raise ValueError(f"{record.place}: remove the white space around the label {label!r}")
    labels = tuple(given) or tuple(sorted({record.columns[column] for record in records}))
    if len(labels) < 2:
        found = f"--config.data.labels={','.join(labels)}"
        if records and not given:
            file = records[0].place.rpartition(", line")[0]
            found = f"{file}: column {column!r} has a single label, {labels[0]!r}"
        raise ValueError(f"{found}: expected at least two; is it the correct column?")
    return labels


def read_label(
    record: Record,
    column: str,
    labels: Sequence[str],
    unlabeled: Sequence[str] = ("",),
    aliases: Mapping[str, str] | None = None,
    hint: str = "",
) -> int | float | None:
    """Returns the index of a record's label in `labels`, or with no `labels` its value.

    None if the record has no such column, or one of the `unlabeled` values there.

    Args:
      aliases: other texts for a label -> the label.
      hint: end of the message of the ValueError for any other text.
    """
    text = record.columns.get(column, "")
    if text in unlabeled:
        return None
    if labels:
        name = (aliases or {}).get(text, text)
        if name not in labels:
            expected = ", ".join(labels)
            raise ValueError(f"{record.place}: label {text!r}, expected one of {expected}{hint}")
        return labels.index(name)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{record.place}: {column} is {text!r}, expected a finite number")
    return value


def check_labeled(
    examples: Sequence, labels: Sequence[object], column: str, required: bool
) -> None:
    """Raises ValueError if an example has no label, unless none has and none is `required`."""
    unknown = [label is None for label in labels]
    if any(unknown) and (required or not all(unknown)):
        expected = "every example needs one" if required else "label all examples, or none"
        raise ValueError(f"{examples[unknown.index(True)].place}: no {column!r}: {expected}")
