"""`search` against sorting all dot products in float64."""

import numpy as np
import pytest
import scipy.sparse

from bert_jax.tasks import search as search_module
from bert_jax.tasks.search import search, search_sparse


@pytest.mark.parametrize(("top_k", "scores_at_once"), [(1, 2**23), (4, 128), (7, 2**23), (999, 1)])
def test_found_are_the_largest_dot_products_in_order(top_k, scores_at_once, monkeypatch):
    """In blocks that end within and between arrays, in groups, and in several parts of queries."""
    monkeypatch.setattr(search_module, "MIN_BLOCK", 64)
    monkeypatch.setattr(search_module, "SCORES_AT_ONCE", scores_at_once)
    rng = np.random.default_rng(0)
    # Whole numbers: many scores are equal, and float32 is exact. Some are -0.
    queries, vectors = (rng.integers(-2, 3, (count, 4)).astype(np.float32) for count in (4, 300))
    vectors[::3] *= -1.0
    found = search(queries, np.split(vectors, [75, 75, 150]), top_k)
    exact = queries.astype(np.float64) @ vectors.astype(np.float64).T
    expected = np.argsort(-exact, axis=1, kind="stable")[:, :top_k]
    np.testing.assert_array_equal(found.indices, expected)
    np.testing.assert_array_equal(found.scores, np.take_along_axis(exact, expected, axis=1))
    assert found.scores.dtype == np.float32 and found.indices.dtype == np.int64


def test_one_query_and_vectors_in_half_precision():
    rng = np.random.default_rng(0)
    query, vectors = rng.normal(size=8), rng.normal(size=(20, 8)).astype(np.float16)
    found = search(query, vectors, 5)
    exact = vectors.astype(np.float64) @ query
    np.testing.assert_array_equal(found.indices, np.argsort(-exact)[:5])
    np.testing.assert_allclose(found.scores, exact[found.indices], rtol=1e-6)


def test_nothing_is_found_without_vectors_or_queries():
    assert search(np.ones((2, 3)), np.ones((0, 3))).indices.shape == (2, 0)
    assert search(np.ones((0, 3)), np.ones((4, 3))).scores.shape == (0, 4)


@pytest.mark.parametrize(
    ("queries", "vectors", "top_k", "message"),
    [
        (np.ones((2, 3)), np.ones((4, 5)), 1, r"got \[2, 3\] and \[4, 5\]"),
        (np.ones((2, 3)), np.ones(3), 1, r"got \[2, 3\] and \[3\]"),
        (1.0, np.ones((4, 5)), 1, r"got \[\] and \[4, 5\]"),
        (np.ones(3), np.ones((4, 3)), 0, "top_k must be a whole number, at least 1, got 0"),
        (np.ones(3), np.ones((4, 3)), 2.0, "top_k must be a whole number, .* got 2.0"),
        (np.array([1, np.nan]), np.ones((4, 2)), 1, "values that are not finite"),
    ],
)
def test_invalid_arguments_are_clear_errors(queries, vectors, top_k, message):
    with pytest.raises(ValueError, match=message):
        search(queries, vectors, top_k)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 12, 19])
def test_a_value_that_is_not_finite_is_found_in_every_block(value, place, monkeypatch):
    monkeypatch.setattr("bert_jax.tasks.search.MIN_BLOCK", 8)
    monkeypatch.setattr("bert_jax.tasks.search.SCORES_AT_ONCE", 64 * 3)
    rng = np.random.default_rng(0)
    queries, vectors = rng.normal(size=(7, 3)), rng.normal(size=(20, 3))
    search(queries, [vectors[:5], vectors[5:]], 1)
    vectors[place, 1] = value
    with pytest.raises(ValueError, match="not finite"):
        search(queries, [vectors[:5], vectors[5:]], 1)


def test_sparse_search_equals_that_of_the_same_dense_vectors(monkeypatch):
    monkeypatch.setattr("bert_jax.tasks.search.MIN_BLOCK", 7)
    rng = np.random.default_rng(0)
    queries, *shards = (
        (rng.integers(1, 3, (count, 20)) * (rng.random((count, 20)) < 0.2)).astype(np.float32)
        for count in (5, 17, 1, 30)
    )
    for top_k in (1, 10, 100):
        expected = search(queries, shards, top_k)
        found = search_sparse(
            scipy.sparse.csr_array(queries), [*map(scipy.sparse.csr_array, shards)], top_k
        )
        np.testing.assert_array_equal(found.scores, expected.scores)
        np.testing.assert_array_equal(found.indices, expected.indices)
