"""Plots the curves of a run: python tools/plot.py WORKDIR [OUTPUT.png]."""

import itertools
import json
import pathlib
import sys

import matplotlib
from absl import app

from bert_jax.buckets import is_bucket
from bert_jax.runtime.command_line import parse_flags

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
TITLES = {name: title for name, (title, _) in PRETRAINING.items()}
COLORS = {"train": "tab:blue", "held-out": "tab:red", "dev": "tab:red", "": "tab:green"}
OTHER_COLORS = ("tab:orange", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")
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
    for line in path.read_text().splitlines():
        record = json.loads(line)
        for key, value in record.items():
            if key != "step" and not key.startswith("final/"):
                split, name, *entity_type = key.split("/") if "/" in key else ("", key)
                curve = " ".join([split.replace("heldout", "held-out"), *entity_type])
                steps, values = panels.setdefault(name, {}).setdefault(curve, ([], []))
                steps.append(record["step"])
                values.append(value)
    return panels


def panels_with_data(panels: dict) -> list[str]:
    """Returns the names of the metrics to draw, in order."""
    if PRETRAINING.keys() & panels:
        return [name for name in (*PRETRAINING, "learning_rate") if name in panels]
    scores = [name for name, curves in panels.items() if curves.keys() - {"train", ""}]
    return [name for name in dict.fromkeys(["loss", *scores, "learning_rate"]) if name in panels]


def curve_colors(runs: list[dict]) -> dict[str, str]:
    """Returns the color of each curve, the same in all panels and for all seeds."""
    names = {curve for panels in runs for curves in panels.values() for curve in curves}
    return COLORS | dict(zip(sorted(names - COLORS.keys()), itertools.cycle(OTHER_COLORS)))


def start_of_long_phase(workdir: pathlib.Path) -> int:
    """Returns the last step on short rows of a pre-training run with two phases, or 0."""
    path = workdir / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    has_long_phase = config.get("long_phase", {}).get("num_steps")
    return config["num_steps"] if has_long_phase else 0


def draw(workdir: pathlib.Path) -> pyplot.Figure:
    """Plots losses, accuracies or scores, and the learning rate over steps.

    A run with several seeds has one line per seed; a dotted line marks the start of the long phase
    of pre-training. The legend is beside the plots. Raises FileNotFoundError.
    """
    seeds = sorted(path.parent for path in workdir.glob("seed_*/metrics.jsonl"))
    runs = [read_metrics(directory) for directory in seeds or [workdir]]
    if not (names := panels_with_data(runs[0])):
        raise FileNotFoundError(f"{workdir} has no curves: it has not reported a step of training")
    result_path = workdir / "result.json"
    result = json.loads(result_path.read_text()) if result_path.is_file() else {}
    result["chance"] = 0.5
    columns = min(len(names), 4)
    rows = -(-len(names) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4 * columns, 3.6 * rows), layout="constrained", squeeze=False
    )
    colors, long_phase = curve_colors(runs), start_of_long_phase(workdir)
    for axis, name in itertools.zip_longest(axes.flat, names):
        if name is None:
            axis.remove()
            continue
        for run in runs:
            for curve, (steps, values) in run.get(name, {}).items():
                is_thin = curve == "train" or " " in curve  # Beside the scores over all types.
                style = (
                    {"linewidth": 0.8, "alpha": 0.7} if is_thin else {"linewidth": 1.2, "zorder": 3}
                )
                style["marker"] = "o" if len(steps) <= FEW_POINTS else ""
                is_labeled = curve in axis.get_legend_handles_labels()[1]
                label = None if is_labeled else curve or None
                axis.plot(steps, values, color=colors[curve], label=label, markersize=3, **style)
        baseline = PRETRAINING.get(name, (None, None))[1]
        if baseline in result:
            label = baseline.replace("_", " ")
            axis.axhline(result[baseline], color="gray", linestyle="--", linewidth=1, label=label)
        last_step = max(steps[-1] for steps, _ in runs[0][name].values())
        if 0 < long_phase < last_step:
            style = {"color": "black", "linestyle": ":", "linewidth": 1}
            axis.axvline(long_phase, label="start of the long phase", **style)
        axis.set_title(TITLES.get(name, name.replace("_", " ")))
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(ticker.MaxNLocator(nbins=5, integer=True))
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
        if name == "learning_rate":
            axis.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    labeled = {}  # The panels share their curves.
    for axis in figure.axes:
        lines, labels = axis.get_legend_handles_labels()
        labeled |= dict(zip(labels, lines, strict=True))
    if labeled:
        figure.legend(labeled.values(), labeled.keys(), loc="outside right upper", fontsize=8)
    figure.suptitle(f"{workdir}, {len(runs)} seeds" if len(runs) > 1 else str(workdir))
    return figure


def main(argv: list[str]) -> None:
    if len(argv) not in (2, 3):
        raise app.UsageError("expected WORKDIR, or WORKDIR and a file to write")
    if is_bucket(argv[1]):
        sys.exit(f"plot: {argv[1]}: expected a local directory; copy it with gcloud storage rsync")
    run = pathlib.Path(argv[1])
    png = pathlib.Path(argv[2]) if len(argv) == 3 else run / "curves.png"
    try:
        draw(run).savefig(png, dpi=120)
    except FileNotFoundError as error:
        sys.exit(f"plot: {error}")
    print(png)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
