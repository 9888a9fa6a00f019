r"""Fine-tunes over a grid of hyperparameters, training same-shape trials as one program.

    python tools/sweep.py --config=configs/sweeps/paper.py:glue:mrpc --workdir=runs/sweep \
        --config.base.init_from=runs/base --config.base.data.directory=glue_data

A config file in configs/sweeps has `base`, a fine-tuning configuration; `grid`, the values of its
fields, of which all combinations are run; `trials`, further configurations as dicts; `num_seeds`;
and `max_stacked_trials`. With `search` instead of `grid`, Optuna proposes the configurations:
sweep_search.py.
Trials that differ only in `PER_TRIAL` (seed, learning rate, weight decay, warm-up, epochs, dropout)
train as one stacked program; on a CPU, where a stack is slower, they run one after another and
compile once. Each has a workdir in DIR/trials, as a fine-tuning run alone would.

report.html, report.md with its plots, and trials.csv compare the trials; they are written while the
sweep runs, at most once a minute, when it is stopped, and at the end. The same command resumes a
stopped sweep from its last checkpoint; a larger `num_seeds` adds seeds. Started on several machines
that share DIR, each runs programs that no other has claimed. `--dry_run` lists the trials, the
programs and their memory.
"""

import contextlib
import functools
import itertools
import json
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
from absl import flags, logging
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from bert_jax import finetune
from bert_jax.interop.parameters import LoadedModel
from bert_jax.runtime import distributed, main
from bert_jax.runtime.command_line import RunStopped
from bert_jax.tasks.setup import PER_TRIAL, FinetuneSetup, check_numbers, setup_finetuning
from bert_jax.tasks.trials import Trial
from bert_jax.tools import sweep_claims, sweep_memory, sweep_report, sweep_search
from bert_jax.tools.sweep_points import flatten, grid_overrides, make_points
from bert_jax.tools.sweep_report import Point
from bert_jax.training.workdir import (
    CHANGEABLE_ON_RESUME,
    check_equal_settings,
    check_settings,
    write_json,
)

# Fields of a sweep that may differ when it is resumed; those of PROGRAM_FIELDS not between workers.
PROGRAM_FIELDS = ("num_seeds", "max_stacked_trials")
CHANGEABLE = (*PROGRAM_FIELDS, *(f"base.{name}" for name in CHANGEABLE_ON_RESUME))
POLL_SECONDS = 5  # Between checks whether the other workers' programs are finished.
FINISHED = "finished"


class Program(NamedTuple):
    """Trials that train as one stack, under a name such as 1.1."""

    name: str
    setup: FinetuneSetup
    trials: Sequence[Trial]

    @property
    def is_finished(self) -> bool:
        return all(trial.result_path.exists() for trial in self.trials)


SECONDS_BETWEEN_REPORTS = 60  # A report takes about a second.


def sweep(config: ConfigDict, workdir: str | pathlib.Path, dry_run: bool = False) -> dict:
    """Runs or resumes the sweep in `workdir`; returns its best configuration and its report's path.

    With `dry_run` it writes nothing, and returns the number of trials and steps, and the memory; of
    a search, those of the first round, and the maximum number of trials. In a multi-process run
    every process must call it, after `distributed.initialize`.
    """
    workdir = pathlib.Path(workdir)
    settings = as_saved(config.to_dict())
    distributed.check_equal_on_all_processes(settings | {"workdir": str(workdir)})
    with distributed.raise_on_all_processes():
        check_sweep(config)
    proposals, setups = propose(config, workdir / "trials"), {}
    points: list[Point] = []
    programs: list[Program] = []
    while True:
        with distributed.raise_on_all_processes():
            proposed = next(proposals, None)
            check_directory(workdir, config)
            first = 1 + max((int(program.name.split(".")[0]) for program in programs), default=0)
            new_programs = make_programs(config, proposed or [], first, setups)
        if proposed is None:
            break
        points += proposed
        programs += new_programs
        if dry_run:
            plan = show_plan(programs)
            if "search" in config:
                plan = {"max_trials": sweep_search.max_trials(config), "first_round": plan}
            return plan
        main.enable_compilation_cache(workdir)
        check_memory(new_programs)
        metric = programs[0].setup.task.metric
        if jax.process_index() == 0:
            workdir.mkdir(parents=True, exist_ok=True)
            names = {p.name: [trial.workdir.name for trial in p.trials] for p in programs}
            write_json(workdir / "sweep.json", {"config": settings_of(config), "programs": names})
        write_report = functools.partial(report, workdir, config, points, metric)
        try:
            run_programs(workdir, config, new_programs, write_report)
        except (RunStopped, KeyboardInterrupt):
            write_report()
            raise
    return write_report()  # Another worker may have written an older report last.


