"""The real main in phases: a recipe of today in small, and a decay that branches off."""

import json

import jax
import numpy as np
import pytest

import bert_jax
from bert_jax import pretrain
from bert_jax.checkpoints.native import saved_steps
from bert_jax.configs.pretrain import modernbert_base
from bert_jax.configs.pretrain.fields import make_later_phases
from tests.helpers.corpora import build_small_corpus
from tests.helpers.json_lines import read_lines
from tests.helpers.runs import saved_params, stopped_after_save

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_devices")]


def recipe(corpus, *later_phases, **fields):
    """Returns a small configuration of two steps, then of `later_phases`."""
    config = modernbert_base.get_config("runlocal")
    config.model.update({"size": None, "num_layers": 2, "hidden_size": 32, "num_heads": 2})
    config.model.update(
        {"intermediate_size": 48, "attention_pattern": "gl", "attention_window": 16}
    )
    config.model.update({"attention_dropout_rate": 0.1, "max_position_embeddings": 64})
    config.corpus, config.later_phases = str(corpus), make_later_phases(*later_phases)
    config.update({"num_steps": 2, "warmup_steps": 1, "eval_every": 0, "checkpoint_every": 1})
    config.update({"log_every": 2, "keep_checkpoints": 1, **fields})
    return config.lock()


@pytest.fixture(scope="module")
def phases(corpus, long_corpus, tmp_path_factory):
    """The second phase and the third, in which the learning rate decays."""
    other = build_small_corpus(tmp_path_factory.mktemp("other"), num_documents=30)
    mixture = f"{corpus}:1,{other}:0.5"
    return (
        {"num_steps": 2, "batch_size": 16, "masking.rate": 0.15, "corpus": mixture},
        {"num_steps": 3, "corpus": str(long_corpus), "masking.rate": 0.05}
        | {"model.global_rope_base": 40_000.0, "model.max_position_embeddings": 128},
    )


@pytest.fixture(scope="module")
def whole(corpus, phases, tmp_path_factory):
    """Runs all phases without interruption."""
    workdir = tmp_path_factory.mktemp("whole")
    pretrain.train_and_evaluate(recipe(corpus, *phases, decay_steps=2), workdir)
    return workdir


def reported(workdir) -> dict[int, tuple]:
    names = "train/loss", "learning_rate", "train/mlm_accuracy"
    lines = [line for line in read_lines(workdir / "metrics.jsonl") if names[0] in line]
    return {line["step"]: tuple(line[name] for name in names) for line in lines}


def test_learning_rate_and_masks_follow_the_phases_and_the_stable_checkpoint_is_kept(whole):
    rates = {step: values[1] for step, values in reported(whole).items()}
    peak = 8e-4
    expected = {1: 0, 2: peak, 3: peak, 4: peak, 5: peak, 6: peak, 7: peak * (1 - 0.5**0.5)}
    assert rates == pytest.approx(expected, rel=1e-6)
    assert saved_steps(whole / "checkpoints") == [5, 7]


def test_checkpoint_has_the_rotations_of_the_phase_that_wrote_it(whole):
    first = json.loads((whole / "config.json").read_text())["architecture"]
    last = bert_jax.load(whole).config
    assert (first["global_rope_base"], first["max_position_embeddings"]) == (10_000.0, 64)
    assert (last.global_rope_base, last.max_position_embeddings) == (40_000.0, 128)


def test_decay_from_a_stable_checkpoint_equals_one_run_bit_for_bit(whole, corpus, phases, tmp_path):
    """The branch is also stopped, and resumed without the checkpoint that it started from."""
    stable = recipe(corpus, phases[0], {**phases[1], "num_steps": 1}, decay_steps=0)
    pretrain.train_and_evaluate(stable, tmp_path / "stable")
    branch = recipe(corpus, *phases, decay_steps=2)
    with branch.unlocked():
        branch.branch_from = str(tmp_path / "stable/checkpoints/5")
    with stopped_after_save(pretrain):
        pretrain.train_and_evaluate(branch, tmp_path / "branch")
    assert saved_steps(tmp_path / "branch/checkpoints") == [6]
    with branch.unlocked():
        branch.branch_from = "/moved/checkpoints/5"
    pretrain.train_and_evaluate(branch, tmp_path / "branch")
    jax.tree.map(
        np.testing.assert_array_equal, saved_params(tmp_path / "branch"), saved_params(whole)
    )
    expected = {step: values for step, values in reported(whole).items() if step > 5}
    assert reported(tmp_path / "branch") == expected
