"""BERT (Devlin et al., 2018, section 3): every part of the model, in the order of computation.

    tokens -> Embeddings -> EncoderLayer, num_layers times -> hidden states, one for each token
        hidden states at masked positions -> MaskedLmHead -> logits over the vocabulary
        hidden state of [CLS] -> Pooler -> NextSentenceHead -> logits of IsNext and NotNext

`model/encoder.py` stacks the layers; `model/pretraining.py` adds the heads. In shapes, B is the
number of rows of a batch, L the length of a row, H the hidden size. A row may hold several
sequences, such as `[CLS] A [SEP] B [SEP]`, each of which attends only within itself.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from bert_jax.model.attention import attention
from bert_jax.model.config import BertConfig
from bert_jax.model.dropout import HiddenDropout, LayerDropout, add_dropout, apply_dropout
from bert_jax.model.layers import Dense, Embedding, LayerNorm, OutputDense, TokenEmbedding, gelu
from bert_jax.sharding.rules import EMBEDDING_SPEC

Config = BertConfig


class Embeddings(nn.Module):
    """The sum of three embeddings, then LayerNorm and dropout (figure 2)."""

    config: BertConfig
    dtype: str = "float32"  # Of the hidden states of the whole model.

    def setup(self):
        config = self.config
        size, initializer_range = config.hidden_size, config.initializer_range
        self.token_embedding = TokenEmbedding(
            config.vocab_size, size, initializer_range, self.dtype
        )
        self.position_embedding = Embedding(config.max_position_embeddings, size, initializer_range)
        self.segment_embedding = Embedding(config.type_vocab_size, size, initializer_range)
        self.layer_norm = LayerNorm(config.layer_norm_epsilon, self.dtype)

    def __call__(
        self,
        tokens: jax.Array,  # int32 [B, L]
        segment_ids: jax.Array,  # int32 [B, L]: 0 for the first segment of a pair, 1 for the second
        position_ids: jax.Array,  # int32 [B, L]: 0, 1, ... in each sequence
        dropout: HiddenDropout | None = None,
    ) -> jax.Array:
        """Returns hidden states `[B, L, H]`."""
        x = self.token_embedding(tokens)
        x += self.position_embedding(position_ids)
        x += self.segment_embedding(segment_ids)
        return apply_dropout(self.layer_norm(x), dropout)


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network (Vaswani et al., 2017, section 3.1).

    Each of the two is followed by dropout, the residual connection, and LayerNorm.
    """

    config: BertConfig

    def setup(self):
        config = self.config
        size, initializer_range = config.hidden_size, config.initializer_range
        self.query = Dense(size, initializer_range)
        self.key = Dense(size, initializer_range)
        self.value = Dense(size, initializer_range)
        self.attention_output = OutputDense(size, initializer_range)
        self.attention_layer_norm = LayerNorm(config.layer_norm_epsilon)
        self.intermediate = Dense(config.intermediate_size, initializer_range)
        self.output = OutputDense(size, initializer_range)
        self.output_layer_norm = LayerNorm(config.layer_norm_epsilon)

    def __call__(
        self,
        x: jax.Array,  # [B, L, H]
        sequence_ids: jax.Array,  # int32 [B, L]: 1, 2, ... for each sequence, 0 for padding
        dropout: LayerDropout = LayerDropout(),
    ) -> jax.Array:
        """Returns the hidden states after this layer, `[B, L, H]`."""
        return self.transform(x, self.attend(x, sequence_ids, dropout), dropout)

    def attend(self, x: jax.Array, sequence_ids: jax.Array, dropout: LayerDropout) -> jax.Array:
        """Returns what each position reads from its sequence, `[B, L, H]`."""
        return attention(
            self.query(x),
            self.key(x),
            self.value(x),
            sequence_ids,
            num_heads=self.config.num_heads,
            causal=self.config.causal,
            dropout=dropout.attention,
        )

    def transform(self, x: jax.Array, context: jax.Array, dropout: LayerDropout) -> jax.Array:
        """Adds `context`, what `attend` returned, to `x`; then treats each position on its own."""
        y = self.attention_output(context)
        x = self.attention_layer_norm(add_dropout(x, y, dropout.attention_output))
        y = gelu(self.intermediate(x))  # [B, L, intermediate_size]
        y = self.output(y)
        return self.output_layer_norm(add_dropout(x, y, dropout.output))


