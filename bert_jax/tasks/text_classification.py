"""Your own texts or pairs of texts, to classes or to a number, out of CSV, TSV or JSONL."""

import collections
import json
import math
import pathlib
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from bert_jax.data.features import Feature, make_sequence
from bert_jax.tasks import scores
from bert_jax.tasks.tables import Record, read_table
from bert_jax.tasks.task import Outputs, Split, Task
from bert_jax.tokenization import Tokenizer

METRICS = ("accuracy", "macro_f1")
REGRESSION_METRICS = ("pearson", "spearman")


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads the files that `config.data` names; see configs/finetune/text_classification.py.

    Raises FileNotFoundError and ValueError, with file and line, for what cannot be read.
    """
    data, given = config.data, given_labels(config)
    can_predict = (data.dev or data.test) and (given or data.regression)
    if not (data.train or can_predict):
        raise ValueError(
            "give the examples to train on: --config.data.train=FILE; or, for a head that is "
            "trained already, those to predict: --config.data.test=FILE"
        )
    metric = choose_metric(REGRESSION_METRICS if data.regression else METRICS, data.metric)
    columns = (data.text, *filter(None, (data.text_pair, data.id)))
    texts = [data.text, data.text_pair] if data.text_pair else [data.text]

    def read(path, labeled):
        wanted = (*columns, data.label) if labeled else columns
        records = read_table(path, wanted, data.header_lines)
        check_texts(records, texts)
        return records

    train = read(data.train, labeled=True) if data.train else []  # None: predictions only.
    for record in train:
        if not record.columns[data.label]:
            raise ValueError(f"{record.place}: {data.label!r} is empty, and training needs it")
    example_ids(train, data.id)
    labels = ("value",) if data.regression else find_labels(train, data.label, given)
    notes: dict[str, int] = {}
    if train and not data.regression:
        counts = collections.Counter(record.columns[data.label] for record in train)
        rarest = min(labels, key=counts.__getitem__)
        notes |= {"labels": len(labels), f"train {rarest!r}, the rarest of them": counts[rarest]}

    def features(name, records):
        pairs = [[record.columns[column] for column in texts] for record in records]
        values = [
            record_label(record, data.label, None if data.regression else labels)
            for record in records
        ]
        made, notes[f"{name} truncated"] = text_features(
            pairs, values, tokenizer, config.max_seq_length
        )
        return made

    train_features, splits = features("train", train) if train else [], []
    for name in ("dev", "test"):
        if data[name]:
            # A test file may lack the column; in dev that is a mistake, such as a name mistyped.
            records = read(data[name], labeled=name == "dev")
            ids = example_ids(records, data.id)
            split = features(name, records)
            known = [feature.label is not None for feature in split]
            if any(known) != all(known):
                raise ValueError(
                    f"{records[known.index(False)].place}: no {data.label!r}, but others of the "
                    "file have one: give all, or none for predictions without a score"
                )
            if not all(known):
                notes[f"{name} without labels, so not scored"] = len(known)
            splits.append(make_split(name, split, ids, labels, data.regression))
    return Task(
        kind="regression" if data.regression else "classification",
        labels=labels,
        train=train_features,
        splits=tuple(splits),
        metric=f"dev/{metric}",
        notes=notes,
        settings={"max_seq_length": config.max_seq_length},
    )


def text_features(
    texts: Sequence[Sequence[str]],
    labels: Sequence[int | float | None],
    tokenizer: Tokenizer,
    max_seq_length: int,
) -> tuple[list[Feature], int]:
    """A feature for each text or pair of texts, and how many had to be cut.

    Of a pair the longer one is cut first, token by token from its end, as released.
    """
    pieces = [
        tokenizer.encode_batch([each[part] for each in texts]) for part in range(len(texts[0]))
    ]
    features, truncated = [], 0
    for *ids, label in zip(*pieces, labels, strict=True):
        room = max_seq_length - 1 - len(ids)
        truncated += sum(map(len, ids)) > room
        tokens, second = make_sequence(tokenizer, *truncate(ids, room))
        features.append(Feature((tokens,), (second,), label))
    return features, truncated


def truncate(ids: Sequence[list[int]], room: int) -> list[list[int]]:
    """One or two lists cut to `room` in all, the longer one first (of two alike, the second)."""
    if len(ids) == 1:
        return [ids[0][:room]]
    first, second = map(len, ids)
    excess = first + second - room
    if excess > 0:
        # The longer one loses until both are alike, then they take turns.
        alone = min(excess, abs(first - second))
        rest = excess - alone
        if first > second:
            first -= alone
        else:
            second -= alone
        first, second = first - rest // 2, second - (rest + 1) // 2
    return [ids[0][:first], ids[1][:second]]


def make_split(
    name: str,
    features: list[Feature],
    ids: list[str],
    labels: tuple[str, ...],
    regression: bool,
) -> Split:
    """Scores and writes predictions of classes or numbers."""
    expected = np.array([feature.label for feature in features])

    def score(outputs: Outputs) -> dict[str, float]:
        if regression:
            predicted = np.array([output[0] for output in outputs], np.float64)
            return {
                "pearson": scores.pearson(predicted, expected),
                "spearman": scores.spearman(predicted, expected),
                "mean_squared_error": float(np.mean((predicted - expected) ** 2)),
            }
        predicted = np.argmax(outputs, axis=-1)
        return {
            "accuracy": scores.accuracy(predicted, expected),
            "macro_f1": scores.macro_f1(predicted, expected),
        }

    def write(outputs: Outputs, directory: pathlib.Path) -> None:
        with open(directory / f"{name}.jsonl", "w") as stream:
            for example, output in zip(ids, outputs, strict=True):
                if regression:
                    prediction = {"value": float(output[0])}
                else:
                    best = int(np.argmax(output))
                    probability = np.exp(output[best] - np.logaddexp.reduce(output))
                    prediction = {"label": labels[best], "probability": float(probability)}
                stream.write(json.dumps({"id": example} | prediction) + "\n")

    labeled = features[0].label is not None
    return Split(name, features, score if labeled else None, write)


def choose_metric(metrics: Sequence[str], wanted: str) -> str:
    """`wanted`, or with none the first; ValueError for one that the task does not have."""
    if wanted and wanted not in metrics:
        raise ValueError(f"--config.data.metric={wanted}: expected one of {', '.join(metrics)}")
    return wanted or metrics[0]


def check_texts(records: list[Record], columns: Sequence[str]) -> None:
    """ValueError for an empty text."""
    for record in records:
        for column in columns:
            if not record.columns[column].strip():
                raise ValueError(
                    f"{record.place}: {column!r} is empty; remove the line, or mend it"
                )


def given_labels(config: ConfigDict) -> tuple[str, ...]:
    """`config.data.labels` as text; () if none are given.

    The parser of flags takes `neg,pos` for one label and `0,1` for two numbers.
    """
    labels = tuple(map(str, config.data.labels))
    if len(labels) == 1:
        labels = tuple(label.strip() for label in labels[0].split(",") if label.strip())
    return labels


def find_labels(records: list[Record], column: str, given: Sequence[str] = ()) -> tuple[str, ...]:
    """`given`, or the labels that occur, sorted: not in an order that depends on the file's."""
    if len(set(given)) < len(given):
        raise ValueError(f"--config.data.labels={','.join(given)}: one of them is there twice")
    for record in () if given else records:
        if (label := record.columns[column]) != label.strip():
            raise ValueError(
                f"{record.place}: label {label!r} begins or ends with white space: take that away"
            )
    labels = tuple(given) or tuple(sorted({record.columns[column] for record in records}))
    if len(labels) < 2:
        found = f"--config.data.labels={','.join(labels)}"
        if not given:
            file = records[0].place.rpartition(", line")[0]
            found = f"{file}: column {column!r} has the one class {', '.join(labels)!r}"
        raise ValueError(f"{found}: expected at least two; is it the right column?")
    return labels


def record_label(record: Record, column: str, labels: tuple[str, ...] | None) -> int | float | None:
    """The number of the label, or with no `labels` its value; None where the column is empty."""
    text = record.columns.get(column, "")
    if not text:
        return None
    if labels is None:
        return finite_number(record, column)
    if text not in labels:
        raise ValueError(
            f"{record.place}: label {text!r} is none of those trained, which are "
            f"{', '.join(labels)}: mend it, or name all labels in --config.data.labels"
        )
    return labels.index(text)


def finite_number(record: Record, column: str) -> float:
    """The value of `column`; ValueError for what is none."""
    try:
        value = float(record.columns[column])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(
            f"{record.place}: {column} is {record.columns[column]!r}, expected a finite number"
        )
    return value


def example_ids(records: list[Record], column: str) -> list[str]:
    """The ids of `column`, or with none the numbers from 0; ValueError for one that comes twice."""
    if not column:
        return [str(number) for number in range(len(records))]
    places: dict[str, str] = {}
    for record in records:
        name = record.columns[column]
        if name in places:
            raise ValueError(f"{record.place}: id {name!r} stands in {places[name]} already")
        places[name] = record.place
    return list(places)
