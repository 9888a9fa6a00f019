"""Labels: the classes given by flags or found in a file, and the label of each example.

If all labels are numbers, equal ones are one class in every file, however they are written: 1, 1.0,
" 1", 01 and 1e0, and also true, True and TRUE, which are 1. Other labels are compared as text.
Numbers are in numeric order (2 before 10), other labels in the order of their characters.
"""

import collections
import decimal
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from bert_jax.tasks.tables import Record, check_columns

LABEL_SEPARATOR = "|"  # In text, of the labels of a multi-label head that stores no other.
LARGE_RATIO = 10.0
"""Ratio of the weight of a class, or of a positive term, to the other's that gives a warning."""
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,2})?")
_BOOLEANS = {"true": decimal.Decimal(1), "false": decimal.Decimal(0)}


def labels_from_config(config: ConfigDict) -> tuple[str, ...]:
    """Returns `config.data.labels` as text; () if none are given."""
    return split_names(config.data.labels)


def split_names(given: Sequence | str) -> tuple[str, ...]:
    """Returns names as text, also those that a flag gives.

    The flag parser reads `neg,pos` as one name and `0,1` as two numbers.
    """
    names = (given,) if isinstance(given, str) else tuple(map(str, given))
    if len(names) == 1:
        names = tuple(name.strip() for name in names[0].split(",") if name.strip())
    return names


def label_columns_from_config(data: ConfigDict) -> tuple[str, ...]:
    """Returns the names in `data.label_columns`; () if none are given.

    Raises ValueError for a column that has another meaning too, and if there is another source of
    labels, or other `data.labels`, which may only give their order.
    """
    columns = split_names(data.label_columns)
    if not columns:
        return ()
    field = f"config.data.label_columns={','.join(columns)}"
    for other, default in (("regression", False), ("label_separator", ""), ("label", "label")):
        if data[other] != default:
            both = f"{field} and config.data.{other}={data[other]}"
            raise ValueError(f"{both}: labels have one source: set one of the two")
    if len(set(columns)) < max(len(columns), 2):
        raise ValueError(f"{field}: expected two or more different columns")
    for other in ("text", "text_pair", "id"):
        if data[other] in columns:
            raise ValueError(
                f"{field}: {data[other]!r} is data.{other}: expected columns of 0 and 1"
            )
    labels = split_names(data.labels)
    if labels and sorted(labels) != sorted(columns):
        fix = "the names of the columns are the labels: leave data.labels empty"
        raise ValueError(f"{field} and config.data.labels={','.join(labels)}: {fix}")
    return columns


def with_labels_in_columns(record: Record, columns: Sequence[str]) -> Record:
    """Returns the record with the labels whose columns are 1; the columns of the others are 0.

    0 and 1 are written as any equal number, or as false and true. The labels of a record without
    the columns, or with nothing or -1 in all of them, are unknown. Raises ValueError for other
    values, and if only some of the columns exist.
    """
    texts = [record.columns.get(column, "") for column in columns]
    if not any(texts) or all(_number(text) == -1 for text in texts):
        return record
    check_columns([record], columns)
    labels = []
    for column in columns:
        text = record.columns[column]
        if (value := _number(text)) not in (0, 1):
            raise ValueError(f"{record.location}: {column!r} is {text!r:.60}, expected 0 or 1")
        labels += [column] * int(value)
    return record._replace(labels=tuple(labels))


def read_weights(given: Sequence, labels: Sequence[str], field: str) -> tuple[float, ...]:
    """Returns the weight of each label, given one for each, or by name: `rare=5,other=2`.

    Labels that are not named have weight 1. Raises ValueError, naming `field`, for unknown labels
    and for weights that are not positive numbers.
    """
    weights = tuple(given)
    are_texts = weights and all(isinstance(each, str) for each in weights)
    parts = ",".join(weights).split(",") if are_texts else []
    if parts and all("=" in part for part in parts):
        pairs = [part.rsplit("=", 1) for part in parts]
        named: dict[str, float] = {}
        for name, weight in pairs:
            if (name := name.strip()) not in labels or name in named:
                expected = f"expected each of {', '.join(labels)} at most once"
                raise ValueError(f"{field}={','.join(parts)}: {name!r}: {expected}")
            named[name] = _weight_of(weight)
        weights = tuple(named.get(label, 1.0) for label in labels)
    is_valid = all(isinstance(each, int | float) and 0 < each < math.inf for each in weights)
    if not is_valid or len(weights) != len(labels):
        valid = f"a positive number for each of {', '.join(labels)}, or by name, such as "
        valid += f"{labels[0]}=2, or balanced" if labels else ""
        raise ValueError(
            f"{field}={','.join(map(str, given))}: expected "
            f"{valid if labels else 'none, as this task has no classes'}"
        )
    return weights


