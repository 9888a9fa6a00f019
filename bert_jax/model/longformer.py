"""Longformer (Beltagy et al., 2020): RoBERTa's encoder with attention in sliding windows.

    tokens -> Embeddings -> EncoderLayer, num_layers times -> hidden states
        hidden states at the positions to predict -> MaskedLmHead -> logits over the vocabulary

What differs from `model/bert.py`: a token attends within a sliding window, w/2 tokens on each
side, and to the global tokens of its sequence; global tokens attend to all of their sequence,
through projections of their own (section 3.1). Which tokens are global depends on the task: [CLS]
for a classifier, the question for answers, none for a masked LM, or positions that the caller
chooses. In shapes, B is the number of rows of a batch, L the length of a row, H the hidden size.

Global queries are computed as a second attention over the rows, which long rows read only in blocks
that hold a global token: memory stays linear in L, and its products are few. Its three projections
are of all positions, so that a layer with global tokens has twice the products of BERT's
projections; without any, as in pre-training, it has none of these.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from bert_jax.model import bert, mpnet
from bert_jax.model.attention import attention, scaled_scores
from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.config import (
    ACTIVATIONS,
    SIZE_FIELDS,
    check_choices,
    check_heads,
    check_minimum,
    check_ranges,
    pad_to_tiles,
    published_size,
)
from bert_jax.model.dropout import LayerDropout
from bert_jax.model.layers import Dense, Identity
from bert_jax.sharding.rules import EMBEDDING_SPEC

# Layers, hidden size, heads and intermediate size.
SIZES = {"base": (12, 768, 12, 3072), "large": (24, 1024, 16, 4096)}
GLOBAL_TOKENS = ("none", "first", "first_text", "second_text")


@dataclasses.dataclass(frozen=True)
class LongformerConfig:
    """The model config of Longformer; hashable, so it can be static under jit.

    The defaults are longformer-base-4096. Raises ValueError for sizes below 1, heads that do not
    divide the hidden size, windows that are odd or not one for each layer, unknown names, and rates
    outside of [0, 1).
    """

    vocab_size: int = 50265
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 4096
    attention_window: int | tuple[int, ...] = 512
    """Of all layers, or of each: half as many tokens on each side, and the token itself."""
    global_tokens: str = "none"
    """Which tokens of a sequence are global, one of `GLOBAL_TOKENS`: none; the first, [CLS]; those
    of the first text of a pair, with [CLS]; those of the second text, with the last separator.
    Models with the head of a task have those of the head (`Head.global_tokens`)."""
    sep_id: int = 2
    """Of the separator, which a pair of texts has three times: two between the texts."""
    type_vocab_size: int = 1
    activation: str = "gelu"
    """Of feed-forward layers, one of `ACTIVATIONS`. The head for tokens always uses GELU."""
    dropout_rate: float = 0.1
    """In training, the dropout of embeddings, sublayers and, by default, attention."""
    attention_dropout_rate: float | None = None
    """In training, the dropout of attention probabilities; None means `dropout_rate`."""
    classifier_dropout_rate: float | None = None
    """In training, the dropout before the dense layers of a task; None means `dropout_rate`."""
    causal: bool = False
    """Each position attends only to itself and earlier ones of its sequence (left to right)."""
    initializer_range: float = 0.02
    layer_norm_epsilon: float = 1e-5

    architecture: ClassVar[str] = "longformer"
    """The file in `bert_jax/model` that defines the model; see `model/architecture.py`."""
    position_offset: ClassVar[int] = 2
    """Rows of the position table before that of the first token; padding has the id before it."""
    embedding_size: ClassVar[None] = None  # What BERT's embeddings read beside.
    num_task_embeddings: ClassVar[int] = 0
    pooler_activation: ClassVar[str] = "tanh"
    has_pooler_input_dropout: ClassVar[bool] = True
    """A classifier has dropout before its pooler, too, and not only after it."""
    size_fields: ClassVar[tuple[str, ...]] = SIZE_FIELDS
    """Fields that a published size sets."""
    fixed_fields: ClassVar[tuple[str, ...]] = (
        *size_fields,
        "max_position_embeddings",
        "attention_window",
        "sep_id",
        "type_vocab_size",
        "activation",
        "layer_norm_epsilon",
    )
    """Fields that are known from a model's weights, and cannot be chosen anew."""

    def __post_init__(self):
        check_ranges(self)
        check_minimum(self, 1, ("type_vocab_size",))
        check_heads(self)
        if not isinstance(self.attention_window, int):
            windows = tuple(self.attention_window)
            if len(windows) != self.num_layers:
                raise ValueError(
                    f"LongformerConfig.attention_window has {len(windows)} entries for "
                    f"{self.num_layers} layers: expected one number, or one for each layer"
                )
            # The same layers have the same windows, however they are written.
            window = windows[0] if len(set(windows)) == 1 else windows
            object.__setattr__(self, "attention_window", window)
        for window in self.windows:
            if not isinstance(window, int) or window < 2 or window % 2:
                raise ValueError(
                    f"LongformerConfig.attention_window is {self.attention_window}: expected even "
                    "numbers, half of which is on each side"
                )
        if not 0 <= self.sep_id < self.vocab_size:
            raise ValueError(
                f"LongformerConfig.sep_id is {self.sep_id}: expected one of the {self.vocab_size} "
                "ids of the vocabulary"
            )
        check_choices(self, activation=ACTIVATIONS, global_tokens=GLOBAL_TOKENS)

    @classmethod
    def named(cls, size: str, **overrides) -> "LongformerConfig":
        """Returns a published size, one of `SIZES`, with `overrides`."""
        return cls(**(published_size(SIZES, size) | overrides))

    @property
    def windows(self) -> tuple[int, ...]:
        """The attention window of each layer."""
        window = self.attention_window
        return (window,) * self.num_layers if isinstance(window, int) else window

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary size rounded up to whole tiles of 128: the rows of the embedding."""
        return pad_to_tiles(self.vocab_size)


class LayerInputs(bert.LayerInputs):
    """Builds what all layers read beside the hidden states: who sees whom, and who is global.

    The batch may have bool `[B, L]` "is_global", the positions that the caller chose; otherwise
    they are those of `LongformerConfig.global_tokens`.
    """

    config: LongformerConfig

    def __call__(self, batch: dict[str, jax.Array]) -> AttentionMask:
        config, is_global = self.config, batch.get("is_global")
        if is_global is None and config.global_tokens != "none":
            is_global = find_global_tokens(config.global_tokens, config.sep_id, batch)
        return AttentionMask(batch["sequence_ids"], config.causal, is_global=is_global)


def find_global_tokens(kind: str, sep_id: int, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns bool `[B, L]`: the global tokens of each sequence, as one of `GLOBAL_TOKENS` says.

    The texts of a pair end at separators, as in transformers: a RoBERTa has no segments.
    """
    position_ids, is_real = batch["position_ids"], batch["sequence_ids"] > 0
    if kind == "first":
        return is_real & (position_ids == 0)
    is_separator = batch["tokens"] == sep_id
    # How many separators of the row, and then of the sequence, precede each position.
    preceding = jnp.cumsum(is_separator, axis=1) - is_separator
    first = jnp.arange(position_ids.shape[1]) - position_ids
    preceding -= jnp.take_along_axis(preceding, first, axis=1)
    if kind == "first_text":
        return is_real & (preceding == 0) & ~is_separator
    return is_real & (preceding >= 2)


