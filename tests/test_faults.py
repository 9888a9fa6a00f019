"""Whatever is killed, whenever: the run ends with the very bits of one that was never killed.

`BERT_JAX_KILLS` says how many kills: few here, 20 with `make faults`.
"""

import json
import os
import random
import time

import jax
import numpy as np
import processes
from test_pretrain import saved_params

from bert_jax.checkpoint import find_checkpoint, saved_steps, training_state

KILLS = int(os.environ.get("BERT_JAX_KILLS", 3))
STEPS = 20 + 3 * KILLS
# A save after every step: most moments are in the middle of one.
FIELDS = (f"num_steps={STEPS}", "log_every=1", "checkpoint_every=1", "eval_every=7")


def last_step(workdir) -> int:
    return max(saved_steps(workdir / "checkpoints"), default=0)


def kill_at_random(rng: random.Random, started, workdir, first: int) -> str:
    """Kills one process or both, at some moment from the start to a few steps on; says when."""
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
    return f"{victims}, {when}"


def test_killed_at_random_moments_ends_as_never_killed(corpus, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    processes.run(whole, corpus, *FIELDS, num_processes=2)
    rng = random.Random(KILLS)
    for kill in range(KILLS):
        first = last_step(killed)
        started = processes.start(killed, corpus, *FIELDS, num_processes=2)
        with processes.ended(started):  # The survivor too: it has lost its peer.
            when = kill_at_random(rng, started, killed, first)
        unfinished = [p.name for p in (killed / "checkpoints").glob("*tmp*")]
        print(
            f"kill {kill + 1}: {when}; step {last_step(killed)} is whole, unfinished {unfinished}"
        )
    processes.run(killed, corpus, *FIELDS, num_processes=2)

    jax.tree.map(np.testing.assert_array_equal, saved_params(whole), saved_params(killed))
    states = [training_state(find_checkpoint(workdir)) for workdir in (whole, killed)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    lines = [
        [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        for workdir in (whole, killed)
    ]
    for one, two in zip(*lines, strict=True):
        assert one["step"] == two["step"]
        assert one.get("train/loss") == two.get("train/loss")
        assert one.get("heldout/mlm_loss") == two.get("heldout/mlm_loss")
