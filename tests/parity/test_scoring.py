"""Pseudo-log-likelihoods against a loop over transformers in torch."""

import json
import random

import numpy as np
import pytest

import bert_jax
from bert_jax.tokenizers.export import transformers_files
from tests.golden import make_tokenization as golden
from tests.helpers.corpora import train_bpe

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.2,
    "max_position_embeddings": 70,
}


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(0)
    words = ("the", "river", "unbelievable", "kings", "stone", "crossed", "of", "Straße", "king")
    ends = ("", ".", "!?", ", 1994", '"')
    return [
        " ".join(rng.choices(words, k=rng.randint(1, 12))) + rng.choice(ends) for _ in range(20)
    ]


def save_bert(directory, texts):
    vocabulary = golden.train_vocabulary(texts, True, size=60)
    directory.mkdir()
    (directory / "vocab.txt").write_text("".join(f"{piece}\n" for piece in vocabulary))
    transformers.BertTokenizerFast(str(directory / "vocab.txt")).save_pretrained(directory)
    config = transformers.BertConfig(vocab_size=len(vocabulary), **SIZES)
    transformers.BertForMaskedLM(config).eval().save_pretrained(directory)


def save_roberta(directory, texts):
    tokenizer = train_bpe(directory.parent / "bpe", " ".join(texts), size=320)
    config = transformers.RobertaConfig(
        vocab_size=tokenizer.vocab_size, type_vocab_size=1, pad_token_id=tokenizer.pad_id, **SIZES
    )
    transformers.RobertaForMaskedLM(config).eval().save_pretrained(directory)
    for name, content in transformers_files(tokenizer.stored, 64).items():
        content = content if isinstance(content, str) else json.dumps(content)
        (directory / name).write_text(content)


def score_in_torch(directory, text, mask_rest_of_word):
    """Returns the log probability of each token, masked alone or with the rest of its word."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForMaskedLM.from_pretrained(directory).eval()
    encoded = tokenizer(text, return_tensors="pt")
    ids, words, values = encoded.input_ids[0], encoded.word_ids(), []
    for position in range(1, len(ids) - 1):
        masked, after = ids.clone(), position
        masked[position] = tokenizer.mask_token_id
        while mask_rest_of_word and words[after + 1] == words[position]:
            after += 1
            masked[after] = tokenizer.mask_token_id
        with torch.no_grad():
            logits = model(input_ids=masked[None]).logits[0, position]
        values.append(torch.log_softmax(logits.double(), -1)[ids[position]].item())
    return values


@pytest.mark.parametrize("mask_rest_of_word", [False, True])
@pytest.mark.parametrize("save", [save_bert, save_roberta])
def test_scores_equal_a_loop_over_transformers(save, mask_rest_of_word, texts, tmp_path):
    torch.manual_seed(0)
    save(tmp_path / "model", texts)
    scores = bert_jax.load(tmp_path / "model").score(texts, mask_rest_of_word)
    for text, score in zip(texts, scores, strict=True):
        expected = score_in_torch(tmp_path / "model", text, mask_rest_of_word)
        np.testing.assert_allclose(score.log_probabilities, expected, atol=1e-4)
        assert score.log_likelihood == pytest.approx(sum(expected), abs=1e-4)
