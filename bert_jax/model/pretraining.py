"""The model that is pre-trained: an encoder and its heads for tokens and for pairs of segments."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.model.architecture import architecture_of
from bert_jax.model.dropout import Dropout
from bert_jax.model.encoder import Encoder, is_few
from bert_jax.model.execution import Execution


class PretrainingModel(nn.Module):
    """Encoder, head for tokens ("mlm"), and head for pairs ("nsp").

    Attributes:
      config: of the architecture.
      next_sentence: False: without head for pairs and pooler (section 5.1, "No NSP").
      execution: how it runs.
    """

    config: object
    next_sentence: bool = True
    execution: Execution = Execution()

    def setup(self):
        architecture = architecture_of(self.config)
        self.encoder = Encoder(self.config, self.execution)
        self.mlm = architecture.LmHead(self.config)
        if self.next_sentence:
            self.nsp = architecture.PairHead(self.config)

    def __call__(
        self, batch: dict[str, jax.Array], dropout: Dropout | float | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns float32 logits `[B, K, padded_vocab]` and `[B, S, 2]`, or None without that head.

        The batch has the inputs of `Encoder`, and int32 `target_positions` `[B, K]`, to predict
        tokens at, and `pooled_positions` `[B, S]`, one for each sequence.
        """
        positions = target_positions = batch["target_positions"]
        if self.next_sentence:
            positions = jnp.concatenate([positions, batch["pooled_positions"]], axis=1)
        hidden = self.encoder(batch, dropout, positions)
        targets, pooled = jnp.split(hidden, [target_positions.shape[1]], axis=1)
        logits = self.mlm(targets, self.encoder.embeddings.token_embedding)
        return logits, self.nsp(self.encoder.pool(pooled)) if self.next_sentence else None

    def predict_tokens(self, batch: dict[str, jax.Array], positions: jax.Array) -> jax.Array:
        """Returns float32 logits `[B, K, padded_vocab]` at int32 `[B, K]` positions."""
        hidden = self.encoder(batch, positions=positions)
        return self.mlm(hidden, self.encoder.embeddings.token_embedding)


def example_batch() -> dict[str, jax.Array]:
    """Returns the smallest batch, to initialize the parameters."""
    ids = jnp.zeros((1, 2), jnp.int32)
    names = "tokens", "segment_ids", "position_ids", "sequence_ids"
    return dict.fromkeys((*names, "target_positions", "pooled_positions"), ids)


def flops_per_row(
    config, length: int, num_targets: int, max_sequences: int, next_sentence: bool
) -> float:
    """Returns the FLOPs of the matrix products of one training step for one row.

    Three passes (forward, gradients of inputs, gradients of weights) with attention over the whole
    row. What follows attention in the last layer is counted where it is computed.
    """
    num_pairs = max_sequences * next_sentence
    num_outputs = num_targets + num_pairs
    forward = architecture_of(config).flops_per_row(
        config,
        length,
        num_outputs=num_outputs if is_few(num_outputs, length) else length,
        num_targets=num_targets,
        num_pairs=num_pairs,
    )
    return 3 * forward
