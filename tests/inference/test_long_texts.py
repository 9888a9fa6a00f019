"""Texts of thousands of tokens: each in a batch of texts equals itself in a row of its length."""

import dataclasses
import warnings

import jax
import numpy as np
import pytest

from bert_jax.data.features import unpack_rows
from bert_jax.inference.pretrained_model import PretrainedModel
from bert_jax.model.heads import make_model
from bert_jax.objectives.masked_lm import PretrainingModel
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import WORDS, write_vocabulary
from tests.helpers.models import random_params, small_modernbert_config

LENGTHS = 3000, 7990
HEADS = {
    "classify": {"task": "classification", "labels": ["north", "south"]},
    "tag": {"task": "tagging", "labels": ["O", "PER", "LOC"], "scheme": "none"},
    "answer": {"task": "span", "labels": ["start", "end"], "max_seq_length": 8192},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_vocabulary(tmp_path_factory.mktemp("tokenizer") / "vocab.txt"))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Texts of one token a word, with [CLS] and [SEP] of `LENGTHS`."""
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, length - 2)) for length in LENGTHS]


def make(tokenizer, head: dict | None = None) -> PretrainedModel:
    """Returns a random ModernBERT of a global and a local layer, with a head."""
    config = small_modernbert_config(tokenizer.vocab_size, max_position_embeddings=8192)
    rows = {"tokens": np.ones((1, 4), np.int32), "sequence_bounds": np.array([[[0, 4, 4]]])}
    batch = rows | unpack_rows(rows) | {"target_positions": np.zeros((1, 1), np.int32)}
    module = make_model(config, head) if head else PretrainingModel(config, False)
    params = random_params(module, batch)
    return PretrainedModel(config, tokenizer, params, {"head": head} if head else {})


def with_rows_of(model: PretrainedModel, length: int) -> PretrainedModel:
    """Returns the model with rows of at most, and so for such a text of exactly, this length."""
    return dataclasses.replace(
        model, config=dataclasses.replace(model.config, max_position_embeddings=length)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=() if method == "tag" else pytest.mark.exhaustive)
        for method in ("encode", "features", "fill_mask", *HEADS)
    ],
)
def test_a_long_text_among_others_equals_itself_alone(tokenizer, texts, method):
    model = make(tokenizer, HEADS.get(method))
    if method == "fill_mask":
        texts = [f"{text[: text.rindex(' ')]} [MASK]" for text in texts]

    def run(model, texts):
        if method == "answer":  # The question and another [SEP] take the place of four words.
            contexts = [text.split(" ", 4)[-1] for text in texts]
            return model.answer(["the old river"] * len(texts), contexts, top_k=3)
        if method == "classify":
            return model.classify(texts, top_k=2)
        return getattr(model, method)(texts)

    with warnings.catch_warnings(action="error"):  # None is truncated.
        found = run(model, texts)
        for text, length, one in zip(texts, LENGTHS, found, strict=True):
            (alone,) = run(with_rows_of(model, length), [text])
            assert_equal(one, alone)


def assert_equal(found, expected) -> None:
    """Compares results that differ by rounding alone."""
    leaves, structure = jax.tree.flatten(found)
    expected_leaves, expected_structure = jax.tree.flatten(expected)
    assert structure == expected_structure
    for one, other in zip(leaves, expected_leaves, strict=True):
        if isinstance(one, str):
            assert one == other
        else:
            np.testing.assert_allclose(one, other, atol=1e-5)


def test_texts_longer_than_the_model_are_truncated_and_counted(tokenizer, texts):
    model = make(tokenizer)
    with pytest.warns(UserWarning, match=r"1 of 2 texts are truncated to 8192 tokens"):
        tokens = model.tokens([texts[1], f"{texts[1]} {texts[0]}"])
    assert [len(each.ids) for each in tokens] == [7990, 8192]
