"""Jitted forward passes over rows of one sequence each, padded to a few compiled shapes."""

import functools
from collections.abc import Iterator, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.data.features import Feature, LabelLayout, RowShape, unpack_rows
from bert_jax.model.bert import BERT_INPUTS, Bert, MlmHead, gather_positions
from bert_jax.model.config import BertConfig


def padded_length(length: int, max_length: int) -> int:
    """Returns `length` rounded up to one of 8 lengths to 512, and at most `max_length`.

    They are 16, 32, 64, 128, 192, 256, 384, 512, ...
    """
    power = max(16, 1 << (length - 1).bit_length())
    step = power // 4 if power > 128 else power
    return min(-(-length // step) * step, max_length)


def batch_by_length(
    features: Sequence[Feature], batch_size: int, max_length: int
) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Yields the indices and rows of features of similar length, longest first.

    All batches have the same number of rows: surplus ones are empty.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    order = sorted(range(len(features)), key=lambda index: -len(features[index]))
    num_rows = min(batch_size, 1 << (len(order) - 1).bit_length())
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        length = padded_length(len(features[indices[0]]), max_length)
        shape = RowShape(length, 1, LabelLayout(), pad_id=0)
        row_features = {row: [features[index]] for row, index in enumerate(indices)}
        yield indices, shape.build(row_features, num_rows)


def _hidden(config: BertConfig, params: dict, rows: dict, **options) -> jax.Array:
    batch = unpack_rows(rows)
    inputs = (batch[name] for name in BERT_INPUTS)
    return Bert(config).apply({"params": params}, *inputs, **options)


@functools.partial(jax.jit, static_argnums=0)
def mlm_logits(config: BertConfig, params: dict, rows: dict, positions: jax.Array) -> jax.Array:
    """Returns masked-LM logits at int32 `[B, K]` positions: float32 `[B, K, padded_vocab]`."""
    masked = gather_positions(_hidden(config, params["bert"], rows), positions)
    gathered_token_embedding = params["bert"]["embeddings"]["token_embedding"][None]
    return MlmHead(config).apply({"params": params["mlm"]}, masked, gathered_token_embedding)


@functools.partial(jax.jit, static_argnums=0)
def head_outputs(model: nn.Module, params: dict, rows: dict) -> jax.Array:
    """Returns the outputs of a model with a task's head for rows, as documented in the model."""
    return model.apply({"params": params}, rows)


@functools.partial(jax.jit, static_argnums=(0, 1))
def hidden_states(config: BertConfig, layers: tuple, params: dict, rows: dict) -> jax.Array:
    """Returns the hidden states of `layers`, float32 `[B, L, len(layers), H]`; 0 is embeddings."""
    states = _hidden(config, params, rows, all_layers=True)
    return jnp.stack([states[layer] for layer in layers], axis=2).astype(jnp.float32)
