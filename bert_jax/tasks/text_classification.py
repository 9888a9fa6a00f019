"""Classification or regression of your own texts or pairs, from CSV, TSV or JSONL files."""

import collections
import contextlib
import csv
import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np
import scipy  # Imports scipy.sparse on first use.
from absl import logging
from ml_collections import ConfigDict
from scipy.special import expit, softmax

from bert_jax.data.features import ModelInput
from bert_jax.model.heads import (
    CLASSIFICATION,
    MULTI_LABEL,
    REGRESSION,
    Head,
    find_head,
    with_positive_weights,
)
from bert_jax.tasks import scores, tables
from bert_jax.tasks.calibration import mean_gap, reliability_of, with_calibration
from bert_jax.tasks.labels import (
    LABEL_SEPARATOR,
    LARGE_RATIO,
    find_labels,
    has_fractions,
    label_columns_from_config,
    labels_from_config,
    match_labels,
    positive_of_two,
    read_labels,
    read_weights,
    split_labels,
    split_names,
    with_labels_in_columns,
)
from bert_jax.tasks.sequences import make_sequences
from bert_jax.tasks.task import (
    Outputs,
    Split,
    Task,
    TrainedHead,
    files_with_suffix,
    limit_examples,
    write_json_blocks,
)
from bert_jax.tasks.thresholds import best_thresholds, exceed_thresholds
from bert_jax.tokenizers.tokenizer import Tokenizer

Metric = Callable[[np.ndarray, np.ndarray], float]
"""A score of what is predicted and what is expected."""

# `Head.scores` -> functions of the predicted and the expected classes, label sets or values.
SCORES = {
    "accuracy": scores.accuracy,
    "micro_f1": scores.f1,
    "macro_f1": scores.macro_f1,
    "pearson": scores.pearson,
    "spearman": scores.spearman,
    "r2": scores.r2,
}
# Also reported for a regression. They cannot select a checkpoint, because lower is better.
ERRORS = {
    "mean_squared_error": scores.mean_squared_error,
    "mean_absolute_error": scores.mean_absolute_error,
}
# With two classes also these; the last of the sorted labels is the positive class, as in
# scikit-learn.
TWO_CLASS_METRICS = {"matthews": scores.matthews}
RANKING_METRICS = {"roc_auc": scores.roc_auc, "average_precision": scores.average_precision}

MAX_ROUNDING = 1e-2
"""Steps of the labels of a regression, in standard deviations, up to which they are harmless."""
MAX_LABELS = 100
"""Maximum number of labels for which predictions have all probabilities, and the log all scores."""
NUM_BEST = 10
"""Number of probabilities per example in the predictions if there are more labels."""


