"""Masked LM with next-sentence prediction (Devlin et al., 2018, section 3.1), or without.

Whether a pair is of two segments in order, or of a random second one, depends on the corpus: the
labels of pairs may as well be of sentence order (Lan et al., 2019).
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from bert_jax.data.features import unpack_rows
from bert_jax.data.masking import Masking, mask_tokens, row_keys
from bert_jax.model import pretraining
from bert_jax.model.dropout import Dropout
from bert_jax.model.execution import Execution
from bert_jax.model.layers import cross_entropy
from bert_jax.model.pretraining import PretrainingModel


@dataclasses.dataclass(frozen=True, eq=False)
class MaskedLm:
    """Predicts masked tokens and, with `next_sentence`, the labels of pairs.

    Attributes:
      masking: how rows are masked.
      next_sentence: whether the model has a head for pairs.
    """

    masking: Masking
    next_sentence: bool = True

    causal: ClassVar[bool] = False
    main_loss: ClassVar[str] = "mlm"
    rules: ClassVar[tuple] = ()

    @staticmethod
    def max_predictions(config, given: int | None, length: int) -> int:
        """Returns the maximum number of masked positions in a row: 20 of 128 tokens, 77 of 512.

        Raises ValueError if `given` is too small or too large.
        """
        if given is None:
            return math.ceil(round(config.masking.rate * length, 6))
        needed = max(round(config.masking.rate * length), 1)
        if not needed <= given <= length:
            raise ValueError(
                f"expected {needed} (masking.rate x row length) to {length}, or leave it out"
            )
        return given

    @classmethod
    def from_config(cls, config, tokenizer, max_predictions: int) -> "MaskedLm":
        """Builds the objective of a phase. Raises ValueError for an invalid `config.masking`."""
        if tokenizer.mask_id is None:
            raise ValueError("the vocabulary of the corpus has no [MASK]: masked LM needs one")
        masking = Masking(
            special_ids=tuple(tokenizer.special_ids),
            mask_id=tokenizer.mask_id,
            vocab_size=tokenizer.vocab_size,
            word_start=tokenizer.word_start,
            max_predictions=max_predictions,
            **config.masking,
        )
        return cls(masking, config.next_sentence)

    def make_model(self, config, execution: Execution) -> PretrainingModel:
        """Builds the model for an architecture's configuration."""
        return PretrainingModel(config, self.next_sentence, execution)

    def example_batch(self) -> dict[str, jax.Array]:
        """Returns a batch to initialize the model."""
        return pretraining.example_batch()

    def prepare(self, rows: dict[str, jax.Array], key: jax.Array) -> dict[str, jax.Array]:
        """Unpacks and masks rows. Masks are a function of (key, row, epoch)."""
        batch = unpack_rows(rows)
        keys = row_keys(key, rows["row_ids"], rows["epochs"], self.masking.repeat_after)
        return batch | mask_tokens(keys, batch["tokens"], batch["sequence_ids"], self.masking)

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
        """Returns the FLOPs of a training step for one row."""
        num_targets = self.masking.max_predictions
        return pretraining.flops_per_row(
            config, length, num_targets, max_sequences, self.next_sentence
        )


def target_counts(batch: dict, main_loss: str, next_sentence: bool) -> dict[str, jax.Array]:
    """Returns the number of target tokens, and of pairs with `next_sentence`; at least 1."""
    counts = {main_loss: jnp.maximum(jnp.sum(batch["target_weights"]), 1)}
    if next_sentence:
        counts["nsp"] = jnp.maximum(jnp.sum(batch["nsp_weights"]), 1)
    return counts


def target_sums(
    model: PretrainingModel, params: dict, batch: dict, dropout: Dropout | None, main_loss: str
) -> dict[str, jax.Array]:
    """Returns the sums of `MaskedLm.sums` for the targets of a batch."""
    token_logits, pair_logits = model.apply({"params": params}, batch, dropout)
    sums = loss_sums(main_loss, token_logits, batch["targets"], batch["target_weights"])
    if pair_logits is not None:
        sums |= loss_sums("nsp", pair_logits, batch["nsp_labels"], batch["nsp_weights"])
    return sums


def loss_sums(
    name: str, logits: jax.Array, targets: jax.Array, weights: jax.Array
) -> dict[str, jax.Array]:
    """Returns the float32 sums of one loss: its nats, correct predictions and count, by name."""
    losses, correct = cross_entropy(logits, targets)
    return {
        f"{name}_loss": jnp.sum(losses * weights),
        f"{name}_correct": jnp.sum(correct * weights),
        f"{name}_count": jnp.sum(weights),
    }


Objective = MaskedLm
