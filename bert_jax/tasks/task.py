"""What a task is, and no more: features to train on, splits to score, a head to put on."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from bert_jax.data.features import Feature

Outputs = list[np.ndarray]
"""What the head gives for each feature, float32: classification `[classes]`, regression `[1]`,
multiple_choice `[choices]`, embedding `[sequences, hidden]`, tagging `[length, tags]`, span
`[length, 2]`."""


@dataclasses.dataclass(frozen=True)
class Split:
    """Examples to predict and, where their labels are known, to score.

    Attributes:
      name: "dev", "test", ...
      features: of all examples, in the order of the file.
      score: the head's outputs for `features` -> the official metrics by name; None: no labels.
      write: outputs, a directory that exists -> files of predictions in it, with the examples' ids.
    """

    name: str
    features: Sequence[Feature]
    score: Callable[[Outputs], dict[str, float]] | None
    write: Callable[[Outputs, pathlib.Path], None]


@dataclasses.dataclass(frozen=True)
class Task:
    """A task as read from its files.

    Attributes:
      kind: of the head, one of `heads.KINDS`.
      labels: what the head's outputs stand for; none for "embedding", which has no head.
      train: shuffled and batched by the loop.
      splits: all are predicted at the end.
      metric: "split/name" of the metric that decides which checkpoint is kept; higher is better.
        Without such a split, or labels in it, the last one is.
      notes: what was counted while reading (truncated, skipped, ...), for the log.
      settings: what inference must know besides the labels; kept in the checkpoint, so JSON.
      tuned: names of the settings that scoring the development set changes. They start from those
        of the head that a run starts from, and each checkpoint keeps its own.
    """

    kind: str
    labels: tuple[str, ...]
    train: Sequence[Feature]
    splits: tuple[Split, ...]
    metric: str
    notes: dict[str, int] = dataclasses.field(default_factory=dict)
    settings: dict = dataclasses.field(default_factory=dict)
    tuned: tuple[str, ...] = ()
