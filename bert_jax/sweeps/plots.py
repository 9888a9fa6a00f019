"""The plots of a sweep.

Training and learning curves, scores by field and by trial, parallel coordinates.
"""

import io
import itertools
import math
import statistics
import textwrap
from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bert_jax.sweeps.configurations import format_value
from bert_jax.sweeps.summaries import FractionCurve, Summary, name_of_score

COLORS = {
    "blue": "#0072b2",
    "vermilion": "#d55e00",
    "green": "#009e73",
    "pink": "#cc79a7",
    "orange": "#e69f00",
}
"""Colors of the best configurations; all others are gray."""
GRAY = "#b5b5b5"
FEW_VALUES = 8  # Each of them gets a label.


def draw(width: float, height: float, name: str, draw_axis: Callable[[Axes], None]) -> str:
    """Returns a plot of `width` x `height` inches, which `draw_axis` draws, as SVG."""
    # Without random ids and the date, the same scores give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "sweep", "font.size": 11}):
        figure = Figure((width, height), layout="constrained")
        axis = figure.subplots()
        axis.set_title(name)
        axis.grid(alpha=0.3)
        draw_axis(axis)
        file, no_metadata = io.StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=no_metadata)
    return file.getvalue()


def draw_curves(axis: Axes, ranked: Sequence[Summary]) -> None:
    """Plots the score on dev over steps, with a line per configuration, the best in front."""
    for rank, summary in reversed(list(enumerate(ranked))):
        steps, scores = summary.curve()
        style = {"marker": "o" if len(steps) < 20 else "", "markersize": 3, "linewidth": 1.3}
        axis.plot(steps, scores, color=color_of_rank(rank), **style)
    axis.set_xlabel("training step")
    axis.set_ylabel(name_of_score(ranked))
    axis.xaxis.set_major_locator(round_ticks(6))


def draw_fractions(axis: Axes, curves: Sequence[FractionCurve]) -> None:
    """Plots the median score over the fractions of train, with a line per configuration.

    The bars of the colored ones are from the minimum to the maximum over seeds.
    """
    fractions = [*curves[0].by_fraction]
    is_log = is_logarithmic("train_fraction", fractions)
    axis.set_xscale("log" if is_log else "linear")
    for rank, curve in reversed(list(enumerate(curves))):
        known = [(x, own) for x, own in curve.by_fraction.items() if math.isfinite(own.median)]
        medians = [summary.median for _, summary in known]
        ranges = np.array(
            [(own.median - min(own.scores), max(own.scores) - own.median) for _, own in known]
        )
        bars = ranges.T if rank < len(COLORS) and ranges.any() else None
        style = {"marker": "o", "markersize": 3, "linewidth": 1.3, "capsize": 3}
        axis.errorbar([x for x, _ in known], medians, bars, color=color_of_rank(rank), **style)
    axis.set_xlabel("fraction of train, log scale" if is_log else "fraction of train")
    axis.set_ylabel(name_of_score([*curves[0].by_fraction.values()]))
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    label_values(axis, fractions, list(map(format_value, fractions)))


def round_ticks(count: int) -> ticker.MaxNLocator:
    """Returns a locator of at most `count` whole multiples of 1, 2 or 5."""
    return ticker.MaxNLocator(nbins=count, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])


def color_of_rank(rank: int) -> str:
    """Returns the color of the configuration at `rank`, 0 for the best."""
    return [*COLORS.values()][rank] if rank < len(COLORS) else GRAY


def is_numeric(values: Sequence[object]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def is_logarithmic(name: str, values: Sequence[float]) -> bool:
    """Returns whether the axis of a field is logarithmic: of rates, and of values far apart."""
    return min(values) > 0 and (name.endswith("learning_rate") or max(values) >= 20 * min(values))


def draw_field(axis: Axes, summaries: Sequence[Summary], name: str) -> None:
    """Plots the score of every trial against the value of a field, and the median per value.

    A field with many numbers, as in a search, has no medians. In a search with halving, trials with
    the same number of epochs have the same color (`color_of_epochs`).
    """
    scores: dict[object, list[tuple[float, str]]] = {}
    colors = color_of_epochs(summaries) if name != "num_epochs" else {}
    for summary in summaries:
        values = summary.configuration.values
        color = colors.get(values.get("num_epochs"), COLORS["blue"])
        scores.setdefault(values[name], []).extend((score, color) for score in summary.scores)
    values = [value for value in scores if scores[value]]
    is_number = is_numeric(values)
    values = sorted(values) if is_number else values
    positions = values if is_number else list(range(len(values)))
    # A field has no values if no trial has a score yet: all that have ended diverged.
    is_log = bool(values) and is_number and is_logarithmic(name, values)
    axis.set_xscale("log" if is_log else "linear")
    for position, value in zip(positions, values, strict=True):
        for score, color in scores[value]:
            axis.plot(position, score, "o", color=color, alpha=0.5)
    has_few_values = len(values) <= FEW_VALUES
    if has_few_values or not is_number:
        medians = [statistics.median(score for score, _ in scores[value]) for value in values]
        style = "-" if is_number else "_"  # A line would give categories an order.
        color = COLORS["vermilion"] if len(colors) < 2 else "#444444"
        axis.plot(positions, medians, style, color=color, linewidth=1.3, markersize=12)
    axis.margins(x=0.1)
    axis.set_xlabel(f"{name}, log scale" if is_log else name)
    axis.set_ylabel(summaries[0].metric)
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    if has_few_values or not is_number:
        label_values(axis, positions, [textwrap.fill(format_value(value), 16) for value in values])
    elif is_log:
        for digits in ((1, 2, 5), (1, 5), (1,)):
            ticks = round_numbers(*axis.get_xlim(), digits)
            if len(ticks) <= 5:
                break
        label_values(axis, ticks, list(map(format_value, ticks)))
    else:
        axis.xaxis.set_major_locator(ticker.MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))


