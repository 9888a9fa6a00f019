"""GLUE (Wang et al., 2019): nine tasks and the diagnostic set, from TSV files or from TFDS."""

import dataclasses
import pathlib
import re
from collections.abc import Sequence

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from bert_jax.tasks import scores
from bert_jax.tasks.tables import Record, read_text, read_tfds
from bert_jax.tasks.task import Outputs, Split, Task
from bert_jax.tasks.text_classification import (
    choose_metric,
    example_ids,
    finite_number,
    given_labels,
    make_split,
    text_features,
)
from bert_jax.tokenization import Tokenizer

METRICS = {
    "accuracy": scores.accuracy,
    "f1": scores.f1,
    "matthews": scores.matthews,
    "pearson": scores.pearson,
    "spearman": scores.spearman,
}


@dataclasses.dataclass(frozen=True)
class GlueSet:
    """One of the benchmark's sets.

    Attributes:
      folder: its directory in the download.
      texts: the columns of the one text or two; `tfds_texts` are TFDS's names, where they differ.
      label: the column of the label, and `labels` its classes in the order of the numbers that
        stand in files; () for a value.
      metrics: official ones; the first decides which checkpoint is kept.
      submissions: split of test -> name of the file to submit.
      words: whether classes are submitted by name, not by number.
      dev: splits of development.
    """

    folder: str
    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    submissions: dict[str, str]
    words: bool = False
    dev: tuple[str, ...] = ("dev",)
    tfds_texts: tuple[str, ...] = ()


