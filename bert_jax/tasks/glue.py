"""GLUE (Wang et al., 2019): nine tasks and the diagnostic set, from TSV files or from TFDS."""

import dataclasses
import functools
import itertools
import operator
import pathlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from bert_jax.model import heads
from bert_jax.tasks import scores, tables
from bert_jax.tasks.labels import labels_from_config, read_labels
from bert_jax.tasks.task import Outputs, Split, Task, TrainedHead, limit_examples
from bert_jax.tasks.text_classification import (
    ClassScores,
    TextPredictor,
    choose_metric,
    make_split,
    text_features,
)
from bert_jax.tokenizers.tokenizer import Tokenizer

_PAIR = ("sentence1", "sentence2")


@dataclasses.dataclass(frozen=True)
class GlueDataset:
    """One dataset of the benchmark."""

    folder: str  # In the download.
    labels: tuple[str, ...]  # In the order of their numbers in the files; () for regression.
    texts: tuple[str, ...] = _PAIR  # Columns of the one or two texts.
    label: str = "label"
    metrics: tuple[str, ...] = ("accuracy",)  # The official ones; the first selects the checkpoint.
    tfds_texts: tuple[str, ...] = ()  # Names of `texts` in TFDS, if different.
    submits_label_names: bool = False  # Whether classes are submitted by name, not by number.
    dev: tuple[str, ...] = ("dev",)
    # Test split -> suffix after `folder` in the name of its submission file.
    submissions: dict[str, str] = dataclasses.field(default_factory=lambda: {"test": ""})


