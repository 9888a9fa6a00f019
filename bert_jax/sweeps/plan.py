"""What a sweep would run: its trials, their steps, and estimates of memory and time."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from bert_jax.finetuning.finetune_setup import FinetuneSetup
from bert_jax.finetuning.step import predict
from bert_jax.finetuning.trials import Trial
from bert_jax.sharding.mesh import batch_sharding
from bert_jax.sweeps import memory
from bert_jax.sweeps.configurations import plural
from bert_jax.sweeps.programs import Program

TIMED_STEPS = 3


class Cost(NamedTuple):
    """What a trial costs: bytes per device, and seconds per step and per predicted example."""

    bytes: int
    step_seconds: float
    example_seconds: float

    def seconds(self, setup: FinetuneSetup, trial: Trial) -> float:
        """Returns the time of a trial: its steps, evaluations, and predictions at the end."""
        steps, selector = setup.num_steps(trial.config), setup.task.selection_split
        num_evaluations = math.ceil(steps / (setup.config.eval_every or setup.steps_per_epoch))
        examples = num_evaluations * len(selector.features)
        examples += sum(len(each.features) for each in setup.task.splits if each is not selector)
        return steps * self.step_seconds + examples * self.example_seconds


def measure(setup: FinetuneSetup) -> Cost:
    """Compiles the step of one trial, and times a few steps and predictions of it."""
    step = memory.compile_step(setup, num_batches=1 + TIMED_STEPS)
    state = setup.jitted_init(step.keys, setup.pretrained)
    for number, batch in enumerate(step.batches):
        state, _ = step.function(state, *batch, step.keys, step.hyperparameters)
        if number == 0:
            jax.block_until_ready(state)
            began = time.monotonic()
    jax.block_until_ready(state)
    step_seconds = (time.monotonic() - began) / TIMED_STEPS
    features = setup.task.selection_split.features[: 2 * setup.rows_per_prediction]
    for _ in range(2):  # The first compiles.
        began = time.monotonic()
        predict(
            setup.predict_step,
            state.params,
            setup.task.head,
            features,
            setup.shape,
            setup.rows_per_prediction,
            batch_sharding(setup.mesh),
        )
    return Cost(step.bytes, step_seconds, (time.monotonic() - began) / len(features))


def show_plan(programs: Sequence[Program], results: Mapping[str, dict | None]) -> dict:
    """Prints the trials, their steps, and an estimate of memory and time; returns the totals.

    `results` are of the trials that have ended, by name.
    """
    costs, rows, seconds, seconds_left = {}, [], 0.0, 0.0
    for program in programs:
        setup = program.setup
        if program.group not in costs:
            costs[program.group] = measure(setup)
        for trial in program.trials:
            name, result = trial.workdir.name, results.get(trial.workdir.name)
            own = costs[program.group].seconds(setup, trial)
            seconds += own / setup.mesh.shape["trial"]
            if not result:
                seconds_left += own / setup.mesh.shape["trial"]
                text = f"about {format_seconds(own)}"
            elif "diverged" in result:
                text = f"diverged at step {result['diverged']}"
            else:
                text = f"finished in {format_seconds(result['seconds'])}"
            rows.append((name, program.name, str(setup.num_steps(trial.config)), text))
    bytes_per_device = [
        memory.program_bytes(program.setup, len(program.trials), costs[program.group].bytes)
        for program in programs
    ]
    trials_that_fit = [
        memory.trials_that_fit(program.setup, costs[program.group].bytes) for program in programs
    ]
    plan = {
        "trials": len(rows),
        "ended": sum(results.get(name) is not None for name, *_ in rows),
        "programs": len(programs),
        "steps_of_all_trials": sum(int(steps) for _, _, steps, _ in rows),
        "gib_per_device": max(bytes_per_device) / 2**30,
        "gib_of_device": memory.device_memory() / 2**30,
        "trials_that_fit": min(trials_that_fit),
        "estimated_seconds": round(seconds, 1),
        "estimated_seconds_left": round(seconds_left, 1),
    }
    if jax.process_index() == 0:
        print_table([("trial", "program", "steps", "time"), *rows])
        is_stacked = any(
            len(program.trials) > program.setup.mesh.shape["trial"] for program in programs
        )
        print(describe(plan, is_stacked))
    return plan


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())


def describe(plan: dict, is_stacked: bool) -> str:
    """Returns the totals of a plan as text."""
    about = "at most " * is_stacked  # A stack takes less time than its trials in sequence.
    about += f"about {format_seconds(plan['estimated_seconds_left'])}"
    return (
        f"\n{plural(plan['trials'], 'trial')} ({plan['ended']} ended) in "
        f"{plural(plan['programs'], 'program')}. The largest program needs "
        f"{plan['gib_per_device']:.2f} of the {plan['gib_of_device']:.1f} GiB of each device; at "
        f"most {plural(plan['trials_that_fit'], 'trial')} fit into a program. The remaining trials "
        f"take {about} with one worker on this machine, estimated from a few steps of each; "
        "compiling and saving are not counted.\n"
    )


def format_seconds(seconds: float) -> str:
    """Returns a time with two units: 12 s, 3 min 20 s, 5 h 10 min."""
    minutes, rest = divmod(round(seconds), 60)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if minutes < 1:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
