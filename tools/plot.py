"""Plots the curves of a pre-training or fine-tuning: python tools/plot.py WORKDIR [OUTPUT.png]."""

import itertools
import json
import pathlib
import sys

import matplotlib
from absl import app

from bert_jax.runtime.command_line import parse_flags

matplotlib.use("Agg")
from matplotlib import pyplot, ticker

# For pre-training: name, title, and the baseline in result.json. Fine-tuning has other names.
PRETRAINING = {
    "mlm_loss": ("masked-LM loss (nats)", "unigram_entropy"),
    "mlm_accuracy": ("masked-LM accuracy", "unigram_accuracy"),
    "nsp_accuracy": ("next-sentence accuracy", "chance"),
}
TITLES = {name: title for name, (title, _) in PRETRAINING.items()}
COLORS = {"train": "tab:blue", "heldout": "tab:red", "": "tab:green"}


def read_metrics(workdir: pathlib.Path) -> dict[str, dict[str, tuple[list[int], list[float]]]]:
    """Returns the steps and values in `metrics.jsonl`, by name of metric and then by split.

    The scores of the chosen checkpoint ("final/...") are not a curve and are left out. Raises
    FileNotFoundError.
    """
    path = workdir / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: expected the workdir of a run")
    panels: dict[str, dict[str, tuple[list[int], list[float]]]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        for key, value in record.items():
            split, _, name = key.rpartition("/")
            if key != "step" and not key.startswith("final/"):
                steps, values = panels.setdefault(name, {}).setdefault(split, ([], []))
                steps.append(record["step"])
                values.append(value)
    return panels


def panels_with_data(panels: dict) -> list[str]:
    """Returns the names of the metrics to draw, in order."""
    if "mlm_loss" in panels:
        return [*PRETRAINING, "learning_rate"]
    scores = [name for name, splits in panels.items() if splits.keys() - {"train", ""}]
    return [name for name in dict.fromkeys(["loss", *scores, "learning_rate"]) if name in panels]


def draw(workdir: pathlib.Path) -> pyplot.Figure:
    """Plots losses, accuracies or scores, and the learning rate over steps.

    A run with several seeds has one line per seed. Raises FileNotFoundError.
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
    for axis, name in itertools.zip_longest(axes.flat, names):
        if name is None:
            axis.remove()
            continue
        for run in runs:
            for split, (steps, values) in run.get(name, {}).items():
                style = {"linewidth": 0.8, "alpha": 0.7} if split == "train" else {"linewidth": 1.2}
                style["marker"] = "" if split in ("train", "") and len(steps) > 1 else "o"
                label = {"heldout": "held-out", "": None}.get(split, split)
                color = COLORS.get(split, "tab:red")
                label = label if run is runs[0] else None
                axis.plot(steps, values, color=color, label=label, markersize=3, **style)
        baseline = PRETRAINING.get(name, (None, None))[1]
        if baseline in result:
            label = baseline.replace("_", " ")
            axis.axhline(result[baseline], color="gray", linestyle="--", linewidth=1, label=label)
        axis.set_title(TITLES.get(name, name.replace("_", " ")))
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(ticker.MaxNLocator(nbins=5, integer=True))
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
        if name == "learning_rate":
            axis.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        else:
            axis.legend(fontsize=8)
    figure.suptitle(f"{workdir}, {len(runs)} seeds" if len(runs) > 1 else str(workdir))
    return figure


def main(argv: list[str]) -> None:
    if len(argv) not in (2, 3):
        raise app.UsageError("expected WORKDIR, or WORKDIR and a file to write")
    run = pathlib.Path(argv[1])
    png = pathlib.Path(argv[2]) if len(argv) == 3 else run / "curves.png"
    try:
        draw(run).savefig(png, dpi=120)
    except FileNotFoundError as error:
        sys.exit(f"plot: {error}")
    print(png)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
