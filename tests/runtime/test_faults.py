"""Killed processes and full disks: a resumed run ends bit-identical to an uninterrupted one.

`BERT_JAX_KILLS` is the number of random kills: few by default, 20 in `make faults`.
"""

import os
import pathlib
import random
import resource
import signal
import time

import jax
import numpy as np
import pytest

from bert_jax.checkpoints.native import find_checkpoint, saved_steps
from bert_jax.checkpoints.verify import load_training_state
from bert_jax.runtime.errors import PREEMPTED
from tests.helpers import commands
from tests.helpers.json_lines import read_lines
from tests.helpers.runs import saved_params

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("BERT_JAX_KILLS", 1))
STEPS = 20 + 3 * KILLS
# Saving after every step makes most kills interrupt a save.
FIELDS = (
    f"num_steps={STEPS}",
    "log_every=1",
    "checkpoint_every=1",
    "eval_every=7",
    "shard_weight_update=True",  # As on TPU pods.
)
PATIENCE = {"heartbeat_timeout": 10}


def last_step(workdir) -> int:
    return max(saved_steps(workdir / "checkpoints"), default=0)


def kill_at_random(rng: random.Random, started, workdir, first: int) -> tuple[str, list[int]]:
    """Kills one or both processes at a random time between the start and a few steps later.

    Returns a description of the kill, and the indices of the surviving processes.
    """
    if rng.random() < 0.25:
        delay = rng.uniform(0, 10)
        when = f"{delay:.1f} s after the start"
    else:
        steps, delay = rng.randint(1, 3), rng.uniform(0, 0.3)
        when = f"{delay:.2f} s after {steps} more saves"
        deadline = time.monotonic() + 600
        while last_step(workdir) < first + steps and time.monotonic() < deadline:
            time.sleep(0.01)
    time.sleep(delay)
    victims = rng.choice(([0], [1], [0, 1]))
    for victim in victims:
        started[victim].kill()
    return f"{victims}, {when}", [number for number in range(2) if number not in victims]


def assert_same_bits(*workdirs) -> None:
    jax.tree.map(np.testing.assert_array_equal, *map(saved_params, workdirs))
    states = [load_training_state(find_checkpoint(workdir)) for workdir in workdirs]
    jax.tree.map(np.testing.assert_array_equal, *states)


def asks_to_resume(process, log: pathlib.Path) -> bool:
    """Returns whether a survivor ends in a way that tools/tpu_worker.sh treats as preempted."""
    exit_code, asks = process.wait(600), "to resume from the last checkpoint"
    if exit_code == -signal.SIGABRT:  # A shell shows it as 134.
        commands.wait_for(log, asks, ())  # Another process writes it.
        return "distributed service detected fatal errors" in log.read_text()
    return exit_code == PREEMPTED and asks in log.read_text()


def test_run_killed_at_random_ends_bit_identical_to_uninterrupted_run(corpus, tmp_path):
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    commands.run(uninterrupted, corpus, *FIELDS, num_processes=2)
    rng, hits = random.Random(KILLS), 0
    for kill in range(KILLS):
        first = last_step(killed)
        started = commands.start(killed, corpus, *FIELDS, num_processes=2, **PATIENCE)
        with commands.ended(started):
            description, survivors = kill_at_random(rng, started, killed, first)
            for number in survivors:
                log = commands.log_of(killed, number)
                joined = "Process " in log.read_text()
                assert not joined or asks_to_resume(started[number], log), log.read_text()
        unfinished = [p.name for p in (killed / "checkpoints").glob("*tmp*")]
        hits += bool(unfinished)
        print(
            f"kill {kill + 1}: {description}; complete: step {last_step(killed)}, "
            f"unfinished: {unfinished}"
        )
    print(f"{hits} of {KILLS} kills hit an unfinished save")
    assert hits or KILLS < 20
    commands.run(killed, corpus, *FIELDS, num_processes=2)

    assert_same_bits(uninterrupted, killed)
    lines = [read_lines(workdir / "metrics.jsonl") for workdir in (uninterrupted, killed)]
    for one, two in zip(*lines, strict=True):
        assert one["step"] == two["step"]
        assert one.get("train/loss") == two.get("train/loss")
        assert one.get("heldout/mlm_loss") == two.get("heldout/mlm_loss")
    slowest = {line["slowest_process"] for line in lines[0] if "slowest_process" in line}
    assert slowest and slowest <= {0, 1}


FEW_STEPS = 30
SAVES_EACH_STEP = (
    f"num_steps={FEW_STEPS}",
    "log_every=1",
    "checkpoint_every=1",
    "shard_weight_update=True",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_process_killed_during_a_save_makes_the_other_ask_to_resume(corpus, tmp_path, victim):
    workdir = tmp_path / "run"
    started = commands.start(workdir, corpus, *SAVES_EACH_STEP, num_processes=2, **PATIENCE)
    with commands.ended(started):
        saves = (workdir / "checkpoints").glob
        commands.wait_until(lambda: list(saves("*tmp*")), "no save began", started)
        started[victim].kill()
        log = commands.log_of(workdir, 1 - victim)
        assert asks_to_resume(started[1 - victim], log), log.read_text()
    if KILLS >= 20:  # Only in `make faults`: takes two more runs.
        assert last_step(workdir) < FEW_STEPS
        for directory in (workdir, tmp_path / "uninterrupted"):
            commands.run(directory, corpus, *SAVES_EACH_STEP, num_processes=2)
        assert_same_bits(tmp_path / "uninterrupted", workdir)


@pytest.mark.exhaustive
@pytest.mark.parametrize("full", [[0], [1], [0, 1]], ids=str)
def test_full_disk_during_a_save_ends_both_processes_and_the_run_resumes(corpus, tmp_path, full):
    """Simulates a full disk in one or both processes by limiting files to 64 KiB."""
    workdir = tmp_path / "run"
    # Enough steps that the disk is full long before the last save.
    fields = ("num_steps=40", "log_every=1", "checkpoint_every=4", "eval_every=1000")
    started = commands.start(workdir, corpus, *fields, num_processes=2, **PATIENCE)
    with commands.ended(started):
        commands.wait_until(lambda: last_step(workdir) >= 4, "step 4 is not saved", started)
        for number in full:
            resource.prlimit(started[number].pid, resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        exit_codes = commands.finish(started)
    for number in range(2):
        log = commands.log_of(workdir, number)
        if number in full and exit_codes[number] == 1:
            assert "pretrain: writing a checkpoint to" in log.read_text()
            assert "The last complete one is step" in log.read_text()
        else:
            assert asks_to_resume(started[number], log), log.read_text()
    assert 1 in exit_codes
    step = last_step(workdir)
    commands.run(workdir, corpus, *fields, num_processes=2)
    assert f"Resuming from step {step} in" in commands.log_of(workdir).read_text()
