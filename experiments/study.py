"""Shared code of the studies: runs as commands, collection of scores, and the report.

A study is a list of rows, as in the paper's tables. A row is a pre-training run, or existing
weights, and the settings for fine-tuning the tasks from it, each task and its seeds with one
`bert_jax.sweep`. At laptop scale the commands are run one after another; at pod scale they have the
paper's sizes and are written to a script. Runs are named after their scale, their --text and their
settings, so that studies with the same --workdir share them, and a finished run is not repeated.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import pathlib
import shlex
import sys
from collections.abc import Callable
from typing import NamedTuple

import study_report
from absl import app, flags
from study_flags import (
    DIRECTORIES,
    DRY_RUN,
    LAUNCH,
    MODES,
    REPORT_ONLY,
    REPORTS,
    SCALE,
    SLICE,
    TEXT,
    WORKDIR,
    Settings,
    Task,
    check_directories,
    check_slice,
    reads,
)

from bert_jax.runtime.command_line import describe_error, keep_running_without_log, parse_flags
from bert_jax.tools.commands import exit_interrupted, run_command

# Tokens of a row in the two phases. At laptop scale a small model first needs short rows: with 16
# tokens it soon learns that neighbors predict a word best, with 48 not within the run.
ROW_LENGTHS = {"laptop": (16, 48), "pod": (128, 512)}
PRETRAINING: Settings = {
    "num_steps": 1400,
    "batch_size": 64,
    "long_phase.num_steps": 400,
    "long_phase.batch_size": 32,
    "model.dtype": "float32",
    "model.dropout_rate": 0.0,  # The runs are too short to overfit.
    "model.initializer_range": 0.04,  # 0.02 suits a hidden size of 768.
    "model.max_position_embeddings": 384,
    "optimizer": "adamw",
    "learning_rate": 1e-3,
    "decay_power": 0.5,
    "warmup_steps": 100,
    "log_every": 100,
    "eval_every": 450,
    "eval_batch_size": 64,
    "checkpoint_every": 450,
    "keep_every": 450,
}
"""Fields of configs/pretrain/bert_tiny.py at laptop scale."""
FINETUNING: Settings = {
    "max_train_examples": 500,
    "max_eval_examples": 250,
    "max_seq_length": 48,
    "batch_size": 32,
    "num_epochs": 3.0,
    "learning_rate": 5e-4,  # Small models need a higher rate than BERT_BASE.
}
"""Fields of all tasks at laptop scale."""
GRID = ("batch_size", "num_epochs", "learning_rate")
"""Fields of the grid in configs/sweeps/paper.py; given here, they have a single value."""
HOW_TO_LAUNCH = """Run it with --launch, or with bash, on a TPU VM of one host. Or give --slice:
then run it on any machine that mounts the bucket at /gcs, and it launches a slice for each run
(docs/cloud_tpu.md); --workdir and the tasks' directories must be in /gcs. A stopped script
resumes."""


class Command(NamedTuple):
    """Arguments of python, and the path that exists once it has finished ("": always run)."""

    arguments: list[str]
    product: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the study's table.

    The encoder comes from a pre-training run with the fields `pretraining`, on a corpus of the
    `row_format` of tools/prepare_corpus.py (or on another one, the field `corpus`), after `step`
    (0: the last); or, if given, from `weights`. If `pretraining` is None, the row is only quoted
    from the paper. `row_lengths` are the tokens of a row in the two phases, if they are not those
    of the scale.
    `finetuning` has fields of the tasks in this row. `score` returns the score of a trial's
    directory, in place of the task's metric. `pretrain_config` and `finetune_config`
    replace the configurations of the pre-training run and of the tasks. At pod scale the model has
    the `size`. `paper` has the paper's scores by column. With more `num_pretraining_seeds` than one
    there is an encoder of each, and all of their scores are in the row.
    """

    name: str
    paper: dict[str, float] = dataclasses.field(default_factory=dict)
    pretraining: Settings | None = dataclasses.field(default_factory=dict)
    row_format: str = "sentence_pairs"
    row_lengths: tuple[int, int] | None = None
    step: int = 0
    weights: str = ""
    finetuning: Settings = dataclasses.field(default_factory=dict)
    score: Callable[[pathlib.Path], float] | None = None
    finetune_config: str = ""
    pretrain_config: str = ""
    size: str = "base"
    num_pretraining_seeds: int = 1


