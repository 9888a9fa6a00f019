"""XLNet (Yang et al., 2019): every part, in the order of computation.

    tokens -> Embeddings -> EncoderLayer, num_layers times -> hidden states
        hidden states at the positions to predict -> LmHead -> logits over the vocabulary
        hidden state of <cls>, the last token -> Pooler -> heads of tasks

What differs from `model/bert.py`: attention uses relative positional encodings alone, sinusoids of
distances that each layer projects (Transformer-XL; Dai et al., 2019, section 3.3), and relative
segment encodings, of the same segment or another; the embeddings have neither, nor a norm.
A batch with `ranks`, the order in which its tokens are predicted, is read in two streams (section
2.3): the content stream, in which a token knows itself and those before it in that order, and the
query stream, which knows its position but not its content, and from which a token is predicted.

Not built: the memory of earlier segments (section 2.4). A sequence is read alone, whatever
`mem_len` in `config.json` is, which has no effect in transformers either if no memory is given.

In shapes, B is the number of rows of a batch, L the length of a row, H the hidden size, D the size
of a head.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from bert_jax.model import bert
from bert_jax.model.attention import LONGEST_PLAIN_ROW, attention, scaled_scores, split_heads
from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.blocked_attention import BLOCK
from bert_jax.model.config import (
    ACTIVATIONS,
    SIZE_FIELDS,
    check_choices,
    check_minimum,
    check_ranges,
    pad_to_tiles,
    published_size,
)
from bert_jax.model.dropout import (
    AttentionDropout,
    HiddenDropout,
    LayerDropout,
    OfTable,
    add_with_dropout,
    apply_dropout,
)
from bert_jax.model.layers import (
    Dense,
    Identity,
    LayerNorm,
    RowParallelDense,
    TokenEmbedding,
    activate,
    gather_positions,
)
from bert_jax.model.score_bias import align_distances
from bert_jax.sharding.rules import EMBEDDING_SPEC

# Layers, hidden size, heads and intermediate size (section A.4.1 and the released models).
SIZES = {"base": (12, 768, 12, 3072), "large": (24, 1024, 16, 4096)}
NUM_SEGMENTS = 3  # The first text, the second, and <cls>.


@dataclasses.dataclass(frozen=True)
class XlnetConfig:
    """The model config of XLNet; hashable, so it can be static under jit. The defaults are base.

    Raises ValueError for sizes below 1, heads that do not divide the hidden size, an odd hidden
    size, unknown names, and rates outside of [0, 1).
    """

    vocab_size: int = 32000
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    """The longest sequence that is read; there is no table of positions."""
    max_distance: int = 0
    """Larger distances are clipped to this; 0: none is."""
    activation: str = "gelu"
    """Of feed-forward layers, one of `ACTIVATIONS`."""
    pooler_activation: str = "tanh"
    dropout_rate: float = 0.1
    """In training, the dropout of embeddings, of sinusoids, of sublayers and, by default, of
    attention."""
    attention_dropout_rate: float | None = None
    """In training, the dropout of attention probabilities; None means `dropout_rate`."""
    classifier_dropout_rate: float | None = None
    """In training, the dropout after the pooler of a task; None means `dropout_rate`."""
    causal: bool = False
    """Each position attends only to itself and earlier ones of its sequence (left to right)."""
    initializer_range: float = 0.02
    layer_norm_epsilon: float = 1e-12

    architecture: ClassVar[str] = "xlnet"
    """The file in `bert_jax/model` that defines the model; see `model/architecture.py`."""
    cls_last: ClassVar[bool] = True
    """The last token of a sequence is <cls>."""
    has_query_stream: ClassVar[bool] = True
    """Tokens are predicted from a stream of their own, in the order of `ranks`."""
    size_fields: ClassVar[tuple[str, ...]] = SIZE_FIELDS
    """Fields that a published size sets."""
    fixed_fields: ClassVar[tuple[str, ...]] = (
        *size_fields,
        "max_position_embeddings",
        "max_distance",
        "activation",
        "pooler_activation",
        "layer_norm_epsilon",
    )
    """Fields that are known from a model's weights, and cannot be chosen anew."""

    def __post_init__(self):
        check_ranges(self)
        check_minimum(self, 0, ("max_distance",))
        if self.hidden_size % self.num_heads or self.hidden_size % 2:
            multiple = f"even, and a multiple of num_heads ({self.num_heads})"
            raise ValueError(f"XlnetConfig.hidden_size ({self.hidden_size}) must be {multiple}")
        check_choices(self, activation=ACTIVATIONS, pooler_activation=ACTIVATIONS)

    @classmethod
    def named(cls, size: str, **overrides) -> "XlnetConfig":
        """Returns a published size, one of `SIZES`, with `overrides`."""
        return cls(**(published_size(SIZES, size) | overrides))

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary size rounded up to whole tiles of 128: the rows of the embedding."""
        return pad_to_tiles(self.vocab_size)


class Streams(NamedTuple):
    """The hidden states of both streams, `[B, L, H]` each, or `[B, K, H]` at some positions.

    Nothing reads the query stream but its own next layer: it may be at some positions alone.
    """

    content: jax.Array
    query: jax.Array


class Embeddings(nn.Module):
    """The vectors of tokens, then dropout; in the query stream, one vector for all positions."""

    config: XlnetConfig
    dtype: str = "float32"  # Of the result: each later layer computes in the dtype of its input.

    def setup(self):
        size, initial = self.config.hidden_size, self.config.initializer_range
        self.token_embedding = TokenEmbedding(
            self.config.vocab_size, size, initial, dtype=self.dtype
        )
        initializer = nn.initializers.truncated_normal(initial)
        self.query = self.param("query", initializer, (1, 1, size), jnp.float32)

    def __call__(
        self,
        tokens: jax.Array,  # int32 [B, L]
        segment_ids: jax.Array,  # Not used: scores read segments.
        position_ids: jax.Array,  # Not used: scores read distances.
        dropout: HiddenDropout | None = None,  # Of this step; None drops nothing.
        ranks: jax.Array | None = None,  # int32 [B, L], for two streams
        query_positions: jax.Array | None = None,  # int32 [B, K], of the query stream; None: all
    ) -> jax.Array | Streams:
        """Returns hidden states `[B, L, H]`, or with `ranks` those of both streams."""
        x = self.token_embedding(tokens).astype(self.dtype)
        if ranks is None:
            return apply_dropout(x, dropout)
        num_queries = (tokens if query_positions is None else query_positions).shape[1]
        query = jnp.broadcast_to(self.query.astype(self.dtype), (len(x), num_queries, x.shape[2]))
        own = of_first(dropout, num_queries)
        return Streams(apply_dropout(x, dropout), apply_dropout(query, own))


def of_first(dropout, count: int):
    """Returns the dropout of the first `count` positions, or None.

    A query stream at some positions drops elements by their numbers, one at all by their places.
    """
    if isinstance(dropout, AttentionDropout):
        return dropout._replace(words=dropout.words[..., :count])
    return dropout and dropout._replace(words=tuple(each[:, :count] for each in dropout.words))


class SharedInputs(NamedTuple):
    """What all layers read beside the hidden states.

    Attributes:
      mask: which positions see each other; it has the ranks of two streams.
      sinusoids: float32 `[2N, H]`, of distances from N to 1 - N, of a query minus that of a key,
        for rows of up to N positions.
      segments: float32 `[B, L, NUM_SEGMENTS]`, 1 at the segment of each position.
      query_positions: int32 `[B, K]`, where the query stream is; None: everywhere.
    """

    mask: AttentionMask
    sinusoids: jax.Array
    segments: jax.Array
    query_positions: jax.Array | None = None


class LayerInputs(nn.Module):
    """Builds `SharedInputs` from a batch; it has no parameters."""

    config: XlnetConfig

    def __call__(self, batch: dict[str, jax.Array]) -> SharedInputs:
        config, ids = self.config, batch["sequence_ids"]
        mask = AttentionMask(ids, config.causal, ranks=batch.get("ranks"))
        # <cls>, the last token of each sequence, is a segment of its own, if there are segments.
        is_last = ids != jnp.pad(ids[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        segment_ids = batch["segment_ids"]
        segment_ids = jnp.where(is_last & (segment_ids > 0), NUM_SEGMENTS - 1, segment_ids)
        segments = jax.nn.one_hot(segment_ids, NUM_SEGMENTS, dtype=jnp.float32)
        size = largest_distance(ids.shape[1])
        distances = size - jnp.arange(2 * size)
        if config.max_distance:
            distances = jnp.clip(distances, -config.max_distance, config.max_distance)
        table = sinusoids(distances, config.hidden_size)
        return SharedInputs(mask, table, segments, batch.get("query_positions"))


def largest_distance(length: int) -> int:
    """Returns the number of distances on each side for rows of `length`: at least all of them.

    Long rows are read by whole blocks, and `fsdp` shards the sinusoids.
    """
    multiple = 8 if length <= LONGEST_PLAIN_ROW else BLOCK
    return -(-length // multiple) * multiple


def sinusoids(distances: jax.Array, size: int) -> jax.Array:
    """Returns float32 `[distances, size]`: sines, then cosines (Dai et al., 2019, section 3.3)."""
    frequencies = (10000.0 ** -(np.arange(0, size, 2) / size)).astype(np.float32)
    angles = distances.astype(jnp.float32)[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DistanceScores:
    """The terms of distances in a score, as `attention` takes them (`ScoreBias`).

    Attributes:
      keys: `[heads, 2N, D]`, to multiply queries with; row n holds distance N - n, of a query minus
        that of a key.
      constants: float32 `[heads, 2N]`, what is added for each distance, whatever the query.
    """

    keys: jax.Array
    constants: jax.Array

    def scores(self, query: jax.Array, key: jax.Array, distance: jax.Array | int) -> jax.Array:
        """Returns the terms, float32 `[batch, heads, queries, keys]`; see `ScoreBias`."""
        num_queries, num_keys = query.shape[2], key.shape[2]
        start = self.keys.shape[1] // 2 - num_queries + distance
        keys, constants = (
            jax.lax.dynamic_slice_in_dim(table, start, num_queries + num_keys, axis=1)
            for table in (self.keys, self.constants)
        )
        return align_distances(self.products(query, keys, constants), num_keys)

    @staticmethod
    def products(query: jax.Array, keys: jax.Array, constants: jax.Array) -> jax.Array:
        """Returns the terms of each query for some distances, float32 `[B, heads, queries, R]`."""
        query = query[..., : keys.shape[-1]]  # What follows is of segments.
        products = jnp.einsum("bhid,hrd->bhir", query, keys, preferred_element_type=jnp.float32)
        return products + constants[:, None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DistanceScoresAt:
    """The `DistanceScores` of queries at int32 positions `[B, K]`, for all keys of a row."""

    distances: DistanceScores
    positions: jax.Array

    def scores(self, query: jax.Array, key: jax.Array, distance: jax.Array | int) -> jax.Array:
        """Returns the terms, float32 `[B, heads, K, keys]`; see `ScoreBias`."""
        products = self.distances.products(query, self.distances.keys, self.distances.constants)
        starts = self.distances.keys.shape[1] // 2 - self.positions

        def of_keys(row, start):  # [heads, 2N] -> [heads, keys]
            return jax.lax.dynamic_slice_in_dim(row, start, key.shape[2], axis=1)

        return jax.vmap(jax.vmap(of_keys, (1, 0), 1))(products, starts)


class MaskAt(NamedTuple):
    """The mask of queries at some positions, as `attention` reads an `AttentionMask`."""

    queries: AttentionMask
    keys: AttentionMask
    may_hide_all: bool = True

    def pairs(self) -> jax.Array:
        """Returns bool `[B, 1, K, L]`: whether a query sees a key."""
        # Two streams have neither windows nor an order in the row, which would read these.
        numbers = (jnp.arange(each.sequence_ids.shape[1]) for each in (self.queries, self.keys))
        return self.queries.pairs_with(self.keys, *numbers)


class QueryBias(nn.Module):
    """A vector for each head, `[heads, D]`; not zeros at the beginning, as other biases are."""

    shape: tuple[int, int]
    initializer_range: float

    @nn.compact
    def __call__(self) -> jax.Array:
        initializer = nn.initializers.truncated_normal(self.initializer_range)
        return self.param("bias", initializer, self.shape, jnp.float32)


class EncoderLayer(nn.Module):
    """Relative self-attention, then a feed-forward network, each with LayerNorm of the sum.

    Hidden states are `[B, L, H]`, or `Streams` of them, which have the same parameters. `attend`
    needs all positions of a sequence; `finish` treats each position on its own.
    """

    config: XlnetConfig

    @property
    def dropout_places(self) -> Mapping[str, str | OfTable]:
        """Where it drops elements, and the rate of each place."""
        num_distances = 2 * largest_distance(self.config.max_position_embeddings)
        return {
            "attention": "attention_rate",
            "sinusoids": OfTable("rate", num_distances),
            "attention_output": "rate",
            "intermediate": "rate",
            "output": "rate",
        }

    def setup(self):
        config = self.config
        size, initial = config.hidden_size, config.initializer_range
        self.query = Dense(size, initial, has_bias=False)
        self.key = Dense(size, initial, has_bias=False)
        self.value = Dense(size, initial, has_bias=False)
        self.distance_key = Dense(size, initial, has_bias=False)
        initializer = nn.initializers.truncated_normal(initial)
        heads = config.num_heads, size // config.num_heads
        # What is added to queries before they are multiplied with keys (Transformer-XL's u), with
        # distances (its v) and with segments.
        self.content_bias = QueryBias(heads, initial)
        self.distance_bias = QueryBias(heads, initial)
        self.segment_bias = QueryBias(heads, initial)
        # Of a key in the same segment as the query, and of one in another.
        self.segment_key = self.param("segment_key", initializer, (2, *heads), jnp.float32)
        # A dense layer that is sharded over `tensor` along its inputs.
        self.attention_output = RowParallelDense(size, initial, has_bias=False)
        self.attention_layer_norm = LayerNorm(config.layer_norm_epsilon)
        self.intermediate = Dense(config.intermediate_size, initial)
        self.output = RowParallelDense(size, initial)
        self.output_layer_norm = LayerNorm(config.layer_norm_epsilon)

    def __call__(
        self, x: jax.Array | Streams, inputs: SharedInputs, dropout: LayerDropout
    ) -> jax.Array | Streams:
        """Maps hidden states to those after this layer."""
        return self.finish(x, self.attend(x, inputs, dropout), dropout)

    def attend(
        self, x: jax.Array | Streams, inputs: SharedInputs, dropout: LayerDropout
    ) -> jax.Array | Streams:
        """Returns the weighted values of all heads, joined; both streams read the content."""
        content = x.content if isinstance(x, Streams) else x
        key, bias, value = *self._keys(content, inputs, dropout), self.value(content)

        def attend_from(states, mask, segments, bias):
            return attention(
                self._query(states, segments),
                key,
                value,
                mask,
                num_heads=self.config.num_heads,
                dropout=of_first(dropout.get("attention"), states.shape[1]),
                bias=bias,
            )

        of_content = attend_from(content, inputs.mask, inputs.segments, bias)
        if not isinstance(x, Streams):
            return of_content
        mask, segments = dataclasses.replace(inputs.mask, sees_own_rank=False), inputs.segments
        if (positions := inputs.query_positions) is not None:
            at_queries = jax.tree.map(lambda each: jnp.take_along_axis(each, positions, 1), mask)
            mask, segments = MaskAt(at_queries, mask), gather_positions(segments, positions)
            bias = DistanceScoresAt(bias, positions)
        return Streams(of_content, attend_from(x.query, mask, segments, bias))

    def finish(
        self, x: jax.Array | Streams, context: jax.Array | Streams, dropout: LayerDropout
    ) -> jax.Array | Streams:
        """Returns the layer's output for its input `x` and `context`, the result of `attend`."""
        at_all = {name: each for name, each in dropout.items() if name != "sinusoids"}

        def finish_one(x, context):
            dropout = {name: of_first(each, x.shape[1]) for name, each in at_all.items()}
            y = self.attention_output(context)  # [B, L, H]
            x = self.attention_layer_norm(add_with_dropout(x, y, dropout.get("attention_output")))
            y = activate(self.config.activation, self.intermediate(x))
            y = self.output(apply_dropout(y, dropout.get("intermediate")))  # [B, L, H]
            return self.output_layer_norm(add_with_dropout(x, y, dropout.get("output")))

        return jax.tree.map(finish_one, x, context)

    def scores(self, x: jax.Array, inputs: SharedInputs) -> tuple[jax.Array, AttentionMask]:
        """Returns attention scores, float32 `[B, heads, L, L]`, and the mask of their softmax.

        They are those of section 3.3 but for a term that is constant over keys, so that it cancels
        in the softmax.
        """
        key, bias = self._keys(x, inputs, {})
        query = self._query(x, inputs.segments)
        return scaled_scores(query, key, self.config.num_heads, bias), inputs.mask

    def _query(self, x: jax.Array, segments: jax.Array) -> jax.Array:
        """Returns `[B, L, heads * (D + NUM_SEGMENTS)]`: queries, and below each what it adds to the
        scores of keys in its own segment, at the place of this segment.

        The score of a key in another segment is left out: it is constant over keys, so that it
        cancels in the softmax.
        """
        config = self.config
        query = self.query(x).reshape(*x.shape[:2], config.num_heads, -1)
        head_dim, dtype = query.shape[-1], query.dtype
        difference = self.segment_key[0] - self.segment_key[1]  # [heads, D]
        same = jnp.einsum("blhd,hd->blh", query + self.segment_bias(), difference)
        same = same[..., None] * segments[:, :, None]  # [B, L, heads, NUM_SEGMENTS]
        joined = jnp.concatenate([query + self.content_bias(), same], axis=-1)
        # Attention divides by the root of the size with segments.
        joined *= math.sqrt((head_dim + NUM_SEGMENTS) / head_dim)
        return joined.astype(dtype).reshape(*x.shape[:2], -1)

    def _keys(
        self, x: jax.Array, inputs: SharedInputs, dropout: LayerDropout
    ) -> tuple[jax.Array, DistanceScores]:
        """Returns the keys of contents and segments, as `_query` has them, and of distances."""
        config = self.config
        key = self.key(x).reshape(*x.shape[:2], config.num_heads, -1)
        head_dim, dtype = key.shape[-1], key.dtype
        segments = inputs.segments.astype(dtype)[:, :, None]
        segments = jnp.broadcast_to(segments, (*key.shape[:3], NUM_SEGMENTS))
        joined = jnp.concatenate([key, segments], axis=-1).reshape(*x.shape[:2], -1)

        # The same for all rows: what is dropped of it, too.
        table = inputs.sinusoids.astype(dtype)
        if "sinusoids" in dropout:
            first = largest_distance(config.max_position_embeddings) - len(table) // 2
            places = first + np.arange(len(table))
            table = apply_dropout(table[None], dropout["sinusoids"].at(places[None]))[0]
        distances = split_heads(self.distance_key(table)[None], config.num_heads)[0]
        added = (self.distance_bias() - self.content_bias()) / math.sqrt(head_dim)
        constants = jnp.einsum("hd,hrd->hr", added, distances, precision="highest")
        return joined, DistanceScores(distances, constants)


