"""Multiple choice, the ending of a story: SWAG (Zellers et al., 2018; section 4.4 of the paper)."""

import pathlib

import numpy as np
from ml_collections import ConfigDict

from bert_jax.data.features import Feature
from bert_jax.model import heads
from bert_jax.tasks import scores
from bert_jax.tasks.labels import read_labels
from bert_jax.tasks.sequences import make_sequences
from bert_jax.tasks.tables import read_table, read_tfds
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

    def read(split: str) -> Split:
        """Reads a split; a feature pairs sent1 with sent2 and each ending."""
        if is_tfds:
            name = directory.removeprefix("tfds:")
            records = read_tfds(name, split.replace("dev", "validation"), COLUMNS)
        else:
            records = read_table(pathlib.Path(directory) / FILES[split], COLUMNS)
        labels = read_labels(
            records, "label", CHOICES, required=split != "test", unlabeled=("", "-1")
        )
        rows = [record.columns for record in records]
        pairs = [(row["sent1"], f"{row['sent2']} {row[each]}") for row in rows for each in ENDINGS]
        sequences, truncated = make_sequences(pairs, tokenizer, config.max_seq_length)
        count = len(ENDINGS)
        features = [
            Feature(*zip(*sequences[count * index : count * (index + 1)], strict=True), label)
            for index, label in enumerate(labels)
        ]
        notes[f"{split} truncated"] = int(np.reshape(truncated, (-1, count)).any(axis=1).sum())
        notes[f"{split} with an empty text"] = sum(
            not all(row[name].strip() for name in ("sent1", *ENDINGS)) for row in rows
        )
        ids = [
            {"id": str(number)}
            | {each: record.columns[each] for each in IDS if each in record.columns}
            for number, record in enumerate(records)
        ]
        metrics = {"accuracy": scores.accuracy}
        return make_split(split, features, ids, range(len(ENDINGS)), metrics, label_name="choice")

    def exists(split: str) -> bool:  # TFDS has all splits of a set.
        return is_tfds or (pathlib.Path(directory) / FILES[split]).exists()

    required = "dev" if config.num_epochs or not exists("test") else ""
    splits = [read(name) for name in ("dev", "test") if name == required or exists(name)]
    return Task(
        head=heads.MULTIPLE_CHOICE,
        labels=("score",),
        train=read("train").features if config.num_epochs else [],
        splits=tuple(splits),
        metric="dev/accuracy",
        notes=notes,
        head_settings={"max_seq_length": config.max_seq_length},
    )
