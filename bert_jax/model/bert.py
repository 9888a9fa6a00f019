"""BERT (Devlin et al., 2018, section 3): every part of the model, in the order of computation.

    tokens -> Embeddings -> EncoderLayer, num_layers times -> hidden states, one for each token
        hidden states at the positions to predict -> MaskedLmHead -> logits over the vocabulary
        hidden state of [CLS] -> Pooler -> NextSentenceHead -> logits of IsNext and NotNext

`model/encoder.py` repeats the layer; `objectives/masked_lm.py` adds the heads. In shapes, B is the
number of rows of a batch, L the length of a row, H the hidden size, K the number of positions to
predict in a row, V the size of the vocabulary with its padding. A row holds up to S sequences, each
`[CLS] A [SEP] B [SEP]`, that attend only within themselves.

Its descendants are model configs of the same modules, as docs/families.md lists them. For BERT,
the activation is GELU, the pooler's is tanh, and dropout has a rate of 0.1.
"""

from collections.abc import Mapping
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from bert_jax.model.attention import attention, scaled_scores
from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.config import BertConfig
from bert_jax.model.dropout import HiddenDropout, LayerDropout, add_with_dropout, apply_dropout
from bert_jax.model.layers import (
    Dense,
    Embedding,
    Identity,
    LayerNorm,
    RowParallelDense,
    TokenEmbedding,
    activate,
)
from bert_jax.sharding.rules import EMBEDDING_SPEC


class Embeddings(nn.Module):
    """The sum of three embeddings, then LayerNorm and dropout (figure 2)."""

    config: BertConfig
    dtype: str = "float32"  # The dtype of the output. Later layers compute in that of their input.

    def setup(self):
        config = self.config
        sizes = {
            "num_features": config.embedding_size or config.hidden_size,
            "initializer_range": config.initializer_range,
        }
        self.token_embedding = TokenEmbedding(config.vocab_size, dtype=self.dtype, **sizes)
        num_positions = config.position_offset + config.max_position_embeddings
        self.position_embedding = Embedding(num_positions, **sizes)
        if config.type_vocab_size:
            self.segment_embedding = Embedding(config.type_vocab_size, **sizes)
        if config.num_task_embeddings:
            self.task_embedding = Embedding(config.num_task_embeddings, **sizes)
        self.layer_norm = LayerNorm(config.layer_norm_epsilon, self.dtype)
        if config.embedding_size:  # ALBERT and ELECTRA factorize the table of tokens.
            self.projection = Dense(config.hidden_size, config.initializer_range)

    def __call__(
        self,
        tokens: jax.Array,  # int32 [B, L]
        segment_ids: jax.Array,  # int32 [B, L]: 0 for the first segment of a pair, 1 for the second
        position_ids: jax.Array,  # int32 [B, L]: 0, 1, ... in each sequence
        dropout: HiddenDropout | None = None,  # None drops nothing.
    ) -> jax.Array:
        """Returns hidden states `[B, L, H]`."""
        x = self.token_embedding(tokens)
        x += self.position_embedding(self.config.position_offset + position_ids)
        if self.config.type_vocab_size:
            # RoBERTa has one segment, whose vector it adds to all tokens.
            x += self.segment_embedding(jnp.minimum(segment_ids, self.config.type_vocab_size - 1))
        if self.config.num_task_embeddings:  # Always ERNIE's first task.
            x += self.task_embedding(jnp.zeros_like(tokens))
        x = apply_dropout(self.layer_norm(x), dropout)
        return self.projection(x) if self.config.embedding_size else x


class LayerInputs(nn.Module):
    """Builds what all layers read beside the hidden states: which positions see each other."""

    config: BertConfig

    def __call__(self, batch: dict[str, jax.Array]) -> AttentionMask:
        return AttentionMask(
            batch["sequence_ids"], self.config.causal, is_hidden=batch.get("is_hidden")
        )


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network (Vaswani et al., 2017, section 3.1).

    Each of the two ends with dropout, the residual connection, and LayerNorm. `attend` needs all
    positions of a sequence; `finish` treats each position on its own.
    """

    config: BertConfig

    # Where it drops elements, and the rate of each place: one of `Dropout`.
    dropout_places: ClassVar[Mapping[str, str]] = {
        "attention": "attention_rate",
        "attention_output": "rate",
        "output": "rate",
    }

    def setup(self):
        config = self.config
        size, initializer_range = config.hidden_size, config.initializer_range
        self.query = Dense(size, initializer_range)
        # A bias of keys would add the same to all scores of a query, which softmax ignores: its
        # gradient is only rounding, which Adam would scale to the size of other updates.
        self.key = Dense(size, initializer_range, adds_bias=False)
        self.value = Dense(size, initializer_range)
        # Computes what Dense computes; `model/layers.py` says how they differ.
        self.attention_output = RowParallelDense(size, initializer_range)
        self.attention_layer_norm = LayerNorm(config.layer_norm_epsilon)
        self.intermediate = Dense(config.intermediate_size, initializer_range)
        self.output = RowParallelDense(size, initializer_range)
        self.output_layer_norm = LayerNorm(config.layer_norm_epsilon)

    def __call__(self, x: jax.Array, mask: AttentionMask, dropout: LayerDropout) -> jax.Array:
        """Maps hidden states `[B, L, H]` to those after this layer."""
        return self.finish(x, self.attend(x, mask, dropout), dropout)

    def attend(self, x: jax.Array, mask: AttentionMask, dropout: LayerDropout) -> jax.Array:
        """Returns the weighted values of all heads, joined, `[B, L, H]`."""
        return attention(
            self.query(x),
            self.key(x),
            self.value(x),
            mask,
            num_heads=self.config.num_heads,
            dropout=dropout.get("attention"),
        )

    def finish(self, x: jax.Array, context: jax.Array, dropout: LayerDropout) -> jax.Array:
        """Returns the layer's output for its input `x` and `context`, the result of `attend`."""
        y = self.attention_output(context)  # [B, L, H]
        x = self.attention_layer_norm(add_with_dropout(x, y, dropout.get("attention_output")))
        y = activate(self.config.activation, self.intermediate(x))  # [B, L, intermediate_size]
        y = self.output(y)  # [B, L, H]
        return self.output_layer_norm(add_with_dropout(x, y, dropout.get("output")))

    def scores(self, x: jax.Array, mask: AttentionMask) -> tuple[jax.Array, AttentionMask]:
        """Returns attention scores, float32 `[B, heads, L, L]`, and the mask of their softmax.

        They have the bias of keys, which `attend` leaves out.
        """
        key_bias = self.key.variables["params"]["bias"]
        key = self.key(x) + key_bias.astype(x.dtype)
        return scaled_scores(self.query(x), key, self.config.num_heads), mask


