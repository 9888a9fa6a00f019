"""Pruning by the median: Optuna's rule, and the same decisions after a kill at any point."""

import contextlib
import math
import pathlib
import random
import statistics
from types import SimpleNamespace

import numpy as np
import optuna
import pytest

from bert_jax.finetuning import stacks
from bert_jax.finetuning.pruning import MIN_OTHERS, below_median
from bert_jax.finetuning.stacks import Stack
from bert_jax.finetuning.trials import TrialRun
from bert_jax.training.workdir import describe_differences

COMPLETE, RUNNING = optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.RUNNING


def optuna_prunes(curve: list[float], others: list[list[float]]) -> bool:
    """Returns whether Optuna prunes a trial after the last value of its curve."""
    study = optuna.create_study(direction="maximize")
    for each in others:
        values = dict(enumerate(each))
        study.add_trial(
            optuna.trial.create_trial(state=COMPLETE, value=0.0, intermediate_values=values)
        )
    trial = optuna.trial.create_trial(state=RUNNING, intermediate_values=dict(enumerate(curve)))
    pruner = optuna.pruners.MedianPruner(n_startup_trials=0, n_min_trials=MIN_OTHERS)
    return pruner.prune(study, trial)


@pytest.mark.parametrize("num_diverged", [0, 1, 4])
def test_trial_is_pruned_where_optuna_prunes_it(num_diverged):
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rng, found = random.Random(num_diverged), []
    for count in (1, 4, 5, 6, 9):
        curves = [[rng.randrange(8) / 8 for _ in range(3)] for _ in range(count)]
        scores = {number: curve[-1] for number, curve in enumerate(curves)}
        best = {number: max(curve) for number, curve in enumerate(curves)}
        pruned = below_median(best, scores, num_diverged)
        diverged = [[-1e9] * 3] * num_diverged  # Optuna interpolates, which inf does not allow.
        expected = [
            number
            for number, curve in enumerate(curves)
            if optuna_prunes(curve, [*curves[:number], *curves[number + 1 :], *diverged])
        ]
        assert pruned == expected
        found += pruned
    assert found or num_diverged == 4


class FakeTrial:
    """A trial whose scores are known; its `best` and `result` are what it has on the disk.

    It diverges at step `diverges` (0: never), and has an evaluation after each step.
    """

    def __init__(self, number: int, scores: list[float], diverges: int):
        self.config = SimpleNamespace(patience=0)
        self.workdir = pathlib.Path(f"trials/{number}")
        self.scores, self.diverges = scores, diverges
        self.best, self.result = (None, None), None


class FakeRun(TrialRun):
    _metric = "f1"

    def __init__(self, setup, trial, first_step):
        result = trial.result or {}
        self.trial, self.settings, self.key = trial, {}, np.zeros(1)
        self.num_steps = result.get("steps", len(trial.scores))
        self.finished, self.diverged = bool(result), result.get("diverged")
        self.evaluations_since_best, self.stopped_early, self.pruned = 0, False, False
        self.writer = SimpleNamespace(sync=lambda: None)
        self.prediction, self.prediction_size = None, 0
        self.best_step, self.score = trial.best
        self.score_loss = None

    def evaluate(self, step, split, scores):
        pass

    def save_best(self, step, params, scores, tuned, files):
        self.set_score(scores)
        self.best_step = step
        self.trial.best = step, self.score

    def finish(self, predictions, began):
        self.finished = True
        self.trial.result = {"steps": self.num_steps, "pruned": self.pruned}

    def diverge(self, step):
        self.finished, self.diverged = True, step
        self.trial.result = {"diverged": step}


class FakeCheckpointer:
    """Keeps the last state, with its settings, unless it `loses` it: a save may not complete."""

    def __init__(self, loses):
        self.saved, self.settings, self.loses = (None, {}, None), {}, loses

    def latest_step(self):
        return self.saved[0]

    def save(self, state):
        if not self.loses():
            self.saved = state.step, self.settings, state

    def restore(self, step, shapes):
        return self.saved[2]


class Killed(Exception):
    pass


def state_of(numbers, step=0):
    """Returns a state whose parameters are the numbers of the trials."""
    return SimpleNamespace(params=np.array(numbers), step=step)


