"""Shows where a fine-tuned model fails: its mistakes, slices of its score, and wrong labels.

python tools/errors.py runs/topics --split=dev

Prints the most confident mistakes, the score by class, by length and by the values of other
columns, and the training examples whose labels are probably wrong. Writes all of them into
RUN/errors: SPLIT_mistakes.jsonl, SPLIT_slices.tsv and train_labels.jsonl.

Reads what the run has written in predictions/SPLIT.jsonl, of classes, sets of labels or values.
Labels are searched for errors where each text has one class (text_classification.py), with a model
of their own: a logistic regression of TF-IDF, by scikit-learn (the extra "baselines").
"""

import csv
import itertools
import json
import pathlib
import sys
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from absl import app, flags
from ml_collections import ConfigDict

from bert_jax.runtime.command_line import describe_error, parse_flags
from bert_jax.tasks import glue, tables, text_classification
from bert_jax.tasks.label_errors import out_of_fold, rank_label_errors
from bert_jax.tasks.labels import find_labels, read_labels, split_names
from bert_jax.tasks.resampling import bootstrap_interval
from bert_jax.tasks.scored_predictions import PREDICTED

MAX_VALUES = 20
"""Distinct values of a column up to which the score is shown for each of them."""
SHARE_LISTED = 0.1
"""Of the training examples, how many are listed by how probably their labels are wrong."""


def measure(line: Mapping) -> tuple[str, float, float]:
    """Returns the name of the score of one example, its score, and how wrong the model is.

    A class: "accuracy", and the probability of the predicted class. A set of labels: "exact_match",
    and the largest error of a probability. A value: "absolute_error", twice.
    """
    label, predicted = line["label"], line["prediction"]
    if isinstance(label, str):
        return "accuracy", float(label == predicted), max(line["probabilities"].values())
    if isinstance(label, list):
        probabilities = dict.fromkeys(label, 0.0) | line["probabilities"]
        errors = (abs((name in label) - p) for name, p in probabilities.items())
        return "exact_match", float(set(label) == set(predicted)), max(errors)
    return "absolute_error", abs(label - predicted), abs(label - predicted)


def find_mistakes(lines: Sequence[dict]) -> list[dict]:
    """Returns the examples that are predicted wrongly, the most confident mistake first.

    Each gets a key "wrongness", as in `measure`; of values all are returned.
    """
    measured = [(line, *measure(line)) for line in lines]
    wrong = [
        line | {"wrongness": wrongness}
        for line, name, score, wrongness in measured
        if name == "absolute_error" or not score
    ]
    return sorted(wrong, key=lambda line: -line["wrongness"])


def find_slices(
    lines: Sequence[dict], texts: Sequence[str], ignored: Collection[str] = ()
) -> tuple[list[tuple], list[str]]:
    """Returns (column, value, examples, score, low, high) of each slice, the whole first.

    Slices are by class (of values by quarter), by the number of words in the columns `texts`
    (quarters), and by the values of other columns that are not `ignored`, if they have 2 to
    `MAX_VALUES` of them ("" in lines without the column); also returns the columns with more.
    The bounds are those of a 95 % interval by the bootstrap over the examples.
    """
    scores = np.array([measure(line)[1] for line in lines])
    groups: dict[tuple[str, str], list[int]] = {("all", ""): list(range(len(lines)))}
    labels = [line["label"] for line in lines]
    lengths = [sum(len(str(line.get(column, "")).split()) for column in texts) for line in lines]
    quarters = {"words": _quarters(lengths)}
    if isinstance(labels[0], float | int):
        quarters["label"] = _quarters(labels)
    else:
        for name in sorted({each for label in labels for each in _as_list(label)}):
            groups["label", name] = [n for n, each in enumerate(labels) if name in _as_list(each)]
    for column, ranges in quarters.items():
        for name in sorted(set(ranges)):
            groups[column, name] = [n for n, each in enumerate(ranges) if each == name]
    left_out = []
    for column in _columns(lines):
        if column in ("id", "label", *texts, *PREDICTED, *ignored):
            continue
        values = [str(line.get(column, "")) for line in lines]
        if len(set(values)) > MAX_VALUES:
            left_out.append(column)
        elif len(set(values)) > 1:
            for name in sorted(set(values)):
                groups[column, name] = [n for n, value in enumerate(values) if value == name]
    rows = []
    for (column, value), indices in groups.items():
        own = scores[indices]
        low, high = bootstrap_interval(lambda sample, own=own: own[sample].mean(), len(own))
        rows.append((column, value, len(own), *(round(x, 4) for x in (own.mean(), low, high))))
    return rows, left_out


def _columns(lines: Sequence[Mapping]) -> list[str]:
    """Returns the keys of all lines: lines of JSON need not have the same."""
    return [*dict.fromkeys(itertools.chain.from_iterable(lines))]


def _as_list(label: str | list[str]) -> list[str]:
    return [label] if isinstance(label, str) else label


def _quarters(numbers: Sequence[float]) -> list[str]:
    """Returns for each number the range of its quarter of all numbers, such as "1: 5 to 9"."""
    numbers = np.array(numbers)
    edges = np.unique(np.quantile(numbers, [0.25, 0.5, 0.75], method="higher"))
    places = np.searchsorted(edges, numbers, side="left")
    ranges = {}
    for place in np.unique(places):
        own = numbers[places == place]
        ranges[place] = f"{place + 1}: {own.min():g} to {own.max():g}"
    return [ranges[place] for place in places]


