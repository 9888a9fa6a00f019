"""`search` against sorting all dot products in float64."""

import numpy as np
import pytest

from bert_jax.tasks import search as search_module
from bert_jax.tasks.search import search


@pytest.mark.parametrize("scores_at_once", [1, 100, 2**24])
@pytest.mark.parametrize("top_k", [1, 4, 30, 99])
def test_found_are_the_largest_dot_products_in_order(top_k, scores_at_once, monkeypatch):
    monkeypatch.setattr(search_module, "SCORES_AT_ONCE", scores_at_once)
    rng = np.random.default_rng(0)
    # Whole numbers: many scores are equal, and float32 is exact.
    queries, vectors = (rng.integers(-2, 3, (count, 4)).astype(np.float32) for count in (5, 30))
    found = search(queries, vectors, top_k)
    exact = queries.astype(np.float64) @ vectors.astype(np.float64).T
    expected = np.argsort(-exact, axis=1, kind="stable")[:, :top_k]
    np.testing.assert_array_equal(found.indices, expected)
    np.testing.assert_array_equal(found.scores, np.take_along_axis(exact, expected, axis=1))
    assert found.scores.dtype == np.float32 and found.indices.dtype == np.int64
    one = search(queries[0], vectors, top_k)
    np.testing.assert_array_equal(one.indices, found.indices[0])
    np.testing.assert_array_equal(one.scores, found.scores[0])


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
