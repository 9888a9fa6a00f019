"""The report of a study: a table of our scores beside the paper's, and a plot."""

import datetime
import json
import os
import pathlib
import platform
import re
import statistics
from collections.abc import Sequence

from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
Scores = dict[tuple[str, str], list[float]]
"""Scores of the seeds by row and column; empty if no seed has one."""


def best_scores(workdir: pathlib.Path, metric: str) -> list[float]:
    """Returns the scores over seeds of the point of a sweep with the best median.

    Raises FileNotFoundError if no trial has a result.
    """
    split, name = metric.split("/")
    points: dict[str, list[float]] = {}
    paths = sorted(workdir.glob("trials/*/result.json"))
    if not paths:
        raise FileNotFoundError(f"{workdir} has no results: run the study without --report_only")
    for path in paths:
        result = json.loads(path.read_text())
        point = re.sub(r",?seed=\d+$", "", path.parent.name)
        points.setdefault(point, []).extend([result[split][name]] if split in result else [])
    return max(points.values(), key=lambda own: statistics.median(own or [-1]), default=[])


def show(values: Sequence[float] | None, scale: float) -> str:
    """Formats the median, and for several values their range; "" if nothing was run."""
    if not values:
        return "" if values is None else "diverged"
    middle, low, high = (f(values) * scale for f in (statistics.median, min, max))
    return f"{middle:.1f}" + (f" ({low:.1f} to {high:.1f})" if len(values) > 1 else "")


def table(rows: Sequence, columns: Sequence[str], scores: Scores, measures: Sequence[str]) -> str:
    """Returns the Markdown table: our measures and scores, then the paper's columns."""
    paper = list(dict.fromkeys(name for row in rows for name in row.paper))
    header = ["", *(f"ours: {name}" for name in [*measures, *columns])]
    header += [f"paper: {name}" for name in paper]
    lines = [header, ["---"] + ["---:"] * (len(header) - 1)]
    for row in rows:
        ours = [show(scores.get((row.name, name)), 1) for name in measures]
        ours += [show(scores.get((row.name, name)), 100) for name in columns]
        lines.append([row.name, *ours, *(str(row.paper.get(name, "")) for name in paper)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(study, scale: str, columns: Sequence[str], scores: Scores, directory, command) -> None:
    """Writes NAME.md and NAME.png into `directory`."""
    directory, rows = pathlib.Path(directory), study.rows(scale)
    directory.mkdir(parents=True, exist_ok=True)
    figure = study.draw(study.title, rows, columns, scores)
    figure.savefig(directory / f"{study.name}.png", dpi=130)
    parts = [
        f"# {study.title}",
        study.about,
        table(rows, columns, scores, list(study.measures)),
        "Our scores are in percent, on dev: the median over the seeds, and their range. Each seed "
        "keeps its best epoch, as chosen on dev.",
        f"![{study.title}]({study.name}.png)",
        *([f"**What this scale can and cannot show.** {study.limits}"] * (scale == "laptop")),
        f"Made on {machine()}, {datetime.date.today()}, by this command:",
        f"```\n{command}\n```",
    ]
    path = directory / f"{study.name}.md"
    path.write_text("\n\n".join(parts) + "\n")
    print(f"\n{path.read_text()}\nWrote {path} and {study.name}.png")


def machine() -> str:
    """Returns the number of cores and the processor's name."""
    path = pathlib.Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", path.read_text()) if path.exists() else []
    return f"{os.cpu_count()} cores ({names[0] if names else platform.machine()})"


def draw_scores(title: str, rows: Sequence, columns: Sequence[str], scores: Scores) -> Figure:
    """Returns a panel per measure and column: each seed as a dot, their median as a bar.

    Measures are the columns of `scores` that are not in `columns`; they are not in percent.
    """
    rows = [row for row in rows if (row.name, columns[0]) in scores]
    measures = list(dict.fromkeys(name for _, name in scores if name not in columns))
    panels = [(name, "Pre-training", name, 1) for name in measures]
    for column in columns:
        task, _, metric = column.rpartition(", ")
        panels.append((column, task, f"{metric} on dev (%)", 100))
    figure = Figure((3.2 + 2.9 * len(panels), 1.3 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (column, name, label, scale), color in zip(axes, panels, COLORS, strict=False):
        for place, row in enumerate(rows):
            values = [scale * value for value in scores.get((row.name, column), [])]
            axis.plot(values, [place] * len(values), "o", color=color, alpha=0.45)
            if values:
                axis.plot(statistics.median(values), place, "|", color=color, ms=16, mew=2.5)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
        axis.margins(x=0.12)
    axes[0].set_yticks(range(len(rows)), [row.name for row in rows])
    axes[0].set_ylim(len(rows) - 0.5, -0.5)  # The first row on top, as in the table.
    figure.suptitle(f"{title}\na dot is a seed, the bar their median", fontsize=11)
    return figure
