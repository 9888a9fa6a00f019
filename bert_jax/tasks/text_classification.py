"""Classification of, or regression on, your own texts or pairs: CSV, TSV or JSONL files."""

import collections
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from bert_jax.data.features import Feature
from bert_jax.model.heads import CLASSIFICATION, REGRESSION, Head
from bert_jax.tasks import scores, tables
from bert_jax.tasks.labels import find_labels, given_labels, read_labels
from bert_jax.tasks.sequences import make_sequences
from bert_jax.tasks.task import Outputs, Split, Task
from bert_jax.tokenization import Tokenizer

METRICS = {"accuracy": scores.accuracy, "macro_f1": scores.macro_f1}
CORRELATIONS = {"pearson": scores.pearson, "spearman": scores.spearman}


def get_head(config: ConfigDict) -> Head:
    return REGRESSION if config.data.regression else CLASSIFICATION


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads the files named in `config.data`; see configs/finetune/text_classification.py."""
    data = config.data
    tables.check_files_given(data)
    metrics = CORRELATIONS if data.regression else METRICS
    metric = choose_metric(metrics, data.metric)
    if data.regression:
        metrics = metrics | {"mean_squared_error": scores.mean_squared_error}
    texts = tuple(filter(None, (data.text, data.text_pair)))
    notes: dict[str, int] = {}

    records, features = {}, {}
    for name in (name for name in ("train", "dev", "test") if data[name]):
        # A test file may have no labels; in a dev file a missing column is probably a typo.
        label = data.label if name != "test" else ""
        columns = [*texts, *filter(None, (data.id, label))]
        records[name] = tables.read_table(data[name], columns, data.header_lines)
        tables.check_texts(records[name], texts)

    train = records.get("train", ())
    labels = () if data.regression else find_labels(train, data.label, given_labels(config))
    if train and labels:
        counts = collections.Counter(record.columns[data.label] for record in train)
        rarest = min(labels, key=counts.__getitem__)
        notes |= {"labels": len(labels), f"train {rarest!r}, the rarest label": counts[rarest]}

    hint = "; fix it, or list all labels in --config.data.labels"
    ids = {name: tables.example_ids(own, data.id) for name, own in records.items()}
    for name, own in records.items():
        values = read_labels(own, data.label, labels, required=name == "train", hint=hint)
        if values[0] is None:
            notes[f"{name} without labels, so not scored"] = len(values)
        features[name], notes[f"{name} truncated"] = text_features(
            [[record.columns[column] for column in texts] for record in own],
            values,
            tokenizer,
            config.max_seq_length,
        )
    return Task(
        head=get_head(config),
        labels=labels or ("value",),
        train=features.pop("train", []),  # Without: predictions only.
        splits=tuple(
            make_split(name, own, [{"id": each} for each in ids[name]], labels, metrics)
            for name, own in features.items()
        ),
        metric=f"dev/{metric}",
        notes=notes,
        head_settings={"max_seq_length": config.max_seq_length},
    )


def text_features(
    texts: Sequence[Sequence[str]],
    labels: Sequence[int | float | None],
    tokenizer: Tokenizer,
    max_seq_length: int,
) -> tuple[list[Feature], int]:
    """Returns a feature for each text or pair of texts, and how many were truncated."""
    sequences, truncated = make_sequences(texts, tokenizer, max_seq_length)
    features = [
        Feature((tokens,), (second_start,), label)
        for (tokens, second_start), label in zip(sequences, labels, strict=True)
    ]
    return features, sum(truncated)


def make_split(
    name: str,
    features: list[Feature],
    ids: Sequence[dict[str, str]],
    labels: Sequence,
    metrics: Mapping[str, Callable[[np.ndarray, np.ndarray], float]],
    label_name: str = "label",
) -> Split:
    """Builds a split of classes, or without `labels` of values, that is scored by `metrics`.

    Each line that it writes holds the `ids` of an example and its prediction.
    """
    expected = np.array([feature.label for feature in features])

    def score(outputs: Outputs) -> dict[str, float]:
        if labels:
            predicted = np.argmax(outputs, axis=-1)
        else:
            predicted = np.array([output[0] for output in outputs], np.float64)
        return {metric: function(predicted, expected) for metric, function in metrics.items()}

    def write(outputs: Outputs, directory: pathlib.Path) -> None:
        lines = []
        for example, output in zip(ids, outputs, strict=True):
            if labels:
                best, probability = most_probable(output)
                prediction = {label_name: labels[best], "probability": probability}
            else:
                prediction = {"value": float(output[0])}
            lines.append(example | prediction)
        tables.write_json_lines(directory / f"{name}.jsonl", lines)

    return Split(name, features, score if features[0].label is not None else None, write)


def most_probable(logits: np.ndarray) -> tuple[int, float]:
    """Returns the index of the largest of `logits`, float32 `[classes]`, and its probability."""
    best = int(np.argmax(logits))
    return best, float(np.exp(logits[best] - np.logaddexp.reduce(logits)))


def choose_metric(metrics: Iterable[str], wanted: str) -> str:
    """Returns `wanted`, or the first metric if it is empty; ValueError for an unknown one."""
    if wanted and wanted not in metrics:
        raise ValueError(f"--config.data.metric={wanted}: expected one of {', '.join(metrics)}")
    return wanted or next(iter(metrics))
