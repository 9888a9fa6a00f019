r"""Fine-tunes over a grid of hyperparameters, with trials of the same shapes as one program.

    python tools/sweep.py --config=configs/sweeps/paper.py:glue:mrpc --workdir=runs/sweep \
        --config.base.init_from=runs/base --config.base.data.directory=glue_data

A config file in configs/sweeps has `base`, a fine-tuning configuration; `grid`, the values of its
fields, of which all combinations are run; `trials`, further points as dicts; `num_seeds`; and
`max_stacked_trials`. Trials that differ only in `PER_TRIAL` (seed, learning rate, weight decay,
warm-up, epochs, dropout) train as one stacked program; on a CPU, where a stack is slower, in turn
with the same program. Each has a workdir in DIR/trials, as a fine-tuning alone would; report.html,
report.md and trials.csv compare them, written at most once a minute and at the end. The same
command resumes a stopped sweep from its last checkpoint; a larger `num_seeds` adds seeds.
`--dry_run` lists the trials and programs.
"""

import copy
import difflib
import itertools
import json
import pathlib
import re
import shutil
import time
from collections.abc import Sequence

import jax
from absl import flags, logging
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from bert_jax import finetune
from bert_jax.runtime import distributed, main
from bert_jax.runtime.command_line import NonFiniteLoss
from bert_jax.tasks.setup import PER_TRIAL, FinetuneSetup, check_numbers
from bert_jax.tasks.trials import Trial
from bert_jax.tools import sweep_report
from bert_jax.tools.sweep_report import Point, show
from bert_jax.training.workdir import (
    CHANGEABLE_ON_RESUME,
    check_equal_settings,
    claim_workdir,
    write_json,
)

# Fields of a sweep that may differ when it is resumed.
CHANGEABLE = (
    *("num_seeds", "max_stacked_trials"),
    *(f"base.{name}" for name in CHANGEABLE_ON_RESUME),
)

SECONDS_BETWEEN_REPORTS = 60  # A report takes about a second.


def sweep(config: ConfigDict, workdir: str | pathlib.Path, dry_run: bool = False) -> dict:
    """Runs or resumes the sweep in `workdir`; returns its best point and the path of its report.

    With `dry_run` it only reads weights and examples, and returns the number of trials and steps.
    In a multi-process run every process must call it, after `distributed.initialize`.
    """
    workdir = pathlib.Path(workdir)
    with distributed.raise_on_all_processes():
        check_sweep(config)
        points = make_points(config, workdir / "trials")
        check_directory(workdir, config)
        groups = group_trials(points)
        steps, metrics = {}, set()
        for group in reversed(groups):  # The setup of the first group remains, for its run.
            setup = prepare(group)
            steps |= {trial.workdir.name: setup.num_steps(trial.config) for trial in group}
            metrics.add(setup.task.metric)
        if len(metrics) > 1:
            names = ", ".join(sorted(metrics))
            raise ValueError(f"the points have different metrics ({names}): sweep each separately")
    size = config.max_stacked_trials
    if not size and setup.mesh.devices.flat[0].platform == "cpu":
        # A stack would take longer than its trials one after another, and the memory of all.
        size = setup.mesh.shape["trial"]
    stacks = [split(group, size, n) for n, group in enumerate(groups, 1)]
    programs = {name: stack for each in stacks for name, stack in each.items()}
    if dry_run:
        return show_plan(programs, steps)

    main.enable_compilation_cache(workdir)
    is_writer, metric = jax.process_index() == 0, setup.task.metric
    names = {name: [each.workdir.name for each in stack] for name, stack in programs.items()}
    with claim_workdir(workdir, config.to_dict()):
        if is_writer:
            write_json(workdir / "sweep.json", {"config": config.to_dict(), "programs": names})
        report_due = 0.0
        for index, group in enumerate(groups):
            if index:
                setup = prepare(group)
            for name, stack in stacks[index].items():
                logging.info("Program %s of %s: %d trials", name, ", ".join(names), len(stack))
                run_program(setup, stack, workdir / "programs" / name)
                is_last = name == next(reversed(programs))
                if is_writer and (is_last or time.monotonic() > report_due):
                    summary = sweep_report.write(workdir, config, points, metric)
                    report_due = time.monotonic() + SECONDS_BETWEEN_REPORTS
    return summary if is_writer else {}


