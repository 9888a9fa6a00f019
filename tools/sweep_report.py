"""The report of a sweep: report.html (one file, no requests), report.md and trials.csv.

It holds neither times nor the path of the sweep, so that a resumed sweep has the same report as an
uninterrupted one.
"""

import base64
import csv
import functools
import html
import io
import json
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
from flax.traverse_util import flatten_dict
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from bert_jax.tasks.trials import Trial, summarize_seeds
from bert_jax.training.workdir import write_text

TITLE = "Sweep of fine-tuning hyperparameters"
ABOUT_POINTS = (
    "Sorted by the median over seeds of the score on dev, each of the best checkpoint of a trial; "
    "std is the sample standard deviation (n - 1). Diverged trials have no score; collapsed ones, "
    "which predict the same for every input, count."
)
Table = list[list[str]]
"""A header and rows."""
Section = tuple[str, str, Table]
"""Title, text, table."""
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
GRAY = "#b5b5b5"  # Of the curves of all other points.
CSS = """
body { color: #222; background: #fff; font: 16px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 72rem; padding: 1rem; overflow-wrap: anywhere; }
h1, h2 { font-weight: 600; line-height: 1.25; }
h2 { margin-top: 2.5rem; }
p { max-width: 45rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; overflow-wrap: normal; padding: .3rem .8rem .3rem 0;
  text-align: left; vertical-align: top; }
th { color: #555; font-weight: 600; vertical-align: bottom; }
.number { text-align: right; white-space: nowrap; }
.notes { min-width: 12rem; }
.value { overflow-wrap: anywhere; }
.legend { font-size: .875rem; list-style: none; padding: 0; }
.legend li { border-left: 1rem solid; margin: .4rem 0; padding-left: .6rem; }
.legend span { color: #222; }
.panels { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
img { display: block; height: auto; max-width: 100%; width: 40rem; }
"""


class Point(NamedTuple):
    """The values of the fields in which the points differ, and the trials, one per seed."""

    values: dict[str, object]
    trials: list[Trial]

    def __str__(self) -> str:
        return ", ".join(f"{name}={show(value)}" for name, value in self.values.items()) or "base"


class Summary(NamedTuple):
    """A point, the results of its trials (None: not ended), and their scores on dev."""

    point: Point
    results: list[dict | None]
    scores: list[float]
    metric: str

    @property
    def median(self) -> float:
        return statistics.median(self.scores) if self.scores else -math.inf

    @property
    def finished(self) -> list[dict]:
        return [result for result in self.results if result and "diverged" not in result]

    def notes(self) -> str:
        """Names the seeds that collapsed, diverged or have not ended."""
        seeds: dict[str, list[str]] = {}
        for trial, result in zip(self.point.trials, self.results, strict=True):
            seeds.setdefault(status(result), []).append(str(trial.config.seed))
        seeds.pop("finished", None)
        return "; ".join(f"{note}: seed {', '.join(own)}" for note, own in seeds.items())

    def curve(self) -> tuple[list[int], list[float]]:
        """Returns the steps of the evaluations, and the median score over the seeds at each."""
        scores: dict[int, list[float]] = {}
        for trial, result in zip(self.point.trials, self.results, strict=True):
            if result and "diverged" not in result:
                for line in (trial.workdir / "metrics.jsonl").read_text().splitlines():
                    record = json.loads(line)
                    if self.metric in record:
                        scores.setdefault(record["step"], []).append(record[self.metric])
        return sorted(scores), [statistics.median(scores[step]) for step in sorted(scores)]


def write(workdir: pathlib.Path, config: ConfigDict, points: Sequence[Point], metric: str) -> dict:
    """Writes the three files; returns the best point, the counts and the path of the page."""
    summaries = [summarize(point, metric) for point in points]
    ranked = sorted(summaries, key=lambda summary: -summary.median)
    best = ranked[0]
    scores = summarize_seeds(best.finished, metric)["scores"] if best.scores else {}
    write_text(workdir / "trials.csv", trials_table(summaries))
    sections = [
        ("What was run", "sweep.json has all settings.", settings_table(config, summaries)),
        ("Best point", about_best(best), scores_table(scores)),
        ("Points", ABOUT_POINTS, points_table(ranked)),
    ]
    write_text(workdir / "report.md", markdown_page(sections))
    write_text(workdir / "report.html", html_page(sections, draw_figures(summaries, ranked)))
    statuses = [status(result).split()[0] for summary in summaries for result in summary.results]
    return {
        "metric": metric,
        "trials": {name: statuses.count(name) for name in dict.fromkeys(statuses)},
        "best_point": best.point.values if scores else None,
        "medians_of_best_point": {name: value["median"] for name, value in scores.items()},
        "report": str(workdir / "report.html"),
    }


