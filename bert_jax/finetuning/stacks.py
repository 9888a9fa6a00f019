"""Trials that one program trains together: their state has a leading axis of trials, a stack.

Those with the fewest steps end first, and the others continue as a smaller stack.
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
from bert_jax.finetuning.stack_steps import index_leaves
from bert_jax.finetuning.step import Prediction
from bert_jax.finetuning.trials import (
    Trial,
    TrialRun,
    pad_to_trial_axis,
    stack_trees,
    tune_and_score,
)
from bert_jax.runtime.errors import NonFiniteLoss
from bert_jax.tasks.task import Split
from bert_jax.training.state import TrainState
from bert_jax.training.workdir import write_json

FIRST_STACK = "checkpoints/stack.json"  # The names of the trials before the first checkpoint.

# Returns what each trial of a stack of parameters predicts for a split.
Predict = Callable[[Split, dict], list[Prediction]]


class Stack:
    """The running trials of a stack, in the order of the state's leading axis.

    The axis is a multiple of the mesh's `trial`: the last trial is repeated to fill it.

    Attributes:
      runs: the trials that have not ended.
      first_step: the step of the last checkpoint, from which they continue; 0 without one.
      unreported: the metrics of the steps that are not in a report yet, `[members]` each. A resumed
        run has those of its checkpoint, so that its next report is that of an uninterrupted run.
    """

    def __init__(
        self,
        setup: FinetuneSetup,
        trials: Sequence[Trial],
        directory: pathlib.Path,
        checkpointer: Checkpointer,
    ):
        self._steps, self._mesh = setup.steps, setup.mesh
        self._task, self._pretrained = setup.data.task, setup.data.pretrained
        self._directory, self._checkpointer = directory, checkpointer
        self._saved_names = saved_trials(directory)
        self.first_step = checkpointer.latest_step() or 0
        self.runs = [TrialRun(setup, trial, self.first_step) for trial in trials]
        self.num_steps = max(run.num_steps for run in self.runs)
        self._positions = list(range(len(self.runs)))  # Of the runs in the state.
        self._stop = self.first_step
        self.unreported: list[dict] = []

    @property
    def members(self) -> list[TrialRun]:
        """The trial of each entry of the state's leading axis."""
        return pad_to_trial_axis(self.runs, self._mesh)

    @property
    def is_finished(self) -> bool:
        return all(run.finished for run in self.runs)

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
        return self._checkpointer.restore(self.first_step, self._steps.abstract_state(len(names)))

    def begin(self, state: TrainState) -> tuple[TrainState, int, int]:
        """Returns the state of the members, and the steps (start, stop) until the first ends."""
        start, self._stop = self._stop, min(run.num_steps for run in self.runs)
        indices = pad_to_trial_axis(self._positions, self._mesh)
        if indices != list(range(len(jax.tree.leaves(state.params)[0]))):  # Avoids a copy.
            state = self._steps.select(state, np.array(indices))
        self.unreported = [index_leaves(step, np.array(indices)) for step in self.unreported]
        self._checkpointer.settings = self.runs[0].settings | {"stacked_trials": self.names()}
        if not start and jax.process_index() == 0:
            write_json(self._directory / FIRST_STACK, {"stacked_trials": self.names()})
        return state, start, self._stop

    def report(self, step: int, seconds: float) -> float:
        """Writes the metrics of the unreported steps up to `step`; returns the minimum loss.

        Finishes the trials that diverged.
        """
        values = jax.device_get([self._steps.replicate(each) for each in self.unreported])
        self.unreported = []
        for index, run in enumerate(self.runs):
            try:
                if not run.finished:
                    run.report(step, [index_leaves(each, index) for each in values], seconds)
            except NonFiniteLoss as error:
                run.mark_diverged(error)
        return min(run.loss for run in self.runs)

    def save(self, state: TrainState) -> None:
        """Saves the state, and the metrics of the steps that are not in a report yet."""
        for run in self.runs:
            run.writer.sync()
        values = jax.device_get([self._steps.replicate(each) for each in self.unreported])
        waiting = {"unreported": jax.tree.map(lambda each: each.tolist(), values)}
        self._checkpointer.settings = self._checkpointer.settings | waiting
        self._checkpointer.save(state)

    def evaluate(
        self, step: int, params: dict, predict: Predict, is_regular: bool, beat: Callable
    ) -> None:
        """Scores the trials on the selection split, and saves each that has become better.

        Evaluates only the trials that end at `step`, unless it `is_regular`.
        """
        task = self._task
        outputs = predict(task.selection_split, params)
        for index, prediction in enumerate(outputs[: len(self.runs)]):
            run = self.runs[index]
            if run.finished or not (is_regular or step == run.num_steps):
                continue
            scores, tuned = tune_and_score(task.selection_split, prediction)
            run.evaluate(step, task.selection_split.name, scores)
            if not run.is_better(scores):
                continue
            if step == run.best_step:  # A resumed run has saved it; its score is rounded otherwise.
                run.set_score(scores)
                continue
            beat(f"saving step {step} as the best", limited=False)
            run.save_best(step, self._steps.pick(params, index), scores, tuned)
            run.prediction, run.prediction_size = prediction, len(self.members)

    def finish(self, params: dict, predict: Predict, began: float, beat: Callable) -> None:
        """Writes the results of the trials that end at the current `stop`, and drops them.

        The best checkpoint predicts every split; the last one, where no split selects.
        """
        ending = [run for run in self.runs if run.num_steps == self._stop and not run.diverged]
        self._save_unsaved(ending, params, predict)
        if not all(run.finished for run in ending):
            beat("predicting with the best checkpoints")
            predictions = self._predict_best(ending, predict)
            for index, run in enumerate(ending):
                if not run.finished:
                    run.finish({name: each[index] for name, each in predictions.items()}, began)
        self._positions = [
            index
            for index, run in enumerate(self.runs)
            # One that is known to diverge later stays: a resumed stack has the same size.
            if (run.diverged or run.num_steps) > self._stop
        ]
        self.runs = [self.runs[index] for index in self._positions]

    def _save_unsaved(self, ending: list[TrialRun], params: dict, predict: Predict) -> None:
        selector = self._task.selection_split
        unsaved = [
            index for index, run in enumerate(self.runs) if run in ending and run.best_step is None
        ]
        outputs = predict(selector, params) if unsaved and selector else None
        for index in unsaved:
            scores, tuned = tune_and_score(selector, outputs[index]) if outputs else ({}, {})
            params_of_trial = self._steps.pick(params, index)
            self.runs[index].save_best(self._stop, params_of_trial, scores, tuned)

    def _predict_best(self, ending: list[TrialRun], predict: Predict) -> dict[str, list]:
        """Returns, for each split, what the best checkpoints of the ending trials predict."""
        task, predictions = self._task, {}
        padded = pad_to_trial_axis(ending, self._mesh)
        # Predictions are not repeated where a stack of the same size made them: one of another
        # size, after resuming, could round otherwise.
        if all(run.prediction and run.prediction_size == len(padded) for run in ending):
            name = task.selection_split.name
            predictions[name] = [run.prediction for run in ending]
        if splits := [split for split in task.splits if split.name not in predictions]:
            best = stack_trees([run.read_best_params() for run in padded])
            params = jax.device_put(best, self._steps.stack_shardings.params)
            predictions |= {split.name: predict(split, params) for split in splits}
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
