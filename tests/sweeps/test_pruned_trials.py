"""Pruning in a sweep: where it can prune nothing, that such a sweep does not grow, the report."""

import json
from types import SimpleNamespace

import pytest
from ml_collections import ConfigDict

from bert_jax.configs.sweeps import paper
from bert_jax.finetuning.pruning import MIN_OTHERS
from bert_jax.finetuning.trials import Trial
from bert_jax.sweeps import plots, report, settings
from bert_jax.sweeps.configurations import grid_overrides, make_configurations
from bert_jax.sweeps.plan import describe_result
from bert_jax.sweeps.programs import Program, check_pruning


def program(name: str, num_trials: int, num_steps: int = 12, eval_every: int = 0) -> Program:
    setup = SimpleNamespace(
        config=SimpleNamespace(eval_every=eval_every),
        steps_per_epoch=4,
        num_steps=lambda trial: trial.num_steps,
    )
    return Program(name, setup, [Trial(SimpleNamespace(num_steps=num_steps), None)] * num_trials)


ENOUGH = MIN_OTHERS + 1


@pytest.mark.parametrize(
    ("programs", "prune_from", "field"),
    [
        ([program("1.1", 1), program("2.1", MIN_OTHERS)], 1, "config.max_stacked_trials"),
        ([program("1.1", ENOUGH)], 3, "config.base.eval_every"),  # Evaluation 3 is the last.
        ([program("1.1", ENOUGH, eval_every=5)], 3, "config.base.eval_every"),
        ([program("1.1", ENOUGH)], 2, None),
        ([program("1.1", ENOUGH, eval_every=2)], 5, None),
        ([program("1.1", ENOUGH, num_steps=4), program("1.2", ENOUGH)], 2, None),
        ([program("1.1", 1, num_steps=1)], 0, None),
    ],
)
def test_sweep_that_can_prune_nothing_is_refused(programs, prune_from, field):
    if not field:
        return check_pruning(programs, prune_from)
    with pytest.raises(
        ValueError, match=rf"^config\.prune_from_evaluation={prune_from}: .*{field}"
    ):
        check_pruning(programs, prune_from)


def test_programs_that_are_too_small_to_prune_are_named(caplog):
    check_pruning([program("1.1", ENOUGH), program("1.2", 2), program("2.1", 1)], 1)
    (message,) = caplog.messages
    assert "programs 1.2, 2.1" in message


def small_sweep(rates, prune_from, seeds=1, eval_every=0):
    config = paper.get_config("text_classification").unlock()
    del config.grid
    config.grid = {"learning_rate": rates}
    config.prune_from_evaluation, config.num_seeds = prune_from, seeds
    config.base.eval_every = eval_every
    return config.lock()


@pytest.mark.parametrize(
    "changes", [{"rates": (1e-3, 2e-3)}, {"seeds": 2}, {"prune_from": 3}, {"eval_every": 5}]
)
def test_sweep_with_pruning_does_not_grow_or_evaluate_at_other_steps(tmp_path, changes):
    fields = {"rates": (1e-3,), "prune_from": 2}
    content = {"config": settings.settings_of(small_sweep(**fields)), "programs": {}}
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    assert settings.check_directory(tmp_path, small_sweep(**fields)) == {}
    with pytest.raises(ValueError, match=r"(?s)other settings.*prune_from_evaluation"):
        settings.check_directory(tmp_path, small_sweep(**(fields | changes)))


@pytest.mark.parametrize("scores", [(0.7, 0.6), (0.6, 0.7)])
def test_pruned_trial_is_named_and_ranks_by_its_score(tmp_path, monkeypatch, scores):
    monkeypatch.setattr(plots, "draw", lambda *_: "<svg></svg>")
    config = small_sweep((1e-3, 2e-3), 1)
    points = make_configurations(config, grid_overrides(config), tmp_path / "trials")
    for (trial,), score, pruned in zip(
        (point.trials for point in points), scores, (False, True), strict=True
    ):
        trial.workdir.mkdir(parents=True)
        (trial.workdir / "metrics.jsonl").touch()
        result = {"seed": 0, "steps": 4 if pruned else 12, "best_step": 4, "seconds": 1.0}
        result |= {"dev": {"accuracy": score}} | ({"pruned": True} if pruned else {})
        trial.result_path.write_text(json.dumps(result))
    found = report.write(tmp_path, config, points, "dev/accuracy")
    assert found["trials"] == {"finished": 1, "pruned": 1}
    assert found["best_configuration"] == {"learning_rate": 1e-3 if scores[0] > 0.65 else 2e-3}
    text = (tmp_path / "report.md").read_text()
    assert "| pruned at step 4: seed 0 |" in text and "A pruned trial" in text
    assert "| pruning | by the median, from evaluation 1 on |" in text
    assert ",pruned at step 4," in (tmp_path / "trials.csv").read_text()
    assert describe_result(points[1].trials[0].result) == "pruned at step 4, in 1.0 s"


def test_report_without_a_pruned_trial_does_not_explain_pruning():
    result = {"dev": {"accuracy": 0.5}, "steps": 4}
    configuration = SimpleNamespace(values={}, trials=[Trial(ConfigDict({"seed": 0}), None)])
    summary = report.Summary(configuration, [result], [0.5], "dev/accuracy")
    assert "pruned" not in report.ranking_blocks([summary])[0]
