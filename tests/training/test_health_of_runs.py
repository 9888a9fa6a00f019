"""Each alarm fires in a run of the real main that is constructed to trigger it, and no other."""

import json
import logging
import time
import types

import jax
import numpy as np
import pytest

from bert_jax import pretrain
from bert_jax.training import goodput, metrics
from bert_jax.training.health import Alarm, all_alarms
from tests.helpers import commands
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


MAKE_STEP, READ_BATCHES = pretrain.make_pretrain_step, pretrain.pretrain_batches
READ_ESTIMATES = pretrain.forecast.read_estimates


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
    report = {"device_kind": "cpu", "num_devices": 2, "fits": True, "phases": [phase]}
    report["likely_step_seconds"] = [{"typical": 2e-7, "high": 2.5e-7}]

    def read_estimates(path, setup):
        phase["model_flops_per_row"] = setup.phases[0].flops_per_row
        (tmp_path / "estimate.json").write_text(json.dumps(report))
        return READ_ESTIMATES(path, setup)

    monkeypatch.setattr(pretrain.forecast, "read_estimates", read_estimates)
    config = small_config(corpus, estimate=str(tmp_path / "estimate.json"), **FIELDS)
    monkeypatch.setattr(pretrain, "make_pretrain_step", make_damaging_step)
    with stopped_after_save(pretrain):
        pretrain.train_and_evaluate(config, tmp_path / "run")
    pretrain.train_and_evaluate(config, tmp_path / "run")
    alarms = alarms_of(tmp_path / "run")
    assert [(alarm.name, alarm.step) for alarm in alarms] == [("slow", 30), ("loss spike", 35)]
    assert logged(caplog) == [f"Step {alarm.step}: {alarm.text}" for alarm in alarms]


def test_plateau_wait_for_data_and_slow_host_are_told(corpus, tmp_path, monkeypatch, caplog):
    """By its clock a batch takes 10 s, and 30 s in a second process, which is not run."""
    now = time.monotonic()

    def slow_batches(*args):
        nonlocal now
        for batch in READ_BATCHES(*args):
            now += 10
            yield batch

    def wait_for_second_process(step_metrics):
        nonlocal now
        now += 20

    monkeypatch.setattr(pretrain, "pretrain_batches", slow_batches)
    monkeypatch.setattr(pretrain.monitoring, "limit_dispatch", wait_for_second_process)
    clock = types.SimpleNamespace(monotonic=lambda: now, time=time.time)
    monkeypatch.setattr(goodput, "time", clock)
    two = {"process_count": lambda: 2, "devices": jax.devices, "device_count": jax.device_count}
    monkeypatch.setattr(metrics, "jax", types.SimpleNamespace(**two))
    gather = types.SimpleNamespace(process_allgather=lambda own: np.stack([own, 3 * own]))
    monkeypatch.setattr(metrics, "multihost_utils", gather)
    fields = {"warmup_steps": 5, "learning_rate": 1e-9}
    pretrain.train_and_evaluate(small_config(corpus, **(FIELDS | fields)), tmp_path / "run")
    alarms = alarms_of(tmp_path / "run")
    names_and_steps = [(alarm.name, alarm.step) for alarm in alarms]
    assert names_and_steps == [("input-bound", 25), ("slow host", 25), ("plateau", 45)]
    assert logged(caplog) == [f"Step {alarm.step}: {alarm.text}" for alarm in alarms]


# By the clock of process 1, it takes 1000 s to dispatch a step.
SLOW_PROCESS = """
import sys, time, types
from bert_jax import pretrain
from bert_jax.training import goodput

make_step, late = pretrain.make_pretrain_step, 0

def make_slow_step(*args, **kwargs):
    step = make_step(*args, **kwargs)

    def run(*args):
        global late
        late += 1000
        return step(*args)

    return run

if "--process_id=1" in sys.argv:
    pretrain.make_pretrain_step = make_slow_step
    clock = {"monotonic": lambda: time.monotonic() + late, "time": time.time}
    goodput.time = types.SimpleNamespace(**clock)
pretrain.main.start(pretrain.train_and_evaluate, "pretrain", pretrain.known_fields)
"""


@pytest.mark.exhaustive
def test_slow_host_is_named_by_a_run_of_two_processes(corpus, tmp_path, monkeypatch):
    (tmp_path / "slow_process.py").write_text(SLOW_PROCESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    fields = [f"{name}={value}" for name, value in FIELDS.items()]
    commands.run(tmp_path / "run", corpus, *fields, num_processes=2, program="slow_process")
    (alarm,) = alarms_of(tmp_path / "run")
    assert (alarm.name, alarm.step) == ("slow host", 25) and "process 1, " in alarm.text
    assert alarm.text in commands.log_of(tmp_path / "run").read_text()
