"""The feature-based approach (Devlin et al., 2018, section 5.3): a BiLSTM on a frozen encoder.

Each step recomputes the features: the encoder's forward pass costs less than the BiLSTM.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.model.dropout import Dropout, as_dropout, dropout_at
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.lstm_models import both_directions

FEATURES = {
    "embeddings": (0,),
    "last": (-1,),
    "second_to_last": (-2,),
    "sum_last_four": (-4, -3, -2, -1),
    "concat_last_four": (-4, -3, -2, -1),
    "weighted_sum": None,
}
"""Encoder layers that each choice reads; 0 is the embeddings, None is all layers except 0."""


class FeatureBasedTagger(nn.Module):
    """Encoder, a choice of its layers, two BiLSTM layers, and a dense layer.

    All parameters but the encoder's are under `head` in the tree. The encoder gets no gradient and
    no dropout; the input and output of the BiLSTM have dropout.
    """

    config: object
    num_outputs: int
    features: str
    lstm_size: int = 768
    plan: ExecutionPlan = ExecutionPlan()

    def setup(self):
        self.encoder = Encoder(self.config, self.plan)
        self.head = BiLstmHead(self.num_outputs, self.features, self.lstm_size)

    def __call__(
        self, batch: dict[str, jax.Array], dropout: Dropout | float | None = None
    ) -> jax.Array:
        """Returns float32 `[B, L, outputs]`; takes the arguments of a `PositionModel`."""
        dropout = as_dropout(self, dropout, len(batch["tokens"]))
        states = jax.lax.stop_gradient(self.encoder.all_hidden_states(batch)).astype(jnp.float32)
        return self.head(states, batch["sequence_ids"], dropout)


class BiLstmHead(nn.Module):
    """Tags positions from the hidden states of all layers; see `FeatureBasedTagger`."""

    num_outputs: int
    features: str
    lstm_size: int

    @nn.compact
    def __call__(self, states, sequence_ids, dropout=None) -> jax.Array:
        """Maps `[1 + layers, B, L, H]` and int32 `[B, L]` to float32 `[B, L, outputs]`."""
        if self.features == "weighted_sum":
            # ELMo's scalar mix (Peters et al., 2018), without weight decay, like any scale.
            layers = states[1:]
            scale = self.param("scale", nn.initializers.zeros, (len(layers),), jnp.float32)
            x = jnp.tensordot(jax.nn.softmax(scale), layers, axes=1)
        else:
            x = choose_features(states, self.features)
        for number in (1, 2):
            x = dropout_at(dropout, f"bilstm_{number}", x)
            x = both_directions(self, x, sequence_ids, self.lstm_size, number)
        x = dropout_at(dropout, "head", x)
        return nn.Dense(self.num_outputs, dtype=jnp.float32, name="output")(x)


def choose_features(states: jax.Array, features: str) -> jax.Array:
    """Maps `[1 + layers, B, L, H]` to `[B, L, H]`, or `[B, L, 4 * H]` for a concatenation."""
    chosen = [states[layer] for layer in FEATURES[features]]
    return jnp.concatenate(chosen, axis=-1) if features == "concat_last_four" else sum(chosen)
