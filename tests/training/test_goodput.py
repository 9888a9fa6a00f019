"""Goodput counts the seconds in training steps that are kept, over all restarts."""

import collections
import json
import types

import pytest

from bert_jax.training import goodput
from bert_jax.training.goodput import StepTimer
from bert_jax.training.metrics import MetricsWriter


@pytest.fixture
def clock(monkeypatch):
    """Has the seconds on the wall since 1000; the monotonic clock is 7 behind."""
    clock = types.SimpleNamespace(now=0.0, process_start=0.0)
    times = {"time": lambda: 1000 + clock.now, "monotonic": lambda: 993 + clock.now}
    monkeypatch.setattr(goodput, "time", types.SimpleNamespace(**times))
    process = types.SimpleNamespace(create_time=lambda: 1000 + clock.process_start)
    monkeypatch.setattr(goodput.psutil, "Process", lambda: process)
    return clock


def run_process(workdir, clock, first_step, last_step, report_at):
    """Runs steps of 2 s in a process that starts now: 10 s to import, 20 s to compile.

    Every fifth step is evaluated or saved for 4 s. Returns the metrics of the reports by step.
    """
    clock.process_start = clock.now
    clock.now += 10
    writer = MetricsWriter(workdir, first_step)
    timer = StepTimer(workdir, writer, goodput.time.monotonic(), writes=True)
    reports = collections.defaultdict(dict)
    for step in range(first_step + 1, last_step + 1):
        compiles = step == first_step + 1
        clock.now += 20 if compiles else 2
        if compiles:
            timer.start(step)
        if pauses := step in report_at or step % 5 == 0:
            timer.stop()
        if step in report_at:
            reports[step] = timer.measure(step, 8, 1.0)
            writer.write(step, reports[step])
        if step % 5 == 0:
            clock.now += 4
        if pauses:
            timer.start(step)
    writer.close()
    return reports


def test_goodput_leaves_out_starts_evaluations_and_repeated_steps(tmp_path, clock):
    first = run_process(tmp_path, clock, 0, 12, report_at=(1, 2, 10, 12))
    assert first[1]["productive_seconds"] == 0 and "rows_per_second" not in first[1]
    assert first[2]["productive_seconds"] == 2 and first[2]["goodput"] == 2 / 32
    # Nine steps, and an evaluation.
    assert first[10]["productive_seconds"] == 18
    assert first[10]["goodput"] == 18 / (10 + 20 + 18 + 4)
    assert first[12]["productive_seconds"] == 22 and first[12]["rows_per_second"] == 8 / 2
    clock.now = 100.0  # Killed; the checkpoint of step 10 is left.
    second = run_process(tmp_path, clock, 10, 15, report_at=(15,))
    assert second[15]["productive_seconds"] == 18 + 4 * 2
    assert second[15]["goodput"] == (18 + 8) / (100 + 10 + 20 + 8)
    assert second[15]["seconds"] == first[10]["seconds"] + 20 + 8
    assert json.loads((tmp_path / "first_start.json").read_text()) == {"unix_time": 1000}


def test_waits_for_data_and_devices_are_of_the_steps_since_the_start(tmp_path, clock):
    """Step 5 waits longest, before an evaluation: it is neither in the times nor in the waits."""

    def slow_batches():
        for seconds in (30, 0.25, 0.25):
            clock.now += seconds
            yield None

    timer = StepTimer(tmp_path, MetricsWriter(tmp_path), 0.0, writes=True)
    timer.start(4)
    for step, _ in enumerate(timer.batches(slow_batches()), 5):
        clock.now += 0.25
        with timer.waiting_for_devices():
            clock.now += 2
        if step == 5:
            timer.stop()
            clock.now += 100
            timer.start(step)
    timer.stop()
    values = timer.measure(7, 8, 1.0)
    assert values["data_wait_seconds"] == 0.25 and values["host_seconds"] == 0.5
    assert values["step_seconds"] == 2.5


def test_run_that_is_killed_before_its_first_checkpoint_keeps_its_first_start(tmp_path, clock):
    run_process(tmp_path, clock, 0, 4, report_at=(4,))
    clock.now = 70.0
    again = run_process(tmp_path, clock, 0, 4, report_at=(4,))
    assert again[4]["productive_seconds"] == 6 and again[4]["goodput"] == 6 / (70 + 36)