class EncoderLayer(bert.EncoderLayer):
    """BERT's layer with attention in a window, and with the projections of global tokens."""

    config: LongformerConfig
    window: int  # Tokens on each side.

    def setup(self):
        super().setup()
        size, initializer_range = self.config.hidden_size, self.config.initializer_range
        self.query_global = Dense(size, initializer_range)
        self.key_global = Dense(size, initializer_range, adds_bias=False)  # As all biases of keys.
        self.value_global = Dense(size, initializer_range)

    def attend(self, x: jax.Array, mask: AttentionMask, dropout: LayerDropout) -> jax.Array:
        """Returns the weighted values of all heads, joined, `[B, L, H]`."""
        settings = {"num_heads": self.config.num_heads, "dropout": dropout.get("attention")}
        local = mask.with_window(self.window)
        context = attention(self.query(x), self.key(x), self.value(x), local, **settings)
        if mask.is_global is None and not self.is_initializing():
            return context
        of_global = self.query_global(x), self.key_global(x), self.value_global(x)
        if mask.is_global is None:
            return context
        global_context = attention(*of_global, mask.of_global_queries(), **settings)
        return jnp.where(mask.is_global[..., None], global_context, context)

    def scores(self, x: jax.Array, mask: AttentionMask) -> tuple[jax.Array, AttentionMask]:
        """Returns attention scores, float32 `[B, heads, L, L]`, and the mask of their softmax.

        They have the bias of keys, which `attend` leaves out.
        """
        local, mask = super().scores(x, mask.with_window(self.window))
        if mask.is_global is None:
            return local, mask
        key = self.key_global(x) + self.key_global.variables["params"]["bias"].astype(x.dtype)
        of_global = scaled_scores(self.query_global(x), key, self.config.num_heads)
        return jnp.where(mask.is_global[:, None, :, None], of_global, local), mask


