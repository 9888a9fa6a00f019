"""Choosing the ending of a story: SWAG (Zellers et al., 2018), as in section 4.4 of the paper."""

import json
import pathlib
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from bert_jax.data.features import Feature, make_sequence
from bert_jax.tasks import scores
from bert_jax.tasks.tables import Record, read_table, read_tfds
from bert_jax.tasks.task import Outputs, Split, Task
from bert_jax.tasks.text_classification import truncate
from bert_jax.tokenization import Tokenizer

ENDINGS = ("ending0", "ending1", "ending2", "ending3")
COLUMNS = ("sent1", "sent2", *ENDINGS)
IDS = ("video-id", "fold-ind")  # Of the examples; one may come several times.
FILES = {"train": "train.csv", "dev": "val.csv", "test": "test.csv"}
TFDS_SPLITS = {"train": "train", "dev": "validation", "test": "test"}


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads SWAG's CSV files from `config.data.directory`, or TFDS; see configs/finetune/swag.py.

    Raises FileNotFoundError and ValueError, with file and line, for what cannot be read.
    """
    directory = config.data.directory
    if not directory:
        raise ValueError(
            "give the directory of train.csv and val.csv, or a prepared TFDS set: "
            "--config.data.directory=DIR|tfds:NAME"
        )
    notes: dict[str, int] = {}

    def read(split) -> tuple[list[Record], list[Feature]]:
        if directory.startswith("tfds:"):
            records = read_tfds(directory.removeprefix("tfds:"), TFDS_SPLITS[split])
            for record in records:
                if missing := [name for name in COLUMNS if name not in record.columns]:
                    raise ValueError(f"{record.place}: no {', '.join(missing)}")
        else:
            records = read_table(pathlib.Path(directory) / FILES[split], COLUMNS)
        labels = [_label(record) for record in records]
        if split != "test" and None in labels:
            raise ValueError(f"{records[labels.index(None)].place}: no label")
        if None in labels:
            labels = [None] * len(labels)
        made, notes[f"{split} truncated"] = choice_features(
            records, labels, tokenizer, config.max_seq_length
        )
        notes[f"{split} with an empty text"] = sum(
            not all(record.columns[name].strip() for name in ("sent1", *ENDINGS))
            for record in records
        )
        return records, made

    def exists(split):
        # TFDS has all splits of a set.
        return directory.startswith("tfds:") or (pathlib.Path(directory) / FILES[split]).exists()

    splits = []
    if config.num_epochs or exists("dev") or not exists("test"):
        splits.append(_split("dev", *read("dev")))
    if exists("test"):
        splits.append(_split("test", *read("test")))
    return Task(
        kind="multiple_choice",
        labels=("score",),
        train=read("train")[1] if config.num_epochs else [],
        splits=tuple(splits),
        metric="dev/accuracy",
        notes=notes,
        settings={"max_seq_length": config.max_seq_length},
    )


def choice_features(
    records: Sequence[Record],
    labels: Sequence[int | None],
    tokenizer: Tokenizer,
    max_seq_length: int,
) -> tuple[list[Feature], int]:
    """A feature of four sequences for each record, and how many records had to be cut.

    Each sequence is the first sentence, and the beginning of the second with one of its endings.
    """
    first = tokenizer.encode_batch([record.columns["sent1"] for record in records])
    endings = [
        tokenizer.encode_batch(
            [f"{record.columns['sent2']} {record.columns[ending]}" for record in records]
        )
        for ending in ENDINGS
    ]
    room, features, truncated = max_seq_length - 3, [], 0
    for context, *choices, label in zip(first, *endings, labels, strict=True):
        truncated += any(len(context) + len(choice) > room for choice in choices)
        sequences, starts = zip(
            *(make_sequence(tokenizer, *truncate([context, choice], room)) for choice in choices),
            strict=True,
        )
        features.append(Feature(sequences, starts, label))
    return features, truncated


def _split(name: str, records: list[Record], features: list[Feature]) -> Split:
    expected = np.array([feature.label for feature in features])

    def score(outputs: Outputs) -> dict[str, float]:
        return {"accuracy": scores.accuracy(np.argmax(outputs, axis=-1), expected)}

    def write(outputs: Outputs, directory: pathlib.Path) -> None:
        with open(directory / f"{name}.jsonl", "w") as stream:
            for number, (record, output) in enumerate(zip(records, outputs, strict=True)):
                ids = {"id": str(number)}
                ids |= {each: record.columns[each] for each in IDS if each in record.columns}
                best = int(np.argmax(output))
                probability = float(np.exp(output[best] - np.logaddexp.reduce(output)))
                prediction = {"choice": best, "probability": probability}
                stream.write(json.dumps(ids | prediction) + "\n")

    return Split(name, features, score if features[0].label is not None else None, write)


def _label(record: Record) -> int | None:
    text = record.columns.get("label", "")
    if text in ("", "-1"):
        return None
    if text not in ("0", "1", "2", "3"):
        raise ValueError(f"{record.place}: label {text!r}, expected 0, 1, 2 or 3")
    return int(text)
