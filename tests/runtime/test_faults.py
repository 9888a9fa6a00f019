"""Whatever is killed, whenever: the run ends with the very bits of one that was never killed.

`BERT_JAX_KILLS` says how many kills: few here, 20 with `make faults`.
"""

import json
import os
import pathlib
import random
import resource
import signal
import time

import jax
import numpy as np
import pytest

from bert_jax.runtime.command_line import PREEMPTED
from bert_jax.training.checkpoint import find_checkpoint, saved_steps, training_state
from tests import helpers
from tests.helpers import saved_params

KILLS = int(os.environ.get("BERT_JAX_KILLS", 2))
STEPS = 20 + 3 * KILLS
# A save after every step: most moments are in the middle of one.
FIELDS = (
    *(f"num_steps={STEPS}", "log_every=1", "checkpoint_every=1", "eval_every=7"),
    "shard_weight_update=True",  # As on pods.
)
PATIENCE = {"heartbeat_timeout": 10}


def last_step(workdir) -> int:
    return max(saved_steps(workdir / "checkpoints"), default=0)


def kill_at_random(rng: random.Random, started, workdir, first: int) -> tuple[str, list[int]]:
    """Kills one process or both, at some moment from the start to a few steps on.

    Returns when, in words, and the processes that are left.
    """
    if rng.random() < 0.25:
        delay = rng.uniform(0, 10)
        when = f"{delay:.1f} s after the start"
    else:
        steps, delay = rng.randint(1, 3), rng.uniform(0, 0.3)
        when = f"{delay:.2f} s after {steps} more saves"
        deadline = time.monotonic() + 200
        while last_step(workdir) < first + steps and time.monotonic() < deadline:
            time.sleep(0.01)
    time.sleep(delay)
    victims = rng.choice(([0], [1], [0, 1]))
    for victim in victims:
        started[victim].kill()
    return f"{victims}, {when}", [number for number in range(2) if number not in victims]


def assert_same_bits(*workdirs) -> None:
    jax.tree.map(np.testing.assert_array_equal, *map(saved_params, workdirs))
    states = [training_state(find_checkpoint(workdir)) for workdir in workdirs]
    jax.tree.map(np.testing.assert_array_equal, *states)


def says_to_start_again(process, log: pathlib.Path) -> bool:
    """Whether a process that lost the other one ends as tools/tpu_worker.sh takes for preempted."""
    status, said = process.wait(200), log.read_text()
    if status == -signal.SIGABRT:  # A shell shows it as 134.
        return "distributed service detected fatal errors" in said
    return status == PREEMPTED and "to resume from the last checkpoint" in said


def test_killed_at_random_moments_ends_as_never_killed(corpus, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    helpers.run(whole, corpus, *FIELDS, num_processes=2)
    rng, hits = random.Random(KILLS), 0
    for kill in range(KILLS):
        first = last_step(killed)
        started = helpers.start(killed, corpus, *FIELDS, num_processes=2, **PATIENCE)
        with helpers.ended(started):
            when, left = kill_at_random(rng, started, killed, first)
            for number in left:
                log = helpers.log_of(killed, number)
                joined = "Process " in log.read_text()
                assert not joined or says_to_start_again(started[number], log), log.read_text()
        unfinished = [p.name for p in (killed / "checkpoints").glob("*tmp*")]
        hits += bool(unfinished)
        print(
            f"kill {kill + 1}: {when}; step {last_step(killed)} is whole, unfinished {unfinished}"
        )
    print(f"{hits} of {KILLS} kills hit an unfinished save")
    assert hits or KILLS < 20
    helpers.run(killed, corpus, *FIELDS, num_processes=2)

    assert_same_bits(whole, killed)
    lines = [
        [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        for workdir in (whole, killed)
    ]
    for one, two in zip(*lines, strict=True):
        assert one["step"] == two["step"]
        assert one.get("train/loss") == two.get("train/loss")
        assert one.get("heldout/mlm_loss") == two.get("heldout/mlm_loss")


FEW_STEPS = ("num_steps=3", "log_every=1", "checkpoint_every=1", "shard_weight_update=True")


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_in_the_middle_of_a_save_the_other_says_to_start_again(corpus, tmp_path, victim):
    workdir = tmp_path / "run"
    started = helpers.start(workdir, corpus, *FEW_STEPS, num_processes=2, **PATIENCE)
    with helpers.ended(started):
        while not list((workdir / "checkpoints").glob("*tmp*")):
            assert [process.poll() for process in started] == [None, None]
            time.sleep(0.001)
        started[victim].kill()
        log = helpers.log_of(workdir, 1 - victim)
        assert says_to_start_again(started[1 - victim], log), log.read_text()
    if KILLS >= 20:  # As in `make faults`: it takes two runs more.
        assert last_step(workdir) < 3
        for each in (workdir, tmp_path / "whole"):
            helpers.run(each, corpus, *FEW_STEPS, num_processes=2)
        assert_same_bits(tmp_path / "whole", workdir)


@pytest.mark.parametrize("full", [[0], [1], *([[0, 1]] if KILLS >= 20 else [])], ids=str)
def test_full_disk_in_a_save_ends_both_and_the_same_command_goes_on(corpus, tmp_path, full):
    """For one of them or both, no file may grow beyond 64 KiB: the kernel's answer is as good."""
    workdir = tmp_path / "run"
    fields = ("num_steps=12", "log_every=1", "checkpoint_every=4")
    started = helpers.start(workdir, corpus, *fields, num_processes=2, **PATIENCE)
    with helpers.ended(started):
        helpers.wait_for(workdir / "metrics.jsonl", '"step": 5,', started)
        # On a busy machine the save of step 4 takes longer than step 5.
        helpers.wait_for(workdir / "checkpoints/4/_CHECKPOINT_METADATA", "", started)
        for number in full:
            resource.prlimit(started[number].pid, resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        statuses = helpers.finish(started)
    for number in range(2):
        log = helpers.log_of(workdir, number)
        if number in full and statuses[number] == 1:
            assert "pretrain: writing a checkpoint to" in log.read_text()
            assert "The last complete one is step" in log.read_text()
        else:
            assert says_to_start_again(started[number], log), log.read_text()
    assert 1 in statuses
    step = last_step(workdir)
    helpers.run(workdir, corpus, *fields, num_processes=2)
    assert f"Resuming from step {step} in" in helpers.log_of(workdir).read_text()
