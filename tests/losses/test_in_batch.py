"""The in-batch softmax without the passages that answer a query."""

import jax
import numpy as np
import pytest

from bert_jax.data.features import NO_LABEL
from bert_jax.losses.in_batch import in_batch_loss, late_interaction_loss
from tests.suites.heads import in_batch_loss as in_batch_loss_by_hand


def test_in_batch_loss_excludes_the_other_positives_of_a_query():
    queries, passages = [[1, 0], [1, 0], [0, 1]], [[1, 0.1], [0.9, 0.2], [0, 1]]
    vectors = np.swapaxes(np.float32([queries, passages]), 0, 1)
    weights = np.ones(3, np.float32)
    labels = np.array([[0, 1], [1, 0], [2, NO_LABEL]], np.int32)
    assert in_batch_loss(vectors, labels, weights, 0.05) == pytest.approx(1.449e-7, rel=0.01)
    assert in_batch_loss(vectors, labels[:, :1], weights, 0.05) == pytest.approx(2.25, abs=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_in_batch_loss_and_gradient_equal_the_definition(seed):
    """Random copies, positives of other examples, hard negatives and unused examples."""
    rng = np.random.default_rng(seed)
    examples, count, others, unused = 9, int(rng.integers(1, 4)), int(rng.integers(0, 4)), 3
    vectors = rng.normal(size=(examples + unused, 1 + count, 8)).astype(np.float32)
    labels = rng.integers(0, 12, (examples + unused, count + others), dtype=np.int32)
    labels[:, count:][rng.random((examples + unused, others)) < 0.4] = NO_LABEL
    order = rng.permutation(examples + unused)
    used = np.sort(order[:examples])
    weights = np.zeros(examples + unused, np.float32)
    weights[used] = 1
    loss, gradient = jax.value_and_grad(in_batch_loss)(vectors, labels, weights, 0.5)
    expected = in_batch_loss_by_hand(vectors[used], labels[used], 0.5)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert not np.any(gradient[order[examples:]])
    direction, step = rng.normal(size=vectors.shape), 1e-4
    moved = [vectors + sign * step * direction for sign in (1, -1)]
    ends = [in_batch_loss_by_hand(each[used], labels[used], 0.5) for each in moved]
    slope = (ends[0] - ends[1]) / (2 * step)
    assert np.sum(gradient * direction) == pytest.approx(slope, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("loss", ["in_batch", "symmetric", "late_interaction"])
@pytest.mark.slow
def test_parts_add_up_to_the_loss_and_gradient_of_the_whole_batch(loss):
    rng = np.random.default_rng(0)
    size = (2, 4) if loss == "late_interaction" else (4,)
    vectors = rng.normal(size=(12, 3, *size)).astype(np.float32)
    labels = rng.integers(0, 12, (12, 4), dtype=np.int32)
    weights = np.float32(rng.random(12) < 0.8)

    def of_part(vectors, index, number):
        if loss == "late_interaction":
            return late_interaction_loss(vectors, labels, weights, part=(index, number))
        is_symmetric = loss == "symmetric"
        return in_batch_loss(vectors, labels, weights, 0.5, is_symmetric, (index, number))

    def of_parts(vectors, number):
        return sum(of_part(vectors, index, number) for index in range(number))

    for found, expected in zip(
        jax.value_and_grad(of_parts)(vectors, 4),
        jax.value_and_grad(of_parts)(vectors, 1),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
