"""BERT with the head of a task, and the loss that trains it (Devlin et al., 2018, section 4).

Each head is one dense layer, `head` in the parameter tree; "embedding" has none, and gives a vector
for each sequence. Rows may hold several sequences; what a head gives and its loss are per sequence,
so that packing changes no result.
"""

import dataclasses
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.data.features import NO_LABEL
from bert_jax.data.unpacking import unpack_rows
from bert_jax.model.bert import Bert
from bert_jax.model.config import BertConfig
from bert_jax.model.dropout import dropout
from bert_jax.model.feature_based import FeatureBasedTagger
from bert_jax.training.pretrain_step import cross_entropy

KINDS = ("classification", "regression", "tagging", "span", "multiple_choice", "embedding")
POOLED = ("classification", "regression", "multiple_choice")
"""Kinds that read the pooled [CLS]; the others read every position."""
PER_SEQUENCE = (*POOLED, "embedding")
"""Kinds that give something for each sequence; the others give it for each position."""


@dataclasses.dataclass(frozen=True)
class Similarity:
    """How vectors of "embedding" are made and compared.

    Attributes:
      pooling: "mean" of the last layer over the tokens of a sequence, or "cls".
      normalize: to length 1, so that the dot product of two is their cosine.
      temperature: in training, what the dot products are divided by before the softmax.
    """

    pooling: str = "mean"
    normalize: bool = True
    temperature: float = 0.05

    def __post_init__(self):
        if self.pooling not in ("mean", "cls"):
            raise ValueError(f"pooling is {self.pooling!r}: expected 'mean' or 'cls'")
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}: expected more than 0")


class BertForTask(nn.Module):
    """Encoder and head.

    `num_outputs`: classes, tags, 2 for a span, 1 for a value or a choice, 0 for an embedding, which
    `similarity` describes.
    """

    config: BertConfig
    kind: str
    num_outputs: int
    similarity: Similarity = Similarity()

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
          each sequence), tagging and span `[B, L, outputs]`, embedding `[B, P, H]` (0 where a slot
          is free).
        """
        batch = unpack_rows(rows)
        x = self.bert(
            batch["tokens"],
            batch["segment_ids"],
            batch["position_ids"],
            batch["sequence_ids"],
            dropout_rows=dropout_rows,
        )
        if self.kind == "embedding":
            return self.embed(x, rows["pairs"])
        if self.kind in POOLED:
            x = self.bert.pool(x, batch["cls_positions"])
        if dropout_rows is not None and self.kind != "span":  # As released.
            x = dropout(self.make_rng("dropout"), x, self.config.dropout_rate, dropout_rows)
        return self.head(x)

    def embed(self, x: jax.Array, pairs: jax.Array) -> jax.Array:
        """`[B, L, H]` of any float dtype -> a float32 vector for each sequence, `[B, P, H]`."""
        position = jnp.arange(x.shape[1])
        start, _, end = jnp.moveaxis(pairs[..., None], -2, 0)
        if self.similarity.pooling == "cls":
            end = jnp.minimum(end, start + 1)
        chosen = ((position >= start) & (position < end)).astype(x.dtype)  # [B, P, L]
        vectors = jnp.einsum("bpl,blh->bph", chosen, x, preferred_element_type=jnp.float32)
        if self.similarity.normalize:
            return vectors * jax.lax.rsqrt(jnp.sum(vectors**2, -1, keepdims=True) + 1e-12)
        return vectors / jnp.maximum(end - start, 1)


def make_model(config: BertConfig, head: Mapping) -> BertForTask | FeatureBasedTagger:
    """The model with the `head` that settings of a checkpoint describe, by "task" and "labels"."""
    outputs = len(head["labels"])
    if head["task"] == "feature_based":
        return FeatureBasedTagger(config, outputs, head["features"], head["lstm_size"])
    if head["task"] == "embedding":
        fields = [field.name for field in dataclasses.fields(Similarity)]
        similarity = Similarity(**{name: head[name] for name in fields})
        return BertForTask(config, head["task"], outputs, similarity)
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

    All kinds but "embedding", whose loss is of a whole batch: see `in_batch_loss`.

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


def in_batch_loss(
    vectors: jax.Array, passages: jax.Array, weights: jax.Array, temperature: float
) -> jax.Array:
    """Sum over all queries of -log softmax(similarities)[own passage], in nats (float32 scalar).

    The softmax is over the passages of all examples (Karpukhin et al., 2020, section 3.2), but
    without copies of the query's own passage, which questions about one paragraph bring.

    Args:
      vectors: float32 `[examples, 1 + n, H]`: a query, its passage, and n - 1 hard negatives.
      passages: int32 `[examples, n]`, a number for each text: the same for the same.
      weights: float32 `[examples]`, 0 for those that are not there.
    """
    queries, candidates = vectors[:, 0], vectors[:, 1:].reshape(-1, vectors.shape[-1])
    count = passages.shape[1]
    scores = queries @ candidates.T / temperature
    own = jnp.arange(len(queries)) * count
    is_own = jnp.arange(len(candidates)) == own[:, None]
    is_copy = (passages.reshape(-1) == passages[:, :1]) & ~is_own
    excluded = is_copy | (jnp.repeat(weights, count) == 0)
    scores = jnp.where(excluded & ~is_own, jnp.finfo(jnp.float32).min, scores)
    return jnp.sum(cross_entropy(scores, own)[0] * weights)
