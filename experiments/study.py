"""What the studies share: their runs as commands, the scores of these runs, and the report.

A study is a list of rows, as in the paper's tables. A row is a pre-training, or given weights, and
the settings with which the tasks are fine-tuned from it, each task and its seeds with one
`tools/sweep.py`. At laptop scale the commands are run one after another; at pod
scale they have the paper's sizes and are written to a script. Runs are named after their settings,
so that studies with the same --workdir share them, and a finished run is not repeated.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import study_report
from absl import app, flags

from bert_jax.runtime.command_line import parse_flags

SCALE = flags.DEFINE_enum("scale", "laptop", ["laptop", "pod"], "Sizes of the runs.")
WORKDIR = flags.DEFINE_string("workdir", "runs/studies", "Directory of all runs; may be shared.")
REPORTS = flags.DEFINE_string("reports", "experiments/reports", "Directory of the reports.")
TEXT = flags.DEFINE_string("text", "", "Text of the corpus; laptop scale has a sample by default.")
LAUNCH = flags.DEFINE_bool("launch", False, "At pod scale, run the script on this TPU VM.")
REPORT_ONLY = flags.DEFINE_bool("report_only", False, "Only write the report of finished runs.")

Settings = dict[str, object]
"""Values of fields of a configuration, by dotted name."""

ROW_LENGTH = 32  # Tokens, at laptop scale: with longer rows so few steps learn little.
PRETRAINING: Settings = {
    "long_phase.num_steps": 0,
    "num_steps": 1200,
    "batch_size": 16,
    "model.dtype": "float32",
    "model.scan_layers": False,
    "model.dropout_rate": 0.0,  # The runs are too short to overfit.
    "model.initializer_range": 0.04,  # 0.02 suits a hidden size of 768.
    "model.max_position_embeddings": 384,
    "optimizer": "adamw",
    "learning_rate": 1e-3,
    "decay_power": 0.5,
    "warmup_steps": 100,
    "log_every": 100,
    "eval_every": 600,
    "eval_batch_size": 64,
    "checkpoint_every": 300,
    "keep_every": 300,
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
HOW_TO_LAUNCH = """Run it with --launch, or with bash, on a TPU VM of one host with the corpus and
the tasks on its disk. On a slice of several hosts, give the arguments of each line to
tools/launch_tpu.py (docs/cloud_tpu.md), with all paths in the bucket. A stopped script resumes."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the study's table.

    The encoder is that of a pre-training with the fields `pretraining`, on the kind of `rows` that
    tools/prepare_corpus.py builds, after `step` (0: the last); or, if given, that of `weights`;
    with a `pretraining` of None the row is only quoted from the paper.
    `finetuning` has fields of the tasks in this row, and `finetune_config` replaces that of the
    tasks. At pod scale the model has the `size`. `paper` has the paper's scores by column.
    """

    name: str
    paper: dict[str, float] = dataclasses.field(default_factory=dict)
    pretraining: Settings | None = dataclasses.field(default_factory=dict)
    rows: str = "sentence_pairs"
    step: int = 0
    weights: str = ""
    finetuning: Settings = dataclasses.field(default_factory=dict)
    finetune_config: str = ""
    size: str = "base"


class Task(NamedTuple):
    """A task of the study, fine-tuned from every row: a configuration, its fields and its score."""

    name: str
    config: str  # As in configs/sweeps/paper.py: glue:mrpc
    metric: str  # As in result.json: dev/accuracy
    settings: Settings


class Step(NamedTuple):
    """A command, and the path that exists once it has finished ("": it is always run)."""

    command: list[str]
    product: str = ""


@dataclasses.dataclass(frozen=True)
class Study:
    """What a study runs and says.

    `rows` and `tasks` are functions of the scale. `measures` are columns from the result of the
    pre-training itself: a name, and the key in result.json. `about` says what is compared and where
    the paper's numbers are from, `limits` what the laptop scale can and cannot show.
    """

    name: str
    title: str
    about: str
    limits: str
    rows: Callable[[str], list[Row]]
    tasks: Callable[[str], list[Task]]
    measures: dict[str, str] = dataclasses.field(default_factory=dict)
    num_seeds: int = 2
    draw: Callable = study_report.draw_scores


def fetched(name: str) -> str:
    """Returns the directory of the dataset or weights `name`."""
    return f"{WORKDIR.value}/data/{name}"


def plan(study: Study, scale: str) -> list[Step]:
    """Returns the commands of the study in the order in which they can be run."""
    rows, tasks = rows_to_run(study, scale), study.tasks(scale)
    steps = corpus_steps(rows, scale)
    steps += data_steps(tasks) if scale == "laptop" else []
    for row in rows:
        if not row.weights:
            steps.append(pretrain_step(row, scale))
        elif row.weights == fetched("minilm"):
            steps.append(fetch_step("minilm"))
        steps += [sweep_step(study, row, task, scale) for task in tasks]
    return list({tuple(step.command): step for step in steps}.values())


def rows_to_run(study: Study, scale: str) -> list[Row]:
    """Returns the rows that are not only quoted from the paper."""
    return [row for row in study.rows(scale) if row.pretraining is not None]


def fetch_step(name: str) -> Step:
    return Step(["tools/fetch_data.py", name, fetched(name)], fetched(name))


def data_steps(tasks: list[Task]) -> list[Step]:
    """Returns the commands that fetch or make the files that the tasks read from WORKDIR/data."""
    values = [str(value) for task in tasks for value in task.settings.values()]
    read = {value.split("/data/")[1].split("/")[0] for value in values if "/data/" in value}
    names = [name for name in ("reuters-r8", "conll2003") if name in read]
    steps = [fetch_step(name) for name in names]
    if "story-endings" in read:
        command = ["experiments/story_endings.py", fetched("tales"), fetched("story-endings")]
        steps += [fetch_step("tales"), Step(command, fetched("story-endings"))]
    return steps


def corpus_steps(rows: list[Row], scale: str) -> list[Step]:
    """Returns the commands for the text, the vocabulary, and a corpus for each kind of rows."""
    kinds = dict.fromkeys(row.rows for row in rows if not row.weights)
    if not kinds:
        return []
    text, size, steps = TEXT.value or "enwiki-latest-pages-articles.xml.bz2", 30522, []
    if scale == "laptop":
        size = 4096
        if not TEXT.value:
            steps, text = [fetch_step("wikipedia-sample")], f"{fetched('wikipedia-sample')}/*.bz2"
    vocabulary = f"{WORKDIR.value}/vocab.txt"
    command = ["tools/train_vocab.py", f"--input={text}", f"--output={vocabulary}"]
    steps.append(Step([*command, f"--size={size}"], vocabulary))
    for kind in kinds:
        for length in (ROW_LENGTH,) if scale == "laptop" else (128, 512):
            corpus = f"{WORKDIR.value}/corpus/{length}-{kind}"
            command = ["tools/prepare_corpus.py", f"--input={text}", f"--vocab={vocabulary}"]
            command += [f"--output={corpus}", f"--max_seq_length={length}", f"--rows={kind}"]
            command += ["--heldout_fraction=0.1"] if scale == "laptop" else []
            steps.append(Step(command, f"{corpus}/manifest.json"))
    return steps


def pretrain_step(row: Row, scale: str) -> Step:
    """Returns the pre-training of a row."""
    corpus, workdir = f"{WORKDIR.value}/corpus", encoder(dataclasses.replace(row, step=0))
    if scale == "laptop":
        config = "configs/pretrain/bert_tiny.py"
        settings = {"corpus": f"{corpus}/{ROW_LENGTH}-{row.rows}"} | PRETRAINING
    else:
        config = f"configs/pretrain/pod_{row.size}.py"
        settings = {"corpus": f"{corpus}/128-{row.rows}"}
        settings |= {"long_phase.corpus": f"{corpus}/512-{row.rows}"}
        settings |= {"checkpoint_every": 50_000, "keep_every": 100_000}
    command = ["-m", "bert_jax.pretrain", f"--config={config}", f"--workdir={workdir}"]
    return Step(command + overrides(settings | row.pretraining), f"{workdir}/result.json")


def encoder(row: Row) -> str:
    """Returns the workdir, the checkpoint or the given weights of a row."""
    if row.weights:
        return row.weights
    parts = [row.rows, *([row.size] if row.size != "base" else [])]
    parts += [f"{name}={value}" for name, value in sorted(row.pretraining.items())]
    directory = f"{WORKDIR.value}/pretrain/{','.join(parts)}"
    return f"{directory}/checkpoints/{row.step}" if row.step else directory


def sweep_step(study: Study, row: Row, task: Task, scale: str) -> Step:
    """Returns the sweep of a row and task: one point at laptop scale, the paper's grid at pod."""
    config, settings = row.finetune_config or task.config, task.settings | row.finetuning
    if scale == "laptop":
        settings = FINETUNING | settings
    settings = {
        f"grid.{name}" if name in GRID else f"base.{name}": (value,) if name in GRID else value
        for name, value in settings.items()
    }
    settings |= {"base.init_from": encoder(row), "num_seeds": study.num_seeds}
    workdir = sweep_workdir(row, task)
    command = ["tools/sweep.py", f"--config=configs/sweeps/paper.py:{config}"]
    command += [f"--workdir={workdir}", *overrides(settings)]
    # At laptop scale the sweep has one point; its seeds end in order.
    last_result = f"{workdir}/trials/seed={study.num_seeds - 1}/result.json"
    return Step(command, last_result if scale == "laptop" else "")