def get_head(config: ConfigDict) -> Head:
    if config.data.regression and config.data.label_separator:
        raise ValueError("set data.regression or data.label_separator, not both")
    if config.data.label_separator or config.data.label_columns:
        return MULTI_LABEL
    return REGRESSION if config.data.regression else CLASSIFICATION


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads the files named in `config.data`; see configs/finetune/text_classification.py."""
    data = config.data
    files = tables.files_from_config(data)
    head, columns = get_head(config), label_columns_from_config(data)
    is_multi = head is MULTI_LABEL
    for field in ("positive_weights", "tune_thresholds"):
        if data[field] and not is_multi:
            fix = "set data.label_separator or data.label_columns, or leave "
            fix += f"data.{field} at its default"
            raise ValueError(f"config.data.{field} is for several labels per text: {fix}")
    notes: dict[str, int] = {}
    records = {name: read_records(source, name, data, notes) for name, source in files.items()}
    train = records.get("train", ())
    if is_multi:
        train = split_labels(train, data.label)
    given = labels_from_config(config) or columns
    labels = () if data.regression else find_labels(train, data.label, given)
    if not given and has_fractions(labels):
        logging.warning(
            "the labels are %d different numbers, and each is a class: to predict a number, set "
            "config.data.regression=True",
            len(labels),
        )
    metric = choose_metric(selecting_metrics(head, labels), data.metric)
    splits = {
        name: read_split(name, examples, labels, config, tokenizer, notes)
        for name, examples in records.items()
    }
    training = splits.pop("train", None)
    if training and labels:
        notes["labels"] = len(labels)
        targets = np.array([feature.label for feature in training.features])
        counts = targets.sum(0) if is_multi else np.bincount(targets, minlength=len(labels))
        rarest = int(np.argmin(counts))
        notes[f"train examples of the rarest label, {labels[rarest]!r}"] = int(counts[rarest])
    if is_multi:
        layout = dataclasses.replace(head.label_layout, shape=(len(labels),))
        head = dataclasses.replace(head, label_layout=layout)
    if data.positive_weights and training:
        weights = find_positive_weights(data.positive_weights, labels, counts, len(targets))
        head = with_positive_weights(head, weights)
    # A temperature belongs to the weights that it was fitted for.
    is_fitted = any(split.tune for split in splits.values())
    trains = bool(training)
    settings = {"label_separator": data.label_separator} if data.label_separator else {}
    if trains and data.regression and not data.raw_targets:
        settings = target_scale([feature.label for feature in training.features])
    keeps_temperature = head is CLASSIFICATION and (is_fitted or not trains)
    tuned = ("calibration_temperature",) if keeps_temperature else ()
    if data.tune_thresholds:
        if not is_fitted:
            fix = "set data.dev=FILE with labels, or tune_thresholds=False"
            raise ValueError(f"config.data.tune_thresholds needs examples to tune on: {fix}")
        tuned = ("logit_thresholds",)
    return Task(
        head=head,
        labels=labels or ("value",),
        train=training.features if training else [],
        splits=tuple(splits.values()),
        metric=f"dev/{metric}",
        notes=notes,
        head_settings=settings,
        tuned=tuned,
        files=files,
    )


def find_positive_weights(
    given: Sequence, labels: Sequence[str], counts: np.ndarray, num_examples: int
) -> tuple[float, ...]:
    """Returns the weight of each label's positive term, given as `read_weights` or "balanced".

    Balanced, that is negative / positive examples, so that both terms have the same sum of weights;
    1 without positive examples. `counts` are those of positive examples, `[labels]`. Warns if a
    weight is so large that its label is predicted where it is improbable.
    """
    if tuple(given) == ("balanced",):
        ratios = (num_examples - counts) / np.maximum(counts, 1)
        # A label of all examples has no negative ones to balance.
        balanced = np.where((counts > 0) & (counts < num_examples), ratios, 1.0).tolist()
        logging.info(
            "positive_weights: %s",
            ", ".join(
                f"{name} {weight:.4g}" for name, weight in zip(labels, balanced, strict=True)
            ),
        )
        weights = tuple(balanced)
    else:
        weights = read_weights(given, labels, "config.data.positive_weights")
    enter = np.where(counts > 0, weights, 0)  # The other positive terms are never in the loss.
    if enter.max() >= LARGE_RATIO:
        largest, weight = int(np.argmax(enter)), enter.max()
        logging.warning(
            "positive_weights: %d of %d labels have a weight of at least %g, the largest %r (%d of "
            "%d examples in train) of %.3g, so it is predicted at any probability above %.2g, "
            "unless its threshold is tuned: more of its examples are found, but up to %.0f %% of "
            "its predictions may be wrong. Compare precision in predictions/*_classes.tsv with a "
            "run without weights, or with their square roots: config.data.positive_weights=%s",
            np.count_nonzero(enter >= LARGE_RATIO),
            len(labels),
            LARGE_RATIO,
            labels[largest],
            counts[largest],
            num_examples,
            weight,
            1 / (1 + weight),
            100 * weight / (1 + weight),
            ",".join(f"{root:.3g}" for root in np.sqrt(weights)),
        )
    return weights


def read_records(
    source: str, name: str, data: ConfigDict, notes: dict[str, int]
) -> list[tables.Record]:
    """Reads the examples of split `name`, and counts those with empty texts in `notes`."""
    label_columns = label_columns_from_config(data)
    labels = label_columns or (data.label,)
    # A test file may have no labels; in a dev file a missing column is probably a typo.
    required = labels if name != "test" else ()
    texts = tuple(filter(None, (data.text, data.text_pair)))
    columns = [*texts, *filter(None, (data.id, *required))]
    records = tables.read_table(
        source,
        columns,
        header_lines=data.header_lines,
        data_dir=data.data_dir,
        label=labels[0],
        label_separator=data.label_separator,
    )
    records = tables.drop_blank_rows(records, labels[0], name, notes)
    tables.note_unused_columns(records, {*columns, *labels}, name, notes)
    records = [with_labels_in_columns(record, label_columns) for record in records]
    if not (label_columns or data.label_separator or data.regression):
        records = tables.drop_unknown_classes(source, records, data.label, name, notes)
    empty = [
        (record.location, repr(column))
        for record in records
        for column in texts
        if not record.columns[column].strip()
    ]
    is_labeled = any(
        record.labels is not None if label_columns else record.columns.get(data.label)
        for record in records
    )
    tables.check_empty_texts(name, empty, is_labeled, bool(data.train), notes)
    return records


def read_split(
    name: str,
    records: Sequence[tables.Record],
    labels: tuple[str, ...],
    config: ConfigDict,
    tokenizer: Tokenizer,
    notes: dict[str, int],
) -> Split:
    """Builds a split of the records; `notes` count those dropped, truncated and without a label."""
    data, head = config.data, get_head(config)
    is_multi, columns = head is MULTI_LABEL, label_columns_from_config(data)
    records = tables.with_ids(records, data.id)
    # Without training data the labels are the head's.
    hint = "; fix it, or list all labels in config.data.labels" * bool(data.train)
    options = {"required": name == "train", "hint": hint, "multi_label": is_multi}
    # Checks all labels, also of examples that are then left out.
    values = read_labels(records, columns[0] if columns else data.label, labels, **options)
    examples, values = (limit_examples(each, config, name, notes) for each in (records, values))
    if values[0] is None:
        notes[f"{name} examples without labels, so not scored"] = len(values)
    texts = tuple(filter(None, (data.text, data.text_pair)))
    pairs = [[example.columns[column] for column in texts] for example in examples]
    features, truncated = text_features(pairs, values, tokenizer, config.max_seq_length)
    notes[f"{name} examples truncated"] = truncated
    metrics, ranking_metrics = metrics_of(head, labels)
    weights = {"class_weights": config.class_weights, "positive_weights": data.positive_weights}

    def with_thresholds(tuned: Mapping) -> Split:
        split = make_split(
            name,
            features,
            examples,
            labels,
            metrics,
            is_multi,
            ranking_metrics=ranking_metrics,
            weighted_by=next((field for field, given in weights.items() if given), ""),
            logit_thresholds=thresholds_of(tuned),
        )
        if not data.tune_thresholds:
            return split

        def tune(outputs: Outputs) -> dict:
            expected = np.stack([feature.label for feature in features])
            return {"logit_thresholds": best_thresholds(np.stack(outputs), expected)}

        fits = name == "dev" and split.score and data.train
        return dataclasses.replace(
            split, tune=tune if fits else None, with_settings=with_thresholds
        )

    split = with_thresholds({})
    if head is not CLASSIFICATION or not split.score:
        return split
    return with_calibration(split, fits=name == "dev" and bool(data.train))


def target_scale(labels: Sequence[float]) -> dict[str, float]:
    """Returns the settings of a head that predicts standardized labels; std is 1 for a constant.

    Without them, a head that starts near 0 and must predict values around 1,000 spends its training
    on their mean, which a small learning rate never reaches.
    """
    mean, std = float(np.mean(labels)), float(np.std(labels)) or 1.0
    step = float(np.max(np.spacing(np.abs(labels).astype(np.float32))))
    if step > MAX_ROUNDING * std:
        logging.warning(
            "The labels are read in steps of %.6g, as float32 is, and their deviation is %.6g: "
            "subtract a constant near their mean, %.6g, from all labels in the files",
            step,
            std,
            mean,
        )
    logging.info("Training on standardized labels: mean %.6g, standard deviation %.6g", mean, std)
    return {"target_mean": mean, "target_std": std}


def selecting_metrics(head: Head, labels: Sequence[str]) -> list[str]:
    """Returns the names of the metrics that may select a checkpoint; the first is the default."""
    two_classes = head.predicts == "class" and len(labels) == 2
    return [*head.scores] + [*TWO_CLASS_METRICS, *RANKING_METRICS] * two_classes


def metrics_of(head: Head, labels: Sequence[str]) -> tuple[dict[str, Metric], dict[str, Metric]]:
    """Returns the metrics of a head's predictions, and of two classes those of their ranking."""
    metrics = {name: SCORES[name] for name in head.scores}
    if head.predicts == "value":
        return metrics | ERRORS, {}
    if head.predicts == "class" and len(labels) == 2:
        return metrics | TWO_CLASS_METRICS, RANKING_METRICS
    return metrics, {}


