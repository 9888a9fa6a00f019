r"""Fine-tunes over a grid of hyperparameters: one run per point, with several seeds each.

python tools/sweep.py --runs=runs/sweep --grid=learning_rate=5e-5,3e-5,2e-5 \
    --grid=batch_size=16,32 --seeds=3 -- --config=configs/finetune/text_classification.py \
    --config.init_from=runs/base --config.data.train=train.csv --config.data.dev=dev.csv

Arguments after `--` are passed to every `python -m bert_jax.finetune`; `--paper` is the grid of
Devlin et al. (2018), section 4.1 and appendix A.3. The same command resumes a sweep: it skips the
finished points and retries the failed ones; a larger `--seeds` adds seeds. Points that differ only
in learning_rate, weight_decay, warmup_fraction or num_epochs share their compiled programs. The
table is sorted by the median of the metric that selects checkpoints, over the seeds that did not
diverge; `sweep.json` holds the same.
"""

import concurrent.futures
import ctypes
import itertools
import json
import multiprocessing
import os
import pathlib
import shlex
import signal
import subprocess
import sys

import jax
from absl import app, flags

from bert_jax.finetune import read_weights
from bert_jax.runtime.command_line import (
    INTERRUPTED,
    PREEMPTED,
    CheckpointError,
    define_config,
    parse_flags,
)
from bert_jax.tasks.setup import check_numbers, hash_contents, read_task
from bert_jax.training.workdir import write_json

PAPER = ("batch_size=16,32", "learning_rate=5e-5,4e-5,3e-5,2e-5", "num_epochs=2,3,4")

RUNS = flags.DEFINE_string("runs", None, "Directory for all runs.", required=True)
GRID = flags.DEFINE_multi_string("grid", [], "FIELD=VALUE,VALUE,... of the configuration.")
IN_PAPER = flags.DEFINE_bool("paper", False, f"Adds --grid={' --grid='.join(PAPER)}")
SEEDS = flags.DEFINE_integer("seeds", 1, "Number of seeds per point.", lower_bound=1)


def grid_points(grid: list[str]) -> list[dict[str, str]]:
    """Returns every combination: "a=1,2" and "b=3" -> [{"a": "1", "b": "3"}, {"a": "2", "b": "3"}].

    Raises ValueError for an invalid grid.
    """
    fields = {}
    for text in grid:
        name, equals, values = text.partition("=")
        values = [value for value in values.split(",") if value]
        if not (name and equals and values):
            raise ValueError(f"--grid={text}: expected FIELD=VALUE,VALUE,...")
        if name in fields or len(set(values)) < len(values):
            raise ValueError(f"--grid={text}: a field or a value is given twice")
        fields[name] = values
    if not fields:
        raise ValueError("the grid is empty: give --grid=FIELD=VALUE,VALUE,... or --paper")
    return [
        dict(zip(fields, values, strict=True)) for values in itertools.product(*fields.values())
    ]


def point_name(point: dict[str, str]) -> str:
    return ",".join(f"{field}={value}" for field, value in point.items()).replace("/", "_")


def point_flags(point: dict[str, str]) -> list[str]:
    return [f"--config.{field}={value}" for field, value in point.items()]


def check_points(points: list[dict[str, str]], command: list[str]) -> dict[str, str]:
    """Validates the fields of all points, and reads the weights and the examples of the first.

    Returns hashes of their contents. Raises ValueError or OSError for invalid input, and if no
    score would decide between the points.
    """
    jax.config.update("jax_platforms", "cpu")
    for point in reversed(points):
        arguments = [*command, *point_flags(point)]
        values = flags.FlagValues()
        define_config("", values, arguments)
        parse_flags(["sweep", *arguments], values, known_only=True)
        if values.config is None:
            raise ValueError("no configuration: give the arguments of the runs, -- --config=FILE")
        check_numbers(values.config)
    weights = read_weights(values.config)
    found = weights.settings["head"] if "head" in weights.params else None
    task = read_task(values.config, found, weights.tokenizer)
    if not task.selector:
        split = task.metric.partition("/")[0]
        raise ValueError(
            f"no score would decide between the points: {task.metric} needs examples with labels "
            f"for {split}, as in --config.data.{split}=FILE"
        )
    return hash_contents(values.config, task, weights.params, weights.tokenizer)