def sweep_workdir(row: Row, task: Task) -> pathlib.Path:
    """Returns the directory of a sweep, which is named after its settings."""
    config, settings = row.finetune_config or task.config, task.settings | row.finetuning
    digest = hashlib.sha256(repr([encoder(row), sorted(settings.items())]).encode()).hexdigest()
    names = "_".join([config.replace(":", "_"), *map(str, row.finetuning.values())])
    return pathlib.Path(WORKDIR.value, "finetune", f"{names}_{digest[:8]}")


def overrides(settings: Settings, prefix: str = "--config.") -> list[str]:
    return [f"{prefix}{name}={value}" for name, value in settings.items()]


def run(steps: list[Step]) -> None:
    """Runs the commands that have not finished. Exits with the code of the first that fails."""
    # All runs share the compiled programs, the many small ones too.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(pathlib.Path(WORKDIR.value, "compiled").absolute())}
    cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    # XLA's default schedule on CPU (jaxlib 0.10.2) hangs in the first step of stacked BiLSTMs.
    schedule = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    environment = cache | {"XLA_FLAGS": schedule} | os.environ
    for number, step in enumerate(steps, 1):
        if step.product and pathlib.Path(step.product).exists():
            continue
        print(f"\n[{number} of {len(steps)}] python {shlex.join(step.command)}", flush=True)
        if code := subprocess.run([sys.executable, *step.command], env=environment).returncode:
            sys.exit(code if code > 0 else 128 - code)


