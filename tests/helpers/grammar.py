"""A toy grammar, its exact distribution, and the model that knows it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.model.config import BertConfig
from tests.helpers.models import small_model_config

SPECIAL_IDS, MASK_ID, CLS_ID, SEP_ID = (0, 1, 2, 3, 4), 4, 2, 3
VOCAB, NUM_WORDS, LENGTH = 16, 4, 6


def sentences() -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of all sentences, int32 `[sentences, words]`, and their probabilities.

    An article (5, 6); a noun in singular (7, 8) or plural (9, 10), mostly that of the article; a
    verb (11, 12), always in the number of the noun; and a last word (13, 14), mostly that of the
    article. No word is independent of the others.
    """
    found = []
    for article in (0, 1):
        for noun in range(4):
            for last in (0, 1):
                is_plural = noun // 2
                probability = 0.5 * (0.45 if is_plural == article else 0.05)
                probability *= 0.8 if last == article else 0.2
                found.append(((5 + article, 7 + noun, 11 + is_plural, 13 + last), probability))
    ids, probabilities = zip(*found, strict=True)
    return np.array(ids, np.int32), np.array(probabilities)


def entropy() -> float:
    """Returns the entropy of a sentence, in nats."""
    _, probabilities = sentences()
    return float(-np.sum(probabilities * np.log(probabilities)))


def rows_of(words: np.ndarray) -> dict[str, np.ndarray]:
    """Returns packed rows `[CLS] words [SEP]`, of int32 `[rows, words]`."""
    tokens = np.pad(words, ((0, 0), (1, 1)), constant_values=((0, 0), (CLS_ID, SEP_ID)))
    bounds = np.broadcast_to(np.array([0, LENGTH, LENGTH]), (len(words), 1, 3))
    numbers = np.arange(len(words), dtype=np.uint32)
    of_stream = {"row_ids": numbers, "epochs": 0 * numbers, "stream_positions": numbers}
    return {"tokens": tokens.astype(np.int32), "sequence_bounds": bounds.copy()} | of_stream


def draw(count: int, seed: int) -> np.ndarray:
    """Returns random sentences, int32 `[count, words]`."""
    ids, probabilities = sentences()
    return ids[np.random.default_rng(seed).choice(len(ids), count, p=probabilities)]


class ExactModel(nn.Module):
    """Predicts the masked words with their exact probabilities, given the others; no parameters."""

    config: BertConfig = small_model_config(VOCAB, max_position_embeddings=LENGTH)

    def __call__(self, batch: dict, dropout=None) -> tuple[jax.Array, None]:
        return self.predict_tokens(batch, batch["target_positions"]), None

    def predict_tokens(self, batch: dict, positions: jax.Array) -> jax.Array:
        ids, probabilities = sentences()
        words = batch["tokens"][:, None, 1:-1]
        agrees = jnp.all((words == MASK_ID) | (words == ids), axis=-1)
        is_word = np.pad(np.eye(VOCAB)[ids], ((0, 0), (1, 1), (0, 0)))
        joint = jnp.einsum("bs,s,slv->blv", agrees, probabilities, is_word)
        logits = jnp.maximum(jnp.log(joint), -1e9)
        return jnp.take_along_axis(logits, positions[..., None], axis=1)
