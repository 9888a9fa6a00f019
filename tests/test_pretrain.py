"""The real main on a small corpus: it trains, resumes bit for bit, and refuses what is wrong."""

import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

import bert_jax
from bert_jax import pretrain
from bert_jax.runtime.command_line import PREEMPTED
from bert_jax.training.checkpoint import find_checkpoint, saved_steps
from bert_jax.training.setup import check_numbers, model_config
from tests import helpers
from tests.helpers import build_small_corpus, random_text, saved_params, small_config
from tools.train_vocab import train_sentencepiece


def assert_equal_trees(one, two):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def finished(corpus, long_corpus, tmp_path_factory):
    """Runs both phases without interruption."""
    workdir = tmp_path_factory.mktemp("finished")
    result = pretrain.train_and_evaluate(small_config(corpus, long_corpus), workdir)
    return workdir, result


def filled(before: str, piece: str, after: str) -> str:
    return before.rstrip() + piece[2:] + after if piece[:2] == "##" else before + piece + after


def records(workdir) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_run_leaves_what_the_readme_promises(finished):
    workdir, result = finished
    assert json.loads((workdir / "result.json").read_text()) == result
    assert result["steps"] == 9
    promised = "mlm_loss mlm_accuracy nsp_accuracy unigram_entropy unigram_accuracy seconds"
    assert set(promised.split()) <= result.keys()
    assert json.loads((workdir / "config.json").read_text())["bert"]["num_layers"] == 2
    assert list((workdir / "tensorboard").glob("events.out.tfevents.*"))
    steps = [record["step"] for record in records(workdir)]
    assert steps == sorted(steps) and steps[-1] == 9
    assert all(np.isfinite(list(record.values())).all() for record in records(workdir))


def test_load_needs_only_the_directory(finished, tmp_path):
    workdir, _ = finished
    moved = tmp_path / "elsewhere"
    shutil.copytree(find_checkpoint(workdir), moved)
    model = bert_jax.load(moved)
    assert model.config.vocab_size == model.tokenizer.vocab_size
    fills = model.fill_mask("the [MASK] of the river", top_k=3)
    assert len(fills) == 3 and fills[0].probability >= fills[1].probability
    assert fills[0].text == filled("the ", fills[0].token, " of the river")


@pytest.mark.parametrize("stop_at", [2, 6])
def test_resumed_run_equals_uninterrupted_run(finished, corpus, long_corpus, tmp_path, stop_at):
    """Stops right after the save of a step: in either phase, and between them."""
    workdir, result = finished
    config = small_config(corpus, long_corpus)
    saves = []

    class Stop(Exception):
        pass

    class StoppingCheckpointer(pretrain.Checkpointer):
        def save(self, state):
            super().save(state)
            saves.append(int(state.step))
            if saves[-1] == stop_at:
                self.wait()
                raise Stop

    original = pretrain.Checkpointer
    pretrain.Checkpointer = StoppingCheckpointer
    try:
        with pytest.raises(Stop):
            pretrain.train_and_evaluate(config, tmp_path)
    finally:
        pretrain.Checkpointer = original
    resumed = pretrain.train_and_evaluate(config, tmp_path)

    assert_equal_trees(saved_params(workdir), saved_params(tmp_path))
    for name in ("mlm_loss", "nsp_loss", "mlm_accuracy"):
        assert resumed[name] == result[name]
    losses = [
        [(r["step"], r["train/loss"]) for r in records(w) if "train/loss" in r]
        for w in (workdir, tmp_path)
    ]
    assert losses[0] == losses[1]


def test_finished_run_is_not_trained_further(finished, corpus, long_corpus):
    workdir, result = finished
    before = saved_params(workdir)
    again = pretrain.train_and_evaluate(small_config(corpus, long_corpus), workdir)
    assert again["mlm_loss"] == result["mlm_loss"]
    assert_equal_trees(before, saved_params(workdir))


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["whole_word", "span"])
def test_other_masking_units_train(corpus, tmp_path, unit):
    config = small_config(corpus, num_steps=2)
    config.masking.unit = unit
    result = pretrain.train_and_evaluate(config, tmp_path)
    assert np.isfinite(result["mlm_loss"])


