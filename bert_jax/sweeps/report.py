"""The report of a sweep: report.html (one file, no requests), report.md with plots, trials.csv.

It holds neither times nor the path of the sweep, so that a resumed sweep has the same report as an
uninterrupted one.
"""

import base64
import csv
import html
import io
import json
import math
import pathlib
import statistics
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
from flax.traverse_util import flatten_dict
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from bert_jax.finetuning.trials import Trial, summarize_seeds
from bert_jax.sweeps.configurations import Configuration, format_value
from bert_jax.training.workdir import write_text

TITLE = "Sweep of fine-tuning hyperparameters"
ABOUT_RANKING = (
    "Sorted by the median dev score over seeds; a trial's score is its best checkpoint's. "
    "A diverged seed counts as worse than any score; if half of the seeds or more diverged, there "
    "is no median, and the configuration ranks last. std, the sample standard deviation (n - 1), "
    "min and max are of the seeds with a score. Collapsed trials (constant predictions) are "
    "included."
)
Table = list[list[str]]
"""A header and rows."""
Section = tuple[str, str, Table]
"""Title, text, table."""
COLORS = {
    "blue": "#0072b2",
    "vermilion": "#d55e00",
    "green": "#009e73",
    "pink": "#cc79a7",
    "orange": "#e69f00",
}
"""Colors of the best configurations; the curves of all others are gray."""
ABOUT_PLOTS = {
    "Learning curves": "Median at each evaluation over the seeds that did not diverge. The best "
    "configurations are colored; all others are gray.",
    "Score by hyperparameter": "A dot is a trial; the line, or the bar of a category, is the "
    "median of all trials with that value. Values for which all trials diverged are not shown.",
}
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


class Summary(NamedTuple):
    """A configuration, the results of its trials (None: not finished), and their scores on dev."""

    configuration: Configuration
    results: list[dict | None]
    scores: list[float]
    metric: str

    @property
    def median(self) -> float:
        """The median score, where a diverged seed counts as -inf; -inf if there is none."""
        num_diverged = sum(result is not None for result in self.results) - len(self.scores)
        scores = [*self.scores, *[-math.inf] * num_diverged]
        return statistics.median(scores) if scores else -math.inf

    @property
    def scored(self) -> list[dict]:
        """The results of the seeds that did not diverge."""
        return [result for result in self.results if result and "diverged" not in result]

    def notes(self) -> str:
        """Names the seeds that collapsed, diverged or are not finished."""
        seeds: dict[str, list[str]] = {}
        for trial, result in zip(self.configuration.trials, self.results, strict=True):
            seeds.setdefault(status(result), []).append(str(trial.config.seed))
        seeds.pop("finished", None)
        return "; ".join(f"{note}: seed {', '.join(own)}" for note, own in seeds.items())

    def curve(self) -> tuple[list[int], list[float]]:
        """Returns the steps of the evaluations, and the median score over the seeds at each."""
        scores: dict[int, list[float]] = {}
        for trial, result in zip(self.configuration.trials, self.results, strict=True):
            if result and "diverged" not in result:
                for line in (trial.workdir / "metrics.jsonl").read_text().splitlines():
                    record = json.loads(line)
                    if self.metric in record:
                        scores.setdefault(record["step"], []).append(record[self.metric])
        return sorted(scores), [statistics.median(scores[step]) for step in sorted(scores)]


Legend = Sequence[tuple[str, Summary]]
"""The names of the colors of the best configurations."""


def write(
    workdir: pathlib.Path, config: ConfigDict, configurations: Sequence[Configuration], metric: str
) -> dict:
    """Writes the files; returns the best configuration, the counts and the page's path."""
    summaries = [summarize(configuration, metric) for configuration in configurations]
    ranked = sorted(summaries, key=lambda summary: -summary.median)
    best = ranked[0]
    has_best = best.median > -math.inf
    scores = summarize_seeds(best.scored, metric)["scores"] if has_best else {}
    write_text(workdir / "trials.csv", trials_table(summaries))
    sections = [
        ("What was run", "All settings are in sweep.json.", settings_table(config, summaries)),
        ("Best configuration", about_best(best), scores_table(scores)),
        ("Configurations", ABOUT_RANKING, ranking_table(ranked)),
    ]
    plots, legend = draw_plots(summaries, ranked), list(zip(COLORS, ranked, strict=False))
    for name, svg in plots.items():
        write_text(workdir / svg_name(name), svg)
    write_text(workdir / "report.md", markdown_page(sections, plots, legend))
    write_text(workdir / "report.html", html_page(sections, plots, legend))
    statuses = [status(result).split()[0] for summary in summaries for result in summary.results]
    return {
        "metric": metric,
        "trials": {name: statuses.count(name) for name in dict.fromkeys(statuses)},
        "best_configuration": best.configuration.values if has_best else None,
        "best_trial": str(best_trial(best).workdir) if has_best else None,
        "medians_of_best_configuration": {name: value["median"] for name, value in scores.items()},
        "report": str(workdir / "report.html"),
    }