def text_features(
    texts: Sequence[Sequence[str]], labels: Sequence, tokenizer: Tokenizer, max_seq_length: int
) -> tuple[list[ModelInput], int]:
    """Returns a feature for each text or pair of texts, and how many were truncated.

    If there are several texts for each label, these become the sequences of one feature.
    """
    sequences, truncated = make_sequences(texts, tokenizer, max_seq_length)
    choices = len(texts) // len(labels)
    groups = zip(*[iter(sequences)] * choices, labels, strict=True)
    features = [ModelInput(*zip(*group, strict=True), label) for *group, label in groups]
    return features, int(np.reshape(truncated, (-1, choices)).any(axis=1).sum())


def make_split(
    name: str,
    features: list[ModelInput],
    records: Sequence[tables.Record],
    labels: Sequence,
    metrics: Mapping[str, Metric],
    multi_label: bool = False,
    *,
    ranking_metrics: Mapping[str, Metric] | None = None,
    weighted_by: str = "",
    logit_thresholds: Sequence[float] = (),
) -> Split:
    """Builds a classification split (regression if `labels` is empty), scored by `metrics`.

    With `multi_label` the prediction is all labels that `exceed_thresholds`. For two classes,
    `ranking_metrics` rank the examples by the logit of the positive class, `positive_of_two`, minus
    the other. Writes
    NAME.jsonl: the columns of each example, its label if known, its prediction and the probability
    of every class, or with more than `MAX_LABELS` only of the best and the predicted ones; and
    NAME_classes.tsv: the `scores.class_table`. `weighted_by` is as in `scores.note_low_precision`.
    """
    expected = np.array([feature.label for feature in features])
    is_labeled = features[0].label is not None

    def predict(outputs: Outputs) -> np.ndarray:
        return predicted_labels(outputs, labels, multi_label, logit_thresholds)

    def score(outputs: Outputs) -> dict[str, float]:
        predicted = predict(outputs)
        found = {metric: function(predicted, expected) for metric, function in metrics.items()}
        for metric, function in (ranking_metrics or {}).items():
            margins, positive = positive_margins(outputs, labels)
            found[metric] = function(margins, expected == positive)
        return found

    def describe_examples(outputs: Outputs) -> list[dict]:
        lines, predicted = [], predict(outputs)
        for index, record in enumerate(records):
            line = {"id": record.id} | record.columns
            if is_labeled:
                line["label"] = describe_label(expected[index], labels, multi_label)
            line |= describe_output(outputs[index], predicted[index], labels, multi_label)
            lines.append(line)
        return lines

    def write(outputs: Outputs, directory: pathlib.Path) -> pathlib.Path:
        path = directory / f"{name}.jsonl"
        tables.write_json_lines(path, describe_examples(outputs))
        if is_labeled and labels:
            label_sets = (
                x if multi_label else one_hot(x, len(labels)) for x in (predict(outputs), expected)
            )
            header, *rows = scores.class_table(*label_sets, labels, multi_label)
            path_of_classes = directory / f"{name}_classes.tsv"
            with open(path_of_classes, "w", newline="", encoding="utf-8") as stream:
                csv.writer(stream, delimiter="\t").writerows([header, *rows])
            scores.note_low_precision([header, *rows], name, weighted_by)
            which = ""
            if len(rows) > MAX_LABELS:
                rows = sorted(rows, key=lambda row: -row[1])[:MAX_LABELS]
                which = f" (the {MAX_LABELS} most frequent of {len(labels)})"
            table = [header, *rows]
            lines = ("".join(f"{value:>10}" for value in row[1:5]) + f"  {row[0]}" for row in table)
            logging.info("%s, by label%s:\n%s", name, which, "\n".join(lines))
        return path

    return Split(name, features, score if is_labeled else None, write)


