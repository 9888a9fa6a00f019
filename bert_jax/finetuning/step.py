"""The steps of fine-tuning: rows -> loss -> gradients -> new state, and rows -> predictions."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.data.features import (
    ModelInput,
    RowShape,
    batch_indices,
    steps_per_epoch,
    to_devices,
    unpack_rows,
)
from bert_jax.finetuning.gradient_cache import add_vector_gradients, part_of_batch_loss
from bert_jax.model.config import pools_last
from bert_jax.model.dropout import Dropout
from bert_jax.model.heads import Head, Outputs, label_weights
from bert_jax.model.lora import Lora, run_adapted
from bert_jax.sharding.compiler_options import product_options
from bert_jax.sharding.rules import stack_shardings
from bert_jax.training.gradients import (
    accumulate_gradients,
    microbatch_at,
    split_into_microbatches,
)
from bert_jax.training.optimizer import Hyperparameters
from bert_jax.training.state import TRIAL_AXES, TrainState, apply_gradients

# Default tokens of a microbatch on one device: enough to keep it busy.
TOKENS_PER_DEVICE = {"cpu": 2048, "gpu": 16_384, "tpu": 8_192}

# Tokens x layers x hidden size of a whole batch on a CPU whose loss compares its examples: a
# gradient that keeps their activations, which take about 4 GB, is faster than one that computes
# them again.
ACTIVATIONS = 40_000_000


def make_finetune_step(
    model: nn.Module,
    head: Head,
    optimizer: Callable[[Hyperparameters], optax.GradientTransformation],
    shardings: TrainState,
    rows_per_microbatch: int,
    batch_size: int,
    lora: Lora | None = None,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """Builds the jitted (state, rows, num_microbatches, keys, hyperparameters) -> (state, metrics).

    With `lora`, a last argument has the frozen parameters, which all trials share. It updates a
    stack of independent trials: all but `num_microbatches` and the state's step have a leading axis
    of trials, sharded over `trial`; `shardings` are for one trial. The state is donated; `rows`, of
    at most `batch_size` examples, are laid out as by `finetune_batches`. The loss is the mean over
    all labels of the batch, weighted by `label_weights`; dropout is a function of (key, step, index
    of the row in the batch), whatever the other trials, microbatches and devices.
    """
    mesh = shardings.step.mesh
    rows_per_shard = rows_per_microbatch // mesh.shape["data"]

    def gradients_of_shard(params, rows, num_microbatches, weight_sums, dropouts, progress, frozen):
        """Returns the losses and gradients of the trials of one shard, summed over `data`."""

        def gradients(params, rows, weight_sum, dropout, progress):
            max_microbatches = len(rows["tokens"]) // rows_per_shard
            microbatches = split_into_microbatches(rows, max_microbatches)
            return trial_gradients(
                functools.partial(apply_model, model, lora, frozen),
                pools_last(model.config),
                head,
                params,
                microbatches,
                num_microbatches,
                weight_sum,
                dropout,
                progress,
                batch_size,
            )

        sums = jax.vmap(gradients)(params, rows, weight_sums, dropouts, progress)
        return sums if mesh.shape["data"] == 1 else jax.lax.psum(sums, "data")

    def number_rows(rows):
        """Adds the index of each row in the batch: undoes the layout of `finetune_batches`."""
        indices = jnp.arange(len(rows["tokens"])).reshape(-1, rows_per_microbatch)
        return rows | {"dropout_rows": indices.T.reshape(-1)}

    def sum_weights(rows):
        weight_sum = jnp.sum(label_weights(head, rows))
        return jnp.where(weight_sum > 0, weight_sum, 1)

    def apply_trial(state, gradients, hyperparameters):
        return apply_gradients(state, gradients, optimizer(hyperparameters))

    # Metrics are sharded over `trial`, too: trials exchange nothing.
    trial_sharding = NamedSharding(mesh, P("trial"))
    out_shardings = shardings.map_trials(stack_shardings), trial_sharding
    jit = functools.partial(jax.jit, donate_argnums=0, out_shardings=out_shardings)

    @jit(compiler_options=product_options(mesh))
    def update_step(state, rows, num_microbatches, keys, hyperparameters, frozen=None):
        rows, weight_sums = jax.vmap(number_rows)(rows), jax.vmap(sum_weights)(rows)
        dropouts = Dropout(
            key=jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, state.step),
            rows=None,  # `trial_gradients` sets those of each microbatch.
            rate=hyperparameters.dropout_rate,
            attention_rate=hyperparameters.attention_dropout_rate,
        )
        num_steps = hyperparameters.num_steps
        progress = {"step": jnp.full_like(num_steps, state.step), "num_steps": num_steps}
        losses, gradients = jax.shard_map(
            gradients_of_shard,
            mesh=mesh,
            in_specs=(P("trial"), P("trial", "data"), P(), P("trial"), P("trial"), P("trial"), P()),
            out_specs=P("trial"),
            axis_names={"trial", "data"},
            # With the check, each layer would sum its gradients over `data`, and kernels do not
            # support it.
            check_vma=False,
        )(state.params, rows, num_microbatches, weight_sums, dropouts, progress, frozen)
        update = jax.vmap(apply_trial, in_axes=(TRIAL_AXES, 0, 0), out_axes=(TRIAL_AXES, 0))
        state, norms = update(state, gradients, hyperparameters)
        return state, {"loss": losses} | norms

    return update_step


def apply_model(
    model: nn.Module, lora: Lora | None, frozen: dict | None, params: dict, batch: dict, **options
) -> jax.Array:
    """Applies `model`; with `frozen` parameters, `params` are those that `lora` trains."""
    if frozen is None:
        return model.apply({"params": params}, batch, **options)
    return run_adapted(model, lora, params, frozen, batch, **options)


def trial_gradients(
    apply: Callable[..., jax.Array],
    pools_last: bool,
    head: Head,
    params: dict,
    microbatches: dict[str, jax.Array],
    num_microbatches: jax.Array,
    weight_sum: jax.Array,
    dropout: Dropout,
    progress: dict[str, jax.Array],
    batch_size: int,
) -> tuple[jax.Array, dict]:
    """Returns the contribution of one data-parallel shard to the loss of a trial and its gradients.

    `apply` is (params, batch, dropout) -> outputs; `pools_last` is as in `unpack_rows`.
    `microbatches` are arrays `[microbatches, rows, ...]`, of which the first `num_microbatches` are
    used; `weight_sum` is the sum of the label weights of the whole batch, over all shards, which
    has at most `batch_size` examples; `progress` has the "step" and "num_steps" that
    `Head.batch_loss` gets.
    """

    def outputs(params, rows):
        row_dropout = dropout._replace(rows=rows["dropout_rows"])
        batch = rows | unpack_rows(rows, pools_last)
        return apply(params, batch, dropout=row_dropout)

    def loss_fn(params, rows):
        losses = head.loss(outputs(params, rows), rows)
        return jnp.sum(losses * label_weights(head, rows)) / weight_sum, None

    def vector_loss(params, rows):
        """Returns a value whose gradients are those of the loss of the whole batch."""
        return jnp.sum(outputs(params, rows) * rows["vector_gradients"]), None

    if not head.batch_loss:
        (loss, _), gradients = accumulate_gradients(loss_fn, params, microbatches, num_microbatches)
        return loss, gradients
    if len(microbatches["tokens"]) == 1:  # Nothing to cache: the gradient keeps the activations.

        def batch_loss(params):
            vectors = outputs(params, microbatch_at(microbatches, 0))[None]
            return part_of_batch_loss(head, vectors, microbatches, weight_sum, progress, batch_size)

        return jax.value_and_grad(batch_loss)(params)
    loss, microbatches = add_vector_gradients(
        head,
        functools.partial(outputs, params),
        microbatches,
        num_microbatches,
        weight_sum,
        progress,
        batch_size,
    )
    _, gradients = accumulate_gradients(vector_loss, params, microbatches, num_microbatches)
    return loss, gradients


class Prediction(NamedTuple):
    """The outputs of a trial for the features of a split.

    Attributes:
      outputs: the head's output for each feature, in order.
      loss: mean loss of the features; None without labels.
    """

    outputs: Outputs
    loss: float | None


def make_predict_step(
    model: nn.Module, mesh: Mesh, head: Head, lora: Lora | None = None
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns the jitted (params, rows) -> (outputs, sums), replicated over all processes.

    With `lora`, a last argument has the frozen parameters, unless `params` are merged. Parameters
    and results have a leading axis of trials. `sums`, `[trials, data, 2]`, has the sum of weighted
    losses and the sum of label weights on each data-parallel shard; 0 for a head that compares the
    examples of a batch.
    """

    def run(params, rows, frozen):
        batch = rows | unpack_rows(rows, pools_last(model.config))
        outputs, sums = apply_model(model, lora, frozen, params, batch), jnp.zeros(2)
        if head.loss:
            weights = label_weights(head, rows)
            sums = jnp.stack([jnp.sum(head.loss(outputs, rows) * weights), jnp.sum(weights)])
        return outputs, sums[None]

    sharded = jax.shard_map(
        jax.vmap(run, in_axes=(0, None, None)),
        mesh=mesh,
        in_specs=(P("trial"), P("data"), P()),
        out_specs=P("trial", "data"),
        axis_names={"trial", "data"},
        check_vma=False,  # The check rejects loops that start from a constant, as in a BiLSTM.
    )

    def predict_step(params, rows, frozen=None):
        return sharded(params, rows, frozen)

    return jax.jit(predict_step, out_shardings=NamedSharding(mesh, P()))


