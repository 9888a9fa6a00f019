"""Labels: the classes given by flags or found in a file, and the label of each example."""

from collections.abc import Sequence

from ml_collections import ConfigDict

from bert_jax.tasks.tables import Record, finite_number


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
    hint: str = "",
) -> int | float | None:
    """Returns the index of a record's label in `labels`, or with no `labels` its value.

    None if the record has no such column, or one of the `unlabeled` values there. Raises ValueError
    for any other text; `hint` ends its message.
    """
    text = record.columns.get(column, "")
    if text in unlabeled:
        return None
    if not labels:
        return finite_number(record, column)
    if text not in labels:
        raise ValueError(
            f"{record.place}: label {text!r}, expected one of {', '.join(labels)}{hint}"
        )
    return labels.index(text)


def check_labeled(
    examples: Sequence, labels: Sequence[object], column: str, required: bool
) -> None:
    """Raises ValueError if an example has no label, unless none has and none is `required`."""
    unknown = [label is None for label in labels]
    if any(unknown) and (required or not all(unknown)):
        expected = "every example needs one" if required else "label all examples, or none"
        raise ValueError(f"{examples[unknown.index(True)].place}: no {column!r}: {expected}")
