"""Similarities at their limits, and what wraps a loss."""

import numpy as np

from bert_jax.losses.similarity import max_similarities
from bert_jax.losses.wrappers import matryoshka


def test_a_passage_without_tokens_has_the_similarity_0():
    queries, passages = np.ones((1, 2, 3), np.float32), np.zeros((2, 4, 3), np.float32)
    passages[0, 0] = -1
    np.testing.assert_allclose(max_similarities(queries, passages), [[-6, 0]])


def test_a_guide_of_a_matryoshka_loss_is_given_by_name():
    def loss(vectors, labels, weights, guide_vectors):
        return vectors.shape[-1] * labels * weights + guide_vectors

    nested = matryoshka(loss, (4, 2), (1.0, 10.0))
    assert nested(np.ones((1, 4)), 2, 3, guide_vectors=5) == (4 * 6 + 5) + 10 * (2 * 6 + 5)
