"""Texts are padded to few shapes, in batches of similar length."""

import numpy as np

from bert_jax.data.features import Feature
from bert_jax.model.forward import batch_by_length, padded_length


def test_few_lengths_are_compiled():
    lengths = {padded_length(length, 512) for length in range(2, 513)}
    assert sorted(lengths) == [16, 32, 64, 128, 192, 256, 384, 512]
    assert all(length <= padded_length(length, 500) <= 500 for length in range(2, 501))


def test_each_text_is_in_one_batch_with_others_of_similar_length():
    expected = [np.arange(1, length + 1) for length in (20, 2, 42, 4, 8)]
    features = [Feature((tokens,), (len(tokens),)) for tokens in expected]
    batches = list(batch_by_length(features, batch_size=2, max_length=64))
    assert [indices for indices, _ in batches] == [[2, 0], [4, 3], [1]]
    assert [rows["tokens"].shape for _, rows in batches] == [(2, 64), (2, 16), (2, 16)]
    for indices, rows in batches:
        for index, row, (pair,) in zip(
            indices, rows["tokens"], rows["sequence_bounds"], strict=False
        ):
            assert pair.tolist() == [0, len(expected[index]), len(expected[index])]
            np.testing.assert_array_equal(row[: pair[2]], expected[index])
            assert not row[pair[2] :].any()
        assert not rows["tokens"][len(indices) :].any()
