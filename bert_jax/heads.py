"""BERT with the head of a task, and the loss that trains it (Devlin et al., 2018, section 4).

Each head is one dense layer, `head` in the parameter tree. Rows may hold several sequences; what a
head gives and its loss are per sequence, so that packing changes no result.
"""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.config import BertConfig
from bert_jax.data.features import NO_LABEL
from bert_jax.data.unpack import unpack_rows
from bert_jax.dropout import dropout
from bert_jax.feature_based import FeatureBasedTagger
from bert_jax.model import Bert
from bert_jax.train import cross_entropy

KINDS = ("classification", "regression", "tagging", "span", "multiple_choice")
POOLED = ("classification", "regression", "multiple_choice")
"""Kinds that read the pooled [CLS]; the others read every position."""


class BertForTask(nn.Module):
    """Encoder and head. `num_outputs`: classes, tags, 2 for a span, 1 for a value or a choice."""

    config: BertConfig
    kind: str
    num_outputs: int

    def setup(self):
        if self.kind not in KINDS:
            raise ValueError(f"unknown head {self.kind!r}: expected one of {', '.join(KINDS)}")
        self.bert = Bert(self.config)
        initializer = nn.initializers.truncated_normal(self.config.initializer_range)
        self.head = nn.Dense(self.num_outputs, dtype=jnp.float32, kernel_init=initializer)

    def __call__(
        self, rows: dict[str, jax.Array], *, dropout_rows: jax.Array | None = None
    ) -> jax.Array:
        """What the head gives, float32.

        Args:
          rows: `tokens` int32 `[B, L]` and `pairs` int32 `[B, P, 3]`, as `unpack_rows` takes them.
          dropout_rows: see `Bert`; None: no dropout.

        Returns:
          classification and regression `[B, P, outputs]`, multiple_choice `[B, P, 1]` (a score for
          each sequence), tagging and span `[B, L, outputs]`.
        """
        batch = unpack_rows(rows)
        x = self.bert(
            batch["tokens"],
            batch["segment_ids"],
            batch["position_ids"],
            batch["sequence_ids"],
            dropout_rows=dropout_rows,
        )
        if self.kind in POOLED:
            x = self.bert.pool(x, batch["cls_positions"])
        if dropout_rows is not None and self.kind != "span":  # As released.
            x = dropout(self.make_rng("dropout"), x, self.config.dropout_rate, dropout_rows)
        return self.head(x)


def make_model(config: BertConfig, head: Mapping) -> BertForTask | FeatureBasedTagger:
    """The model with the `head` that settings of a checkpoint describe, by "task" and "labels"."""
    outputs = len(head["labels"])
    if head["task"] == "feature_based":
        return FeatureBasedTagger(config, outputs, head["features"], head["lstm_size"])
    return BertForTask(config, head["task"], outputs)


def loss_weights(kind: str, rows: dict[str, jax.Array]) -> jax.Array:
    """What each of `losses` weighs, float32: 1 where there is a label, and 0 elsewhere.

    A batch's loss is the mean so weighed: over examples, or for tagging over words, as released.
    """
    if kind == "tagging":
        return (rows["labels"] != NO_LABEL).astype(jnp.float32)
    return rows["weights"]


def losses(kind: str, outputs: jax.Array, rows: dict[str, jax.Array]) -> jax.Array:
    """The loss of each label, float32, in nats; for regression the squared error.

    Args:
      outputs: of `BertForTask`.
      rows: as there, and `labels` as `RowShape.empty` says.
    """
    labels = rows["labels"]
    if kind == "classification":
        return cross_entropy(outputs, labels)[0]
    if kind == "regression":
        return jnp.square(outputs[..., 0] - labels)
    if kind == "tagging":
        return cross_entropy(outputs, jnp.maximum(labels, 0))[0]
    if kind == "multiple_choice":
        scores = outputs[..., 0].reshape(*labels.shape, -1)  # [B, examples, choices]
        return cross_entropy(scores, labels)[0]
    # Span: for each sequence a softmax over its own positions, for the first and for the last.
    position = jnp.arange(outputs.shape[1])[None, None]
    start, _, end = jnp.moveaxis(rows["pairs"], -1, 0)
    inside = (position >= start[..., None]) & (position < end[..., None])  # [B, P, L]
    total = 0.0
    for which in (0, 1):
        logits = jnp.where(inside, outputs[:, None, :, which], jnp.finfo(jnp.float32).min)
        total += cross_entropy(logits, labels[..., which])[0] / 2
    return total
