"""SpanBERT's model: an encoder, the masked-LM head, and the span-boundary head."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.model import pretraining
from bert_jax.model.architecture import architecture_of
from bert_jax.model.dropout import Dropout
from bert_jax.model.encoder import Encoder, is_few
from bert_jax.model.execution import Execution
from bert_jax.model.layers import Dense, Embedding, LayerNorm, TokenEmbedding, activate

POSITION_SIZE = 200
"""Size of the position embeddings (Joshi et al., 2020, section 4.2)."""
NUM_PLACES = 64
"""Places in a span with an embedding of their own; all later ones share the last. A span of 10
words rarely has half as many pieces."""
EPSILON = 1e-12  # Of LayerNorm, as in BERT.


class SpanBoundaryHead(nn.Module):
    """Predicts a token of a span from the two tokens around the span (section 3.2).

    The last product shares its matrix with the token embedding, as in the masked-LM head.
    """

    config: object

    @nn.compact
    def __call__(
        self,
        left: jax.Array,  # [B, K, H], hidden states of the last token before each target's span
        right: jax.Array,  # [B, K, H], of the first token after it
        places: jax.Array,  # int32 [B, K]: 0, 1, ... in the span
        token_embedding: TokenEmbedding,
    ) -> jax.Array:
        """Returns float32 logits `[B, K, padded_vocab]`."""
        initializer_range = self.config.initializer_range
        position_embedding = Embedding(
            NUM_PLACES, POSITION_SIZE, initializer_range, name="position_embedding"
        )
        position = position_embedding(jnp.clip(places, 0, NUM_PLACES - 1)).astype(left.dtype)
        x = jnp.concatenate([left, right, position], axis=-1)
        x = activate("gelu", Dense(self.config.hidden_size, initializer_range, name="dense_1")(x))
        x = LayerNorm(EPSILON, name="layer_norm_1")(x)
        x = activate(
            "gelu", Dense(token_embedding.num_features, initializer_range, name="dense_2")(x)
        )
        x = LayerNorm(EPSILON, name="layer_norm_2")(x)
        shape = (token_embedding.padded_vocab_size,)
        bias = self.param("bias", nn.initializers.zeros, shape, jnp.float32)
        return token_embedding.logits(x, bias)


class SpanBoundaryModel(nn.Module):
    """Encoder, masked-LM head ("mlm"), and span-boundary head ("sbo").

    Attributes:
      config: of the architecture.
      execution: how it runs.
    """

    config: object
    execution: Execution = Execution()

    def setup(self):
        self.encoder = Encoder(self.config, self.execution)
        self.mlm = architecture_of(self.config).LmHead(self.config)
        self.sbo = SpanBoundaryHead(self.config)

    def __call__(
        self, batch: dict[str, jax.Array], dropout: Dropout | float | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns float32 logits `[B, K, padded_vocab]` of both heads.

        The batch has the inputs of `Encoder`, and int32 `[B, K]` `target_positions`, to predict
        tokens at, `left_positions`, `right_positions` and `places`, as of `span_boundaries`.
        """
        names = "target_positions", "left_positions", "right_positions"
        positions = jnp.concatenate([batch[name] for name in names], axis=1)
        targets, left, right = jnp.split(self.encoder(batch, dropout, positions), 3, axis=1)
        token_embedding = self.encoder.embeddings.token_embedding
        return (
            self.mlm(targets, token_embedding),
            self.sbo(left, right, batch["places"], token_embedding),
        )


def example_batch() -> dict[str, jax.Array]:
    """Returns the smallest batch, to initialize the parameters."""
    batch = pretraining.example_batch()
    return batch | dict.fromkeys(
        ("left_positions", "right_positions", "places"), batch["target_positions"]
    )


def flops_per_row(config, length: int, num_targets: int) -> float:
    """Returns the FLOPs of the matrix products of one training step for one row.

    As `pretraining.flops_per_row`; the last layer finishes three positions for each target.
    """
    hidden = config.hidden_size
    embedding_size = getattr(config, "embedding_size", None) or hidden
    span_head = (2 * hidden + POSITION_SIZE) * hidden
    span_head += hidden * embedding_size + embedding_size * config.padded_vocab_size
    num_outputs = 3 * num_targets
    forward = architecture_of(config).flops_per_row(
        config,
        length,
        num_outputs=num_outputs if is_few(num_outputs, length) else length,
        num_targets=num_targets,
        num_pairs=0,
    )
    return 3 * (forward + 2.0 * num_targets * span_head)
