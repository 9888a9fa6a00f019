"""Texts are packed into rows of a few shapes."""

import numpy as np
import pytest

from bert_jax.data.features import ModelInput
from bert_jax.inference.forward import batch_by_length


def make_features(lengths):
    return [ModelInput((np.arange(1, n + 1),), (n,)) for n in lengths]


def test_texts_of_all_lengths_take_few_shapes_and_little_padding():
    lengths = np.random.default_rng(0).integers(3, 513, 2000)
    batches = list(batch_by_length(make_features(lengths), batch_size=32, max_length=512))
    shapes = {rows["tokens"].shape for _, rows in batches}
    assert shapes == {(32, 64), (8, 256), (5, 384), (4, 512)}
    assert sum(rows["tokens"].size for _, rows in batches) < 1.25 * lengths.sum()


@pytest.mark.parametrize("max_sequences", [1, 8])
def test_each_text_is_in_one_row(max_sequences):
    features = make_features((20, 2, 42, 4, 8, 60, 64, 65, 99))
    seen = []
    for members, rows in batch_by_length(features, 2, 100, max_sequences):
        assert len(members) <= len(rows["tokens"]) <= 2
        for row, indices in enumerate(members):
            assert 1 <= len(indices) <= max_sequences
            bounds = rows["sequence_bounds"][row, : len(indices)]
            tokens = [rows["tokens"][row, start:end].tolist() for start, _, end in bounds]
            assert tokens == [features[index].sequences[0].tolist() for index in indices]
            assert not rows["tokens"][row, bounds[-1, 2] :].any()
            seen += indices
        assert not rows["tokens"][len(members) :].any()
    assert sorted(seen) == list(range(9))
