"""DeBERTa, versions 2 and 3 (He et al., 2020 and 2021): every part, in the order of computation.

    tokens -> Embeddings -> EncoderLayer, num_layers times -> hidden states
        hidden states at the positions to predict -> LmHead -> logits over the vocabulary
        hidden state of [CLS] -> Pooler -> heads of tasks

What differs from `model/bert.py`: attention is disentangled. Beside the product of the contents of
two positions, a score has two more terms, of the content of one and the distance between both; the
vectors of distances are one table, which all layers read. By default there is no other information
about positions, and there are no segments. The largest models of version 2 have a convolution
beside the first layer. In shapes, B is the number of rows of a batch, L the length of a row, H the
hidden size, S the number of buckets of distances on each side.
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
from bert_jax.model.attention import (
    LONGEST_PLAIN_ROW,
    attention,
    scaled_scores,
    split_heads,
)
from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.blocked_attention import BLOCK
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
from bert_jax.model.dropout import (
    HiddenDropout,
    LayerDropout,
    OfTable,
    add_with_dropout,
    apply_dropout,
)
from bert_jax.model.layers import (
    Dense,
    Embedding,
    Identity,
    LayerNorm,
    RowParallelDense,
    TokenEmbedding,
    activate,
)
from bert_jax.model.score_bias import align_distances
from bert_jax.sharding.rules import EMBEDDING_SPEC

# Layers, hidden size, heads and intermediate size: version 3 (its table 2, and the released xsmall
# and small), and the released models of version 2.
SIZES = {
    "xsmall": (12, 384, 6, 1536),
    "small": (6, 768, 12, 3072),
    "base": (12, 768, 12, 3072),
    "large": (24, 1024, 16, 4096),
    "v2-xlarge": (24, 1536, 24, 6144),
    "v2-xxlarge": (48, 1536, 24, 6144),
}
OF_VERSION_2 = {"convolution_width": 3, "convolution_activation": "gelu"}
POSITION_SCORES = ("c2p|p2c", "c2p", "p2c", "")


@dataclasses.dataclass(frozen=True)
class DebertaConfig:
    """The model config of DeBERTa; hashable, so it can be static under jit.

    The defaults are version 3, base. Raises ValueError for sizes below 1, heads that do not divide
    the hidden size, an even width of the convolution, unknown names, and rates outside of [0, 1).
    """

    vocab_size: int = 128100
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    """The length up to which the model was trained."""
    position_scores: str = "c2p|p2c"
    """Relative-position terms of scores, one of `POSITION_SCORES`: content to position, position to
    content, or none."""
    num_buckets: int = 256
    """Distances on each side that have a vector of their own; from half of it on, they share one
    with others, in a logarithmic scale. 0: all up to `max_distance` have their own."""
    max_distance: int | None = None
    """Larger distances are clipped to this; None means `max_position_embeddings`."""
    shares_projections: bool = True
    """Whether relative embeddings are projected as content is, or by matrices of their own."""
    normalizes_distances: bool = True
    """Whether the relative embeddings pass through LayerNorm first."""
    has_positions: bool = False
    """Whether the embeddings have a table of positions, too."""
    type_vocab_size: int = 0
    embedding_size: int | None = None
    """Width of the table of tokens, which a matrix then widens; None: `hidden_size`."""
    convolution_width: int = 0
    """Positions that the convolution beside the first layer reads, an odd number; 0: there is
    none."""
    convolution_activation: str = "tanh"
    activation: str = "gelu"
    """Of feed-forward layers and of the head for tokens, one of `ACTIVATIONS`."""
    pooler_activation: str = "gelu"
    dropout_rate: float = 0.1
    """In training, the dropout of embeddings, of relative embeddings, of sublayers and, by
    default, of attention."""
    attention_dropout_rate: float | None = None
    """In training, the dropout of attention probabilities; None means `dropout_rate`."""
    classifier_dropout_rate: float | None = None
    """In training, the dropout before the last dense layer of a task; None means `dropout_rate`."""
    causal: bool = False
    """Each position attends only to itself and earlier ones of its sequence (left to right)."""
    initializer_range: float = 0.02
    layer_norm_epsilon: float = 1e-7
    legacy_head: bool = True
    """In transformers, the head for tokens has the names of BERT's (`legacy`), or others."""

    architecture: ClassVar[str] = "deberta"
    """The file in `bert_jax/model` that defines the model; see `model/architecture.py`."""
    family: ClassVar[str] = "deberta-v2"
    """How other libraries store it: both versions have this name."""
    size_fields: ClassVar[tuple[str, ...]] = SIZE_FIELDS
    """Fields that a published size sets."""
    fixed_fields: ClassVar[tuple[str, ...]] = (
        *size_fields,
        "max_position_embeddings",
        "position_scores",
        "num_buckets",
        "max_distance",
        "shares_projections",
        "normalizes_distances",
        "has_positions",
        "type_vocab_size",
        "embedding_size",
        "convolution_width",
        "convolution_activation",
        "activation",
        "layer_norm_epsilon",
        "legacy_head",
    )
    """Fields that are known from a model's weights, and cannot be chosen anew."""

    def __post_init__(self):
        check_ranges(self)
        check_minimum(self, 0, ("num_buckets", "type_vocab_size", "convolution_width"))
        for name in ("max_distance", "embedding_size"):
            if getattr(self, name) is not None:
                check_minimum(self, 1, (name,))
        check_heads(self)
        if self.convolution_width and self.convolution_width % 2 == 0:
            raise ValueError(
                f"DebertaConfig.convolution_width is {self.convolution_width}: expected 0 or an "
                "odd number, with as many positions on each side"
            )
        if self.convolution_width and self.causal:
            raise ValueError(
                "DebertaConfig.convolution_width must be 0 in a left-to-right model: a convolution "
                "reads the next tokens, too"
            )
        farthest, middle = self.max_position_embeddings - 1, self.num_buckets // 2
        if self.num_buckets == 1 or self.largest_distance - 1 <= middle < farthest:
            raise ValueError(
                f"DebertaConfig.num_buckets is {self.num_buckets}: expected 0, or at least 2 and "
                f"less than twice max_distance - 1 ({self.largest_distance - 1})"
            )
        check_choices(
            self,
            position_scores=POSITION_SCORES,
            activation=ACTIVATIONS,
            pooler_activation=ACTIVATIONS,
            convolution_activation=ACTIVATIONS,
        )

    @classmethod
    def named(cls, size: str, **overrides) -> "DebertaConfig":
        """Returns a published size, one of `SIZES`, with `overrides`."""
        fields = published_size(SIZES, size)
        if size.startswith("v2"):
            fields |= OF_VERSION_2
        return cls(**(fields | overrides))

    @property
    def largest_distance(self) -> int:
        """Larger distances are clipped to this."""
        return self.max_distance or self.max_position_embeddings

    @property
    def span(self) -> int:
        """S, the number of relative embeddings for each direction."""
        return self.num_buckets or self.largest_distance

    @property
    def score_terms(self) -> tuple[str, ...]:
        """The terms of distances in a score."""
        return tuple(filter(None, self.position_scores.split("|")))

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary size rounded up to whole tiles of 128: the rows of the embedding."""
        return pad_to_tiles(self.vocab_size)


def distance_rows(config: DebertaConfig, distances: np.ndarray) -> np.ndarray:
    """Returns the rows of the table for distances, int `[...]`: of a query minus that of a key.

    Version 2 counts near distances one by one, and far ones by their logarithm. In float32, as in
    the released code: whole numbers are rounded up.
    """
    rows, middle = np.array(distances), config.num_buckets // 2
    is_far = (np.abs(rows) > middle) & (config.num_buckets > 0)
    if is_far.any():
        far = rows[is_far]
        farthest = np.log(np.float32((config.largest_distance - 1) / middle))
        share = np.log(np.abs(far).astype(np.float32) / np.float32(middle)) / farthest
        rows[is_far] = np.sign(far) * (np.ceil(share * np.float32(middle - 1)) + middle)
    return np.clip(rows + config.span, 0, 2 * config.span - 1)


class Embeddings(nn.Module):
    """The vectors of tokens, with those of positions or segments if there are any, and LayerNorm.

    Then follows dropout.
    """

    config: DebertaConfig
    dtype: str = "float32"  # Of the result: each later layer computes in the dtype of its input.

    def setup(self):
        config = self.config
        sizes = {
            "num_features": config.embedding_size or config.hidden_size,
            "initializer_range": config.initializer_range,
        }
        self.token_embedding = TokenEmbedding(config.vocab_size, dtype=self.dtype, **sizes)
        if config.has_positions:
            self.position_embedding = Embedding(config.max_position_embeddings, **sizes)
        if config.type_vocab_size:
            self.segment_embedding = Embedding(config.type_vocab_size, **sizes)
        if config.embedding_size:
            self.projection = Dense(config.hidden_size, config.initializer_range, has_bias=False)
        self.layer_norm = LayerNorm(config.layer_norm_epsilon, self.dtype)

    def __call__(
        self,
        tokens: jax.Array,  # int32 [B, L]
        segment_ids: jax.Array,  # int32 [B, L]: 0 for the first segment of a pair, 1 for the second
        position_ids: jax.Array,  # int32 [B, L]: 0, 1, ... in each sequence
        dropout: HiddenDropout | None = None,  # None drops nothing.
    ) -> jax.Array:
        """Returns hidden states `[B, L, H]`."""
        config, x = self.config, self.token_embedding(tokens)
        if config.has_positions:
            x += self.position_embedding(position_ids)
        if config.type_vocab_size:
            x += self.segment_embedding(jnp.minimum(segment_ids, config.type_vocab_size - 1))
        if config.embedding_size:
            x = self.projection(x)
        return apply_dropout(self.layer_norm(x), dropout)


class SharedInputs(NamedTuple):
    """What all layers read beside the hidden states.

    Attributes:
      mask: which positions see each other.
      distances: float32 `[2S, H]`, the relative embeddings; None if scores have no such terms.
    """

    mask: AttentionMask
    distances: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DistanceScores:
    """The terms of distances in a score, as `attention` takes them (`ScoreBias`).

    Products with the vectors of all distances are computed, and shifted, not gathered (Dai et al.,
    2019, appendix B). Rows have up to N positions.

    Attributes:
      keys: `[heads, 2N, head_dim]`, to multiply queries with; row n holds distance N - n. None:
        there is no such term.
      queries: the same, to multiply keys with; row n holds distance n - N. It is divided by the
        root that the queries of `scores` are divided by already.
    """

    keys: jax.Array | None
    queries: jax.Array | None

    def scores(self, query: jax.Array, key: jax.Array, distance: jax.Array | int) -> jax.Array:
        """Returns the terms, float32 `[batch, heads, queries, keys]`; see `ScoreBias`."""
        num_queries, num_keys, total = query.shape[2], key.shape[2], 0.0
        if self.keys is not None:
            start = self.keys.shape[1] // 2 - num_queries + distance
            products = _products(query, self.keys, start, num_queries + num_keys)
            total += align_distances(products, num_keys)
        if self.queries is not None:
            start = self.queries.shape[1] // 2 - num_keys - distance
            products = _products(key, self.queries, start, num_queries + num_keys)
            total += align_distances(products, num_queries).mT
        return total


def _products(x: jax.Array, table: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
    """Returns float32 `[batch, heads, length, size]`: `x` times `size` vectors from `start` on."""
    if table.shape[1] > size:
        table = jax.lax.dynamic_slice_in_dim(table, start, size, axis=1)
    return jnp.einsum("bhid,hrd->bhir", x, table, preferred_element_type=jnp.float32)


class LayerInputs(nn.Module):
    """Builds `SharedInputs` from a batch; the relative embeddings are parameters of its own."""

    config: DebertaConfig

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array]) -> SharedInputs:
        config, distances = self.config, None
        if config.score_terms:
            initializer = nn.initializers.truncated_normal(config.initializer_range)
            shape = 2 * config.span, config.hidden_size
            distances = self.param("distances", initializer, shape, jnp.float32)
            if config.normalizes_distances:
                distances = LayerNorm(config.layer_norm_epsilon, name="layer_norm")(distances)
        return SharedInputs(AttentionMask(batch["sequence_ids"], config.causal), distances)


class EncoderLayer(nn.Module):
    """Disentangled self-attention, then a feed-forward network, each with LayerNorm of the sum.

    `attend` needs all positions of a sequence; `finish` treats each position on its own.

    Attributes:
      config: the model config.
      has_convolution: whether a convolution of its input is added to its output.
    """

    config: DebertaConfig
    has_convolution: bool = False

    def setup(self):
        config = self.config
        size, initial = config.hidden_size, config.initializer_range
        self.query = Dense(size, initial)
        self.key = Dense(size, initial)
        self.value = Dense(size, initial)
        if not config.shares_projections and "c2p" in config.score_terms:
            self.distance_key = Dense(size, initial)
        if not config.shares_projections and "p2c" in config.score_terms:
            self.distance_query = Dense(size, initial)
        self.attention_output = RowParallelDense(size, initial)
        self.attention_layer_norm = LayerNorm(config.layer_norm_epsilon)
        self.intermediate = Dense(config.intermediate_size, initial)
        self.output = RowParallelDense(size, initial)
        self.output_layer_norm = LayerNorm(config.layer_norm_epsilon)
        if self.has_convolution:
            self.convolution = Convolution(config.convolution_width, initial)
            self.convolution_layer_norm = LayerNorm(config.layer_norm_epsilon)

    @property
    def dropout_places(self) -> Mapping[str, str | OfTable]:
        """Where it drops elements, and the rate of each place."""
        places = {"attention": "attention_rate", "attention_output": "rate", "output": "rate"}
        if self.config.score_terms:
            places["distances"] = OfTable("rate", 2 * self.config.span)
        if self.has_convolution:
            places["convolution"] = "rate"
        return places

    def __call__(self, x: jax.Array, inputs: SharedInputs, dropout: LayerDropout) -> jax.Array:
        """Maps hidden states `[B, L, H]` to those after this layer."""
        return self.finish(x, self.attend(x, inputs, dropout), dropout)

    def attend(
        self,
        x: jax.Array,
        inputs: SharedInputs,
        dropout: LayerDropout,
        queries: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        """Returns the weighted values of all heads, joined, `[B, L, H]`.

        With a convolution, its result, too. `queries`, `[B, L, H]`, are other hidden states than
        those that are attended to (section 3.2: the enhanced mask decoder); None: the same.
        """
        query, key, bias = self._terms(x, inputs, dropout, queries)
        context = attention(
            query,
            key,
            self.value(x),
            inputs.mask,
            num_heads=self.config.num_heads,
            dropout=dropout.get("attention"),
            bias=bias,
        )
        if not self.has_convolution:
            return (context,)
        convolved = self.convolution(x, inputs.mask.sequence_ids)
        convolved = apply_dropout(convolved, dropout.get("convolution"))
        return context, activate(self.config.convolution_activation, convolved)

    def finish(
        self, x: jax.Array, attended: tuple[jax.Array, ...], dropout: LayerDropout
    ) -> jax.Array:
        """Returns the layer's output for its input `x` and the result of `attend`."""
        context, *convolved = attended
        y = self.attention_output(context)  # [B, L, H]
        x = self.attention_layer_norm(add_with_dropout(x, y, dropout.get("attention_output")))
        y = activate(self.config.activation, self.intermediate(x))  # [B, L, intermediate_size]
        y = self.output(y)  # [B, L, H]
        x = self.output_layer_norm(add_with_dropout(x, y, dropout.get("output")))
        return self.convolution_layer_norm(x + convolved[0]) if convolved else x

    def scores(self, x: jax.Array, inputs: SharedInputs) -> tuple[jax.Array, AttentionMask]:
        """Returns attention scores, float32 `[B, heads, L, L]`, and the mask of their softmax."""
        query, key, bias = self._terms(x, inputs, {})
        return scaled_scores(query, key, self.config.num_heads, bias), inputs.mask

    def _terms(
        self,
        x: jax.Array,
        inputs: SharedInputs,
        dropout: LayerDropout,
        queries: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, DistanceScores | None]:
        """Returns queries and keys, `[B, L, H]`, and what is added to their products.

        All terms of a score are divided by one root (section 3.1), of which attention divides by
        that of a head's size.
        """
        config, query = self.config, self.query(x if queries is None else queries)
        query, key = query / math.sqrt(1 + len(config.score_terms)), self.key(x)
        if not config.score_terms:
            return query, key, None
        # The same for all rows: what is dropped of it, too.
        table = apply_dropout(inputs.distances[None], dropout.get("distances"))[0]
        length = x.shape[1]
        if length > LONGEST_PLAIN_ROW:  # Which attention reads by whole blocks.
            length = -(-length // BLOCK) * BLOCK
        to_key = length - np.arange(2 * length)
        keys = values = None
        if "c2p" in config.score_terms:
            project = self.key if config.shares_projections else self.distance_key
            keys = self._project(project, table[distance_rows(config, to_key)].astype(x.dtype))
        if "p2c" in config.score_terms:
            project = self.query if config.shares_projections else self.distance_query
            values = self._project(project, table[distance_rows(config, -to_key)].astype(x.dtype))
            head_dim = config.hidden_size // config.num_heads
            values /= math.sqrt(head_dim * (1 + len(config.score_terms)))
        return query, key, DistanceScores(keys, values)

    def _project(self, project: nn.Module, distances: jax.Array) -> jax.Array:
        """Returns `[heads, 2N, head_dim]` of the relative embeddings, `[2N, H]`."""
        return split_heads(project(distances)[None], self.config.num_heads)[0]


class Convolution(nn.Module):
    """A convolution over the positions of each sequence, beyond whose ends there are zeros."""

    width: int
    initializer_range: float

    @nn.compact
    def __call__(self, x: jax.Array, sequence_ids: jax.Array) -> jax.Array:
        """Maps `[B, L, H]` to `[B, L, H]`; `sequence_ids` are int32 `[B, L]`."""
        (length, size), half = x.shape[1:], self.width // 2
        initializer = nn.initializers.truncated_normal(self.initializer_range)
        kernel = self.param("kernel", initializer, (self.width, size, size), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (size,), jnp.float32)
        padded = jnp.pad(x, ((0, 0), (half, half), (0, 0)))
        padded_ids = jnp.pad(sequence_ids, ((0, 0), (half, half)))
        read = []
        for start in range(self.width):
            is_same = padded_ids[:, start : start + length] == sequence_ids
            read.append(jnp.where(is_same[..., None], padded[:, start : start + length], 0))
        matrix = kernel.reshape(-1, size).astype(x.dtype)
        return jnp.concatenate(read, axis=-1) @ matrix + bias.astype(x.dtype)


def encoder_layers(config: DebertaConfig) -> tuple[EncoderLayer, ...]:
    """Returns the layers in their order: all but the first are alike."""
    first = EncoderLayer(config, has_convolution=config.convolution_width > 0, parent=None)
    return first, *(EncoderLayer(config, parent=None),) * (config.num_layers - 1)


# What follows is the same for each architecture's file; see model/architecture.py.
Config = DebertaConfig
Last = Identity  # DeBERTa has nothing between its last layer and its heads.
# They compute what BERT's do.
LmHead, Pooler, PairHead = bert.MaskedLmHead, bert.Pooler, bert.NextSentenceHead
FAST_PATH = "bert_jax.model.tpu_kernels.deberta_layer"

# Which axes of the mesh shard a parameter: the first regular expression that is found in its path
# decides. "mlm" is LmHead, "nsp" PairHead, and "layers" all encoder layers, stacked on axis 0.
_FROM_HIDDEN = "query|key|value|distance_query|distance_key|intermediate"
RULES = (
    (r"token_embedding/embedding$", EMBEDDING_SPEC),
    (r"(position|segment)_embedding/embedding$", P()),
    (r"layer_inputs/distances$", P()),
    (r"convolution/kernel$", P()),
    (rf"layers/({_FROM_HIDDEN})/kernel$", P(None, "fsdp", "tensor")),
    (rf"layers/({_FROM_HIDDEN})/bias$", P(None, "tensor")),
    (r"layers/(attention_output|output)/kernel$", P(None, "tensor", "fsdp")),
    (r"(pooler/dense|mlm/transform|embeddings/projection)/kernel$", P("fsdp", "tensor")),
    (r"mlm/bias$", P("tensor")),
    (r"(bias|scale|nsp/dense/kernel)$", P()),
)


def flops_per_row(
    config: DebertaConfig, length: int, num_outputs: int, num_targets: int, num_pairs: int
) -> float:
    """Returns the FLOPs of the matrix products of a forward pass for one row of `length`.

    Two per multiply-add; attention is over the whole row. Each term of distances is a product with
    those relative embeddings that a row can reach (section 3.1.1: at most 2S of them), although
    `DistanceScores` computes it for all 2L distances. The last layer finishes `num_outputs`
    positions; `num_targets` tokens and `num_pairs` pairs are predicted. The projections of the
    relative embeddings, once for a batch, gathers, LayerNorm and softmax are not counted.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    attend = length * 3 * hidden**2 + 2 * length**2 * hidden
    attend += len(config.score_terms) * length * 2 * min(config.span, length) * hidden
    finish = hidden**2 + 2 * hidden * inner  # For one position.
    positions = (config.num_layers - 1) * length + num_outputs
    embedding_size = config.embedding_size or hidden
    lm_head = hidden * embedding_size + embedding_size * config.padded_vocab_size
    pair_head = hidden**2 + 2 * hidden
    layers = config.num_layers * attend + positions * finish
    layers += length * config.convolution_width * hidden**2
    if config.embedding_size:
        layers += length * embedding_size * hidden
    return 2.0 * (layers + num_targets * lm_head + num_pairs * pair_head)
