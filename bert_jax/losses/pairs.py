"""Losses of pairs of texts with a label: a similarity, or whether they belong together.

`vectors` are float32 `[examples, 2, size]`; `labels` and `weights` float32 `[examples]`, the
weights 0 for unused examples.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bert_jax.losses.similarity import (
    FLOAT32_MIN,
    angle_similarities,
    cosine_distances,
    cosines,
    square_roots,
)


def cosent_loss(
    vectors: jax.Array, labels: jax.Array, weights: jax.Array, temperature: float = 0.05
) -> jax.Array:
    """Returns the sum of the weights times log(1 + sum over pairs of pairs of exp(difference)).

    A difference is that of two cosines, divided by the temperature; it should be negative, because
    its first pair has the lower label. CoSENT (Huang et al., 2024, section 3); CoSENTLoss, which is
    the logarithm alone, for the whole batch.
    """
    return _ranking_loss(cosines, vectors, labels, weights, temperature)


def angle_loss(
    vectors: jax.Array, labels: jax.Array, weights: jax.Array, temperature: float = 0.05
) -> jax.Array:
    """Returns `cosent_loss` with `angle_similarities` in place of cosines; AnglELoss."""
    return _ranking_loss(angle_similarities, vectors, labels, weights, temperature)


def _ranking_loss(similarity: Callable, vectors, labels, weights, temperature):
    scores = similarity(vectors[:, 0], vectors[:, 1]) / temperature
    is_used = weights > 0
    is_ordered = (labels[:, None] < labels) & is_used[:, None] & is_used
    differences = jnp.where(is_ordered, scores[:, None] - scores, FLOAT32_MIN)
    return jax.nn.softplus(jax.nn.logsumexp(differences)) * jnp.sum(weights)


def cosine_similarity_loss(vectors: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """Sums the squared differences of cosines and labels; CosineSimilarityLoss."""
    return jnp.sum(jnp.square(cosines(vectors[:, 0], vectors[:, 1]) - labels) * weights)


def contrastive_loss(
    vectors: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    margin: float = 0.5,
    distance: str = "cosine",
) -> jax.Array:
    """Sums distance^2 / 2 of pairs with the label 1, and max(0, margin - distance)^2 / 2 of others.

    Hadsell et al. (2006, "Dimensionality reduction by learning an invariant mapping");
    ContrastiveLoss. Labels between 0 and 1 weight the two terms.

    Args:
      margin: the distance beyond which pairs with the label 0 have no loss.
      distance: a key of `PAIR_DISTANCES`.
    """
    distances = PAIR_DISTANCES[distance](vectors[:, 0], vectors[:, 1])
    apart = jnp.square(jax.nn.relu(margin - distances))
    losses = (labels * jnp.square(distances) + (1 - labels) * apart) / 2
    return jnp.sum(losses * weights)


def online_contrastive_loss(
    vectors: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    margin: float = 0.5,
    distance: str = "cosine",
) -> jax.Array:
    """Returns the sum of the weights times the squared distances and margins of hard pairs.

    A pair with the label 1 is hard if it is farther apart than the closest pair with the label 0,
    and a pair with the label 0 if it is closer than the farthest pair with the label 1. Without a
    pair of the other label, the mean distance of their own label takes its place.
    OnlineContrastiveLoss, which is the sum over the pairs of the batch and no mean. Arguments are
    as in `contrastive_loss`; other labels than 0 and 1 have no loss.
    """
    distances = PAIR_DISTANCES[distance](vectors[:, 0], vectors[:, 1])
    is_positive = (labels == 1) & (weights > 0)
    is_negative = (labels == 0) & (weights > 0)

    def mean(mask):
        return jnp.sum(distances * mask) / jnp.maximum(jnp.sum(mask), 1)

    farthest = jnp.max(jnp.where(is_positive, distances, -jnp.inf))
    closest = jnp.min(jnp.where(is_negative, distances, jnp.inf))
    farthest = jnp.where(jnp.any(is_positive), farthest, mean(is_negative))
    closest = jnp.where(jnp.any(is_negative), closest, mean(is_positive))
    positives = jnp.square(distances) * (is_positive & (distances > closest))
    apart = jnp.square(jax.nn.relu(margin - distances))
    negatives = apart * (is_negative & (distances < farthest))
    return jnp.sum(positives + negatives) * jnp.sum(weights)


def _shifted_euclidean_distances(first, second):
    """Adds 1e-6 to each difference, as `torch.nn.functional.pairwise_distance` does."""
    return square_roots(jnp.sum(jnp.square(first - second + 1e-6), axis=-1))


PAIR_DISTANCES = {"cosine": cosine_distances, "euclidean": _shifted_euclidean_distances}
"""Distances of pairs of vectors, as sentence-transformers computes them in these losses."""
