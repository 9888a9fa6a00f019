"""Removes the weights of all but the best trials, so that a large sweep fits on a disk."""

import shutil
from collections.abc import Sequence

from absl import logging

from bert_jax.finetuning.trials import Trial, rank_of
from bert_jax.sweeps.configurations import Configuration
from bert_jax.sweeps.programs import Program
from bert_jax.sweeps.summaries import summarize
from bert_jax.training.workdir import write_json


def remove_weights(
    configurations: Sequence[Configuration], programs: Sequence[Program], keep: int, metric: str
) -> None:
    """Removes `best` of the finished trials outside the `keep` best (0: keeps all).

    They are ranked as in the report: by their configuration, then by their own score and loss.
    That is final once all seeds of a configuration have ended; until then its weights are kept, and
    so are the weights of an unfinished program, which may read them when it is resumed.
    """
    if not keep:
        return
    is_final = {
        trial.workdir for program in programs if program.is_finished for trial in program.trials
    }
    for trial in rank_trials(configurations, metric)[keep:]:
        best = trial.workdir / "best"
        if trial.workdir in is_final and best.exists():
            # The result says why there are no weights: otherwise the trial would be run again.
            write_json(trial.result_path, trial.result | {"weights_removed": True})
            shutil.rmtree(best, ignore_errors=True)  # Another worker may remove it, too.
            logging.info("Removed the weights of %s", trial.workdir.name)


def rank_trials(configurations: Sequence[Configuration], metric: str) -> list[Trial]:
    """Returns the trials of the configurations all of whose seeds have ended, the best first."""
    ranked = []
    for configuration in configurations:
        summary = summarize(configuration, metric)
        if None in summary.results:
            continue
        for trial, result in zip(configuration.trials, summary.results, strict=True):
            ranked.append(((summary.rank, rank_of(result, metric)), trial))
    ranked.sort(key=lambda entry: entry[0], reverse=True)  # Stable: ties go to the earlier one.
    return [trial for _, trial in ranked]
