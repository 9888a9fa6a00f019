"""Losses of triplets: a text, one that belongs to it, and one that does not."""

import jax
import jax.numpy as jnp

from bert_jax.losses.similarity import (
    cosine_distances,
    dot_products,
    euclidean_distances,
    square_roots,
    unit_vectors,
)

DISTANCES = ("euclidean", "cosine")


def triplet_loss(
    vectors: jax.Array, weights: jax.Array, margin: float = 5.0, distance: str = "euclidean"
) -> jax.Array:
    """Sums max(0, distance to the positive - distance to the negative + margin); TripletLoss.

    Schroff et al. (2015, "FaceNet"). With several negatives, averages over these.

    Args:
      vectors: float32 `[examples, 2 + n, size]`, of a text, its positive and n negatives.
      weights: float32 `[examples]`, 0 for unused examples.
      margin: see above.
      distance: one of `DISTANCES`.
    """
    distances_of = euclidean_distances if distance == "euclidean" else cosine_distances
    distances = distances_of(vectors[:, :1], vectors[:, 1:])
    losses = jax.nn.relu(distances[:, :1] - distances[:, 1:] + margin)
    return jnp.sum(jnp.mean(losses, axis=-1) * weights)


def batch_hard_triplet_loss(
    vectors: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    margin: float = 5.0,
    distance: str = "euclidean",
    soft_margin: bool = False,
) -> jax.Array:
    """Sums `triplet_loss` of each text with its hardest positive and negative of the batch.

    Hermans et al. (2017, "In defense of the triplet loss", section 2); BatchHardTripletLoss. The
    distance to the positive is 0 for the only text of its class. In a batch of one class, the
    distance to the negative is the largest of the text's distances.

    Args:
      vectors: float32 `[examples, 1, size]`.
      labels: int32 `[examples]`, the class of each text.
      weights: float32 `[examples]`, 0 for unused examples.
      margin: see `triplet_loss`.
      distance: one of `DISTANCES`.
      soft_margin: takes softplus(difference) in place of max(0, difference + margin);
        BatchHardSoftMarginTripletLoss.
    """
    vectors = vectors[:, 0]
    distances = _all_euclidean(vectors) if distance == "euclidean" else _all_cosine(vectors)
    is_used = weights > 0
    is_same = labels[:, None] == labels
    is_positive = is_same & ~jnp.eye(len(labels), dtype=bool) & is_used
    farthest = jnp.max(distances * is_positive, axis=1)
    largest = jnp.max(jnp.where(is_used, distances, -jnp.inf), axis=1, keepdims=True)
    # Adds to those of the same class what makes them no nearer than any of another class.
    to_negatives = jnp.where(is_used, distances + largest * is_same, jnp.inf)
    differences = farthest - jnp.min(to_negatives, axis=1)
    hinge = jax.nn.softplus(differences) if soft_margin else jax.nn.relu(differences + margin)
    return jnp.sum(jnp.where(is_used, hinge * weights, 0.0))


def _all_cosine(vectors):
    """Returns `[examples, examples]`: 1 - cosine of all pairs of vectors `[examples, size]`."""
    vectors = unit_vectors(vectors)
    return 1 - dot_products(vectors, vectors)


def _all_euclidean(vectors):
    """Returns `[examples, examples]`: the distances of all pairs of vectors `[examples, size]`."""
    products = dot_products(vectors, vectors)
    squares = jnp.diagonal(products)
    return square_roots(squares[:, None] - 2 * products + squares)