def encoder_layers(config: XlnetConfig) -> tuple[EncoderLayer, ...]:
    """Returns the layers in their order: all are alike."""
    return (EncoderLayer(config, parent=None),) * config.num_layers


class LmHead(nn.Module):
    """Predicts tokens from the hidden states at their positions: a product with the embeddings."""

    config: XlnetConfig

    @nn.compact
    def __call__(self, x: jax.Array, token_embedding: TokenEmbedding) -> jax.Array:
        """Returns float32 logits `[B, K, V]` for hidden states `[B, K, H]`."""
        shape = (token_embedding.padded_vocab_size,)
        bias = self.param("bias", nn.initializers.zeros, shape, jnp.float32)
        return token_embedding.logits(x, bias)


# What follows is the same for each architecture's file; see model/architecture.py.
Config = XlnetConfig
Pooler, PairHead = bert.Pooler, bert.PairHead
Last = Identity  # There is nothing between the last layer and the heads.

# Which axes of the mesh shard a parameter: the first regular expression that is found in its path
# decides. "mlm" is LmHead, "nsp" PairHead, and "layers" all encoder layers, stacked on axis 0.
RULES = (
    (r"token_embedding/embedding$", EMBEDDING_SPEC),
    (r"embeddings/query$", P()),
    (r"layers/(query|key|value|distance_key|intermediate)/kernel$", P(None, "fsdp", "tensor")),
    (r"layers/intermediate/bias$", P(None, "tensor")),
    (r"layers/(attention_output|output)/kernel$", P(None, "tensor", "fsdp")),
    (r"layers/segment_key$", P()),
    (r"pooler/dense/kernel$", P("fsdp", "tensor")),
    (r"mlm/bias$", P("tensor")),
    (r"(bias|scale|nsp/dense/kernel)$", P()),
)