def propose(config: ConfigDict, directory: pathlib.Path) -> Iterator[list[Point]]:
    """Yields the configurations to run; in rounds for a search, which reads their results."""
    if "search" in config:
        yield from sweep_search.rounds(config, directory)
    else:
        yield make_points(config, grid_overrides(config), directory)


def report(workdir: pathlib.Path, config: ConfigDict, points: Sequence[Point], metric: str) -> dict:
    """Writes the report on the main process and returns its summary; {} on the others."""
    is_writer = jax.process_index() == 0
    return sweep_report.write(workdir, config, points, metric) if is_writer else {}


def run_programs(
    workdir: pathlib.Path,
    config: ConfigDict,
    programs: Sequence[Program],
    write_report: Callable[[], object],
) -> None:
    """Runs the programs that no other worker has claimed; returns when all are finished."""
    by_name, heartbeats, report_due = {program.name: program for program in programs}, {}, 0.0
    with distributed.raise_on_all_processes():
        if jax.process_index() == 0:
            for program in programs:
                for trial in program.trials:
                    if trial.result_path.exists():
                        settings = program.setup.settings(trial.config)
                        check_settings(trial.workdir, as_saved(settings))
    while True:
        name, claim = "", contextlib.nullcontext()
        with distributed.raise_on_all_processes():
            if jax.process_index() == 0:
                name, claim = claim_program(workdir, config, programs, heartbeats)
        name = distributed.allgather_texts(name)[0]
        if name == FINISHED:
            return
        if not name:
            time.sleep(POLL_SECONDS)
            continue
        with claim:
            program = by_name[name]
            logging.info(
                "Program %s of %s: %d trials", name, ", ".join(by_name), len(program.trials)
            )
            run_program(program, workdir / "programs" / name)
            if time.monotonic() > report_due:
                write_report()
                report_due = time.monotonic() + SECONDS_BETWEEN_REPORTS


def claim_program(
    workdir: pathlib.Path, config: ConfigDict, programs: Sequence[Program], heartbeats: dict
) -> tuple[str, contextlib.AbstractContextManager]:
    """Claims a program; returns its name, FINISHED if all are, or "" if others run the rest."""
    check_directory(workdir, config)  # Another worker may have added seeds.
    name = FINISHED
    for program in programs:
        if program.is_finished:
            continue
        directory = workdir / "programs" / program.name
        if claim := sweep_claims.try_claim(directory, heartbeats):
            if not program.is_finished:
                return program.name, claim
            claim.release()  # Another worker has just finished it.
            continue
        worker, name = sweep_claims.holder(directory, heartbeats), ""
        logging.log_every_n_seconds(
            logging.INFO, "Program %s is being run by %s", 60, program.name, worker
        )
    return name, contextlib.nullcontext()


def check_sweep(config: ConfigDict) -> None:
    """Validates the fields of a sweep. Raises ValueError."""
    if config.base.num_seeds != 1:
        count = config.base.num_seeds
        raise ValueError(f"--config.base.num_seeds={count}: expected 1; set --config.num_seeds")
    for name, minimum in (("num_seeds", 1), ("max_stacked_trials", 0)):
        if config[name] < minimum:
            raise ValueError(f"--config.{name}={config[name]}: expected at least {minimum}")
    if "search" in config:
        sweep_search.check_search(config)
        return
    grid = flatten(config.grid)
    if not grid and not config.trials:
        fix = "set the values of one or more fields, such as batch_size=(16,), or `trials`"
        raise ValueError(f"--config.grid is empty: {fix}")
    for name, values in grid.items():
        if not isinstance(values, tuple | list) or not values:
            fix = f"to keep one value, set --config.base.{name}"
            raise ValueError(f"--config.grid.{name}={values!r}: expected one or more values; {fix}")
        if twice := [value for n, value in enumerate(values) if value in values[:n]]:
            raise ValueError(f"--config.grid.{name}={values!r}: {twice[0]!r} is given twice")
    for index, values in enumerate(config.trials):
        if not isinstance(values, dict):
            raise ValueError(f"trials[{index}]={values!r}: expected a dict of fields and values")


def settings_of(config: ConfigDict) -> dict:
    """Returns what sweep.json stores of a configuration."""
    if "search" in config:
        return config.to_dict() | {"version_of_optuna": sweep_search.version()}
    return config.to_dict()