def encoder_layers(config: LongformerConfig) -> tuple[EncoderLayer, ...]:
    """Returns the layers in their order: those with the same window are alike."""
    return tuple(EncoderLayer(config, window // 2, parent=None) for window in config.windows)


# What follows is the same for each architecture's file; see model/architecture.py.
Config, Embeddings, Pooler, PairHead = LongformerConfig, bert.Embeddings, bert.Pooler, bert.PairHead
LmHead = mpnet.MaskedLmHead  # The dense layer, GELU and LayerNorm of RoBERTa.
Last = Identity  # There is nothing between the last layer and the heads.

# Which axes of the mesh shard a parameter: the first regular expression that is found in its path
# decides. "mlm" is MaskedLmHead, "nsp" PairHead, and "layers" all encoder layers, stacked on axis
# 0.
RULES = (
    (r"token_embedding/embedding$", EMBEDDING_SPEC),
    (r"(position|segment)_embedding/embedding$", P()),
    (
        r"layers/(query|key|value|query_global|key_global|value_global|intermediate)/kernel$",
        P(None, "fsdp", "tensor"),
    ),
    (
        r"layers/(query|key|value|query_global|key_global|value_global|intermediate)/bias$",
        P(None, "tensor"),
    ),
    (r"layers/(attention_output|output)/kernel$", P(None, "tensor", "fsdp")),
    (r"(pooler/dense|mlm/transform)/kernel$", P("fsdp", "tensor")),
    (r"mlm/bias$", P("tensor")),
    (r"(bias|scale|nsp/dense/kernel)$", P()),
)


def flops_per_row(
    config: LongformerConfig, length: int, num_outputs: int, num_targets: int, num_pairs: int
) -> float:
    """Returns the FLOPs of the matrix products of a forward pass for one row of `length`.

    Two per multiply-add; attention is over a window. The last layer finishes `num_outputs`
    positions; `num_targets` tokens and `num_pairs` pairs are predicted. Gathers, the scores of
    global tokens, LayerNorm and softmax are not counted.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    num_projections = 3 if config.global_tokens == "none" else 6
    seen = sum(min(window + 1, length) for window in config.windows)
    attend = config.num_layers * num_projections * length * hidden**2 + 2 * length * seen * hidden
    positions = (config.num_layers - 1) * length + num_outputs
    finish = hidden**2 + 2 * hidden * inner  # For one position.
    lm_head = hidden**2 + hidden * config.padded_vocab_size
    pair_head = hidden**2 + 2 * hidden
    return 2.0 * (attend + positions * finish + num_targets * lm_head + num_pairs * pair_head)
