"""ModernBERT (Warner et al., 2024): every part of the model, in the order of computation.

    tokens -> Embeddings -> EncoderLayer, num_layers times -> Last -> hidden states
        hidden states at the positions to predict -> MaskedLmHead -> logits over the vocabulary

What differs from `model/bert.py`: positions rotate queries and keys (RoPE; Su et al., 2021),
instead of a table of positions; LayerNorm precedes each sublayer, and follows the last one; the
feed-forward layer is gated (GeGLU; Shazeer, 2020); two of three layers are local, in which a
position sees only a window; there are no biases and no segments. In shapes, B is the number of rows
of a batch, L the length of a row, H the hidden size, D the size of a head.
"""

import dataclasses
import itertools
import math
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from bert_jax.model.attention import attention, scaled_scores
from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.config import (
    ACTIVATIONS,
    SIZE_FIELDS,
    check_choices,
    check_positive,
    check_ranges,
    pad_to_tiles,
    published_size,
)
from bert_jax.model.dropout import HiddenDropout, LayerDropout, add_with_dropout, apply_dropout
from bert_jax.model.layers import (
    Dense,
    LayerNorm,
    RowParallelDense,
    TokenEmbedding,
    activate,
)
from bert_jax.sharding.rules import EMBEDDING_SPEC

# Layers, hidden size, heads and intermediate size: ModernBERT's paper, table 4, and the open models
# of Ettin (Weller et al., 2025, table 1).
SIZES = {
    "base": (22, 768, 12, 1152),
    "large": (28, 1024, 16, 2624),
    "ettin-17m": (7, 256, 4, 384),
    "ettin-32m": (10, 384, 6, 576),
    "ettin-68m": (19, 512, 8, 768),
    "ettin-150m": (22, 768, 12, 1152),
    "ettin-400m": (28, 1024, 16, 2624),
    "ettin-1b": (28, 1792, 28, 3840),
}
# In their last phases, all layers of Ettin have the same base; its models allow 7,999 tokens.
ETTIN = {"local_rope_base": 160_000.0, "max_position_embeddings": 7999}