def summarize(configuration: Configuration, metric: str) -> Summary:
    """Reads the results of a configuration."""
    summary = Summary(configuration, [trial.result for trial in configuration.trials], [], metric)
    split, _, name = metric.rpartition("/")
    return summary._replace(scores=[result[split][name] for result in summary.scored])


def best_trial(summary: Summary) -> Trial:
    """Returns the trial of a configuration with the best score on dev."""
    pairs = zip(summary.configuration.trials, summary.results, strict=True)
    scored = [trial for trial, result in pairs if result in summary.scored]
    return scored[summary.scores.index(max(summary.scores))]


def status(result: dict | None) -> str:
    if result is None:
        return "not finished"
    if "diverged" in result:
        return f"diverged at step {result['diverged']}"
    return "collapsed" if result.get("collapsed") else "finished"


def settings_table(config: ConfigDict, summaries: Sequence[Summary]) -> Table:
    """Returns what was run: the names and values of the main settings."""
    base, fields = config.base, summaries[0].configuration.values
    rows = [["setting", "value"], ["task", base.task], ["init_from", base.init_from]]
    for name in ("name", "directory", "train", "dev", "test", "passages"):
        if base.data.get(name) and f"data.{name}" not in fields:
            rows.append([f"data.{name}", base.data[name]])
    for name, values in flatten_dict(config.get("grid", ConfigDict()).to_dict(), sep=".").items():
        if name not in fields:
            rows.append([name, format_value(values[0])])
    for name in fields:
        values = list(dict.fromkeys(summary.configuration.values[name] for summary in summaries))
        text = "; ".join(map(format_value, values))
        if len(values) > 12 and all(isinstance(value, int | float) for value in values):
            low, high = format_value(min(values)), format_value(max(values))
            text = f"{len(values)} values from {low} to {high}"
        rows.append([f"values of {name}", text])
    count = sum(result is not None for summary in summaries for result in summary.results)
    seeds = [str(trial.config.seed) for trial in summaries[0].configuration.trials]
    trials = f"{len(summaries)} configurations x {len(seeds)} seeds ({', '.join(seeds)}); "
    rows.append(["trials", f"{trials}{count} have ended"])
    return [*rows, ["metric (higher is better)", summaries[0].metric]]


def ranking_table(ranked: Sequence[Summary]) -> Table:
    """Returns a row per configuration."""
    header = [
        *ranked[0].configuration.values,
        "median",
        "std",
        "min",
        "max",
        "scores by seed",
        "notes",
    ]
    rows = []
    for summary in ranked:
        numbers, scores = [summary.median, math.nan, math.nan, math.nan], summary.scores
        if scores:
            deviation = statistics.stdev(scores) if len(scores) > 1 else math.nan
            numbers[1:] = deviation, min(scores), max(scores)
        cells = [*map(format_value, summary.configuration.values.values())]
        cells += [f"{x:.4f}" if math.isfinite(x) else "" for x in numbers]
        rows.append([*cells, ", ".join(f"{x:.4f}" for x in scores), summary.notes()])
    return [header, *rows]


def scores_table(scores: dict[str, dict[str, float]]) -> Table:
    """Returns a row per split and score, from the result of `summarize_seeds`."""
    names = ("median", "min", "max")
    rows = [[key, *(f"{value[name]:.4f}" for name in names)] for key, value in scores.items()]
    return [["score", *names], *rows]


def trials_table(summaries: Sequence[Summary]) -> str:
    """Returns a row per trial as CSV, with unrounded scores."""
    rows = []
    for summary in summaries:
        for trial, result in zip(summary.configuration.trials, summary.results, strict=True):
            row = {"trial": trial.workdir.name}
            row |= {
                name: format_value(value) for name, value in summary.configuration.values.items()
            }
            row |= {"seed": trial.config.seed, "status": status(result)}
            median = summary.median if math.isfinite(summary.median) else None
            row["median_with_diverged_as_worst"] = median  # Of the configuration: it is ranked by.
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
    """Returns the best configuration as text."""
    if best.median == -math.inf:
        return "No configuration has a median score."
    return (
        f"{best.configuration}: median {best.metric} {best.median:.4f}. The configuration was "
        "chosen by this score, which is therefore optimistic; those on other splits are not. The "
        f"table is over the {len(best.scores)} of {len(best.results)} seeds with a score. The "
        f"best of them is in trials/{best_trial(best).workdir.name}, which bert_jax.load reads."
    )


def svg_name(plot: str) -> str:
    return f"{plot.replace(' ', '_')}.svg"


def markdown_page(sections: Sequence[Section], plots: dict[str, str], legend: Legend) -> str:
    parts = [f"# {TITLE}"]
    for title, text, table in sections:
        lines = [table[0], ["---"] * len(table[0]), *table[1:]]
        rows = [f"| {' | '.join(line).replace(chr(10), ' ')} |" for line in lines]
        parts += [f"## {title}", text, "\n".join(rows)]
    curves, *panels = (f"![{name}]({svg_name(name)})" for name in plots)
    colors = "\n".join(f"- {color}: {summary.configuration}" for color, summary in legend)
    for (title, text), images in zip(ABOUT_PLOTS.items(), ([curves, colors], panels), strict=True):
        parts += [f"## {title}", text, *images]
    return "\n\n".join([*parts, "trials.csv has each trial."]) + "\n"


