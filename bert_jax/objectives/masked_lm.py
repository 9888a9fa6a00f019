"""Masked LM with next-sentence prediction (Devlin et al., 2018, section 3.1), or without.

Whether a pair is of two segments in order, or of a random second one, depends on the corpus: the
labels of pairs may as well be of sentence order (Lan et al., 2019).
"""

import dataclasses
import math
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.data.features import NO_LABEL, unpack_rows
from bert_jax.data.masking import Masking, mask_tokens, row_keys
from bert_jax.model.architecture import architecture_of
from bert_jax.model.dropout import Dropout
from bert_jax.model.encoder import Encoder, is_few
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.layers import cross_entropy
from bert_jax.objectives import Batch, Sums


class PretrainingModel(nn.Module):
    """Encoder, head for tokens ("mlm"), and head for pairs ("nsp").

    Attributes:
      config: the model config.
      next_sentence: False: without head for pairs and pooler (section 5.1, "No NSP").
      plan: how it runs.
    """

    config: object
    next_sentence: bool = True
    plan: ExecutionPlan = ExecutionPlan()

    def setup(self):
        architecture = architecture_of(self.config)
        self.encoder = Encoder(self.config, self.plan)
        self.mlm = architecture.LmHead(self.config)
        if self.next_sentence:
            self.nsp = architecture.PairHead(self.config)

    def __call__(
        self, batch: dict[str, jax.Array], dropout: Dropout | float | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns float32 logits `[B, K, padded_vocab]` and `[B, S, 2]`, or None without that head.

        The batch has the inputs of `Encoder`, and int32 `target_positions` `[B, K]`, to predict
        tokens at, and `pooled_positions` `[B, S]`, one for each sequence.
        """
        positions = target_positions = batch["target_positions"]
        if self.next_sentence:
            positions = jnp.concatenate([positions, batch["pooled_positions"]], axis=1)
        hidden = self.encoder(batch, dropout, positions)
        targets, pooled = jnp.split(hidden, [target_positions.shape[1]], axis=1)
        logits = self.mlm(targets, self.encoder.embeddings.token_embedding)
        return logits, self.nsp(self.encoder.pool(pooled)) if self.next_sentence else None

    def predict_tokens(self, batch: dict[str, jax.Array], positions: jax.Array) -> jax.Array:
        """Returns float32 logits `[B, K, padded_vocab]` at int32 `[B, K]` positions."""
        hidden = self.encoder(batch, positions=positions)
        if getattr(self.config, "has_query_stream", False) and not self.config.causal:
            hidden = hidden.query  # The batch has `ranks`.
        return self.mlm(hidden, self.encoder.embeddings.token_embedding)

    def log_probabilities(self, batch: dict[str, jax.Array]) -> jax.Array:
        """Returns the log probability of one token of each sequence, float32 `[B, S]`, in nats.

        The batch has `labels`, int32 `[B, L]`: the token where it is predicted, and NO_LABEL
        elsewhere. Unused slots have values without a meaning.
        """
        labels, num_sequences = batch["labels"], batch["sequence_bounds"].shape[1]
        positions = jnp.argsort(labels == NO_LABEL, axis=1, stable=True)[:, :num_sequences]
        targets = jnp.take_along_axis(labels, positions, axis=1)
        loss, _ = cross_entropy(self.predict_tokens(batch, positions), targets)
        return -loss


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
    main_loss: ClassVar[str] = "mlm_loss"
    main_accuracy: ClassVar[str] = "mlm_accuracy"
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

    def make_model(self, model_config, plan: ExecutionPlan) -> PretrainingModel:
        """Builds the model, with a head for pairs if the objective has them."""
        return PretrainingModel(model_config, self.next_sentence, plan)

    def prepare(self, rows: Batch, key: jax.Array) -> Batch:
        """Unpacks and masks rows. Masks are a function of (key, row, epoch)."""
        batch = unpack_rows(rows)
        keys = row_keys(key, rows["row_ids"], rows["epochs"], self.masking.repeat_after)
        return batch | mask_tokens(keys, batch["tokens"], batch["sequence_ids"], self.masking)

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the numbers of targets, at least 1."""
        return target_counts(batch, "mlm", self.next_sentence)

    def total_loss(self, losses: dict[str, jax.Array | float]) -> jax.Array | float:
        """Returns the sum of the mean losses of tokens and of pairs."""
        if not self.next_sentence:
            return losses["mlm_loss"]
        return losses["mlm_loss"] + losses["nsp_loss"]

    def sums(
        self,
        model: PretrainingModel,
        params: dict,
        batch: Batch,
        dropout: Dropout | None = None,
    ) -> Sums:
        """Returns the loss and accuracy of each head over a batch, as sums and counts."""
        return target_sums(model, params, batch, dropout, "mlm")

    def flops_per_row(self, model_config, length: int, max_sequences: int) -> float:
        """Returns the FLOPs of a training step for one row."""
        num_targets = self.masking.max_predictions
        return flops_per_row(model_config, length, num_targets, max_sequences, self.next_sentence)


def target_counts(batch: Batch, name: str, next_sentence: bool) -> dict[str, jax.Array]:
    """Returns the number of target tokens, and of pairs with `next_sentence`; at least 1."""
    counts = {f"{name}_loss": jnp.maximum(jnp.sum(batch["target_weights"]), 1)}
    if next_sentence:
        counts["nsp_loss"] = jnp.maximum(jnp.sum(batch["nsp_weights"]), 1)
    return counts


def target_sums(
    model: PretrainingModel, params: dict, batch: Batch, dropout: Dropout | None, name: str
) -> Sums:
    """Returns the sums of the head for tokens, called `name`, and of any head for pairs ("nsp")."""
    token_logits, pair_logits = model.apply({"params": params}, batch, dropout)
    sums = loss_sums(name, token_logits, batch["targets"], batch["target_weights"])
    if pair_logits is not None:
        sums |= loss_sums("nsp", pair_logits, batch["nsp_labels"], batch["nsp_weights"])
    return sums


def loss_sums(name: str, logits: jax.Array, targets: jax.Array, weights: jax.Array) -> Sums:
    """Returns the cross-entropy, in nats, and the accuracy of predictions, as sums and counts."""
    losses, correct = cross_entropy(logits, targets)
    count = jnp.sum(weights)
    return {
        f"{name}_loss": (jnp.sum(losses * weights), count),
        f"{name}_accuracy": (jnp.sum(correct * weights), count),
    }


def flops_per_row(
    model_config, length: int, num_targets: int, max_sequences: int, next_sentence: bool
) -> float:
    """Returns the FLOPs of the matrix products of one training step for one row.

    Three passes (forward, gradients of inputs, gradients of weights) with attention over the whole
    row. What follows attention in the last layer is counted where it is computed.
    """
    num_pairs = max_sequences * next_sentence
    num_outputs = num_targets + num_pairs
    forward = architecture_of(model_config).flops_per_row(
        model_config,
        length,
        num_outputs=num_outputs if is_few(num_outputs, length) else length,
        num_targets=num_targets,
        num_pairs=num_pairs,
    )
    return 3 * forward


Objective = MaskedLm