def encoder_layers(config: BertConfig) -> tuple[EncoderLayer, ...]:
    """Returns the layers in their order: all are alike."""
    return (EncoderLayer(config, parent=None),) * config.num_layers


class Pooler(nn.Module):
    """Turns the hidden state of [CLS] into a vector for the whole sequence."""

    config: BertConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[B, S, H]` to `[B, S, H]`."""
        config = self.config
        x = Dense(config.hidden_size, config.initializer_range, name="dense")(x)
        return activate(config.pooler_activation, x)


class MaskedLmHead(nn.Module):
    """Predicts tokens from the hidden states at their positions (section 3.1, task 1).

    The last product shares its matrix with the token embedding. In a left-to-right model the head
    predicts the next token instead.
    """

    config: BertConfig

    @nn.compact
    def __call__(self, x: jax.Array, token_embedding: TokenEmbedding) -> jax.Array:
        """Returns float32 logits `[B, K, V]` for hidden states `[B, K, H]`."""
        config = self.config
        size = config.embedding_size or config.hidden_size
        x = Dense(size, config.initializer_range, name="transform")(x)
        x = activate(config.activation, x)
        x = LayerNorm(config.layer_norm_epsilon, name="layer_norm")(x)
        shape = (token_embedding.padded_vocab_size,)
        bias = self.param("bias", nn.initializers.zeros, shape, jnp.float32)
        return token_embedding.logits(x, bias)


class NextSentenceHead(nn.Module):
    """Predicts whether the second segment follows the first in its text (section 3.1, task 2)."""

    config: BertConfig

    @nn.compact
    def __call__(self, pooled: jax.Array) -> jax.Array:
        """Maps `[B, S, H]` to float32 logits `[B, S, 2]`: IsNext and NotNext."""
        initializer = nn.initializers.truncated_normal(self.config.initializer_range)
        dense = nn.Dense(2, dtype=jnp.float32, kernel_init=initializer, name="dense")
        return dense(pooled)


# What follows is the same for each architecture's file; see model/architecture.py.
Config, LmHead, PairHead = BertConfig, MaskedLmHead, NextSentenceHead
Last = Identity  # BERT has nothing between its last layer and its heads.
FAST_PATH = "bert_jax.model.tpu_kernels.layer"

# Which axes of the mesh shard a parameter: the first regular expression that is found in its path
# decides. "mlm" is MaskedLmHead, "nsp" NextSentenceHead, and "layers" all encoder layers, stacked
# on axis 0.
RULES = (
    (r"token_embedding/embedding$", EMBEDDING_SPEC),
    (r"(position|segment|task)_embedding/embedding$", P()),
    (r"layers/(query|key|value|intermediate)/kernel$", P(None, "fsdp", "tensor")),
    (r"layers/(query|key|value|intermediate)/bias$", P(None, "tensor")),
    (r"layers/(attention_output|output)/kernel$", P(None, "tensor", "fsdp")),
    (r"(pooler/dense|mlm/transform|embeddings/projection)/kernel$", P("fsdp", "tensor")),
    (r"mlm/bias$", P("tensor")),
    (r"(bias|scale|nsp/dense/kernel)$", P()),
)


def flops_per_row(
    config: BertConfig, length: int, num_outputs: int, num_targets: int, num_pairs: int
) -> float:
    """Returns the FLOPs of the matrix products of a forward pass for one row of `length`.

    Two per multiply-add; attention is over the whole row, however it is packed. The last layer
    finishes `num_outputs` positions; `num_targets` tokens and `num_pairs` pairs are predicted.
    Gathers, LayerNorm and softmax are not counted.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    attend = length * 3 * hidden**2 + 2 * length**2 * hidden
    finish = hidden**2 + 2 * hidden * inner  # For one position.
    positions = (config.num_layers - 1) * length + num_outputs
    embedding_size = config.embedding_size or hidden
    lm_head = hidden * embedding_size + embedding_size * config.padded_vocab_size
    pair_head = hidden**2 + 2 * hidden
    layers = config.num_layers * attend + positions * finish
    if config.embedding_size:
        layers += length * embedding_size * hidden
    return 2.0 * (layers + num_targets * lm_head + num_pairs * pair_head)