@dataclasses.dataclass(frozen=True)
class Study:
    """The runs and texts of a study.

    `rows` and `tasks` are functions of the scale, and so are `preparations`, the commands that must
    be run before those of the rows. `num_seeds` are of fine-tuning, from each encoder.
    `pretraining_metrics` are columns from the result of the pre-training run itself: a name, and
    the key in result.json. `about` says what is
    compared and where the paper's numbers are from, at both scales; `laptop` what is smaller at
    laptop scale, and `limits` what that can and cannot show, whatever the scores of a run.
    `appendix` returns further Markdown of the report, from the finished runs at a scale; it may
    write plots into the report's directory, its second argument.
    """

    name: str
    title: str
    about: str
    laptop: str
    limits: str
    rows: Callable[[str], list[Row]]
    tasks: Callable[[str], list[Task]]
    pretraining_metrics: dict[str, str] = dataclasses.field(default_factory=dict)
    num_seeds: int = 2
    preparations: Callable[[str], list[Command]] | None = None
    draw: Callable = study_report.draw_scores
    appendix: Callable[[str, pathlib.Path], str] | None = None


def fetched(name: str) -> str:
    """Returns the directory of the dataset or weights `name`."""
    return f"{WORKDIR.value}/data/{name}"


def joined_news() -> str:
    """Returns the directory of long documents, made of news, of about 4,096 tokens."""
    return fetched("joined-news-4096")


def runs(scale: str) -> str:
    """Returns the directory of the runs at a scale, one for each --text."""
    return f"{WORKDIR.value}/{scale}" + (f"-{digest(TEXT.value)}" if TEXT.value else "")


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


def plan(study: Study, scale: str) -> list[Command]:
    """Returns the commands of the study in the order in which they can be run."""
    rows, tasks = rows_to_run(study, scale), study.tasks(scale)
    check_directories(study.name, tasks, scale)
    commands = corpus_commands(rows, scale) + data_commands(tasks)
    commands += study.preparations(scale) if study.preparations else []
    for row in itertools.chain.from_iterable(map(with_seeds, rows)):
        if not row.weights:
            commands.append(pretrain_command(row, scale))
        elif row.weights == fetched("minilm"):
            commands.append(fetch_command("minilm"))
        commands += [sweep_command(study, row, task, scale) for task in tasks]
    return list({tuple(command.arguments): command for command in commands}.values())


def rows_to_run(study: Study, scale: str) -> list[Row]:
    """Returns the rows that are not only quoted from the paper."""
    return [row for row in study.rows(scale) if row.pretraining is not None]


def with_seeds(row: Row) -> list[Row]:
    """Returns a row for each seed of pre-training."""
    if row.num_pretraining_seeds == 1:
        return [row]
    seeds = range(row.num_pretraining_seeds)
    return [
        dataclasses.replace(row, pretraining=row.pretraining | {"seed": seed}) for seed in seeds
    ]


def fetch_command(name: str) -> Command:
    return Command(["tools/fetch_data.py", name, fetched(name)], fetched(name))


def data_commands(tasks: list[Task]) -> list[Command]:
    """Returns the commands that fetch or build the files that the tasks read from WORKDIR/data."""
    names = [name for name in ("reuters-r8", "conll2003") if reads(tasks, fetched(name))]
    commands = [fetch_command(name) for name in names]
    if reads(tasks, fetched("story-endings")):
        arguments = ["experiments/story_endings.py", fetched("tales"), fetched("story-endings")]
        commands += [fetch_command("tales"), Command(arguments, fetched("story-endings"))]
    if reads(tasks, joined_news()):
        arguments = ["experiments/joined_news.py", fetched("reuters-r8"), joined_news(), "4096"]
        commands += [fetch_command("reuters-r8"), Command(arguments, joined_news())]
    return commands


def corpus_commands(rows: list[Row], scale: str) -> list[Command]:
    """Returns the commands for the text, the vocabulary, and a corpus for each row format."""
    corpora = {path: None for row in rows if not row.weights for path in corpora_of(row, scale)}
    if not corpora:
        return []
    text, size, commands = TEXT.value or "enwiki-latest-pages-articles.xml.bz2", 30522, []
    if scale == "laptop":
        size = 4096
        if not TEXT.value:
            text = f"{fetched('wikipedia-sample')}/*.bz2"
            commands = [fetch_command("wikipedia-sample")]
    vocabulary = f"{runs(scale)}/vocab.txt"
    arguments = ["tools/train_vocab.py", f"--input={text}", f"--output={vocabulary}"]
    commands.append(Command([*arguments, f"--size={size}"], vocabulary))
    for corpus in corpora:
        length, _, row_format = pathlib.Path(corpus).name.partition("-")
        arguments = ["tools/prepare_corpus.py", f"--input={text}", f"--vocab={vocabulary}"]
        arguments += [f"--output={corpus}", f"--max_seq_length={length}"]
        arguments += [f"--rows={row_format}"]
        arguments += ["--heldout_fraction=0.1"] if scale == "laptop" else []
        commands.append(Command(arguments, f"{corpus}/manifest.json"))
    return commands


