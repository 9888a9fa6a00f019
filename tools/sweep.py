"""Fine-tuning over a grid of settings: each point a run of its own, several seeds each.

python tools/sweep.py --runs=runs/sweep --grid=learning_rate=5e-5,3e-5,2e-5 \
    --grid=batch_size=16,32 --seeds=3 -- --config=configs/finetune/text_classification.py \
    --config.init_from=runs/base --config.data.train=train.csv --config.data.dev=dev.csv

What follows `--` goes to every `python -m bert_jax.finetune`; `--paper` is the grid of Devlin et
al. (2018), section 4.1 and appendix A.3. A point that is finished is not run again, one that failed
is tried again by the same command. The table is sorted by the median of the metric that chooses
checkpoints; `sweep.json` holds the same.
"""

import itertools
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys

from absl import app, flags

from bert_jax.runtime.exit_status import INTERRUPTED, PREEMPTED
from bert_jax.training.workdir import write_json

PAPER = ("batch_size=16,32", "learning_rate=5e-5,4e-5,3e-5,2e-5", "num_epochs=2,3,4")

RUNS = flags.DEFINE_string("runs", None, "Directory of all the runs.", required=True)
GRID = flags.DEFINE_multi_string("grid", [], "FIELD=VALUE,VALUE,... of the configuration.")
IN_PAPER = flags.DEFINE_bool("paper", False, f"--grid={' --grid='.join(PAPER)}")
SEEDS = flags.DEFINE_integer("seeds", 1, "Runs of each point.", lower_bound=1)


def points_of(grid: list[str]) -> list[dict[str, str]]:
    """ "a=1,2" and "b=3" -> [{"a": "1", "b": "3"}, {"a": "2", "b": "3"}]; ValueError if unclear."""
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
        raise ValueError("there is no grid: give --grid=FIELD=VALUE,VALUE,... or --paper")
    return [
        dict(zip(fields, values, strict=True)) for values in itertools.product(*fields.values())
    ]


def name_of(point: dict[str, str]) -> str:
    return ",".join(f"{field}={value}" for field, value in point.items()).replace("/", "_")


def run_point(directory: pathlib.Path, point: dict[str, str], command: list[str]) -> dict:
    """Runs a point unless it is finished; its row of the table."""
    workdir = directory / name_of(point)
    log, status = directory / f"{name_of(point)}.log", 0
    if not (workdir / "result.json").exists():
        fields = [f"--config.{field}={value}" for field, value in point.items()]
        status = _run([*command, *fields, f"--workdir={workdir}"], log, directory / "compiled")
    row = {"point": point, "workdir": str(workdir)}
    if status:
        lines = log.read_text(errors="replace").strip().splitlines()
        return row | {"error": lines[-1] if lines else f"status {status}", "log": str(log)}
    result = json.loads((workdir / "result.json").read_text())
    return row | scores_of(result) | {"seconds": result["seconds"]}


def _run(command: list[str], log: pathlib.Path, compiled: pathlib.Path) -> int:
    """The exit status. What stops this program stops the run first, and ends both."""
    told, started = [], []

    def tell(number, frame):
        told.append(number)
        for process in started:
            process.send_signal(number)

    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "bert_jax.finetune", *command],
            env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(compiled)},
            stdout=stream,
            stderr=stream,
            start_new_session=True,  # A terminal's Ctrl-C then reaches it once, through `tell`.
        )
    started.append(process)
    for number in told:
        process.send_signal(number)
    status = process.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    if told or status in (INTERRUPTED, PREEMPTED):
        print("stopped; the same command goes on from there")
        sys.exit(INTERRUPTED if signal.SIGINT in told else PREEMPTED if told else status)
    return status


def scores_of(result: dict) -> dict:
    """Of a `result.json`, of one seed or several: the deciding metric's median and range."""
    metric = result["metric"]
    split, _, name = metric.rpartition("/")
    if "seeds" in result:
        scores, collapsed = result["scores"].get(metric, {}), result["collapsed_seeds"]
    else:
        score = result.get(split, {}).get(name)
        scores = dict.fromkeys(("median", "least", "most"), score)
        collapsed = [result["seed"]] if result.get("collapsed") else []
    empty = {"median": None, "least": None, "most": None}
    return {"metric": metric} | empty | scores | {"collapsed_seeds": collapsed}


def table_of(rows: list[dict]) -> str:
    """The best point first; those without a score, and those that failed, at the end."""
    fields = list(rows[0]["point"])
    lines = [[*fields, "median", "least", "most", "collapsed seeds", "seconds"]]
    for row in rows:
        values = list(row["point"].values())
        if "error" in row:
            lines.append([*values, f"failed: {row['error']}"])
            continue
        scores = [row[name] for name in ("median", "least", "most")]
        values += ["-" if score is None else f"{score:.4f}" for score in scores]
        lines.append([*values, " ".join(map(str, row["collapsed_seeds"])), f"{row['seconds']:.0f}"])
    widths = [
        max(
            len(line[column])
            for line in lines
            if column < len(fields) or len(line) == len(lines[0])
        )
        for column in range(len(lines[0]))
    ]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=False))
        for line in lines
    )


def sweep(directory: pathlib.Path, grid: list[str], command: list[str]) -> list[dict]:
    """Runs all points and returns the rows of the table, sorted; see the top of this file."""
    points = points_of(grid)
    if len(set(map(name_of, points))) < len(points):
        raise ValueError("two points of the grid would have one directory: name values apart")
    directory.mkdir(parents=True, exist_ok=True)
    record = directory / "sweep.json"
    if record.exists() and (before := json.loads(record.read_text())["command"]) != command:
        raise ValueError(
            f"{directory} holds a sweep of another command:\n  {shlex.join(before)}\n"
            f"  {shlex.join(command)} now\nGive another --runs, or remove it"
        )
    write_json(record, {"command": command, "points": []})
    rows = []
    for number, point in enumerate(points, 1):
        print(f"{number}/{len(points)} {name_of(point)}: ", end="", flush=True)
        rows.append(row := run_point(directory, point, command))
        if "error" in row:
            print(f"failed, see {row['log']}: {row['error']}", flush=True)
        else:
            score = "no score" if row["median"] is None else f"{row['median']:.4f}"
            print(f"{row['metric']} {score}, {row['seconds']:.0f} s", flush=True)
        rows.sort(key=lambda row: (row.get("median") is None, -(row.get("median") or 0)))
        write_json(record, {"command": command, "points": rows})
    return rows


def main(argv: list[str]) -> None:
    directory = pathlib.Path(RUNS.value).absolute()
    grid = [*(PAPER if IN_PAPER.value else ()), *GRID.value]
    try:
        rows = sweep(directory, grid, [*argv[1:], f"--config.num_seeds={SEEDS.value}"])
    except (OSError, ValueError) as error:
        sys.exit(f"sweep: {error}")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    print(table_of(rows))
    if any("error" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
