"""Multiple choice, the ending of a story: SWAG (Zellers et al., 2018; section 4.4 of the paper)."""

import pathlib
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from bert_jax.data.features import Feature
from bert_jax.model import heads
from bert_jax.tasks import scores
from bert_jax.tasks.labels import check_labeled, read_label
from bert_jax.tasks.sequences import make_sequences
from bert_jax.tasks.tables import Record, read_table, read_tfds
from bert_jax.tasks.task import Split, Task
from bert_jax.tasks.text_classification import make_split
from bert_jax.tokenization import Tokenizer

ENDINGS = ("ending0", "ending1", "ending2", "ending3")
CHOICES = ("0", "1", "2", "3")
COLUMNS = ("sent1", "sent2", *ENDINGS)
IDS = ("video-id", "fold-ind")  # Written with the predictions; several examples may share them.
FILES = {"train": "train.csv", "dev": "val.csv", "test": "test.csv"}


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads SWAG from `config.data.directory`, CSV files or TFDS; see configs/finetune/swag.py."""
    directory = config.data.directory
    if not directory:
        raise ValueError(
            "give the directory of train.csv and val.csv, or a prepared TFDS set: "
            "--config.data.directory=DIR|tfds:NAME"
        )
    is_tfds = directory.startswith("tfds:")
    notes: dict[str, int] = {}

    def read(split: str) -> tuple[list[Record], list[Feature]]:
        if is_tfds:
            records = read_tfds(
                directory.removeprefix("tfds:"), split.replace("dev", "validation"), COLUMNS
            )
        else:
            records = read_table(pathlib.Path(directory) / FILES[split], COLUMNS)
        labels = [read_label(each, "label", CHOICES, unlabeled=("", "-1")) for each in records]
        check_labeled(records, labels, "label", required=split != "test")
        features, notes[f"{split} truncated"] = choice_features(
            records, labels, tokenizer, config.max_seq_length
        )
        notes[f"{split} with an empty text"] = sum(
            not all(record.columns[name].strip() for name in ("sent1", *ENDINGS))
            for record in records
        )
        return records, features

    def read_split(split: str) -> Split:
        records, features = read(split)
        ids = [
            {"id": str(number)}
            | {each: record.columns[each] for each in IDS if each in record.columns}
            for number, record in enumerate(records)
        ]
        metrics = {"accuracy": scores.accuracy}
        return make_split(split, features, ids, range(len(ENDINGS)), metrics, label_name="choice")

    def exists(split: str) -> bool:  # TFDS has all splits of a set.
        return is_tfds or (pathlib.Path(directory) / FILES[split]).exists()

    splits = []
    if config.num_epochs or exists("dev") or not exists("test"):
        splits.append(read_split("dev"))
    if exists("test"):
        splits.append(read_split("test"))
    return Task(
        head=heads.MULTIPLE_CHOICE,
        labels=("score",),
        train=read("train")[1] if config.num_epochs else [],
        splits=tuple(splits),
        metric="dev/accuracy",
        notes=notes,
        head_settings={"max_seq_length": config.max_seq_length},
    )


def choice_features(
    records: Sequence[Record],
    labels: Sequence[int | None],
    tokenizer: Tokenizer,
    max_seq_length: int,
) -> tuple[list[Feature], int]:
    """Returns a feature of four sequences for each record, and how many records were truncated.

    Each sequence pairs the first sentence with the beginning of the second and one of its endings.
    """
    pairs = [
        (record.columns["sent1"], f"{record.columns['sent2']} {record.columns[ending]}")
        for record in records
        for ending in ENDINGS
    ]
    sequences, truncated = make_sequences(pairs, tokenizer, max_seq_length)
    count, features = len(ENDINGS), []
    for index, label in enumerate(labels):
        own = sequences[count * index : count * (index + 1)]
        features.append(Feature(*zip(*own, strict=True), label))
    return features, int(np.reshape(truncated, (-1, count)).any(axis=1).sum())
