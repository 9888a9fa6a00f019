r"""Fine-tunes over a grid of hyperparameters, training same-shape trials as one program.

    python -m bert_jax.sweep --config=configs/sweeps/paper.py:glue:mrpc --workdir=runs/sweep \
        --config.base.init_from=runs/base --config.base.data.directory=glue_data

A config file in configs/sweeps has `base`, a fine-tuning configuration; `grid`, the values of its
fields, of which all combinations are run, or `trials`, further configurations as dicts; and any of
the fields in configs/sweeps/fields.py. With `search` instead of `grid`, Optuna proposes the
configurations: sweeps/search.py.

Trials that differ only in `PER_TRIAL` (seed, learning rate, weight decay, warm-up, epochs,
patience, dropout) train as one stacked program; on a CPU, where a stack is slower, they run one
after another and compile once. Each has a workdir in DIR/trials, as a fine-tuning run alone would.

report.html, report.md with its plots, and trials.csv compare the trials; they are written while the
sweep runs, at most once a minute, when it is stopped, and at the end. The same command resumes a
stopped sweep from its last checkpoint. With more values, trials, seeds, or Optuna trials the sweep
grows, unless it prunes: finished trials are kept. Started on several machines that share DIR, each
runs programs that no other has claimed. `--dry_run` lists the trials and programs, and estimates
memory and time.
"""

from bert_jax.runtime.command_line import restart_with_huge_pages

if __name__ == "__main__":
    restart_with_huge_pages()  # Before the other imports, which take longer than a second.

import contextlib
import functools
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence

import jax
from absl import flags, logging
from ml_collections import ConfigDict

from bert_jax import finetune
from bert_jax.checkpoints.parameters import LoadedModel
from bert_jax.finetuning.finetune_fields import KEEPING_EXAMPLES, MAY_CHANGE, check_numbers
from bert_jax.finetuning.finetune_setup import (
    FinetuneSetup,
    check_against_weights,
    setup_finetuning,
)
from bert_jax.finetuning.finetune_teacher import with_teacher
from bert_jax.finetuning.stacks import saved_trials, trial_name
from bert_jax.finetuning.task_data import read_task_data
from bert_jax.finetuning.trials import Trial
from bert_jax.runtime import distributed, main
from bert_jax.runtime.config_fields import flatten
from bert_jax.runtime.errors import RunStopped
from bert_jax.sharding.mesh import make_mesh
from bert_jax.sweeps import claims, report, search
from bert_jax.sweeps.configurations import (
    Configuration,
    grid_overrides,
    make_configurations,
    plural,
)
from bert_jax.sweeps.plan import format_seconds, list_trials, show_plan
from bert_jax.sweeps.programs import (
    Group,
    Program,
    check_memory,
    check_pruning,
    fitting_trials,
    group_trials,
    split,
    too_many_trials,
)
from bert_jax.sweeps.settings import (
    as_saved,
    check_directory,
    complete,
    known_fields,
    settings_of,
)
from bert_jax.sweeps.weights import remove_weights
from bert_jax.training import monitoring
from bert_jax.training.trackers import check_tracker
from bert_jax.training.workdir import check_settings, write_json

POLL_SECONDS = 5  # Between checks whether the other workers' programs are finished.
FINISHED = "finished"


SECONDS_BETWEEN_REPORTS = 60  # A report takes about a second.