def predicted_labels(
    outputs: Outputs, labels: Sequence, multi_label: bool, logit_thresholds: Sequence[float] = ()
) -> np.ndarray:
    """Returns the classes, of a multi-label head bool `[examples, labels]`, or the values.

    Labels are predicted as by `exceed_thresholds`.
    """
    if multi_label:
        return exceed_thresholds(np.stack(outputs), logit_thresholds)
    return np.argmax(outputs, axis=-1) if labels else np.array(outputs, np.float64)[:, 0]


def describe_label(label, labels: Sequence[str], multi_label: bool) -> str | float | list[str]:
    """Returns a class by its name, a label set as a list of names, or a value."""
    if multi_label:
        return [labels[index] for index in np.flatnonzero(label)]
    return labels[label] if labels else float(label)


def describe_output(
    output: np.ndarray, predicted, labels: Sequence[str], multi_label: bool
) -> dict:
    """Returns the "prediction" of an example and, of classes, the "probabilities", best first.

    Of more than `MAX_LABELS` labels, the best and the predicted ones, and "num_other_labels".
    """
    line = {"prediction": describe_label(predicted, labels, multi_label)}
    if labels:
        num_predicted = int(predicted.sum()) if multi_label else 1
        top_k = max(NUM_BEST, num_predicted) if len(labels) > MAX_LABELS else len(labels)
        best = best_labels(labels, output, multi_label, top_k)
        line["probabilities"] = dict(best)
        if len(best) < len(labels):
            line["num_other_labels"] = len(labels) - len(best)
    return line


