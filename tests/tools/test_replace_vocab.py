"""The tool that replaces a vocabulary: from texts to a model that is trained further, exported."""

import functools
import importlib
import re

import numpy as np
import pytest

import bert_jax
from bert_corpus.token_vectors import token_vectors
from bert_jax import pretrain
from bert_jax.checkpoints.change_vocabulary import replace_vocab
from bert_jax.checkpoints.read import read_model
from bert_jax.runtime.errors import CheckpointError
from bert_jax.tools.convert_checkpoint import convert
from tests.helpers.corpora import WORDS, build_small_corpus, random_text, write_vocabulary
from tests.helpers.models import write_weights


@pytest.fixture
def given(tmp_path):
    """A model in `model`, another vocabulary in `other.txt`, and `text.txt`."""
    write_weights(tmp_path / "model", write_vocabulary(tmp_path / "vocab.txt", WORDS[2:]))
    write_vocabulary(tmp_path / "other.txt", [*WORDS[::-1], "##ion"])
    (tmp_path / "text.txt").write_text(random_text(60))
    return tmp_path


@pytest.mark.slow
def test_a_model_with_another_vocabulary_is_trained_loaded_and_exported(given, capsys):
    replace_vocab(
        str(given / "model"),
        str(given / "other.txt"),
        str(given / "new"),
        functools.partial(token_vectors, [str(given / "text.txt")]),
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{given / 'new'}: {len(WORDS) + 9} tokens"
    counts = [int(line.split()[0]) for line in lines[1:5]]
    # "the" and "a" are new, and so is "##ion", which occurs nowhere.
    assert counts == [len(WORDS) + 6, 2, 0, 1]
    assert [re.match(r"(\w+): 0\.\d\d \w+, .*, \.\.\.", line)[1] for line in lines[5:]] == [
        "a",
        "the",
    ]
    new, old = bert_jax.load(given / "new"), bert_jax.load(given / "model")
    tables = [
        np.asarray(each.params["encoder"]["embeddings"]["token_embedding"]["embedding"])
        for each in (old, new)
    ]
    ids = [each.tokenizer.token_to_id("river") for each in (old, new)]
    np.testing.assert_array_equal(tables[0][ids[0]], tables[1][ids[1]])
    np.testing.assert_allclose(  # No new token is in this text.
        old.encode("river king ."), new.encode("river king ."), rtol=1e-5, atol=1e-6
    )
    corpus = build_small_corpus(given / "data", given / "new", max_seq_length=32)
    config = importlib.import_module("bert_jax.configs.pretrain.continue").get_config("runlocal")
    config.init_from, config.corpus = str(given / "new"), str(corpus)
    config.num_steps, config.log_every = 2, 1
    pretrain.train_and_evaluate(config, given / "run")
    assert bert_jax.load(given / "run").tokenizer.sha256 == new.tokenizer.sha256
    convert(given / "run", given / "exported", "huggingface")
    exported = read_model(given / "exported")
    assert exported.tokenizer.encode("a river") == new.tokenizer.encode("a river")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output": "model"}, "model exists already: choose another --output"),
        ({"vocabulary": "vocab.txt"}, "vocab.txt is the vocabulary that"),
        ({"vocabulary": "nowhere.txt"}, "no vocabulary at"),
        ({"vocabulary": "text.txt"}, "text.txt, line"),
        ({"source": "nowhere"}, "nowhere does not exist"),
        ({"inputs": "nowhere*"}, "nowhere*"),
        ({"inputs": "short.txt"}, "only 0 tokens occur at least 10 times"),
    ],
)
def test_bad_input_is_an_error_and_leaves_nothing(changes, message, given):
    (given / "short.txt").write_text("a river")
    names = {"source": "model", "vocabulary": "other.txt", "inputs": "text.txt", "output": "new"}
    paths = {name: str(given / path) for name, path in (names | changes).items()}
    paths["token_vectors"] = functools.partial(token_vectors, [paths.pop("inputs")])
    with pytest.raises((CheckpointError, OSError, ValueError), match=re.escape(message)):
        replace_vocab(**paths)
    assert not (given / "new").exists() and not list(given.glob("*.unfinished"))
