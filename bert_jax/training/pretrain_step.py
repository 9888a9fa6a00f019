"""The pre-training step: rows -> batch -> loss -> gradients -> optimizer -> new state."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from absl import logging
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.model.dropout import Dropout
from bert_jax.model.encoder import encoders_of
from bert_jax.model.execution import StepParameters
from bert_jax.model.layer_stack import num_stacked_layers
from bert_jax.objectives import Batch, Objective, Sums
from bert_jax.sharding.collectives import sum_over_data
from bert_jax.sharding.compiler_options import (
    compiler_options,
    product_options,
    why_not_overlapped,
)
from bert_jax.sharding.mesh import BATCH_SPEC
from bert_jax.sharding.rules import data_axes
from bert_jax.training.gradients import accumulate_gradients, split_into_microbatches
from bert_jax.training.state import TrainState, apply_gradients


def make_pretrain_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    shardings: TrainState,
    objective: Objective,
    *,
    seed: int,
    num_microbatches: int = 1,
    overlap_collectives: bool = False,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """Returns the jitted `update_step(state, rows, frozen=None)` -> (state, metrics).

    It donates the state. The metrics are `loss`, `gradient_norm`, `parameter_norm` and the `sums`
    of the `objective`. `loss` is the objective's total of its losses; each is a mean over the
    global batch, whatever the number of devices and microbatches. Masks are a function of (seed,
    row, epoch), dropout of (seed, step, index of the row in the batch): a resumed run draws what an
    uninterrupted one would have drawn, on any mesh.

    `frozen` has the parameters that the objective reads but does not train, such as a teacher's.
    They are an argument, because the compiler would store them in the program as constants.

    With `overlap_collectives`, each layer gathers its weight matrices, which `shardings` shard over
    `data`, and reduces their gradients while other layers are computed; if the step cannot, the
    reason is logged.
    """
    mesh = shardings.step.mesh
    replicated = NamedSharding(mesh, P())
    mask_key, dropout_key = jax.random.split(jax.random.key(seed))
    overlaps = overlap_collectives and can_overlap(model.config, shardings, num_microbatches)
    gradients_function = functools.partial(gradients_of_shard, model, objective, num_microbatches)

    def update_step(state, rows, frozen=None):
        batch = prepare_batch(objective, mesh, rows, mask_key)
        # Once for all microbatches, the parameters are laid out as the layers read them. That
        # depends on the length of the rows: the fast path, which reads the projections of queries,
        # keys and values as one matrix, does not support all lengths.
        layout = StepParameters(
            model.plan,
            encoders_of(model),
            shardings.params,
            length=rows["tokens"].shape[1],
            overlaps_collectives=overlaps,
        )
        params = layout.prepare(state.params)
        # The batch is sharded over `data`, the other arguments are replicated. Gradients are summed
        # over `data` once, after all layers and microbatches (except for matrices that each layer
        # gathers); each device receives the sum for its own shard of the parameters.
        value_and_gradients = sum_over_data(
            gradients_function,
            mesh,
            shardings=(replicated, layout.shardings),
            param_specs=layout.specs,
        )
        key = jax.random.fold_in(dropout_key, state.step)
        (loss, sums), gradients = value_and_gradients(
            params, batch, objective.counts(batch), key, frozen or {}
        )
        gradients = layout.transpose(gradients, state.params)  # To the layout of `state.params`.
        state, norms = apply_gradients(state, gradients, optimizer)
        return state, {"loss": loss, "sums": sums} | norms

    hidden_size = model.config.hidden_size
    return jax.jit(
        update_step,
        donate_argnums=0,
        out_shardings=(shardings, replicated),
        compiler_options=compiler_options(mesh, hidden_size, overlaps) | product_options(mesh),
    )


def prepare_batch(objective: Objective, mesh: Mesh, rows: Batch, key: jax.Array) -> Batch:
    """Returns the objective's batch of rows, and the index of each row, for dropout.

    Each device prepares its own rows: in a global computation, a sort would gather all of them.
    """
    batch = jax.shard_map(
        objective.prepare,
        mesh=mesh,
        in_specs=(BATCH_SPEC, P()),
        out_specs=BATCH_SPEC,
        check_vma=False,  # The check rejects loops that start from a constant, as in span masking.
    )(rows, key)
    return batch | {"dropout_rows": jnp.arange(len(rows["tokens"]))}


def gradients_of_shard(model, objective, num_microbatches, params, batch, counts, key, frozen):
    """Returns the contribution of one data-parallel shard: ((loss, sums), float32 gradients).

    `counts` are of the global batch, so that the contributions of microbatches and shards add up to
    the mean over it.
    """

    def loss_fn(params, batch):
        dropout = step_dropout(model.config, batch, key)
        sums = objective.sums(model, params | frozen, batch, dropout)
        losses = {}
        for name, count in counts.items():
            loss_sum, _ = sums[name]
            losses[name] = loss_sum / count
        return objective.total_loss(losses), sums

    microbatches = split_into_microbatches(batch, num_microbatches)
    return accumulate_gradients(loss_fn, params, microbatches, num_microbatches)


def step_dropout(model_config, batch: dict[str, jax.Array], key: jax.Array) -> Dropout:
    """Returns the dropout of a step at the rates of `model_config`."""
    rates = model_config.dropout_rate, model_config.attention_dropout_rate
    return Dropout(key, batch["dropout_rows"], *rates)


def make_eval_step(
    model: nn.Module, mesh: Mesh, objective: Objective, *, seed: int
) -> Callable[..., Sums]:
    """Returns the jitted (params, rows, frozen=None) -> sums of the objective.

    Masks are a function of (seed, row); `frozen` is as in `make_pretrain_step`.
    """
    # Its masks need not be independent of those in training: no held-out row is trained on.
    mask_key = jax.random.key(seed)
    replicated = NamedSharding(mesh, P())

    def sums(params, batch, frozen):
        return objective.sums(model, params | frozen, batch)

    shard_sums = sum_over_data(sums, mesh, replicated)

    def eval_step(params, rows, frozen=None):
        return shard_sums(params, prepare_batch(objective, mesh, rows, mask_key), frozen or {})

    return jax.jit(eval_step, out_shardings=replicated)


def can_overlap(model_config, shardings: TrainState, num_microbatches: int) -> bool:
    """Returns whether layers can gather parameters and reduce gradients while others are computed.

    Logs the reason if layers cannot.
    """
    reason = why_not_overlapped(shardings.step.mesh, model_config.hidden_size, num_microbatches)
    if num_stacked_layers(model_config) < model_config.num_layers:
        reason = reason or "layers share parameters, whose gradients are exchanged once"
    if not any("data" in data_axes(each) for each in jax.tree.leaves(shardings.params)):
        reason = reason or "no parameters are sharded over data: set shard_weight_update"
    if reason:
        logging.info("overlap_collectives has no effect: %s", reason)
    return not reason
