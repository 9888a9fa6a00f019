"""A search proposes the same configurations when resumed, and drops the worse ones early."""

import json
import re

import pytest

from bert_jax import sweep
from bert_jax.configs.sweeps import search
from bert_jax.sweeps.search import max_trials, rounds
from bert_jax.sweeps.settings import check_directory, complete, settings_of


def small_search(**changes):
    config = search.get_config().unlock()
    config.num_trials, config.trials_per_round, config.halving = 12, 6, (1.0, 3.0)
    config.update(changes)
    return config.lock()


def run(config, directory, score, stop_after=None) -> list[str]:
    """Runs the rounds with invented scores; returns the names of the trials that were run."""
    names = []
    for number, points in enumerate(rounds(config, directory)):
        for trial in (trial for point in points for trial in point.trials):
            if not trial.result_path.exists():
                names.append(trial.workdir.name)
                result = {"seed": 0, "metric": "dev/accuracy"} | score(trial.config)
                trial.workdir.mkdir(parents=True)
                trial.result_path.write_text(json.dumps(result))
        if number == stop_after:
            break
    return names


def near(optimum):
    """Returns a score whose maximum is at a learning rate; small rates diverge."""

    def score(config):
        if config.learning_rate < 1.3e-5:
            return {"diverged": 3}
        distance = abs(config.learning_rate - optimum) / optimum
        return {"dev": {"accuracy": 1 - distance}}

    return score


def test_interrupted_search_proposes_the_same_points_as_an_uninterrupted_one(tmp_path):
    config = small_search()
    whole = run(config, tmp_path / "whole", near(3e-5))
    parts = [run(config, tmp_path / "parts", near(3e-5), stop) for stop in (0, 1, 2, None)]
    assert [name for names in parts for name in names] == whole and all(parts)
    assert run(config, tmp_path / "whole", near(3e-5)) == []
    other = run(small_search(base={"seed": 1}), tmp_path / "other", near(3e-5))
    assert other[:6] != whole[:6]


def test_search_that_has_grown_runs_only_what_the_larger_one_adds(tmp_path):
    whole = run(small_search(), tmp_path / "whole", near(3e-5))
    first = run(small_search(num_trials=6), tmp_path / "grown", near(3e-5))
    added = run(small_search(), tmp_path / "grown", near(3e-5))
    assert first + added == whole and len(added) == 6 + 2


def test_search_can_grow_but_neither_shrink_nor_change(tmp_path):
    config = complete(small_search())
    content = {"config": settings_of(config), "programs": {}}
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    assert check_directory(tmp_path, complete(small_search(num_trials=18, keep_trials=2))) == {}
    with pytest.raises(ValueError, match=r"num_trials=6, but 12 in .*: a search can be extended"):
        check_directory(tmp_path, complete(small_search(num_trials=6)))
    for changes in ({"num_seeds": 2}, {"halving": (1.0, 2.0)}):
        name = next(iter(changes))
        with pytest.raises(ValueError, match=rf"(?s)settings:\n  {name}: .* A sweep can be ext"):
            check_directory(tmp_path, complete(small_search(**changes)))


def test_best_third_of_a_round_gets_three_times_the_epochs(tmp_path):
    score = near(3e-5)
    run(small_search(num_trials=6), tmp_path, score)
    scores = {}
    for path in tmp_path.glob("*/result.json"):
        point, _, epochs = path.parent.name.removesuffix(",seed=0").partition(",num_epochs=")
        result = json.loads(path.read_text())
        scores.setdefault(epochs, {})[point] = result.get("dev", {"accuracy": -1})["accuracy"]
    assert len(scores["1"]) == 6
    assert max_trials(small_search(num_trials=8, num_seeds=2)) == 2 * (6 + 2 + 2 + 1)
    assert set(scores["3"]) == set(sorted(scores["1"], key=scores["1"].get)[-2:])


def test_numbers_of_epochs_can_be_searched(tmp_path):
    config = small_search(halving=(), num_trials=3).unlock()
    config.search = {"num_epochs": ("uniform", 2.0, 4.0)}
    names = run(config.lock(), tmp_path, lambda trial: {"dev": {"accuracy": trial.num_epochs}})
    assert len(set(names)) == 3 and all(name.startswith("num_epochs=") for name in names)


def test_search_comes_nearer_to_the_optimum_than_random_configurations(tmp_path):
    config = small_search(num_trials=40, trials_per_round=5, halving=())
    names = run(config, tmp_path, near(3e-5))
    rates = [float(re.search("learning_rate=([^,]+)", name)[1]) for name in names]
    distances = [abs(rate - 3e-5) for rate in rates]
    assert sorted(distances[-15:])[7] < 0.6 * sorted(distances[:15])[7]


WRONG = {
    "kind": ({"search": {"learning_rate": ("log", 1e-5, 1e-4)}}, r"search\.learning_rate=\('log'"),
    "order": ({"search": {"learning_rate": ("uniform", 1e-4, 1e-5)}}, r"expected \('uniform', LOW"),
    "log of 0": ({"search": {"learning_rate": ("log_uniform", 0.0, 1e-5)}}, "with LOW > 0"),
    "value": ({"search": {"learning_rate": 1e-5}}, r"search\.learning_rate=1e-05: expected"),
    "empty": ({"search": {}}, r"config\.search is empty"),
    "epochs twice": ({"search": {"num_epochs": ("choice", 1.0)}}, "which config.halving sets"),
    "no trials": ({"num_trials": 0}, r"config\.num_trials=0: expected at least 1"),
    "halving": ({"halving": (3.0, 1.0)}, r"config\.halving=\(3\.0, 1\.0\): expected increasing"),
    "unknown field": (
        {"search": {"learning_rat": ("uniform", 0.1, 0.2)}},
        r"trial 0 of the search\.learning_rat: there is no such field in `base`; did you mean",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_search_is_one_clear_error(case, tmp_path):
    changes, message = WRONG[case]
    config = search.get_config().unlock()
    for name, value in changes.items():
        del config[name]
        config[name] = value
    with pytest.raises(ValueError, match=message):
        sweep.sweep(config.lock(), tmp_path / "run")
    assert not (tmp_path / "run").exists()
