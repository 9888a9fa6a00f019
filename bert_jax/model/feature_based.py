"""The feature-based approach (Devlin et al., 2018, section 5.3, table 7): a frozen encoder, and a
BiLSTM that tags words from its hidden states.

The features are computed anew in each step: the encoder's forward pass costs less than the BiLSTM,
and nothing has to be kept.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.data.unpacking import unpack_rows
from bert_jax.model.bert import Bert
from bert_jax.model.config import BertConfig
from bert_jax.model.dropout import dropout

FEATURES = {
    "embeddings": (0,),
    "last": (-1,),
    "second_to_last": (-2,),
    "sum_last_four": (-4, -3, -2, -1),
    "concat_last_four": (-4, -3, -2, -1),
    "weighted_sum": None,
}
"""What of the encoder is read, and from which layers: 0 are the embeddings; None: all, without
the embeddings."""


class FeatureBasedTagger(nn.Module):
    """Encoder, a choice of its layers, two layers of BiLSTM, and a dense one.

    All but the encoder lies under `head` in the parameter tree. No gradient reaches the encoder,
    and it has no dropout; the BiLSTM's input and output have.
    """

    config: BertConfig
    num_outputs: int
    features: str
    lstm_size: int = 768
    kind: str = "tagging"

    def setup(self):
        if self.features not in FEATURES:
            raise ValueError(
                f"unknown features {self.features!r}: expected one of {', '.join(FEATURES)}"
            )
        self.bert = Bert(self.config)
        self.head = BiLstmHead(self.config, self.num_outputs, self.features, self.lstm_size)

    def __call__(
        self, rows: dict[str, jax.Array], *, dropout_rows: jax.Array | None = None
    ) -> jax.Array:
        """Takes and gives what `BertForTask` does for tagging: float32 `[B, L, outputs]`."""
        batch = unpack_rows(rows)
        states = self.bert(
            batch["tokens"],
            batch["segment_ids"],
            batch["position_ids"],
            batch["sequence_ids"],
            all_layers=True,
        )
        states = jax.lax.stop_gradient(states).astype(jnp.float32)
        return self.head(states, batch["sequence_ids"], dropout_rows)


class BiLstmHead(nn.Module):
    """Hidden states of all layers to tags; see `FeatureBasedTagger`."""

    config: BertConfig
    num_outputs: int
    features: str
    lstm_size: int

    @nn.compact
    def __call__(self, states, sequence_ids, dropout_rows=None) -> jax.Array:
        """`[1 + layers, B, L, H]`, int32 `[B, L]` -> float32 `[B, L, outputs]`."""

        def drop(x):
            if dropout_rows is None:
                return x
            return dropout(self.make_rng("dropout"), x, self.config.dropout_rate, dropout_rows)

        if self.features == "weighted_sum":
            # ELMo's scalar mix (Peters et al., 2018). No weight decay, as for any scale.
            layers = states[1:]
            scale = self.param("scale", nn.initializers.zeros, (len(layers),), jnp.float32)
            x = jnp.tensordot(jax.nn.softmax(scale), layers, axes=1)
        else:
            x = choose_features(states, self.features)
        for number in (1, 2):
            x = drop(x)
            directions = [
                SequenceLstm(self.lstm_size, reverse, name=f"{name}_{number}")(x, sequence_ids)
                for name, reverse in (("forward", False), ("backward", True))
            ]
            x = jnp.concatenate(directions, axis=-1)
        return nn.Dense(self.num_outputs, dtype=jnp.float32, name="output")(drop(x))


def choose_features(states: jax.Array, features: str) -> jax.Array:
    """`[1 + layers, B, L, H]` -> `[B, L, H]`, or four times as wide for a concatenation."""
    chosen = [states[layer] for layer in FEATURES[features]]
    return jnp.concatenate(chosen, axis=-1) if features == "concat_last_four" else sum(chosen)


class SequenceLstm(nn.Module):
    """An LSTM over rows of several sequences, which begins anew with each of them."""

    size: int
    reverse: bool

    @nn.compact
    def __call__(self, x: jax.Array, sequence_ids: jax.Array) -> jax.Array:
        """float32 `[B, L, features]`, int32 `[B, L]` -> float32 `[B, L, size]`."""
        changes = sequence_ids[:, 1:] != sequence_ids[:, :-1]
        begins = jnp.pad(changes, ((0, 0), (0, 1) if self.reverse else (1, 0)))

        def step(cell, carry, inputs):
            x, begins = inputs
            carry = jax.tree.map(lambda state: jnp.where(begins[:, None], 0.0, state), carry)
            return cell(carry, x)

        run = nn.scan(
            step,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
            reverse=self.reverse,
        )
        zeros = jnp.zeros((len(x), self.size), jnp.float32)
        return run(nn.OptimizedLSTMCell(self.size), (zeros, zeros), (x, begins))[1]
