"""Predicts and scores a table of texts with a loaded model: `PretrainedModel.predict`."""

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from ml_collections import ConfigDict

from bert_jax.tasks.labels import LABEL_SEPARATOR
from bert_jax.tasks.text_classification import read_records, read_split


class Predictions(NamedTuple):
    """What a model predicts for a table.

    Attributes:
      rows: a dict for each example, as in `predictions/SPLIT.jsonl` of a run: its "id", its columns
        as text, "label" if known, "prediction", and the "probabilities" of all classes, best first;
        with more than 100 classes only the 10 best, and "num_other_labels".
      scores: the scores by name; empty if the labels are unknown.
    """

    rows: list[dict]
    scores: dict[str, float]


def predict_table(
    model,
    table: str | os.PathLike | Iterable[Mapping],
    text: str = "text",
    text_pair: str = "",
    label: str = "label",
    id: str = "",
    header_lines: int = 1,
) -> Predictions:
    """Predicts each example of a table and, if all have a label, scores the predictions.

    The model needs a head for classification, multi-label classification or regression. The result
    equals that of `bert_jax.predict`.
    Warns about truncated and empty texts. Raises FileNotFoundError if the file is missing,
    ValueError if the table or a label is invalid, and TypeError for anything but a table.

    Args:
      table: a .csv, .tsv or .jsonl file, or a list of dicts.
      text, text_pair: columns of the text and, for a head trained on pairs, of the second text.
      label: column of the label; the table may lack it. A multi-label head takes a list in JSONL
        and dicts, or text with the separator that it was trained with ("|" if it stores none).
      id: column of unique ids; "": numbers from 0.
      header_lines: of a .csv or .tsv; the first names the columns, the others are skipped.
    """
    head = model._need_head("predict tables", "classification", "multi_label", "regression")
    is_path = isinstance(table, str | os.PathLike)
    source = os.fspath(table) if is_path else list(table)
    if not source:
        if is_path:
            raise ValueError("the path of the table is empty")
        return Predictions([], {})
    is_regression = head["task"] == "regression"
    is_multi_label = head["task"] == "multi_label"
    data = {
        "train": "",
        "data_dir": "",
        "text": text,
        "text_pair": text_pair,
        "label": label,
        "id": id,
        "header_lines": header_lines,
        "regression": is_regression,
        "label_separator": head.get("label_separator", LABEL_SEPARATOR) if is_multi_label else "",
    }
    limits = {"max_seq_length": head["max_seq_length"], "max_eval_examples": 0}
    config = ConfigDict({"data": data} | limits)
    labels = () if is_regression else tuple(head["labels"])
    notes: dict[str, int] = {}
    try:
        records = read_records(source, "test", config.data, notes)
        split = read_split("test", records, labels, config, model.tokenizer, notes)
    except ValueError as error:  # Its advice names flags of the command line.
        raise ValueError(str(error).replace("--config.data.", "")) from error
    for what, count in notes.items():
        if count and "without labels" not in what:
            warnings.warn(f"{what.removeprefix('test ')}: {count} of {len(records)}", stacklevel=2)
    if "calibration_temperature" in head and split.with_settings:
        settings = {"calibration_temperature": head["calibration_temperature"]}
        split = split.with_settings(settings)
    outputs = model.head_outputs([replace(each, label=None) for each in split.features])
    return Predictions(split.describe(outputs), split.score(outputs) if split.score else {})
