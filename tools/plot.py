"""Draws the loss and accuracy curves of a run: python tools/plot.py WORKDIR [OUTPUT.png]."""

import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def read_metrics(workdir: pathlib.Path) -> dict[str, tuple[list[int], list[float]]]:
    """Returns the steps and values of each metric in `metrics.jsonl`. Raises FileNotFoundError."""
    path = workdir / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: expected the workdir of a run")
    series: dict[str, tuple[list[int], list[float]]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        for name, value in record.items():
            if name != "step":
                steps, values = series.setdefault(name, ([], []))
                steps.append(record["step"])
                values.append(value)
    return series


def plot(workdir: pathlib.Path, output: pathlib.Path) -> None:
    """Plots MLM loss, MLM accuracy and NSP accuracy over steps, train and held-out, as a PNG."""
    series = read_metrics(workdir)
    result_path = workdir / "result.json"
    result = json.loads(result_path.read_text()) if result_path.is_file() else {}
    panels = (
        ("mlm_loss", "masked-LM loss (nats)", result.get("unigram_entropy"), "unigram entropy"),
        ("mlm_accuracy", "masked-LM accuracy", result.get("unigram_accuracy"), "unigram accuracy"),
        ("nsp_accuracy", "next-sentence accuracy", 0.5, "chance"),
    )
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for axis, (name, title, baseline, baseline_label) in zip(axes, panels, strict=True):
        for split, color in (("train", "tab:blue"), ("heldout", "tab:red")):
            if f"{split}/{name}" in series:
                steps, values = series[f"{split}/{name}"]
                label = "held-out" if split == "heldout" else "train"
                style = {"linewidth": 0.8, "alpha": 0.7} if split == "train" else {"marker": "o"}
                axis.plot(steps, values, color=color, label=label, markersize=3, **style)
        if baseline is not None:
            axis.axhline(baseline, color="gray", linestyle="--", linewidth=1, label=baseline_label)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(str(workdir))
    figure.savefig(output, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    run = pathlib.Path(sys.argv[1])
    png = pathlib.Path(sys.argv[2]) if len(sys.argv) == 3 else run / "curves.png"
    try:
        plot(run, png)
    except FileNotFoundError as error:
        sys.exit(f"plot: {error}")
    print(png)
