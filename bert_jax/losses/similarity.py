"""Similarities and distances of vectors, in float32.

`vectors` `[examples, 1 + n, size]` are those of a query and its n passages, the positive first. For
late interaction (ColBERT), `[examples, 1 + n, tokens, size]`: a vector for each token, 0 for
padding.
"""

import jax
import jax.numpy as jnp

FLOAT32_MIN = jnp.finfo(jnp.float32).min
# By default, a TPU rounds the inputs of products to bfloat16: too coarse for a softmax whose
# logits are cosines divided by 0.05.
PRECISION = jax.lax.Precision.HIGHEST


def unit_vectors(vectors: jax.Array) -> jax.Array:
    """Divides vectors by their length; 0 stays 0, with a finite gradient."""
    squares = jnp.sum(jnp.square(vectors), axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))


def dot_products(queries: jax.Array, passages: jax.Array) -> jax.Array:
    """Returns `[queries, passages]` for `[queries, size]` and `[passages, size]`."""
    return jnp.matmul(queries, passages.T, precision=PRECISION)


def own_dot_products(vectors: jax.Array) -> jax.Array:
    """Returns `[examples, n]`: of each query with its own passages."""
    return jnp.einsum("eh,enh->en", vectors[:, 0], vectors[:, 1:], precision=PRECISION)


def max_similarities(queries: jax.Array, passages: jax.Array) -> jax.Array:
    """Sums, over the tokens of a query, their largest dot product with a token of a passage.

    MaxSim of Khattab and Zaharia (2020, "ColBERT", section 3.3); 0 for a passage without tokens.
    Returns `[queries, passages]` for `[queries, tokens, size]` and `[passages, tokens, size]`.
    Computes one query at a time, in the gradient again: all at once would take `[queries, tokens,
    passages, tokens]`.
    """
    is_token = jnp.any(passages != 0, axis=-1)
    has_tokens = jnp.any(is_token, axis=-1)

    @jax.checkpoint
    def scores_of(query):
        products = jnp.einsum("qh,pth->qpt", query, passages, precision=PRECISION)
        largest = jnp.max(jnp.where(is_token, products, FLOAT32_MIN), axis=-1)
        largest = jnp.where(has_tokens, largest, 0.0)
        return jnp.sum(largest, axis=0, where=jnp.any(query != 0, axis=-1)[:, None])

    return jax.lax.map(scores_of, queries)


def own_max_similarities(vectors: jax.Array, max_query_tokens: int | None = None) -> jax.Array:
    """Returns `[examples, n]`: `max_similarities` of each query with its own passages.

    Only the first `max_query_tokens` tokens of a query can differ from 0.
    """

    def scores_of(each):
        return max_similarities(each[:1, :max_query_tokens], each[1:])[0]

    return jax.vmap(scores_of)(vectors)


def cosines(first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns `[...]`: the cosine of each pair of vectors `[..., size]`."""
    return jnp.sum(unit_vectors(first) * unit_vectors(second), axis=-1)


def angle_similarities(first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns `[...]`: the similarity of AnglE for pairs of vectors `[..., size]`.

    The halves of a vector are the real and the imaginary part of complex numbers (Li and Li, 2024,
    "AoE: Angle-optimized embeddings", section 3.4). A vector of odd size gets one 0 more.
    """
    if first.shape[-1] % 2:
        widths = [(0, 0)] * (first.ndim - 1) + [(0, 1)]
        first, second = jnp.pad(first, widths), jnp.pad(second, widths)
    real, imaginary = jnp.split(unit_vectors(first), 2, axis=-1)
    real_of_second, imaginary_of_second = jnp.split(unit_vectors(second), 2, axis=-1)
    same = real * real_of_second + imaginary * imaginary_of_second
    turned = imaginary * real_of_second - real * imaginary_of_second
    return jnp.abs(jnp.sum(same + turned, axis=-1))


def square_roots(squares: jax.Array) -> jax.Array:
    """Returns square roots whose gradient at 0 is 0."""
    is_positive = squares > 0
    return jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, squares, 1.0)), 0.0)


def cosine_distances(first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns `[...]`: 1 - cosine of each pair of vectors `[..., size]`."""
    return 1 - cosines(first, second)


def euclidean_distances(first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns `[...]`: the Euclidean distance of each pair of vectors `[..., size]`."""
    return square_roots(jnp.sum(jnp.square(first - second), axis=-1))
