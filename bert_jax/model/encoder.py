"""The encoder of any architecture: embeddings, the stack of layers, and the pooler."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.model.architecture import architecture_of
from bert_jax.model.attention import LONGEST_PLAIN_ROW
from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.dropout import Dropout, LayerDropout, as_dropout, hidden_dropout, layer_dropout
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.layer_stack import (
    init_layers,
    layer_outputs,
    layer_params,
    run_layers,
    run_to_last_layer,
)
from bert_jax.model.layers import gather_positions
from bert_jax.sharding.collectives import gather_data


class Encoder(nn.Module):
    """The part of a model that pre-training and all tasks share, as `encoder` in its parameters.

    Its input is a batch of `unpack_rows`: int32 `[B, L]` `tokens`, `segment_ids`, `position_ids`
    and `sequence_ids`, for B rows of length L, with up to S sequences each. The parameters of the
    layers are stacked under "layers", with a leading axis of the layers that have them, however
    they run.

    Attributes:
      config: the model config.
      plan: how it runs. By default as the architecture defines the layers, unrolled, in float32;
        `plan_execution` returns the plan of a device.
    """

    config: object
    plan: ExecutionPlan = ExecutionPlan()

    def setup(self):
        architecture = architecture_of(self.config)
        self.embeddings = architecture.Embeddings(self.config, self.plan.dtype)
        self.layer_inputs = architecture.LayerInputs(self.config)
        self.last = architecture.Last(self.config)
        self.pooler = architecture.Pooler(self.config)
        if self.is_initializing():
            self.param("layers", init_layers, self.config, self.plan.dtype)

    def __call__(
        self,
        batch: dict[str, jax.Array],
        dropout: Dropout | float | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Returns hidden states `[B, L, H]`; at int32 `[B, K]` positions, `[B, K, H]`.

        If positions are few, the last layer finishes only these. `dropout` may be a rate: then
        `apply` needs `rngs={"dropout": key}`.
        """
        are_few = positions is not None and is_few(positions.shape[1], batch["tokens"].shape[1])
        if are_few and "ranks" in batch and positions.shape[1] <= LONGEST_PLAIN_ROW:
            batch = batch | {"query_positions": positions}  # Others have no queries to read.
        x, inputs, dropouts = self._embed(batch, dropout)
        params = self.get_variable("params", "layers")
        run = functools.partial(run_layers, self.config, self.plan, params, x, inputs, dropouts)
        if positions is None or are_few:
            return self.last(run(positions))
        return self.last(jax.tree.map(lambda x: gather_positions(x, positions), run()))

    def all_hidden_states(
        self, batch: dict[str, jax.Array], dropout: Dropout | None = None
    ) -> jax.Array:
        """Returns the embeddings and the output of each layer: `[1 + num_layers, B, L, H]`.

        The last of them is the encoder's result. The layers run as they are defined, as the fast
        path keeps no output but the last.
        """
        x, inputs, dropouts = self._embed(batch, dropout)
        params = self.get_variable("params", "layers")
        outputs = layer_outputs(self.config, self.plan, params, x, inputs, dropouts)
        return jnp.concatenate([x[None], outputs[:-1], self.last(outputs[-1])[None]])

    def to_last_layer(
        self, batch: dict[str, jax.Array], dropout: Dropout | None = None
    ) -> tuple[jax.Array, object, dict]:
        """Returns the input of the last layer, `[B, L, H]`, and its parameters, which are gathered.

        Between them stands what the layer reads beside that input.
        """
        x, inputs, dropouts = self._embed(batch, dropout)
        params = self.get_variable("params", "layers")
        x, own = run_to_last_layer(self.config, self.plan, params, x, inputs, dropouts)
        return x, inputs, gather_data(own.params, x.dtype)

    def attention_scores(
        self, batch: dict[str, jax.Array], states: jax.Array
    ) -> list[tuple[jax.Array, AttentionMask]]:
        """Returns the scores of each layer, `[B, heads, from, to]`, and the mask of their softmax.

        `states` are the `all_hidden_states` of the batch.
        """
        inputs = self.layer_inputs(batch)
        layers = architecture_of(self.config).encoder_layers(self.config)
        stacked = self.get_variable("params", "layers")
        params = layer_params(self.config, stacked)
        return [
            layer.apply({"params": gather_data(own, x.dtype)}, x, inputs, method="scores")
            for layer, own, x in zip(layers, params, states[:-1], strict=True)
        ]

    def pool(self, x: jax.Array) -> jax.Array:
        """Pools `[B, S, H]`, the hidden states at `pooled_positions`."""
        return self.pooler(x)

    def _embed(
        self, batch: dict[str, jax.Array], dropout: Dropout | float | None
    ) -> tuple[jax.Array, object, LayerDropout]:
        """Returns the embeddings, what all layers read, and the dropout of all layers."""
        num_rows, length = batch["tokens"].shape
        dropout = as_dropout(self, dropout, num_rows)
        embedding_dropout, dropouts = None, {}
        if dropout is not None:
            at_embeddings = dropout.at_place("embeddings")
            rate = getattr(self.config, "embedding_dropout_rate", None)
            if rate is not None:
                at_embeddings = at_embeddings._replace(rate=rate)
            embedding_dropout = hidden_dropout(at_embeddings, (length,))
            dropouts = layer_dropout(
                dropout.at_place("layers"),
                architecture_of(self.config).encoder_layers(self.config)[0].dropout_places,
                self.config.num_layers,
                self.config.num_heads,
                length,
            )
        # An order of prediction is for architectures of two streams.
        streams = {name: batch[name] for name in ("ranks", "query_positions") if name in batch}
        x = self.embeddings(
            tokens=batch["tokens"],
            segment_ids=batch["segment_ids"],
            position_ids=batch["position_ids"],
            dropout=embedding_dropout,
            **streams,
        )
        return x, self.layer_inputs(batch), dropouts


class EncoderModel(nn.Module):
    """A model without heads: the encoder alone, as `encoder` in its parameters."""

    config: object
    plan: ExecutionPlan = ExecutionPlan()

    def setup(self):
        self.encoder = Encoder(self.config, self.plan)

    def __call__(
        self, batch: dict[str, jax.Array], dropout: Dropout | float | None = None
    ) -> jax.Array:
        """Returns hidden states `[B, L, H]`; takes the arguments of `Encoder`."""
        return self.encoder(batch, dropout)


def encoders_of(model: nn.Module) -> dict[str, object]:
    """Returns the model config of each encoder of a model, by its path in the parameters."""
    # Few models have more than one: those say which.
    return getattr(model, "encoders", {"encoder": model.config})


def is_few(num_positions: int, length: int) -> bool:
    """Returns whether the last layer finishes only these positions, rather than all."""
    return num_positions <= length // 2
