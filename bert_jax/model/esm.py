"""ESM-1b (Rives et al., 2021) and ESM-2 (Lin et al., 2023), for proteins: every part of the model.

    tokens -> Embeddings -> EncoderLayer, num_layers times -> Last -> hidden states
        hidden states at the positions to predict -> MaskedLmHead -> logits over the vocabulary

A token is an amino acid. What differs from `model/bert.py`: LayerNorm precedes each sublayer, and
follows the last one; positions rotate queries and keys (ESM-2), or have a table (ESM-1b); there are
no segments; and the embedding of the mask is zeroed ("token dropout"). The head that predicts
contacts from attention maps is not implemented. In shapes, B is the number of rows of a batch, L
the length of a row, H the hidden size, D the size of a head.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from bert_jax.model import bert, mpnet
from bert_jax.model.attention import attention, scaled_scores
from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.config import (
    SIZE_FIELDS,
    check_choices,
    check_positive,
    check_ranges,
    pad_to_tiles,
    published_size,
)
from bert_jax.model.dropout import HiddenDropout, LayerDropout, add_with_dropout
from bert_jax.model.layers import (
    Dense,
    Embedding,
    LayerNorm,
    RowParallelDense,
    TokenEmbedding,
    activate,
)
from bert_jax.model.modernbert import Rotation, rotate
from bert_jax.sharding.rules import EMBEDDING_SPEC

# Layers, hidden size, heads and intermediate size of the released models.
SIZES = {
    "8m": (6, 320, 20, 1280),
    "35m": (12, 480, 20, 1920),
    "150m": (30, 640, 20, 2560),
    "650m": (33, 1280, 20, 5120),
    "3b": (36, 2560, 40, 10240),
    "15b": (48, 5120, 40, 20480),
    "esm-1b": (33, 1280, 20, 5120),
}
ESM_1B = {"positions": "learned", "normalizes_embeddings": True}
SEEN_IN_TRAINING = 1 - 0.15 * 0.8
"""Share of unmasked tokens in the training of all models: of 15 %, 80 % are."""


@dataclasses.dataclass(frozen=True)
class EsmConfig:
    """The model config of ESM; hashable, so it can be static under jit.

    The defaults are ESM-2 of 8 M parameters. Raises ValueError for sizes below 1, heads that do not
    divide the hidden size (with rotations, into even parts), unknown names, a mask that is no
    token, and rates outside of [0, 1).
    """

    vocab_size: int = 33
    hidden_size: int = 320
    num_layers: int = 6
    num_heads: int = 20
    intermediate_size: int = 1280
    max_position_embeddings: int = 1024
    """The length up to which the model was trained; with learned positions, of their table."""
    positions: str = "rotary"
    """Positions rotate queries and keys ("rotary"), or have a table of vectors ("learned")."""
    rope_base: float = 10_000.0
    normalizes_embeddings: bool = False
    """Whether LayerNorm follows the embeddings."""
    token_dropout: bool = True
    """Embeddings of masks are zeroed, and others scaled by the share of masks in their sequence."""
    mask_id: int = 32
    """The token that `token_dropout` takes for a mask."""
    dropout_rate: float = 0.0
    """In training, the dropout of sublayers and, by default, of attention."""
    attention_dropout_rate: float | None = None
    """In training, the dropout of attention probabilities; None means `dropout_rate`."""
    classifier_dropout_rate: float | None = None
    """In training, the dropout before the dense layers of a task; None means `dropout_rate`."""
    causal: bool = False
    """Each position attends only to itself and earlier ones of its sequence (left to right)."""
    initializer_range: float = 0.02
    layer_norm_epsilon: float = 1e-5

    architecture: ClassVar[str] = "esm"
    """The file in `bert_jax/model` that defines the model; see `model/architecture.py`."""
    position_offset: ClassVar[int] = 2
    """Rows of a table of positions before that of the first token; padding has the id before it."""
    embedding_dropout_rate: ClassVar[float] = 0.0
    activation: ClassVar[str] = "gelu"
    """Of feed-forward layers, and of heads that follow them."""
    embedding_size: ClassVar[None] = None  # What `bert.flops_per_row` reads beside.
    pooler_activation: ClassVar[str] = "tanh"
    has_pooler_input_dropout: ClassVar[bool] = True
    """A classifier has dropout before its pooler, too, and not only after it."""
    size_fields: ClassVar[tuple[str, ...]] = SIZE_FIELDS
    """Fields that a published size sets."""
    fixed_fields: ClassVar[tuple[str, ...]] = (
        *size_fields,
        "max_position_embeddings",
        "positions",
        "rope_base",
        "normalizes_embeddings",
        "token_dropout",
        "mask_id",
        "layer_norm_epsilon",
    )
    """Fields that are known from a model's weights, and cannot be chosen anew."""

    def __post_init__(self):
        check_ranges(self)
        check_choices(self, positions=("rotary", "learned"))
        parts = self.num_heads * (2 if self.positions == "rotary" else 1)
        if self.hidden_size % parts:
            reason = ": positions rotate pairs of a head's elements" * (parts > self.num_heads)
            raise ValueError(
                f"EsmConfig.hidden_size ({self.hidden_size}) must be a multiple of {parts}, for "
                f"{self.num_heads} heads (num_heads){reason}"
            )
        if self.token_dropout and not 0 <= self.mask_id < self.vocab_size:
            raise ValueError(
                f"EsmConfig.mask_id is {self.mask_id}: expected one of the {self.vocab_size} ids "
                "(vocab_size), that of the mask, or token_dropout=False"
            )
        check_positive(self, ("rope_base",))

    @classmethod
    def named(cls, size: str, **overrides) -> "EsmConfig":
        """Returns a published size, one of `SIZES`, with `overrides`."""
        fields = published_size(SIZES, size)
        if size == "esm-1b":
            fields |= ESM_1B
        return cls(**(fields | overrides))

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary size rounded up to whole tiles of 128: the rows of the embedding."""
        return pad_to_tiles(self.vocab_size)


class Embeddings(nn.Module):
    """The vectors of tokens, scaled by how many are masks, with any of positions, and LayerNorm."""

    config: EsmConfig
    dtype: str = "float32"  # Of the result: each later layer computes in the dtype of its input.

    def setup(self):
        config = self.config
        size, initial = config.hidden_size, config.initializer_range
        self.token_embedding = TokenEmbedding(config.vocab_size, size, initial, dtype=self.dtype)
        if config.positions == "learned":
            num_positions = config.position_offset + config.max_position_embeddings
            self.position_embedding = Embedding(num_positions, size, initial)
        if config.normalizes_embeddings:
            self.layer_norm = LayerNorm(config.layer_norm_epsilon, self.dtype)

    def __call__(
        self,
        tokens: jax.Array,  # int32 [B, L]
        segment_ids: jax.Array,  # Not used: there are no segments.
        position_ids: jax.Array,  # int32 [B, L]: 0, 1, ... in each sequence
        dropout: HiddenDropout | None = None,  # Not used: embeddings have none.
    ) -> jax.Array:
        """Returns hidden states `[B, L, H]`."""
        config, x = self.config, self.token_embedding(tokens)
        if config.token_dropout:
            is_mask = tokens == config.mask_id
            scale = SEEN_IN_TRAINING / share_of_others(is_mask, position_ids)
            x *= jnp.where(is_mask, 0.0, scale)[..., None]
        if config.positions == "learned":
            x += self.position_embedding(config.position_offset + position_ids)
        return self.layer_norm(x) if config.normalizes_embeddings else x.astype(self.dtype)


def share_of_others(is_mask: jax.Array, position_ids: jax.Array) -> jax.Array:
    """Returns float32 `[B, L]`: which share of the tokens of each sequence is not masked.

    `is_mask` is bool, `position_ids` int32 `[B, L]`, 0 where a sequence begins and on padding,
    so that each padding position counts as its own sequence. At least one token counts as
    unmasked.
    """
    length = position_ids.shape[1]
    places = jnp.arange(length)
    # The first sequence to begin at a place or after it.
    next_starts = lax.cummin(jnp.where(position_ids == 0, places, length), axis=1, reverse=True)
    starts = places - position_ids
    ends = jnp.pad(next_starts[:, 1:], ((0, 0), (0, 1)), constant_values=length)
    num_before = jnp.pad(jnp.cumsum(~is_mask, axis=1), ((0, 0), (1, 0)))
    before_end, before_start = (
        jnp.take_along_axis(num_before, each, axis=1) for each in (ends, starts)
    )
    return jnp.maximum(before_end - before_start, 1) / (ends - starts)


class SharedInputs(NamedTuple):
    """What all layers read beside the hidden states."""

    mask: AttentionMask
    rotation: Rotation | None  # None with learned positions.


class LayerInputs(nn.Module):
    """Builds `SharedInputs` from a batch; holds the frequencies of rotations."""

    config: EsmConfig

    def setup(self):
        if self.config.positions == "rotary":
            self.frequencies = Frequencies(self.config)

    def __call__(self, batch: dict[str, jax.Array]) -> SharedInputs:
        mask = AttentionMask(batch["sequence_ids"], self.config.causal)
        if self.config.positions == "learned":
            return SharedInputs(mask, None)
        angles = batch["position_ids"][..., None].astype(jnp.float32) * self.frequencies()
        return SharedInputs(mask, Rotation(jnp.cos(angles), jnp.sin(angles)))


class Frequencies(nn.Module):
    """The frequencies of rotations, float32 `[D / 2]`: a constant that is stored with the model.

    Released models were trained with the rounded values that their files have. The name of the
    parameter exempts it from weight decay.
    """

    config: EsmConfig

    @nn.compact
    def __call__(self) -> jax.Array:
        config = self.config
        size = config.hidden_size // config.num_heads

        def initial(_):
            return 1.0 / config.rope_base ** (jnp.arange(0, size, 2, dtype=jnp.float32) / size)

        return lax.stop_gradient(self.param("scale", initial))


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network: each reads LayerNorm of the sum so far.

    `attend` needs all positions of a sequence; `finish` treats each position on its own.
    """

    config: EsmConfig

    # Where it drops elements, and the rate of each place: one of `Dropout`.
    dropout_places: ClassVar[Mapping[str, str]] = {
        "attention": "attention_rate",
        "attention_output": "rate",
        "output": "rate",
    }

    def setup(self):
        config = self.config
        size, initial = config.hidden_size, config.initializer_range
        self.attention_norm = LayerNorm(config.layer_norm_epsilon)
        self.query = Dense(size, initial)
        self.key = Dense(size, initial)
        self.value = Dense(size, initial)
        # A dense layer that is sharded over `tensor` along its inputs.
        self.attention_output = RowParallelDense(size, initial)
        self.feed_forward_norm = LayerNorm(config.layer_norm_epsilon)
        self.intermediate = Dense(config.intermediate_size, initial)
        self.output = RowParallelDense(size, initial)

    def __call__(self, x: jax.Array, inputs: SharedInputs, dropout: LayerDropout) -> jax.Array:
        """Maps hidden states `[B, L, H]` to those after this layer."""
        return self.finish(x, self.attend(x, inputs, dropout), dropout)

    def attend(self, x: jax.Array, inputs: SharedInputs, dropout: LayerDropout) -> jax.Array:
        """Returns the weighted values of all heads, joined, `[B, L, H]`."""
        query, key, value = self._projections(x, inputs)
        return attention(
            query,
            key,
            value,
            inputs.mask,
            num_heads=self.config.num_heads,
            dropout=dropout.get("attention"),
        )

    def finish(self, x: jax.Array, context: jax.Array, dropout: LayerDropout) -> jax.Array:
        """Returns the layer's output for its input `x` and `context`, the result of `attend`."""
        y = self.attention_output(context)  # [B, L, H]
        x = add_with_dropout(x, y, dropout.get("attention_output"))
        y = activate("gelu", self.intermediate(self.feed_forward_norm(x)))
        return add_with_dropout(x, self.output(y), dropout.get("output"))

    def scores(self, x: jax.Array, inputs: SharedInputs) -> tuple[jax.Array, AttentionMask]:
        """Returns attention scores, float32 `[B, heads, L, L]`, and the mask of their softmax."""
        query, key, _ = self._projections(x, inputs)
        return scaled_scores(query, key, self.config.num_heads), inputs.mask

    def _projections(self, x, inputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        x = self.attention_norm(x)
        query, key = self.query(x), self.key(x)
        if inputs.rotation is not None:
            query, key = (rotate(y, inputs.rotation, self.config.num_heads) for y in (query, key))
        return query, key, self.value(x)


def encoder_layers(config: EsmConfig) -> tuple[EncoderLayer, ...]:
    """Returns the layers in their order: all are alike."""
    return (EncoderLayer(config, parent=None),) * config.num_layers


class Last(nn.Module):
    """LayerNorm after the last layer."""

    config: EsmConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return LayerNorm(self.config.layer_norm_epsilon, name="layer_norm")(x)


# What follows is the same for each architecture's file; see model/architecture.py.
Config = EsmConfig
LmHead = mpnet.MaskedLmHead  # The dense layer, GELU and LayerNorm of RoBERTa.
Pooler, PairHead = bert.Pooler, bert.PairHead

# Which axes of the mesh shard a parameter: the first regular expression that is found in its path
# decides. "mlm" is MaskedLmHead, "nsp" PairHead, and "layers" all encoder layers, stacked on axis
# 0.
RULES = (
    (r"token_embedding/embedding$", EMBEDDING_SPEC),
    (r"position_embedding/embedding$", P()),
    (r"layers/(query|key|value|intermediate)/kernel$", P(None, "fsdp", "tensor")),
    (r"layers/(query|key|value|intermediate)/bias$", P(None, "tensor")),
    (r"layers/(attention_output|output)/kernel$", P(None, "tensor", "fsdp")),
    (r"(pooler/dense|mlm/transform)/kernel$", P("fsdp", "tensor")),
    (r"mlm/bias$", P("tensor")),
    (r"(bias|scale|nsp/dense/kernel)$", P()),
)

flops_per_row = bert.flops_per_row  # As in BERT, no layer has more products.