_F1 = ("f1", "accuracy")
_ENTAILMENT = ("entailment", "not_entailment")
_MNLI = GlueDataset(
    "MNLI",
    ("entailment", "neutral", "contradiction"),
    tfds_texts=("premise", "hypothesis"),
    label="gold_label",
    submits_label_names=True,
    dev=("dev_matched", "dev_mismatched"),
    submissions={"test_matched": "-m", "test_mismatched": "-mm"},
)
DATASETS = {
    "cola": GlueDataset(
        "CoLA", ("unacceptable", "acceptable"), ("sentence",), metrics=("matthews",)
    ),
    "sst2": GlueDataset("SST-2", ("negative", "positive"), ("sentence",)),
    "mrpc": GlueDataset(
        "MRPC", ("not_equivalent", "equivalent"), ("#1 String", "#2 String"), "Quality", _F1, _PAIR
    ),
    "stsb": GlueDataset("STS-B", (), label="score", metrics=("spearman", "pearson")),
    "qqp": GlueDataset(
        "QQP", ("not_duplicate", "duplicate"), ("question1", "question2"), "is_duplicate", _F1
    ),
    "mnli": _MNLI,
    "qnli": GlueDataset("QNLI", _ENTAILMENT, ("question", "sentence"), submits_label_names=True),
    "rte": GlueDataset("RTE", _ENTAILMENT, submits_label_names=True),
    "wnli": GlueDataset("WNLI", ("not_entailment", "entailment")),
    # No training set: predicted with an MNLI model.
    "ax": dataclasses.replace(_MNLI, folder="AX", dev=(), submissions={"test": ""}),
}
_UNLABELED = {"-1": "", "-1.0": ""}  # TFDS has -1 in test sets.
_DEV_IDS = "*dev_ids.tsv"  # In the folder of MRPC's original release.
_COLA_COLUMNS = ["source", "label", "mark", "sentence"]
_DIAGNOSTIC = ("diagnostic/diagnostic.tsv", "AX/AX.tsv", "AX/test.tsv", "diagnostic.tsv", "AX.tsv")


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads the set `config.data.name`; see configs/finetune/glue.py."""
    data = config.data
    dataset, is_tfds = find_dataset(data)
    metric = choose_metric(dataset.metrics, data.metric)
    labels = choose_labels(config, dataset)
    columns = (is_tfds and dataset.tfds_texts) or dataset.texts
    classes = labels if dataset.labels else ()
    metrics = official_metrics(dataset, labels)
    files, notes = {}, {}

    def read(name: str, split: str, submission: str = "") -> Split:
        """Reads a split, scored by the official metrics; it also writes any submission file."""
        if is_tfds:
            files[split] = tables.with_split(data.directory, split)
            records = tables.read_table(files[split], columns, data_dir=data.data_dir)
            # TFDS shuffles the examples when it prepares a dataset.
            records.sort(key=lambda record: int(record.columns["idx"]))
        else:
            path = _path(data.directory, name, split)
            records, notes[f"{split} lines malformed and skipped"] = _read_file(path, name, split)
            files.update((file.stem, str(file)) for file in (path, *path.parent.glob(_DEV_IDS)))
        tables.check_columns(records, columns)
        label_column = "label" if is_tfds else dataset.label
        values = read_labels(  # Checks all labels, also of examples that are then left out.
            records,
            label_column,
            classes,
            required=split in ("train", *dataset.dev),
            aliases=label_aliases(dataset),
        )
        records, values = (limit_examples(each, config, split, notes) for each in (records, values))
        texts = [[record.columns[column] for column in columns] for record in records]
        features, truncated = text_features(texts, values, tokenizer, config.max_seq_length)
        notes[f"{split} examples truncated"] = truncated
        empty = [pair for pair in texts if not all(map(str.strip, pair))]
        notes[f"{split} examples with an empty text"] = len(empty)
        records = tables.with_ids(records, "" if split == "train" else _id_column(records))
        split_name = split if name == data.name else name
        scored = make_split(split_name, features, records, classes, metrics)
        if not submission:
            return scored

        def write(outputs: Outputs, directory: pathlib.Path) -> pathlib.Path:
            predicted = (
                {
                    "id": record.id,
                    "prediction": classes[np.argmax(output)] if classes else output[0],
                }
                for record, output in zip(records, outputs, strict=True)
            )
            write_submission(dataset, directory / f"{submission}.tsv", [predicted])
            return scored.write(outputs, directory)

        return dataclasses.replace(scored, write=write)

    def exists(name: str, split: str) -> bool:  # TFDS has all splits of a set.
        return name == data.name if is_tfds else _path(data.directory, name, split).exists()

    train = read(data.name, "train").features if dataset.dev else []
    splits = []
    for split in (*dataset.dev, *dataset.submissions):
        file = dataset.folder + dataset.submissions[split] if split not in dataset.dev else ""
        if exists(data.name, split) or (train and not file):
            splits.append(read(data.name, split, file))
        elif file:
            logging.warning("%s has no %s: %s.tsv is not predicted", data.directory, split, file)
    if data.name == "mnli" and exists("ax", "test"):
        splits.append(read("ax", "test", "AX"))
    if not splits:
        read(data.name, (*dataset.dev, *dataset.submissions)[0])  # Raises for the missing file.
    return Task(
        head=heads.CLASSIFICATION if dataset.labels else heads.REGRESSION,
        labels=labels,
        train=train,
        splits=tuple(splits),
        metric=f"{dataset.dev[0] if dataset.dev else 'dev'}/{metric}",
        notes=notes,
        files=files,
    )


def official_metrics(dataset: GlueDataset, labels: Sequence[str]) -> dict[str, Callable]:
    """Returns the metrics of a set, for classes in the order of `labels`."""
    metrics = {name: getattr(scores, name) for name in dataset.metrics}
    if "f1" in metrics:  # For class 1 in the files, whatever the order of `labels`.
        metrics["f1"] = functools.partial(scores.f1, positive=labels.index(dataset.labels[1]))
    return metrics


def label_aliases(dataset: GlueDataset) -> dict[str, str]:
    """Returns the labels that are written as numbers, and "" for those that mean unknown."""
    return _UNLABELED | {str(i): label for i, label in enumerate(dataset.labels)}


def submission_name(name: str, split: str) -> str:
    """Returns the name of the file for the benchmark's server, without suffix."""
    return DATASETS[name].folder + DATASETS[name].submissions[split]