class Classification(NamedTuple):
    """A label and its probability."""

    label: str
    probability: float


def best_labels(
    labels: Sequence[str],
    logits: np.ndarray,
    multi_label: bool = False,
    top_k: int | None = None,
) -> list[Classification]:
    """Returns the `top_k` labels (None: all) with their probabilities, best first.

    The probabilities are independent if `multi_label`, and else sum to 1 over all labels.
    """
    probabilities = (expit if multi_label else softmax)(logits)
    order = np.argsort(-logits, kind="stable")[:top_k].tolist()
    return [Classification(labels[index], float(probabilities[index])) for index in order]


Classified = Classification | list[Classification] | float
"""What `PretrainedModel.classify` returns for a text: the most probable label; of a multi-label
head, or with `top_k`, labels, best first; of a regression head the value."""


def classify_output(head: Mapping, output: np.ndarray, top_k: int | None) -> Classified:
    """Returns what a head with these settings predicts for one text, given its output.

    With `top_k`, the best labels; by default those of a multi-label head that exceed their
    thresholds, or without thresholds a probability of 0.5.
    """
    predicts = find_head(head).predicts
    if predicts == "value":
        return float(output[0])
    is_multi = predicts == "label_set"
    ranked = best_labels(head["labels"], output, is_multi, top_k)
    if top_k is not None:
        return ranked
    if not is_multi:
        return ranked[0]
    (predicted,) = predicted_labels([output], head["labels"], True, thresholds_of(head))
    names = describe_label(predicted, head["labels"], True)
    return [best for best in ranked if best.label in names]


def thresholds_of(head: Mapping) -> Sequence[float]:
    """Returns the thresholds that are stored with a head, as `exceed_thresholds` takes them."""
    return head.get("logit_thresholds", ())


def positive_margins(outputs: Outputs, labels: Sequence[str]) -> tuple[np.ndarray, int]:
    """Returns the positive logit less the other, `[examples]`, and the index of its class."""
    positive, logits = positive_of_two(labels), np.stack(outputs).astype(np.float64)
    return logits[:, positive] - logits[:, 1 - positive], positive


def one_hot(classes: np.ndarray, num_labels: int) -> scipy.sparse.csr_array:
    """Returns int `[examples, labels]`, with 1 in the column of each example's class."""
    rows = np.arange(len(classes))
    shape = (len(classes), num_labels)
    return scipy.sparse.csr_array((np.ones(len(classes), int), (rows, classes)), shape=shape)


def choose_metric(metrics: Iterable[str], name: str) -> str:
    """Returns `name`, or the first metric if it is empty; raises ValueError if unknown."""
    if name and name not in metrics:
        raise ValueError(f"config.data.metric={name}: expected one of {', '.join(metrics)}")
    return name or next(iter(metrics))


