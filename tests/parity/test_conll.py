"""Every word of CoNLL-2003 is predicted once, whatever the window (`make parity`).

BERT_JAX_CONLL is the directory of its files, BERT_JAX_MINILM the directory of the vocabulary;
tools/fetch_data.py fetches both.
"""

import itertools
import os
import pathlib

import pytest

from bert_jax.data.features import NO_LABEL
from bert_jax.tasks.conll import read_sentences
from bert_jax.tasks.tag_sets import find_tag_set
from bert_jax.tasks.tagging import tagging_features
from bert_jax.tokenizers.tokenizer import load_tokenizer

WORDS = {"train": 203_621, "valid": 51_362, "test": 46_435}


@pytest.mark.parametrize("name", WORDS)
def test_every_word_of_conll_2003_is_predicted_once_at_any_length(name):
    files = os.environ.get("BERT_JAX_CONLL"), os.environ.get("BERT_JAX_MINILM")
    if not all(files):
        pytest.skip("BERT_JAX_CONLL or BERT_JAX_MINILM is not set: `make parity` fetches both")
    sentences = read_sentences(pathlib.Path(files[0]) / f"{name}.txt", word_column=0, tag_column=-1)
    tokenizer, labels = (
        load_tokenizer(pathlib.Path(files[1]) / "vocab.txt"),
        find_tag_set(sentences, "none"),
    )
    expected = list(itertools.chain(*(sentence.tags for sentence in sentences)))
    assert len(expected) == WORDS[name]
    for length, document_context in itertools.product((16, 24, 64, 128, 512), (False, True)):
        features, positions, counts = tagging_features(
            sentences, labels, tokenizer, length, document_context
        )
        pairs = list(zip(features, positions, strict=True))
        assert max(map(len, features)) <= length and counts["windows"] == len(features)
        predicted = [labels[number] for feature, words in pairs for number in feature.label[words]]
        assert predicted == expected
        assert sum((feature.label != NO_LABEL).sum() for feature in features) == len(expected)