@dataclasses.dataclass(frozen=True)
class ModernBertConfig:
    """The model config of ModernBERT; hashable, so it can be static under jit.

    The defaults are ModernBERT-base. Raises ValueError for sizes below 1, heads that do not divide
    the hidden size into even parts, an odd window, unknown names, and rates outside of [0, 1).
    """

    vocab_size: int = 50368
    hidden_size: int = 768
    num_layers: int = 22
    num_heads: int = 12
    intermediate_size: int = 1152
    max_position_embeddings: int = 8192
    """The length up to which the model was trained; no parameter has this size."""
    attention_pattern: str = "gll"
    """Whether each layer is global (g) or local (l); repeated up to the number of layers."""
    attention_window: int = 128
    """Window of local layers: a position sees half as many tokens on each side, and itself."""
    global_rope_base: float = 160_000.0
    local_rope_base: float = 10_000.0
    activation: str = "gelu"
    """Activation of feed-forward layers, one of `ACTIVATIONS`."""
    pooler_activation: str = "gelu"
    """Activation of the pooler, and of the head for tokens."""
    classifier_pooling: str = "cls"
    """What the pooler reads: the hidden state of [CLS] ("cls"), or the mean of all ("mean")."""
    attention_bias: bool = False
    feed_forward_bias: bool = False
    norm_bias: bool = False
    pooler_bias: bool = False
    decoder_bias: bool = True
    ties_embeddings: bool = True
    """Whether logits over the vocabulary share the table of token embeddings."""
    dropout_rate: float = 0.0
    """Dropout rate within the feed-forward layers, in training, as all rates."""
    embedding_dropout_rate: float | None = None
    """Dropout rate of embeddings; None means `dropout_rate`."""
    attention_dropout_rate: float | None = None
    """Dropout rate of attention's probabilities and of its output; None means `dropout_rate`."""
    attention_output_dropout_rate: float | None = None
    """Dropout rate of attention's output alone, in pre-training; None: `attention_dropout_rate`."""
    classifier_dropout_rate: float | None = None
    """Dropout rate before the last dense layer of a task; None means `dropout_rate`."""
    causal: bool = False
    """Each position attends only to itself and earlier ones of its sequence (left to right)."""
    initializer_range: float = 0.02
    layer_norm_epsilon: float = 1e-5

    architecture: ClassVar[str] = "modernbert"
    """The file in `bert_jax/model` that defines the model; see `model/architecture.py`."""
    size_fields: ClassVar[tuple[str, ...]] = SIZE_FIELDS
    """Fields that a published size sets."""
    fixed_fields: ClassVar[tuple[str, ...]] = (
        *size_fields,
        "max_position_embeddings",
        "attention_pattern",
        "attention_window",
        "global_rope_base",
        "local_rope_base",
        "activation",
        "pooler_activation",
        "classifier_pooling",
        "attention_bias",
        "feed_forward_bias",
        "norm_bias",
        "pooler_bias",
        "decoder_bias",
        "ties_embeddings",
        "layer_norm_epsilon",
    )
    """Fields that are known from a model's weights, and cannot be chosen anew."""
    pretraining_rates: ClassVar[tuple[str, ...]] = ("attention_output_dropout_rate",)
    """Dropout rates that fine-tuning sets to None."""
    pools_positions: ClassVar[bool] = True
    """Heads that predict each position apply the pooler to it, too."""
    pooler_in_lm_head: ClassVar[str] = "transform"
    """The module of the head for tokens whose weights the pooler of a task starts from."""

    def __post_init__(self):
        check_ranges(self)
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"ModernBertConfig.hidden_size ({self.hidden_size}) must be a multiple of twice "
                f"num_heads ({self.num_heads}): positions rotate pairs of a head's elements"
            )
        if self.attention_window < 2 or self.attention_window % 2:
            raise ValueError(
                f"ModernBertConfig.attention_window is {self.attention_window}: expected an even "
                "number, half of which is on each side"
            )
        if not self.attention_pattern or set(self.attention_pattern) - set("gl"):
            raise ValueError(
                f"ModernBertConfig.attention_pattern is {self.attention_pattern!r}: expected "
                "letters g (global) and l (local), such as gll"
            )
        # The same layers have the same pattern, however it is written.
        pattern = repeated_pattern(self.attention_pattern, self.num_layers)
        object.__setattr__(self, "attention_pattern", pattern)
        check_choices(
            self,
            activation=ACTIVATIONS,
            pooler_activation=ACTIVATIONS,
            classifier_pooling=("cls", "mean"),
        )
        check_positive(self, ("global_rope_base", "local_rope_base"))

    @classmethod
    def named(cls, size: str, **overrides) -> "ModernBertConfig":
        """Returns a published size, one of `SIZES`, with `overrides`."""
        fields = published_size(SIZES, size)
        if size.startswith("ettin"):
            fields |= ETTIN
        return cls(**(fields | overrides))

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary size rounded up to whole tiles of 128: the rows of the embedding."""
        return pad_to_tiles(self.vocab_size)

    @property
    def output_range(self) -> float:
        """The initial standard deviation of matrices that write to the residual stream.

        As in Megatron (Shoeybi et al., 2019), so that its variance does not grow with depth.
        """
        return self.initializer_range / math.sqrt(2 * self.num_layers)

    def is_global(self, layer: int) -> bool:
        """Returns whether a layer, counted from 0, sees whole sequences."""
        return self.attention_pattern[layer % len(self.attention_pattern)] == "g"


def repeated_pattern(letters: str, num_layers: int) -> str:
    """Returns the shortest string that says the same of `num_layers` when it is repeated."""
    letters = "".join(itertools.islice(itertools.cycle(letters), num_layers))
    return next(
        letters[:size]
        for size in range(1, num_layers + 1)
        if all(letter == letters[i % size] for i, letter in enumerate(letters))
    )


class Embeddings(nn.Module):
    """The vectors of tokens, then LayerNorm and dropout."""

    config: ModernBertConfig
    dtype: str = "float32"  # Of the result: each later layer computes in the dtype of its input.

    def setup(self):
        config = self.config
        self.token_embedding = TokenEmbedding(
            config.vocab_size, config.hidden_size, config.initializer_range, dtype=self.dtype
        )
        self.layer_norm = norm(config, self.dtype)

    def __call__(
        self,
        tokens: jax.Array,  # int32 [B, L]
        segment_ids: jax.Array,  # Not used: there are no segments.
        position_ids: jax.Array,  # Not used: see `LayerInputs`.
        dropout: HiddenDropout | None = None,  # Of this step; None drops nothing.
    ) -> jax.Array:
        """Returns hidden states `[B, L, H]`."""
        return apply_dropout(self.layer_norm(self.token_embedding(tokens)), dropout)


class Rotation(NamedTuple):
    """Cosines and sines of the angles by which positions rotate, float32 `[B, L, D / 2]`."""

    cosines: jax.Array
    sines: jax.Array


class SharedInputs(NamedTuple):
    """What all layers read beside the hidden states."""

    mask: AttentionMask
    global_rotation: Rotation
    local_rotation: Rotation


class LayerInputs(nn.Module):
    """Builds `SharedInputs` from a batch."""

    config: ModernBertConfig

    def __call__(self, batch: dict[str, jax.Array]) -> SharedInputs:
        config = self.config
        head_dim = config.hidden_size // config.num_heads
        rotations = (
            rotation(batch["position_ids"], base, head_dim)
            for base in (config.global_rope_base, config.local_rope_base)
        )
        return SharedInputs(
            AttentionMask(batch["sequence_ids"], config.causal, is_hidden=batch.get("is_hidden")),
            *rotations,
        )


def rotation(position_ids: jax.Array, base: float, head_dim: int) -> Rotation:
    """Returns the rotation of int32 `[B, L]` positions: pair i turns by position / base^(2i/D)."""
    frequencies = 1.0 / base ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = position_ids[..., None].astype(jnp.float32) * frequencies
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: jax.Array, by: Rotation, num_heads: int) -> jax.Array:
    """Rotates the heads of `[B, L, H]`: element i of a head with element i + D / 2."""
    heads = x.reshape(*x.shape[:2], num_heads, -1).astype(jnp.float32)
    first, second = jnp.split(heads, 2, axis=-1)
    cosines, sines = by.cosines[:, :, None], by.sines[:, :, None]
    rotated = first * cosines - second * sines, second * cosines + first * sines
    return jnp.concatenate(rotated, axis=-1).reshape(x.shape).astype(x.dtype)


class EncoderLayer(nn.Module):
    """Self-attention, then a gated feed-forward network, each added to its input.

    `attend` needs all positions of a sequence; `finish` treats each position on its own.

    Attributes:
      config: the model config.
      is_global: whether it sees whole sequences, or windows.
      has_attention_norm: False for the first layer, whose input is normalized already.
    """

    config: ModernBertConfig
    is_global: bool
    has_attention_norm: bool = True

    def setup(self):
        config = self.config
        size, inner = config.hidden_size, config.intermediate_size
        initial, has_bias = config.initializer_range, config.attention_bias
        if self.has_attention_norm:
            self.attention_norm = norm(config)
        self.query = Dense(size, initial, has_bias=has_bias)
        self.key = Dense(size, initial, has_bias=has_bias)
        self.value = Dense(size, initial, has_bias=has_bias)
        # A dense layer that is sharded over `tensor` along its inputs.
        self.attention_output = RowParallelDense(size, config.output_range, has_bias=has_bias)
        has_bias = config.feed_forward_bias
        self.feed_forward_norm = norm(config)
        self.intermediate = Dense(inner, initial, has_bias=has_bias)
        self.gate = Dense(inner, initial, has_bias=has_bias)
        self.output = RowParallelDense(size, config.output_range, has_bias=has_bias)

    @property
    def dropout_places(self) -> dict[str, str | float]:
        """Where it drops elements, and the rate of each place."""
        of_output = self.config.attention_output_dropout_rate
        return {
            "attention": "attention_rate",
            "attention_output": "attention_rate" if of_output is None else of_output,
            "feed_forward": "rate",
        }

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
            self._mask(inputs),
            num_heads=self.config.num_heads,
            dropout=dropout.get("attention"),
        )

    def finish(self, x: jax.Array, context: jax.Array, dropout: LayerDropout) -> jax.Array:
        """Returns the layer's output for its input `x` and `context`, the result of `attend`."""
        y = self.attention_output(context)  # [B, L, H]
        x = add_with_dropout(x, y, dropout.get("attention_output"))
        y = self.feed_forward_norm(x)
        y = activate(self.config.activation, self.intermediate(y)) * self.gate(y)
        y = self.output(apply_dropout(y, dropout.get("feed_forward")))
        return x + y

    def scores(self, x: jax.Array, inputs: SharedInputs) -> tuple[jax.Array, AttentionMask]:
        """Returns attention scores, float32 `[B, heads, L, L]`, and the mask of their softmax."""
        query, key, _ = self._projections(x, inputs)
        return scaled_scores(query, key, self.config.num_heads), self._mask(inputs)

    def _projections(self, x, inputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        if self.has_attention_norm:
            x = self.attention_norm(x)
        by = inputs.global_rotation if self.is_global else inputs.local_rotation
        query, key = (rotate(y, by, self.config.num_heads) for y in (self.query(x), self.key(x)))
        return query, key, self.value(x)

    def _mask(self, inputs: SharedInputs) -> AttentionMask:
        if self.is_global:
            return inputs.mask
        return inputs.mask.with_window(self.config.attention_window // 2)


def encoder_layers(config: ModernBertConfig) -> tuple[EncoderLayer, ...]:
    """Returns the layers in their order."""
    return tuple(
        EncoderLayer(config, config.is_global(layer), layer > 0, parent=None)
        for layer in range(config.num_layers)
    )


class Last(nn.Module):
    """LayerNorm after the last layer."""

    config: ModernBertConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return norm(self.config, name="layer_norm")(x)


class Pooler(nn.Module):
    """A dense layer and LayerNorm, before the heads of tasks: of a sequence or of each position."""

    config: ModernBertConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[B, S, H]` to `[B, S, H]`."""
        config = self.config
        dense = Dense(
            config.hidden_size, config.output_range, has_bias=config.pooler_bias, name="dense"
        )
        return norm(config, name="layer_norm")(activate(config.pooler_activation, dense(x)))


class MaskedLmHead(nn.Module):
    """Predicts tokens from the hidden states at their positions."""

    config: ModernBertConfig

    def setup(self):
        config = self.config
        self.transform = Pooler(config)
        if not config.ties_embeddings:
            self.decoder = TokenEmbedding(
                config.vocab_size, config.hidden_size, config.output_range, dtype="float32"
            )
        if config.decoder_bias:
            shape = (config.padded_vocab_size,)
            self.bias = self.param("bias", nn.initializers.zeros, shape, jnp.float32)

    def __call__(self, x: jax.Array, token_embedding: TokenEmbedding) -> jax.Array:
        """Returns float32 logits `[B, K, V]` for hidden states `[B, K, H]`."""
        config = self.config
        bias = self.bias if config.decoder_bias else jnp.zeros(config.padded_vocab_size)
        decoder = token_embedding if config.ties_embeddings else self.decoder
        return decoder.logits(self.transform(x), bias)


class PairHead(nn.Module):
    """Predicts whether the second segment follows the first, for objectives that do."""

    config: ModernBertConfig

    @nn.compact
    def __call__(self, pooled: jax.Array) -> jax.Array:
        """Maps `[B, S, H]` to float32 logits `[B, S, 2]`: IsNext and NotNext."""
        initializer = nn.initializers.truncated_normal(self.config.initializer_range)
        return nn.Dense(2, dtype=jnp.float32, kernel_init=initializer, name="dense")(pooled)


def norm(config: ModernBertConfig, dtype: str | None = None, name: str | None = None) -> LayerNorm:
    """Returns a LayerNorm, by default in the dtype of its input."""
    return LayerNorm(config.layer_norm_epsilon, dtype, config.norm_bias, name=name)


# What follows is the same for each architecture's file; see model/architecture.py.
Config, LmHead = ModernBertConfig, MaskedLmHead
FAST_PATH = "bert_jax.model.tpu_kernels.modernbert_layer"

# Which axes of the mesh shard a parameter: the first regular expression that is found in its path
# decides. "mlm" is MaskedLmHead, "nsp" PairHead, and "layers" all encoder layers, stacked on axis
# 0.
RULES = (
    (r"token_embedding/embedding$", EMBEDDING_SPEC),
    (r"mlm/decoder/embedding$", EMBEDDING_SPEC),
    (r"layers/(query|key|value|intermediate|gate)/kernel$", P(None, "fsdp", "tensor")),
    (r"layers/(query|key|value|intermediate|gate)/bias$", P(None, "tensor")),
    (r"layers/(attention_output|output)/kernel$", P(None, "tensor", "fsdp")),
    (r"(pooler|mlm/transform)/dense/kernel$", P("fsdp", "tensor")),
    (r"mlm/bias$", P("tensor")),
    (r"(bias|scale|nsp/dense/kernel)$", P()),
)


def flops_per_row(
    config: ModernBertConfig, length: int, num_outputs: int, num_targets: int, num_pairs: int
) -> float:
    """Returns the FLOPs of the matrix products of a forward pass for one row of `length`.

    Two per multiply-add; global layers attend over the whole row, local ones over a window. The
    last layer finishes `num_outputs` positions; `num_targets` tokens and `num_pairs` pairs are
    predicted. Gathers, rotations, LayerNorm and softmax are not counted.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    seen = [
        length if config.is_global(layer) else min(config.attention_window + 1, length)
        for layer in range(config.num_layers)
    ]
    attend = config.num_layers * length * 3 * hidden**2 + 2 * length * sum(seen) * hidden
    positions = (config.num_layers - 1) * length + num_outputs
    finish = hidden**2 + 3 * hidden * inner  # For one position.
    lm_head = hidden**2 + hidden * config.padded_vocab_size
    pair_head = hidden**2 + 2 * hidden
    return 2.0 * (attend + positions * finish + num_targets * lm_head + num_pairs * pair_head)
