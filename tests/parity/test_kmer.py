"""A tokenizer of k-mers and its model in transformers."""

import numpy as np
import pytest

import bert_jax
from bert_corpus.vocabulary import kmer_vocabulary
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.data.features import make_sequence
from bert_jax.tokenizers.tokenizer import load_tokenizer, tokenizer_from_bytes
from tests.helpers.corpora import random_sequences
from tests.helpers.models import write_random_encoder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("k", [1, 6])
def test_ids_and_states_of_dna_equal_transformers(tmp_path, k):
    (tmp_path / "text").write_text("ACGT\n")
    tokenizer = tokenizer_from_bytes("k.json", kmer_vocabulary(str(tmp_path / "text"), k, "ACGT"))
    ours = bert_jax.load(write_random_encoder(tmp_path / "model", tokenizer))
    save_huggingface(tmp_path / "out", ours.params, ours.settings, ours.tokenizer)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(reference) == tokenizer.vocab_size
    texts = [text for text in random_sequences() if text.strip() and "[" not in text]
    for text, other in zip(texts, reversed(texts), strict=True):
        for pair in ((text,), (text, other)):
            expected = reference(*pair)["input_ids"]
            assert make_sequence(tokenizer, *map(tokenizer.encode, pair))[0].tolist() == expected
    model = transformers.AutoModel.from_pretrained(tmp_path / "out").eval()
    text = "ACGTACGTTGCANNACGT"
    with torch.no_grad():
        expected = model(**reference(text, return_tensors="pt")).last_hidden_state[0].numpy()
    np.testing.assert_allclose(ours.hidden_states(text, layers=-1)[:, 0], expected, atol=1e-5)
    assert load_tokenizer(tmp_path / "out").sha256 == tokenizer.sha256
