"""What a model is pre-trained for: one file each, named by `config.objective`.

Each file defines one: its model, how rows become a batch, its losses, what it needs of a teacher,
and its FLOPs. The class, a frozen dataclass, is available as `Objective` of the file.
"""

from collections.abc import Mapping
from typing import ClassVar, Protocol

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec as P

from bert_jax.runtime.named_modules import import_part

Batch = dict[str, jax.Array]
Sums = dict[str, tuple[jax.Array, jax.Array]]
"""Metric -> (float32 sum, count to divide it by). Both are added over rows, microbatches and
devices, so the mean does not depend on how the rows are split."""


class Objective(Protocol):
    """Defines how packed rows become a batch, and which losses and metrics are computed on it.

    Attributes:
      causal: whether the model is left to right.
      main_loss: the metric whose exponential is the perplexity.
      main_accuracy: the metric that the progress bar shows.
      rules: the sharding of the parameters that its model adds to an architecture's.
    """

    causal: ClassVar[bool]
    main_loss: ClassVar[str]
    main_accuracy: ClassVar[str]
    rules: ClassVar[tuple[tuple[str, P], ...]]

    @staticmethod
    def max_predictions(config, given: int | None, length: int) -> int:
        """Returns the maximum number of targets in a row of `length` tokens.

        `given` is the number in the run's `config`, if any. Raises ValueError if it is invalid.
        """

    @classmethod
    def from_config(cls, config, tokenizer, max_predictions: int) -> "Objective":
        """Builds the objective of a phase of a run's `config`. Raises ValueError."""

    def make_model(self, model_config, plan) -> nn.Module:
        """Builds the model that is trained.

        Its attribute `config` is the model config, and `plan` the plan by which its layers run. Its
        encoder's parameters are at "encoder"; if there are others, its attribute `encoders` has the
        model config of each by its path.
        """

    def prepare(self, rows: Batch, key: jax.Array) -> Batch:
        """Returns the batch of packed rows, on the device that holds them."""

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the count that normalizes each loss, over the global batch; at least 1."""

    def sums(self, model: nn.Module, params: dict, batch: Batch, dropout=None) -> Sums:
        """Returns the losses, in nats, and the other metrics of a shard of the batch."""

    def total_loss(self, losses: Mapping[str, jax.Array | float]) -> jax.Array | float:
        """Returns the loss to minimize, from the mean of each loss of `counts`."""

    def flops_per_row(self, model_config, length: int, max_sequences: int) -> float:
        """Returns the FLOPs of a training step for one row."""


class TaughtObjective(Objective, Protocol):
    """An objective that learns from a teacher, whose parameters are not updated."""

    def with_teacher(self, settings: Mapping) -> "TaughtObjective":
        """Returns the objective with the teacher that the settings of its checkpoint describe."""

    def frozen_params(self, teacher_params: Mapping) -> dict:
        """Returns the parameters that `sums` needs in its `params` beside the updated ones."""

    def initial_params(self, teacher_params: Mapping, modules: Mapping) -> dict:
        """Returns the parameters of a student with these `modules` that starts from the teacher."""


def find_objective(name: str) -> type[Objective]:
    """Returns the objective of the file `name`, or of a module elsewhere by its dotted name.

    Raises ValueError.
    """
    try:
        return import_part("bert_jax.objectives", name, "Objective").Objective
    except ValueError as error:
        raise ValueError(f"config.objective={name}: {error}") from None


def learns_from_teacher(objective: type[Objective]) -> bool:
    """Returns whether an objective is a `TaughtObjective`."""
    return hasattr(objective, "with_teacher")


def mean_metrics(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Returns the mean of each metric; 0, not NaN, if its count is 0."""
    return {name: float(total) / (float(count) or 1.0) for name, (total, count) in sums.items()}
