"""Losses of the scores of each query's passages: against labels, or a teacher's scores.

`scores` and, unless said otherwise, `labels` are float32 `[examples, n]`; an entry without a
passage has the label -inf. `weights` are float32 `[examples]`, 0 for unused examples. A
cross-encoder has such scores; those of a bi-encoder are `own_dot_products`, those of late
interaction `own_max_similarities`, both in `losses/similarity.py`.
"""

import math

import jax
import jax.numpy as jnp

from bert_jax.losses.similarity import FLOAT32_MIN

WEIGHTINGS = ("none", "ndcg1", "ndcg2", "lambda_rank", "ndcg2++")
"""The weights of pairs in `lambda_loss`."""


def binary_cross_entropy_loss(
    scores: jax.Array, labels: jax.Array, weights: jax.Array, positive_weight: float = 1.0
) -> jax.Array:
    """Sums the mean, over the passages, of the binary cross-entropy, in nats.

    BinaryCrossEntropyLoss. `labels` are from 0 to 1; `positive_weight` multiplies the term of the
    label 1 ("pos_weight").
    """
    is_passage = labels > -jnp.inf
    labels = jnp.where(is_passage, labels, 0.0)
    positive = positive_weight * labels * jax.nn.softplus(-scores)
    losses = (positive + (1 - labels) * jax.nn.softplus(scores)) * is_passage
    counts = jnp.maximum(jnp.sum(is_passage, axis=-1), 1)
    return jnp.sum(jnp.sum(losses, axis=-1) / counts * weights)


def list_softmax_loss(scores: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """Sums -log softmax(scores)[label], in nats; CrossEntropyLoss.

    `labels` are int32 `[examples]`: the index of the passage that answers the query.
    """
    own = jnp.take_along_axis(scores, labels[:, None], axis=-1)[:, 0]
    return jnp.sum((jax.nn.logsumexp(scores, axis=-1) - own) * weights)


def list_net_loss(scores: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """Sums the cross-entropy of softmax(labels) and softmax(scores), in nats.

    Cao et al. (2007, "Learning to rank: from pairwise approach to listwise approach", section 4);
    ListNetLoss.
    """
    is_passage = labels > -jnp.inf
    log_probabilities = jax.nn.log_softmax(jnp.where(is_passage, scores, FLOAT32_MIN))
    targets = jax.nn.softmax(jnp.where(is_passage, labels, FLOAT32_MIN))
    losses = -jnp.sum(jnp.where(is_passage, targets * log_probabilities, 0.0), axis=-1)
    return jnp.sum(losses * weights)


def lambda_loss(
    scores: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    weighting: str = "ndcg2++",
    k: int | None = None,
    sigma: float = 1.0,
    mu: float = 10.0,
) -> jax.Array:
    """Returns the sum of the weights times the mean of -log2 sigmoid(difference) over pairs.

    Pairs are those of passages of a query with different labels; the difference is that of their
    scores times sigma. Each pair is weighted by what its order contributes to NDCG (Wang et al.,
    2018, "The LambdaLoss framework", section 4). LambdaLoss, which is the mean over all pairs of
    the batch and no mean over queries.

    Args:
      labels: gains, 0 or more.
      weighting: one of `WEIGHTINGS`.
      k: counts only pairs with a passage whose rank by score is at most k; None: all.
      sigma: see above.
      mu: weight of "ndcg2" in "ndcg2++", beside that of "lambda_rank".
    """
    length = scores.shape[1]
    is_passage = labels > -jnp.inf
    order = jnp.argsort(jnp.where(is_passage, -scores, jnp.inf), axis=-1)
    scores = jnp.take_along_axis(scores, order, axis=-1)
    is_passage = jnp.take_along_axis(is_passage, order, axis=-1) & (weights > 0)[:, None]
    gains = 2.0 ** jnp.maximum(labels, 0.0) - 1  # 0 without a passage.
    ranks = jnp.arange(1, length + 1)
    best = jnp.sum((-jnp.sort(-gains, axis=-1) / jnp.log2(1.0 + ranks))[:, :k], axis=-1)
    gains = jnp.take_along_axis(gains, order, axis=-1)

    is_pair = is_passage[:, :, None] & is_passage[:, None]
    if weighting != "ndcg1":
        is_pair &= gains[:, :, None] > gains[:, None]
    if k is not None:
        is_pair &= jnp.minimum(ranks[:, None], ranks) <= k
    relative_gains = gains / jnp.maximum(best, 1e-10)[:, None]
    pair_weights = _pair_weights(weighting, relative_gains, ranks, mu)
    differences = jnp.where(is_pair, scores[:, :, None] - scores[:, None], 0.0)
    losses = jnp.where(is_pair, pair_weights * jax.nn.softplus(-sigma * differences), 0.0)
    mean = jnp.sum(losses) / jnp.maximum(jnp.sum(is_pair), 1) / math.log(2)
    return mean * jnp.sum(weights)


def _pair_weights(weighting, gains, ranks, mu):
    """Returns weights that broadcast to `[examples, n, n]`, for gains `[examples, n]` by rank."""
    discounts = jnp.log2(1.0 + ranks)
    gain_differences = jnp.abs(gains[:, :, None] - gains[:, None])
    distance = jnp.abs(ranks[:, None] - ranks)
    # "ndcg2": the discounts of adjacent ranks that are as far from the top as the pair is apart.
    apart = 1 / jnp.log2(1.0 + jnp.maximum(distance, 1)) - 1 / jnp.log2(2.0 + distance)
    by_distance = jnp.where(distance > 0, apart, 0.0) * gain_differences
    by_rank = jnp.abs(1 / discounts[:, None] - 1 / discounts) * gain_differences
    return {
        "none": jnp.ones(()),
        "ndcg1": (gains / discounts)[:, :, None],
        "ndcg2": by_distance,
        "lambda_rank": by_rank,
        "ndcg2++": mu * by_distance + by_rank,
    }[weighting]


def margin_mse_loss(scores: jax.Array, teacher: jax.Array, weights: jax.Array) -> jax.Array:
    """Sums the mean squared error of the margins between the positive and each negative.

    `teacher` are its scores, float32 `[examples, n]`; the positive is first in both.
    Hofstätter et al. (2020, "Cross-architecture knowledge distillation"); MarginMSELoss, also of
    sparse, multi-vector and cross-encoders.
    """
    errors = (scores[:, :1] - scores[:, 1:]) - (teacher[:, :1] - teacher[:, 1:])
    return jnp.sum(jnp.mean(jnp.square(errors), axis=-1) * weights)


def score_divergence_loss(
    scores: jax.Array,
    teacher: jax.Array,
    weights: jax.Array,
    temperature: float = 1.0,
    teacher_temperature: float = 1.0,
) -> jax.Array:
    """Sums temperature^2 * KL(teacher || student) of the softmax over the passages, in nats.

    Lin et al. (2020, "Tightly-coupled teachers"); DistillKLDivLoss. `teacher` are its scores,
    float32 `[examples, n]`; the temperatures divide those of the student and of the teacher.
    """
    log_student = jax.nn.log_softmax(scores / temperature)
    log_teacher = jax.nn.log_softmax(teacher / teacher_temperature)
    losses = jnp.sum(jnp.exp(log_teacher) * (log_teacher - log_student), axis=-1)
    return temperature**2 * jnp.sum(losses * weights)
