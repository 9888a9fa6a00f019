"""A workdir belongs to one run at a time, whatever ends that run."""

import json
import os
import shlex
import socket
import subprocess
import sys

import pytest
from ml_collections import ConfigDict

from bert_jax.configs.finetune import text_classification
from bert_jax.configs.pretrain import bert_base, fields
from bert_jax.configs.pretrain.fields import make_later_phases
from bert_jax.finetuning import finetune_fields
from bert_jax.runtime.config_fields import flatten
from bert_jax.training.workdir import check_settings, claim_workdir, how_to_train_further
from tests.helpers import commands

HOLDER = """
import pathlib, signal, sys
from bert_jax.training.workdir import claim_workdir
lock = claim_workdir(pathlib.Path(sys.argv[1]), {"seed": 0})
print("claimed", flush=True)
signal.pause()
"""


def test_longer_run_is_refused_with_what_to_do_instead(tmp_path):
    (tmp_path / "result.json").write_text('{"diverged": 3}')
    (tmp_path / "config.json").write_text('{"num_steps": 10, "log_every": 1}')
    check_settings(tmp_path, {"num_steps": 10, "log_every": 2}, {"log_every"})
    with pytest.raises(ValueError, match=r"num_steps: 10 in .*, 20 now") as raised:
        check_settings(tmp_path, {"num_steps": 20, "log_every": 2}, {"log_every"})
    advice = f"start another one, in another workdir, with config.init_from={tmp_path}. "
    assert advice in str(raised.value)
    pretraining = {"num_steps": 20, "init_optimizer": False, "corpus": "corpus/128", "seed": 3}
    with pytest.raises(ValueError, match=r"corpus=corpus/128 .*--config\.seed=4 "):
        check_settings(tmp_path, pretraining)


def corpora(rows: int, *mixture: dict, weights=()) -> list:
    mixed = {"mixture": list(mixture), "weights": list(weights)} if mixture else {}
    return [{"splits": {"train": {"rows": rows}}} | mixed]


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        (
            {"contents": {"dev": "ab12"}, "data": {"dev": "old.csv"}, "num_steps": 3},
            {"contents.dev": "cd34", "data.dev": "new.csv", "num_steps": 4, "num_epochs": 3},
            r"contents\.dev: config\.data\.dev=new\.csv has changed: .*ab12 .* cd34 now",
        ),
        (
            {"contents": {"init_from": "ab12"}},
            {"contents.init_from": "cd34", "init_from": "runs/base"},
            r"contents\.init_from: config\.init_from=runs/base has changed: the hash ",
        ),
        (
            {"corpora": corpora(1000)},
            {"corpora": corpora(2000), "corpus": "wiki"},
            r"corpora: wiki is another corpus or mixture, or was .*: 1,000 rows .*, 2,000 now",
        ),
        (
            {"corpora": corpora(1000)},
            {"corpora": corpora(1000, *corpora(10), weights=(3, 0.5)), "corpus": "wiki:3,books:.5"},
            r": 1,000 rows for .*, 1,000 of weight 3 \+ 10 of weight 0.5 now",
        ),
        ({"seed": 1}, {"seed": 2}, r"seed: 1 in .*, 2 now"),
    ],
)
def test_run_with_other_data_is_told_which_and_not_that_it_cannot_be_extended(
    saved, now, message, tmp_path
):
    (tmp_path / "result.json").write_text('{"diverged": 3}')
    (tmp_path / "config.json").write_text(json.dumps({"num_epochs": 3, **saved}))
    with pytest.raises(ValueError, match=message) as raised:
        check_settings(tmp_path, {"num_epochs": 3, **now}, {"data.dev", "init_from", "corpus"})
    assert "cannot be extended" not in str(raised.value)
    assert "lists the fields that may change" in str(raised.value)


def test_command_to_train_further_can_be_pasted_whatever_the_paths(tmp_path):
    workdir, corpus = tmp_path / "my run [1]", "$HOME/it's a corpus"
    settings = {"init_optimizer": False, "corpus": corpus, "seed": 0}
    command = how_to_train_further(workdir, settings).splitlines()[1]
    words = shlex.split(command)
    assert f"--config.init_from={workdir}" in words and f"--config.corpus={corpus}" in words
    lengths = {"num_steps": 20, "long_phase.num_steps": 0, "later_phases.phase_3.num_steps": 5}
    for step, saved in ((21, ()), (10, (5, 10, 23))):  # Of 21 stable steps.
        for each in saved:
            (workdir / "checkpoints" / str(each)).mkdir(parents=True)
        advice = how_to_train_further(workdir, settings | lengths | {"decay_steps": 4})
        assert f"--config.branch_from={shlex.quote(str(workdir))}/checkpoints/{step}. " in advice
    advice = how_to_train_further(workdir, {"num_steps": 1})
    assert f"config.init_from={shlex.quote(str(workdir))}" in advice