def predict(
    predict_step: Callable[..., tuple[jax.Array, jax.Array]],
    params: dict,
    head: Head,
    features: Sequence[ModelInput],
    shape: RowShape,
    num_rows: int,
    sharding: NamedSharding,
    beat: Callable[..., None] = lambda limited: None,
    frozen: dict | None = None,
) -> list[Prediction]:
    """Returns the prediction of each trial of the stack `params`; computes `num_rows` at a time.

    `frozen` are the parameters that all trials share, if they do.
    Calls `beat(limited=...)` before each batch: the first one may compile, which has no time limit.
    """
    num_trials = len(jax.tree.leaves(params)[0])
    predictions = [[np.zeros(0)] * len(features) for _ in range(num_trials)]
    total = np.zeros((num_trials, 2))
    # Appears after three seconds, below the bar of the training steps.
    options = {"delay": 3, "mininterval": 1.0, "leave": False}
    if jax.process_index():
        options["disable"] = True
    progress = tqdm.tqdm(desc="predicting", total=len(features), **options)
    for number, (members, rows) in enumerate(shape.batches(features, num_rows)):
        beat(limited=number > 0)
        rows = to_devices(rows, sharding)
        outputs, sums = map(np.asarray, predict_step(params, rows, frozen))
        total += sums.sum(1)
        for row, indices in enumerate(members):
            start = 0
            for index in indices:
                feature = features[index]
                size = len(feature) if head.input_kind == "positions" else len(feature.sequences)
                for of_trial, trial_outputs in zip(predictions, outputs, strict=True):
                    output = trial_outputs[row, start : start + size]
                    of_trial[index] = head.feature_output(output)
                start += size
        progress.update(sum(map(len, members)))
    progress.close()
    losses = [float(loss / weight) if weight else None for loss, weight in total]
    return [Prediction(*each) for each in zip(predictions, losses, strict=True)]


