"""The plots of a sweep show all of its configurations, with labels that do not overlap."""

import itertools
import math

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bert_jax.sweeps import plots
from bert_jax.sweeps.configurations import Configuration
from bert_jax.sweeps.summaries import FractionCurve, Summary


def draw_scores(name: str, values: tuple) -> Axes:
    """Draws three scores of each value of a field."""
    figure = Figure((4, 3), layout="constrained")
    points = [Configuration({name: value}, []) for value in values]
    scores = [0.5, 0.6, 0.9]
    summaries = [Summary(point, [], scores, "dev/accuracy") for point in points]
    plots.draw_field(figure.subplots(), summaries, name)
    figure.draw_without_rendering()
    return figure.axes[0]


LABELS = {
    "a search": ("learning_rate", tuple(1e-5 * 1.07**n for n in range(34)), 3),
    "many decades": ("learning_rate", tuple(10.0 ** (-n) for n in range(1, 12)), 4),
    "many numbers": ("warmup_fraction", tuple(0.013 * n for n in range(16)), 4),
    "three": ("learning_rate", (2e-5, 3e-5, 5e-5), 3),
    "five": ("learning_rate", (1e-5, 2e-5, 3e-5, 4e-5, 5e-5), 5),
    "close": ("learning_rate", (3e-5, 3.01e-5, 3.02e-5, 1e-3), 2),
    "long": ("data.train", ("runs/a/long/path/first.csv", "runs/a/long/path/second.csv", "b"), 3),
    "many": ("features", tuple(f"choice {number}" for number in range(40)), 10),
}


@pytest.mark.parametrize("case", LABELS)
def test_labels_of_the_values_of_a_field_do_not_overlap(case):
    name, values, count = LABELS[case]
    axis = draw_scores(name, values)
    labels = [label for label in axis.get_xticklabels() if label.get_text()]
    boxes = [label.get_window_extent() for label in labels]
    assert len(boxes) >= count
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_only_medians_of_numbers_are_connected():
    for name, values, style in (("batch_size", (16, 32), "-"), ("features", ("a", "b"), "None")):
        line = draw_scores(name, values).lines[-1]
        assert list(line.get_ydata()) == [0.6, 0.6] and line.get_linestyle() == style


@pytest.mark.parametrize("values", [(1e-5, 2e-5), ("a", "b")])
def test_field_without_scores_is_an_empty_plot(values):
    points = [Configuration({"learning_rate": value}, []) for value in values]
    diverged = [Summary(point, [{"diverged": 3}], [], "dev/accuracy") for point in points]
    axis = draw(lambda axis, results: plots.draw_field(axis, results, "learning_rate"), diverged)
    assert [len(line.get_xdata()) for line in axis.lines] == [0]


def search_results() -> list[Summary]:
    """Six configurations of a search with halving; the third one diverged."""
    summaries = []
    for number in range(6):
        values = {
            "batch_size": (16, 32)[number % 2],
            "learning_rate": 10.0 ** -(number + 1),
            "num_epochs": 1.0 if number < 4 else 3.0,
        }
        diverged = number == 2
        results = [{"diverged": 3} if diverged else {"dev": {"accuracy": number / 10}}]
        scores = [] if diverged else [number / 10]
        summaries.append(Summary(Configuration(values, []), results, scores, "dev/accuracy"))
    return summaries


def draw(function, summaries) -> Axes:
    figure = Figure((8, 4), layout="constrained")
    function(figure.subplots(), summaries)
    figure.draw_without_rendering()
    return figure.axes[0]


def test_course_of_a_search_has_a_point_for_each_configuration_and_the_best_so_far():
    axis = draw(plots.draw_progress, search_results())
    *points, best = axis.lines
    assert [point.get_xdata()[0] for point in points] == [1, 2, 3, 4, 5, 6]
    assert points[2].get_marker() == "x"
    assert len({point.get_color() for point in points[:2] + points[3:]}) == 2  # By epochs.
    assert list(best.get_ydata()) == [0, 0.1, 0.1, 0.3, 0.4, 0.5]


def test_parallel_coordinates_have_a_line_for_each_configuration():
    ranked = sorted(search_results(), key=lambda summary: -summary.median)
    axis = draw(plots.draw_parallel, ranked)
    lines = axis.lines[4:]  # After the axes.
    assert len(lines) == 6 and {len(line.get_xdata()) for line in lines} == {4}
    scores = [line.get_ydata()[-1] for line in reversed(lines)]
    assert scores[:5] == pytest.approx([1, 0.8, 0.6, 0.2, 0]) and scores[5] < 0
    assert [line.get_linestyle() for line in lines] == [":", *["-"] * 5]
    rates = [line.get_ydata()[1] for line in reversed(lines)]
    assert rates == pytest.approx([0, 0.2, 0.4, 0.8, 1, 0.6])  # Of a logarithmic axis.


@pytest.mark.parametrize(
    ("values", "is_log", "labels"),
    [
        ((16, 32), False, ["16", "32"]),
        ((32, 16, 16), False, ["16", "32"]),
        (("a", None), False, ["a", "default"]),
        ((1e-5, 2e-5, 3e-5, 5e-5, 1e-4), True, ["1e-05", "2e-05", "5e-05", "0.0001"]),
        ((0, 1, 2, 3, 4), False, ["0", "1", "2", "3", "4"]),
    ],
)
def test_axis_of_parallel_coordinates_has_the_values_in_order(values, is_log, labels):
    heights, ticks = plots.scale_values(values, is_log)
    assert [label for _, label in ticks] == labels
    assert all(0 <= height <= 1 for height in heights)
    by_value = dict(zip(values, heights, strict=True))
    if plots.is_numeric(values):
        assert sorted(by_value, key=by_value.get) == sorted(by_value)
    assert all(math.isfinite(height) for height, _ in ticks)


def test_learning_curves_have_the_median_of_each_fraction_and_bars_over_the_seeds():
    scores = {0.01: [], 0.3: [0.5, 0.4, 0.7], 1.0: [0.8, 0.9, 0.8]}
    point = Configuration({}, [])
    by_fraction = {
        fraction: Summary(point, [{}] * 3 if own else [{"diverged": 2}], own, "dev/f1")
        for fraction, own in scores.items()
    }
    axis = draw(plots.draw_fractions, [FractionCurve("base", by_fraction)] * 6)
    gray, *_, first = axis.containers
    line, _, (bars,) = first
    assert list(line.get_xdata()) == [0.3, 1.0] and list(line.get_ydata()) == [0.5, 0.8]
    ends = [[y for _, y in segment] for segment in bars.get_segments()]
    assert ends == [pytest.approx([0.4, 0.7]), pytest.approx([0.8, 0.9])]
    assert not gray.has_yerr and line.get_color() == plots.color_of_rank(0)
    assert axis.get_xscale() == "log" and axis.get_ylabel() == "median dev/f1"
    assert [each.get_text() for each in axis.get_xticklabels()] == ["0.01", "0.3", "1"]
