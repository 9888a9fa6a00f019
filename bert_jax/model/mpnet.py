"""MPNet (Song et al., 2020): every part of the model, in the order of computation.

    tokens -> Embeddings -> EncoderLayer, num_layers times -> hidden states
        hidden states at the positions to predict -> MaskedLmHead -> logits over the vocabulary

What differs from `model/bert.py`: a number for each head and each bucket of distances is added to
all attention scores, the same in all layers (as in T5; Raffel et al., 2020); there are no segments;
and positions begin at 2. It is trained here as a masked LM, as BERT is: MPNet's own objective,
which predicts the tokens of a permutation in two streams, is not implemented. In shapes, B is the
number of rows of a batch, L the length of a row, H the hidden size.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from bert_jax.model import bert
from bert_jax.model.attention import attention, scaled_scores
from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.config import (
    ACTIVATIONS,
    SIZE_FIELDS,
    check_choices,
    check_heads,
    check_ranges,
    pad_to_tiles,
    published_size,
)
from bert_jax.model.dropout import HiddenDropout, LayerDropout, apply_dropout
from bert_jax.model.layers import (
    Dense,
    Embedding,
    Identity,
    LayerNorm,
    TokenEmbedding,
    activate,
)
from bert_jax.model.score_bias import align_distances
from bert_jax.sharding.rules import EMBEDDING_SPEC

SIZES = {"base": (12, 768, 12, 3072)}  # Layers, hidden size, heads and intermediate size.

# The buckets of distances in tokens: one for each up to 7, then wider and wider ones, which begin
# at 8 * 2^(i/2), rounded up. The second half is for keys that follow the query.
BUCKET_STARTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91)
NUM_BUCKETS = 2 * (1 + len(BUCKET_STARTS))


@dataclasses.dataclass(frozen=True)
class MpnetConfig:
    """The model config of MPNet; hashable, so it can be static under jit.

    The defaults are mpnet-base. Raises ValueError for sizes below 1, heads that do not divide the
    hidden size, unknown names, and rates outside of [0, 1).
    """

    vocab_size: int = 30527
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
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
    layer_norm_epsilon: float = 1e-12

    architecture: ClassVar[str] = "mpnet"
    """The file in `bert_jax/model` that defines the model; see `model/architecture.py`."""
    position_offset: ClassVar[int] = 2
    """Rows of the position table before that of the first token; padding has the id before it."""
    embedding_size: ClassVar[None] = None  # What `bert.flops_per_row` reads beside.
    pooler_activation: ClassVar[str] = "tanh"
    has_pooler_input_dropout: ClassVar[bool] = True
    """A classifier has dropout before its pooler, too, and not only after it."""
    size_fields: ClassVar[tuple[str, ...]] = SIZE_FIELDS
    """Fields that a published size sets."""
    fixed_fields: ClassVar[tuple[str, ...]] = (
        *size_fields,
        "max_position_embeddings",
        "activation",
        "layer_norm_epsilon",
    )
    """Fields that are known from a model's weights, and cannot be chosen anew."""

    def __post_init__(self):
        check_ranges(self)
        check_heads(self)
        check_choices(self, activation=ACTIVATIONS)

    @classmethod
    def named(cls, size: str, **overrides) -> "MpnetConfig":
        """Returns a published size, one of `SIZES`, with `overrides`."""
        return cls(**(published_size(SIZES, size) | overrides))

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary size rounded up to whole tiles of 128: the rows of the embedding."""
        return pad_to_tiles(self.vocab_size)


class Embeddings(nn.Module):
    """The sum of the vectors of tokens and positions, then LayerNorm and dropout."""

    config: MpnetConfig
    dtype: str = "float32"  # Of the result: each later layer computes in the dtype of its input.

    def setup(self):
        config = self.config
        size, initial = config.hidden_size, config.initializer_range
        self.token_embedding = TokenEmbedding(config.vocab_size, size, initial, dtype=self.dtype)
        num_positions = config.position_offset + config.max_position_embeddings
        self.position_embedding = Embedding(num_positions, size, initial)
        self.layer_norm = LayerNorm(config.layer_norm_epsilon, self.dtype)

    def __call__(
        self,
        tokens: jax.Array,  # int32 [B, L]
        segment_ids: jax.Array,  # Not used: there are no segments.
        position_ids: jax.Array,  # int32 [B, L]: 0, 1, ... in each sequence
        dropout: HiddenDropout | None = None,  # Of this step; None drops nothing.
    ) -> jax.Array:
        """Returns hidden states `[B, L, H]`."""
        x = self.token_embedding(tokens)
        x += self.position_embedding(self.config.position_offset + position_ids)
        return apply_dropout(self.layer_norm(x), dropout)


class DistanceBias(NamedTuple):
    """What all layers add to their scores: a `ScoreBias` of float32 `[buckets, heads]`."""

    table: jax.Array

    def scores(self, query: jax.Array, key: jax.Array, distance: jax.Array | int) -> jax.Array:
        """Returns float32 `[heads, queries, keys]`; takes what `ScoreBias` says."""
        num_queries, num_keys = query.shape[2], key.shape[2]
        buckets = bucket_of(distance + jnp.arange(-num_queries, num_keys))
        # A product with one-hot rows has a far cheaper gradient than a lookup.
        one_hot = jax.nn.one_hot(buckets, NUM_BUCKETS, dtype=jnp.float32)
        by_distance = jnp.matmul(self.table.T, one_hot.T, precision="highest")[:, None]
        shape = len(by_distance), num_queries, num_queries + num_keys
        return align_distances(jnp.broadcast_to(by_distance, shape), num_keys)


def bucket_of(distances: jax.Array) -> jax.Array:
    """Returns the buckets of int distances `[...]`: positions of keys less those of queries."""
    sizes = jnp.sum(jnp.abs(distances)[..., None] >= np.array(BUCKET_STARTS), axis=-1)
    return sizes + NUM_BUCKETS // 2 * (distances > 0)


class SharedInputs(NamedTuple):
    """What all layers read beside the hidden states."""

    mask: AttentionMask
    bias: DistanceBias


class LayerInputs(nn.Module):
    """Builds `SharedInputs` from a batch; holds the table of `DistanceBias`."""

    config: MpnetConfig

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array]) -> SharedInputs:
        config = self.config
        initializer = nn.initializers.truncated_normal(config.initializer_range)
        shape = NUM_BUCKETS, config.num_heads
        table = self.param("distance_bias", initializer, shape, jnp.float32)
        mask = AttentionMask(batch["sequence_ids"], config.causal, is_hidden=batch.get("is_hidden"))
        return SharedInputs(mask, DistanceBias(table))


class EncoderLayer(bert.EncoderLayer):
    """BERT's layer, with a bias of distances in its scores."""

    config: MpnetConfig

    def attend(self, x: jax.Array, inputs: SharedInputs, dropout: LayerDropout) -> jax.Array:
        """Returns the weighted values of all heads, joined, `[B, L, H]`."""
        return attention(
            self.query(x),
            self.key(x),
            self.value(x),
            inputs.mask,
            num_heads=self.config.num_heads,
            dropout=dropout.get("attention"),
            bias=inputs.bias,
        )

    def scores(self, x: jax.Array, inputs: SharedInputs) -> tuple[jax.Array, AttentionMask]:
        """Returns attention scores, float32 `[B, heads, L, L]`, and the mask of their softmax.

        They have the bias of keys, which `attend` leaves out.
        """
        key = self.key(x) + self.key.variables["params"]["bias"].astype(x.dtype)
        scores = scaled_scores(self.query(x), key, self.config.num_heads, inputs.bias)
        return scores, inputs.mask


