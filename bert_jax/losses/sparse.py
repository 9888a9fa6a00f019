"""SPLADE: a loss of sparse vectors, with regularizers that keep them sparse."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def flops(vectors: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the sum over the vocabulary of the squared mean activation.

    It grows with the expected number of operations of a dot product (Paria et al., 2020, section
    4); FlopsLoss. `vectors` are float32 `[texts, vocabulary]`, `weights` `[texts]`, 0 for unused
    texts.
    """
    means = weights @ vectors / jnp.maximum(jnp.sum(weights), 1e-9)
    return jnp.sum(jnp.square(means))


def splade(
    loss: Callable[..., jax.Array], query_weight: float, passage_weight: float
) -> Callable[..., jax.Array]:
    """Returns `loss` plus weighted `flops` of the queries and of the passages.

    Formal et al. (2021, "SPLADE v2", section 3); SpladeLoss. The arguments of `loss` are vectors
    `[examples, 1 + n, vocabulary]`, labels, and weights `[examples]`. The regularizers, which are
    not means over examples, are multiplied by the sum of the weights.
    """

    def regularized(vectors, labels, weights):
        count = vectors.shape[1] - 1
        passages = vectors[:, 1:].reshape(-1, vectors.shape[-1])
        regularizers = query_weight * flops(vectors[:, 0], weights)
        regularizers += passage_weight * flops(passages, jnp.repeat(weights, count))
        return loss(vectors, labels, weights) + regularizers * jnp.sum(weights)

    return regularized
