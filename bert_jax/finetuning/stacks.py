"""Trials that train together, as a stack: their state has a leading axis of trials.

Trials with the fewest steps, whose patience is exhausted, or that are pruned, end first, and the
others continue as a smaller stack.
"""

import json
import os
import pathlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
from absl import logging

from bert_jax.checkpoints.native import Checkpointer, load_settings, saved_steps
from bert_jax.finetuning.finetune_setup import FinetuneSetup
from bert_jax.finetuning.pruning import below_median
from bert_jax.finetuning.stack_steps import index_leaves
from bert_jax.finetuning.step import Prediction
from bert_jax.finetuning.trials import (
    Trial,
    TrialRun,
    pad_to_trial_axis,
    stack_trees,
    tune_and_score,
)
from bert_jax.runtime.errors import Diverged
from bert_jax.tasks.task import Split
from bert_jax.training.state import TrainState
from bert_jax.training.workdir import write_json

FIRST_STACK = "checkpoints/stack.json"  # The names of the trials before the first checkpoint.

# (split, parameters of a stack, frozen parameters) -> the prediction of each trial.
Predict = Callable[[Split, dict, dict | None], list[Prediction]]


class Stack:
    """The running trials of a stack, in the order of the state's leading axis.

    The size of the axis is a multiple of the mesh's `trial`: the last trial is repeated to fill it.

    Attributes:
      runs: the trials that have not ended.
      first_step: the step of the last checkpoint, from which they resume; 0 without one.
      start, stop: the steps between which the stack has these trials; set by `begin`.
      unreported: the metrics of the steps that are not in a report yet, `[members]` each. A resumed
        run has those of its checkpoint, so that its next report equals an uninterrupted run's.
      num_diverged: the trials that diverged and are not in the stack any more.
      frozen: the parameters that all trials share, on the devices; None without LoRA.
    """

    def __init__(
        self,
        setup: FinetuneSetup,
        trials: Sequence[Trial],
        directory: pathlib.Path,
        checkpointer: Checkpointer,
        num_diverged: int = 0,
    ):
        self._steps, self._mesh = setup.steps, setup.mesh
        self._task, self._pretrained = setup.data.task, setup.data.pretrained
        # On the devices while the stack runs: the setups of a sweep live as long as it does.
        self.frozen, self._peft = setup.steps.freeze(self._pretrained), setup.peft_format()
        self._directory, self._checkpointer = directory, checkpointer
        self._saved_names = saved_trials(directory)
        self.first_step = checkpointer.latest_step() or 0
        self.runs = [TrialRun(setup, trial, self.first_step) for trial in trials]
        self._positions = list(range(len(self.runs)))  # Index of each run in the state.
        self.start = self.stop = self.first_step
        self.unreported: list[dict] = []
        self.num_diverged = num_diverged

    @property
    def members(self) -> list[TrialRun]:
        """The trial of each entry of the state's leading axis."""
        return pad_to_trial_axis(self.runs, self._mesh)

    @property
    def num_steps(self) -> int:
        """The number of steps of the longest trial."""
        return max(run.num_steps for run in self.runs)

    @property
    def is_finished(self) -> bool:
        """Whether all trials have a result; one that diverged has one, too."""
        return all(run.finished for run in self.runs)

    @property
    def ending(self) -> list[TrialRun]:
        """The trials whose last step is `stop`."""
        return [run for run in self.runs if run.last_step == self.stop]

    def names(self) -> list[str]:
        """Returns the names of the members in checkpoints."""
        return [trial_name(run.trial, self._directory) for run in self.members]

    def initial_state(self) -> TrainState:
        """Returns the state of the last checkpoint, or a fresh one without a checkpoint."""
        if not self.first_step:
            keys = stack_trees([run.key for run in self.members])
            return self._steps.init(keys, self._pretrained)
        logging.info("Resuming from step %d in %s", self.first_step, self._directory)
        names = self._saved_names
        if len(names) % (size := self._mesh.shape["trial"]):
            expected = f"expected a size that divides the {len(names)} saved trials in"
            raise ValueError(f"config.mesh.trial={size}: {expected} {self._directory}/checkpoints")
        self._positions = [names.index(trial_name(run.trial, self._directory)) for run in self.runs]
        settings = load_settings(self._directory / f"checkpoints/{self.first_step}")
        self.unreported = [
            {name: np.array(values, np.float32) for name, values in step.items()}
            for step in settings.get("unreported", [])
        ]
        counts = settings.get("evaluations_since_best", [0] * len(names))
        pruned = settings.get("pruned", [False] * len(names))
        for run, position in zip(self.runs, self._positions, strict=True):
            run.stop_early(self.first_step, counts[position])
            if pruned[position]:
                run.prune(self.first_step)
        return self._checkpointer.restore(self.first_step, self._steps.abstract_state(len(names)))

    def begin(self, state: TrainState) -> TrainState:
        """Returns the state of the members; sets `start`, and `stop`, where the first ones end."""
        self.start, self.stop = self.stop, min(run.num_steps for run in self.runs)
        indices = pad_to_trial_axis(self._positions, self._mesh)
        if indices != list(range(len(jax.tree.leaves(state.params)[0]))):  # Avoids a copy.
            state = self._steps.select(state, np.array(indices))
        self.unreported = [index_leaves(step, np.array(indices)) for step in self.unreported]
        self._checkpointer.settings = self.runs[0].settings | {"stacked_trials": self.names()}
        if not self.start and jax.process_index() == 0:
            write_json(self._directory / FIRST_STACK, {"stacked_trials": self.names()})
        return state

    def report(self, step: int, seconds: float) -> float:
        """Writes the metrics of the unreported steps up to `step`; returns the minimum loss.

        Ends the trials that diverged.
        """
        values = jax.device_get([self._steps.replicate(each) for each in self.unreported])
        self.unreported = []
        for index, run in enumerate(self.runs):
            try:
                if not run.finished:
                    run.report(step, [index_leaves(each, index) for each in values], seconds)
            except Diverged as error:
                run.mark_diverged(error)
        return min(run.loss for run in self.runs)

    def save(self, state: TrainState) -> None:
        """Saves the state, and what it does not hold: unreported metrics, and counts."""
        for run in self.runs:
            run.writer.sync()
        values = jax.device_get([self._steps.replicate(each) for each in self.unreported])
        counts = [run.evaluations_since_best for run in self.members]
        self._checkpointer.settings = self._checkpointer.settings | {
            "unreported": jax.tree.map(lambda each: each.tolist(), values),
            "evaluations_since_best": counts,  # In the order of "stacked_trials".
            "pruned": [run.pruned for run in self.members],
        }
        self._checkpointer.save(state)

    def evaluate(
        self,
        step: int,
        params: dict,
        evaluated: Sequence[TrialRun],
        predict: Predict,
        beat: Callable,
        prunes: bool = False,
    ) -> None:
        """Scores the `evaluated` trials on the selection split, and saves each that improved.

        If the patience of any of them ends, or it `prunes` any, `stop` becomes `step`.
        """
        split = self._task.selection_split
        predictions, scores_of_all = predict(split, params, self.frozen), {}
        for index, run in enumerate(self.runs):
            # A resumed stack has trials that ended after its checkpoint: they are compared again.
            is_compared = prunes and not run.has_diverged(step)
            if run not in evaluated or (run.finished and not is_compared):
                continue
            prediction = predictions[index]
            scores, tuned = tune_and_score(split, prediction)
            scores_of_all[index] = run.score_of(scores)
            if run.finished:
                continue
            run.evaluate(step, split.name, scores)
            if run.is_better(scores):
                # A run that was resumed has saved this step before: the score differs by rounding.
                if step == run.best_step:
                    run.set_score(scores)
                else:
                    beat(f"saving step {step} as the best", limited=False)
                    self._save_best(step, params, index, scores, tuned)
                    run.prediction, run.prediction_size = prediction, len(self.members)
            run.count_evaluation(step)
        if prunes:
            best = {index: run.score for index, run in enumerate(self.runs) if not run.finished}
            diverged = self.num_diverged + sum(run.has_diverged(step) for run in self.runs)
            for index in below_median(best, scores_of_all, diverged):
                self.runs[index].prune(step)
        self.stop = min([self.stop, *(run.num_steps for run in evaluated if not run.finished)])

    def finish(self, params: dict, predict: Predict, began: float, beat: Callable) -> None:
        """Writes the results of the trials that end at `stop`, and removes them from the stack.

        The best checkpoint predicts every split; the last one, if there is no selection split.
        """
        ending = [run for run in self.ending if not run.diverged]
        self._save_unsaved(ending, params, predict)
        if not all(run.finished for run in ending):
            beat("predicting with the best checkpoints")
            predictions = self._predict_best(ending, predict)
            beat("writing the results", limited=False)
            for index, run in enumerate(ending):
                if not run.finished:
                    run.finish({name: each[index] for name, each in predictions.items()}, began)
        self.num_diverged += sum(run.has_diverged(self.stop) for run in self.runs)
        # Trials that are known to diverge later stay, so that a resumed stack has the same size.
        self._positions = [
            index for index, run in enumerate(self.runs) if run.last_step > self.stop
        ]
        self.runs = [self.runs[index] for index in self._positions]

    def _save_unsaved(self, ending: list[TrialRun], params: dict, predict: Predict) -> None:
        """Saves the last parameters of the `ending` trials that have no best checkpoint."""
        split = self._task.selection_split
        unsaved = [
            index for index, run in enumerate(self.runs) if run in ending and run.best_step is None
        ]
        predictions = predict(split, params, self.frozen) if unsaved and split else None
        for index in unsaved:
            scores, tuned = {}, {}
            if predictions:
                scores, tuned = tune_and_score(split, predictions[index])
            self._save_best(self.stop, params, index, scores, tuned)

    def _save_best(
        self, step: int, params: dict, index: int, scores: dict[str, float], tuned: dict
    ) -> None:
        """Saves the model of a trial as its best, with its adapters merged, and beside it."""
        trained = self._steps.pick(params, index)
        merged, files = self._steps.merge(trained, self.frozen), {}
        if self._peft:
            adapter = self._peft.files(trained["lora"], merged, tuned)
            files = {f"adapter/{name}": content for name, content in adapter.items()}
        self.runs[index].save_best(step, merged, scores, tuned, files)

    def _predict_best(
        self, ending: list[TrialRun], predict: Predict
    ) -> dict[str, list[Prediction]]:
        """Returns, by split, the predictions of the best checkpoints of the `ending` trials."""
        task, predictions = self._task, {}
        padded = pad_to_trial_axis(ending, self._mesh)
        # Reuses the predictions of the last evaluation if a stack of the same size computed them:
        # another size, before the run was resumed, may round differently, as merging does.
        if self.frozen is None and all(
            run.prediction and run.prediction_size == len(padded) for run in ending
        ):
            name = task.selection_split.name
            predictions[name] = [run.prediction for run in ending]
        if splits := [split for split in task.splits if split.name not in predictions]:
            # Merged models do not share the encoder: one on each device at a time.
            size = len(padded) if self.frozen is None else self._mesh.shape["trial"]
            for runs in (padded[first : first + size] for first in range(0, len(padded), size)):
                best = stack_trees([run.read_best_params() for run in runs])
                params = jax.device_put(best, self._steps.model_shardings)
                for split in splits:
                    predictions.setdefault(split.name, []).extend(predict(split, params, None))
        return predictions


def trial_name(trial: Trial, directory: pathlib.Path) -> str:
    """Returns the name of a trial in the checkpoints of `directory`."""
    return os.path.relpath(trial.workdir, directory)


def saved_trials(directory: pathlib.Path) -> list[str]:
    """Returns the names of the trials of the stack to resume in `directory`."""
    steps, first = saved_steps(directory / "checkpoints"), directory / FIRST_STACK
    if steps:
        return load_settings(directory / f"checkpoints/{steps[-1]}")["stacked_trials"]
    return json.loads(first.read_text(encoding="utf-8"))["stacked_trials"] if first.exists() else []