def run_to_the_end(trials, prune_from, kill, checkpointer, monkeypatch):
    """Runs the trials as `finetune.run_trials` does; `kill` raises Killed, or does not."""
    directory, (step, settings, _) = pathlib.Path("program"), checkpointer.saved
    names = settings.get("stacked_trials", [])
    monkeypatch.setattr(stacks, "saved_trials", lambda _: names)
    monkeypatch.setattr(stacks, "load_settings", lambda _: settings)
    # As a resumed run compares them: none is taken for a field of its configuration.
    assert not describe_differences(settings, {}, directory, ())
    begun = [each for each in trials if not names or stacks.trial_name(each, directory) in names]
    stack_steps = SimpleNamespace(
        init=lambda keys, _: state_of(range(len(keys))),
        select=lambda state, indices: state_of(state.params[indices], state.step),
        abstract_state=lambda _: None,
        pick=lambda params, index: params[index],
        merge=lambda params, _: params,
        freeze=lambda _: None,
    )
    task = SimpleNamespace(selection_split=SimpleNamespace(name="dev"))
    setup = SimpleNamespace(
        steps=stack_steps,
        mesh=SimpleNamespace(shape={"trial": 1}),
        data=SimpleNamespace(task=task, pretrained=None),
        peft_format=lambda: None,
    )
    outside = sum("diverged" in each.result for each in trials if each not in begun)
    stack = Stack(setup, begun, directory, checkpointer, outside)
    state = stack.initial_state()

    def predict(split, params, frozen):
        return [trials[number].scores[state.step - 1] for number in params]

    while not stack.is_finished:
        state = stack.begin(state)
        for step in range(stack.start + 1, stack.stop + 1):
            state.step = step
            for run in stack.runs:
                if run.trial.diverges == step and not run.finished:
                    run.diverge(step)
            if stack.is_finished:
                break

            stack.evaluate(step, state.params, stack.runs, predict, kill, step >= prune_from)
            ends = step == stack.stop
            kill()
            stack.save(state)
            kill()
            if ends:
                break
        stack.finish(state.params, predict, 0, kill)
        kill()


def reference(trials, prune_from) -> list[int]:
    """Returns the last step of each trial, from the rule as it is documented."""
    planned = [trial.diverges or len(trial.scores) for trial in trials]
    ends = list(planned)
    for step in range(prune_from, max(planned)):
        diverged = [n for n, trial in enumerate(trials) if ends[n] == trial.diverges <= step]
        running = [n for n, end in enumerate(ends) if end >= step and n not in diverged]
        for number in running:
            others = [trials[n].scores[step - 1] for n in running if n != number]
            others += [-math.inf] * len(diverged)
            best = max(trials[number].scores[:step])
            if len(others) >= MIN_OTHERS and best < statistics.median(others):
                ends[number] = step
    return ends


@pytest.mark.parametrize("seed", range(10))
def test_trials_of_a_stack_stop_at_the_same_steps_however_often_it_is_killed(seed, monkeypatch):
    monkeypatch.setattr(stacks, "TrialRun", FakeRun)
    monkeypatch.setattr(stacks, "tune_and_score", lambda _, score: ({"f1": score}, {}))
    monkeypatch.setattr(stacks, "stack_trees", list)
    monkeypatch.setattr(stacks, "write_json", lambda *_: None)
    monkeypatch.setattr(Stack, "_predict_best", lambda *_: {})
    rng = random.Random(seed)
    count, prune_from = rng.randint(6, 24), rng.randint(1, 3)
    curves = [[n / 8 + rng.random() for n in range(rng.choice([4, 9, 9]))] for _ in range(count)]
    diverges = [
        rng.randint(1, 7) if len(curve) > 8 and rng.random() < 0.2 else 0 for curve in curves
    ]
    results = []
    for is_killed in (False, *[True] * 6):
        trials = [FakeTrial(n, *each) for n, each in enumerate(zip(curves, diverges, strict=True))]

        def loses(is_killed=is_killed):
            return is_killed and rng.random() < 0.5

        def kill(*_, is_killed=is_killed, **__):
            if is_killed and rng.random() < 0.2:
                raise Killed

        checkpointer = FakeCheckpointer(loses)
        while any(trial.result is None for trial in trials):
            with contextlib.suppress(Killed):
                run_to_the_end(trials, prune_from, kill, checkpointer, monkeypatch)
        results.append([trial.result for trial in trials])
    assert all(each == results[0] for each in results)
    ends = [result.get("steps") or result["diverged"] for result in results[0]]
    assert ends == reference(trials, prune_from)
    planned = [trial.diverges or len(trial.scores) for trial in trials]
    pruned = [result.get("pruned", False) for result in results[0]]
    assert pruned == [end < last for end, last in zip(ends, planned, strict=True)]
    assert any(pruned) or any(diverges)
