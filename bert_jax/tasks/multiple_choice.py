"""Multiple choice of story endings: SWAG (Zellers et al., 2018; section 4.4 of the paper)."""

import pathlib

import numpy as np
from ml_collections import ConfigDict

from bert_jax.corpus.tfds import tfds_source
from bert_jax.data.features import Feature
from bert_jax.model import heads
from bert_jax.tasks import scores
from bert_jax.tasks.labels import read_labels
from bert_jax.tasks.sequences import make_sequences
from bert_jax.tasks.tables import example_ids, read_table, with_split
from bert_jax.tasks.task import Split, Task, limit_examples
from bert_jax.tasks.text_classification import make_split
from bert_jax.tokenization import Tokenizer

ENDINGS = ("ending0", "ending1", "ending2", "ending3")
CHOICES = ("0", "1", "2", "3")
COLUMNS = ("sent1", "sent2", *ENDINGS)
FILES = {"train": "train.csv", "dev": "val.csv", "test": "test.csv"}


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads SWAG from `config.data.directory`, CSV files or TFDS; see configs/finetune/swag.py."""
    directory = config.data.directory
    if not directory:
        files = "the directory of train.csv and val.csv, or a prepared TFDS set"
        raise ValueError(f"give --config.data.directory=DIR|tfds:NAME, {files}")
    is_tfds = directory.startswith("tfds:")
    files: dict[str, str] = {}
    notes: dict[str, int] = {}

    def read(split: str) -> Split:
        """Reads a split; a feature pairs sent1 with sent2 and each ending."""
        path = str(pathlib.Path(directory) / FILES[split])
        files[split] = with_split(directory, split) if is_tfds else path
        records = read_table(files[split], COLUMNS, data_dir=config.data.data_dir)
        records = limit_examples(records, config, split, notes)
        labels = read_labels(records, "label", CHOICES, split != "test", unlabeled=("", "-1"))
        rows = [record.columns for record in records]
        pairs = [(row["sent1"], f"{row['sent2']} {row[name]}") for row in rows for name in ENDINGS]
        sequences, truncated = make_sequences(pairs, tokenizer, config.max_seq_length)
        groups = zip(*[iter(sequences)] * len(ENDINGS), labels, strict=True)
        features = [Feature(*zip(*choices, strict=True), label) for *choices, label in groups]
        num_truncated = np.reshape(truncated, (-1, len(ENDINGS))).any(axis=1).sum()
        notes[f"{split} examples truncated"] = int(num_truncated)
        empty = [row for row in rows if not all(row[name].strip() for name in ("sent1", *ENDINGS))]
        notes[f"{split} examples with an empty text"] = len(empty)
        ids = example_ids(records, "")
        return make_split(split, features, ids, records, CHOICES, {"accuracy": scores.accuracy})

    def exists(split: str) -> bool:
        if is_tfds:
            info = tfds_source(directory, "all", config.data.data_dir).dataset_info
            return split.replace("dev", "validation") in info.splits
        return (pathlib.Path(directory) / FILES[split]).exists()

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
        files=files,
    )
