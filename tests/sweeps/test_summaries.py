"""Configurations with equal scores are ranked by their loss, wherever a sweep chooses the best."""

import json
import random
import statistics

import pytest
from ml_collections import ConfigDict

from bert_jax.finetuning.trials import Trial
from bert_jax.sweeps.configurations import Configuration
from bert_jax.sweeps.summaries import best_trial, summarize
from bert_jax.sweeps.weights import rank_trials

METRIC = "dev/f1"


def write_configuration(directory, name: str, results) -> Configuration:
    trials = []
    for seed, result in enumerate(results):
        trial = Trial(ConfigDict({"seed": seed}), directory / f"{name}{seed}")
        trial.workdir.mkdir()
        scores = {"f1": result[0], "loss": result[1]} if result else None
        known = {"dev": scores} if scores else {"diverged": 3}
        trial.result_path.write_text(json.dumps(known))
        trials.append(trial)
    return Configuration({"name": name}, trials)


@pytest.mark.parametrize("seed", range(5))
def test_equal_scores_are_ranked_by_the_loss(seed, tmp_path):
    """Few distinct scores, so that most are equal; half of them 0, as at the start of training."""
    rng = random.Random(seed)
    results = {
        name: [(rng.choice([0, 0, 0.5]), rng.uniform(0.1, 2)) for _ in range(3)] for name in "abcde"
    }
    configurations = [write_configuration(tmp_path, *each) for each in results.items()]
    ranks = {
        name: tuple(
            statistics.median(sign * each[i] for each in own) for i, sign in enumerate((1, -1))
        )
        for name, own in results.items()
    }
    expected = sorted(ranks, key=ranks.get, reverse=True)
    summaries = [summarize(each, METRIC) for each in configurations]
    ranked = sorted(summaries, key=lambda summary: summary.rank, reverse=True)
    assert [summary.configuration.values["name"] for summary in ranked] == expected
    for summary, own in zip(summaries, results.values(), strict=True):
        best = max(range(3), key=lambda seed: (own[seed][0], -own[seed][1]))
        assert best_trial(summary).config.seed == best
    kept = [trial.workdir.name for trial in rank_trials(configurations, METRIC)]
    assert kept == [
        f"{name}{seed}"
        for name in expected
        for seed in sorted(
            range(3), key=lambda seed: (-results[name][seed][0], results[name][seed][1])
        )
    ]


def test_configuration_that_diverged_ranks_after_one_whose_score_is_0(tmp_path):
    diverged = write_configuration(tmp_path, "a", [None, None, (0.9, 0.1)])
    poor = write_configuration(tmp_path, "b", [(0.0, 9.0)] * 3)
    assert summarize(diverged, METRIC).rank < summarize(poor, METRIC).rank
    assert best_trial(summarize(diverged, METRIC)).config.seed == 2
