"""A sweep keeps the weights of its best trials, and never removes those it may need."""

import json

import pytest
from ml_collections import ConfigDict

from bert_jax.finetuning.trials import Trial
from bert_jax.sweeps.configurations import Configuration
from bert_jax.sweeps.programs import Program
from bert_jax.sweeps.weights import remove_weights
from bert_jax.training.workdir import check_settings

SCORES = {"a": (0.9, 0.1), "b": (0.6, 0.7), "c": (None, 0.95), "d": (0.5, "running")}
"""By configuration and seed; None: diverged. The medians: a 0.5, b 0.65; c and d have none."""


def write_trials(directory) -> list[Configuration]:
    configurations = []
    for name, scores in SCORES.items():
        trials = []
        for seed, score in enumerate(scores):
            trial = Trial(ConfigDict({"seed": seed}), directory / f"{name}{seed}")
            (trial.workdir / "best/4/params").mkdir(parents=True)
            result = {"diverged": 3} if score is None else {"dev": {"accuracy": score}}
            if score != "running":
                trial.result_path.write_text(json.dumps(result))
            trials.append(trial)
        configurations.append(Configuration({"name": name}, trials))
    return configurations


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (0, "a0 a1 b0 b1 c0 c1 d0 d1"),
        (1, "b1 d0 d1"),
        (3, "a0 b0 b1 d0 d1"),
        (5, "a0 a1 b0 b1 c1 d0 d1"),
        (9, "a0 a1 b0 b1 c0 c1 d0 d1"),
    ],
)
def test_best_trials_of_the_best_configurations_keep_their_weights(keep, kept, tmp_path):
    configurations = write_trials(tmp_path)
    trials = [trial for configuration in configurations for trial in configuration.trials]
    programs = [Program(f"1.{number}", None, [trial]) for number, trial in enumerate(trials)]
    for _ in range(2):
        remove_weights(configurations, programs, keep, "dev/accuracy")
        assert sorted(path.parent.name for path in tmp_path.glob("*/best")) == kept.split()


def test_weights_of_a_program_that_is_not_finished_are_kept(tmp_path):
    configurations = write_trials(tmp_path)
    trials = [trial for configuration in configurations for trial in configuration.trials]
    first, rest = Program("1.1", None, trials[:2]), Program("1.2", None, trials[2:])
    remove_weights(configurations, [first, rest], 1, "dev/accuracy")
    kept = ["b0", "b1", "c0", "c1", "d0", "d1"]
    assert sorted(path.parent.name for path in tmp_path.glob("*/best")) == kept


def test_trial_whose_weights_were_removed_stays_finished(tmp_path):
    configurations = write_trials(tmp_path)[:2]
    trials = [trial for configuration in configurations for trial in configuration.trials]
    remove_weights(configurations, [Program("1.1", None, trials)], 1, "dev/accuracy")
    removed = configurations[0].trials[1]
    (removed.workdir / "config.json").write_text(json.dumps({"learning_rate": 1.0}))
    check_settings(removed.workdir, {"learning_rate": 1.0})
    assert removed.result["dev"] == {"accuracy": 0.1} and removed.result["weights_removed"]
    with pytest.raises(ValueError, match=r"learning_rate: 1\.0 in .*config\.json, 2\.0 now"):
        check_settings(removed.workdir, {"learning_rate": 2.0})