def finished_seeds(workdir: pathlib.Path) -> int:
    """Returns the number of seeds in `result.json`, diverged ones included; 0 without it."""
    path = workdir / "result.json"
    result = json.loads(path.read_text()) if path.exists() else {"seeds": []}
    return len(result.get("seeds", [result])) + len(result.get("diverged_seeds", []))


def move_single_seed(workdir: pathlib.Path) -> None:
    """Moves the run of a single seed from `workdir` to `workdir/seed_N`, as for several seeds."""
    if (config := workdir / "config.json").exists():
        seed = json.loads(config.read_text())["seed"]
        moved = workdir.rename(workdir.with_name(f"{workdir.name}.moved"))
        workdir.mkdir()
        moved.rename(workdir / f"seed_{seed}")


def run_point(
    directory: pathlib.Path, point: dict[str, str], command: list[str], num_seeds: int
) -> dict:
    """Runs a point unless it is finished, and returns its row of the table."""
    workdir = directory / point_name(point)
    log, error = (directory / f"{point_name(point)}.{kind}" for kind in ("log", "error"))
    exit_code = 0
    if finished_seeds(workdir) < num_seeds:
        if num_seeds > 1:
            move_single_seed(workdir)
        fields = [*point_flags(point), f"--config.num_seeds={num_seeds}"]
        files = {
            "BERT_JAX_ERROR_FILE": error,
            "JAX_COMPILATION_CACHE_DIR": directory / "compiled",
        }
        error.unlink(missing_ok=True)
        exit_code = _run([*command, *fields, f"--workdir={workdir}"], log, files)
    row = {"point": point, "workdir": str(workdir)}
    if exit_code:
        killed = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
        message = error.read_text() if error.exists() else f"ended by {killed}"
        return row | {"error": message, "log": str(log)}
    result = json.loads((workdir / "result.json").read_text())
    return row | score_summary(result) | {"seconds": result["seconds"]}


def _run(command: list[str], log: pathlib.Path, files: dict[str, pathlib.Path]) -> int:
    """Returns the exit code of a fine-tuning. A signal stops the run first, then this program.

    `files` become environment variables of the run. The run also stops if this program is killed.
    """
    libc, die_with_parent = ctypes.CDLL(None), 1  # PR_SET_PDEATHSIG of Linux's prctl.
    received, started = [], []

    def forward(number, frame):
        received.append(number)
        for process in started:
            process.send_signal(number)

    handlers = {
        number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)
    }
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "bert_jax.finetune", *command],
            env=os.environ | {name: str(path) for name, path in files.items()},
            stdout=stream,
            stderr=stream,
            preexec_fn=lambda: libc.prctl(die_with_parent, signal.SIGTERM),
            start_new_session=True,  # So Ctrl-C reaches it only once, from `forward`.
        )
    started.append(process)
    for number in received:  # A signal may arrive before `started` has the process.
        process.send_signal(number)
    exit_code = process.wait()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if received or exit_code in (INTERRUPTED, PREEMPTED):
        print("stopped. Run the same command to resume.")
        if received:
            exit_code = INTERRUPTED if signal.SIGINT in received else PREEMPTED
        sys.exit(exit_code)
    return exit_code


def score_summary(result: dict) -> dict:
    """Returns median, min and max of the deciding metric, from the `result.json` of any run."""
    metric, statistics = result["metric"], ("median", "min", "max")
    if "seeds" in result:
        scores = result["scores"].get(metric, dict.fromkeys(statistics))
        collapsed = result["collapsed_seeds"]
    else:
        split, _, name = metric.rpartition("/")
        scores = dict.fromkeys(statistics, result.get(split, {}).get(name))
        collapsed = [result["seed"]] if result.get("collapsed") else []
    diverged = result.get("diverged_seeds", [])
    return {"metric": metric, **scores, "collapsed_seeds": collapsed, "diverged_seeds": diverged}


