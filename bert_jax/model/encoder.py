"""The encoder of any architecture: embeddings, the stack of layers, and the pooler."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.model.architecture import architecture_of
from bert_jax.model.dropout import (
    Dropout,
    LayerDropout,
    as_dropout,
    hidden_dropout,
    layer_dropout,
)
from bert_jax.model.execution import ExecutionPlan, run_fast_path
from bert_jax.model.layers import gather_positions
from bert_jax.sharding.collectives import gather_data


class Encoder(nn.Module):
    """The part of a model that pre-training and all tasks share, as `encoder` in its parameters.

    Its input is a batch of `unpack_rows`: int32 `[B, L]` `tokens`, `segment_ids`, `position_ids`
    and `sequence_ids`, for B rows of length L, with up to S sequences each. The parameters of the
    layers are stacked under "layers", with a leading axis of layers, however they run.

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
        self.pooler = architecture.Pooler(self.config)
        if self.is_initializing():
            self.param("layers", self._init_layers)

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
        x, dropouts = self._embed(batch, dropout)
        params = self.get_variable("params", "layers")
        run = functools.partial(
            run_layers, self.config, self.plan, params, x, batch["sequence_ids"], dropouts
        )
        if positions is None or is_few(positions.shape[1], x.shape[1]):
            return run(positions)
        return gather_positions(run(), positions)

    def all_hidden_states(
        self, batch: dict[str, jax.Array], dropout: Dropout | None = None
    ) -> jax.Array:
        """Returns the embeddings and the output of each layer: `[1 + num_layers, B, L, H]`.

        The layers run as they are defined, as the fast path keeps no output but the last.
        """
        x, dropouts = self._embed(batch, dropout)
        inputs = share_layers(self.config, self.get_variable("params", "layers")), dropouts
        is_scanned = self.plan.plain_path(self.config) == "scan"
        run = _layer_function(self.config, self.plan, batch["sequence_ids"], is_scanned)
        if is_scanned:

            def step(x, layer_inputs):
                x = run(x, layer_inputs)
                return x, x

            _, outputs = jax.lax.scan(step, x, inputs)
            return jnp.concatenate([x[None], outputs])
        outputs = [x]
        for layer_inputs in _unstack(inputs):
            outputs.append(run(outputs[-1], layer_inputs))
        return jnp.stack(outputs)

    def pool(self, x: jax.Array) -> jax.Array:
        """Pools `[B, S, H]`, the hidden states at `pooled_positions`."""
        return self.pooler(x)

    def _embed(self, batch, dropout: Dropout | float | None) -> tuple[jax.Array, LayerDropout]:
        """Returns the embeddings, and the dropout of all layers."""
        num_rows, length = batch["tokens"].shape
        dropout = as_dropout(self, dropout, num_rows)
        embedding_dropout, dropouts = None, LayerDropout()
        if dropout is not None:
            embedding_dropout = hidden_dropout(dropout.at_place("embeddings"), (length,))
            dropouts = layer_dropout(
                dropout.at_place("layers"), self.config.num_layers, self.config.num_heads, length
            )
        x = self.embeddings(
            tokens=batch["tokens"],
            segment_ids=batch["segment_ids"],
            position_ids=batch["position_ids"],
            dropout=embedding_dropout,
        )
        return x, dropouts

    def _init_layers(self, key: jax.Array) -> dict:
        layer = architecture_of(self.config).EncoderLayer(self.config, parent=None)
        x = jnp.zeros((1, 1, self.config.hidden_size), self.plan.dtype)
        sequence_ids = jnp.ones((1, 1), jnp.int32)
        keys = jax.random.split(key, num_stacked_layers(self.config))
        return jax.vmap(lambda key: layer.init(key, x, sequence_ids)["params"])(keys)


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


def num_stacked_layers(config) -> int:
    """Returns how many layers have parameters of their own: all, unless the config says fewer."""
    return getattr(config, "num_stacked_layers", config.num_layers)


def share_layers(config, params: dict) -> dict:
    """Returns the parameters of all layers, stacked, of which consecutive ones may be equal.

    Layers that share parameters (Lan et al., 2019, section 3.1) store them once. The gradient sums
    over the copies.
    """
    repeats = config.num_layers // num_stacked_layers(config)
    if repeats == 1:
        return params
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, repeats, axis=0), params)


def run_layers(
    config,
    plan: ExecutionPlan,
    params: dict,
    x: jax.Array,
    sequence_ids: jax.Array,
    dropout: LayerDropout,
    positions: jax.Array | None = None,
) -> jax.Array:
    """Runs all layers on hidden states `[B, L, H]`; with int32 `[B, K]` positions: `[B, K, H]`.

    `params` are stacked as `Encoder` stores them, and `dropout` is stacked over layers.
    """
    path = plan.path(config, x.shape[1])
    if path == "fast":
        return run_fast_path(plan, config, params, x, sequence_ids, dropout, positions)
    inputs, last = (share_layers(config, params), dropout), None
    if positions is not None:
        inputs, last = _split(inputs, (config.num_layers - 1, 1))
    run = _layer_function(config, plan, sequence_ids, is_scanned=path == "scan")
    if path == "scan":
        x, _ = jax.lax.scan(lambda x, layer_inputs: (run(x, layer_inputs), None), x, inputs)
    else:
        for layer_inputs in _unstack(inputs):
            x = run(x, layer_inputs)
    if positions is not None:
        (layer_inputs,) = _unstack(last)
        finish = _layer_function(config, plan, sequence_ids, is_scanned=False, positions=positions)
        x = finish(x, layer_inputs)
    return x


def _layer_function(
    config,
    plan: ExecutionPlan,
    sequence_ids: jax.Array,
    is_scanned: bool,
    positions: jax.Array | None = None,
) -> Callable[[jax.Array, tuple[dict, LayerDropout]], jax.Array]:
    """Returns the function (hidden states, (parameters, dropout) of a layer) -> hidden states.

    With positions, it returns the hidden states there.
    """
    layer = architecture_of(config).EncoderLayer(config, parent=None)

    def run(x, layer_inputs):
        params, dropout = layer_inputs
        variables = {"params": gather_data(params, x.dtype)}
        if positions is None:
            return layer.apply(variables, x, sequence_ids, dropout)
        context = layer.apply(variables, x, sequence_ids, dropout, method="attend")
        x, context = gather_positions(x, positions), gather_positions(context, positions)
        return layer.apply(variables, x, context, dropout.at(positions), method="finish")

    return plan.with_remat(run, in_loop=is_scanned)


def _split(tree, sizes: tuple[int, int]):
    """Splits the leading axis of all leaves into two parts."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [jax.lax.split(leaf, sizes) for leaf in leaves]
    return tuple(structure.unflatten(part) for part in zip(*parts, strict=True))


def _unstack(tree) -> list:
    """Returns the trees of the entries of the leading axis; their gradients are stacked once."""
    leaves, structure = jax.tree.flatten(tree)
    return [structure.unflatten(each) for each in zip(*map(jnp.unstack, leaves), strict=True)]


def is_few(num_positions: int, length: int) -> bool:
    """Returns whether the last layer finishes only these positions, rather than all."""
    return num_positions <= length // 2
