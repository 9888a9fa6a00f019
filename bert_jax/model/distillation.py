"""The student and the teacher of `objectives/distillation.py`: an encoder, and what is compared."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.model.architecture import architecture_of
from bert_jax.model.dropout import Dropout
from bert_jax.model.encoder import Encoder, share_layers
from bert_jax.model.execution import Execution
from bert_jax.model.layers import Dense, gather_positions
from bert_jax.sharding.collectives import gather_data

OF_TOKENS = {"soft", "mlm"}  # Losses at the masked positions.
OF_LAYERS = {"attention", "hidden", "embeddings"}  # Losses that need the states of every layer.


class DistillationModel(nn.Module):
    """A student or a teacher: an encoder, and what the losses need of it.

    Attributes:
      config: of the architecture.
      losses: names of the losses.
      layers: the layers to compare, counted from 1.
      projected_size: width to which hidden states and embeddings are mapped; None: they are not.
      execution: how it runs.
    """

    config: object
    losses: frozenset[str]
    layers: tuple[int, ...]
    projected_size: int | None = None
    execution: Execution = Execution()

    def setup(self):
        architecture = architecture_of(self.config)
        self.encoder = Encoder(self.config, self.execution)
        if self.losses & OF_TOKENS:
            self.mlm = architecture.LmHead(self.config)
        if self.projected_size:
            self.projection = Dense(self.projected_size, self.config.initializer_range)

    def __call__(
        self, batch: dict[str, jax.Array], dropout: Dropout | None = None
    ) -> dict[str, jax.Array]:
        """Returns what the losses compare, by their names.

        The batch has the inputs of `Encoder`, and int32 `target_positions` `[B, K]`. "mlm" and
        "soft" are float32 logits `[B, K, padded_vocab]`, "cosine" hidden states `[B, L, H]`,
        "hidden" `[layers, B, L, H]`, "embeddings" `[B, L, H]`, and "attention" float32 scores
        `[layers, B, heads, from, to]`.
        """
        positions, outputs = batch["target_positions"], {}
        if self.losses <= OF_TOKENS:  # Nothing else is read of the last layer.
            at_targets = self.encoder(batch, dropout, positions)
        elif self.losses & OF_LAYERS:
            states = self.encoder.all_hidden_states(batch, dropout)
            outputs |= self._compare_layers(states) | {"cosine": states[-1]}
            at_targets = gather_positions(states[-1], positions)
        else:
            outputs["cosine"] = self.encoder(batch, dropout)
            at_targets = gather_positions(outputs["cosine"], positions)
        if self.losses & OF_TOKENS:
            logits = self.mlm(at_targets, self.encoder.embeddings.token_embedding)
            outputs |= {"mlm": logits, "soft": logits}
        return outputs

    def _compare_layers(self, states: jax.Array) -> dict[str, jax.Array]:
        numbers, outputs = np.array(self.layers), {}
        if "attention" in self.losses:
            params = share_layers(self.config, self.encoder.variables["params"]["layers"])
            params = jax.tree.map(lambda leaf: leaf[numbers - 1], params)
            outputs["attention"] = attention_scores(self.config, params, states[numbers - 1])
        project = self.projection if self.projected_size else lambda x: x
        if "hidden" in self.losses:
            outputs["hidden"] = jnp.stack([project(states[number]) for number in self.layers])
        if "embeddings" in self.losses:
            outputs["embeddings"] = project(states[0])
        return outputs


def attention_scores(config, params: dict, inputs: jax.Array) -> jax.Array:
    """Returns attention scores before the softmax, float32 `[layers, B, heads, from, to]`.

    `params` are the stacked parameters of layers, and `inputs`, `[layers, B, L, H]`, the hidden
    states that they read.
    """
    queries_and_keys = architecture_of(config).queries_and_keys

    def scores(params, x):
        query, key = (
            y.reshape(*y.shape[:2], config.num_heads, -1)
            for y in queries_and_keys(gather_data(params, x.dtype), x)
        )
        products = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
        return products / math.sqrt(query.shape[-1])

    return jax.vmap(scores)(params, inputs)