def script(study: Study, steps: list[Step]) -> str:
    """Returns the commands as a shell script that ends with the report."""
    lines = ["#!/bin/bash", f"# {study.title}: the runs of the paper's size.", "set -ex"]
    for step in steps:
        guard = f"test -e {shlex.quote(step.product)} || " if step.product else ""
        lines.append(f"{guard}python {shlex.join(step.command)}")
    return "\n".join([*lines, f"python {shlex.join(sys.argv)} --report_only"]) + "\n"


def collect(study: Study, scale: str) -> study_report.Scores:
    """Returns the scores of all runs. Raises FileNotFoundError if a pre-training has no result."""
    scores = {}
    for row in rows_to_run(study, scale):
        for task in study.tasks(scale):
            found = study_report.best_scores(sweep_workdir(row, task), task.metric)
            scores[row.name, task.name] = found
        if study.measures and not row.weights:
            result = json.loads(pathlib.Path(encoder(row), "result.json").read_text())
            scores |= {(row.name, name): [result[key]] for name, key in study.measures.items()}
    return scores


def main(study: Study) -> None:
    """Parses the flags, then runs the study and writes its report, or writes its script."""

    def start(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments: {argv[1:]}")
        try:
            run_study(study, SCALE.value)
        except (ValueError, OSError) as error:
            sys.exit(f"{study.name}: {error}")
        except KeyboardInterrupt:
            sys.exit(f"\n{study.name}: interrupted; run the same command to resume")

    app.run(start, flags_parser=parse_flags)


def run_study(study: Study, scale: str) -> None:
    """Runs the steps that have not finished and writes the report, or writes their script."""
    steps = plan(study, scale)
    if scale == "laptop" and not REPORT_ONLY.value:
        run(steps)
    if scale == "pod" and not REPORT_ONLY.value:
        path = pathlib.Path(WORKDIR.value, f"{study.name}.sh")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script(study, steps))
        print(f"{path.read_text()}\nWrote {path}. {HOW_TO_LAUNCH}")
        if LAUNCH.value:
            sys.exit(subprocess.run(["bash", str(path)]).returncode)
        return
    columns = [task.name for task in study.tasks(scale)]
    command = f"python {shlex.join(word for word in sys.argv if word != '--report_only')}"
    study_report.write(study, scale, columns, collect(study, scale), REPORTS.value, command)