def write_submission(
    dataset: GlueDataset, path: pathlib.Path, blocks: Iterable[Iterable[dict]]
) -> None:
    """Writes the file for the benchmark's server: the number or name of a class, or a value."""
    with open(path, "w", encoding="utf-8") as stream:
        stream.write("index\tprediction\n")
        for line in itertools.chain.from_iterable(blocks):
            value = line["prediction"]
            if not dataset.labels:
                value = f"{np.clip(value, 0, 5):.3f}"
            elif not dataset.submits_label_names:
                value = dataset.labels.index(value)
            stream.write(f"{line['id']}\t{value}\n")


def find_dataset(data: ConfigDict) -> tuple[GlueDataset, bool]:
    """Returns the set `data.name`, and whether it is in TFDS. Raises ValueError."""
    if data.name not in DATASETS:
        raise ValueError(f"no GLUE set {data.name!r}: expected one of {', '.join(DATASETS)}")
    # The namespace and the version are optional.
    is_tfds = bool(re.fullmatch(rf"tfds:(.+:)?glue/{data.name}([:/].+)?", data.directory))
    if not data.directory or (data.directory.startswith("tfds:") and not is_tfds):
        expected = f"tfds:glue/{data.name}, or the directory of the GLUE download"
        raise ValueError(f"config.data.directory={data.directory}: expected {expected}")
    return DATASETS[data.name], is_tfds


def choose_labels(config: ConfigDict, dataset: GlueDataset) -> tuple[str, ...]:
    """Returns the labels in the order of `config`, or of the set. Raises ValueError for others."""
    expected = dataset.labels or ("value",)
    labels = labels_from_config(config) or expected
    if set(labels) != set(expected):
        order = f"expected {', '.join(expected)}, in any order"
        origin = "in config.data.labels, or of the head in the weights"
        raise ValueError(f"the labels {origin}, are {', '.join(labels)}: {order}")
    return labels


def _id_column(records: list[tables.Record]) -> str:
    """Returns the name of the column with the ids; "" if there is none."""
    names = ("index", "id", "idx")
    return next((name for name in names if name in records[0].columns), "")


def _path(directory: str, name: str, split: str) -> pathlib.Path:
    """Returns the file of a split; `directory` is the whole download or the set's own folder."""
    root = pathlib.Path(directory)
    if name == "ax":
        paths = [root / path for path in _DIAGNOSTIC]
        return next(filter(pathlib.Path.exists, paths), paths[0])
    folder = root / DATASETS[name].folder
    path = (folder if folder.is_dir() else root) / f"{split}.tsv"
    original = path.with_name(f"msr_paraphrase_{'test' if split == 'test' else 'train'}.txt")
    return original if name == "mrpc" and not path.exists() and original.exists() else path


def _read_file(path: pathlib.Path, name: str, split: str) -> tuple[list[tables.Record], int]:
    """Reads tab-separated lines without quoting; returns the examples and the number skipped.

    A line with too few fields is an error, except in QQP's train and dev files: some lines there
    are damaged and, as in the released code, skipped, and fields after the last column are ignored.
    """
    skipped: Counter = Counter()
    records = list(_iterate_file(path, name, split, skipped))
    if path.name == "msr_paraphrase_train.txt":
        # The original release, split as the benchmark's download script does.
        file = next(path.parent.glob(_DEV_IDS), path.with_name("mrpc_dev_ids.tsv"))
        text = tables.read_text(file, "the benchmark's dev pairs, beside msr_paraphrase_train.txt")
        dev = {tuple(line.split("\t")) for line in text.splitlines()}
        pair = operator.itemgetter("#1 ID", "#2 ID")
        records = [each for each in records if (pair(each.columns) in dev) == (split == "dev")]
    if not records:
        raise ValueError(f"{path}: {split} of {name} holds no examples")
    return records, skipped.total()