def sweep(config: ConfigDict, workdir: str | pathlib.Path, dry_run: bool = False) -> dict:
    """Runs or resumes the sweep in `workdir`; returns its best configuration and its report's path.

    With `dry_run` it writes nothing, and returns the number of trials and steps, and estimates of
    memory and time; of a search, for the first round, and the maximum number of trials. In a
    multi-process run every process must call it, after `distributed.initialize`.
    """
    workdir = pathlib.Path(workdir)
    settings = as_saved(config.to_dict())
    distributed.check_equal_on_all_processes(settings | {"workdir": str(workdir)})
    with distributed.raise_on_all_processes():
        config = complete(config)
    proposals, setups = propose(config, workdir / "trials"), {}
    configurations: list[Configuration] = []
    programs: list[Program] = []
    while True:
        with distributed.raise_on_all_processes():
            proposed = next(proposals, None)
            renamed = check_directory(workdir, config)
            first = 1 + max((int(program.name.split(".")[0]) for program in programs), default=0)
            groups = make_groups(config, proposed or [], first)
            if dry_run:  # Before the data is read, which may take long or fail.
                list_trials(groups, results_of(groups, renamed))
            new_programs = make_programs(groups, setups)
            if not programs:  # Later rounds of a search may have small programs.
                check_pruning(new_programs, config.prune_from_evaluation)
        if proposed is None:
            break
        configurations += proposed
        programs += new_programs
        if dry_run:
            return dry_run_of(config, programs, results_of(groups, renamed))
        monitoring.enable_compilation_cache(workdir)
        with distributed.raise_on_all_processes():
            if renamed and jax.process_index() == 0:
                rename_trials(renamed)
                write_settings(workdir, config, programs)
        check_memory(new_programs)
        metric = programs[0].setup.data.task.metric
        if jax.process_index() == 0:
            write_settings(workdir, config, programs)
        update_report = functools.partial(write_report, workdir, config, configurations, metric)
        clean_up = functools.partial(
            remove_weights, configurations, programs, config.keep_trials, metric
        )
        try:
            run_programs(workdir, config, new_programs, update_report, clean_up)
        except (RunStopped, KeyboardInterrupt):
            update_report()
            raise
    if jax.process_index() == 0:
        warn_of_other_trials(workdir, configurations)
    return update_report()  # Another worker may have written an older report last.


def run(config: ConfigDict, workdir: str, dry_run: bool = False) -> dict | None:
    """Runs `sweep`; returns its result with scores rounded as in the report, to be printed.

    Returns None for a `dry_run`, which has already printed its result as text.
    """
    result = sweep(config, workdir, dry_run)
    if dry_run or not result:  # Empty on the other processes.
        return None
    scores = {name: round(x, 4) for name, x in result["scores_of_best_configuration"].items()}
    return result | {"scores_of_best_configuration": scores}


def results_of(
    groups: Sequence[Group], renamed: dict[pathlib.Path, pathlib.Path]
) -> dict[str, dict | None]:
    """Returns the result of each trial by name, None before it has ended; writes nothing.

    `renamed` maps the current workdirs of trials to their new ones.
    """
    old, results = {new: path for path, new in renamed.items()}, {}
    trials = (trial for group in groups for part in group.parts.values() for trial in part)
    for trial in trials:
        path = old.get(trial.workdir, trial.workdir)
        results[trial.workdir.name] = trial._replace(workdir=path).result
    return results


def dry_run_of(
    config: ConfigDict, programs: Sequence[Program], results: dict[str, dict | None]
) -> dict:
    """Prints and returns what would be run: of a search, the first round, and the maximum."""
    plan = show_plan(programs, results, may_end_early=config.prune_from_evaluation > 0)
    if "search" not in config:
        return plan
    seconds = round(plan["estimated_seconds"] * search.num_first_rounds(config), 1)
    total = {"max_trials": search.max_trials(config), "estimated_seconds": seconds}
    if jax.process_index() == 0:
        print(
            "This is the first round. The search has at most "
            f"{plural(total['max_trials'], 'trial')}, and takes about {format_seconds(seconds)} "
            "in all.\n"
        )
    return total | {"first_round": plan}


def rename_trials(renamed: dict[pathlib.Path, pathlib.Path]) -> None:
    """Renames the workdirs of trials, after the fields that vary now that the sweep has grown."""
    for old, new in renamed.items():
        with contextlib.suppress(FileNotFoundError):  # Not begun, or renamed by another worker.
            old.rename(new)


def write_settings(workdir: pathlib.Path, config: ConfigDict, programs: Sequence[Program]) -> None:
    """Writes sweep.json: the configuration, and the trials of each program."""
    workdir.mkdir(parents=True, exist_ok=True)
    names = {p.name: [trial.workdir.name for trial in p.trials] for p in programs}
    write_json(workdir / "sweep.json", {"config": settings_of(config), "programs": names})