def corpora_of(row: Row, scale: str) -> list[str]:
    """Returns the corpora of the two phases of a row's run; none if it has one of its own."""
    if "corpus" in row.pretraining:
        return []
    lengths = row.row_lengths or ROW_LENGTHS[scale]
    return [f"{runs(scale)}/corpus/{length}-{row.row_format}" for length in lengths]


def pretraining(row: Row, scale: str) -> tuple[str, Settings]:
    """Returns the configuration of a row's pre-training run, and the fields that it sets."""
    settings = dict(zip(("corpus", "long_phase.corpus"), corpora_of(row, scale), strict=False))
    if scale == "laptop":
        config, settings = "bert_tiny", settings | PRETRAINING
    else:
        config, settings = f"pod_{row.size}", settings | {"keep_every": 100_000}
    return row.pretrain_config or config, settings | row.pretraining


def pretrain_command(row: Row, scale: str) -> Command:
    """Returns the pre-training run of a row."""
    config, settings = pretraining(row, scale)
    workdir = encoder(dataclasses.replace(row, step=0), scale)
    arguments = ["-m", "bert_jax.pretrain", f"--config=configs/pretrain/{config}.py"]
    arguments += [f"--workdir={workdir}", *overrides(settings)]
    return Command(arguments, f"{workdir}/result.json")


def encoder(row: Row, scale: str) -> str:
    """Returns the workdir, the checkpoint or the given weights of a row."""
    if row.weights:
        return row.weights
    config, settings = pretraining(row, scale)
    own = {name: pathlib.Path(str(value)).name for name, value in row.pretraining.items()}
    parts = [config, row.row_format, *overrides(own, prefix="")]
    # A file name has at most 255 bytes; the digest is of all settings.
    name = f"{','.join(parts)[:200]}_{digest(sorted(settings.items()))}"
    directory = f"{runs(scale)}/pretrain/{name}"
    return f"{directory}/checkpoints/{row.step}" if row.step else directory


def finetuning(row: Row, task: Task, scale: str) -> tuple[str, Settings]:
    """Returns the configuration with which a task is fine-tuned, and the fields that it sets."""
    settings = (FINETUNING if scale == "laptop" else {}) | task.settings | row.finetuning
    return row.finetune_config or task.config, settings | {"init_from": encoder(row, scale)}


def sweep_command(study: Study, row: Row, task: Task, scale: str) -> Command:
    """Returns the sweep of a row and task: one configuration at laptop scale, at pod the grid."""
    config, settings = finetuning(row, task, scale)
    settings = {
        f"grid.{name}" if name in GRID else f"base.{name}": (value,) if name in GRID else value
        for name, value in settings.items()
    }
    settings |= {"num_seeds": study.num_seeds}
    if scale == "pod":  # At most one trial per chip, of the v4-32 of on_slice or of one v4 host.
        chips = 16 if SLICE.value else 4
        settings |= {"base.mesh.trial": chips, "max_stacked_trials": chips}
    workdir = sweep_workdir(row, task, scale)
    arguments = ["-m", "bert_jax.sweep", f"--config=configs/sweeps/paper.py:{config}"]
    arguments += [f"--workdir={workdir}", *overrides(settings)]
    # At laptop scale the sweep has one configuration; its seeds end in order.
    last_result = f"{workdir}/trials/seed={study.num_seeds - 1}/result.json"
    return Command(arguments, last_result if scale == "laptop" else "")


def sweep_workdir(row: Row, task: Task, scale: str) -> pathlib.Path:
    """Returns the directory of a sweep, which is named after its settings."""
    config, settings = finetuning(row, task, scale)
    values = (pathlib.Path(str(value)).name for value in row.finetuning.values())  # Of a path.
    names = "_".join([config.replace(":", "_"), *values])
    return pathlib.Path(runs(scale), "finetune", f"{names}_{digest(sorted(settings.items()))}")


def overrides(settings: Settings, prefix: str = "--config.") -> list[str]:
    return [f"{prefix}{name}={value}" for name, value in settings.items()]


def run(commands: list[Command]) -> None:
    """Runs the commands that have not finished. Exits with the code of the first that fails.

    With --dry_run only prints them.
    """
    # All runs share the compiled programs, the many small ones too.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(pathlib.Path(WORKDIR.value, "compiled").absolute())}
    cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    for number, command in enumerate(commands, 1):
        if command.product and pathlib.Path(command.product).exists():
            continue
        print(f"\n[{number} of {len(commands)}] python {shlex.join(command.arguments)}", flush=True)
        if not DRY_RUN.value:
            run_command([sys.executable, *command.arguments], cache | os.environ)


