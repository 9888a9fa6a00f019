"""What the trials of a configuration scored on the split that selects checkpoints."""

import json
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from bert_jax.finetuning.trials import Trial, rank_of
from bert_jax.sweeps.configurations import Configuration


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
    def rank(self) -> tuple[bool, float, float, float]:
        """A key that is largest for the best configuration, the one to use.

        Those with a median score come first, of them those of the largest `train_fraction`: a
        smaller one may score higher by chance. Then the median score and the negated median loss.
        """
        losses = [rank_of(result, self.metric)[1] for result in self.scored]
        loss = statistics.median(losses) if losses else -math.inf
        fraction = self.configuration.values.get("train_fraction", 0.0)
        return self.median > -math.inf, fraction, self.median, loss

    @property
    def train_features(self) -> int | None:
        """The number of training features, which all its trials have; None before one has ended."""
        return next((result.get("train_features") for result in self.scored), None)

    @property
    def scored(self) -> list[dict]:
        """The results of the seeds that did not diverge."""
        return [result for result in self.results if result and "diverged" not in result]

    def notes(self) -> str:
        """Names the seeds that collapsed, diverged, were pruned or are not finished."""
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
                for line in (
                    (trial.workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
                ):
                    record = json.loads(line)
                    if self.metric in record:
                        scores.setdefault(record["step"], []).append(record[self.metric])
        return sorted(scores), [statistics.median(scores[step]) for step in sorted(scores)]


def summarize(configuration: Configuration, metric: str) -> Summary:
    """Reads the results of a configuration."""
    summary = Summary(configuration, [trial.result for trial in configuration.trials], [], metric)
    split, _, name = metric.rpartition("/")
    return summary._replace(scores=[result[split][name] for result in summary.scored])


class FractionCurve(NamedTuple):
    """The summaries of a configuration over `train_fractions`, by increasing fraction."""

    label: str  # Its values of the other fields.
    by_fraction: dict[float, Summary]


def fraction_curves(summaries: Sequence[Summary]) -> list[FractionCurve]:
    """Groups summaries that differ only in `train_fraction`; the best one at the largest first."""
    groups: dict[str, dict[float, Summary]] = {}
    for summary in summaries:
        values = dict(summary.configuration.values)
        fraction = values.pop("train_fraction")
        groups.setdefault(str(Configuration(values, [])), {})[fraction] = summary
    curves = [FractionCurve(name, dict(sorted(group.items()))) for name, group in groups.items()]
    return sorted(curves, key=lambda curve: [*curve.by_fraction.values()][-1].rank, reverse=True)


def has_one_seed(summaries: Sequence[Summary]) -> bool:
    return all(len(summary.results) == 1 for summary in summaries)


def name_of_score(summaries: Sequence[Summary]) -> str:
    """Returns the name of the ranking score: the metric or, with several seeds, its median."""
    return f"{'' if has_one_seed(summaries) else 'median '}{summaries[0].metric}"


def best_trial(summary: Summary) -> Trial:
    """Returns the trial of a configuration with the best score on dev; of equal ones, by loss."""
    pairs = zip(summary.configuration.trials, summary.results, strict=True)
    finished = [pair for pair in pairs if pair[1]]
    return max(finished, key=lambda pair: rank_of(pair[1], summary.metric))[0]


def status(result: dict | None) -> str:
    """Returns the state of a trial as text."""
    if result is None:
        return "not finished"
    if "diverged" in result:
        return f"diverged at step {result['diverged']}"
    if result.get("pruned"):
        return f"pruned at step {result['steps']}" + ", collapsed" * bool(result.get("collapsed"))
    return "collapsed" if result.get("collapsed") else "finished"
