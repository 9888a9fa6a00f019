"""Jitted forward passes over texts, one per row, padded to few shapes: each one is compiled."""

import functools
import warnings
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.model.bert import Bert, BertForPreTraining, gather_positions
from bert_jax.model.config import BertConfig
from bert_jax.tokenization import Tokenizer

POOLINGS = ("mean", "cls", "pooler")


def padded_length(length: int, max_length: int) -> int:
    """Returns `length` rounded up by at most a quarter, or to 16, and at most `max_length`."""
    step = max(16, (1 << (length - 1).bit_length()) // 8)
    return min(-(-length // step) * step, max_length)


def text_batches(
    texts: Sequence[str], tokenizer: Tokenizer, batch_size: int, max_length: int
) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """Yields (indices, tokens int32 `[B, L]`, lengths int32 `[B]`) of texts of similar length.

    Texts are truncated to `max_length` tokens, with a warning; surplus rows have length 0. Raises
    TypeError if `texts` is not a list of strings, and ValueError if `batch_size` is less than 1.
    """
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise TypeError("texts must be a list of strings; put a single one into a list")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    ids, room = tokenizer.encode_batch(texts), max_length - 2
    if truncated := sum(len(each) > room for each in ids):
        message = f"{truncated} of {len(texts)} texts are truncated to {max_length} tokens"
        warnings.warn(f"{message}, [CLS] and [SEP] included", stacklevel=3)
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        num_rows = min(batch_size, 1 << (len(indices) - 1).bit_length())
        rows = [[tokenizer.cls_id, *ids[index][:room], tokenizer.sep_id] for index in indices]
        yield indices, *_pad_rows(rows, num_rows, max_length)


def _pad_rows(
    sequences: Sequence[Sequence[int]], num_rows: int, max_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens int32 `[num_rows, L]`, 0 for padding, and lengths int32 `[num_rows]`."""
    length = padded_length(max(map(len, sequences)), max_length)
    tokens, lengths = np.zeros((num_rows, length), np.int32), np.zeros(num_rows, np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
        lengths[row] = len(sequence)
    return tokens, lengths


def _bert_inputs(tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the four inputs of `Bert`, int32 `[B, L]` each, for one single text per row."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    sequence_ids = (positions < lengths[:, None]).astype(jnp.int32)
    return tokens, jnp.zeros_like(tokens), positions, sequence_ids


def mlm_probabilities(
    config: BertConfig, params: dict, tokens: Sequence[int], positions: Sequence[int]
) -> np.ndarray:
    """Returns masked-LM probabilities at `positions` of a sequence: float32 `[K, padded_vocab]`."""
    rows = _pad_rows([tokens], 1, config.max_position_embeddings)
    padded_positions = np.pad([positions], ((0, 0), (0, -len(positions) % 8)))
    logits = _mlm_logits(config, params, *rows, padded_positions)[0, : len(positions)]
    return np.asarray(jax.nn.softmax(logits, axis=-1))


@functools.partial(jax.jit, static_argnums=0)
def _mlm_logits(
    config: BertConfig, params: dict, tokens: jax.Array, lengths: jax.Array, positions: jax.Array
) -> jax.Array:
    def logits(model):
        hidden = model.bert(*_bert_inputs(tokens, lengths))
        return model.mlm(gather_positions(hidden, positions), model.bert.embeddings.token_embedding)

    # Not by __call__, which needs the pooler and the next-sentence head as well.
    return BertForPreTraining(config).apply({"params": params}, method=logits)


@functools.partial(jax.jit, static_argnums=(0, 1))
def pooled_vectors(
    config: BertConfig, pooling: str, params: dict, tokens: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Returns a vector per row, `[B, H]`, from the parameters of `Bert`; see POOLINGS."""
    model, variables = Bert(config), {"params": params}
    hidden = model.apply(variables, *_bert_inputs(tokens, lengths))
    if pooling == "pooler":
        cls_positions = jnp.zeros((len(tokens), 1), jnp.int32)
        return model.apply(variables, hidden, cls_positions, method="pool")[:, 0]
    if pooling == "cls":
        return hidden[:, 0]
    is_token = jnp.arange(tokens.shape[1]) < lengths[:, None]
    total = jnp.sum(hidden, axis=1, where=is_token[:, :, None], dtype=jnp.float32)
    return total / jnp.maximum(lengths, 1)[:, None]


@functools.partial(jax.jit, static_argnums=(0, 1))
def hidden_states(
    config: BertConfig, layers: tuple[int, ...], params: dict, tokens: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Returns the hidden states of `layers`, float32 `[B, L, len(layers), H]`; 0: embeddings."""
    states = Bert(config).apply({"params": params}, *_bert_inputs(tokens, lengths), all_layers=True)
    return jnp.stack([states[layer] for layer in layers], axis=2).astype(jnp.float32)
