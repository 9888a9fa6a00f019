"""Pre-training's state, loss and update step: loss -> gradients -> optimizer -> new state."""

import functools
import re
from collections.abc import Callable

import flax
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax import partitioning
from bert_jax.data.masking import mask_tokens, row_keys
from bert_jax.data.unpacking import unpack_rows
from bert_jax.model.bert import BertForPreTraining

MODEL_INPUTS = (
    "tokens",
    "segment_ids",
    "position_ids",
    "sequence_ids",
    "mlm_positions",
    "cls_positions",
)


@flax.struct.dataclass
class TrainState:
    """All that a run needs to go on: updates done so far, parameters, optimizer state."""

    step: jax.Array
    params: dict
    opt_state: optax.OptState


def init_state(
    key: jax.Array, model: BertForPreTraining, optimizer: optax.GradientTransformation
) -> TrainState:
    """Fresh parameters and optimizer state at step 0; jit it with shardings."""
    ids = jnp.zeros((1, 2), jnp.int32)
    params = model.init(key, *[ids] * len(MODEL_INPUTS))["params"]
    return TrainState(
        step=jnp.zeros([], jnp.int32), params=params, opt_state=optimizer.init(params)
    )


def corrupt(
    rows: dict[str, jax.Array], key: jax.Array, repeat_after: int = 0, **masking
) -> dict[str, jax.Array]:
    """Rows as read -> what the loss takes: unpacked, masked (`masking`: see `mask_tokens`)."""
    batch = unpack_rows(rows)
    keys = row_keys(key, rows["row_ids"], rows["epochs"], repeat_after)
    batch |= mask_tokens(keys, batch["tokens"], batch["sequence_ids"], **masking)
    if "row_weights" in rows:  # 0 on rows that only fill up an evaluation batch.
        batch["mlm_weights"] *= rows["row_weights"][:, None]
        batch["nsp_weights"] *= rows["row_weights"][:, None]
    return batch


def corrupt_each(mesh: Mesh, rows: dict[str, jax.Array], key: jax.Array, *args, **masking) -> dict:
    """`corrupt`, each device its own rows: sorting them would otherwise gather all of them."""
    return jax.shard_map(
        lambda rows, key: corrupt(rows, key, *args, **masking),
        mesh=mesh,
        in_specs=(partitioning.BATCH, P()),
        out_specs=partitioning.BATCH,
        check_vma=False,
    )(rows, key)


def pretraining_sums(
    model: BertForPreTraining,
    params: dict,
    batch: dict[str, jax.Array],
    dropout_key: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Sums over a batch, float32 scalars: losses in nats, right predictions, and their counts.

    With a `dropout_key`, `batch` also holds `dropout_rows` (see `Bert`).
    """
    mlm_logits, nsp_logits = model.apply(
        {"params": params},
        *[batch[name] for name in MODEL_INPUTS],
        dropout_rows=None if dropout_key is None else batch["dropout_rows"],
        rngs=None if dropout_key is None else {"dropout": dropout_key},
    )
    sums = {}
    for task, logits, targets in (
        ("mlm", mlm_logits, batch["mlm_targets"]),
        ("nsp", nsp_logits, batch["nsp_labels"]),
    ):
        weights = batch[f"{task}_weights"]
        losses, right = cross_entropy(logits, targets)
        sums[f"{task}_loss"] = jnp.sum(losses * weights)
        sums[f"{task}_right"] = jnp.sum(right * weights)
        sums[f"{task}_count"] = jnp.sum(weights)
    return sums


def cross_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """-log softmax(logits)[target] in nats, and whether the target's logit is the highest.

    float32 `[..., classes]`, int32 `[...]` -> float32 `[...]`, bool `[...]`. The target's logit is
    a masked sum, not a gather: its gradient then fuses with the softmax's instead of scattering
    into an array as large as the logits. Comparing it with the maximum, which the softmax needs
    anyway, spares the pass over the logits that an argmax takes.
    """
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    target_logit = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    highest = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    log_sum = highest + jnp.log(jnp.sum(jnp.exp(logits - highest[..., None]), axis=-1))
    return log_sum - target_logit, target_logit >= highest


def compute_copies(params: dict, dtype) -> dict:
    """`params` with the stacked kernels in `dtype`: cast once, not in each layer and slice."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            leaf.astype(dtype)
            if re.search(r"/layers/.*kernel$", partitioning.path_name(path))
            else leaf
        ),
        params,
    )


