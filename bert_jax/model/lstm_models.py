"""A BiLSTM between encoder and dense layer ("+ BiLSTM" in the paper's table 5).

These are the models of `task_models.py` with the parameters "lstm" in addition.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.model.dropout import Dropout, as_dropout
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.layers import gather_positions
from bert_jax.model.task_models import dense_head, pooled_outputs, position_outputs


class PooledLstmModel(nn.Module):
    """A `PooledModel` that pools the outputs of a BiLSTM, with `lstm_size` units per direction."""

    config: object
    num_outputs: int
    lstm_size: int
    is_classifier: bool = False
    target_mean: float = 0.0
    target_std: float = 1.0
    plan: ExecutionPlan = ExecutionPlan()

    def setup(self):
        self.encoder = Encoder(self.config, self.plan)
        self.lstm = BiLstm(self.lstm_size)
        self.head = dense_head(self.config, self.num_outputs)

    def __call__(
        self, batch: dict[str, jax.Array], dropout: Dropout | float | None = None
    ) -> jax.Array:
        """Returns float32 `[B, S, outputs]`; `dropout` is as in `Encoder`."""
        dropout = as_dropout(self, dropout, len(batch["tokens"]))
        x = self.lstm(self.encoder(batch, dropout), batch["sequence_ids"])
        return pooled_outputs(self, gather_positions(x, batch["pooled_positions"]), dropout)


class PositionLstmModel(nn.Module):
    """A `PositionModel` on the outputs of a BiLSTM, with `lstm_size` units per direction."""

    config: object
    num_outputs: int
    lstm_size: int
    has_dropout: bool = True
    plan: ExecutionPlan = ExecutionPlan()

    def setup(self):
        self.encoder = Encoder(self.config, self.plan)
        self.lstm = BiLstm(self.lstm_size)
        self.head = dense_head(self.config, self.num_outputs)

    def __call__(
        self, batch: dict[str, jax.Array], dropout: Dropout | float | None = None
    ) -> jax.Array:
        """Returns float32 `[B, L, outputs]`; `dropout` is as in `Encoder`."""
        dropout = as_dropout(self, dropout, len(batch["tokens"]))
        x = self.lstm(self.encoder(batch, dropout), batch["sequence_ids"])
        return position_outputs(self, x, dropout)


class BiLstm(nn.Module):
    """A BiLSTM layer and a projection to the size of its input ("+ BiLSTM" in table 5)."""

    lstm_size: int

    @nn.compact
    def __call__(self, x: jax.Array, sequence_ids: jax.Array) -> jax.Array:
        """Maps `[B, L, H]` and int32 `[B, L]` to float32 `[B, L, H]`."""
        both = both_directions(self, x.astype(jnp.float32), sequence_ids, self.lstm_size, 1)
        return nn.Dense(x.shape[-1], dtype=jnp.float32, name="output")(both)


def both_directions(module, x, sequence_ids, lstm_size: int, number: int) -> jax.Array:
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
