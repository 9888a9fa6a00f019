"""GLUE (Wang et al., 2019): nine tasks and the diagnostic set, from TSV files or from TFDS."""

import dataclasses
import functools
import pathlib
import re

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from bert_jax.data.features import Feature
from bert_jax.model import heads
from bert_jax.tasks import scores
from bert_jax.tasks.labels import given_labels, read_labels
from bert_jax.tasks.tables import Record, example_ids, read_text, read_tfds
from bert_jax.tasks.task import Outputs, Split, Task
from bert_jax.tasks.text_classification import choose_metric, make_split, text_features
from bert_jax.tokenization import Tokenizer


@dataclasses.dataclass(frozen=True)
class GlueSet:
    """One set of the benchmark.

    Attributes:
      folder: its directory in the download.
      labels: the classes, in the order of their numbers in the files; () for values.
      submissions: test split -> name of the file to submit.
      texts: columns of the one or two texts; `tfds_texts` are their names in TFDS if different.
      metrics: the official ones; the first selects the checkpoint.
      submits_names: whether classes are submitted by name, not by number.
    """

    folder: str
    labels: tuple[str, ...]
    submissions: dict[str, str]
    texts: tuple[str, ...] = ("sentence1", "sentence2")
    tfds_texts: tuple[str, ...] = ()
    label: str = "label"
    metrics: tuple[str, ...] = ("accuracy",)
    submits_names: bool = False
    dev: tuple[str, ...] = ("dev",)


_ENTAILMENT = ("entailment", "not_entailment")
_MNLI = GlueSet(
    "MNLI",
    ("entailment", "neutral", "contradiction"),
    {"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm"},
    tfds_texts=("premise", "hypothesis"),
    label="gold_label",
    submits_names=True,
    dev=("dev_matched", "dev_mismatched"),
)
SETS = {
    "cola": GlueSet(
        "CoLA",
        ("unacceptable", "acceptable"),
        {"test": "CoLA"},
        texts=("sentence",),
        metrics=("matthews",),
    ),
    "sst2": GlueSet("SST-2", ("negative", "positive"), {"test": "SST-2"}, texts=("sentence",)),
    "mrpc": GlueSet(
        "MRPC",
        ("not_equivalent", "equivalent"),
        {"test": "MRPC"},
        texts=("#1 String", "#2 String"),
        tfds_texts=("sentence1", "sentence2"),
        label="Quality",
        metrics=("f1", "accuracy"),
    ),
    "stsb": GlueSet("STS-B", (), {"test": "STS-B"}, label="score", metrics=("spearman", "pearson")),
    "qqp": GlueSet(
        "QQP",
        ("not_duplicate", "duplicate"),
        {"test": "QQP"},
        texts=("question1", "question2"),
        label="is_duplicate",
        metrics=("f1", "accuracy"),
    ),
    "mnli": _MNLI,
    "qnli": GlueSet(
        "QNLI", _ENTAILMENT, {"test": "QNLI"}, texts=("question", "sentence"), submits_names=True
    ),
    "rte": GlueSet("RTE", _ENTAILMENT, {"test": "RTE"}, submits_names=True),
    "wnli": GlueSet("WNLI", ("not_entailment", "entailment"), {"test": "WNLI"}),
    # No training set: an MNLI model predicts it.
    "ax": dataclasses.replace(_MNLI, folder="AX", submissions={"test": "AX"}, dev=()),
}
_UNLABELED = ("", "-1", "-1.0")  # TFDS has -1 in test sets.
_COLA_COLUMNS = ["source", "label", "mark", "sentence"]
_DIAGNOSTIC = ("diagnostic/diagnostic.tsv", "AX/AX.tsv", "AX/test.tsv", "diagnostic.tsv", "AX.tsv")


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads the set `config.data.name`; see configs/finetune/glue.py."""
    data = config.data
    if data.name not in SETS:
        raise ValueError(f"no GLUE set {data.name!r}: expected one of {', '.join(SETS)}")
    # A namespace or a version is optional.
    is_tfds = bool(re.fullmatch(rf"tfds:(.+:)?glue/{data.name}([:/].+)?", data.directory))
    if not data.directory or (data.directory.startswith("tfds:") and not is_tfds):
        raise ValueError(
            f"--config.data.directory={data.directory}: expected tfds:glue/{data.name}, or the "
            "directory of the GLUE download"
        )
    glue_set = SETS[data.name]
    metric = choose_metric(glue_set.metrics, data.metric)
    expected = glue_set.labels or ("value",)
    labels = given_labels(config) or expected
    if set(labels) != set(expected):
        raise ValueError(
            f"--config.data.labels={','.join(labels)}: expected {', '.join(expected)}, in any order"
        )
    columns = (is_tfds and glue_set.tfds_texts) or glue_set.texts
    numbers = {str(number): label for number, label in enumerate(glue_set.labels)}
    notes: dict[str, int] = {}

    def read(name: str, split: str) -> tuple[list[Record], list[Feature]]:
        skipped = 0
        if is_tfds:
            tfds_name = data.directory.removeprefix("tfds:")
            records = read_tfds(tfds_name, split.replace("dev", "validation"), columns)
            # TFDS shuffles what it prepares.
            records.sort(key=lambda record: int(record.columns["idx"]))
        else:
            records, skipped = _read_file(data.directory, name, split)
        if not records:
            raise ValueError(f"{data.directory}: {split} of {name} holds no examples")
        if not set(columns) <= records[0].columns.keys():
            raise ValueError(
                f"{records[0].place}: expected the columns {', '.join(columns)}; it has "
                f"{', '.join(records[0].columns)}"
            )
        texts = [[record.columns[column] for column in columns] for record in records]
        values = read_labels(
            records,
            "label" if is_tfds else glue_set.label,
            labels if glue_set.labels else (),
            required=split in ("train", *glue_set.dev),
            unlabeled=_UNLABELED,
            aliases=numbers,
        )
        features, truncated = text_features(texts, values, tokenizer, config.max_seq_length)
        notes[f"{split} malformed and skipped"] = skipped
        notes[f"{split} truncated"] = truncated
        notes[f"{split} with an empty text"] = sum(not all(map(str.strip, each)) for each in texts)
        return records, features

    def exists(name: str, split: str) -> bool:  # TFDS has all splits of a set.
        return name == data.name if is_tfds else _path(data.directory, name, split).exists()

    train = read(data.name, "train")[1] if glue_set.dev and config.num_epochs else []
    splits = []
    for split, file in (dict.fromkeys(glue_set.dev, "") | glue_set.submissions).items():
        if exists(data.name, split) or (train and not file):
            splits.append(_make_split(split, *read(data.name, split), glue_set, labels, file))
        elif file:
            logging.warning("%s has no %s: %s.tsv is not predicted", data.directory, split, file)
    if data.name == "mnli" and exists("ax", "test"):
        splits.append(_make_split("ax", *read("ax", "test"), glue_set, labels, "AX"))
    if not splits:
        read(data.name, (*glue_set.dev, *glue_set.submissions)[0])  # Raises for the missing file.
    return Task(
        head=heads.CLASSIFICATION if glue_set.labels else heads.REGRESSION,
        labels=labels,
        train=train,
        splits=tuple(splits),
        metric=f"{glue_set.dev[0] if glue_set.dev else 'dev'}/{metric}",
        notes=notes,
        head_settings={"max_seq_length": config.max_seq_length},
    )


def _make_split(
    name: str,
    records: list[Record],
    features: list[Feature],
    glue_set: GlueSet,
    labels: tuple[str, ...],
    submission: str,
) -> Split:
    """Builds a split with the official metrics that also writes the file to submit, if any."""
    id_column = next((each for each in ("index", "id", "idx") if each in records[0].columns), "")
    ids = example_ids(records, id_column)
    metrics = {metric: getattr(scores, metric) for metric in glue_set.metrics}
    if "f1" in metrics:  # Of class 1 of the files, whatever the order of `labels`.
        positive = labels.index(glue_set.labels[1])
        metrics["f1"] = functools.partial(scores.f1, positive=positive)
    classes = labels if glue_set.labels else ()
    split = make_split(name, features, [{"id": each} for each in ids], classes, metrics)
    if not submission:
        return split

    def write(outputs: Outputs, directory: pathlib.Path) -> None:
        split.write(outputs, directory)
        with open(directory / f"{submission}.tsv", "w") as stream:
            stream.write("index\tprediction\n")
            for example, output in zip(ids, outputs, strict=True):
                if not classes:
                    prediction = f"{np.clip(output[0], 0, 5):.3f}"
                else:
                    prediction = classes[int(np.argmax(output))]
                    if not glue_set.submits_names:
                        prediction = glue_set.labels.index(prediction)
                stream.write(f"{example}\t{prediction}\n")

    return dataclasses.replace(split, write=write)


def _path(directory: str, name: str, split: str) -> pathlib.Path:
    """Returns the file of a split in `directory`: the whole download or the set's own folder."""
    root = pathlib.Path(directory)
    if name == "ax":
        found = [root / path for path in _DIAGNOSTIC if (root / path).exists()]
        return found[0] if found else root / _DIAGNOSTIC[0]
    own = root / SETS[name].folder
    path = (own if own.is_dir() else root) / f"{split}.tsv"
    original = path.with_name(f"msr_paraphrase_{'test' if split == 'test' else 'train'}.txt")
    return original if name == "mrpc" and not path.exists() and original.exists() else path


