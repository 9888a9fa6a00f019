"""Learning curves over fractions of train: which examples and trials there are, and the report."""

import csv
import itertools
import json
import re
from types import SimpleNamespace

import pytest

from bert_jax.configs.sweeps import paper
from bert_jax.sweeps import plots, report, settings
from bert_jax.sweeps.configurations import grid_overrides, make_configurations
from bert_jax.sweeps.weights import rank_trials
from bert_jax.tasks.task import OUTSIDE_FRACTION, limit_examples

SCORES = {0.1: (0.5, 0.6, 0.4), 0.3: (0.7, None, 0.8), 1.0: (0.9, 0.85, 0.95)}
"""By fraction and seed, of the first configuration; None: diverged."""


def small_sweep(fractions, grid=None, trials=(), seeds=1, **base):
    config = paper.get_config("text_classification").unlock()
    del config.grid
    config.grid = {"learning_rate": (1e-3, 2e-3)} if grid is None else grid
    config.train_fractions, config.trials, config.num_seeds = fractions, trials, seeds
    config.base.update(base)
    return config.lock()


def make(config, directory):
    return make_configurations(config, grid_overrides(config), directory / "trials")


def kept(count, fraction, limit=0, split="train"):
    config = SimpleNamespace(max_train_examples=limit, max_eval_examples=0, train_fraction=fraction)
    notes = {}
    examples = limit_examples(range(count), config, split, notes)
    dropped = max(count - limit, 0) if limit else 0
    assert notes.get(f"{split} examples dropped", 0) == dropped
    assert notes.get(OUTSIDE_FRACTION, 0) == count - dropped - len(examples)
    return list(examples)


@pytest.mark.parametrize("limit", [0, 50])
def test_smaller_fraction_of_train_is_part_of_a_larger_one_in_the_order_of_the_file(limit):
    fractions = 0.02, 0.1, 0.35, 0.8, 1.0
    subsets = [kept(97, fraction, limit) for fraction in fractions]
    assert [len(each) for each in subsets] == [round(each * (limit or 97)) for each in fractions]
    for smaller, larger in itertools.pairwise(subsets):
        assert set(smaller) < set(larger) and smaller == sorted(smaller)
    assert subsets[-1] == kept(97, 0.0, limit)
    assert subsets[1] != subsets[-1][: len(subsets[1])]  # The file may be sorted by its labels.


def test_fraction_of_train_leaves_other_splits_as_they_are():
    assert kept(9, 0.3, split="dev") == list(range(9)) and kept(0, 0.3) == []


def test_fraction_without_an_example_is_refused():
    with pytest.raises(ValueError, match=r"^config\.train_fraction=0\.04: .* 10 .* 0\.05"):
        kept(10, 0.04)


def test_each_configuration_and_seed_is_trained_on_each_fraction(tmp_path):
    points = make(small_sweep((0.1, 1), trials=({"batch_size": 4},), seeds=2), tmp_path)
    trials = [trial for point in points for trial in point.trials]
    assert len(points) == 6 and len(trials) == 12
    assert [trial.config.train_fraction for trial in trials] == [0.1, 0.1, 1, 1] * 3
    assert "train_fraction=0.1" in trials[0].workdir.name
    alone = make(small_sweep((0.1, 0.5), grid={}), tmp_path)
    assert [point.values for point in alone] == [{"train_fraction": 0.1}, {"train_fraction": 0.5}]
    (single,) = make(small_sweep((0.5,), grid={}), tmp_path)
    assert not single.values and single.trials[0].config.train_fraction == 0.5


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"fractions": (0.0, 0.5)}, "config.train_fractions"),
        ({"fractions": (0.5, 1.1)}, "config.train_fractions"),
        ({"fractions": (float("nan"),)}, "config.train_fractions"),
        ({"fractions": ("half",)}, "config.train_fractions"),
        ({"fractions": (0.5, 1, 1.0)}, "config.train_fractions"),
        (
            {"fractions": (0.5,), "grid": {"max_train_examples": (8, 9)}},
            "config.grid.max_train_examples",
        ),
        (
            {"fractions": (0.5,), "trials": ({"max_train_examples": 8},)},
            r"trials[0].max_train_examples",
        ),
        ({"fractions": (), "grid": {"train_fraction": (0.1,)}}, "config.grid.train_fraction"),
    ],
)
def test_invalid_fractions_and_a_second_way_to_set_them_are_refused(fields, place):
    with pytest.raises(ValueError, match=f"^{re.escape(place)}[=:]"):
        settings.complete(small_sweep(**fields))


