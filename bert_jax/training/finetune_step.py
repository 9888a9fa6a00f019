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
from bert_jax.model.heads import PER_SEQUENCE, BertForTask, in_batch_loss, loss_weights, losses
from bert_jax.training.pretrain_step import TrainState

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
    step, row's place in the batch), however many rows a chunk has.

    "embedding" compares each query with the passages of the whole batch. Its chunks go through the
    model twice: first for the vectors alone, and, once the loss of all of them is known, for the
    gradients (Gao et al., 2021, "Scaling deep contrastive learning batch size"). So there too the
    batch may be larger than memory, and neither chunks nor devices change the loss.
    """
    mesh, kind = layout.step.mesh, model.kind
    per_shard = chunk_rows // mesh.shape["data"]

    def outputs_of(params, rows, key):
        return model.apply(
            {"params": params}, rows, dropout_rows=rows["places"], rngs={"dropout": key}
        )

    def loss_fn(params, rows, count, key):
        outputs = outputs_of(params, rows, key)
        return jnp.sum(losses(kind, outputs, rows) * loss_weights(kind, rows)) / count

    def as_chunks(rows):
        return jax.tree.map(lambda x: x.reshape(per_shard, -1, *x.shape[1:]).swapaxes(0, 1), rows)

    def at(chunks, index):
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, False), chunks)

    def add_gradients(params, rows, num_chunks, count, key):
        """What the rows of one place on the `data` axis add to the loss and its gradients."""
        chunks = as_chunks(rows)

        def add_chunk(index, total):
            added = jax.value_and_grad(loss_fn)(params, at(chunks, index), count, key)
            return jax.tree.map(jnp.add, total, added)

        zeros = jnp.zeros([]), jax.tree.map(jnp.zeros_like, params)
        return jax.lax.fori_loop(0, num_chunks, add_chunk, zeros)

    def add_embedding_gradients(params, rows, num_chunks, count, key):
        """The same for "embedding"."""
        chunks = as_chunks(rows)
        shape = jax.eval_shape(outputs_of, params, at(chunks, 0), key).shape

        def embed(index, vectors):
            return vectors.at[index].set(outputs_of(params, at(chunks, index), key))

        vectors = jnp.zeros((chunks["tokens"].shape[0], *shape))
        vectors = jax.lax.fori_loop(0, num_chunks, embed, vectors)

        def batch_loss(vectors):
            """Every place computes the whole of it, and so counts for its share."""
            passages, weights = chunks["labels"], chunks["weights"]
            examples = vectors.reshape(*passages.shape[:-1], -1, vectors.shape[-1])
            examples, passages, weights = (
                jax.lax.all_gather(x.reshape(-1, *x.shape[3:]), "data", tiled=True)
                for x in (examples, passages, weights)
            )
            # Rows have slots for many more examples than a batch has; it has no more than rows.
            most = rows["tokens"].shape[0] * mesh.shape["data"]
            (used,) = jnp.nonzero(weights, size=most, fill_value=len(weights))
            examples, passages, weights = (
                x.at[used].get(mode="fill", fill_value=0) for x in (examples, passages, weights)
            )
            loss = in_batch_loss(examples, passages, weights, model.similarity.temperature)
            return loss / (count * mesh.shape["data"])

        loss, slopes = jax.value_and_grad(batch_loss)(vectors)

        def add_chunk(index, total):
            _, pull_back = jax.vjp(lambda p: outputs_of(p, at(chunks, index), key), params)
            return jax.tree.map(jnp.add, total, *pull_back(at(slopes, index)))

        zeros = jax.tree.map(jnp.zeros_like, params)
        return loss, jax.lax.fori_loop(0, num_chunks, add_chunk, zeros)

    add = add_embedding_gradients if kind == "embedding" else add_gradients
    everywhere = NamedSharding(mesh, P())

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(layout, everywhere))
    def update_step(state, rows, num_chunks, key):
        count = jnp.maximum(jnp.sum(loss_weights(kind, rows)), 1)
        # Row r of chunk c, which lies at r * chunks + c, is number c * chunk_rows + r of the batch.
        rows["places"] = jnp.arange(rows["tokens"].shape[0]).reshape(-1, chunk_rows).T.reshape(-1)
        key = jax.random.fold_in(key, state.step)
        loss, gradients = partitioning.sum_over_data(add, mesh, everywhere)(
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
                feature = features[index]
                count = len(feature.sequences)
                own = outputs[row, slot : slot + count]
                if shape.kind not in PER_SEQUENCE:
                    own = outputs[row, position : position + len(feature)]
                elif shape.kind == "multiple_choice":
                    own = own[:, 0]
                elif shape.kind != "embedding":
                    own = own[0]
                found[index] = own
                slot, position = slot + count, position + len(feature)
    return found