class Pooler(nn.Module):
    """Turns the hidden state of [CLS] into a vector for the whole sequence."""

    config: BertConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., H]` to `[..., H]`."""
        config = self.config
        return jnp.tanh(Dense(config.hidden_size, config.initializer_range, name="dense")(x))


class MaskedLmHead(nn.Module):
    """Predicts tokens from the hidden states at their positions (section 3.1, task 1).

    The output layer shares its matrix with the token embedding. In a left-to-right model it
    predicts the next token.
    """

    config: BertConfig

    @nn.compact
    def __call__(self, x: jax.Array, token_embedding: TokenEmbedding) -> jax.Array:
        """Returns float32 logits `[B, K, padded_vocab]` for hidden states `[B, K, H]`."""
        config = self.config
        x = gelu(Dense(config.hidden_size, config.initializer_range, name="transform")(x))
        x = LayerNorm(config.layer_norm_epsilon, name="layer_norm")(x)
        shape = (token_embedding.num_rows,)  # Rounded up to whole tiles.
        bias = self.param("bias", nn.initializers.zeros, shape, jnp.float32)
        return token_embedding.logits(x, bias)


class NextSentenceHead(nn.Module):
    """Predicts whether the second segment follows the first in its text (section 3.1, task 2)."""

    config: BertConfig

    @nn.compact
    def __call__(self, pooled: jax.Array) -> jax.Array:
        """Maps `[..., H]` to float32 logits `[..., 2]`: 0 is IsNext, 1 is NotNext."""
        initializer = nn.initializers.truncated_normal(self.config.initializer_range)
        dense = nn.Dense(2, dtype=jnp.float32, kernel_init=initializer, name="dense")
        return dense(pooled)


LmHead, PairHead = MaskedLmHead, NextSentenceHead

# Which axes of the mesh shard a parameter: the first pattern that its path contains decides.
# Axis 0 of everything under `layers` is the layer.
RULES = (
    (r"token_embedding/embedding$", EMBEDDING_SPEC),
    (r"(position|segment)_embedding/embedding$", P()),
    (r"layers/(query|key|value|intermediate)/kernel$", P(None, "fsdp", "tensor")),
    (r"layers/(query|key|value|intermediate)/bias$", P(None, "tensor")),
    (r"layers/(attention_output|output)/kernel$", P(None, "tensor", "fsdp")),
    (r"(pooler/dense|mlm/transform)/kernel$", P("fsdp", "tensor")),
    (r"mlm/bias$", P("tensor")),
    (r"(bias|scale|nsp/dense/kernel)$", P()),
)


def flops_per_row(
    config: BertConfig, length: int, num_outputs: int, num_targets: int, num_pairs: int
) -> float:
    """Returns the FLOPs of the matrix products for one row of `length`, two per multiply-add.

    The last layer transforms `num_outputs` positions; `num_targets` tokens and `num_pairs` pairs
    are predicted. Gathers, LayerNorm and softmax are not counted.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    attend = length * 3 * hidden**2 + 2 * length**2 * hidden
    transform = hidden**2 + 2 * hidden * inner  # For one position.
    positions = (config.num_layers - 1) * length + num_outputs
    lm_head = hidden**2 + hidden * config.padded_vocab_size
    pair_head = hidden**2 + 2 * hidden
    layers = config.num_layers * attend + positions * transform
    return 2.0 * (layers + num_targets * lm_head + num_pairs * pair_head)
