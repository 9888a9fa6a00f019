"""Moments of another run: of each parameter, row and layer that is the same in both."""

import logging

import flax
import jax
import numpy as np
import optax
import pytest

from bert_jax.checkpoints.enlarge import deepen, lengthen, widen
from bert_jax.checkpoints.native import Checkpointer
from bert_jax.checkpoints.new_vocabulary import extend_vocabulary, replace_vocabulary
from bert_jax.checkpoints.parameters import LoadedModel, LoadReport, model_settings
from bert_jax.objectives.masked_lm import PretrainingModel
from bert_jax.tokenizers.suggest_words import given_words
from bert_jax.tokenizers.tokenizer import load_tokenizer
from bert_jax.training.moments import read_moments
from bert_jax.training.state import TrainState
from tests.helpers.corpora import write_vocabulary
from tests.helpers.models import example_batch, random_params, small_model_config

TOKENS = "encoder/embeddings/token_embedding/embedding"
POSITIONS = "encoder/embeddings/position_embedding/embedding"


@pytest.fixture
def run(tmp_path):
    """A model, the checkpoint of a run that trained it, and its moments by path."""
    vocabulary = write_vocabulary(tmp_path / "vocab.txt", ["[unused0]", "the", *"abc", "##b"])
    tokenizer = load_tokenizer(vocabulary)
    config = small_model_config(tokenizer.vocab_size)
    params = random_params(PretrainingModel(config), example_batch())
    settings = model_settings(config, params)
    moments = jax.tree.map(lambda leaf: np.float32(leaf + 3), params)
    adam = optax.ScaleByAdamState(np.int32(7), moments, jax.tree.map(np.square, moments))
    opt_state = (optax.EmptyState(), (adam, optax.EmptyState()))  # As nested as stable_adamw's.
    checkpointer = Checkpointer(tmp_path, settings, tokenizer, keep_last=1)
    checkpointer.save(TrainState(np.int32(7), params, opt_state))
    checkpointer.close()
    model = LoadedModel(params, settings, tokenizer, LoadReport((), (), ()))
    return model, tmp_path / "checkpoints/7", flat(moments)


def flat(tree) -> dict:
    return flax.traverse_util.flatten_dict(tree, sep="/")


def read(directory, model) -> dict:
    """Returns the means by path, of which the squares are those of the same elements."""
    moments = read_moments(directory, model.params, model)
    assert moments.count == 7
    means, squares = flat(moments.mu), flat(moments.nu)
    for path, leaf in flat(model.params).items():
        assert means[path].shape == leaf.shape
        np.testing.assert_allclose(squares[path], np.square(means[path]), rtol=1e-6)
    return means


def check_other_rows_are_zero(table, rows):
    assert not np.delete(table, rows, axis=0).any() and len(rows) < len(table)


@pytest.mark.slow
def test_layers_and_positions_keep_theirs_and_further_ones_start_from_zero(run, caplog):
    model, directory, saved = run
    with caplog.at_level(logging.INFO):
        means = read(directory, lengthen(deepen(model, 5), 100))
    for path, leaf in means.items():
        rows = {"encoder/layers": 2, POSITIONS: 64}
        count = next((n for name, n in rows.items() if path.startswith(name)), len(leaf))
        np.testing.assert_array_equal(leaf[:count], saved[path])
        assert not leaf[count:].any()
    assert f"64 of 100 rows, for 1: {POSITIONS}" in caplog.text
    assert "zero" not in caplog.text


@pytest.mark.slow
def test_new_tokens_start_from_zero_whatever_their_row(run, caplog):
    model, directory, saved = run
    words, _ = given_words(model.tokenizer, ["ab", "cb"], {})
    extension = extend_vocabulary(model, words)
    assert extension.num_unused == 1  # Its row was another token's.
    with caplog.at_level(logging.INFO):
        means = read(directory, extension.model)
    old = np.setdiff1d(np.arange(model.tokenizer.vocab_size), extension.ids)
    for path in (TOKENS, "mlm/bias"):
        np.testing.assert_array_equal(means[path][old], saved[path][old])
        check_other_rows_are_zero(means[path], old)
    np.testing.assert_array_equal(means[POSITIONS], saved[POSITIONS])
    assert f"{len(old)} of {len(saved[TOKENS])} rows, for 2: {TOKENS}, mlm/bias" in caplog.text


def test_tokens_of_another_vocabulary_keep_theirs_where_their_ids_are_the_same(run, tmp_path):
    model, directory, saved = run
    pieces = ["[unused0]", "the", *"cba", "##b"]  # "b" has the same id.
    other = load_tokenizer(write_vocabulary(tmp_path / "other.txt", pieces))
    replaced = replace_vocabulary(model, other, np.ones((other.vocab_size, 1))).model
    means = read(directory, replaced)
    moved = [other.token_to_id(token) for token in "ac"]
    same = np.setdiff1d(np.arange(other.vocab_size), moved)
    np.testing.assert_array_equal(means[TOKENS][same], saved[TOKENS][same])
    check_other_rows_are_zero(means[TOKENS], same)


def test_other_shapes_names_and_modules_start_from_zero_and_are_logged(run, caplog):
    model, directory, saved = run
    with caplog.at_level(logging.INFO):
        wide = read(directory, widen(model, 64))
    assert {path for path, leaf in wide.items() if leaf.any()} == {"mlm/bias", "nsp/dense/bias"}
    assert "taken for 2 parameters" in caplog.text and "zero, for 28: encoder/" in caplog.text
    renamed = dict(model.params)
    renamed["own"] = renamed.pop("nsp")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        means = read(directory, model._replace(params=renamed))
    assert not means["own/dense/kernel"].any()
    np.testing.assert_array_equal(means["mlm/transform/kernel"], saved["mlm/transform/kernel"])
    assert "zero, for 2: own/dense/bias, own/dense/kernel" in caplog.text
    assert "not used, for 2: nsp/dense/bias, nsp/dense/kernel" in caplog.text
