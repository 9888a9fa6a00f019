"""The interface of a task: features to train on, splits to score, and a head."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from ml_collections import ConfigDict

from bert_jax.data.features import Feature
from bert_jax.model.heads import Head, Outputs


@dataclasses.dataclass(frozen=True)
class Split:
    """Examples to predict and, where their labels are known, to score.

    Attributes:
      name: "dev", "test", ...
      features: the features of all examples, in the order of the file.
      score: (outputs for `features`) -> the official metrics by name; None without labels.
      write: (outputs, existing directory) -> None; writes predictions with the examples' ids.
    """

    name: str
    features: Sequence[Feature]
    score: Callable[[Outputs], dict[str, float]] | None
    write: Callable[[Outputs, pathlib.Path], None]


@dataclasses.dataclass(frozen=True)
class Task:
    """A task as read from its files.

    Attributes:
      labels: names of the head's outputs; none for "embedding".
      splits: all of them are predicted at the end of a run.
      metric: "split/name" of the metric that selects the best checkpoint, higher is better. Without
        such a split, or labels in it, the last checkpoint is kept.
      notes: counts from reading the files (truncated, skipped, ...), for the log.
      head_settings: what inference needs besides the labels; stored in the checkpoint as JSON.
      tuned: names of head settings that scoring the dev split changes; a run starts from those of
        the head in its weights.
      files: paths or "tfds:NAME" of what was read, by name. A run cannot be resumed with others.
    """

    head: Head
    labels: tuple[str, ...]
    train: Sequence[Feature]
    splits: tuple[Split, ...]
    metric: str
    notes: dict[str, int] = dataclasses.field(default_factory=dict)
    head_settings: dict = dataclasses.field(default_factory=dict)
    tuned: tuple[str, ...] = ()
    files: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def selector(self) -> Split | None:
        """The split whose score selects the best checkpoint, if its labels are known."""
        name = self.metric.rpartition("/")[0]
        return next((split for split in self.splits if split.name == name and split.score), None)


def limit_examples(
    examples: Sequence[Any], config: ConfigDict, split: str, notes: dict[str, int]
) -> Sequence[Any]:
    """Returns `max_train_examples` or `max_eval_examples` evenly spaced examples (0: all).

    Records in `notes` how many were dropped.
    """
    limit = config.max_train_examples if split == "train" else config.max_eval_examples
    if not 0 < limit < len(examples):
        return examples
    notes[f"{split} examples dropped"] = len(examples) - limit
    return [examples[index * len(examples) // limit] for index in range(limit)]
