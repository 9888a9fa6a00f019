"""The pre-training step: rows -> masking -> loss -> gradients -> optimizer -> new state."""

import functools
import re
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from absl import logging
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.data.features import unpack_rows
from bert_jax.data.masking import Masking, mask_tokens, next_tokens, row_keys
from bert_jax.model.attention import uses_kernel
from bert_jax.model.bert import BERT_INPUTS, BertForPreTraining, fuse_projections
from bert_jax.model.dropout import Dropout
from bert_jax.model.kernels.attention_tpu import interleave
from bert_jax.model.layers import cross_entropy
from bert_jax.sharding.collectives import sum_over_data
from bert_jax.sharding.compiler_options import (
    compiler_options,
    product_options,
    why_not_overlapped,
)
from bert_jax.sharding.mesh import BATCH_SPEC
from bert_jax.sharding.rules import path_name
from bert_jax.training.state import TrainState, apply_gradients

MODEL_INPUTS = (*BERT_INPUTS, "mlm_positions", "pooled_positions")


def make_pretrain_step(
    model: BertForPreTraining,
    optimizer: optax.GradientTransformation,
    shardings: TrainState,
    masking: Masking | None,
    *,
    seed: int,
    num_microbatches: int = 1,
    overlap_collectives: bool = False,
) -> Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]]:
    """Builds the jitted update step (state, rows) -> (state, metrics), which donates the state.

    The metrics are `loss`, `gradient_norm`, `parameter_norm` and `sums`, from `metric_sums`. The
    loss is the mean over all masked positions of the global batch, or without `masking` over all
    positions with a next token, plus the mean NSP loss of a model with that head, whatever the
    number of devices and microbatches. Masks are a function of (seed, row, epoch),
    dropout of (seed, step, index of the row in the batch): a resumed run draws what an
    uninterrupted one would have drawn, on any mesh.

    With `overlap_collectives`, each layer gathers its kernels, which `shardings` shard over `data`,
    and exchanges their gradients, while others are computed; where `why_not_overlapped` says that
    they cannot, the reason is logged.
    """
    mesh = shardings.step.mesh
    replicated = NamedSharding(mesh, P())
    mask_key, dropout_key = jax.random.split(jax.random.key(seed))

    def loss_fn(params, batch, counts, key):
        sums = metric_sums(model, params, batch, key)
        return sum(sums[f"{task}_loss"] / counts[task] for task in counts), sums

    def grad_fn(*args):
        values, gradients = jax.value_and_grad(loss_fn, has_aux=True)(*args)
        return values, jax.tree.map(lambda x: x.astype(jnp.float32), gradients)

    def accumulate_gradients(params, batch, counts, key):
        """Returns the contribution of one data-parallel shard to the loss and its gradients."""
        if num_microbatches == 1:
            return grad_fn(params, batch, counts, key)
        # Microbatch m takes every num_microbatches-th row, so that rows keep their `fsdp` shard.
        microbatches = jax.tree.map(
            lambda x: x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1), batch
        )

        def add(total, microbatch):
            return jax.tree.map(jnp.add, total, grad_fn(params, microbatch, counts, key)), None

        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(grad_fn, params, batch, counts, key))
        return jax.lax.scan(add, zeros, microbatches)[0]

    def kernel_spec(path, sharding):
        """Returns the spec of kernels that layers gather; P() for other parameters."""
        axes = ["data" if "data" in (names or ()) else None for names in sharding.spec]
        spec = P(*axes)
        return spec if in_layers and is_layer_kernel(path) and "data" in spec[1:] else P()

    refusal = why_not_overlapped(mesh, model.config.hidden_size, num_microbatches)
    in_layers = overlap_collectives and not refusal
    if overlap_collectives and refusal:
        logging.info("overlap_collectives has no effect: %s", refusal)
    jit = functools.partial(jax.jit, out_shardings=(shardings, replicated), donate_argnums=0)
    options = compiler_options(mesh, model.config.hidden_size, in_layers)

    @jit(compiler_options=options | product_options(mesh))
    def update_step(state, rows):
        fuse, step_shardings = (lambda params: params), shardings.params
        if uses_kernel(model.config, rows["tokens"].shape[1], mesh.abstract_mesh):
            fuse = fuse_layer_kernels
            step_shardings = fuse(step_shardings, lambda query, key, value: query)
        batch = mask_batch(mesh, rows, mask_key, masking)
        batch["dropout_rows"] = jnp.arange(rows["tokens"].shape[0])
        counts = {
            task: jnp.maximum(jnp.sum(batch[weights]), 1)
            for task, weights in task_weights(model).items()
        }
        param_specs = jax.tree_util.tree_map_with_path(kernel_spec, step_shardings)
        # Cast before gathering: there is less to gather if parameters are sharded over `data`.
        params = cast_layer_kernels(fuse(state.params), param_specs, model.config.dtype)
        params = jax.lax.with_sharding_constraint(params, step_shardings)
        # Devices exchange gradients once, after all layers and microbatches (but those of kernels
        # that layers gather), and each receives the sum for its own shard of the parameters.
        (loss, sums), gradients = sum_over_data(
            accumulate_gradients, mesh, (replicated, step_shardings), param_specs
        )(params, batch, counts, jax.random.fold_in(dropout_key, state.step))
        (gradients,) = jax.linear_transpose(fuse, state.params)(gradients)
        gradients = jax.lax.with_sharding_constraint(gradients, shardings.params)
        state, norms = apply_gradients(state, gradients, optimizer)
        return state, {"loss": loss, "sums": sums} | norms

    return update_step


