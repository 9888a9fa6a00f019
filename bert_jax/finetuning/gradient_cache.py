"""Computes gradients of a loss that compares the examples of a batch, in microbatches.

GradCache (Gao et al., 2021, "Scaling deep contrastive learning batch size"): the microbatches go
through the model twice: for their outputs, then, once the loss of these is known, for gradients.
The outputs are vectors, or the scores of a cross-encoder.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from bert_jax.model.heads import Head
from bert_jax.training.gradients import microbatch_at


def add_vector_gradients(
    head: Head,
    embed: Callable[[dict], jax.Array],
    microbatches: dict[str, jax.Array],
    num_microbatches: jax.Array,
    weight_sum: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the loss of a batch, and its microbatches with the gradients of their vectors.

    Runs on one data-parallel shard: returns its part of the loss. `embed` computes the vectors of
    one microbatch; `microbatches` are arrays `[microbatches, rows, ...]` of which the first
    `num_microbatches` are used; the entry "vector_gradients" is added to them.
    """

    def embed_at(index, vectors):
        return vectors.at[index].set(embed(microbatch_at(microbatches, index)))

    def batch_loss(vectors):
        return _batch_loss(head, vectors, microbatches, weight_sum)

    shape = jax.eval_shape(embed, microbatch_at(microbatches, 0)).shape
    vectors = jnp.zeros((len(microbatches["tokens"]), *shape))
    vectors = jax.lax.fori_loop(0, num_microbatches, embed_at, vectors)
    loss, gradients = jax.value_and_grad(batch_loss)(vectors)
    return loss, microbatches | {"vector_gradients": gradients}


def _batch_loss(head, vectors, microbatches, weight_sum):
    """Returns one shard's part of the loss of the whole batch, all of whose vectors it gets.

    The gradient of `psum` sums over the shards: those of all parts reach each vector.
    """
    index, num_shards = jax.lax.axis_index("data"), jax.lax.axis_size("data")
    names = ("labels", "weights", "teacher_outputs")
    slots = {name: microbatches[name] for name in names if name in microbatches}
    slots["outputs"] = vectors.reshape(*slots["weights"].shape, -1, vectors.shape[-1])
    slots = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), slots)
    # A batch has at most as many examples as rows, far fewer than slots: each shard sends only its
    # examples, to the places after those of the shards before it.
    num_examples = math.prod(microbatches["tokens"].shape[:2]) * num_shards
    is_used = slots["weights"] > 0
    counts = jax.lax.all_gather(jnp.sum(is_used), "data")
    first = jnp.sum(jnp.where(jnp.arange(num_shards) < index, counts, 0))
    places = jnp.where(is_used, first + jnp.cumsum(is_used) - 1, num_examples)

    def gather(values):
        examples = jnp.zeros((num_examples, *values.shape[1:]), values.dtype)
        return jax.lax.psum(examples.at[places].add(values, mode="drop"), "data")

    rows = jax.tree.map(gather, slots)
    outputs = rows.pop("outputs")
    if head.takes_part:
        return head.batch_loss(outputs, rows, part=(index, num_shards)) / weight_sum
    return head.batch_loss(outputs, rows) / (weight_sum * num_shards)