def default_rows_per_microbatch(length: int, per_device_batch_size: int, mesh: Mesh) -> int:
    """Returns the rows per microbatch over all devices; 0 per device means the default."""
    tokens = TOKENS_PER_DEVICE.get(mesh.devices.flat[0].platform, 8192)
    rows_per_device = per_device_batch_size or max(1, tokens // length)
    return rows_per_device * mesh.shape["data"] * mesh.shape["fsdp"]


def max_rows_of_whole_batch(model_config, length: int, maximum: int, mesh: Mesh) -> int:
    """Returns up to how many rows a batch that is compared may have in one microbatch.

    On a CPU as many as `ACTIVATIONS` allows, at least `maximum`, those of other microbatches.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return maximum
    num_shards = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = ACTIVATIONS // (length * model_config.num_layers * model_config.hidden_size)
    return max(maximum, rows // num_shards * num_shards)


def fit_rows_per_microbatch(
    maximum: int, rows_of_batches: Sequence[int], num_shards: int, max_whole: int = 0
) -> int:
    """Returns the cheapest number of rows per microbatch for batches of the given sizes.

    The cost of a microbatch is its rows, padding included, plus about `maximum` / 8 rows for adding
    its gradients to the others. If the loss compares the examples of a batch, batches of up to
    `max_whole` rows may be one microbatch; those of several go through the model once more, which
    adds a third.
    """

    def cost(rows_per_microbatch):
        counts = [math.ceil(rows / rows_per_microbatch) for rows in rows_of_batches]
        passes = [4 / 3 if max_whole and count > 1 else 1 for count in counts]
        return sum(
            count * (rows_per_microbatch * each + maximum / 8)
            for count, each in zip(counts, passes, strict=True)
        )

    return min(range(num_shards, max(maximum, max_whole) + 1, num_shards), key=cost)


def sample_batch_sizes(
    features: Sequence[ModelInput], shape: RowShape, batch_size: int
) -> list[int]:
    """Returns the number of rows in each of the first batches, as a sample of all batches."""
    sizes = []
    for step in range(min(50, steps_per_epoch(len(features), batch_size))):
        indices = batch_indices(len(features), batch_size, 0, step)
        sizes.append(len(shape.pack([features[index] for index in indices])))
    return sizes