def test_sweep_grows_by_a_fraction(tmp_path):
    before, after = small_sweep((0.1, 1.0)), small_sweep((0.1, 0.3, 1.0))
    write_settings(tmp_path, before)
    assert settings.check_directory(tmp_path, after) == {}
    write_settings(tmp_path, after)
    with pytest.raises(ValueError, match=r"train_fraction=0\.3,seed=0 and 1 more, .* shrink"):
        settings.check_directory(tmp_path, before)


def test_sweep_of_an_earlier_version_resumes_without_fractions(tmp_path):
    config = small_sweep(())
    stored = settings.settings_of(config)
    del stored["train_fractions"], stored["base"]["train_fraction"]
    write_settings(tmp_path, config, stored)
    assert settings.check_directory(tmp_path, config) == {}


def write_settings(workdir, config, stored=None):
    content = {"config": stored or settings.settings_of(config), "programs": {}}
    (workdir / "sweep.json").write_text(json.dumps(content))


def rows_of(text, title):
    section = text.partition(f"## {title}")[2].partition("\n## ")[0]
    return [
        line.strip("| ").split(" | ") for line in section.splitlines() if line[:3] in ("| c", "| l")
    ]


@pytest.mark.parametrize("seeds", [1, 3])
def test_report_has_a_learning_curve_of_each_configuration(tmp_path, monkeypatch, seeds):
    monkeypatch.setattr(plots, "draw", lambda *_: "<svg></svg>")  # tests/sweeps/test_plots.py.
    config = small_sweep(tuple(SCORES), seeds=seeds)
    points = make(config, tmp_path)
    for point in points:
        fraction, penalty = point.values["train_fraction"], 0
        if point.values["learning_rate"] == 1e-3:  # A lucky score of 0.3 is not the best.
            penalty = -0.25 if fraction == 0.3 else 0.3
        for trial, score in zip(point.trials, SCORES[fraction], strict=False):
            trial.workdir.mkdir(parents=True)
            (trial.workdir / "metrics.jsonl").write_text("")
            result = (
                {"dev": {"accuracy": score - penalty}, "seconds": 1.0} if score else {"diverged": 3}
            )
            result |= {"train_features": round(2000 * fraction)} if score else {}
            trial.result_path.write_text(json.dumps({"seed": trial.config.seed} | result))
    found = report.write(tmp_path, config, points, "dev/accuracy")
    assert found["best_configuration"] == {"learning_rate": 2e-3, "train_fraction": 1.0}
    text = (tmp_path / "report.md").read_text()
    header, best, second = rows_of(text, "Learning curves")
    counts = {"0.1": "200", "0.3": "600", "1": "2,000"}
    assert header[1:] == [
        f"train_fraction={fraction} ({count} training features)"
        for fraction, count in counts.items()
    ]
    table = csv.DictReader((tmp_path / "trials.csv").read_text().splitlines())
    assert {(x["train_fraction"], x["train_features"]) for x in table if x["dev/accuracy"]} == {
        (fraction, count.replace(",", "")) for fraction, count in counts.items()
    }
    ranked = [trial.config.train_fraction for trial in rank_trials(points, "dev/accuracy")]
    assert ranked == sorted(ranked, reverse=True)
    assert best[0] == "learning_rate=0.002" and second[0] == "learning_rate=0.001"
    if seeds == 1:
        assert best[1:] == ["0.5000", "0.7000", "0.9000"]
    else:  # A diverged seed counts as worse than any score.
        ranges = [
            "0.5000 (0.4000 to 0.6000)",
            "0.7000 (0.7000 to 0.8000)",
            "0.9000 (0.8500 to 0.9500)",
        ]
        assert best[1:] == ranges
    assert "](Score_by_fraction_of_train.svg)" in text and "Score by train_fraction" not in text
    assert "| values of train_fraction | 0.1; 0.3; 1 |" in text
    page = (tmp_path / "report.html").read_text()
    assert '<img alt="Score by fraction of train"' in page and '<td class="number">0.7000' in page
    assert text.count("at the edge of its range") == 0