def color_of_epochs(summaries: Sequence[Summary]) -> dict[float, str]:
    """Returns the color of each number of epochs of a search with halving; {} for other sweeps."""
    epochs = {summary.configuration.values.get("num_epochs") for summary in summaries}
    if None in epochs or len(epochs) > len(COLORS):
        return {}
    return dict(zip(sorted(epochs), COLORS.values(), strict=False))


def round_numbers(low: float, high: float, digits: Sequence[int] = (1, 2, 5)) -> list[float]:
    """Returns the numbers of one of the digits, such as 2e-5, between two positive numbers."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    numbers = (float(f"{digit}e{exponent}") for exponent in exponents for digit in digits)
    return [number for number in numbers if low <= number <= high]


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


def draw_progress(axis: Axes, summaries: Sequence[Summary]) -> None:
    """Plots the score of the configurations of a search in the order in which they were run.

    The line is the best score so far; a cross at the bottom has no score, as its seeds diverged.
    """
    colors = color_of_epochs(summaries)
    medians = [summary.median for summary in summaries]
    ended = [None not in summary.results for summary in summaries]
    for number, (summary, median) in enumerate(zip(summaries, medians, strict=True), 1):
        color = colors.get(summary.configuration.values.get("num_epochs"), COLORS["blue"])
        if math.isfinite(median):
            axis.plot(number, median, "o", color=color, alpha=0.7)
        elif ended[number - 1]:
            bottom = {"transform": axis.get_xaxis_transform(), "clip_on": False}
            axis.plot(number, 0, "x", color="black", **bottom)
    best = np.array(list(itertools.accumulate(medians, max)))
    numbers = np.arange(1, len(best) + 1)
    axis.step(numbers, np.where(np.isfinite(best), best, np.nan), where="post", color="#444444")
    axis.set_xlim(0.3, len(best) + 0.7)
    axis.set_xlabel("configuration, in the order of the search")
    axis.set_ylabel(name_of_score(summaries))
    axis.xaxis.set_major_locator(round_ticks(10))


def draw_parallel(axis: Axes, ranked: Sequence[Summary]) -> None:
    """Plots each configuration as a line through its values and its score.

    The best ones have their colors; one without a score is dotted, and ends at the bottom.
    """
    names = [*ranked[0].configuration.values]
    scored = [summary.median for summary in ranked if math.isfinite(summary.median)]
    columns = []  # Per axis, the heights of the configurations, in [0, 1].
    for position, name in enumerate([*names, ranked[0].metric]):
        if position < len(names):
            values = [summary.configuration.values[name] for summary in ranked]
            heights, ticks = scale_values(
                values, is_log=is_numeric(values) and is_logarithmic(name, values)
            )
        else:
            _, ticks = scale_values(scored or [0.0])
            low, high = min(scored, default=0.0), max(scored, default=1.0)
            shares = [(summary.median - low) / ((high - low) or 1) for summary in ranked]
            heights = [share if math.isfinite(share) else -0.08 for share in shares]
        columns.append(heights)
        axis.plot([position, position], [0, 1], color="#444444", linewidth=1)
        for height, label in ticks:
            text = textwrap.shorten(label, 18, placeholder="…")
            box = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.8}
            offset = {"xytext": (5, 0), "textcoords": "offset points", "bbox": box, "zorder": 4}
            axis.annotate(text, (position, height), fontsize=9, va="center", **offset)
    for rank in reversed(range(len(ranked))):
        is_scored = math.isfinite(ranked[rank].median)
        is_best = is_scored and rank < len(COLORS)
        style = {"linestyle": "-" if is_scored else ":", "linewidth": 2 if is_best else 1}
        color = color_of_rank(rank) if is_scored else "black"
        axis.plot([column[rank] for column in columns], color=color, zorder=2 + is_best, **style)
    labels = [textwrap.fill(name.replace(".", ". "), 16) for name in (*names, ranked[0].metric)]
    axis.set_xticks(range(len(columns)), labels)
    axis.set_yticks([])
    axis.grid(visible=False)
    axis.set_xlim(-0.2, len(columns) - 0.6)
    axis.spines[:].set_visible(False)


def scale_values(
    values: Sequence[object], is_log: bool = False
) -> tuple[list[float], list[tuple[float, str]]]:
    """Returns the heights of values on an axis, in [0, 1], and its labels with their heights."""
    distinct = list(dict.fromkeys(values))
    if not is_numeric(distinct) or len(distinct) <= 4:
        distinct = sorted(distinct) if is_numeric(distinct) else distinct
        places = {value: (n + 0.5) / len(distinct) for n, value in enumerate(distinct)}
        ticks = [(place, format_value(value)) for value, place in places.items()]
        return [places[value] for value in values], ticks
    scale = math.log if is_log else float
    low, high = min(distinct), max(distinct)

    def height(value):
        return (scale(value) - scale(low)) / (scale(high) - scale(low))

    linear = ticker.MaxNLocator(nbins=5, steps=[1, 2, 5, 10])
    inner = round_numbers(low, high) if is_log else linear.tick_values(low, high)
    inner = [value for value in inner if 0.08 < height(max(value, low)) < 0.92]
    ticks = [(height(value), f"{value:.3g}") for value in (low, *inner, high)]
    return [height(value) for value in values], ticks
