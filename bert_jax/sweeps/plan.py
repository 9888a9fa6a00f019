"""What a sweep would run: its trials, their steps, and estimates of memory and time."""

import functools
import itertools
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
from bert_jax.sweeps.programs import Group, Program

TIMED_STEPS = 3


class Cost(NamedTuple):
    """What a trial costs: bytes per device, and seconds per step and per predicted example."""

    bytes: int
    step_seconds: float
    example_seconds: float

    def seconds(self, setup: FinetuneSetup, trial: Trial) -> float:
        """Returns the time of a trial: its steps, evaluations, and predictions at the end."""
        steps, selector = setup.num_steps(trial.config), setup.data.task.selection_split
        num_evaluations = math.ceil(steps / (setup.config.eval_every or setup.steps_per_epoch))
        examples = num_evaluations * len(selector.features)
        examples += sum(
            len(each.features) for each in setup.data.task.splits if each is not selector
        )
        return steps * self.step_seconds + examples * self.example_seconds


def measure(setup: FinetuneSetup) -> Cost:
    """Compiles the step of one trial, and times a few steps and predictions of it."""
    step = memory.compile_step(setup, num_batches=1 + TIMED_STEPS)
    state = setup.steps.init(step.keys, setup.data.pretrained)
    frozen = setup.steps.freeze(setup.data.pretrained)
    batches = itertools.islice(itertools.cycle(step.batches), 1 + TIMED_STEPS)
    for number, batch in enumerate(batches):
        state, _ = step.function(state, *batch, step.keys, step.hyperparameters, frozen)
        if number == 0:
            jax.block_until_ready(state)
            began = time.monotonic()
    jax.block_until_ready(state)
    step_seconds = (time.monotonic() - began) / TIMED_STEPS
    features = setup.data.task.selection_split.features[: 2 * setup.rows_per_prediction]
    for _ in range(2):  # The first compiles.
        began = time.monotonic()
        predict(
            setup.steps.predict,
            state.params,
            setup.data.task.head,
            features,
            setup.data.shape,
            setup.rows_per_prediction,
            batch_sharding(setup.mesh),
            frozen=frozen,
        )
    return Cost(step.bytes, step_seconds, (time.monotonic() - began) / len(features))


def list_trials(groups: Sequence[Group], results: Mapping[str, dict | None]) -> None:
    """Prints the trials and their programs, before anything is read.

    `results` are of the trials that have ended, by name.
    """
    rows = []
    for _, parts in groups:
        for program, trials in parts.items():
            for trial in trials:
                name = trial.workdir.name
                rows.append((name, program, describe_result(results[name]) or "to run"))
    if rows and jax.process_index() == 0:
        print_table([("trial", "program", "state"), *rows])
        count = plural(sum(len(parts) for _, parts in groups), "program")
        print(
            f"\n{plural(len(rows), 'trial')} in {count}. Reading the weights and examples, then "
            f"timing a few steps of {plural(len(groups), 'kind')} of program, to estimate memory "
            "and time ...\n",
            flush=True,
        )


def describe_result(result: dict | None) -> str:
    """Returns how a trial ended, as text; empty if it has not."""
    if not result:
        return ""
    if "diverged" in result:
        return f"diverged at step {result['diverged']}"
    how = f"pruned at step {result['steps']}, " if result.get("pruned") else "finished "
    return f"{how}in {format_seconds(result['seconds'])}"


def show_plan(
    programs: Sequence[Program], results: Mapping[str, dict | None], may_end_early: bool = False
) -> dict:
    """Prints the steps of each trial, and an estimate of memory and time; returns the totals.

    `results` has the result of each trial, by name. A line is printed as soon as it is known. If
    trials `may_end_early`, the time is an upper bound.
    """
    costs, num_steps, seconds, seconds_left = {}, [], 0.0, 0.0
    names = [trial.workdir.name for program in programs for trial in program.trials]
    width = max(map(len, ["trial", *names])), max(len(each.name) for each in programs)
    print_row = functools.partial(print_line, (width[0], max(width[1], len("program")), 5, 0))
    print_row(("trial", "program", "steps", "time"))
    for program in programs:
        setup = program.setup
        if program.group not in costs:
            costs[program.group] = measure(setup)
        for trial in program.trials:
            name, steps = trial.workdir.name, setup.num_steps(trial.config)
            own = costs[program.group].seconds(setup, trial)
            seconds += own / setup.mesh.shape["trial"]
            ended = describe_result(results.get(name))
            seconds_left += 0 if ended else own / setup.mesh.shape["trial"]
            num_steps.append(steps)
            about = ended or f"about {format_seconds(own)}"
            print_row((name, program.name, str(steps), about))
    bytes_per_device = [
        memory.program_bytes(program.setup, len(program.trials), costs[program.group].bytes)
        for program in programs
    ]
    trials_that_fit = [
        memory.trials_that_fit(program.setup, costs[program.group].bytes) for program in programs
    ]
    plan = {
        "trials": len(names),
        "ended": sum(results.get(name) is not None for name in names),
        "programs": len(programs),
        "steps_of_all_trials": sum(num_steps),
        "gib_per_device": max(bytes_per_device) / 2**30,
        "gib_of_device": memory.device_memory() / 2**30,
        "trials_that_fit": min(trials_that_fit),
        "estimated_seconds": round(seconds, 1),
        "estimated_seconds_left": round(seconds_left, 1),
    }
    if jax.process_index() == 0:
        # Stacked trials take less time than in sequence, and patience may end trials early.
        is_upper_bound = may_end_early or any(
            len(program.trials) > program.setup.mesh.shape["trial"]
            or any(trial.config.patience for trial in program.trials)
            for program in programs
        )
        print(describe(plan, is_upper_bound))
    return plan


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print_line(widths, row)


def print_line(widths: Sequence[int], row: Sequence[str]) -> None:
    """Prints a row, only on process 0."""
    if jax.process_index() == 0:
        print("  ".join(map(str.ljust, row, widths)).rstrip(), flush=True)


def describe(plan: dict, is_upper_bound: bool) -> str:
    """Returns the totals of a plan as text."""
    about = "at most " * is_upper_bound
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
