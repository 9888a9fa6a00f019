"""The feature-based approach (Devlin et al., 2018, section 5.3): a BiLSTM on a frozen encoder.

Each step recomputes the features: the encoder's forward pass costs less than the BiLSTM.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.data.features import unpack_rows
from bert_jax.model.dropout import Dropout, as_dropout, dropout_at
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import Execution

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
    task_head: object  # Its `Head`.
    num_outputs: int
    features: str
    lstm_size: int = 768
    execution: Execution = Execution()

    def setup(self):
        self.encoder = Encoder(self.config, self.execution)
        self.head = BiLstmHead(self.num_outputs, self.features, self.lstm_size)

    def __call__(
        self, rows: dict[str, jax.Array], *, dropout: Dropout | float | None = None
    ) -> jax.Array:
        """Returns float32 `[B, L, outputs]`; takes the arguments of `TaskModel`."""
        batch = unpack_rows(rows)
        dropout = as_dropout(self, dropout, len(rows["tokens"]))
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
            x = _both_directions(self, x, sequence_ids, self.lstm_size, number)
        x = dropout_at(dropout, "head", x)
        return nn.Dense(self.num_outputs, dtype=jnp.float32, name="output")(x)


class BiLstm(nn.Module):
    """A BiLSTM layer and a projection to the size of its input ("+ BiLSTM" in table 5)."""

    lstm_size: int

    @nn.compact
    def __call__(self, x: jax.Array, sequence_ids: jax.Array) -> jax.Array:
        """Maps `[B, L, H]` and int32 `[B, L]` to float32 `[B, L, H]`."""
        both = _both_directions(self, x.astype(jnp.float32), sequence_ids, self.lstm_size, 1)
        return nn.Dense(x.shape[-1], dtype=jnp.float32, name="output")(both)


def _both_directions(module, x, sequence_ids, lstm_size: int, number: int) -> jax.Array:
    """Runs layer `number` of a BiLSTM in one loop: returns `[B, L, 2 * lstm_size]`."""
    shape = len(x), x.shape[-1]

    # Stacked trials draw their orthogonal kernels one after another: several batched factorizations
    # at a time wait for each other forever on a CPU of two cores (jaxlib 0.10.2).
    @jax.custom_batching.sequential_vmap
    def init(key):
        cell = nn.OptimizedLSTMCell(lstm_size, parent=None)
        carry = cell.initialize_carry(key, shape)
        return {"OptimizedLSTMCell_0": cell.init(key, carry, jnp.zeros(shape))["params"]}

    params = [module.param(f"{name}_{number}", init) for name in ("forward", "backward")]
    params = jax.tree.map(lambda *pair: jnp.stack(pair), *params)["OptimizedLSTMCell_0"]
    x_kernel, kernel, bias = (
        jnp.concatenate([params[letter + gate][kind] for gate in "ifgo"], axis=-1)
        for letter, kind in (("i", "kernel"), ("h", "kernel"), ("h", "bias"))
    )
    inputs = jnp.einsum("blf,dfg->dlbg", x, x_kernel) + bias[:, None, None]
    changes = (sequence_ids[:, 1:] != sequence_ids[:, :-1]).T
    starts = [jnp.pad(changes, (width, (0, 0))) for width in ((1, 0), (0, 1))]

    def step(carry, inputs):
        x, starts = inputs
        cell, hidden = (jnp.where(starts[..., None], 0.0, state) for state in carry)
        write, keep, values, show = jnp.split(x + hidden @ kernel, 4, axis=-1)
        cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(write) * jnp.tanh(values)
        hidden = jax.nn.sigmoid(show) * jnp.tanh(cell)
        return (cell, hidden), hidden

    both = [jnp.stack([first, last[::-1]], axis=1) for first, last in (inputs, starts)]
    zeros = jnp.zeros((2, len(x), lstm_size), jnp.float32)
    outputs = jax.lax.scan(step, (zeros, zeros), both)[1].swapaxes(0, 2)
    return jnp.concatenate([outputs[:, 0], outputs[:, 1, ::-1]], axis=-1)


def choose_features(states: jax.Array, features: str) -> jax.Array:
    """Maps `[1 + layers, B, L, H]` to `[B, L, H]`, or `[B, L, 4 * H]` for a concatenation."""
    chosen = [states[layer] for layer in FEATURES[features]]
    return jnp.concatenate(chosen, axis=-1) if features == "concat_last_four" else sum(chosen)