def warn_of_other_trials(workdir: pathlib.Path, configurations: Sequence[Configuration]) -> None:
    """Logs finished trials that a search, since it has grown, has not given more epochs."""
    known = {trial.workdir.name for each in configurations for trial in each.trials}
    finished = {path.parent.name for path in workdir.glob("trials/*/result.json")}
    if others := sorted(finished - known):
        text = "%s of the search before it was extended, not in the report: %s"
        logging.warning(text, plural(len(others), "finished trial"), "; ".join(others))


def propose(config: ConfigDict, directory: pathlib.Path) -> Iterator[list[Configuration]]:
    """Yields the configurations to run; in rounds for a search, which reads their results."""
    if "search" in config:
        yield from search.rounds(config, directory)
    else:
        yield make_configurations(config, grid_overrides(config), directory)


def write_report(
    workdir: pathlib.Path, config: ConfigDict, configurations: Sequence[Configuration], metric: str
) -> dict:
    """Writes the report on the main process and returns its summary; {} on the others."""
    is_writer = jax.process_index() == 0
    return report.write(workdir, config, configurations, metric) if is_writer else {}


def run_programs(
    workdir: pathlib.Path,
    config: ConfigDict,
    programs: Sequence[Program],
    update_report: Callable[[], object],
    clean_up: Callable[[], object],
) -> None:
    """Runs the programs that no other worker has claimed; returns when all are finished.

    The main process calls `clean_up` after each of them.
    """
    by_name, heartbeats, report_due = {program.name: program for program in programs}, {}, 0.0
    with distributed.raise_on_all_processes():
        if jax.process_index() == 0:
            for program in programs:
                for trial in program.trials:
                    if trial.result_path.exists():
                        settings = program.setup.settings(trial.config)
                        check_settings(trial.workdir, as_saved(settings), MAY_CHANGE)
    while True:
        name, claim = "", contextlib.nullcontext()
        with distributed.raise_on_all_processes():
            if jax.process_index() == 0:
                name, claim = claim_program(workdir, config, programs, heartbeats)
        name = distributed.allgather_texts(name)[0]
        if name == FINISHED:
            if jax.process_index() == 0:
                clean_up()
            return
        if not name:
            time.sleep(POLL_SECONDS)
            continue
        with claim:
            program = by_name[name]
            log_program(program, [*by_name].index(name) + 1, len(by_name))
            run_program(program, workdir / "programs" / name, config.prune_from_evaluation)
            if jax.process_index() == 0:
                clean_up()
            if time.monotonic() > report_due:
                update_report()
                report_due = time.monotonic() + SECONDS_BETWEEN_REPORTS


def log_program(program: Program, number: int, count: int) -> None:
    """Logs which program starts, of how many, with what."""
    trials = program.trials
    names = trials[0].workdir.name + (f" to {trials[-1].workdir.name}" * (len(trials) > 1))
    logging.info(
        "Program %s (%d of %d): %s, %s",
        program.name,
        number,
        count,
        plural(len(trials), "trial"),
        names,
    )


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
        if claim := claims.try_claim(directory, heartbeats):
            if not program.is_finished:
                return program.name, claim
            claim.release()  # Another worker has just finished it.
            continue
        worker, name = claims.holder(directory, heartbeats), ""
        logging.log_every_n_seconds(
            logging.INFO, "Program %s is being run by %s", 60, program.name, worker
        )
    return name, contextlib.nullcontext()


def make_groups(
    config: ConfigDict, configurations: Sequence[Configuration], first: int
) -> list[Group]:
    """Returns the trials of each group, numbered from `first`, by program; reads no files."""
    groups = []
    for number, (shared, trials) in enumerate(group_trials(configurations).items(), first):
        size = config.max_stacked_trials
        if not size and jax.devices()[0].platform == "cpu":
            # On CPU, stacking is slower than running trials in sequence and needs their combined
            # memory.
            with naming(trials[0]):
                size = make_mesh(**trials[0].config.mesh).shape["trial"]
        groups.append(Group(shared, split(trials, size, number)))
    return groups