@pytest.mark.slow
def test_sentencepiece_works_wherever_wordpiece_does(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(random_text(60).replace("\n\n", "\n"))
    (tmp_path / "spiece.model").write_bytes(train_sentencepiece(str(text), 60, lower_case=True))
    corpus = build_small_corpus(tmp_path / "input", vocabulary=tmp_path / "spiece.model")
    config = small_config(corpus, num_steps=2)
    config.masking.unit = "whole_word"
    pretrain.train_and_evaluate(config, tmp_path / "run")
    model = bert_jax.load(tmp_path / "run")
    fill = model.fill_mask("the [MASK] of the river", top_k=1)[0]
    assert fill.text.endswith(" of the river") and fill.token.removeprefix("▁") in fill.text
    assert model.tokenizer.filename == "spiece.model"


COMMAND_LINES = {
    "--config.learning_rat=1": "pretrain: 'learning_rat': Did you mean \"learning_rate\"",
    "--config.corpus=/nowhere": "/nowhere holds no corpus",
    "--config.num_steps=x": "invalid literal for int",
    "--confg=y": "Unknown command line flag 'confg'",
    "--config=configs/pretrain/bert_tyni.py": "configs/pretrain/bert_tyni.py",
}


@pytest.mark.parametrize("argument", COMMAND_LINES)
def test_wrong_flag_on_the_command_line_is_a_clear_error(tmp_path, argument):
    command = [sys.executable, "-m", "bert_jax.pretrain", f"--workdir={tmp_path}"]
    command += ["--config=configs/pretrain/bert_tiny.py", argument]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode != 0 and COMMAND_LINES[argument] in run.stderr
    assert "Traceback" not in run.stderr
    assert not list(tmp_path.iterdir())


def test_ctrl_c_saves_the_step_and_the_same_command_resumes(corpus, tmp_path):
    workdir = tmp_path / "run"
    fields = ("num_steps=1000", "warmup_steps=4", "log_every=1", "checkpoint_every=1000")
    with helpers.ended(helpers.start(workdir, corpus, *fields)) as started:
        helpers.wait_for(workdir / "metrics.jsonl", '"step": 2,', started)
        started[0].send_signal(signal.SIGINT)
        assert helpers.finish(started) == [130]
    said = helpers.log_of(workdir).read_text()
    (step,) = saved_steps(workdir / "checkpoints")
    assert f"pretrain: Stopped and saved at step {step}" in said and "Traceback" not in said
    with helpers.ended(helpers.start(workdir, corpus, *fields)) as started:
        helpers.wait_for(workdir / "metrics.jsonl", f'"step": {step + 1},', started)
    said = helpers.log_of(workdir).read_text()
    assert f"Resuming from step {step} in" in said
    pattern = r"First step ([\d.]+) s after the process began; .* (\d+) found in the cache"
    first = re.search(pattern, said)
    assert float(first[1]) > 0 and int(first[2]) > 0


def test_sigterm_saves_the_step_and_exits_as_preempted(corpus, tmp_path):
    workdir = tmp_path / "run"
    fields = ("num_steps=1000", "warmup_steps=4", "log_every=1", "checkpoint_every=1000")
    with helpers.ended(helpers.start(workdir, corpus, *fields)) as started:
        helpers.wait_for(workdir / "metrics.jsonl", '"step": 2,', started)
        started[0].send_signal(signal.SIGTERM)
        assert helpers.finish(started) == [PREEMPTED]
    (step,) = saved_steps(workdir / "checkpoints")
    assert f"Stopped and saved at step {step}" in helpers.log_of(workdir).read_text()
    assert records(workdir)[-1]["step"] == step  # No trained step is lost.


def test_sigterm_before_the_first_step_exits_as_preempted(corpus, tmp_path):
    workdir = tmp_path / "run"
    with helpers.ended(helpers.start(workdir, corpus)) as started:
        helpers.wait_for(helpers.log_of(workdir), "Layout over", started)
        started[0].send_signal(signal.SIGTERM)
        assert helpers.finish(started) == [PREEMPTED]


def test_ctrl_c_before_the_first_step_exits_with_one_line(corpus, tmp_path):
    workdir = tmp_path / "run"
    with helpers.ended(helpers.start(workdir, corpus)) as started:
        helpers.wait_for(helpers.log_of(workdir), "Layout over", started)
        started[0].send_signal(signal.SIGINT)
        assert helpers.finish(started) == [130]
    said = helpers.log_of(workdir).read_text()
    assert "Traceback" not in said and "Fatal" not in said


def test_two_steps_are_dispatched_ahead_and_the_watchdog_knows_the_stage(
    corpus, tmp_path, monkeypatch
):
    asked, after, doing = [], [], []
    make, block = pretrain.make_pretrain_step, jax.block_until_ready

    def make_recording_step(*args, **kwargs):
        step = make(*args, **kwargs)

        def run(state, rows):
            state, metrics = step(state, rows)
            asked.append(metrics)
            return state, metrics

        return run

    def block_until_ready(value):
        after.extend(len(asked) - 1 - n for n, metrics in enumerate(asked) if metrics is value)
        return block(value)

    class RecordingWatchdog(pretrain.Watchdog):
        def beat(self, what):
            doing.append(what)

    monkeypatch.setattr(pretrain, "make_pretrain_step", make_recording_step)
    monkeypatch.setattr(jax, "block_until_ready", block_until_ready)
    monkeypatch.setattr(pretrain, "Watchdog", RecordingWatchdog)
    changes = dict.fromkeys(("num_steps", "log_every", "eval_every", "checkpoint_every"), 6)
    pretrain.train_and_evaluate(small_config(corpus, **changes), tmp_path)
    assert after == [2] * 4  # Steps 3 to 6 wait for the step two before each.
    assert doing[:5] == [
        "opening the corpus on all processes",
        "claiming the workdir with all processes",
        "initializing the parameters",
        "compiling and running step 1",
        "running step 2",
    ]
    assert doing[-3:] == ["saving step 6", "waiting for the last save", "evaluating at the end"]


@pytest.mark.slow
def test_save_in_progress_is_completed_when_the_run_ends(corpus, tmp_path):
    """Runs a process in which an error right after a save shuts the interpreter down."""
    script = f"""
import sys
sys.path.insert(0, ".")
from tests import conftest
from tests.helpers import small_config
from bert_jax import pretrain
class Failing(pretrain.Checkpointer):
    def save(self, state):
        super().save(state)
        raise RuntimeError("as in the middle of a step")
pretrain.Checkpointer = Failing
pretrain.train_and_evaluate(small_config({str(corpus)!r}), {str(tmp_path)!r})
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "as in the middle of a step" in run.stderr
    assert find_checkpoint(tmp_path).name == "2"


@pytest.mark.slow
def test_workdir_of_a_rebuilt_corpus_is_an_error(corpus, tmp_path):
    shutil.copytree(corpus.parent, tmp_path / "input")
    config = small_config(tmp_path / "input" / "corpus", num_steps=2)
    pretrain.train_and_evaluate(config, tmp_path / "run")
    shutil.rmtree(tmp_path / "input")
    build_small_corpus(tmp_path / "input", seed=1)
    with pytest.raises(ValueError, match="belongs to a run with other settings"):
        pretrain.train_and_evaluate(config, tmp_path / "run")


@pytest.mark.parametrize(
    "path", sorted(pathlib.Path("configs/pretrain").glob("*.py")), ids=lambda path: path.stem
)
@pytest.mark.parametrize("argument", ["", "runlocal"])
def test_every_config_resolves_and_its_docstring_is_complete(path, argument):
    import importlib

    module = importlib.import_module(f"configs.pretrain.{path.stem}")
    config = module.get_config(argument)
    model_config(config, vocab_size=30522)
    check_numbers(config)
    for promise in ("Source:", "Expected time:", "Expected result:", "python -m bert_jax.pretrain"):
        assert promise in module.__doc__, f"{path}: its docstring lacks {promise!r}"
    with pytest.raises(ValueError, match="after the colon"):
        module.get_config("runlocl")
