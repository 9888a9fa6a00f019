"""The mean of checkpoints: its weights, where it is loaded, and what cannot be averaged."""

import flax
import jax
import numpy as np
import pytest

import bert_jax
from bert_jax.checkpoints.average import average_models
from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.parameters import model_settings
from bert_jax.checkpoints.read import read_model
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import WORDS, write_vocabulary
from tests.helpers.models import random_classifier, small_model_config
from tools import average_checkpoints


def write_model(directory, seed: int, words=WORDS, head=None, **fields):
    """Writes a model of random weights."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(write_vocabulary(directory.with_suffix(".txt"), words))
    config = small_model_config(64, num_layers=1, **fields)
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda leaf: np.float32(rng.normal(0, 1, leaf.shape)), random_classifier(config, 2)
    )
    settings = model_settings(config, params) | {
        "head": {"task": "classification", "labels": head or ["north", "south"]}
    }
    write_checkpoint(directory, params, settings, tokenizer)
    return directory


@pytest.fixture
def run(tmp_path):
    """A workdir with the checkpoints of three steps."""
    for step in (5, 10, 100):
        write_model(tmp_path / f"run/checkpoints/{step}", seed=step)
    return tmp_path / "run"


def expected_mean(run, steps) -> dict:
    models = [read_model(run / f"checkpoints/{step}").params for step in steps]
    flat = [flax.traverse_util.flatten_dict(jax.device_get(each), sep="/") for each in models]
    return {
        name: np.mean([np.float64(each[name]) for each in flat], axis=0).astype(np.float32)
        for name in flat[0]
    }


@pytest.mark.slow
def test_mean_of_the_last_checkpoints_loads_like_any_model(run, tmp_path):
    checkpoints = average_checkpoints.last_checkpoints(run, 2)
    assert checkpoints == [run / "checkpoints/10", run / "checkpoints/100"]
    average_checkpoints.average(checkpoints, tmp_path / "mean")
    with pytest.raises(FileExistsError, match="mean exists already: choose another OUT"):
        average_checkpoints.average(checkpoints, tmp_path / "mean")
    with pytest.raises(ValueError, match="s3://bucket/mean: expected a local directory, or gs://"):
        average_checkpoints.average(checkpoints, "s3://bucket/mean")
    found = flax.traverse_util.flatten_dict(read_model(tmp_path / "mean").params, sep="/")
    expected = expected_mean(run, (10, 100))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
        assert found[name].dtype == np.float32
    assert (tmp_path / "mean/checksums.json").exists()
    model = bert_jax.load(tmp_path / "mean")
    assert {each.label for each in model.classify(["the king", "the war"])} <= {"north", "south"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"words": [*WORDS[:-1], "zebra"]}, "their vocabulary"),
        ({"layer_norm_epsilon": 1e-5}, r"architecture.layer_norm_epsilon, 1e-12 and 1e-05"),
        ({"intermediate_size": 32}, r"architecture.intermediate_size, 64 and 32"),
        ({"head": ["a", "b"]}, "their head"),
    ],
)
@pytest.mark.slow
def test_models_that_differ_are_refused_by_what_differs(run, fields, message, tmp_path):
    other = write_model(tmp_path / "other", seed=1, **fields)
    with pytest.raises(ValueError, match=message):
        average_models([run / "checkpoints/5", other])


def test_one_checkpoint_is_no_average(run):
    with pytest.raises(ValueError, match="at least two"):
        average_models([run / "checkpoints/5"])
    with pytest.raises(ValueError, match=r"--last=4: .* has 3 checkpoints \(5, 10, 100\)"):
        average_checkpoints.last_checkpoints(run, 4)