def html_page(sections: Sequence[Section], plots: dict[str, str], legend: Legend) -> str:
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
    curves, *panels = (
        f'<img alt="{html.escape(name)}" src="data:image/svg+xml;base64,'
        f'{base64.b64encode(svg.encode()).decode()}">'
        for name, svg in plots.items()
    )
    named = ((COLORS[color], html.escape(str(summary.configuration))) for color, summary in legend)
    entries = (f'<li style="border-color: {color}"><span>{name}</span>' for color, name in named)
    curves += f"\n<ul class=legend>{''.join(entries)}</ul>"
    panels = f"<div class=panels>{''.join(panels)}</div>"
    for (title, text), images in zip(ABOUT_PLOTS.items(), (curves, panels), strict=True):
        parts += [f"<h2>{title}</h2>\n<p>{text}</p>", images]
    return "\n".join([*parts, "</html>\n"])


def draw_plots(summaries: Sequence[Summary], ranked: Sequence[Summary]) -> dict[str, str]:
    """Returns the plots as SVG, by name: the learning curves, then the score by each field."""

    def draw(width, height, name, draw_axis):
        # Without random ids and the date, the same scores give the same file.
        with matplotlib.rc_context({"svg.hashsalt": "sweep", "font.size": 10}):
            figure = Figure((width, height), layout="constrained")
            axis = figure.subplots()
            draw_axis(axis)
            axis.set_title(name)
            axis.grid(alpha=0.3)
            file, no_metadata = io.StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(file, format="svg", metadata=no_metadata)
        return file.getvalue()

    name = "Score during training"
    plots = {name: draw(5.2, 3.4, name, lambda axis: draw_curves(axis, ranked))}
    for field in summaries[0].configuration.values:
        name = f"Score by {field}"
        plots[name] = draw(4, 3, name, lambda axis, field=field: draw_field(axis, summaries, field))
    return plots


def draw_curves(axis: Axes, ranked: Sequence[Summary]) -> None:
    """Plots the score on dev over steps, with a line per configuration, the best in front."""
    for rank, summary in reversed(list(enumerate(ranked))):
        steps, scores = summary.curve()
        color = [*COLORS.values()][rank] if rank < len(COLORS) else "#b5b5b5"
        style = {"marker": "o" if len(steps) < 20 else "", "markersize": 3, "linewidth": 1.3}
        axis.plot(steps, scores, color=color, **style)
    axis.set_xlabel("training step")
    axis.set_ylabel(f"median {ranked[0].metric}")
    axis.xaxis.set_major_locator(ticker.MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def draw_field(axis: Axes, summaries: Sequence[Summary], name: str) -> None:
    """Plots the score of every trial against the value of a field, and the median per value."""
    scores: dict[object, list[float]] = {}
    for summary in summaries:
        scores.setdefault(summary.configuration.values[name], []).extend(summary.scores)
    values = [value for value in scores if scores[value]]
    is_number = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    values = sorted(values) if is_number else values
    positions = values if is_number else list(range(len(values)))
    is_log = is_number and name.endswith("learning_rate")
    axis.set_xscale("log" if is_log else "linear")
    dots, bars = COLORS["blue"], COLORS["vermilion"]
    for position, value in zip(positions, values, strict=True):
        axis.plot([position] * len(scores[value]), scores[value], "o", color=dots, alpha=0.45)
    medians = [statistics.median(scores[value]) for value in values]
    style = "-" if is_number else "_"  # A line would give categories an order.
    axis.plot(positions, medians, style, color=bars, linewidth=1.3, markersize=12)
    axis.margins(x=0.1)
    axis.set_xlabel(f"{name}, log scale" if is_log else name)
    axis.set_ylabel(summaries[0].metric)
    if len(values) <= 8 or not is_number:
        axis.xaxis.set_minor_locator(ticker.NullLocator())
        label_values(axis, positions, [textwrap.fill(format_value(value), 16) for value in values])


def label_values(axis: Axes, positions: Sequence[float], labels: Sequence[str]) -> None:
    """Labels positions of the x-axis: horizontally or, if they overlap, rotated where they fit."""
    for rotation in (0, 90):
        axis.set_xticks(positions, labels, rotation=rotation)
        axis.figure.draw_without_rendering()
        fitting, end = [], -math.inf
        for label, text in zip(labels, axis.get_xticklabels(), strict=True):
            box = text.get_window_extent()
            fits = box.x0 > end + 5  # Pixels.
            fitting.append(label if fits else "")
            end = box.x1 if fits else end
        if all(fitting):
            return
    axis.set_xticks(positions, fitting, rotation=90)