def _read_file(directory: str, name: str, split: str) -> tuple[list[Record], int]:
    """Reads tab-separated lines without quoting; returns the examples and the number skipped.

    A line with too few fields is an error, or skipped: some of QQP's are damaged, and everybody
    leaves them out. Fields after the last column are ignored, as released.
    """
    path = _path(directory, name, split)
    lines = read_text(path, "the GLUE download, or the folder of this set").split("\n")
    has_header = name != "cola" or split == "test"
    names = lines[0].split("\t") if has_header else _COLA_COLUMNS
    records, skipped = [], 0
    for number, line in enumerate(lines[has_header:], start=1 + has_header):
        fields, place = line.split("\t"), f"{path}, line {number}"
        if not line.strip():
            continue
        if len(fields) >= len(names):
            records.append(Record(dict(zip(names, fields, strict=False)), place))
        elif name == "qqp" and split != "test":
            skipped += 1
        else:
            raise ValueError(f"{place}: {len(fields)} tab-separated fields, expected {len(names)}")
    if path.name == "msr_paraphrase_train.txt":
        # The original release, split as by the benchmark's download script.
        file = next(path.parent.glob("*dev_ids.tsv"), path.with_name("mrpc_dev_ids.tsv"))
        text = read_text(file, "the benchmark's list of dev pairs, for the release beside it")
        dev = {tuple(line.split("\t")) for line in text.splitlines()}
        ids = [(record.columns["#1 ID"], record.columns["#2 ID"]) for record in records]
        records = [
            record
            for record, pair in zip(records, ids, strict=True)
            if (pair in dev) == (split == "dev")
        ]
    return records, skipped