class ClassScores:
    """The scores of a head, of examples that are added in blocks; keeps a few numbers of each."""

    def __init__(
        self,
        head: Mapping,
        metrics: Mapping[str, Metric],
        ranking_metrics: Mapping[str, Metric],
        scores_calibration: bool = False,
    ):
        predicts = find_head(head).predicts
        self._labels = () if predicts == "value" else head["labels"]
        self._is_multi = predicts == "label_set"
        self._metrics, self._ranking_metrics = metrics, ranking_metrics
        self._thresholds = thresholds_of(head)
        self._temperatures = {"ece": 1.0} if scores_calibration else {}
        if scores_calibration and "calibration_temperature" in head:
            self._temperatures["calibrated_ece"] = head["calibration_temperature"]
        names = ("predicted", "expected", "margins", *self._temperatures)
        self._kept: dict[str, list[np.ndarray]] = {name: [] for name in names}

    def add(self, outputs: Outputs, expected: Sequence) -> None:
        """Adds a block of examples whose labels are known."""
        if not len(outputs):
            return
        logits = np.stack(outputs).astype(np.float64)
        arguments = outputs, self._labels, self._is_multi, self._thresholds
        kept = {"predicted": predicted_labels(*arguments)}
        kept["expected"] = np.array(expected)
        if self._ranking_metrics:
            kept["margins"], _ = positive_margins(outputs, self._labels)
        for name, temperature in self._temperatures.items():
            kept[name] = softmax(logits / temperature, axis=-1).max(-1)
        if self._is_multi:  # An eighth of the memory.
            kept = {name: np.asarray(values, bool) for name, values in kept.items()}
        for name, values in kept.items():
            self._kept[name].append(values)

    def scores(self) -> dict[str, float]:
        """Returns the scores of the examples so far; none without any."""
        if not self._kept["predicted"]:
            return {}
        kept = {name: np.concatenate(values) for name, values in self._kept.items() if values}
        predicted, expected = kept["predicted"], kept["expected"]
        found = {name: metric(predicted, expected) for name, metric in self._metrics.items()}
        for name, metric in self._ranking_metrics.items():
            found[name] = metric(kept["margins"], expected == positive_of_two(self._labels))
        for name in self._temperatures:
            found[name] = mean_gap(reliability_of(kept[name], predicted == expected))
        return found | {"examples": len(expected)}


PREDICT_OPTIONS = {
    "text": "text",
    "text_pair": "",
    "label": "label",
    "label_columns": (),
    "id": "",
    "header_lines": 1,
}


def get_predictor(trained: TrainedHead, options: Mapping, given: Set[str]) -> "TextPredictor":
    """Returns the predictor of a head for classification, multi-label or regression.

    Raises ValueError for columns of labels that are not those of the head, or a column too many.
    """
    settings = trained.settings
    head = find_head(settings)
    columns = split_names(options["label_columns"])
    if columns and "label" in given:
        if "label_columns" in given:
            fix = f"set one of them, not label={options['label']}, too"
            raise ValueError(f"label_columns={','.join(columns)}: {fix}")
        columns = ()  # Those of the run that trained the head.
    if columns and (head.predicts != "label_set" or sorted(columns) != sorted(settings["labels"])):
        expected = "none, as the head has one label for each text"
        if head.predicts == "label_set":
            expected = f"a column for each label of the head, {', '.join(settings['labels'])}"
        raise ValueError(f"label_columns={','.join(columns)}: expected {expected}")
    metrics = metrics_of(head, settings["labels"])
    scores = ClassScores(settings, *metrics, scores_calibration=head.predicts == "class")
    needs_label = not given.isdisjoint({"label", "label_columns"})
    return TextPredictor(trained, options, scores, needs_label, label_columns=columns)