def format_table(rows: list[dict]) -> str:
    """Formats the rows of the table as aligned text."""
    fields = list(rows[0]["point"])
    lines = [[*fields, "median", "min", "max", "collapsed seeds", "diverged seeds", "seconds"]]
    for row in rows:
        values = list(row["point"].values())
        if "error" in row:
            reason = row["error"].partition("\n")[0]
            lines.append([*values, f"failed: {reason}"])
            continue
        scores = [row[name] for name in ("median", "min", "max")]
        values += ["-" if score is None else f"{score:.4f}" for score in scores]
        values.append(" ".join(map(str, row["collapsed_seeds"])))
        values.append(
            " ".join(f"{each['seed']} (step {each['step']})" for each in row["diverged_seeds"])
        )
        lines.append([*values, f"{row['seconds']:.0f}"])
    widths = [
        max(
            len(line[column])
            for line in lines
            if column < len(fields) or len(line) == len(lines[0])  # Errors do not widen columns.
        )
        for column in range(len(lines[0]))
    ]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=False))
        for line in lines
    )


def sweep(
    directory: pathlib.Path,
    grid: list[str],
    command: list[str],
    num_seeds: int = 1,
    contents: dict[str, str] | None = None,
) -> list[dict]:
    """Runs all points; returns their rows, best first, then those without a score and failures.

    `contents` are the hashes of what the runs read. Raises ValueError if `directory` holds a sweep
    with another command or other contents, whose results would not be comparable.
    """
    points = grid_points(grid)
    if len(set(map(point_name, points))) < len(points):
        raise ValueError(
            "two points of the grid have the same directory: change a value's spelling"
        )
    directory.mkdir(parents=True, exist_ok=True)
    record = directory / "sweep.json"
    before = json.loads(record.read_text()) if record.exists() else {"command": command}
    if before["command"] != command:
        raise ValueError(
            f"{directory} holds a sweep with another command:\n  {shlex.join(before['command'])}\n"
            f"instead of\n  {shlex.join(command)}\nGive another --runs, or remove it"
        )
    if before.get("contents", contents) != contents:
        found = before["contents"].items() ^ contents.items()
        names = ", ".join(sorted({name for name, _ in found}))
        raise ValueError(
            f"the contents of {names} have changed since the sweep in {directory} began: "
            "give another --runs, or remove it"
        )
    write_json(record, {"command": command, "contents": contents, "points": []})
    rows = []
    for number, point in enumerate(points, 1):
        print(f"{number}/{len(points)} {point_name(point)}: ", end="", flush=True)
        rows.append(row := run_point(directory, point, command, num_seeds))
        if "error" in row:
            print(f"failed, see {row['log']}: {row['error']}", flush=True)
        else:
            score = "no score" if row["median"] is None else f"{row['median']:.4f}"
            print(f"{row['metric']} {score}, {row['seconds']:.0f} s", flush=True)
        rows.sort(key=lambda row: (row.get("median") is None, -(row.get("median") or 0)))
        write_json(record, {"command": command, "contents": contents, "points": rows})
    return rows


def main(argv: list[str]) -> None:
    directory = pathlib.Path(RUNS.value).absolute()
    grid = [*(PAPER if IN_PAPER.value else ()), *GRID.value]
    try:
        # In another process: this one must neither use an accelerator nor start threads.
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
            contents = pool.submit(check_points, grid_points(grid), argv[1:]).result()
        rows = sweep(directory, grid, argv[1:], SEEDS.value, contents)
    except (CheckpointError, ImportError, OSError, ValueError) as error:
        sys.exit(f"sweep: {error}")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    print(format_table(rows))
    if any("error" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