def make_update_step(
    model: BertForPreTraining,
    optimizer: optax.GradientTransformation,
    layout: TrainState,
    seed: int,
    *,
    accumulate: int = 1,
    repeat_after: int = 0,
    **masking,
) -> Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]]:
    """The whole step, jitted, its state donated: (state, rows) -> (state, metrics).

    Everything random is a function of (seed, step, row's place in the batch) or of (seed, row,
    epoch): a resumed run draws what the run that never stopped would have drawn, on any mesh. The
    loss is the mean over all masked positions of the global batch plus the mean NSP loss; with
    `accumulate` > 1 each device takes its rows in so many slices, each divided by the whole
    batch's counts. `layout` holds the shardings of the state.
    """
    mesh = layout.step.mesh
    mask_key, dropout_key = jax.random.split(jax.random.key(seed))

    def loss_fn(params, batch, counts, key):
        sums = pretraining_sums(model, params, batch, key)
        return sum(sums[f"{task}_loss"] / counts[task] for task in ("mlm", "nsp")), sums

    def grad_fn(*args):
        values, gradients = jax.value_and_grad(loss_fn, has_aux=True)(*args)
        return values, jax.tree.map(lambda x: x.astype(jnp.float32), gradients)

    def add_gradients(params, batch, counts, key):
        """What the rows of one place on the `data` axis add to the loss and its gradients."""
        if accumulate == 1:
            return grad_fn(params, batch, counts, key)
        # Slice m takes every `accumulate`-th row, so that rows stay where they lie on `fsdp`.
        slices = jax.tree.map(
            lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), batch
        )

        def add_slice(total, part):
            return jax.tree.map(jnp.add, total, grad_fn(params, part, counts, key)), None

        first = jax.tree.map(lambda x: x[0], slices)
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(grad_fn, params, first, counts, key))
        return jax.lax.scan(add_slice, zeros, slices)[0]

    everywhere = NamedSharding(mesh, P())

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(layout, everywhere))
    def update_step(state, rows):
        batch = corrupt_each(mesh, rows, mask_key, repeat_after, **masking)
        counts = {
            task: jnp.maximum(jnp.sum(batch[f"{task}_weights"]), 1) for task in ("mlm", "nsp")
        }
        batch["dropout_rows"] = jnp.arange(rows["tokens"].shape[0])
        step_key = jax.random.fold_in(dropout_key, state.step)
        # Cast where they lie: less to gather, if `layout` divides them over `data`.
        copies = jax.lax.with_sharding_constraint(
            compute_copies(state.params, model.config.dtype), layout.params
        )
        # The devices exchange gradients once, after all layers and slices, and each is given the
        # sums for its part of the parameters.
        (loss, sums), gradients = partitioning.sum_over_data(
            add_gradients, mesh, (everywhere, layout.params)
        )(copies, batch, counts, step_key)
        gradients = jax.lax.with_sharding_constraint(gradients, layout.params)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = means(sums) | {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
        metrics["parameter_norm"] = optax.tree.norm(params)
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics

    return update_step


def make_eval_step(
    model: BertForPreTraining, mesh: Mesh, seed: int, **masking
) -> Callable[[dict, dict[str, jax.Array]], dict[str, jax.Array]]:
    """(params, rows) -> sums over one batch; the masks are fixed by the seed and the row."""
    mask_key = jax.random.key(seed)

    def sums_of_part(params, batch):
        return pretraining_sums(model, params, batch)

    everywhere = NamedSharding(mesh, P())

    @functools.partial(jax.jit, out_shardings=everywhere)
    def eval_step(params, rows):
        batch = corrupt_each(mesh, rows, mask_key, **masking)
        return partitioning.sum_over_data(sums_of_part, mesh, everywhere)(params, batch)

    return eval_step


def means(sums: dict) -> dict:
    """Sums of `pretraining_sums` -> mean losses (nats) and accuracies, NaN-free if empty."""
    result = {}
    for task in ("mlm", "nsp"):
        count = jnp.maximum(sums[f"{task}_count"], 1)
        result[f"{task}_loss"] = sums[f"{task}_loss"] / count
        result[f"{task}_accuracy"] = sums[f"{task}_right"] / count
    return result
