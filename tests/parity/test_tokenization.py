"""WordPiece against transformers' BertTokenizer on 10,000 strings (`make parity`)."""

import random

import pytest

from bert_jax.tokenizers.tokenizer import tokenizer_from_bytes
from tests.golden import make_tokenization as golden

NUM_TEXTS = 10_000


@pytest.mark.parametrize("lower_case", [True, False])
def test_ids_equal_transformers_on_10000_strings(lower_case):
    rng = random.Random(1)
    texts = [golden.random_text(rng) for _ in range(NUM_TEXTS - len(golden.CASES))]
    texts += golden.CASES
    # Trained on some of the strings, so that the others contain unknown characters.
    vocabulary = golden.train_vocabulary(texts[:4000], lower_case, size=12_000)
    tokenizer = tokenizer_from_bytes("vocab.txt", "\n".join(vocabulary).encode())
    assert tokenizer.lower_case == lower_case
    expected = golden.reference_ids(vocabulary, lower_case, texts)
    actual = tokenizer.encode_batch(texts)
    different = [
        text for text, a, b in zip(texts, actual, expected, strict=True) if list(a) != list(b)
    ]
    assert not different, f"{len(different)} of {NUM_TEXTS} differ, first: {different[0]!r}"
    ids = [token_id for row in actual for token_id in row]
    assert ids.count(tokenizer.unk_id) < 0.5 * len(ids)