def _weight_of(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def find_labels(records: Sequence[Record], column: str, labels: tuple[str, ...]) -> tuple[str, ...]:
    """Returns `labels`, or if empty the labels in `column`, as `sort_labels`. Raises ValueError.

    A class of equal numbers has the name of its shortest spelling, where 1.0 is written as 1.
    """
    source = "config.data.labels"
    if records and not labels:
        source = f"{records[0].location.rpartition(', ')[0]}, column {column!r}"
        texts = sorted({record.columns[column] for record in records})
        spellings: dict[decimal.Decimal | None, list[str]] = collections.defaultdict(list)
        for text in texts:
            spellings[_number(text)].append(text)
        if None in spellings:
            for record in records:
                if (label := record.columns[column]) != label.strip():
                    raise ValueError(f"{record.location}: remove the white space around {label!r}")
            labels = sort_labels(texts)
        else:
            several = (" = ".join(map(repr, each)) for each in spellings.values() if len(each) > 1)
            if equal := "; ".join(several):
                logging.info("%s: equal numbers are one label: %s", source, equal)
            names = (min(map(_plain, each), key=_by_length) for each in spellings.values())
            labels = sort_labels(names)
    if len(set(labels)) < max(len(labels), 2):
        names = ", ".join(labels) or "none"
        raise ValueError(f"{source}: expected two or more different labels, found {names}")
    return labels


def sort_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Returns the labels in numeric order if all are numbers, else in the order of characters."""
    texts = sorted(labels)
    numbers = list(map(_number, texts))
    if None in numbers:
        return tuple(texts)
    return tuple(text for _, text in sorted(zip(numbers, texts, strict=True)))


def positive_of_two(labels: Sequence[str]) -> int:
    """Returns the index of the positive class of two: the larger number, else the second label.

    Given labels, and those of a head of an earlier version, may have the larger number first.
    """
    first, second = map(_number, labels)
    return 0 if None not in (first, second) and first > second else 1


def has_fractions(labels: Sequence[str]) -> bool:
    """Returns whether all labels are numbers, of which at least one is not an integer."""
    numbers = list(map(_number, labels))
    return None not in numbers and any(number % 1 for number in numbers)


def match_labels(texts: Iterable[str], labels: Sequence[str]) -> dict[str, str]:
    """Maps each text to the label that is the same text or, if all are numbers, the same number.

    Texts without such a label map to themselves.
    """
    by_number = {_number(label): label for label in labels}
    if None in by_number or len(by_number) < len(labels):
        by_number = {}
    matches = {text: by_number.get(_number(text), text) for text in set(texts)}
    return matches | {label: label for label in labels}


def _number(text: str) -> decimal.Decimal | None:
    """Returns the exact number that a text is (true is 1, false 0), or None if it is none."""
    text = text.strip()
    if _NUMBER.fullmatch(text):
        return decimal.Decimal(text)
    return _BOOLEANS.get(text.lower())


def _plain(text: str) -> str:
    """Returns the text of a number without a zero fraction or exponent; codes such as 01 stay."""
    text = text.strip()
    if not _NUMBER.fullmatch(text) or re.match("0[0-9]", text):
        return text
    number = format(decimal.Decimal(text), "f")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    return "0" if number == "-0" else number


def _by_length(text: str) -> tuple[int, str]:
    return len(text), text


def read_labels(
    records: Sequence[Record],
    column: str,
    labels: Sequence[str],
    required: bool,
    aliases: Mapping[str, str] | None = None,
    hint: str = "",
    multi_label: bool = False,
) -> list[int | float | np.ndarray | None]:
    """Returns the index in `labels` of each record's label, or its value if `labels` is empty.

    Returns None for a record without the column or with "" in it. Labels are compared as by
    `match_labels`. `aliases` maps other texts to labels, or to ""; `hint` ends the ValueError
    message for an unknown label. If `multi_label`, a record may have any number of `labels`: its
    value is float32 `[labels]` of 0s and 1s, or None if its labels are unknown.
    """
    values = []
    if multi_label:
        copies = split_labels(records, column)
        indices = iter(read_labels(copies, column, labels, required, aliases, hint))
        for record in records:
            label_set = np.zeros(len(labels), np.float32)
            label_set[list(itertools.islice(indices, len(record.labels or ())))] = 1
            values.append(None if record.labels is None else label_set)
        check_labeled(records, values, column, required)
        return values
    texts = [record.columns.get(column, "") for record in records]
    names = match_labels(texts, labels) | dict(aliases or {})
    index_of_label = {label: index for index, label in enumerate(labels)}
    for record, text in zip(records, texts, strict=True):
        name = names[text]
        if not name:
            values.append(None)
        elif name in index_of_label:
            values.append(index_of_label[name])
        elif labels:
            more = f" and {len(labels) - 50} more" if len(labels) > 50 else ""
            quoted = any("," in label for label in labels)  # Where commas do not separate them.
            expected = ", ".join(map(repr, labels[:50]) if quoted else labels[:50]) + more
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


def split_labels(records: Iterable[Record], column: str) -> list[Record]:
    """Returns one copy of a record for each of its `labels`, with this label in `column`."""
    return [
        record._replace(columns=record.columns | {column: label})
        for record in records
        for label in record.labels or ()
    ]


def check_labeled(examples: Sequence, labels: Sequence, column: str, required: bool) -> None:
    """Raises ValueError if an example has no label; unless `required`, all may have none."""
    unknown = [label is None for label in labels]
    if any(unknown) and (required or not all(unknown)):
        expected = "every example needs one" if required else "label all examples, or none"
        raise ValueError(f"{examples[unknown.index(True)].location}: no {column!r}: {expected}")
