"""Losses of a softmax over the passages of all examples in a batch.

`labels` are int32 `[examples, n + m]`: the numbers of the n passages of an example, equal for equal
ones, and of up to m others that answer its query; a negative number in unused entries. Passages
that answer a query are never negatives of it: copies of its own passage, which occur if questions
share a paragraph, and its other positives.

`part` is (index, count): the loss is summed over the index-th of `count` equal shards of the
queries; each query is compared with the passages of the whole batch. A device that computes one has
a fraction of the scores in memory.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bert_jax.losses.similarity import FLOAT32_MIN, dot_products, max_similarities, unit_vectors


def in_batch_loss(
    vectors: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    temperature: float = 0.05,
    symmetric: bool = False,
    part: tuple[int | jax.Array, int] = (0, 1),
) -> jax.Array:
    """Sums over queries -log softmax(dot products / temperature)[own passage], in nats.

    The softmax is over the passages of all examples (Karpukhin et al., 2020, "Dense passage
    retrieval", section 3.2). With vectors of length 1, it is MultipleNegativesRankingLoss.

    Args:
      vectors: float32 `[examples, 1 + n, size]`, of a query, its passage and n - 1 hard negatives.
      labels: as in the docstring of this module.
      weights: float32 `[examples]`, 0 for unused examples.
      temperature: divides the dot products; the inverse of "scale" in sentence-transformers.
      symmetric: whether to average it with -log softmax[own query] of each positive over the
        queries (Radford et al., 2021, "CLIP"), as MultipleNegativesSymmetricRankingLoss does.
      part: as in the docstring of this module.
    """

    def similarities(first, second):
        return dot_products(first, second) / temperature

    return _in_batch_softmax(similarities, vectors, labels, weights, symmetric, part)


def late_interaction_loss(
    vectors: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    temperature: float = 1.0,
    max_query_tokens: int | None = None,
    part: tuple[int | jax.Array, int] = (0, 1),
) -> jax.Array:
    """Returns `in_batch_loss` with `max_similarities` in place of dot products.

    ColBERT (Khattab and Zaharia, 2020); MultiVectorMultipleNegativesRankingLoss. `vectors` are
    float32 `[examples, 1 + n, tokens, size]`, 0 for tokens that do not count. Only the first
    `max_query_tokens` of a query can differ from 0.
    """

    def similarities(queries, passages):
        return max_similarities(queries[:, :max_query_tokens], passages) / temperature

    return _in_batch_softmax(similarities, vectors, labels, weights, symmetric=False, part=part)


def _in_batch_softmax(
    similarities: Callable[[jax.Array, jax.Array], jax.Array],
    vectors: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    symmetric: bool,
    part: tuple[int | jax.Array, int],
) -> jax.Array:
    """Returns `in_batch_loss` for any function of queries and passages to their similarities."""
    index, number = part
    size, count = len(vectors) // number, vectors.shape[1] - 1

    def shard_of(values):
        return jax.lax.dynamic_slice_in_dim(values, index * size, size)

    vectors_of_part, labels_of_part = shard_of(vectors), shard_of(labels)
    own, is_unused = shard_of(jnp.arange(len(vectors)))[:, None], weights == 0
    passages = vectors[:, 1:].reshape(-1, *vectors.shape[2:])
    scores = similarities(vectors_of_part[:, 0], passages)
    answers = _answers(labels_of_part, labels, count)
    own_scores = jnp.take_along_axis(scores, own * count, axis=1)
    losses = _softmax_losses(scores, own_scores, answers | jnp.repeat(is_unused, count))
    if symmetric:
        scores = similarities(vectors_of_part[:, 1], vectors[:, 0])
        answered = _answers(labels, labels_of_part, count)[:, ::count].T
        losses += _softmax_losses(scores, own_scores, answered | is_unused)
        losses /= 2
    return jnp.sum(losses * shard_of(weights))


def guided_in_batch_loss(
    vectors: jax.Array,
    guide_vectors: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    temperature: float = 0.01,
    margin: float = 0.0,
    relative_margin: bool = False,
    contrast_queries: bool = True,
    contrast_positives: bool = True,
) -> jax.Array:
    """Returns `in_batch_loss` of cosines, without negatives that a guide finds too similar.

    GISTEmbed (Solatorio, 2024, section 3); GISTEmbedLoss. Two texts are no negatives of each other
    if their cosine by the guide exceeds that of the query and its positive, less a margin.

    Args:
      vectors, labels, weights, temperature: as in `in_batch_loss`.
      guide_vectors: float32 `[examples, 1 + n, size of the guide's]`, of the same texts.
      margin: see above.
      relative_margin: whether the margin is a fraction of the cosine that it is subtracted from.
      contrast_queries: whether the other queries are negatives of a query, too.
      contrast_positives: whether the other positives are negatives of a positive, too.
    """
    vectors, guide_vectors = unit_vectors(vectors), unit_vectors(guide_vectors)
    num_examples, count = len(vectors), vectors.shape[1] - 1
    answers = _answers(labels, labels, count).reshape(num_examples, num_examples, count)
    is_own = jnp.eye(num_examples, dtype=bool)
    # Which columns of texts are compared, and which of their pairs are known to be no negatives.
    columns = [(0, 1 + index, answers[..., index]) for index in range(count)]
    columns += [(0, 0, is_own)] if contrast_queries else []
    columns += [(1, 1, is_own | answers[..., 0])] if contrast_positives else []
    own_by_guide = jnp.sum(guide_vectors[:, 0] * guide_vectors[:, 1], axis=-1, keepdims=True)
    margin = jnp.abs(own_by_guide) * margin if relative_margin else margin
    scores, excluded = [], []
    for first, second, known in columns:
        scores.append(dot_products(vectors[:, first], vectors[:, second]) / temperature)
        by_guide = dot_products(guide_vectors[:, first], guide_vectors[:, second])
        excluded.append(known | (by_guide > own_by_guide - margin) | (weights == 0))
    own = jnp.diagonal(scores[0])[:, None]
    losses = _softmax_losses(jnp.concatenate(scores, 1), own, jnp.concatenate(excluded, 1))
    return jnp.sum(losses * weights)


def _answers(labels, labels_of_passages, count):
    """Returns bool `[queries, count passages of each example]`: which ones answer each query."""
    numbers = labels_of_passages[:, :count].reshape(-1)
    positives = jnp.concatenate([labels[:, :1], labels[:, count:]], axis=1)
    return jnp.any(numbers[:, None] == positives[:, None], axis=-1)


def _softmax_losses(scores, own, excluded):
    """Returns `[examples]`: -log softmax of `own` `[examples, 1]` and the scores not excluded."""
    margins = jnp.where(excluded, FLOAT32_MIN, scores - own)
    # log(1 + sum of exp(margins)): unlike the softmax, it does not round a small loss to 0.
    return jax.nn.softplus(jax.nn.logsumexp(margins, axis=-1))