_SENTENCES = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
_MNLI = GlueSet(
    "MNLI",
    _SENTENCES,
    "gold_label",
    ("entailment", "neutral", "contradiction"),
    ("accuracy",),
    {"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm"},
    words=True,
    dev=("dev_matched", "dev_mismatched"),
    tfds_texts=("premise", "hypothesis"),
)
SETS = {
    "cola": GlueSet(
        "CoLA",
        ("sentence",),
        "label",
        ("unacceptable", "acceptable"),
        ("matthews",),
        {"test": "CoLA"},
    ),
    "sst2": GlueSet(
        "SST-2",
        ("sentence",),
        "label",
        ("negative", "positive"),
        ("accuracy",),
        {"test": "SST-2"},
    ),
    "mrpc": GlueSet(
        "MRPC",
        ("#1 String", "#2 String"),
        "Quality",
        ("not_equivalent", "equivalent"),
        ("f1", "accuracy"),
        {"test": "MRPC"},
        tfds_texts=_SENTENCES,
    ),
    "stsb": GlueSet("STS-B", _SENTENCES, "score", (), ("spearman", "pearson"), {"test": "STS-B"}),
    "qqp": GlueSet(
        "QQP",
        ("question1", "question2"),
        "is_duplicate",
        ("not_duplicate", "duplicate"),
        ("f1", "accuracy"),
        {"test": "QQP"},
    ),
    "mnli": _MNLI,
    "qnli": GlueSet(
        "QNLI",
        ("question", "sentence"),
        "label",
        _ENTAILMENT,
        ("accuracy",),
        {"test": "QNLI"},
        words=True,
    ),
    "rte": GlueSet(
        "RTE", _SENTENCES, "label", _ENTAILMENT, ("accuracy",), {"test": "RTE"}, words=True
    ),
    "wnli": GlueSet(
        "WNLI",
        _SENTENCES,
        "label",
        ("not_entailment", "entailment"),
        ("accuracy",),
        {"test": "WNLI"},
    ),
    # Nothing to train on: a model of MNLI predicts it.
    "ax": dataclasses.replace(_MNLI, folder="AX", submissions={"test": "AX"}, dev=()),
}
_COLA_COLUMNS = ("source", "label", "mark", "sentence")
_DIAGNOSTIC = ("diagnostic/diagnostic.tsv", "AX/AX.tsv", "AX/test.tsv", "diagnostic.tsv", "AX.tsv")


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads the set `config.data.name`; see configs/finetune/glue.py.

    Raises FileNotFoundError and ValueError, with file and line, for what cannot be read.
    """
    data = config.data
    if data.name not in SETS:
        raise ValueError(f"no GLUE set {data.name!r}: expected one of {', '.join(SETS)}")
    chosen = SETS[data.name]
    metric = choose_metric(chosen.metrics, data.metric)
    labels = given_labels(config) or chosen.labels or ("value",)
    if set(labels) != set(chosen.labels or ("value",)):
        raise ValueError(
            f"--config.data.labels={','.join(labels)}: expected {', '.join(chosen.labels)}, in any "
            "order"
        )
    notes: dict[str, int] = {}

    def features(split, records):
        texts = _texts(chosen, records[0])
        pairs = [[record.columns[column] for column in texts] for record in records]
        values = [_label(record, chosen, labels) for record in records]
        if None in values and split in ("train", *chosen.dev):
            raise ValueError(
                f"{records[values.index(None)].place}: no {chosen.label}, which all examples to "
                "train on or to choose by have"
            )
        made, notes[f"{split} truncated"] = text_features(
            pairs, values, tokenizer, config.max_seq_length
        )
        notes[f"{split} with an empty text"] = sum(not all(map(str.strip, each)) for each in pairs)
        return made

    def read(name, split):
        records, notes[f"{split} malformed and skipped"] = _read(data.directory, name, split)
        if not records:
            raise ValueError(f"{data.directory}: {split} of {name} holds no examples")
        return records

    trains = chosen.dev and config.num_epochs  # Else there need be no train and dev.
    train = features("train", read(data.name, "train")) if trains else []
    splits = []
    for split in chosen.dev:
        if trains or _exists(data.directory, data.name, split):
            splits.append(_split(split, read(data.name, split), features, chosen, labels))
    for split, file in chosen.submissions.items():
        if not _exists(data.directory, data.name, split):
            logging.warning("%s has no %s: %s.tsv is not predicted", data.directory, split, file)
            continue
        splits.append(_split(split, read(data.name, split), features, chosen, labels, file))
    if data.name == "mnli" and _exists(data.directory, "ax", "test"):
        splits.append(_split("ax", read("ax", "test"), features, chosen, labels, "AX"))
    if not splits:
        read(data.name, (*chosen.dev, *chosen.submissions)[0])  # Says what is missing.
    return Task(
        kind="classification" if chosen.labels else "regression",
        labels=labels,
        train=train,
        splits=tuple(splits),
        metric=f"{chosen.dev[0] if chosen.dev else 'dev'}/{metric}",
        notes={name: count for name, count in notes.items() if count},
        settings={"max_seq_length": config.max_seq_length},
    )


def _split(
    name: str,
    records: list[Record],
    make_features,
    chosen: GlueSet,
    labels: tuple[str, ...],
    submission: str = "",
) -> Split:
    """Official metrics, and with `submission` that file beside the predictions with their ids."""
    features = make_features(name, records)
    index = next((each for each in ("index", "id", "idx") if each in records[0].columns), "")
    ids = example_ids(records, index)
    split = make_split(name, features, ids, labels, not chosen.labels)
    expected = np.array([feature.label for feature in features])

    def score(outputs: Outputs) -> dict[str, float]:
        if chosen.labels:
            # F1 is of class 1 of the files, whatever the order of `labels`.
            numbers = np.array([chosen.labels.index(label) for label in labels])
            pair = numbers[np.argmax(outputs, axis=-1)], numbers[expected]
        else:
            pair = np.array(outputs, np.float64)[:, 0], expected
        return {metric: METRICS[metric](*pair) for metric in chosen.metrics}

    def write(outputs: Outputs, directory: pathlib.Path) -> None:
        split.write(outputs, directory)
        if submission:
            predictions = submission_values(outputs, chosen, labels)
            with open(directory / f"{submission}.tsv", "w") as stream:
                stream.write("index\tprediction\n")
                for example, prediction in zip(ids, predictions, strict=True):
                    stream.write(f"{example}\t{prediction}\n")

    return dataclasses.replace(split, score=split.score and score, write=write)


def submission_values(outputs: Outputs, chosen: GlueSet, labels: Sequence[str]) -> list[str]:
    """Predictions as the benchmark wants them: names or numbers of classes, or values in [0, 5]."""
    if not chosen.labels:
        return [f"{np.clip(output[0], 0, 5):.3f}" for output in outputs]
    names = [labels[int(np.argmax(output))] for output in outputs]
    return names if chosen.words else [str(chosen.labels.index(name)) for name in names]


def _texts(chosen: GlueSet, record: Record) -> tuple[str, ...]:
    """The columns of the texts in the files or TFDS; ValueError if they are not there."""
    for texts in (chosen.texts, chosen.tfds_texts):
        if texts and all(column in record.columns for column in texts):
            return texts
    raise ValueError(
        f"{record.place}: expected the columns {', '.join(chosen.texts)}; it has "
        f"{', '.join(record.columns)}"
    )


def _label(record: Record, chosen: GlueSet, labels: Sequence[str]) -> int | float | None:
    """The class in the order of `labels`, or the value; None where it is not known."""
    column = chosen.label if chosen.label in record.columns else "label"
    text = record.columns.get(column, "")
    if text in ("", "-1", "-1.0"):  # TFDS has -1 in test sets.
        return None
    if not chosen.labels:
        return finite_number(record, column)
    numbers = {str(index): name for index, name in enumerate(chosen.labels)}
    if (name := numbers.get(text, text)) not in labels:
        raise ValueError(f"{record.place}: label {text!r}, expected {' or '.join(chosen.labels)}")
    return labels.index(name)


def _exists(directory: str, name: str, split: str) -> bool:
    if directory.startswith("tfds:"):
        return _is_tfds_of(directory, name)  # TFDS has all splits of a set.
    return _path(directory, name, split).exists()


def _is_tfds_of(directory: str, name: str) -> bool:
    """Whether it is tfds:glue/NAME, perhaps with a namespace or a version."""
    return re.fullmatch(rf"tfds:(.+:)?glue/{name}([:/].+)?", directory) is not None


def _path(directory: str, name: str, split: str) -> pathlib.Path:
    """The file of a split below `directory`, which is the download or the set's own part of it."""
    root = pathlib.Path(directory)
    if name == "ax":
        found = [root / path for path in _DIAGNOSTIC if (root / path).exists()]
        return found[0] if found else root / _DIAGNOSTIC[0]
    own = root / SETS[name].folder
    path = (own if own.is_dir() else root) / f"{split}.tsv"
    original = path.with_name(f"msr_paraphrase_{'test' if split == 'test' else 'train'}.txt")
    return original if name == "mrpc" and not path.exists() and original.exists() else path


