"""Computes gradients of a loss that compares the examples of a batch, in microbatches.

GradCache (Gao et al., 2021, "Scaling deep contrastive learning batch size"): the microbatches go
through the model twice: for their outputs, then, once the loss of these is known, for gradients.
The outputs are vectors, or the scores of a cross-encoder.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bert_jax.model.heads import Head
from bert_jax.model.pooling import tokens_of_sequences
from bert_jax.training.gradients import microbatch_at


def add_vector_gradients(
    head: Head,
    embed: Callable[[dict], jax.Array],
    microbatches: dict[str, jax.Array],
    num_microbatches: jax.Array,
    weight_sum: jax.Array,
    progress: dict[str, jax.Array],
    batch_size: int,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the loss of a batch, and its microbatches with the gradients of their vectors.

    Runs on one data-parallel shard: returns its part of the loss. `embed` computes the vectors of
    one microbatch; `microbatches` are arrays `[microbatches, rows, ...]` of which the first
    `num_microbatches` are used; the entry "vector_gradients" is added to them. `progress` has the
    "step" and "num_steps" that `Head.batch_loss` gets.
    """

    def embed_at(index, vectors):
        return vectors.at[index].set(embed(microbatch_at(microbatches, index)))

    def batch_loss(vectors):
        return part_of_batch_loss(head, vectors, microbatches, weight_sum, progress, batch_size)

    shape = jax.eval_shape(embed, microbatch_at(microbatches, 0)).shape
    vectors = jnp.zeros((len(microbatches["tokens"]), *shape))
    vectors = jax.lax.fori_loop(0, num_microbatches, embed_at, vectors)
    loss, gradients = jax.value_and_grad(batch_loss)(vectors)
    return loss, microbatches | {"vector_gradients": gradients}


@jax.named_scope("batch_loss")  # A part of the model in tools/tpu_report.py.
def part_of_batch_loss(
    head: Head,
    vectors: jax.Array,
    microbatches: dict[str, jax.Array],
    weight_sum: jax.Array,
    progress: dict[str, jax.Array],
    batch_size: int,
) -> jax.Array:
    """Returns one shard's part of the loss of the whole batch, all of whose vectors it gets.

    `vectors` are those of the shard's own `microbatches`, and have the same two leading axes. The
    gradient of `psum` sums over the shards: those of all parts reach each vector.
    """
    index, num_shards = jax.lax.axis_index("data"), jax.lax.axis_size("data")
    names = ("labels", "weights", "teacher_outputs")
    slots = {name: microbatches[name] for name in names if name in microbatches}
    is_per_position = head.input_kind == "positions"
    outputs = microbatches["sequence_bounds"] if is_per_position else vectors
    slots["outputs"] = outputs.reshape(*slots["weights"].shape, -1, outputs.shape[-1])
    slots = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), slots)
    # A batch has far fewer examples than slots, and one shard may have all of them: each sends only
    # its examples, to the places after those of the shards before it. The parts are equally large.
    num_slots, num_examples = len(slots["weights"]), -(-batch_size // num_shards) * num_shards
    max_used = min(batch_size, num_slots)
    (used,) = jnp.nonzero(slots["weights"], size=max_used, fill_value=num_slots)
    examples = jax.tree.map(lambda x: x.at[used].get(mode="fill", fill_value=0), slots)
    if is_per_position:
        start, _, end = jnp.moveaxis(examples["outputs"], -1, 0)
        length, slots_per_row = vectors.shape[-2], microbatches["weights"].shape[-1]
        first_tokens = (used // slots_per_row * length)[:, None] + start
        max_tokens = length // start.shape[1]
        vectors = vectors.reshape(-1, vectors.shape[-1])
        examples["outputs"] = tokens_of_sequences(vectors, first_tokens, end - start, max_tokens)
    counts = jax.lax.all_gather(jnp.sum(used < num_slots), "data")
    first = jnp.sum(jnp.where(jnp.arange(num_shards) < index, counts, 0))
    places = jnp.where(used < num_slots, first + jnp.arange(max_used), num_examples)

    def gather(values):
        empty = jnp.zeros((num_examples, *values.shape[1:]), values.dtype)
        return jax.lax.psum(empty.at[places].add(values, mode="drop"), "data")

    rows = jax.tree.map(gather, examples)
    outputs, rows = rows.pop("outputs"), rows | progress
    if head.takes_part:
        return head.batch_loss(outputs, rows, part=(index, num_shards)) / weight_sum
    return head.batch_loss(outputs, rows) / (weight_sum * num_shards)