def make_programs(groups: Sequence[Group], setups: dict[str, FinetuneSetup]) -> list[Program]:
    """Returns the programs of all groups; adds each group's setup to `setups`, by `Group.shared`.

    Raises ValueError for an invalid configuration, or several metrics.
    """
    programs, weights = [], {}
    for shared, parts in groups:
        trials = [trial for part in parts.values() for trial in part]
        for trial in trials:  # Checks the fields of all trials before any examples are read.
            with naming(trial):
                check_numbers(trial.config)
                check_tracker(trial.config.tracker)
        setups[shared] = setups.get(shared) or prepare(trials[0], [*setups.values()], weights)
        for trial in trials:
            with naming(trial):
                setups[shared].check(trial.config)
        programs += [Program(name, setups[shared], part) for name, part in parts.items()]
    metrics = sorted({setup.data.task.metric for setup in setups.values()})
    if len(metrics) > 1:
        names = ", ".join(metrics)
        raise ValueError(f"configurations have different metrics ({names}): sweep each separately")
    return programs


@contextlib.contextmanager
def naming(trial: Trial) -> Iterator[None]:
    """Says in errors of a trial's configuration that it is `base`, and with which values."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(f"config.base with {trial.workdir.name}: {error}") from error


def prepare(
    trial: Trial, setups: Sequence[FinetuneSetup], weights: dict[str, LoadedModel]
) -> FinetuneSetup:
    """Builds the setup of a trial, and of those that differ from it only in PER_TRIAL.

    Reads each `init_from` once, kept in `weights`, and reuses the examples of other `setups`.
    Raises ValueError.
    """
    with naming(trial):
        fields = trial.config.data
        has_data = fields.get("train", True) or fields.get("hub")
        if not trial.config.num_epochs or not has_data:
            fix = "set config.data.train=FILE, and num_epochs above 0"
            raise ValueError(f"a sweep needs training data: {fix}")
        source = trial.config.init_from
        weights[source] = weights.get(source) or finetune.read_weights(source)
        check_against_weights(trial.config, weights[source].settings)
        examples = fields_of_examples(trial.config)
        same = [each.data for each in setups if fields_of_examples(each.config) == examples]
        data = same[0] if same else read_task_data(trial.config, weights[source])
        data = with_teacher(trial.config, data)
        setup = setup_finetuning(trial.config, weights[source], data)
    if not data.task.selection_split:
        name = data.task.metric.partition("/")[0]
        raise ValueError(
            f"configurations cannot be ranked: {data.task.metric} needs examples with labels for "
            f"{name}, as in config.base.data.{name}=FILE"
        )
    return setup


def fields_of_examples(config: ConfigDict) -> str:
    """Returns as text the fields that determine the examples of a task and the initial weights."""
    return repr({name: v for name, v in flatten(config).items() if name not in KEEPING_EXAMPLES})


def run_program(program: Program, directory: pathlib.Path, prune_from: int) -> None:
    """Runs or resumes a program, whose training state is in `directory`."""
    trials = program.trials
    with distributed.raise_on_all_processes():
        waiting = {
            trial_name(trial, directory) for trial in trials if not trial.result_path.exists()
        }
        if jax.process_index() == 0 and waiting.isdisjoint(saved_trials(directory)):
            # They are of finished trials, or of other programs: max_stacked_trials was changed.
            shutil.rmtree(directory / "checkpoints", ignore_errors=True)
    try:
        finetune.run_trials(program.setup, trials, directory, prune_from)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "Out of memory" not in str(error):
            raise
        count = min(fitting_trials(program.setup), len(trials) - 1)
        raise too_many_trials(program, count) from error


if __name__ == "__main__":
    DRY_RUN = flags.DEFINE_bool("dry_run", False, "Only list the trials and programs.")
    main.start(lambda config, workdir: run(config, workdir, DRY_RUN.value), "sweep", known_fields)