def _read(directory: str, name: str, split: str) -> tuple[list[Record], int]:
    """The examples of a split, and how many lines were no examples."""
    if not directory:
        raise ValueError(
            "give the directory of the GLUE download, or a prepared TFDS set: "
            f"--config.data.directory=DIR|tfds:glue/{name}"
        )
    if directory.startswith("tfds:"):
        if not _is_tfds_of(directory, name):
            raise ValueError(f"--config.data.directory={directory}: expected tfds:glue/{name}")
        records = read_tfds(directory.removeprefix("tfds:"), split.replace("dev", "validation"))
        # TFDS shuffles what it prepares.
        return sorted(records, key=lambda record: int(record.columns["idx"])), 0
    path = _path(directory, name, split)
    header = _COLA_COLUMNS if name == "cola" and split != "test" else None
    records, skipped = _read_tsv(path, header, skips_short_lines=name == "qqp" and split != "test")
    if path.name == "msr_paraphrase_train.txt":
        # As the benchmark's download script divides the original release.
        names = ("dev_ids.tsv", "mrpc_dev_ids.tsv")
        found = [path.with_name(each) for each in names if path.with_name(each).exists()]
        if not found:
            raise FileNotFoundError(
                f"{path} is MRPC's original release: put the benchmark's {names[1]} beside it, "
                "which names the pairs of the development set"
            )
        dev = {tuple(line.split("\t")) for line in read_text(found[0], "pairs of ids").splitlines()}
        records = [
            record
            for record in records
            if ((record.columns["#1 ID"], record.columns["#2 ID"]) in dev) == (split == "dev")
        ]
    return records, skipped


def _read_tsv(
    path: pathlib.Path, header: Sequence[str] | None, skips_short_lines: bool
) -> tuple[list[Record], int]:
    """Lines of fields between tabs, in which a quotation mark is one; and how many were skipped.

    A line with too few fields is an error, or skipped: some of QQP's are so damaged, and everybody
    leaves them out. What stands after the last column is of no use, as released.
    """
    lines = read_text(path, "the GLUE download, or its folder of this set").split("\n")
    names = header or lines[0].split("\t")
    records, skipped = [], 0
    for number, line in enumerate(lines[0 if header else 1 :], start=1 if header else 2):
        if not line.strip():
            continue
        fields = line.split("\t")
        if len(fields) >= len(names):
            place = f"{path}, line {number}"
            records.append(Record(dict(zip(names, fields, strict=False)), place))
        elif skips_short_lines:
            skipped += 1
        else:
            raise ValueError(
                f"{path}, line {number}: {len(fields)} fields between tabs, expected {len(names)}"
            )
    return records, skipped
