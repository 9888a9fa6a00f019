"""The report of a study: a table of our scores beside the paper's, and a plot."""

import datetime
import json
import math
import os
import pathlib
import platform
import re
import statistics
from collections.abc import Callable, Iterable, Sequence

from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
POD = (
    "Ours: the paper's sizes. Hyperparameters of fine-tuning that the study does not set are the "
    "best on dev of the grid of Devlin et al. (2018), appendix A.3."
)
"""What the pod scale is, in each report."""


class Seeds(list):
    """Scores of the seeds, NaN if one diverged, and how many predict one class for everything."""

    def __init__(self, scores: Iterable[float], num_collapsed: int = 0):
        super().__init__(scores)
        self.num_collapsed = num_collapsed


Scores = dict[tuple[str, str], Seeds]
"""By row and column."""


def best_seeds(
    workdir: pathlib.Path, metric: str, score: Callable[[pathlib.Path], float] | None = None
) -> Seeds:
    """Returns the scores over seeds of the best configuration of a sweep.

    They are the `metric` in result.json, or what `score` returns for the directory of a trial.
    The best configuration has the best median, where a diverged seed counts as worse than any
    score, as in a sweep's report. Raises FileNotFoundError if no trial has a result.
    """
    split, name = metric.split("/")
    configurations: dict[str, list[tuple[float, bool]]] = {}
    paths = sorted(workdir.glob("trials/*/result.json"))
    if not paths:
        raise FileNotFoundError(f"{workdir} has no results: run the study without --report_only")
    for path in paths:
        configuration = re.sub(r",?seed=\d+$", "", path.parent.name)
        result, value = json.loads(path.read_text(encoding="utf-8")), math.nan
        if split in result:  # Else it diverged.
            value = score(path.parent) if score else result[split][name]
        trial = value, result.get("collapsed", False)
        configurations.setdefault(configuration, []).append(trial)
    seeds = [
        Seeds((value for value, _ in trials), sum(collapsed for _, collapsed in trials))
        for trials in configurations.values()
    ]

    def rank(scores):
        return statistics.median(-math.inf if math.isnan(score) else score for score in scores)

    return max(seeds, key=rank)


def finished(scores: Sequence[float]) -> list[float]:
    """Returns the scores of the seeds that did not diverge."""
    return [score for score in scores if not math.isnan(score)]


def show(values: Seeds | None, scale: float = 100, form: str = ".1f") -> str:
    """Formats the median and, for several seeds, their range; "" if nothing was run."""
    if values is None:
        return ""
    own, notes = finished(values), []
    for count, what in ((len(values) - len(own), "diverged"), (values.num_collapsed, "collapsed")):
        notes += [f"{count} of {len(values)} {what}"] * bool(count)
    if not own:
        return "; ".join(notes)
    middle, low, high = (f(own) * scale for f in (statistics.median, min, max))
    notes = [f"{low:{form}} to {high:{form}}"] * (len(own) > 1) + notes
    return f"{middle:{form}}" + (f" ({'; '.join(notes)})" if notes else "")