def summarize(point: Point, metric: str) -> Summary:
    """Reads the results of a point."""
    summary = Summary(point, [trial.result for trial in point.trials], [], metric)
    split, _, name = metric.rpartition("/")
    return summary._replace(scores=[result[split][name] for result in summary.finished])


def status(result: dict | None) -> str:
    if result is None:
        return "not ended"
    if "diverged" in result:
        return f"diverged at step {result['diverged']}"
    return "collapsed" if result.get("collapsed") else "finished"


def show(value: object) -> str:
    """Formats a value of a field: 5e-05, 3 (of 3.0), default (of None), a,b (of a tuple)."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, tuple | list):
        return ",".join(map(show, value)) or "none"
    return "default" if value is None else str(value)


def settings_table(config: ConfigDict, points: Sequence[Summary]) -> Table:
    """Returns what was run: the names and values of the main settings."""
    base, fields = config.base, points[0].point.values
    rows = [["setting", "value"], ["task", base.task], ["init_from", base.init_from]]
    for name in ("name", "directory", "train", "dev", "test", "passages"):
        if base.data.get(name) and f"data.{name}" not in fields:
            rows.append([f"data.{name}", base.data[name]])
    for name in fields:
        values = list(dict.fromkeys(summary.point.values[name] for summary in points))
        text = "; ".join(map(show, values))
        if len(values) > 12:  # Of a search.
            text = f"{len(values)} values from {show(min(values))} to {show(max(values))}"
        rows.append([f"values of {name}", text])
    ended = sum(result is not None for summary in points for result in summary.results)
    seeds = [str(trial.config.seed) for trial in points[0].point.trials]
    trials = f"{len(points)} points x {len(seeds)} seeds ({', '.join(seeds)}); {ended} have ended"
    return [*rows, ["trials", trials], ["metric (higher is better)", points[0].metric]]


def points_table(ranked: Sequence[Summary]) -> Table:
    """Returns a row per point."""
    header = [*ranked[0].point.values, "median", "std", "min", "max", "seeds with a score", "notes"]
    rows = []
    for summary in ranked:
        numbers = [""] * 4
        if scores := summary.scores:
            deviation = [statistics.stdev(scores)] if len(scores) > 1 else []
            numbers = [f"{x:.4f}" for x in (summary.median, *deviation, min(scores), max(scores))]
            numbers[1:1] = [""] * (len(scores) == 1)
        count = f"{len(scores)} of {len(summary.results)}"
        rows.append([*map(show, summary.point.values.values()), *numbers, count, summary.notes()])
    return [header, *rows]


def scores_table(scores: dict[str, dict[str, float]]) -> Table:
    """Returns a row per split and score, from those of `summarize_seeds`."""
    names = ("median", "min", "max")
    rows = [[key, *(f"{value[name]:.4f}" for name in names)] for key, value in scores.items()]
    return [["score", *names], *rows]


def trials_table(summaries: Sequence[Summary]) -> str:
    """Returns a row per trial as CSV, with unrounded scores."""
    rows = []
    for summary in summaries:
        for trial, result in zip(summary.point.trials, summary.results, strict=True):
            row = {"trial": trial.workdir.name}
            row |= {name: show(value) for name, value in summary.point.values.items()}
            row |= {"seed": trial.config.seed, "status": status(result)}
            result = {key: value for key, value in (result or {}).items() if key not in row}
            row |= {name: result.get(name) for name in ("steps", "best_step")}
            splits = {key: value for key, value in result.items() if isinstance(value, dict)}
            rows.append(row | flatten_dict(splits, sep="/"))
    file = io.StringIO()
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(file, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def about_best(best: Summary) -> str:
    """Returns the best point as text."""
    if not best.scores:
        return "No trial has a score."
    return (
        f"{best.point}: median {best.metric} {best.median:.4f} over {len(best.scores)} of "
        f"{len(best.results)} seeds. The point was chosen by this score, which is therefore "
        "optimistic; those on other splits are not."
    )


def markdown_page(sections: Sequence[Section]) -> str:
    parts = [f"# {TITLE}"]
    for title, text, table in sections:
        lines = [table[0], ["---"] * len(table[0]), *table[1:]]
        rows = [f"| {' | '.join(line).replace(chr(10), ' ')} |" for line in lines]
        parts += [f"## {title}", text, "\n".join(rows)]
    return "\n\n".join([*parts, "report.html has the plots, trials.csv each trial."]) + "\n"


def html_page(sections: Sequence[Section], figures: str) -> str:
    classes = dict.fromkeys(("median", "std", "min", "max"), "number")
    classes |= {"notes": "notes", "value": "value"}
    parts = [
        f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{TITLE}</title>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        f"<style>{CSS}</style>\n<h1>{TITLE}</h1>",
    ]
    for title, text, table in sections:
        parts.append(f"<h2>{title}</h2>\n<p>{html.escape(text)}\n<div class=scroll><table>")
        for tag, row in zip(["th", *["td"] * len(table[1:])], table, strict=True):
            cells = zip(table[0], row, strict=True)
            texts = (f'<{tag} class="{classes.get(k, "")}">{html.escape(c)}' for k, c in cells)
            parts.append(f"<tr>{''.join(texts)}")
        parts.append("</table></div>")
    return "\n".join([*parts, figures, "</html>\n"])


def draw_figures(points: Sequence[Summary], ranked: Sequence[Summary]) -> str:
    """Returns the sections with plots as HTML."""

    def figure(width, height, title, draw):
        # Without random ids and the date, the same scores give the same file.
        with matplotlib.rc_context({"svg.hashsalt": "sweep", "font.size": 10}):
            drawing = Figure((width, height), layout="constrained")
            axis = drawing.subplots()
            draw(axis)
            axis.set_title(title)
            axis.grid(alpha=0.3)
            file, no_metadata = io.BytesIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
            drawing.savefig(file, format="svg", metadata=no_metadata)
        data = base64.b64encode(file.getvalue()).decode()
        return f'<img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{data}">'

    panels = [
        figure(4, 3, f"Score by {name}", functools.partial(draw_field, points=points, name=name))
        for name in points[0].point.values
    ]
    curves = figure(5.2, 3.4, "Score during training", lambda axis: draw_curves(axis, ranked))
    labels = [str(summary.point) for summary in ranked[: len(COLORS)]]
    labels += ["other points"] * (len(ranked) > len(COLORS))
    entries = (
        f'<li style="border-color: {color}"><span>{html.escape(label)}</span>'
        for color, label in zip([*COLORS, GRAY], labels, strict=False)
    )
    return f"""<h2>Learning curves</h2>
