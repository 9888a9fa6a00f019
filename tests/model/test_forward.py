"""Texts are padded to few shapes, in batches of similar length."""

import numpy as np

from bert_jax.model.forward import padded_length, text_batches
from bert_jax.tokenization import load_tokenizer
from tests.helpers import write_vocabulary


def test_few_lengths_are_compiled():
    lengths = {padded_length(length, 512) for length in range(2, 513)}
    assert len(lengths) == 16 and max(lengths) == 512
    assert all(length <= padded_length(length, 500) <= 500 for length in range(2, 501))


def test_each_text_is_in_one_batch_with_others_of_similar_length(tmp_path):
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    texts = ["the river " * number for number in (9, 0, 20, 1, 3)]
    expected = [[tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id] for text in texts]
    batches = list(text_batches(texts, tokenizer, batch_size=2, max_length=64))
    assert [indices for indices, _, _ in batches] == [[1, 3], [4, 0], [2]]
    assert [tokens.shape for _, tokens, _ in batches] == [(2, 16), (2, 32), (1, 48)]
    for indices, tokens, lengths in batches:
        for index, row, length in zip(indices, tokens, lengths, strict=True):
            np.testing.assert_array_equal(row[:length], expected[index])