def find_label_errors(data: ConfigDict, labels: tuple[str, ...]) -> list[dict]:
    """Returns the training examples whose labels are most probably wrong, first these.

    Those are at least `SHARE_LISTED` of all, and all that confident learning counts as errors,
    which have "is_probable_error". An example of a class without another one is not judged.
    Raises ValueError or OSError for files that cannot be read, and ImportError without
    scikit-learn.
    """
    notes: dict[str, int] = {}
    source = tables.with_split(data.train, "train")
    records = text_classification.read_records(source, "train", data, notes)
    names = find_labels(records, data.label, labels)
    classes = np.array(read_labels(records, data.label, names, required=True))
    counts = np.bincount(classes, minlength=len(names))
    judged = np.flatnonzero(counts[classes] > 1)
    if np.sum(counts > 1) < 2:
        raise ValueError(f"{source}: expected two classes with at least two examples each")
    present = np.flatnonzero(counts > 1)
    codes = np.searchsorted(present, classes[judged])
    columns = [column for column in (data.text, data.text_pair) if column]
    texts = [" ".join(records[index].columns[column] for column in columns) for index in judged]
    probabilities = out_of_fold(texts, codes)
    order, is_error, other = rank_label_errors(probabilities, codes)
    found = []
    for place in order[: max(round(SHARE_LISTED * len(records)), int(is_error.sum()))]:
        record = records[judged[place]]
        found.append(
            {
                "location": record.location,
                **record.columns,
                "label": names[classes[judged[place]]],
                "suggested": names[present[other[place]]],
                "label_probability": float(probabilities[place, codes[place]]),
                "suggested_probability": float(probabilities[place, other[place]]),
                "is_probable_error": bool(is_error[place]),
            }
        )
    return found


def known_columns(data: Mapping) -> tuple[set[str], set[str]]:
    """Returns the columns of the texts, and of ids and labels, given `config.data` of a run."""
    texts, others = [data.get("text"), data.get("text_pair")], [data.get("label"), data.get("id")]
    others += split_names(data.get("label_columns", ()))
    if data.get("name") in glue.DATASETS:
        dataset = glue.DATASETS[data["name"]]
        texts, others = [*dataset.texts, *dataset.tfds_texts], [dataset.label, "idx", "index"]
    return {*filter(None, texts)}, {*filter(None, others)}


def analyze(run: pathlib.Path, split: str, num_shown: int) -> list[str]:
    """Writes the files of RUN/errors; returns the lines to print. Raises ValueError or OSError."""
    path = run / "predictions" / f"{split}.jsonl"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: expected a finished run of classes or values")
    lines = [values for values, _ in tables.read_objects(path)]
    if not all("label" in line and "prediction" in line for line in lines):
        raise ValueError(f"{path}: expected lines with a label and a prediction")
    settings = json.loads((run / "config.json").read_text(encoding="utf-8"))
    data, output = settings["data"], run / "errors"
    known, ignored = known_columns(data)
    texts = [name for name in _columns(lines) if name in known]
    output.mkdir(exist_ok=True)

    mistakes = find_mistakes(lines)
    tables.write_json_lines(output / f"{split}_mistakes.jsonl", mistakes)
    shown = [f"{len(mistakes):,} of {len(lines):,} examples of {split}, the most wrong first:"]
    for line in mistakes[:num_shown]:
        text = " | ".join(str(line.get(column, "")) for column in texts)
        scored = f"{line['label']} -> {line['prediction']} ({line['wrongness']:.3f})"
        shown.append(f"  {line['id']}: {scored}: {_shortened(text)}")

    rows, left_out = find_slices(lines, texts, ignored)
    header = ("slice", "value", "examples", measure(lines[0])[0], "low", "high")
    with open(output / f"{split}_slices.tsv", "w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, delimiter="\t").writerows([header, *rows])
    shown += ["", "Slices, with 95 % intervals:"]
    shown += ["\t".join(map(str, row)) for row in (header, *rows)]
    if left_out:
        shown.append(f"columns with more than {MAX_VALUES} values: {', '.join(left_out)}")

    shown.append("")
    if settings.get("task") != "text_classification" or not isinstance(lines[0]["label"], str):
        what = "text_classification with one class for each text"
        return [*shown, f"Labels of train were not searched for errors: expected {what}"]
    try:
        found = find_label_errors(
            ConfigDict({"label_columns": ()} | data), tuple(settings["head"]["labels"])
        )
    except ImportError:
        fix = "pip install 'bert_jax[baselines]'"
        return [*shown, f"Labels of train were not searched for errors: {fix} (scikit-learn)"]
    tables.write_json_lines(output / "train_labels.jsonl", found)
    num_errors = sum(line["is_probable_error"] for line in found)
    shown.append(f"Labels of train, {num_errors:,} of them probably wrong, the first ones:")
    for line in found[:num_shown]:
        text = " | ".join(line.get(column, "") for column in texts)
        scored = f"{line['label']} ({line['label_probability']:.3f})"
        scored += f" -> {line['suggested']} ({line['suggested_probability']:.3f})"
        shown.append(f"  {line['location']}: {scored}: {_shortened(text)}")
    return [*shown, "", f"All are in {output}"]


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        raise app.UsageError("expected the workdir of one run: tools/errors.py RUN")
    try:
        shown = analyze(pathlib.Path(argv[1]), flags.FLAGS.split, flags.FLAGS.shown)
    except (OSError, ValueError) as error:
        sys.exit(f"errors: {describe_error(error)}")
    print("\n".join(shown))


if __name__ == "__main__":
    # Here, so that one program can import this and tools/compare.py, which also has --split.
    flags.DEFINE_string("split", "dev", "Of the predictions.")
    flags.DEFINE_integer("shown", 10, "Number of mistakes, and of labels, that are printed.", 0)
    app.run(main, flags_parser=parse_flags)
