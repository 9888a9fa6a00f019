"""Tests whether two fine-tuned models differ, from their predictions for the same examples.

python tools/compare.py runs/a runs/b

Prints both scores, and a 95 % interval of the second less the first by the paired bootstrap over
the examples; for classes also McNemar's exact test of which of them are right. Both say whether
the difference could come from the choice of the examples, not from the seed of the training.
"""

import itertools
import json
import pathlib
import sys
from typing import NamedTuple

import numpy as np
from absl import app, flags

from bert_jax.runtime.command_line import describe_error, parse_flags
from bert_jax.tasks.resampling import bootstrap_interval, mcnemar_exact
from bert_jax.tasks.scored_predictions import MAX_DIFFERENCE, ScoredPredictions, read_scored

NUM_SAMPLES = 10_000

flags.DEFINE_string("split", None, "Of the examples; by default the one that selects checkpoints.")
flags.DEFINE_string("metric", None, "The score; by default the one that selects checkpoints.")


def read_run(
    run: pathlib.Path, split: str | None, metric: str | None
) -> tuple[str, str, ScoredPredictions]:
    """Returns the split and the score to compare, by default the run's, and its predictions.

    Raises ValueError or OSError if the run does not have them.
    """
    path = run / "result.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: expected the workdir of a finished run")
    result = json.loads(path.read_text(encoding="utf-8"))
    if "seeds" in result:
        raise ValueError(f"{run} has several seeds: name the workdir of one, such as {run}/seed_0")
    if "diverged" in result:
        raise ValueError(f"{run} diverged at step {result['diverged']}, without predictions")
    own_split, _, own_metric = result.get("metric", "").rpartition("/")
    split, metric = split or own_split, metric or own_metric
    if not split or not metric:
        fix = "set --split and --metric, such as --split=test --metric=accuracy"
        raise ValueError(f"{run} has no score that selects checkpoints: {fix}")
    scores = {name: each for name, each in result.items() if isinstance(each, dict)}
    if metric not in scores.get(split, ()):
        names = ", ".join(f"{name}/{each}" for name, own in scores.items() for each in own)
        raise ValueError(f"{run} has no {split}/{metric}: expected one of {names}")
    settings = json.loads((run / "config.json").read_text(encoding="utf-8"))
    scored = read_scored(run / "predictions", split, metric, settings)
    found, expected = scored.score(np.arange(len(scored.examples))), scores[split][metric]
    if abs(found - expected) > MAX_DIFFERENCE:
        raise ValueError(
            f"{run}: the predictions of {split} have {metric} {found:.4f}, but result.json has "
            f"{expected:.4f}: one of them is of another run"
        )
    return split, metric, scored


def check_same_examples(
    runs: tuple[pathlib.Path, pathlib.Path], first: ScoredPredictions, second: ScoredPredictions
) -> None:
    """Raises ValueError if two runs predicted other examples, or the same in another order."""
    pairs = itertools.zip_longest(first.examples, second.examples)
    for number, (one, other) in enumerate(pairs):
        if one != other:
            shown = f"{str(one)[:200]} and {str(other)[:200]}"
            raise ValueError(
                f"{runs[0]} and {runs[1]} predicted other examples: number {number} is {shown}"
            )


class Comparison(NamedTuple):
    """How two runs differ.

    Attributes:
      split: of the examples.
      metric: the score.
      num_examples: of the split.
      scores: of both runs.
      low: bound of the interval of the second score less the first.
      high: the other bound.
      only_first: how many examples only the first run predicts correctly; None where an example is
        not just right or wrong, as the next two.
      only_second: how many only the second predicts correctly.
      p_value: of McNemar's exact test.
    """

    split: str
    metric: str
    num_examples: int
    scores: tuple[float, float]
    low: float
    high: float
    only_first: int | None = None
    only_second: int | None = None
    p_value: float | None = None


def compare(
    runs: tuple[pathlib.Path, pathlib.Path],
    split: str | None = None,
    metric: str | None = None,
    num_samples: int = NUM_SAMPLES,
) -> Comparison:
    """Compares two runs that predicted the same examples. Raises ValueError or OSError."""
    split, metric, first = read_run(runs[0], split, metric)
    _, _, second = read_run(runs[1], split, metric)
    check_same_examples(runs, first, second)
    rows = np.arange(len(first.examples))
    low, high = bootstrap_interval(
        lambda sample: second.score(sample) - first.score(sample),
        len(rows),
        num_samples=num_samples,
    )
    scores = first.score(rows), second.score(rows)
    tested = ()
    if first.is_correct is not None and second.is_correct is not None:
        tested = mcnemar_exact(first.is_correct, second.is_correct)
    return Comparison(split, metric, len(rows), scores, float(low), float(high), *tested)


def describe(runs: tuple[pathlib.Path, pathlib.Path], found: Comparison) -> list[str]:
    """Returns the lines that the tool prints, of `NUM_SAMPLES` samples."""
    lines = [
        f"{run}: {found.split}/{found.metric} {score:.4f}"
        for run, score in zip(runs, found.scores, strict=True)
    ]
    lines.append(
        f"difference: {found.scores[1] - found.scores[0]:+.4f}, 95 % interval {found.low:+.4f} to "
        f"{found.high:+.4f} (paired bootstrap over {found.num_examples:,} examples, "
        f"{NUM_SAMPLES:,} samples)"
    )
    if found.p_value is not None:
        lines.append(
            f"McNemar's exact test of the accuracy: only {runs[0]} is right in "
            f"{found.only_first:,} examples, only {runs[1]} in {found.only_second:,}: "
            f"p = {found.p_value:.4g}"
        )
    return lines


def main(argv: list[str]) -> None:
    if len(argv) != 3:
        raise app.UsageError("expected the workdirs of two runs: tools/compare.py RUN RUN")
    first, second = map(pathlib.Path, argv[1:])
    try:
        found = compare((first, second), flags.FLAGS.split, flags.FLAGS.metric)
    except (OSError, ValueError) as error:
        sys.exit(f"compare: {describe_error(error)}")
    print("\n".join(describe((first, second), found)))


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