def check_sweep(config: ConfigDict) -> None:
    """Validates the fields of a sweep. Raises ValueError."""
    if config.base.num_seeds != 1:
        given = config.base.num_seeds
        raise ValueError(f"--config.base.num_seeds={given}: expected 1; set --config.num_seeds")
    for name, minimum in (("num_seeds", 1), ("max_stacked_trials", 0)):
        if config[name] < minimum:
            raise ValueError(f"--config.{name}={config[name]}: expected at least {minimum}")
    for name, values in flat(config.grid).items():
        if not isinstance(values, tuple | list) or not values:
            fix = "a field that does not vary is set in --config.base"
            raise ValueError(f"--config.grid.{name}={values!r}: expected one or more values; {fix}")
    for index, values in enumerate(config.trials):
        if not isinstance(values, dict):
            raise ValueError(f"trials[{index}]={values!r}: expected a dict of fields and values")


def make_points(config: ConfigDict, directory: pathlib.Path) -> list[Point]:
    """Returns the combinations of the grid, then the points of `config.trials`, with their trials.

    The workdir of a trial is named after the values of the fields in which the points differ, and
    its seed. Raises ValueError for invalid fields or values.
    """
    grid = flat(config.grid)
    overrides = [
        ("grid", dict(zip(grid, values, strict=True)))
        for values in itertools.product(*grid.values())
        if grid or not config.trials
    ]
    overrides += [(f"trials[{index}]", each) for index, each in enumerate(config.trials)]
    configs = [override(config.base, values, where) for where, values in overrides]
    fields = dict.fromkeys(name for _, values in overrides for name in values)
    resolved = [{name: flat(each)[name] for name in fields} for each in configs]
    varying = [name for name in fields if len({repr(each[name]) for each in resolved}) > 1]
    points, sources = [], {}
    for (where, _), base, values in zip(overrides, configs, resolved, strict=True):
        values = {name: values[name] for name in varying}
        label = ",".join(f"{name}={show(value)}" for name, value in values.items())
        label = re.sub(r"[^\w.,=+-]+", "_", label)  # As the name of a file.
        if label in sources or len(label) > 200:
            problem = f"is also a point of {sources[label]}" if label in sources else "is too long"
            advice = "give each point once, with short values that differ in letters or digits"
            raise ValueError(f"{where}: {label or 'the point'} {problem}: {advice}")
        sources[label] = where
        trials = []
        for seed in range(base.seed, base.seed + config.num_seeds):
            trial = base.copy_and_resolve_references()
            trial.seed = seed
            name = f"{label},seed={seed}".lstrip(",")
            trials.append(Trial(trial, directory / name))
        points.append(Point(values, trials))
    return points


def override(base: ConfigDict, values: dict, where: str) -> ConfigDict:
    """Returns a copy of `base` with other `values`, by dotted name. Raises ValueError."""
    config, known = copy.deepcopy(base), flat(base)
    for name, value in values.items():
        location = f"{where}.{name}"
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1, cutoff=0)[0]
            raise ValueError(
                f"{location}: there is no such field in `base`; did you mean {nearest}?"
            )
        if name in ("seed", "num_seeds"):
            fix = "--config.base.seed sets the first seed, --config.num_seeds the number of seeds"
            raise ValueError(f"{location}={value}: expected no seeds in a point; {fix}")
        *parents, field = name.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        expected = node.get_type(field)
        is_none = value is None and known[name] is not None
        try:
            if is_none or (isinstance(value, bool) and expected is not bool):
                raise TypeError
            node[field] = value
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{location}: {value!r} is of type {type(value).__name__}; expected "
                f"{expected.__name__}, as in `base`, where it is {known[name]!r}"
            ) from error
    return config


def flat(config: ConfigDict) -> dict[str, object]:
    """Returns the values of all fields by dotted name."""
    return flatten_dict(config.to_dict(), sep=".")


def check_directory(workdir: pathlib.Path, config: ConfigDict) -> None:
    """Raises ValueError if `workdir` holds another sweep."""
    path = workdir / "sweep.json"
    if not path.exists():
        return
    settings = flatten_dict(json.loads(json.dumps(config.to_dict())), sep=".")
    saved = flatten_dict(json.loads(path.read_text())["config"], sep=".")
    check_equal_settings(saved, settings, path, CHANGEABLE)