class TextPredictor:
    """Predicts tables of texts or pairs; see `bert_jax.tasks.task.Predictor`."""

    def __init__(
        self,
        trained: TrainedHead,
        options: Mapping,
        scores: ClassScores,
        needs_label: bool = False,
        aliases: Mapping[str, str] | None = None,
        label_columns: Sequence[str] = (),
    ):
        self.writers = {".jsonl": write_json_blocks}
        self.notes: dict[str, int] = collections.Counter()
        self._trained, self._options, self._scores = trained, options, scores
        self._needs_label, self._aliases = needs_label, dict(aliases or {})
        head = trained.settings
        predicts = find_head(head).predicts
        self._is_multi = predicts == "label_set"
        self._labels = () if predicts == "value" else head["labels"]
        self._texts = tuple(filter(None, (options["text"], options["text_pair"])))
        self._columns_of_labels = tuple(label_columns) or (options["label"],)
        self._has_label_columns = bool(label_columns)

    def find_inputs(self, directory: pathlib.Path) -> list[tuple[pathlib.Path, str]]:
        paths = files_with_suffix(directory, tables.SUFFIXES)
        return [(path, f"{path.stem}.jsonl") for path in paths]

    def read(self, source: str | pathlib.Path | Iterable[Mapping]) -> Iterator[tables.Record]:
        label, *others = self._columns_of_labels  # All of them are empty, or none.
        column, needed = self._options["id"], (label, *others) if self._needs_label else ()
        columns = (*self._texts, *filter(None, (column, *needed)))
        separator = ""
        if self._is_multi:
            separator = self._trained.settings.get("label_separator", LABEL_SEPARATOR)
        data_dir = self._trained.data.get("data_dir", "")
        header_lines = self._options["header_lines"]
        arguments = source, columns, header_lines, data_dir, label, separator

        @functools.cache
        def is_labeled() -> bool:
            return any(
                record.columns.get(label) or record.labels is not None
                for record in tables.iterate_table(*arguments)
            )

        number = 0
        null: set[str] = set()
        for record in tables.iterate_table(*arguments, null):
            is_blank = not any(record.columns.values())
            if is_blank and label in record.columns and is_labeled():
                self.notes["rows without any field, skipped"] += 1
                continue
            text = record.columns.get(label)
            is_text = text is not None and record.labels is None and record.location not in null
            null.clear()
            if self._has_label_columns:
                record = with_labels_in_columns(record, (label, *others))
            elif self._is_multi and is_text and (text or is_labeled()):
                record = tables.with_labels_in_text(record, label, separator)
            yield record._replace(id=record.columns[column] if column else str(number))
            number += 1

    def features(self, examples: Sequence[tables.Record]) -> list[ModelInput]:
        texts = [[record.columns[column] for column in self._texts] for record in examples]
        self.notes["examples with an empty text"] += sum(
            not all(map(str.strip, each)) for each in texts
        )
        length = self._trained.max_seq_length
        unknown = [None] * len(texts)
        features, truncated = text_features(texts, unknown, self._trained.tokenizer, length)
        self.notes[f"examples truncated to {length} tokens"] += truncated
        return features

    def describe(self, examples: Sequence[tables.Record], outputs: Outputs) -> list[dict]:
        expected = self._known_labels(examples)
        known = [index for index, label in enumerate(expected) if label is not None]
        self._scores.add([outputs[i] for i in known], [expected[i] for i in known])
        thresholds, lines = thresholds_of(self._trained.settings), []
        predicted = predicted_labels(outputs, self._labels, self._is_multi, thresholds)
        for record, label, *each in zip(examples, expected, outputs, predicted, strict=True):
            line = {"id": record.id} | record.columns
            if label is not None:
                line["label"] = describe_label(label, self._labels, self._is_multi)
            lines.append(line | describe_output(*each, self._labels, self._is_multi))
        return lines

    def scores(self) -> dict[str, float]:
        return self._scores.scores()

    def _known_labels(self, examples: Sequence[tables.Record]) -> list:
        """Returns the label of each example as the head knows it, and None for others."""
        column, labels = self._columns_of_labels[0], self._labels
        if self._is_multi:
            texts = [record.labels for record in examples]
            distinct = set(itertools.chain(*filter(None, texts)))
        else:
            texts = [record.columns.get(column) or None for record in examples]
            distinct = set(filter(None, texts))
        names = match_labels(distinct, labels) | self._aliases
        index_of_label = {label: index for index, label in enumerate(labels)}
        known: list = []
        for text in texts:
            label = None
            if self._is_multi and text is not None:
                indices = [index_of_label.get(names[each]) for each in text]
                if None not in indices:
                    label = np.zeros(len(labels), np.float32)
                    label[indices] = 1
            elif labels and text is not None:
                text = names[text] or None
                label = index_of_label.get(text)
            elif text is not None:
                with contextlib.suppress(ValueError):
                    label = float(text) if math.isfinite(float(text)) else None
            known.append(label)
            if text is not None and label is None:
                what = (
                    "labels that the head does not have" if labels else "a label that is no number"
                )
                self.notes[f"examples with {what}, not scored"] += 1
        if None in texts and any(column in record.columns for record in examples):
            self.notes["examples without labels, not scored"] += texts.count(None)
        return known
