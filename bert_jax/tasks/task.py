"""The interface of a task: features to train on, splits to score, and a head."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from ml_collections import ConfigDict

from bert_jax.data.features import ModelInput
from bert_jax.model.heads import Head, Outputs
from bert_jax.tokenizers.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Split:
    """Examples to predict and, where their labels are known, to score."""

    name: str  # "dev", "test", ...
    features: Sequence[ModelInput]  # All examples, in the order of the file.
    # Outputs for `features` -> the official metrics by name; None without labels.
    score: Callable[[Outputs], dict[str, float]] | None
    # Writes predictions with the examples' ids into an existing directory, with other files beside
    # them; returns the path of the predictions.
    write: Callable[[Outputs, pathlib.Path], pathlib.Path]
    # Outputs -> the head settings that suit this split best; None: none are chosen.
    tune: Callable[[Outputs], dict] | None = None
    # Head settings -> this split, scored and written with them; None: it depends on none.
    with_settings: Callable[[dict], "Split"] | None = None
    # What the examples are called -> their number, for the log, such as {"questions": 100}. Scores
    # are means over the first. Empty: each feature is an example.
    counts: dict[str, int] = dataclasses.field(default_factory=dict)

    def describe_size(self) -> str:
        """Returns the numbers of examples as text."""
        counts = self.counts or {"examples": len(self.features)}
        return ", ".join(f"{count:,} {name}" for name, count in counts.items())


@dataclasses.dataclass(frozen=True)
class Task:
    """A task as read from its files."""

    head: Head
    labels: tuple[str, ...]  # Names of the head's outputs; none for "embedding".
    train: Sequence[ModelInput]
    splits: tuple[Split, ...]  # All of them are predicted at the end of a run.
    # "split/name" of the metric that selects the best checkpoint, higher is better. Without such a
    # split, or labels in it, the last checkpoint is kept.
    metric: str
    # Counts from reading the files (truncated, skipped, ...), for the log.
    notes: dict[str, int] = dataclasses.field(default_factory=dict)
    # What inference needs besides the labels; stored in the checkpoint as JSON.
    head_settings: dict = dataclasses.field(default_factory=dict)
    # Names of head settings that are chosen on the dev split; a run starts from the values of the
    # head in its weights.
    tuned: tuple[str, ...] = ()
    # Paths, "tfds:NAME" or "hub:NAME" of what was read, by name. A run resumes only with the same
    # contents.
    files: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def selection_split(self) -> Split | None:
        """The split whose score selects the best checkpoint, if its labels are known."""
        name = self.metric.rpartition("/")[0]
        return next((split for split in self.splits if split.name == name and split.score), None)

    def with_settings(self, tuned: dict) -> "Task":
        """Returns the task with chosen head settings."""
        return dataclasses.replace(
            self,
            head_settings=self.head_settings | tuned,
            splits=tuple(
                split.with_settings(tuned) if split.with_settings else split
                for split in self.splits
            ),
        )


OUTSIDE_FRACTION = "train examples outside train_fraction"
"""The note of `limit_examples` on how many examples `config.train_fraction` leaves out."""


def limit_examples(
    examples: Sequence, config: ConfigDict, split: str, notes: dict[str, int]
) -> Sequence:
    """Returns the examples of a split that the configuration uses, in their order.

    `max_train_examples` or `max_eval_examples` (0: all) are evenly spaced. `train_fraction` of what
    is left of train (0: all) are the first of an order that depends only on their number, so that a
    smaller fraction is part of a larger one. Records in `notes` how many each of the two dropped.
    Raises ValueError if the fraction leaves none.
    """
    limit = config.max_train_examples if split == "train" else config.max_eval_examples
    kept = list(range(len(examples)))
    if 0 < limit < len(examples):
        kept = [index * len(examples) // limit for index in range(limit)]
        notes[f"{split} examples dropped"] = len(examples) - limit
    if split == "train" and kept and 0 < (fraction := config.train_fraction) < 1:
        count = round(fraction * len(kept))
        if not count:
            raise ValueError(
                f"config.train_fraction={fraction:g}: it leaves none of {len(kept)} training "
                f"examples: expected more than {0.5 / len(kept):.2g}"
            )
        if count < len(kept):
            notes[OUTSIDE_FRACTION] = len(kept) - count
        order = np.random.default_rng(0).permutation(len(kept))
        kept = [kept[position] for position in sorted(order[:count])]
    if len(kept) == len(examples):
        return examples
    return [examples[index] for index in kept]


class TrainedHead(NamedTuple):
    """A head, and what its task needs to apply it to new examples.

    Attributes:
      settings: those stored with the head, such as its "task" and "labels".
      data: the fields `config.data` of the run that trained it; empty if it is imported.
      tokenizer: the model's.
      max_position_embeddings: the model's.
    """

    settings: Mapping
    data: Mapping
    tokenizer: Tokenizer
    max_position_embeddings: int

    @property
    def max_seq_length(self) -> int:
        """The length of its inputs in tokens; of an imported head, which stores none, the most."""
        return self.settings.get("max_seq_length", self.max_position_embeddings)


class Predictor(Protocol):
    """Predicts files with a trained head, in blocks of examples: `get_predictor` of a task.

    A task's file offers `PREDICT_OPTIONS`, the names and default values of those of `OPTIONS` in
    bert_jax/predict.py that it takes, such as columns, and
    `get_predictor(trained, options, given) -> Predictor`, where `given` are the options that the
    user has set; others have the value of the run that trained the head.

    Attributes:
      writers: of each suffix that an output may have, the function (path, blocks) that writes the
        predictions of all blocks, as `describe` returns them.
      notes: counts of what is unusual in the examples so far, for the log.
    """

    writers: Mapping[str, Callable[[pathlib.Path, Iterable[Sequence[Any]]], None]]
    notes: dict[str, int]

    def find_inputs(self, directory: pathlib.Path) -> Sequence[tuple[pathlib.Path, str]]:
        """Returns the files of a folder that can be predicted, and the names of the outputs."""

    def read(self, path: str | pathlib.Path) -> Iterator[Any]:
        """Yields the examples of a file one by one. Raises ValueError or OSError."""

    def features(self, examples: Sequence[Any]) -> Iterable[ModelInput]:
        """Returns the features of a block of examples."""

    def describe(self, examples: Sequence[Any], outputs: Outputs) -> Sequence[Any]:
        """Returns the predictions of a block; keeps what the scores need, if labels are known."""

    def scores(self) -> dict[str, float]:
        """Returns the scores of the examples so far whose labels are known, and their number."""


def write_json_blocks(path: pathlib.Path, blocks: Iterable[Sequence[dict]]) -> None:
    """Writes a JSON object per line."""
    with open(path, "w", encoding="utf-8") as stream:
        for predictions in blocks:
            stream.writelines(json.dumps(values) + "\n" for values in predictions)


def files_with_suffix(directory: pathlib.Path, suffixes: Sequence[str]) -> list[pathlib.Path]:
    """Returns the files of a folder with one of `suffixes`, by name; raises ValueError if none."""
    found = sorted(path for path in directory.iterdir() if path.suffix in suffixes)
    if not found:
        raise ValueError(f"{directory} has no file with the suffix {', '.join(suffixes)}")
    return found