def group_trials(points: Sequence[Point]) -> list[list[Trial]]:
    """Groups the trials whose fields outside PER_TRIAL are equal.

    The first seed of all points comes first, so that more seeds do not change the first programs.
    """
    groups = {}
    by_seed = zip(*(point.trials for point in points), strict=True)
    for trial in itertools.chain.from_iterable(by_seed):
        shared = {k: v for k, v in flat(trial.config).items() if k not in PER_TRIAL}
        groups.setdefault(repr(shared), []).append(trial)
    return list(groups.values())


def split(trials: Sequence[Trial], size: int, number: int) -> dict[str, Sequence[Trial]]:
    """Returns the programs of group `number` by name: at most `size` trials each (0: all)."""
    starts = range(0, len(trials), size or len(trials))
    parts = [trials[start : start + starts.step] for start in starts]
    return {f"{number}.{part}": stack for part, stack in enumerate(parts, 1)}


def prepare(trials: Sequence[Trial]) -> FinetuneSetup:
    """Builds the setup of trials that differ only in PER_TRIAL. Raises ValueError."""
    trial = trials[0]
    try:
        for trial in trials:
            check_numbers(trial.config)
        setup = finetune.prepare(trials[0].config)
    except (ValueError, OSError) as error:
        message = str(error).replace("--config.", "--config.base.")
        raise ValueError(f"{trial.workdir.name}: {message}") from error
    if not setup.task.selection_split:
        name = setup.task.metric.partition("/")[0]
        raise ValueError(
            f"no score would decide between the points: {setup.task.metric} needs examples with "
            f"labels for {name}, as in --config.base.data.{name}=FILE"
        )
    return setup


def show_plan(programs: dict[str, Sequence[Trial]], steps: dict[str, int]) -> dict:
    """Prints the trials with their program and number of steps; returns the totals."""
    names = {name: [trial.workdir.name for trial in stack] for name, stack in programs.items()}
    width = max(map(len, steps))
    if jax.process_index() == 0:
        print(f"{'trial':{width}}  program   steps")
        for program, trials in names.items():
            print(*(f"{name:{width}}  {program:>7}  {steps[name]:6}" for name in trials), sep="\n")
    return {
        "trials": len(steps),
        "steps_of_all_trials": sum(steps.values()),
        "programs": {
            program: {"trials": len(trials), "steps": max(steps[name] for name in trials)}
            for program, trials in names.items()
        },
    }


def run_program(setup: FinetuneSetup, trials: Sequence[Trial], directory: pathlib.Path) -> None:
    """Runs or resumes `trials` as one program, whose training state is in `directory`."""
    names = {
        finetune.trial_name(trial, directory) for trial in trials if not trial.result_path.exists()
    }
    if jax.process_index() == 0 and names.isdisjoint(finetune.saved_trials(directory)):
        # Of finished trials, or those of other programs before max_stacked_trials was changed.
        shutil.rmtree(directory / "checkpoints", ignore_errors=True)
    try:
        finetune.run_trials(setup, trials, directory)
    except NonFiniteLoss as error:
        logging.error("No trial of program %s has a finite loss: %s", directory.name, error)
        result = {"metric": setup.task.metric, "diverged": error.step, "message": str(error)}
        if jax.process_index() == 0 and len(trials) == 1:  # It leaves its state, and no result.
            write_json(trials[0].result_path, {"seed": trials[0].config.seed} | result)
            shutil.rmtree(directory / "checkpoints", ignore_errors=True)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "Out of memory" not in str(error):
            raise
        advice = f"set --config.max_stacked_trials to less than {len(trials)}, or a smaller"
        raise ValueError(
            f"out of memory in program {directory.name}, with {len(trials)} trials: {advice} "
            "--config.base.per_device_batch_size"
        ) from error


if __name__ == "__main__":
    DRY_RUN = flags.DEFINE_bool("dry_run", False, "Only list the trials and programs.")
    main.start(lambda config, workdir: sweep(config, workdir, DRY_RUN.value), "tools.sweep")