def _iterate_file(
    path: pathlib.Path, name: str, split: str, skipped: Counter
) -> Iterator[tables.Record]:
    """Yields the examples of `_read_file`; counts the others in `skipped`."""
    has_header = name != "cola" or split == "test"
    names = _COLA_COLUMNS
    lines = tables.iterate_lines(path, "the GLUE download, or the folder of this set")
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\n")
        fields, location = line.split("\t"), f"{path}, line {number}"
        if number == 1 and has_header:
            names = fields
        elif not line.strip():
            continue
        elif len(fields) >= len(names):
            yield tables.Record(dict(zip(names, fields, strict=False)), location)
        elif name == "qqp" and split != "test":
            skipped["lines malformed and skipped"] += 1
        else:
            counts = f"expected {len(names)} tab-separated fields, found {len(fields)}"
            raise ValueError(f"{location}: {counts}")


PREDICT_OPTIONS = {"text": "", "text_pair": "", "label": "", "id": "", "header_lines": 1}


def get_predictor(trained: TrainedHead, options: Mapping, given: Set[str]) -> "GluePredictor":
    """Returns the predictor of a head trained on GLUE, for its files or a table of your own."""
    name, head = trained.data.get("name"), trained.settings
    if name not in DATASETS:
        raise ValueError(f"the model was trained on no GLUE set: it stores data.name={name!r}")
    dataset = DATASETS[name]
    text, *text_pair = dataset.texts
    columns = {"text": text, "text_pair": "".join(text_pair), "label": dataset.label, "id": ""}
    columns = {**columns, "header_lines": 1, **{option: options[option] for option in given}}
    metrics = official_metrics(dataset, head["labels"])
    scores = ClassScores(head, metrics, {})
    return GluePredictor(trained, columns, scores, dataset, name, bool(given))


class GluePredictor(TextPredictor):
    """Predicts the files of a set as they are, also into the form that the server expects."""

    def __init__(
        self,
        trained: TrainedHead,
        options: Mapping,
        scores: ClassScores,
        dataset: GlueDataset,
        name: str,
        is_table: bool,
    ):
        super().__init__(trained, options, scores, aliases=label_aliases(dataset))
        self._dataset, self._name, self._is_table = dataset, name, is_table
        self.writers[".tsv"] = functools.partial(write_submission, dataset)

    def find_inputs(self, directory: pathlib.Path) -> list[tuple[pathlib.Path, str]]:
        tests = [(self._name, split) for split in self._dataset.submissions]
        if self._name == "mnli":
            tests.append(("ax", "test"))
        found = [(self._name, split, f"{split}.jsonl") for split in self._dataset.dev]
        for name, split in tests:
            found.append((name, split, f"{submission_name(name, split)}.tsv"))
        found = [(_path(str(directory), name, split), output) for name, split, output in found]
        found = [(path, output) for path, output in found if path.exists()]
        if not found:
            expected = "the GLUE download, or the folder of this set"
            raise ValueError(f"{directory} has no file of {self._name}: expected {expected}")
        return found

    def read(self, path: str | pathlib.Path) -> Iterator[tables.Record]:
        path = pathlib.Path(path)
        if self._is_table or path.suffix not in (".tsv", ".txt"):
            yield from super().read(path)
            return
        split = "test" if "test" in path.stem else path.stem
        number, id_column = 0, None
        records = _iterate_file(path, self._name, split, self.notes)
        if path.name == "msr_paraphrase_train.txt":  # Which also holds the training examples.
            records, _ = _read_file(path, self._name, "dev")
        for record in records:
            tables.check_columns([record], self._dataset.texts)
            id_column = _id_column([record]) if id_column is None else id_column
            yield record._replace(id=record.columns[id_column] if id_column else str(number))
            number += 1
        if not number:
            raise ValueError(f"{path} holds no examples")