def on_slice(arguments: list[str]) -> list[str]:
    """Returns the arguments of python that launch a run on a slice, if --slice is given."""
    if not SLICE.value or arguments[0] != "-m":
        return arguments
    program = arguments[1].removeprefix("bert_jax.")
    is_large = "--config=configs/pretrain/pod_large.py" in arguments
    launch = ["tools/launch_tpu.py", "launch", f"--accelerator_type=v4-{128 if is_large else 32}"]
    launch += shlex.split(SLICE.value)
    return [*launch, f"--program={program}", "--", *arguments[2:]]


def script(study: Study, commands: list[Command]) -> str:
    """Returns the commands as a shell script that ends with the report."""
    lines = ["#!/bin/bash", f"# {study.title}: the runs of the paper's size.", "set -ex"]
    for command in commands:
        guard = f"test -e {shlex.quote(command.product)} || " if command.product else ""
        lines.append(f"{guard}python {shlex.join(on_slice(command.arguments))}")
    return "\n".join([*lines, f"{command_of_study()} --report_only"]) + "\n"


def command_of_study() -> str:
    """Returns the command that runs this study, without the flags in MODES."""
    words = (word for word in sys.argv if word.lstrip("-").split("=")[0] not in MODES)
    return f"python {shlex.join(words)}"


def collect(study: Study, scale: str) -> tuple[study_report.Scores, dict[str, float]]:
    """Returns the scores of all runs, and the perplexity of token frequencies by corpus.

    A corpus has the name of its row format, or that of its directory. Raises FileNotFoundError if a
    run has no result.
    """
    scores, baselines = {}, {}
    for row in rows_to_run(study, scale):
        each_seed = with_seeds(row)
        for task in study.tasks(scale):
            found = [
                study_report.best_seeds(sweep_workdir(each, task, scale), task.metric, row.score)
                for each in each_seed
            ]
            collapsed = sum(seeds.num_collapsed for seeds in found)
            scores[row.name, task.name] = study_report.Seeds(itertools.chain(*found), collapsed)
        if study.pretraining_metrics and not row.weights:
            results = [pretraining_result(each, scale) for each in each_seed]
            corpus = pathlib.Path(row.pretraining.get("corpus", row.row_format)).name
            baselines[corpus] = math.exp(results[0]["unigram_entropy"])
            for name, key in study.pretraining_metrics.items():
                scores[row.name, name] = study_report.Seeds(result[key] for result in results)
    return scores, baselines


def pretraining_result(row: Row, scale: str) -> dict[str, float]:
    """Returns the scores of a pre-training run. Raises FileNotFoundError if there are none."""
    path = pathlib.Path(encoder(row, scale), "result.json")
    return json.loads(path.read_text(encoding="utf-8"))


def main(study: Study) -> None:
    """Parses the flags, then runs the study and writes its report, or writes its script."""

    def start(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments: {argv[1:]}")
        try:
            run_study(study, SCALE.value)
        except (ValueError, OSError) as error:
            sys.exit(f"{study.name}: {describe_error(error)}")
        except KeyboardInterrupt:
            exit_interrupted("run the same command to resume")

    for flag in flags.FLAGS.get_flags_for_module("study_flags"):  # So that --help lists them.
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    keep_running_without_log()
    app.run(start, flags_parser=parse_flags)


def run_study(study: Study, scale: str) -> None:
    """Runs the commands that have not finished and writes the report, or writes their script."""
    for name in ("slice", "launch"):
        if flags.FLAGS[name].value and scale == "laptop":
            raise ValueError(f"--{name} is for --scale=pod: remove it, or set that")
    if SLICE.value:
        check_slice(study.tasks(scale))
    commands = plan(study, scale)
    if scale == "laptop" and not REPORT_ONLY.value:
        for name in DIRECTORIES:  # Before an encoder is pre-trained.
            if (directory := flags.FLAGS[name].value) and not pathlib.Path(directory).is_dir():
                raise ValueError(f"--{name}={directory}: there is no such directory")
        run(commands)
        if DRY_RUN.value:
            return
    if scale == "pod" and not REPORT_ONLY.value:
        text = script(study, commands)
        print(text)
        if DRY_RUN.value:
            return
        path = pathlib.Path(runs(scale), f"{study.name}.sh")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"Wrote {path}. {HOW_TO_LAUNCH}")
        if LAUNCH.value:
            run_command(["bash", str(path)])
        return
    columns = [task.name for task in study.tasks(scale)]
    # The committed reports are from the laptop scale.
    default = "experiments/reports" if scale == "laptop" else f"{runs(scale)}/reports"
    directory = REPORTS.value or default
    scores = collect(study, scale)
    appendix = study.appendix(scale, pathlib.Path(directory)) if study.appendix else ""
    study_report.write(study, scale, columns, *scores, directory, command_of_study(), appendix)
