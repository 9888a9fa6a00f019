"""An encoder with the head of a task: one output per sequence or per position, or a vector.

Each takes a batch: packed rows with what `unpack_rows` adds to them. The parameters are "encoder",
"head" (a dense layer), "projection_N" of a vector and, in `lstm_models.py`, "lstm".
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from absl import logging

from bert_jax.data.features import HIDDEN, NO_VECTOR
from bert_jax.losses.similarity import unit_vectors
from bert_jax.model.architecture import architecture_of
from bert_jax.model.config import pools_last
from bert_jax.model.dropout import Dropout, as_dropout, dropout_at
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.pooling import pool_tokens


class PooledModel(nn.Module):
    """Encoder, pooler, and a dense layer: one output for each sequence.

    Attributes:
      num_outputs: number of classes; 1 for a value or the score of a choice.
      is_classifier: whether it classifies sequences: in some families dropout then also precedes
        the pooler (`BertConfig.has_pooler_input_dropout`).
      target_mean, target_std: mean and standard deviation of the labels that a regression was
        trained on. The dense layer computes standardized values; the outputs are scaled back.
      plan: how the encoder runs.
    """

    config: object
    num_outputs: int
    is_classifier: bool = False
    target_mean: float = 0.0
    target_std: float = 1.0
    plan: ExecutionPlan = ExecutionPlan()

    def setup(self):
        self.encoder = Encoder(self.config, self.plan)
        self.head = dense_head(self.config, self.num_outputs)

    def __call__(
        self, batch: dict[str, jax.Array], dropout: Dropout | float | None = None
    ) -> jax.Array:
        """Returns float32 `[B, S, outputs]`; `dropout` is as in `Encoder`."""
        dropout = as_dropout(self, dropout, len(batch["tokens"]))
        if getattr(self.config, "classifier_pooling", "cls") == "mean":
            x = pool_tokens(self.encoder(batch, dropout), batch["sequence_bounds"], ("mean",))
        else:
            x = self.encoder(batch, dropout, positions=batch["pooled_positions"])
        return pooled_outputs(self, x, dropout)


class PositionModel(nn.Module):
    """Encoder, and a dense layer: an output for each position.

    Attributes:
      num_outputs: number of tags; 2 for a span.
      has_dropout: whether the input of the dense layer has dropout, as in the released code.
      plan: how the encoder runs.
    """

    config: object
    num_outputs: int
    has_dropout: bool = True
    plan: ExecutionPlan = ExecutionPlan()

    def setup(self):
        self.encoder = Encoder(self.config, self.plan)
        self.head = dense_head(self.config, self.num_outputs)

    def __call__(
        self, batch: dict[str, jax.Array], dropout: Dropout | float | None = None
    ) -> jax.Array:
        """Returns float32 `[B, L, outputs]`; `dropout` is as in `Encoder`."""
        dropout = as_dropout(self, dropout, len(batch["tokens"]))
        return position_outputs(self, self.encoder(batch, dropout), dropout)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "identity": lambda x: x,
    "tanh": jnp.tanh,
    "relu": nn.relu,
    "gelu": functools.partial(nn.gelu, approximate=False),
    "sigmoid": nn.sigmoid,
    "silu": nn.silu,
}
"""Activations of a `Projection`."""


class Projection(NamedTuple):
    """A dense layer of `size` outputs, and an activation; "Dense" in sentence-transformers."""

    size: int
    has_bias: bool
    activation: str


class VectorModel(nn.Module):
    """Encoder, pooling and any dense layers: a vector for each sequence.

    Attributes:
      pooling: some of `POOLINGS`, whose vectors are joined, or "pooler" alone.
      projections: dense layers of the pooled vector, from sentence-transformers.
      normalize: whether vectors have length 1, so that dot products are cosines.
      truncate_dim: number of the first dimensions to keep, before normalization; None: all.
      plan: how the encoder runs.
    """

    config: object
    pooling: tuple[str, ...] = ("mean",)
    projections: tuple[Projection, ...] = ()
    normalize: bool = True
    truncate_dim: int | None = None
    plan: ExecutionPlan = ExecutionPlan()

    @property
    def vector_size(self) -> int:
        """The size of a vector."""
        size = len(self.pooling) * self.config.hidden_size
        if self.projections:
            size = self.projections[-1].size
        return min(size, self.truncate_dim or size)

    def setup(self):
        if pools_last(self.config) and "cls" in self.pooling:
            reason = "the first token of a left-to-right model sees no other token"
            if not self.config.causal:
                reason = "the first token of this model is not [CLS], which is the last"
            raise ValueError(f"pooling is 'cls', but {reason}: choose 'mean' or 'lasttoken'")
        self.encoder = Encoder(self.config, self.plan)
        self.projection_layers = projection_layers(self.config, self.projections)

    def __call__(
        self, batch: dict[str, jax.Array], dropout: Dropout | float | None = None
    ) -> jax.Array:
        """Returns float32 `[B, S, vector_size]`, 0 in unused slots unless a layer has a bias.

        `dropout` is as in `Encoder`.
        """
        dropout = as_dropout(self, dropout, len(batch["tokens"]))
        if self.pooling == ("pooler",):
            x = self.encoder(batch, dropout, positions=batch["pooled_positions"])
            vectors = self.encoder.pool(x)
        else:
            x = self.encoder(batch, dropout)
            vectors = pool_tokens(x, batch["sequence_bounds"], self.pooling)
        vectors = project(self, vectors)[..., : self.vector_size]
        squares = jnp.sum(vectors**2, axis=-1, keepdims=True)
        return vectors * jax.lax.rsqrt(squares + 1e-12) if self.normalize else vectors


HIDING_ARCHITECTURES = ("bert", "modernbert", "mpnet")
"""Those whose attention reads `is_hidden`; in transformers, hidden tokens of others change more."""


class MultiVectorModel(nn.Module):
    """Encoder and dense layers: a vector for each token, for late interaction.

    ColBERT (Khattab and Zaharia, 2020, sections 3.2 and 3.3), as MultiVectorEncoder of
    sentence-transformers computes it: [CLS], [SEP] and masks after a query have vectors, too.

    Attributes:
      projections: dense layers of each token.
      normalize: whether vectors have length 1.
      hides_tokens: whether no token attends to those of the kind HIDDEN.
      plan: how the encoder runs.
    """

    config: object
    projections: tuple[Projection, ...]
    normalize: bool = True
    hides_tokens: bool = False
    plan: ExecutionPlan = ExecutionPlan()

    @property
    def vector_size(self) -> int:
        """The size of a vector."""
        return self.projections[-1].size if self.projections else self.config.hidden_size

    def setup(self):
        self.encoder = Encoder(self.config, self.plan)
        self.projection_layers = projection_layers(self.config, self.projections)

    def __call__(
        self, batch: dict[str, jax.Array], dropout: Dropout | float | None = None
    ) -> jax.Array:
        """Returns float32 `[B, L, vector_size]`, 0 for padding and tokens of the kind NO_VECTOR.

        `batch` may have int32 `[B, L]` `token_kinds`; `dropout` is as in `Encoder`.
        """
        dropout = as_dropout(self, dropout, len(batch["tokens"]))
        has_vector = batch["sequence_ids"] > 0
        if "token_kinds" in batch:
            has_vector &= batch["token_kinds"] != NO_VECTOR
            if self.hides_tokens:
                batch = batch | {"is_hidden": batch["token_kinds"] == HIDDEN}
        vectors = project(self, self.encoder(batch, dropout).astype(jnp.float32))
        vectors = unit_vectors(vectors) if self.normalize else vectors
        return jnp.where(has_vector[..., None], vectors, 0.0)


def projection_layers(config, projections: Sequence[Projection]) -> list[nn.Dense]:
    """Returns the dense layers of vectors, initialized as the encoder is."""
    initializer = nn.initializers.truncated_normal(config.initializer_range)
    return [
        nn.Dense(
            each.size,
            each.has_bias,
            dtype=jnp.float32,
            kernel_init=initializer,
            name=f"projection_{index}",
        )
        for index, each in enumerate(projections)
    ]


def project(model, vectors: jax.Array) -> jax.Array:
    """Applies the `projections` of a model to vectors `[..., size]`."""
    for layer, each in zip(model.projection_layers, model.projections, strict=True):
        vectors = ACTIVATIONS[each.activation](layer(vectors))
    return vectors


class SparseModel(nn.Module):
    """Encoder and masked-LM head: a weight of each token of the vocabulary, for each sequence.

    SPLADE (Formal et al., 2021, "SPLADE v2", section 3): log(1 + relu(logits)), maximum over the
    tokens of the sequence. The parameters are "encoder" and "mlm", those of pre-training.

    Attributes:
      pooling: "max", or "sum" over the tokens, as in the first SPLADE.
      activation: "relu", or "log1p_relu", which takes the logarithm twice (Geng et al., 2025).
      top_k: keeps the K largest weights of a sequence, of equal ones the first; None: all.
      plan: how the encoder runs.
    """

    config: object
    pooling: str = "max"
    activation: str = "relu"
    top_k: int | None = None
    plan: ExecutionPlan = ExecutionPlan()

    def setup(self):
        self.encoder = Encoder(self.config, self.plan)
        self.mlm = architecture_of(self.config).LmHead(self.config)

    def __call__(
        self, batch: dict[str, jax.Array], dropout: Dropout | float | None = None
    ) -> jax.Array:
        """Returns float32 `[B, S, vocab_size]`, 0 in unused slots; `dropout` is as in `Encoder`."""
        dropout = as_dropout(self, dropout, len(batch["tokens"]))
        hidden = self.encoder(batch, dropout)
        logits = self.mlm(hidden, self.encoder.embeddings.token_embedding)
        bounds = batch["sequence_bounds"]
        if self.pooling == "max":  # The maximum first: it commutes with an increasing function.
            weights = self._activate(pool_tokens(logits, bounds, ("max",)))
        else:
            lengths = bounds[..., 2:] - bounds[..., :1]
            weights = pool_tokens(self._activate(logits), bounds, ("mean",)) * lengths
        weights = weights[..., : self.config.vocab_size]
        if self.top_k is None:
            return weights
        largest, places = jax.lax.top_k(weights, min(self.top_k, weights.shape[-1]))
        zeros = jnp.zeros_like(weights)
        return jnp.put_along_axis(zeros, places, largest, axis=-1, inplace=False)

    def _activate(self, logits: jax.Array) -> jax.Array:
        weights = jnp.log1p(nn.relu(logits))
        return jnp.log1p(weights) if self.activation == "log1p_relu" else weights


def sparse_model(config, num_outputs: int = 0, **options) -> SparseModel:
    """Builds a `SparseModel` from settings; there are no labels, and so `num_outputs` is 0."""
    return SparseModel(config, **options)


def vector_model(
    config,
    num_outputs: int = 0,
    pooling: str | Sequence[str] = "mean",
    projections: Sequence[Mapping] = (),
    **options,
) -> VectorModel:
    """Builds a `VectorModel` from settings as JSON has them.

    There are no labels, and so `num_outputs` is 0; the size of a vector follows from the layers.
    """
    poolings = (pooling,) if isinstance(pooling, str) else tuple(pooling)
    layers = tuple(Projection(**each) for each in projections)
    return VectorModel(config, poolings, layers, **options)


def multi_vector_model(
    config,
    num_outputs: int = 0,
    projections: Sequence[Mapping] = (),
    query_expansion: Mapping | None = None,
    plan: ExecutionPlan = ExecutionPlan(),
    **options,
) -> MultiVectorModel:
    """Builds a `MultiVectorModel` from settings as JSON has them; `num_outputs` is 0.

    Raises ValueError for a model whose masks after a query should be hidden, but cannot be.
    """
    layers = tuple(Projection(**each) for each in projections)
    hides_tokens = bool(query_expansion) and not query_expansion["attend"]
    if hides_tokens:
        if config.architecture not in HIDING_ARCHITECTURES:
            raise ValueError(
                f"query_expansion hides the masks after a query from other tokens, which "
                f"{config.architecture} cannot: expected attend=True, or one of "
                f"{', '.join(HIDING_ARCHITECTURES)}"
            )
        if plan.uses_kernels:
            fix = "similarity.query_expansion=attended keeps them"
            logging.warning("Layers run without TPU kernels, which have no hidden tokens: %s", fix)
        plan = dataclasses.replace(plan, uses_kernels=False)
    return MultiVectorModel(config, layers, hides_tokens=hides_tokens, plan=plan, **options)


def dense_head(config, num_outputs: int) -> nn.Dense:
    """Returns the last layer: float32, initialized as the encoder is."""
    initializer = nn.initializers.truncated_normal(config.initializer_range)
    return nn.Dense(num_outputs, dtype=jnp.float32, kernel_init=initializer)


def pooled_outputs(model, x: jax.Array, dropout: Dropout | None) -> jax.Array:
    """Returns the outputs of a `PooledModel` from the hidden states `[B, S, H]` that it pools."""
    dropout = head_dropout(model.config, dropout)
    if model.is_classifier and getattr(model.config, "has_pooler_input_dropout", False):
        x = dropout_at(dropout, "pooler", x)
    outputs = model.head(dropout_at(dropout, "head", model.encoder.pool(x)))
    if (model.target_mean, model.target_std) != (0.0, 1.0):
        outputs = outputs * model.target_std + model.target_mean
    return outputs


def position_outputs(model, x: jax.Array, dropout: Dropout | None) -> jax.Array:
    """Returns the outputs of a `PositionModel` from the hidden states `[B, L, H]`."""
    if getattr(model.config, "pools_positions", False):
        x = model.encoder.pool(x)
    if model.has_dropout:
        x = dropout_at(head_dropout(model.config, dropout), "head", x)
    return model.head(x)


def head_dropout(config, dropout: Dropout | None) -> Dropout | None:
    """Returns the dropout around the head, which in some families has a rate of its own."""
    rate = getattr(config, "classifier_dropout_rate", None)
    return dropout if dropout is None or rate is None else dropout._replace(rate=rate)
