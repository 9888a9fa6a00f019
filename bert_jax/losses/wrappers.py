"""Losses made of another: on truncated vectors (Matryoshka), or with regularizers (SPLADE)."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from bert_jax.losses.similarity import PRECISION, unit_vectors


def matryoshka(
    loss: Callable[..., jax.Array], sizes: Sequence[int], factors: Sequence[float]
) -> Callable[..., jax.Array]:
    """Returns the loss that sums `loss` over truncated vectors (Kusupati et al., 2022, section 3).

    MatryoshkaLoss: for each of `sizes`, vectors are truncated to it and normalized, and their loss
    is multiplied by its factor. The arguments of `loss` are vectors `[..., size]`, labels and
    weights, and by name a guide's vectors or the part of the batch. The result raises ValueError
    for vectors that are smaller than one of `sizes`.
    """

    def sum_over_sizes(vectors, labels, weights, **others):
        if max(sizes) > vectors.shape[-1]:
            raise ValueError(
                f"a Matryoshka size of {max(sizes)}, but vectors have {vectors.shape[-1]}: set it "
                "to at most this number"
            )
        losses = (
            factor * loss(unit_vectors(vectors[..., :size]), labels, weights, **others)
            for size, factor in zip(sizes, factors, strict=True)
        )
        return sum(losses)

    return sum_over_sizes


def flops(vectors: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the sum over the vocabulary of the squared mean activation.

    It grows with the expected number of operations of a dot product (Paria et al., 2020, section
    4); FlopsLoss. `vectors` are float32 `[texts, vocabulary]`, `weights` `[texts]`, 0 for unused
    texts.
    """
    sums = jnp.matmul(weights, vectors, precision=PRECISION)
    means = sums / jnp.maximum(jnp.sum(weights), 1e-9)
    return jnp.sum(jnp.square(means))


def splade(
    loss: Callable[..., jax.Array], query_weight: float, passage_weight: float
) -> Callable[..., jax.Array]:
    """Returns `loss` plus weighted `flops` of the queries and of the passages.

    Formal et al. (2021, "SPLADE v2", section 3); SpladeLoss. The arguments of `loss` are vectors
    `[examples, 1 + n, vocabulary]`, labels, and weights `[examples]`; the result has one more,
    which multiplies both weights of the regularizers. These, which are not means over examples, are
    multiplied by the sum of the weights of the examples; each `part` of a batch has an equal share.
    """

    def regularized(vectors, labels, weights, scale=1.0, **part):
        count = vectors.shape[1] - 1
        passages = vectors[:, 1:].reshape(-1, vectors.shape[-1])
        regularizers = query_weight * flops(vectors[:, 0], weights)
        regularizers += passage_weight * flops(passages, jnp.repeat(weights, count))
        _, num_parts = part.get("part", (0, 1))
        regularizers *= scale * jnp.sum(weights) / num_parts
        return loss(vectors, labels, weights, **part) + regularizers

    return regularized


def quadratic_warmup(step: jax.Array, num_steps: jax.Array, fraction: float) -> jax.Array:
    """Returns the factor of the weights of `flops` in an update, float32: from 0 to 1, then 1.

    It rises with the square of `step`, counted from 0, over `fraction` of all steps (Paria et al.,
    2020, section 6; Formal et al., 2021, section 4.1); SpladeRegularizerWeightSchedulerCallback,
    which also takes whole steps. With the fraction 0 it is 1.
    """
    if not fraction:
        return jnp.ones(())
    steps = jnp.maximum(jnp.floor(num_steps * fraction), 1.0)
    return jnp.square(jnp.minimum(step / steps, 1.0))
