"""Each alarm fires in a run of the real main that is built to have it, and no other one."""

import itertools
import json
import logging
import types

import jax
import pytest

from bert_jax import pretrain
from bert_jax.training import metrics
from bert_jax.training.health import Alarm, all_alarms
from tests.helpers.json_lines import read_lines
from tests.helpers.runs import small_config, stopped_after_save

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_devices")]

# All in the warm-up, in which no plateau is told. The words of the corpus are random: there is
# nothing to learn but their frequencies.
FIELDS = {"num_steps": 45, "warmup_steps": 45, "log_every": 5, "eval_every": 0}
FIELDS |= {"checkpoint_every": 24, "learning_rate": 1e-3, "stop_diverged": False}
FIELDS |= {"max_eval_batches": 1}


def make_damaging_step(*args, **kwargs):
    """As `make_pretrain_step`; step 30 returns parameters that are ten times too large."""
    step = MAKE_STEP(*args, **kwargs)

    def run(state, rows, frozen):
        state, step_metrics = step(state, rows, frozen)
        if state.step == 30:
            params = jax.tree.map(lambda leaf: 10 * leaf, state.params)
            state = state.replace(params=params)
        return state, step_metrics

    return run


MAKE_STEP = pretrain.make_pretrain_step


def alarms_of(workdir) -> list[Alarm]:
    config = json.loads((workdir / "config.json").read_text())
    return all_alarms(read_lines(workdir / "metrics.jsonl"), config)


def logged(caplog) -> list[str]:
    texts = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    return [text for text in texts if text.startswith("Step ")]


def test_spike_and_low_speed_are_told_also_by_a_run_that_was_resumed(
    corpus, tmp_path, monkeypatch, caplog
):
    """The 20 steps that the spike is compared with are from before the stop and after it."""
    phase = {"max_seq_length": 64, "batch_size": 8}
    phase |= {"step_seconds": 1e-7, "exposed_seconds": 1e-7}
    report = {"device_kind": "cpu", "num_devices": 2, "fits": True, "phases": [phase]}
    report["calibration"] = {"factor": 1.0, "high": 1.5}
    (tmp_path / "estimate.json").write_text(json.dumps(report))
    config = small_config(corpus, estimate=str(tmp_path / "estimate.json"), **FIELDS)
    monkeypatch.setattr(pretrain, "make_pretrain_step", make_damaging_step)
    with stopped_after_save(pretrain):
        pretrain.train_and_evaluate(config, tmp_path / "run")
    pretrain.train_and_evaluate(config, tmp_path / "run")
    alarms = alarms_of(tmp_path / "run")
    assert [(alarm.name, alarm.step) for alarm in alarms] == [("slow", 30), ("loss spike", 35)]
    assert logged(caplog) == [f"Step {alarm.step}: {alarm.text}" for alarm in alarms]


def test_plateau_and_wait_for_data_are_told(corpus, tmp_path, monkeypatch, caplog):
    ticks = itertools.count(0, 10)  # By this clock each batch takes 10 s.
    clock = types.SimpleNamespace(monotonic=lambda: next(ticks), time=lambda: 0.0)
    monkeypatch.setattr(metrics, "time", clock)
    fields = {"warmup_steps": 5, "learning_rate": 1e-9}
    pretrain.train_and_evaluate(small_config(corpus, **(FIELDS | fields)), tmp_path / "run")
    alarms = alarms_of(tmp_path / "run")
    assert [(alarm.name, alarm.step) for alarm in alarms] == [("input-bound", 25), ("plateau", 45)]
    assert logged(caplog) == [f"Step {alarm.step}: {alarm.text}" for alarm in alarms]