<p>Median at each evaluation over the seeds that did not diverge. The {len(COLORS)} best points have
a color.</p>
{curves}
<ul class=legend>{"".join(entries)}</ul>
<h2>Score by hyperparameter</h2>
<p>A dot is a trial; the line is the median of all trials with that value. Values for which all
trials diverged are not shown.</p>
<div class=panels>{"".join(panels)}</div>"""


def draw_curves(axis: Axes, ranked: Sequence[Summary]) -> None:
    """Plots the score on dev over steps, with a line per point, the best in front."""
    for rank, summary in reversed(list(enumerate(ranked))):
        steps, scores = summary.curve()
        color = COLORS[rank] if rank < len(COLORS) else GRAY
        style = {"marker": "o" if len(steps) < 20 else "", "markersize": 3, "linewidth": 1.3}
        axis.plot(steps, scores, color=color, **style)
    axis.set_xlabel("training step")
    axis.set_ylabel(f"median {ranked[0].metric}")
    axis.xaxis.set_major_locator(ticker.MaxNLocator(nbins=6, integer=True))


def draw_field(axis: Axes, points: Sequence[Summary], name: str) -> None:
    """Plots the score of every trial against the value of a field, and the median per value."""
    scores: dict[object, list[float]] = {}
    for summary in points:
        scores.setdefault(summary.point.values[name], []).extend(summary.scores)
    values = [value for value in scores if scores[value]]
    is_number = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    values = sorted(values) if is_number else values
    positions = values if is_number else list(range(len(values)))
    is_log = is_number and name.endswith("learning_rate")
    axis.set_xscale("log" if is_log else "linear")
    for position, value in zip(positions, values, strict=True):
        axis.plot([position] * len(scores[value]), scores[value], "o", color=COLORS[0], alpha=0.45)
    medians = [statistics.median(scores[value]) for value in values]
    axis.plot(positions, medians, color=COLORS[1], linewidth=1.3)
    if len(values) <= 8 or not is_number:
        axis.set_xticks(positions, list(map(show, values)))
        axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.margins(x=0.1)
    axis.set_xlabel(f"{name}, log scale" if is_log else name)
    axis.set_ylabel(points[0].metric)