def as_saved(settings: dict) -> dict[str, object]:
    """Returns settings by dotted name, as read from a JSON file: lists for tuples."""
    return flatten_dict(json.loads(json.dumps(settings)), sep=".")


def check_directory(workdir: pathlib.Path, config: ConfigDict) -> None:
    """Raises ValueError if `workdir` is a file, holds another sweep, or other workers' programs."""
    if ":/" in str(workdir):
        raise ValueError(f"--workdir={workdir}: mount the bucket, and use a path below the mount")
    if workdir.is_file():
        raise ValueError(f"--workdir={workdir} is a file: expected a directory")
    path = workdir / "sweep.json"
    if not path.exists():
        for run in (*workdir.glob("config.json"), *workdir.glob("seed_*/config.json")):
            raise ValueError(f"--workdir={workdir} holds a run ({run}), not a sweep: use another")
        return
    content = json.loads(path.read_text())
    saved, settings = as_saved(content["config"]), as_saved(settings_of(config))
    # The proposals of a search depend on the scores, and so on the seeds.
    changeable = set(CHANGEABLE) - ({"num_seeds"} if "search" in config else set())
    check_equal_settings(saved, settings, path, tuple(changeable))
    changed = [name for name in PROGRAM_FIELDS if saved[name] != settings[name]]
    for program in content["programs"] if changed else ():
        if worker := sweep_claims.holder(workdir / "programs" / program, {}):
            raise ValueError(
                f"--config.{changed[0]}={settings[changed[0]]}: {worker} is running program "
                f"{program} of this sweep with {saved[changed[0]]}: wait until it is finished, or "
                "stop it. If it died on another machine, remove "
                f"{workdir / 'programs' / program / 'claims'}"
            )


def group_trials(points: Sequence[Point]) -> dict[str, list[Trial]]:
    """Groups the trials whose fields outside PER_TRIAL are equal.

    The first seed of all configurations comes first, so that more seeds do not change the first
    programs.
    """
    groups = {}
    by_seed = zip(*(point.trials for point in points), strict=True)
    for trial in itertools.chain.from_iterable(by_seed):
        shared = {k: v for k, v in flatten(trial.config).items() if k not in PER_TRIAL}
        groups.setdefault(repr(shared), []).append(trial)
    return groups


def make_programs(
    config: ConfigDict, points: Sequence[Point], first: int, setups: dict[str, FinetuneSetup]
) -> list[Program]:
    """Returns the programs of `points`, in groups numbered from `first`; adds their `setups`.

    Raises ValueError for an invalid configuration, or several metrics.
    """
    programs, weights = [], {}
    for number, (shared, trials) in enumerate(group_trials(points).items(), first):
        setups[shared] = prepare(trials, setups.get(shared), weights)
        size, mesh = config.max_stacked_trials, setups[shared].mesh
        if not size and mesh.devices.flat[0].platform == "cpu":
            # On CPU, stacking is slower than running trials in sequence and needs their combined
            # memory.
            size = mesh.shape["trial"]
        parts = split(trials, size, number)
        programs += [Program(name, setups[shared], part) for name, part in parts.items()]
    metrics = sorted({setup.task.metric for setup in setups.values()})
    if len(metrics) > 1:
        names = ", ".join(metrics)
        raise ValueError(f"configurations have different metrics ({names}): sweep each separately")
    return programs


def split(trials: Sequence[Trial], size: int, number: int) -> dict[str, Sequence[Trial]]:
    """Splits the trials of group `number` into programs, by name, of at most `size` (0: all)."""
    starts = range(0, len(trials), size or len(trials))
    parts = [trials[start : start + starts.step] for start in starts]
    return {f"{number}.{part}": stack for part, stack in enumerate(parts, 1)}


def prepare(
    trials: Sequence[Trial], setup: FinetuneSetup | None, weights: dict[str, LoadedModel]
) -> FinetuneSetup:
    """Builds the setup of trials that differ only in PER_TRIAL, unless there is one.

    `weights`, by `init_from`, are read once. Raises ValueError.
    """
    trial = trials[0]
    try:
        for trial in trials:
            check_numbers(trial.config)
        if not setup:
            trial = trials[0]
            source = trial.config.init_from
            weights[source] = weights.get(source) or finetune.read_weights(trial.config)
            setup = setup_finetuning(trial.config, *weights[source][:3])
        for trial in trials:
            setup.check(trial.config)
    except (ValueError, OSError) as error:
        message = str(error).replace("--config.", "--config.base.")
        raise ValueError(f"{trial.workdir.name}: {message}") from error
    if not setup.task.train:
        fix = "set --config.base.data.train=FILE, and num_epochs above 0"
        raise ValueError(f"a sweep needs training data: {fix}")
    if not setup.task.selection_split:
        name = setup.task.metric.partition("/")[0]
        raise ValueError(
            f"configurations cannot be ranked: {setup.task.metric} needs examples with labels for "
            f"{name}, as in --config.base.data.{name}=FILE"
        )
    return setup