def encoder_layers(config: MpnetConfig) -> tuple[EncoderLayer, ...]:
    """Returns the layers in their order: all are alike."""
    return (EncoderLayer(config, parent=None),) * config.num_layers


class MaskedLmHead(nn.Module):
    """Predicts tokens from the hidden states at their positions, as BERT's head does."""

    config: MpnetConfig

    @nn.compact
    def __call__(self, x: jax.Array, token_embedding: TokenEmbedding) -> jax.Array:
        """Returns float32 logits `[B, K, V]` for hidden states `[B, K, H]`."""
        config = self.config
        x = Dense(config.hidden_size, config.initializer_range, name="transform")(x)
        x = LayerNorm(config.layer_norm_epsilon, name="layer_norm")(activate("gelu", x))
        shape = (config.padded_vocab_size,)
        bias = self.param("bias", nn.initializers.zeros, shape, jnp.float32)
        return token_embedding.logits(x, bias)


# What follows is the same for each architecture's file; see model/architecture.py.
Config, LmHead = MpnetConfig, MaskedLmHead
Pooler, PairHead = bert.Pooler, bert.PairHead
Last = Identity  # There is nothing between the last layer and the heads.

# Which axes of the mesh shard a parameter: the first regular expression that is found in its path
# decides. "mlm" is MaskedLmHead, "nsp" PairHead, and "layers" all encoder layers, stacked on axis
# 0.
RULES = (
    (r"token_embedding/embedding$", EMBEDDING_SPEC),
    (r"(position_embedding/embedding|layer_inputs/distance_bias)$", P()),
    (r"layers/(query|key|value|intermediate)/kernel$", P(None, "fsdp", "tensor")),
    (r"layers/(query|key|value|intermediate)/bias$", P(None, "tensor")),
    (r"layers/(attention_output|output)/kernel$", P(None, "tensor", "fsdp")),
    (r"(pooler/dense|mlm/transform)/kernel$", P("fsdp", "tensor")),
    (r"mlm/bias$", P("tensor")),
    (r"(bias|scale|nsp/dense/kernel)$", P()),
)

flops_per_row = bert.flops_per_row  # The bias of scores is not counted.