def table(rows: Sequence, columns: Sequence[str], scores: Scores, metrics: Sequence[str]) -> str:
    """Returns the Markdown table: our metrics of pre-training, our scores, the paper's columns."""
    paper = list(dict.fromkeys(name for row in rows for name in row.paper))
    header = ["", *(f"ours: {name}" for name in [*metrics, *columns])]
    header += [f"paper: {name}" for name in paper]
    lines = [header, ["---"] + ["---:"] * (len(header) - 1)]
    for row in rows:
        ours = [show(scores.get((row.name, name)), 1, ".3g") for name in metrics]
        ours += [show(scores.get((row.name, name))) for name in columns]
        lines.append([row.name, *ours, *(str(row.paper.get(name, "")) for name in paper)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(
    study,
    scale: str,
    columns: Sequence[str],
    scores: Scores,
    baselines: dict[str, float],
    directory: str,
    command: str,
    appendix: str = "",
) -> None:
    """Writes NAME.md and NAME.png into `directory`, with any `appendix` of the study.

    `baselines` are the held-out perplexities of word frequencies alone, by row format.
    """
    directory, rows = pathlib.Path(directory), study.rows(scale)
    directory.mkdir(parents=True, exist_ok=True)
    figure = study.draw(study.title, rows, columns, scores)
    figure.savefig(directory / f"{study.name}.png", dpi=130)
    metrics, notes = list(study.pretraining_metrics), []
    if columns:
        own = [seeds for (_, name), seeds in scores.items() if name in columns]
        what = "of one run, which keeps its"
        if any(len(seeds) > 1 for seeds in own):
            what = "the median over the seeds, and their range. Each seed keeps its"
        notes.append(f"Our scores on dev are in percent: {what} best epoch, as chosen on dev.")
    if any(seeds.num_collapsed for seeds in scores.values()):
        notes.append("A seed that collapsed predicts one class for all examples.")
    if metrics:
        own = [seeds for (_, name), seeds in scores.items() if name in metrics]
        of_runs = "of one run"
        if any(len(seeds) > 1 for seeds in own):
            of_runs = "the median of the runs of pre-training, and their range"
        verb = "are" if len(metrics) > 1 else "is"
        notes.append(f"The {' and '.join(metrics)}, {of_runs}, {verb} not in percent.")
    if baselines:
        values = [f"{value:.0f} ({name.replace('_', ' ')})" for name, value in baselines.items()]
        notes.append(f"Word frequencies alone have a perplexity of {', '.join(values)}.")
    parts = [
        f"# {study.title}",
        f"{study.about} {study.laptop}" if scale == "laptop" else f"{study.about} {POD}",
        table(rows, columns, scores, metrics),
        " ".join(notes),
        f"![{study.title}]({study.name}.png)",
        *([appendix] * bool(appendix)),
        *([f"**What this scale can and cannot show.** {study.limits}"] * (scale == "laptop")),
        f"Made on {machine()}, {datetime.date.today()}, by this command:",
        f"```\n{command}\n```",
    ]
    path = directory / f"{study.name}.md"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"\n{path.read_text(encoding='utf-8')}\nWrote {path} and {study.name}.png")


def machine() -> str:
    """Returns the number of cores and the processor's name."""
    path = pathlib.Path("/proc/cpuinfo")
    names = (
        re.findall(r"model name\s*: (.+)", path.read_text(encoding="utf-8"))
        if path.exists()
        else []
    )
    return f"{os.cpu_count()} cores ({names[0] if names else platform.machine()})"


def draw_scores(title: str, rows: Sequence, columns: Sequence[str], scores: Scores) -> Figure:
    """Returns a panel per metric of pre-training and column: dots for seeds, bars for medians.

    The metrics are the columns of `scores` that are not in `columns`; they are not in percent.
    """
    scored = {name for name, _ in scores}
    rows = [row for row in rows if row.name in scored]
    metrics = list(dict.fromkeys(name for _, name in scores if name not in columns))
    panels = [(name, "Pre-training", name, 1) for name in metrics]
    for column in columns:
        task, _, metric = column.rpartition(" ")
        panels.append((column, task, f"{metric} on dev (%)", 100))
    height = math.ceil(len(panels) / 4)  # At most four panels side by side.
    width = math.ceil(len(panels) / height)
    size = 3.2 + 2.9 * width, 0.5 + (0.8 + 0.42 * len(rows)) * height
    figure = Figure(size, layout="constrained")
    axes = figure.subplots(height, width, sharey=True, squeeze=False).flat
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for index, (column, name, label, scale) in enumerate(panels):
        axis, color = axes[index], COLORS[index % len(COLORS)]
        for place, row in enumerate(rows):
            values = [scale * value for value in finished(scores.get((row.name, column), []))]
            axis.plot(values, [place] * len(values), "o", color=color, alpha=0.45)
            if values:
                axis.plot(statistics.median(values), place, "|", color=color, ms=16, mew=2.5)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
        axis.margins(x=0.12)
    axes[0].set_yticks(range(len(rows)), [row.name for row in rows])
    axes[0].set_ylim(len(rows) - 0.5, -0.5)  # The first row on top, as in the table.
    figure.suptitle(f"{title}\ndots: seeds; bar: median", fontsize=11)
    return figure