def show_plan(programs: Sequence[Program]) -> dict:
    """Prints the trials, their steps and the memory of their programs; returns the totals."""
    steps = {
        trial.workdir.name: program.setup.num_steps(trial.config)
        for program in programs
        for trial in program.trials
    }
    width, plan, sizes = max(map(len, steps)), {}, {}
    if jax.process_index() == 0:
        print(f"{'trial':{width}}  program   steps")
    for program in programs:
        names = [trial.workdir.name for trial in program.trials]
        group = program.name.partition(".")[0]  # Its programs share a setup.
        if group not in sizes:
            sizes[group] = sweep_memory.bytes_per_trial(program.setup)
        trial_bytes = sizes[group]
        program_bytes = sweep_memory.program_bytes(program.setup, len(names), trial_bytes)
        plan[program.name] = {
            "trials": len(names),
            "steps": max(steps[name] for name in names),
            "gib_per_device": program_bytes / 2**30,
            "trials_that_fit": sweep_memory.trials_that_fit(program.setup, trial_bytes),
        }
        if jax.process_index() == 0:
            print(*(f"{n:{width}}  {program.name:>7}  {steps[n]:6}" for n in names), sep="\n")
    return {
        "trials": len(steps),
        "steps_of_all_trials": sum(steps.values()),
        "gib_of_device": sweep_memory.device_memory() / 2**30,
        "programs": plan,
    }


def run_program(program: Program, directory: pathlib.Path) -> None:
    """Runs or resumes a program, whose training state is in `directory`."""
    trials = program.trials
    with distributed.raise_on_all_processes():
        waiting = {
            finetune.trial_name(trial, directory)
            for trial in trials
            if not trial.result_path.exists()
        }
        if jax.process_index() == 0 and waiting.isdisjoint(finetune.saved_trials(directory)):
            # They are of finished trials, or of other programs: max_stacked_trials was changed.
            shutil.rmtree(directory / "checkpoints", ignore_errors=True)
    try:
        finetune.run_trials(program.setup, trials, directory)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "Out of memory" not in str(error):
            raise
        count = min(fitting_trials(program.setup), len(trials) - 1)
        raise too_many_trials(program, count) from error


def check_memory(programs: Sequence[Program]) -> None:
    """Raises ValueError if a stack needs more memory than its devices have."""
    # Another worker may finish a program meanwhile, but all processes must compile the same ones.
    unfinished = " ".join(program.name for program in programs if not program.is_finished)
    names, counts = distributed.allgather_texts(unfinished)[0].split(), {}
    for program in programs:
        is_stacked = len(program.trials) > program.setup.mesh.shape["trial"]
        if not is_stacked or program.name not in names:
            continue
        group = program.name.partition(".")[0]  # Its programs share a setup.
        if group not in counts:
            counts[group] = fitting_trials(program.setup)
        with distributed.raise_on_all_processes():
            if counts[group] < len(program.trials):
                raise too_many_trials(program, counts[group])


def too_many_trials(program: Program, count: int) -> ValueError:
    """Returns the error for a program of which only `count` trials fit into memory."""
    advice = f"about {count} fit: set --config.max_stacked_trials={count}, or a smaller"
    if not count:
        advice = "not even one fits: set a smaller"
    return ValueError(
        f"not enough memory for program {program.name}, with {len(program.trials)} trials: "
        f"{advice} --config.base.per_device_batch_size"
    )


def fitting_trials(setup: FinetuneSetup) -> int:
    """Returns how many trials fit into one program, as the compiler plans its memory."""
    try:
        return sweep_memory.trials_that_fit(setup, sweep_memory.bytes_per_trial(setup))
    except jax.errors.JaxRuntimeError:
        return 0


if __name__ == "__main__":
    DRY_RUN = flags.DEFINE_bool("dry_run", False, "Only list the trials and programs.")
    main.start(lambda config, workdir: sweep(config, workdir, DRY_RUN.value), "tools.sweep")
