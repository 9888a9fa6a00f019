"""Plots the curves of a run, or of several in one figure, and prints the alarms of pre-training.

python tools/plot.py WORKDIR [--output=FILE]
python tools/plot.py WORKDIR WORKDIR ... [--output=FILE]

The file's ending chooses its format: .png, .svg, .pdf. Default: WORKDIR/curves.png, and for several
runs curves.png in the current directory.
"""

import itertools
import json
import pathlib
import sys

import matplotlib
from absl import app, flags

from bert_jax.configs.pretrain.fields import phases_of
from bert_jax.runtime.buckets import is_bucket
from bert_jax.runtime.command_line import describe_error, parse_flags
from bert_jax.training.health import Alarm, all_alarms, unchecked_alarms

matplotlib.use("Agg")
from matplotlib import pyplot, ticker

# For pre-training: name, title, and the baseline in result.json. Fine-tuning has other names.
PRETRAINING = {
    "mlm_loss": ("masked-LM loss (nats)", "unigram_entropy"),
    "mlm_accuracy": ("masked-LM accuracy", "unigram_accuracy"),
    "next_token_loss": ("next-token loss (nats)", None),
    "next_token_accuracy": ("next-token accuracy", None),
    "nsp_accuracy": ("next-sentence accuracy", "chance"),
    "goodput": ("goodput, since the first start", None),
}
# For pre-training, too: whether the run is healthy.
HEALTH = {
    "loss": "loss",
    "gradient_norm": "gradient norm",
    "rows_per_second": "rows per second",
    "data_wait_seconds": "seconds per step",
}
# The panels in which an alarm is marked.
ALARMS = {
    "loss spike": ("loss",),
    "plateau": ("mlm_loss", "next_token_loss"),
    "slow": ("rows_per_second",),
    "input-bound": ("data_wait_seconds",),
    "slow host": ("data_wait_seconds",),
}
# Metrics that are drawn as further curves in the panel of another: its name, and the curve's.
EXTRA_CURVES = {
    "max_loss": ("loss", "max of a step"),
    "max_gradient_norm": ("gradient_norm", "max of a step"),
    "estimated_rows_per_second": ("rows_per_second", "estimated"),
    "lowest_estimated_rows_per_second": ("rows_per_second", "lowest estimated"),
    "data_wait_seconds": ("data_wait_seconds", "wait for a batch"),
    "host_seconds": ("data_wait_seconds", "host time"),
    "slowest_host_seconds": ("data_wait_seconds", "slowest host"),
    "step_seconds": ("data_wait_seconds", "whole step"),
}
TITLES = {name: title for name, (title, _) in PRETRAINING.items()} | HEALTH
COLORS = {"train": "tab:blue", "held-out": "tab:red", "dev": "tab:red", "": "tab:green"}
OTHER_COLORS = ("tab:orange", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")
RUN_COLORS = ("tab:blue", "tab:red", "tab:green", *OTHER_COLORS)
SUFFIXES = (".png", ".svg", ".pdf", ".jpg")
FEW_POINTS = 20  # Each of them is marked.


def read_metrics(workdir: pathlib.Path) -> dict[str, dict[str, tuple[list[int], list[float]]]]:
    """Returns the steps and values in `metrics.jsonl`, by name of metric and then of curve.

    A curve is named after its split, or its split and entity type ("dev LOC"). The scores of the
    chosen checkpoint ("final/...") are not a curve and are left out. Raises FileNotFoundError.
    """
    path = workdir / "metrics.jsonl"
    if (workdir / "sweep.json").is_file():
        trial = min((workdir / "trials").glob("*"), default=workdir / "trials/NAME")
        raise FileNotFoundError(
            f"{workdir} holds a sweep: open {workdir / 'report.html'}, which compares its trials, "
            f"or plot one of them, such as {trial}"
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: expected the workdir of a run")
    panels: dict[str, dict[str, tuple[list[int], list[float]]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        for key, value in record.items():
            if key != "step" and not key.startswith("final/"):
                split, name, *entity_type = key.split("/") if "/" in key else ("", key)
                curve = " ".join([split.replace("heldout", "held-out"), *entity_type])
                name, curve = EXTRA_CURVES.get(name, (name, curve))
                steps, values = panels.setdefault(name, {}).setdefault(curve, ([], []))
                steps.append(record["step"])
                values.append(value)
    return panels


def panels_with_data(panels: dict) -> list[str]:
    """Returns the names of the metrics to draw, in order."""
    if PRETRAINING.keys() & panels:
        return [name for name in (*PRETRAINING, *HEALTH, "learning_rate") if name in panels]
    scores = [name for name, curves in panels.items() if curves.keys() - {"train", ""}]
    return [name for name in dict.fromkeys(["loss", *scores, "learning_rate"]) if name in panels]


def curve_colors(runs: list[dict]) -> dict[str, str]:
    """Returns the color of each curve, the same in all panels and for all seeds."""
    names = {curve for panels in runs for curves in panels.values() for curve in curves}
    return COLORS | dict(zip(sorted(names - COLORS.keys()), itertools.cycle(OTHER_COLORS)))


def read_runs(workdir: pathlib.Path) -> list[dict]:
    """Returns the metrics of a run: of each seed, if it has several. Raises FileNotFoundError."""
    seeds = sorted(path.parent for path in workdir.glob("seed_*/metrics.jsonl"))
    runs = [read_metrics(directory) for directory in seeds or [workdir]]
    if not panels_with_data(runs[0]):
        raise FileNotFoundError(f"{workdir} has no curves: it has not reported a step of training")
    return runs


def read_baselines(workdir: pathlib.Path, panels: dict) -> dict[str, float]:
    """Returns the scores that need no model: those of the unigrams, and chance.

    `panels` are the metrics, whose last evaluation has the entropy also before the end of the run.
    """
    path = workdir / "result.json"
    result = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for _, values in panels.get("unigram_entropy", {}).values():
        result.setdefault("unigram_entropy", values[-1])
    result["chance"] = 0.5
    return {name: result[name] for _, name in PRETRAINING.values() if name in result}


def starts_of_later_phases(workdir: pathlib.Path) -> tuple[int, ...]:
    """Returns the last step before each phase of a pre-training run but the first."""
    path = workdir / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    phases = phases_of(config).values()
    lengths = [phase["num_steps"] for phase in phases if phase.get("num_steps")]
    return tuple(itertools.accumulate(lengths))[:-1]


def read_alarms(workdir: pathlib.Path) -> tuple[list[Alarm], dict[str, str]] | None:
    """Returns the alarms of a run of pre-training, and what `unchecked_alarms` returns.

    None for another run, or without config.json.
    """
    path = workdir / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "corpus" not in config:
        return None
    text = (workdir / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return all_alarms(lines, config), unchecked_alarms(lines)


def draw(*workdirs: pathlib.Path) -> pyplot.Figure:
    """Plots losses, accuracies or scores, and the learning rate over steps.

    For pre-training it also plots gradient norm, speed and wait for data, and for one run alarms.
    A run with several seeds has one line per seed; a dotted line marks the start of each later
    phase of pre-training. Several runs have a color each, and their names in the legend; baselines
    and these starts are drawn only if they are the same for all. The legend is beside
    the plots. Raises FileNotFoundError.
    """
    runs = [(workdir, panels) for workdir in workdirs for panels in read_runs(workdir)]
    several = len(workdirs) > 1
    names = list(dict.fromkeys(name for _, run in runs for name in panels_with_data(run)))
    columns = min(len(names), 4)
    rows = -(-len(names) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4 * columns, 3.6 * rows), layout="constrained", squeeze=False
    )
    colors = curve_colors([panels for _, panels in runs])
    run_colors = dict(zip(workdirs, itertools.cycle(RUN_COLORS)))
    baselines = [read_baselines(workdir, panels) for workdir, panels in runs]
    phases = {starts_of_later_phases(workdir) for workdir in workdirs}
    alarms, _ = (not several and read_alarms(*workdirs)) or ([], {})
    for axis, name in itertools.zip_longest(axes.flat, names):
        if name is None:
            axis.remove()
            continue
        for workdir, run in runs:
            for curve, (steps, values) in run.get(name, {}).items():
                is_thin = curve == "train" or " " in curve  # Beside the scores over all types.
                style = (
                    {"linewidth": 0.8, "alpha": 0.7} if is_thin else {"linewidth": 1.2, "zorder": 3}
                )
                style["marker"] = "o" if len(steps) <= FEW_POINTS else ""
                style["color"] = run_colors[workdir] if several else colors[curve]
                label = f"{workdir} {curve}".strip() if several else curve
                is_labeled = label in axis.get_legend_handles_labels()[1]
                label = None if is_labeled else label or None
                axis.plot(steps, values, label=label, markersize=3, **style)
        baseline = PRETRAINING.get(name, (None, None))[1]
        if len(values := {each.get(baseline) for each in baselines}) == 1 and None not in values:
            label, style = baseline.replace("_", " "), {"color": "gray", "linestyle": "--"}
            axis.axhline(*values, linewidth=1, label=label, **style)
        last_step = max(steps[-1] for _, run in runs for steps, _ in run.get(name, {}).values())
        starts = [step for step in min(phases) if step < last_step] if len(phases) == 1 else []
        for start in starts:
            label = "start of a later phase" if start == starts[0] else None
            axis.axvline(start, label=label, color="black", linestyle=":", linewidth=1)
        marked = [alarm for alarm in alarms if name in ALARMS[alarm.name]]
        for alarm in marked:
            label = "alarm" if alarm is marked[0] else None
            axis.axvline(alarm.step, label=label, color="gold", linewidth=3, zorder=0)
        axis.set_title(TITLES.get(name, name.replace("_", " ")))
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(ticker.MaxNLocator(nbins=5, integer=True))
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
        if name == "data_wait_seconds":
            axis.set_yscale("log")  # The first wait of a phase is far longer than all others.
        if name == "learning_rate":
            axis.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    labeled = {}  # The panels share their curves.
    for axis in figure.axes:
        lines, labels = axis.get_legend_handles_labels()
        labeled |= dict(zip(labels, lines, strict=True))
    if labeled:
        figure.legend(labeled.values(), labeled.keys(), loc="outside right upper", fontsize=8)
    title = ", ".join(map(str, workdirs))
    figure.suptitle(f"{title}, {len(runs)} seeds" if len(runs) > len(workdirs) else title)
    return figure


def main(argv: list[str], output: str | None = None) -> None:
    """Plots the runs in the workdirs `argv[1:]` into a file, and prints its path and the alarms."""
    if len(argv) == 1:
        raise app.UsageError("expected the workdir of one or several runs")
    names = list(dict.fromkeys(argv[1:]))
    workdirs = [pathlib.Path(name) for name in names]
    for name, workdir in zip(names, workdirs, strict=True):
        if is_bucket(name):
            sys.exit(f"plot: {name}: expected a local directory; copy it with gcloud storage rsync")
        if workdir.suffix in SUFFIXES and not workdir.is_dir():
            sys.exit(
                f"plot: {name} is not the workdir of a run: to write to it, set --output={name}"
            )
    output = output or ("curves.png" if len(workdirs) > 1 else workdirs[0] / "curves.png")
    try:
        draw(*workdirs).savefig(output, dpi=120)
        alarms = {workdir: read_alarms(workdir) for workdir in workdirs}
    except (OSError, ValueError) as error:  # ValueError: unknown image format.
        sys.exit(f"plot: {describe_error(error)}")
    print(output)
    for workdir, found in alarms.items():
        if found is not None:
            print_alarms(workdir, *found)


def print_alarms(workdir: pathlib.Path, alarms: list[Alarm], unchecked: dict[str, str]) -> None:
    """Prints a line for each kind of alarm, and those that the metrics cannot raise."""
    for name in dict.fromkeys(alarm.name for alarm in alarms):
        same = [alarm for alarm in alarms if alarm.name == name]
        steps = f"step {same[-1].step:,}"
        if len(same) > 1:
            steps += f" and {len(same) - 1} times before, since step {same[0].step:,}"
        print(f"{workdir}, {steps}: {same[-1].text}")
    if not alarms:
        print(f"{workdir}: no alarms")
    if unchecked:
        missing = ", ".join(f"{name} ({metric})" for name, metric in unchecked.items())
        print(f"{workdir}: not checked, as its reports lack the metric: {missing}")


if __name__ == "__main__":
    OUTPUT = flags.DEFINE_string("output", None, "File to write; its ending chooses the format.")
    app.run(lambda argv: main(argv, OUTPUT.value), flags_parser=parse_flags)
