"""Jitted forward passes, and how texts of any length are packed into rows of a few shapes."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from bert_jax.data.features import LabelLayout, ModelInput, RowShape, unpack_rows
from bert_jax.model.attention import attention_probabilities
from bert_jax.model.config import pools_last
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan

# Texts of up to 64 tokens rarely leave a row partly empty.
ROW_LENGTHS = (64, 256, 384, 512, 1024, 2048, 4096, 8192)
# The activations of more rows leave a CPU's caches: MiniLM takes 3 % longer with 32, 19 % with 64.
ROWS_PER_BATCH = 16
UNUSED = LabelLayout()
"""Of features without labels."""


def batch_by_length(
    features: Sequence[ModelInput],
    batch_size: int,
    max_length: int,
    max_sequences: int = 8,
    labels: LabelLayout = UNUSED,
) -> Iterator[tuple[list[list[int]], dict[str, np.ndarray]]]:
    """Yields the indices of the features in each row of a batch, and its rows; longest rows first.

    Rows have the smallest of a few lengths that holds the feature. A batch has `batch_size` rows of
    the shortest of these, or as many tokens in fewer rows; surplus rows are empty.
    """
    if not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number, at least 1, got {batch_size!r}")
    row_lengths = sorted({min(length, max_length) for length in (*ROW_LENGTHS, max_length)})
    for shorter, length in reversed(list(zip([0, *row_lengths], row_lengths, strict=False))):
        chosen = [i for i, feature in enumerate(features) if shorter < len(feature) <= length]
        bucket = [features[index] for index in chosen]
        shape = RowShape(length, max_sequences, labels, pad_id=0)
        max_rows = max(1, batch_size * row_lengths[0] // length)
        num_rows = min(max_rows, 1 << (len(shape.pack(bucket)) - 1).bit_length())
        for members, rows in shape.batches(bucket, num_rows):
            yield [[chosen[i] for i in row] for row in members], rows


def compute_rows(
    function: Callable[[dict], jax.Array],
    features: Sequence[ModelInput],
    batch_size: int,
    max_length: int,
    max_sequences: int = 8,
    labels: LabelLayout = UNUSED,
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yields the indices of the features in each row, and the row's outputs; longest rows first.

    `function` computes the outputs of a batch of `batch_by_length`. An output is a view of those of
    its batch: copy what is kept.
    """
    # The bar appears after three seconds.
    with tqdm.tqdm(total=len(features), delay=3, mininterval=1.0, leave=False) as progress:
        batches = batch_by_length(features, batch_size, max_length, max_sequences, labels)
        running = ((members, function(rows)) for members, rows in batches)
        # The device computes a batch while we read the outputs of the one before.
        for (members, arrays), _ in itertools.pairwise(itertools.chain(running, [None])):
            for indices, outputs in zip(members, np.asarray(arrays), strict=False):
                yield indices, outputs
                progress.update(len(indices))


def split_rows(
    rows: Iterable[tuple[list[int], np.ndarray]], counts: Sequence[int]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the index of each feature, and its part of the outputs of its row, a view.

    `counts` are the numbers of outputs of all features, which a row has one after the other: one
    for each token, or for each sequence.
    """
    for indices, outputs in rows:
        start = 0
        for index in indices:
            end = start + counts[index]
            yield index, outputs[start:end]
            start = end


def with_ranks(config, rows: dict, mask_id: int) -> dict:
    """Returns rows whose masks are predicted, with what a query stream needs, if there is one.

    Each mask is predicted from all tokens that are no masks.
    """
    if not getattr(config, "has_query_stream", False):
        return rows
    return rows | {"ranks": (rows["tokens"] == mask_id).astype(jnp.int32)}


@functools.partial(jax.jit, static_argnums=0)
def token_logits(model: nn.Module, params: dict, rows: dict, positions: jax.Array) -> jax.Array:
    """Returns masked-LM logits at int32 `[B, K]` positions: float32 `[B, K, padded_vocab]`."""
    batch = rows | unpack_rows(rows)
    return model.apply({"params": params}, batch, positions, method="predict_tokens")


@functools.partial(jax.jit, static_argnums=0, static_argnames="method")
def head_outputs(model: nn.Module, params: dict, rows: dict, method: str = "__call__") -> jax.Array:
    """Returns the outputs of a model's method for rows, by default those of its one head."""
    batch = rows | unpack_rows(rows, pools_last(model.config))
    return model.apply({"params": params}, batch, method=method)


def spread_head_outputs(
    model: nn.Module, mesh: Mesh, params: dict, rows: dict, method: str = "__call__"
) -> jax.Array:
    """Returns the `head_outputs` of rows over the devices of a mesh, which all have `params`.

    There may be a few more outputs, of empty rows, so that all devices have equally many.
    """
    surplus = -len(rows["tokens"]) % mesh.size
    rows = {
        name: np.pad(values, [(0, surplus)] + [(0, 0)] * (values.ndim - 1))
        for name, values in rows.items()
    }
    return _spread_head_outputs(model, mesh, method, params, rows)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _spread_head_outputs(
    model: nn.Module, mesh: Mesh, method: str, params: dict, rows: dict
) -> jax.Array:
    def outputs(params, rows):
        return head_outputs(model, params, rows, method=method)

    return jax.shard_map(
        outputs,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        check_vma=False,  # Kernels refuse it.
    )(params, rows)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def hidden_states(
    config, plan: ExecutionPlan, layers: tuple[int, ...], params: dict, rows: dict
) -> jax.Array:
    """Returns the hidden states of `layers`, float32 `[B, L, len(layers), H]`; 0 is embeddings.

    `params` are the encoder's.
    """
    states = _all_hidden_states(config, plan, params, rows)
    return jnp.stack([states[layer] for layer in layers], axis=2).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def attention_maps(config, plan: ExecutionPlan, params: dict, rows: dict) -> jax.Array:
    """Returns attention probabilities, float32 `[B, from, layers, heads, to]`.

    `params` are the encoder's.
    """
    states = _all_hidden_states(config, plan, params, rows)
    scores = Encoder(config, plan).apply(
        {"params": params}, unpack_rows(rows), states, method="attention_scores"
    )
    maps = jnp.stack([attention_probabilities(*each, jnp.float32) for each in scores])
    return jnp.transpose(maps, (1, 3, 0, 2, 4))


def _all_hidden_states(config, plan: ExecutionPlan, params: dict, rows: dict) -> jax.Array:
    batch = unpack_rows(rows)
    return Encoder(config, plan).apply({"params": params}, batch, method="all_hidden_states")
