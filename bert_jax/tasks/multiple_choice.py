"""Multiple choice of story endings: SWAG (Zellers et al., 2018; section 4.4 of the paper)."""

import itertools
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict
from scipy.special import softmax

from bert_jax.data.features import ModelInput
from bert_jax.data.tfds import tfds_source
from bert_jax.model import heads
from bert_jax.tasks.labels import read_labels
from bert_jax.tasks.scores import accuracy
from bert_jax.tasks.tables import (
    Record,
    check_columns,
    drop_blank_rows,
    note_unused_columns,
    read_table,
    with_ids,
    with_split,
)
from bert_jax.tasks.task import Outputs, Split, Task, TrainedHead, limit_examples
from bert_jax.tasks.text_classification import (
    ClassScores,
    TextPredictor,
    make_split,
    text_features,
)
from bert_jax.tokenizers.tokenizer import Tokenizer

ENDINGS = ("ending0", "ending1", "ending2", "ending3")
CHOICES = ("0", "1", "2", "3")
UNLABELED = {"-1": "", "-1.0": ""}
COLUMNS = ("sent1", "sent2", *ENDINGS)
FILES = {"train": "train.csv", "dev": "val.csv", "test": "test.csv"}


class Ranked(NamedTuple):
    """A candidate, its index in the input, its logit, and the softmax of the logits."""

    text: str
    index: int
    score: float
    probability: float


def rank_candidates(candidates: Sequence[str], scores: np.ndarray) -> list[Ranked]:
    """Returns the candidates, best first, given the logit of each."""
    probabilities = softmax(scores).tolist() if len(candidates) else []
    columns = candidates, itertools.count(), scores.tolist(), probabilities
    return sorted(map(Ranked, *columns), key=lambda candidate: -candidate.score)


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads SWAG from `config.data.directory`, CSV files or TFDS; see configs/finetune/swag.py."""
    directory = config.data.directory
    if not directory:
        files = "the directory of train.csv and val.csv, or a prepared TFDS set"
        raise ValueError(f"set config.data.directory=DIR or tfds:NAME, {files}")
    is_tfds, folder = directory.startswith("tfds:"), pathlib.Path(directory)
    files, notes = {}, {}

    def read(split: str) -> Split:
        """Reads a split; a feature pairs sent1 with sent2 and each ending."""
        files[split] = with_split(directory, split) if is_tfds else str(folder / FILES[split])
        records = read_table(files[split], COLUMNS, data_dir=config.data.data_dir)
        records = drop_blank_rows(records, "label", split, notes)
        check_endings(records[0])
        note_unused_columns(records, {*COLUMNS, "label"}, split, notes)
        # Checks all labels, also of examples that are then left out.
        labels = read_labels(records, "label", CHOICES, split != "test", aliases=UNLABELED)
        records, labels = (limit_examples(each, config, split, notes) for each in (records, labels))
        records = with_ids(records, "")
        rows = [record.columns for record in records]
        pairs = [pair for row in rows for pair in pair_with_endings(row)]
        features, truncated = text_features(pairs, labels, tokenizer, config.max_seq_length)
        notes[f"{split} examples truncated"] = truncated
        notes[f"{split} examples with an empty text"] = sum(map(has_empty_text, rows))
        return make_split(split, features, records, CHOICES, {"accuracy": accuracy})

    available = {split for split, file in FILES.items() if (folder / file).exists()}
    if is_tfds:
        info = tfds_source(directory, "all", config.data.data_dir).dataset_info
        available = {split.replace("validation", "dev") for split in info.splits}
    available.add("dev")
    splits = [read(split) for split in ("dev", "test") if split in available]
    return Task(
        head=heads.MULTIPLE_CHOICE,
        labels=("score",),
        train=read("train").features,
        splits=tuple(splits),
        metric="dev/accuracy",
        notes=notes,
        files=files,
    )


def check_endings(record: Record) -> None:
    """Raises ValueError for endings besides `ENDINGS`, which would be left out."""
    found = [name for name in record.columns if re.fullmatch(r"ending\d+", name)]
    if more := sorted(set(found) - set(ENDINGS)):
        raise ValueError(
            f"{record.location}: {', '.join(more)}: expected the four endings {', '.join(ENDINGS)}"
        )


def pair_with_endings(row: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns sent1 with sent2 and each ending."""
    # sent2 may be empty, and byte-level BPE encodes a word differently after a space.
    return [(row["sent1"], f"{row['sent2']} {row[name]}".lstrip()) for name in ENDINGS]


def has_empty_text(row: Mapping[str, str]) -> bool:
    return not all(row[name].strip() for name in ("sent1", *ENDINGS))


PREDICT_OPTIONS = {"label": "label", "id": "", "header_lines": 1}


def get_predictor(trained: TrainedHead, options: Mapping, given: Set[str]) -> "ChoicePredictor":
    """Returns the predictor of a head that chooses the ending of a story."""
    settings = {**trained.settings, "labels": CHOICES}
    columns = {"text": "sent1", "text_pair": "sent2", **options}
    scores = ClassScores(settings, {"accuracy": accuracy}, {})
    trained = trained._replace(settings=settings)
    return ChoicePredictor(trained, columns, scores, "label" in given, UNLABELED)


class ChoicePredictor(TextPredictor):
    """Chooses endings; a sequence holds one ending, so that an example has four features."""

    def read(self, path: str | pathlib.Path) -> Iterator[Record]:
        for record in super().read(path):
            check_columns([record], COLUMNS)
            check_endings(record)
            yield record

    def features(self, examples: Sequence[Record]) -> list[ModelInput]:
        rows = [record.columns for record in examples]
        pairs = [pair for row in rows for pair in pair_with_endings(row)]
        self.notes["examples with an empty text"] += sum(map(has_empty_text, rows))
        length, unknown = self._trained.max_seq_length, [None] * len(pairs)
        features, truncated = text_features(pairs, unknown, self._trained.tokenizer, length)
        self.notes[f"endings truncated to {length} tokens"] += truncated
        return features

    def describe(self, examples: Sequence[Record], outputs: Outputs) -> list[dict]:
        return super().describe(examples, list(np.reshape(outputs, (-1, len(ENDINGS)))))
