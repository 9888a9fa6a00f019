"""Left to right: predicts each token from those before it (Devlin et al., 2018, section 5.1)."""

import dataclasses
from typing import ClassVar

import jax

from bert_jax.data.features import unpack_rows
from bert_jax.data.masking import next_tokens
from bert_jax.model import pretraining
from bert_jax.model.dropout import Dropout
from bert_jax.model.execution import Execution
from bert_jax.model.pretraining import PretrainingModel
from bert_jax.objectives.masked_lm import target_counts, target_sums


@dataclasses.dataclass(frozen=True)
class LeftToRight:
    """Predicts all tokens but the first of each sequence and, with `next_sentence`, pairs."""

    next_sentence: bool = True

    causal: ClassVar[bool] = True
    main_loss: ClassVar[str] = "next_token"
    rules: ClassVar[tuple] = ()

    @staticmethod
    def max_predictions(config, given: int | None, length: int) -> int:
        """Returns the positions of a row but the last, which has no next token."""
        return length - 1

    @classmethod
    def from_config(cls, config, tokenizer, max_predictions: int) -> "LeftToRight":
        """Builds the objective of a phase; `config.masking` has no effect."""
        return cls(config.next_sentence)

    def make_model(self, config, execution: Execution) -> PretrainingModel:
        """Builds the model for an architecture's configuration, which must be causal."""
        return PretrainingModel(config, self.next_sentence, execution)

    def example_batch(self) -> dict[str, jax.Array]:
        """Returns a batch to initialize the model."""
        return pretraining.example_batch()

    def prepare(self, rows: dict[str, jax.Array], key: jax.Array) -> dict[str, jax.Array]:
        """Unpacks rows; nothing is masked."""
        batch = unpack_rows(rows, causal=True)
        return batch | next_tokens(batch["tokens"], batch["sequence_ids"])

    def counts(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the numbers of targets, at least 1."""
        return target_counts(batch, self.main_loss, self.next_sentence)

    @staticmethod
    def total_loss(losses: dict[str, jax.Array | float]) -> jax.Array | float:
        """Returns the sum of the mean losses of tokens and of pairs."""
        return sum(losses.values())

    def sums(
        self,
        model: PretrainingModel,
        params: dict,
        batch: dict[str, jax.Array],
        dropout: Dropout | None = None,
    ) -> dict[str, jax.Array]:
        """Returns sums over a batch, float32: losses in nats, correct predictions, counts."""
        return target_sums(model, params, batch, dropout, self.main_loss)

    def flops_per_row(self, config, length: int, max_sequences: int) -> float:
        """Returns the FLOPs of a training step for one row; the last position has no target."""
        return pretraining.flops_per_row(
            config, length, length - 1, max_sequences, self.next_sentence
        )


Objective = LeftToRight