def make_eval_step(
    model: BertForPreTraining, mesh: Mesh, masking: Masking | None, *, seed: int
) -> Callable[[dict, dict[str, jax.Array]], dict[str, jax.Array]]:
    """Builds the jitted (params, rows) -> `metric_sums`; masks are a function of (seed, row)."""
    mask_key = jax.random.key(seed)
    replicated = NamedSharding(mesh, P())
    shard_sums = sum_over_data(functools.partial(metric_sums, model), mesh, replicated)

    def eval_step(params, rows):
        return shard_sums(params, mask_batch(mesh, rows, mask_key, masking))

    return jax.jit(eval_step, out_shardings=replicated)


def init_state(
    key: jax.Array,
    model: BertForPreTraining,
    optimizer: optax.GradientTransformation,
    pretrained: Mapping | None = None,
) -> TrainState:
    """Returns a fresh state at step 0, with any `pretrained` parameters; to be jitted."""
    params = model.init(key, *[jnp.zeros((1, 2), jnp.int32)] * len(MODEL_INPUTS))["params"]
    if pretrained:
        params |= pretrained | {"bert": params["bert"] | pretrained["bert"]}
    return TrainState(jnp.zeros([], jnp.int32), params, optimizer.init(params))


def unpack_and_mask(
    rows: dict[str, jax.Array], key: jax.Array, masking: Masking | None
) -> dict[str, jax.Array]:
    """Returns the batch for `metric_sums` from packed rows; left to right if `masking` is None."""
    batch = unpack_rows(rows, causal=masking is None)
    if masking is None:
        batch |= next_tokens(batch["tokens"], batch["sequence_ids"])
    else:
        keys = row_keys(key, rows["row_ids"], rows["epochs"], masking.repeat_after)
        batch |= mask_tokens(keys, batch["tokens"], batch["sequence_ids"], masking)
    return batch


def mask_batch(mesh: Mesh, rows: dict, key: jax.Array, masking: Masking | None) -> dict:
    """Runs `unpack_and_mask` on each device's own rows: a sort would otherwise gather all rows."""
    return jax.shard_map(
        functools.partial(unpack_and_mask, masking=masking),
        mesh=mesh,
        in_specs=(BATCH_SPEC, P()),
        out_specs=BATCH_SPEC,
        check_vma=False,
    )(rows, key)


def task_weights(model: BertForPreTraining) -> dict[str, str]:
    """Returns the names of the losses of a model, each with the name of its weights in a batch."""
    tasks = {"next_token" if model.config.causal else "mlm": "mlm_weights"}
    return tasks | ({"nsp": "nsp_weights"} if model.next_sentence else {})


def metric_sums(
    model: BertForPreTraining,
    params: dict,
    batch: dict[str, jax.Array],
    dropout_key: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Returns sums over a batch, float32 scalars: losses in nats, correct predictions, and counts.

    With a `dropout_key`, `batch` must hold `dropout_rows` (see `Dropout`).
    """
    inputs, options = [batch[name] for name in MODEL_INPUTS], {}
    rates = model.config.dropout_rate, model.config.attention_dropout_rate
    if dropout_key is not None and any(rates):
        dropout = Dropout(batch["dropout_rows"], *rates)
        options = {"dropout": dropout, "rngs": {"dropout": dropout_key}}
    logits = model.apply({"params": params}, *inputs, **options)
    sums = {}
    for (task, weights_name), task_logits, targets_name in zip(
        task_weights(model).items(), logits, ("mlm_targets", "nsp_labels"), strict=False
    ):
        weights = batch[weights_name]
        losses, correct = cross_entropy(task_logits, batch[targets_name])
        sums[f"{task}_loss"] = jnp.sum(losses * weights)
        sums[f"{task}_correct"] = jnp.sum(correct * weights)
        sums[f"{task}_count"] = jnp.sum(weights)
    return sums


def mean_metrics(sums: dict) -> dict[str, float]:
    """Returns mean losses (nats) and accuracies from `metric_sums`; 0, not NaN, without targets."""
    result = {}
    for task in (name.removesuffix("_count") for name in sums if name.endswith("_count")):
        count = float(sums[f"{task}_count"]) or 1.0
        result[f"{task}_loss"] = float(sums[f"{task}_loss"]) / count
        result[f"{task}_accuracy"] = float(sums[f"{task}_correct"]) / count
    return result


def fuse_layer_kernels(params: dict, join: Callable = interleave) -> dict:
    """Applies `fuse_projections` to the kernels: before gathering, on shards of them."""
    bert = params["bert"]
    layers = fuse_projections(bert["encoder"]["layers"], ("kernel",), join)
    return params | {"bert": bert | {"encoder": {"layers": layers}}}


def cast_layer_kernels(params: dict, specs: dict, dtype) -> dict:
    """Casts the stacked layer kernels to `dtype` once, not in each layer and microbatch.

    Those that `specs` shard over `data` stay as they are: layers cast them before they gather them.
    """

    def cast(path, leaf, spec):
        return leaf.astype(dtype) if is_layer_kernel(path) and "data" not in spec else leaf

    return jax.tree_util.tree_map_with_path(cast, params, specs)


def is_layer_kernel(path) -> bool:
    """Returns whether a JAX key path is that of a stacked layer kernel."""
    return bool(re.search(r"/layers/.*kernel$", path_name(path)))
