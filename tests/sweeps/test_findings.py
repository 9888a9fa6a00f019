"""What a report says of the fields of a sweep, from the scores of its configurations."""

import math

import optuna
import pytest
from ml_collections import ConfigDict

from bert_jax.sweeps.configurations import Configuration
from bert_jax.sweeps.findings import MIN_CONFIGURATIONS, at_edges, importances
from bert_jax.sweeps.summaries import Summary

METRIC = "dev/f1"
GRID = ConfigDict({"grid": {}})


def scored(values: dict, score: float) -> Summary:
    result = {"dev": {"f1": score}} if score > -math.inf else {"diverged": 3}
    scores = [score] if score > -math.inf else []
    return Summary(Configuration(values, []), [result], scores, METRIC)


def search(**fields) -> ConfigDict:
    return ConfigDict({"search": fields, "halving": ()})


@pytest.mark.parametrize(
    ("tried", "best", "edge"),
    [
        ((1e-5, 2e-5, 5e-5), 5e-5, "larger"),
        ((5e-5, 1e-5, 2e-5), 1e-5, "smaller"),
        ((1e-5, 2e-5, 5e-5), 2e-5, None),
        ((1e-5, 5e-5), 5e-5, None),  # Each of two values is at an edge.
        ((0.0, 0.1, 0.2), 0.0, None),  # Nothing is below 0.
        ((0.0, 0.1, 0.2), 0.2, "larger"),
        ((2, 3, 4), 4, "larger"),
        ((None, 0.1, 0.2), 0.2, None),
        ((True, False), True, None),
        (("adamw", "lamb", "bert_adam"), "lamb", None),
        (((), (1.0, 5.0), (1.0, 9.0)), (1.0, 9.0), None),
    ],
)
def test_best_value_at_the_edge_of_a_grid_is_noted(tried, best, edge):
    summaries = [scored({"name": value}, 0.5) for value in tried]
    notes = at_edges(GRID, summaries, scored({"name": best}, 0.9))
    assert len(notes) == (edge is not None)
    assert all(f"{edge} values" in note and note.startswith("name=") for note in notes)


@pytest.mark.parametrize(
    ("distribution", "best", "edge"),
    [
        (("log_uniform", 1e-6, 1e-4), 1.2e-6, "smaller"),  # log(1.2) / log(100) = 0.04
        (("log_uniform", 1e-6, 1e-4), 1.3e-6, None),  # 0.057
        (("log_uniform", 1e-6, 1e-4), 8e-5, "larger"),  # 0.952
        (("uniform", 1e-6, 1e-4), 5e-6, "smaller"),
        (("uniform", 0.0, 0.2), 0.001, None),
        (("uniform", 0.0, 0.2), 0.191, "larger"),
        (("integer", 1, 100), 99, None),
        (("integer", 1, 100), 100, "larger"),
        (("choice", 16, 32, 64), 64, None),
    ],
)
def test_best_value_near_the_edge_of_a_distribution_is_noted(distribution, best, edge):
    summary = scored({"name": best, "num_epochs": 3.0}, 0.9)
    notes = at_edges(search(name=distribution), [summary], summary)
    assert len(notes) == (edge is not None)
    assert all(f"{edge} values" in note for note in notes)


def score_of(values: dict) -> float:
    return -abs(math.log(values["learning_rate"] / 3e-5)) + 0.1 * (values["name"] == "b")


def optuna_importances(distributions: dict, count: int) -> tuple[list[dict], dict[str, float]]:
    """Returns proposals of an Optuna study, and the importances that it has itself."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(count):
        trial = study.ask(distributions)
        study.tell(trial, score_of(trial.params))
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    values = [trial.params for trial in study.trials]
    return values, optuna.importance.get_param_importances(study, evaluator=evaluator)


@pytest.mark.parametrize("halving", [(), (1.0, 3.0)])
def test_importance_of_a_search_is_that_of_its_study(halving):
    """Configurations that diverged, or were trained further, do not count."""
    distributions = {
        "learning_rate": optuna.distributions.FloatDistribution(1e-6, 1e-4, log=True),
        "steps": optuna.distributions.IntDistribution(1, 9),
        "name": optuna.distributions.CategoricalDistribution(["a", "b"]),
    }
    proposed, expected = optuna_importances(distributions, 40)
    config = search(
        learning_rate=("log_uniform", 1e-6, 1e-4),
        steps=("integer", 1, 9),
        name=("choice", "a", "b"),
    )
    config.halving = halving
    summaries = [scored(values | {"num_epochs": 1.0}, score_of(values)) for values in proposed]
    summaries += [scored(proposed[0] | {"num_epochs": 1.0}, -math.inf)] * 9
    if halving:
        summaries += [scored(values | {"num_epochs": 3.0}, 5.0) for values in proposed[:9]]
    found = importances(config, summaries)
    assert list(found) == list(expected)
    assert found == pytest.approx(expected)
    assert max(found, key=found.get) == "learning_rate"


def test_importance_of_a_grid_needs_two_fields_and_enough_configurations():
    values = [
        {"learning_rate": rate, "class_weights": weights}
        for rate in (1e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
        for weights in ((), (1.0, 2.0), (1.0, 5.0))
    ]
    summaries = [scored(each, score_of(each | {"name": "a"})) for each in values]
    found = importances(GRID, summaries)
    assert list(found) == ["learning_rate", "class_weights"]
    assert sum(found.values()) == pytest.approx(1)
    assert not importances(GRID, summaries[: MIN_CONFIGURATIONS - 1])
    single = [scored({"learning_rate": each["learning_rate"]}, 0.5) for each in values]
    assert not importances(GRID, single)
