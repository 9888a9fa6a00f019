"""The report of a sweep says what was run, and shows scores as a reader needs them."""

import json
import re

import pytest

from bert_jax.configs.sweeps import paper, search
from bert_jax.sweeps import findings, report
from bert_jax.sweeps.configurations import grid_overrides, make_configurations
from bert_jax.sweeps.search import max_trials, rounds

LONG = 2 / 3  # Has 16 digits.


def finish(configurations, scores):
    """Writes results with the next of `scores` for each trial; None: diverged."""
    for trial in (trial for each in configurations for trial in each.trials):
        if trial.result_path.exists():
            continue
        trial.workdir.mkdir(parents=True)
        (trial.workdir / "metrics.jsonl").write_text('{"step": 3, "dev/accuracy": 0.5}\n')
        score, known = next(scores), {"seed": trial.config.seed, "metric": "dev/accuracy"}
        result = {"dev": {"accuracy": score, "loss": LONG}, "seconds": 1.0}
        trial.result_path.write_text(json.dumps(known | (result if score else {"diverged": 3})))


def report_of_grid(directory, num_seeds: int, scores, **grid) -> str:
    config = paper.get_config("text_classification").unlock()
    del config.grid
    config.grid = grid or {"learning_rate": (1e-3, 2e-3)}
    config.num_seeds, config.trials = num_seeds, ()
    points = make_configurations(config, grid_overrides(config), directory / "trials")
    finish(points, iter(scores))
    report.write(directory, config, points, "dev/accuracy")
    return (directory / "report.md").read_text()


def rows_of(text: str, first: str) -> list[list[str]]:
    """Returns the cells of the table whose header begins with `first`."""
    (table,) = re.findall(rf"^\| {first} \|.*\n(?:\|.*\n)+", text, re.MULTILINE)
    return [line.strip("| ").split(" | ") for line in table.splitlines() if "---" not in line]


@pytest.mark.parametrize("scores", [(LONG, 0.5), (LONG, None)])
def test_one_seed_has_a_score_and_no_median(tmp_path, scores):
    text = report_of_grid(tmp_path, 1, scores)
    assert rows_of(text, "metric") == [
        ["metric", "score"],
        ["dev/accuracy", "0.6667"],
        ["dev/loss", "0.6667"],
    ]
    header, best, second = rows_of(text, "learning_rate")
    assert header == ["learning_rate", "score", "notes"] and best[:2] == ["0.001", "0.6667"]
    assert second[1].strip("| ") == ("0.5000" if scores[1] else "")
    assert "learning_rate=0.001: dev/accuracy 0.6667. The configuration" in text
    page = (tmp_path / "report.html").read_text()
    for words in (text, re.sub("src=.*?>", "", page)):
        ranking = words.partition("Score by hyperparameter")[0]  # Its medians are over trials.
        assert not re.search(r"\bmedian\b|\bstd\b|\bmin\b|\bmax\b", ranking.split("</style>")[-1])
    assert "2 configurations x 1 seed (0) = 2 trials, of which 2 have ended" in text


def test_several_seeds_have_their_median_and_range(tmp_path):
    text = report_of_grid(tmp_path, 3, (0.7, 0.8, LONG, 0.5, 0.5, None))
    assert rows_of(text, "metric")[:2] == [
        ["metric", "median", "min", "max"],
        ["dev/accuracy", "0.7000", "0.6667", "0.8000"],
    ]
    header, best, _ = rows_of(text, "learning_rate")
    assert header[1:] == ["median", "std", "min", "max", "scores by seed", "notes"]
    assert best[5].strip("| ") == "0.7000, 0.8000, 0.6667"
    assert "2 configurations x 3 seeds (0, 1, 2) = 6 trials, of which 6 have ended" in text


def test_best_value_at_an_edge_is_noted_and_the_importance_of_each_field_given(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(findings, "MIN_CONFIGURATIONS", 6)
    grid = {"learning_rate": (1e-3, 2e-3, 4e-3), "batch_size": (16, 32)}
    scores = 0.5, 0.51, 0.6, 0.61, 0.7, 0.71
    text = report_of_grid(tmp_path, 1, scores, **grid)
    best = text.partition("## Configurations")[0]
    assert "learning_rate=0.004 is at the edge" in best and "batch_size=32 is at" not in best
    rows = rows_of(text, "field")
    assert rows[0] == ["field", "importance"]
    assert sorted(name for name, _ in rows[1:]) == ["batch_size", "learning_rate"]
    assert sum(float(value) for _, value in rows[1:]) == pytest.approx(1, abs=0.011)


@pytest.mark.slow
@pytest.mark.parametrize("num_seeds", [1, 2])
def test_search_with_halving_counts_what_it_proposed_and_what_it_trained(tmp_path, num_seeds):
    config = search.get_config().unlock()
    config.num_trials, config.trials_per_round, config.halving = 6, 6, (1.0, 3.0)
    config.num_seeds = num_seeds
    points, scores = [], iter(n / 100 for n in range(50, 90))
    for each in rounds(config, tmp_path / "trials"):
        finish(each, scores)
        points += each
    assert len(points) == 8 and max_trials(config) == 8 * num_seeds
    report.write(tmp_path, config, points, "dev/accuracy")
    seeds = ("1 seed (0) = 8 trials", "2 seeds (0, 1) = 16 trials")[num_seeds - 1]
    assert (
        "| trials | 6 different configurations proposed (num_trials=6), the best of them trained "
        f"again with more epochs: 6 with num_epochs=1, 2 with num_epochs=3 x {seeds}, of which "
        f"{8 * num_seeds} have ended |"
    ) in (tmp_path / "report.md").read_text()


def test_search_without_halving_counts_its_configurations_once(tmp_path):
    config = search.get_config().unlock()
    config.num_trials, config.trials_per_round, config.halving = 3, 3, ()
    (points,) = (finish(each, iter((0.5, 0.6, 0.7))) or each for each in rounds(config, tmp_path))
    summaries = [report.summarize(each, "dev/accuracy") for each in points]
    counted = report.count_trials(config, summaries)
    assert counted == "3 different configurations proposed (num_trials=3) x 1 seed (0) = 3 trials"
