"""Early stopping: what it refuses, and the evaluation at which it stops."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest

from bert_jax.configs.finetune import retrieval, text_classification
from bert_jax.finetuning.finetune_setup import check_patience
from bert_jax.finetuning.hyperparameters import finetune_schedule, make_hyperparameters
from bert_jax.finetuning.trials import TrialRun
from tests.helpers.models import small_model_config

ENDLESS = {"patience": 2, "decay_power": 0.0, "warmup_steps": 5}


def task_of(predicts="class", has_labels=True):
    return SimpleNamespace(
        head=SimpleNamespace(predicts=predicts),
        selection_split="dev" if has_labels else None,
        metric="dev/accuracy",
    )


def make_config(changes, file=text_classification):
    config = file.get_config().copy_and_resolve_references()
    config.update_from_flattened_dict(changes)
    return config


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"patience": 2}, ["decay_power=0", "warmup_steps=N"]),
        ({"patience": 2, "warmup_fraction": 0.0}, ["decay_power=0"]),
        (ENDLESS | {"decay_power": 0.5}, ["decay_power=0"]),
        (ENDLESS | {"warmup_steps": None}, ["warmup_steps=N"]),
        (ENDLESS | {"warmup_steps": None, "warmup_fraction": 0.0}, []),
        (ENDLESS | {"warmup_steps": 0}, []),
        (ENDLESS, []),
        ({}, []),
    ],
)
def test_patience_is_refused_with_a_schedule_that_depends_on_the_planned_end(changes, fields):
    config = make_config(changes)
    if not fields:
        return check_patience(config, task_of())
    with pytest.raises(ValueError, match=r"^config\.patience=2: ") as raised:
        check_patience(config, task_of())
    shown = [name for name in ("decay_power=0", "warmup_steps=N") if name in str(raised.value)]
    assert shown == fields


def test_patience_is_refused_with_a_loss_that_depends_on_the_planned_end():
    config = make_config(ENDLESS, retrieval)
    check_patience(config, task_of("vector"))
    with pytest.raises(ValueError, match=r"flops_warmup_fraction=0"):
        check_patience(config, task_of("sparse_vector"))
    config.loss.flops_warmup_fraction = 0.0
    check_patience(config, task_of("sparse_vector"))


def test_patience_is_refused_without_a_metric():
    with pytest.raises(ValueError, match=r"config\.patience=2: .*config\.data\.dev"):
        check_patience(make_config(ENDLESS), task_of(has_labels=False))


def test_learning_rate_that_patience_needs_does_not_depend_on_the_number_of_steps():
    config = make_config(ENDLESS | {"learning_rate": 2e-3})
    for num_steps in (40, 7000):
        values = make_hyperparameters(config, small_model_config(), num_steps)
        schedule = finetune_schedule(config, values)
        steps = np.arange(40)
        np.testing.assert_allclose(schedule(steps), 2e-3 * np.minimum(steps / 5, 1), rtol=1e-6)


def make_run(patience: int, num_steps: int) -> TrialRun:
    run = object.__new__(TrialRun)
    run.trial = SimpleNamespace(
        config=SimpleNamespace(patience=patience), workdir=SimpleNamespace(name="run")
    )
    run.num_steps, run.best_step, run.stopped_early = num_steps, None, False
    run.evaluations_since_best = 0
    return run


def last_step(scores: list[float], patience: int) -> int:
    """Returns the number of the evaluation after which the rule of Keras' EarlyStopping stops."""
    best, wait = -math.inf, 0
    for number, score in enumerate(scores, 1):
        wait = 0 if score > best else wait + 1
        best = max(best, score)
        if wait >= patience:
            return number
    return len(scores)


@pytest.mark.parametrize("patience", [0, 1, 2, 3])
def test_run_resumed_after_any_evaluation_stops_as_the_rule_of_keras(patience):
    """The best checkpoint of a resumed run may be of a later evaluation than its state."""
    rng = random.Random(patience)
    for _ in range(50):
        scores = [float(rng.randrange(6)) for _ in range(9)]
        expected = last_step(scores, patience) if patience else len(scores)
        run, step, kept = make_run(patience, len(scores)), 0, (0, 0)
        while step < run.num_steps:
            step += 1
            best = scores[run.best_step - 1] if run.best_step else -math.inf
            if scores[step - 1] > best:
                run.best_step = step
            run.count_evaluation(step)
            if rng.random() < 0.7:
                kept = step, run.evaluations_since_best
            if rng.random() < 0.3:  # It is killed, and resumed.
                best_step, run = run.best_step, make_run(patience, len(scores))
                run.best_step, (step, count) = best_step, kept
                run.stop_early(step, count)
        assert run.num_steps == step == expected
        assert run.stopped_early == (expected < len(scores))
