"""The steps of fine-tuning: rows -> loss -> gradients -> new state, and rows -> predictions."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax import partitioning
from bert_jax.data.features import Feature, RowShape, eval_batches
from bert_jax.heads import POOLED, BertForTask, loss_weights, losses
from bert_jax.train import TrainState

TOKENS_AT_ONCE = {"cpu": 2048, "gpu": 16_384, "tpu": 8_192}
"""What one device takes through the model at once, if not told: enough to keep it busy."""


def rows_at_once(length: int, per_device_batch_size: int, mesh: Mesh) -> int:
    """Rows of `length` in a chunk, over all devices; 0: as many as `TOKENS_AT_ONCE` says."""
    platform = mesh.devices.flat[0].platform
    per_device = per_device_batch_size or max(1, TOKENS_AT_ONCE.get(platform, 8192) // length)
    return per_device * mesh.shape["data"] * mesh.shape["fsdp"]


def fit_chunks(most: int, rows_of_batches: Sequence[int], num_shards: int) -> int:
    """Rows of a chunk, at most `most`, with which batches of so many rows cost the least.

    A chunk costs its rows, padding or not, and by itself about as much as an eighth of `most`:
    its gradients are added to the others'.
    """

    def cost(chunk):
        return sum(-(-rows // chunk) for rows in rows_of_batches) * (chunk + most / 8)

    return min(range(num_shards, most + 1, num_shards), key=cost)


def make_update_step(
    model: BertForTask,
    optimizer: optax.GradientTransformation,
    layout: TrainState,
    chunk_rows: int,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """The whole step, jitted: (state, rows, num_chunks, key) -> (state, metrics).

    `rows` lie as `train_batches` gives them. The first `num_chunks` chunks of them are computed,
    one after the other, and their gradients added; the state is donated. The loss is the mean over
    all labels of the batch, whatever chunk or device they are on. Dropout is a function of (key,
    step, row's place).
    """
    mesh, kind = layout.step.mesh, model.kind
    per_shard = chunk_rows // mesh.shape["data"]

    def loss_fn(params, rows, count, key):
        outputs = model.apply(
            {"params": params}, rows, dropout_rows=rows["places"], rngs={"dropout": key}
        )
        return jnp.sum(losses(kind, outputs, rows) * loss_weights(kind, rows)) / count

    def add_gradients(params, rows, num_chunks, count, key):
        """What the rows of one place on the `data` axis add to the loss and its gradients."""
        chunks = jax.tree.map(lambda x: x.reshape(per_shard, -1, *x.shape[1:]).swapaxes(0, 1), rows)

        def add_chunk(index, total):
            chunk = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, False), chunks)
            added = jax.value_and_grad(loss_fn)(params, chunk, count, key)
            return jax.tree.map(jnp.add, total, added)

        zeros = jnp.zeros([]), jax.tree.map(jnp.zeros_like, params)
        return jax.lax.fori_loop(0, num_chunks, add_chunk, zeros)

    everywhere = NamedSharding(mesh, P())

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(layout, everywhere))
    def update_step(state, rows, num_chunks, key):
        count = jnp.maximum(jnp.sum(loss_weights(kind, rows)), 1)
        rows["places"] = jnp.arange(rows["tokens"].shape[0])
        key = jax.random.fold_in(key, state.step)
        loss, gradients = partitioning.sum_over_data(add_gradients, mesh, everywhere)(
            state.params, rows, num_chunks, count, key
        )
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
        metrics["parameter_norm"] = optax.tree.norm(params)
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics

    return update_step


def make_predict_step(model: BertForTask, mesh: Mesh) -> Callable[[dict, dict], jax.Array]:
    """(params, rows) -> what the head gives, in every process."""

    def outputs_of_part(params, rows):
        return model.apply({"params": params}, rows)

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P()))
    def predict_step(params, rows):
        return jax.shard_map(
            outputs_of_part,
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P("data"),
            axis_names={"data"},
            check_vma=False,
        )(params, rows)

    return predict_step


def predict(
    predict_step: Callable[[dict, dict], jax.Array],
    params: dict,
    features: Sequence[Feature],
    shape: RowShape,
    chunk_rows: int,
    sharding: NamedSharding,
) -> list[np.ndarray]:
    """What the head gives for each feature, as `tasks.task.Outputs` describes it."""
    found = [np.zeros(0)] * len(features)
    for rows, members in eval_batches(features, shape, sharding, chunk_rows):
        outputs = np.asarray(predict_step(params, rows))
        for row, indices in enumerate(members):
            position = slot = 0
            for index in indices:
                feature, count = features[index], shape.sequences_per_feature
                if shape.kind in POOLED:
                    own = outputs[row, slot : slot + count]
                    found[index] = own[:, 0] if shape.kind == "multiple_choice" else own[0]
                else:
                    found[index] = outputs[row, position : position + len(feature)]
                slot, position = slot + count, position + len(feature)
    return found