def flops_per_row(
    config: XlnetConfig,
    length: int,
    num_outputs: int,
    num_targets: int,
    num_pairs: int,
    num_streams: int = 1,
) -> float:
    """Returns the FLOPs of the matrix products of a forward pass for one row of `length`.

    Two per multiply-add; attention is over the whole row, and the term of distances over all 2L of
    them. The last layer finishes `num_outputs` positions; `num_targets` tokens and `num_pairs`
    pairs are predicted. With two streams, keys and values are computed once, the query stream is at
    `num_outputs` positions, and the last layer computes it alone. The projections of the
    sinusoids, once for a batch, segments, LayerNorm and softmax are not counted.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    attend = hidden**2 + 2 * length * hidden + 2 * length * hidden  # From one position.
    finish = hidden**2 + 2 * hidden * inner  # For one position.
    num_queries = num_outputs if num_streams == 2 else 0
    layers = config.num_layers * 2 * length * hidden**2  # Keys and values.
    layers += (config.num_layers - 1) * (length + num_queries) * (attend + finish)
    layers += (num_queries or length) * attend + num_outputs * finish
    pair_head = hidden**2 + 2 * hidden
    heads = num_targets * hidden * config.padded_vocab_size + num_pairs * pair_head
    return 2.0 * (layers + heads)