@pytest.mark.parametrize(
    ("config", "may_change"),
    [
        (bert_base.get_config(), fields.MAY_CHANGE),
        (text_classification.get_config(), finetune_fields.MAY_CHANGE),
    ],
    ids=["pre-training", "fine-tuning"],
)
def test_a_run_is_resumed_with_another_value_only_of_a_field_that_may_change(
    config, may_change, tmp_path
):
    (tmp_path / "result.json").write_text('{"diverged": 3}')
    (tmp_path / "config.json").write_text(config.to_json())
    settings = flatten(ConfigDict(json.loads(config.to_json())))  # Lists for tuples.
    changed = {name: "another" for name in may_change & settings.keys()}
    check_settings(tmp_path, settings | changed, may_change)
    for name in ("seed", "learning_rate", "batch_size", "model.dropout_rate", "optimizer"):
        with pytest.raises(ValueError, match=rf"  {name}: .*, 'another' now"):
            check_settings(tmp_path, settings | {name: "another"}, may_change)


def test_a_run_of_an_earlier_version_resumes_with_its_mixture(tmp_path):
    """It has the weights of further corpora in fields that are gone; the contents are compared."""
    contents = json.loads(json.dumps(corpora(1000, *corpora(10), weights=(1.0, 0.5))))
    config = bert_base.get_config().unlock()
    config.later_phases = make_later_phases({"num_steps": 1})
    saved = json.loads(config.to_json())
    saved |= {"corpus": "wiki", "mixture": [["books", 0.5]], "corpora": contents}
    saved["later_phases"]["phase_3"]["mixture"] = [["books", 0.5]]
    (tmp_path / "result.json").write_text('{"diverged": 3}')
    (tmp_path / "config.json").write_text(json.dumps(saved))
    config.corpus = "wiki:1,books:0.5"
    settings = flatten(ConfigDict(json.loads(config.to_json()))) | {"corpora": contents}
    check_settings(tmp_path, settings, fields.may_change(config))


@pytest.mark.parametrize(("saved", "now"), [("", "a/checkpoints/5"), ("a/checkpoints/5", "")])
def test_a_run_is_not_resumed_as_a_branch_of_another_step(saved, now, tmp_path):
    (tmp_path / "result.json").write_text('{"diverged": 3}')
    (tmp_path / "config.json").write_text(json.dumps({"branch_from": saved}))
    for branch in (now, "a/checkpoints/6"):
        with pytest.raises(ValueError, match=f"branch_from: '{saved}' in .*, '{branch}' now"):
            check_settings(tmp_path, {"branch_from": branch}, fields.MAY_CHANGE)
    moved = saved and f"/moved/{saved}/"
    check_settings(tmp_path, {"branch_from": moved}, fields.MAY_CHANGE)


def test_settings_that_are_no_fields_are_ignored(tmp_path):
    (tmp_path / "result.json").write_text('{"diverged": 3}')
    old = {"num_steps": 10, "topology": "v4:2x2x1", "stacked_trials": 2, "languages": ["en"]}
    old |= {"step": 4, "score": 0.5, "scores": {"f1": 0.5}, "tuned_head_settings": {"x": 1}}
    (tmp_path / "config.json").write_text(json.dumps(old))
    check_settings(tmp_path, {"num_steps": 10, "trained_length": 64})


def test_a_field_that_an_old_run_lacks_must_not_be_set(tmp_path):
    (tmp_path / "result.json").write_text('{"diverged": 3}')
    (tmp_path / "config.json").write_text('{"num_steps": 10}')
    for value in (False, 0, "", None, []):
        check_settings(tmp_path, {"num_steps": 10, "new": value})
    with pytest.raises(ValueError, match=r"new: None in .*, True now"):
        check_settings(tmp_path, {"num_steps": 10, "new": True})


def test_workdir_in_use_names_its_holder_until_the_run_ends(tmp_path):
    with claim_workdir(tmp_path / "run", {"seed": 0}):
        with pytest.raises(ValueError, match="is in use by process") as raised:
            claim_workdir(tmp_path / "run", {"seed": 0})
        assert f"in use by process {os.getpid()} on {socket.gethostname()}: wait" in str(
            raised.value
        )
    claim_workdir(tmp_path / "run", {"seed": 0})


def test_refused_claim_frees_the_workdir(tmp_path):
    with claim_workdir(tmp_path, {"seed": 1}):
        (tmp_path / "result.json").write_text('{"diverged": 3}')
    with pytest.raises(ValueError, match=r"seed: 1 in .*, 0 now") as refused:
        claim_workdir(tmp_path, {"seed": 0})
    claim_workdir(tmp_path, {"seed": 1})
    assert refused.tb  # Its frames, which are still alive, do not hold the lock.


def test_killed_run_frees_its_workdir(tmp_path):
    workdir, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "-c", HOLDER, str(workdir)]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, cwd=commands.ROOT)
    with commands.ended([process]):
        commands.wait_for(log, "claimed", [process])
        with pytest.raises(ValueError, match=f"is in use by process {process.pid} on"):
            claim_workdir(workdir, {"seed": 0})
    claim_workdir(workdir, {"seed": 0})


def test_workdir_without_locks_is_claimed_with_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError("locks are not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    claim_workdir(tmp_path / "run", {"seed": 0})
    assert "locks are not supported. Make sure that no other run uses it" in caplog.text
