"""Left to right: predicts each token from those before it (Devlin et al., 2018, section 5.1)."""

import dataclasses
from typing import ClassVar

import jax

from bert_jax.data.features import unpack_rows
from bert_jax.data.masking import next_tokens
from bert_jax.model.dropout import Dropout
from bert_jax.model.execution import ExecutionPlan
from bert_jax.objectives import Batch, Sums
from bert_jax.objectives.masked_lm import (
    PretrainingModel,
    flops_per_row,
    target_counts,
    target_sums,
)


@dataclasses.dataclass(frozen=True)
class LeftToRight:
    """Predicts all tokens but the first of each sequence and, with `next_sentence`, pairs."""

    next_sentence: bool = True

    causal: ClassVar[bool] = True
    main_loss: ClassVar[str] = "next_token_loss"
    main_accuracy: ClassVar[str] = "next_token_accuracy"
    rules: ClassVar[tuple] = ()

    @staticmethod
    def max_predictions(config, given: int | None, length: int) -> int:
        """Returns the positions of a row but the last, which has no next token."""
        return length - 1

    @classmethod
    def from_config(cls, config, tokenizer, max_predictions: int) -> "LeftToRight":
        """Builds the objective of a phase; `config.masking` has no effect."""
        return cls(config.next_sentence)

    def make_model(self, model_config, plan: ExecutionPlan) -> PretrainingModel:
        """Builds the model; the model config must be causal."""
        return PretrainingModel(model_config, self.next_sentence, plan)

    def prepare(self, rows: Batch, key: jax.Array) -> Batch:
        """Unpacks rows; nothing is masked."""
        batch = unpack_rows(rows, pools_last=True)
        return batch | next_tokens(batch["tokens"], batch["sequence_ids"])

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the numbers of targets, at least 1."""
        return target_counts(batch, "next_token", self.next_sentence)

    def total_loss(self, losses: dict[str, jax.Array | float]) -> jax.Array | float:
        """Returns the sum of the mean losses of tokens and of pairs."""
        if not self.next_sentence:
            return losses["next_token_loss"]
        return losses["next_token_loss"] + losses["nsp_loss"]

    def sums(
        self,
        model: PretrainingModel,
        params: dict,
        batch: Batch,
        dropout: Dropout | None = None,
    ) -> Sums:
        """Returns the loss and accuracy of each head over a batch, as sums and counts."""
        return target_sums(model, params, batch, dropout, "next_token")

    def flops_per_row(self, model_config, length: int, max_sequences: int) -> float:
        """Returns the FLOPs of a training step for one row; the last position has no target."""
        return flops_per_row(model_config, length, length - 1, max_sequences, self.next_sentence)


Objective = LeftToRight
