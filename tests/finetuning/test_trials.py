"""Several seeds of one fine-tuning: their directories, median, minimum and maximum."""

import json
from types import SimpleNamespace

import pytest

from bert_jax.finetuning.step import Prediction
from bert_jax.finetuning.trials import (
    TrialRun,
    seed_directories,
    summarize_seeds,
    warn_of_constant_metric,
)
from bert_jax.tasks.task import Split, Task
from tests.helpers.json_lines import write_lines


def test_seeds_already_in_the_workdir_are_not_omitted_from_its_result(tmp_path):
    for seed in range(3):
        (tmp_path / f"several/seed_{seed}/best/4").mkdir(parents=True)
    (tmp_path / "several/seed_7/best").mkdir(parents=True)  # Nothing was saved.
    (tmp_path / "several/checkpoints/8").mkdir(parents=True)  # To resume them all from.
    (tmp_path / "one/checkpoints/4").mkdir(parents=True)
    (tmp_path / "one/config.json").touch()
    several = tmp_path / "several"
    assert list(seed_directories(several, 0, 5)) == [0, 1, 2, 3, 4]
    assert seed_directories(tmp_path / "one", 7, 1) == {7: tmp_path / "one"}
    for first, count, num_seeds in ((3, 2, 5), (0, 2, 3), (0, 1, 3), (5, 1, 6)):
        message = f"holds runs of the seeds 0, 1, 2: .* config.seed=0 .*seeds={num_seeds}$"
        with pytest.raises(ValueError, match=message):
            seed_directories(several, first, count)
    (tmp_path / "started/seed_0/best/4").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"of the seeds 0: .* and config\.num_seeds=2$"):
        seed_directories(tmp_path / "started", 0, 1)
    with pytest.raises(ValueError, match=r"one holds a run of one seed"):
        seed_directories(tmp_path / "one", 0, 2)


@pytest.mark.parametrize(
    ("evaluations", "best"),
    [
        ([(0.0, 0.574), (0.0, 0.5), (0.0, 0.45), (0.0, 0.432)], 3),
        ([(0.0, 0.5), (0.0, 0.4), (0.0, 0.6)], 1),
        ([(0.5, 0.5), (0.9, 2.0), (0.9, 1.0), (0.8, 0.1)], 2),  # The metric comes first.
        ([(0.5, 0.5), (0.5, 0.5)], 0),
        ([(0.5, None), (0.7, None), (0.7, None)], 1),  # Retrieval has no loss.
        ([(float("-inf"), 0.5), (0.1, 0.9)], 1),
    ],
)
def test_lowest_loss_breaks_ties_of_scores(evaluations, best):
    run = object.__new__(TrialRun)
    run._task = SimpleNamespace(metric="dev/f1")
    run.score = run.score_loss = None
    chosen = None
    for index, (score, loss) in enumerate(evaluations):
        scores = {"f1": score} | ({} if loss is None else {"loss": loss})
        if run.is_better(scores):
            run.set_score(scores)
            chosen = index
    assert chosen == best


def test_the_result_has_the_settings_that_the_checkpoint_stores(tmp_path):
    """Merged adapters round the predictions: tuned on them, a threshold could be another."""

    def with_threshold(tuned):
        return Split(
            "dev",
            [],
            score=lambda outputs: {"above": sum(x > tuned["threshold"] for x in outputs)},
            write=lambda *_: None,
            tune=lambda outputs: {"threshold": outputs[0]},
            with_settings=with_threshold,
        )

    head = SimpleNamespace(is_collapsed=lambda *_: False)
    task = Task(head, (), [], (with_threshold({"threshold": 9.0}),), "dev/above", {})
    run, results = object.__new__(TrialRun), []
    run._task, run.tuned, run.writes, run.pruned, run.seed = (
        task,
        {"threshold": 0.5},
        False,
        False,
        0,
    )
    run.num_steps = run.best_step = 4
    run._tokenizer = SimpleNamespace(layout=SimpleNamespace(cls_last=False))
    run.trial = SimpleNamespace(config=SimpleNamespace(patience=0))
    run.writer = SimpleNamespace(directory=tmp_path, write=lambda *_: None, close=lambda: None)
    run._write_result = results.append
    run.finish({"dev": Prediction([0.6, 0.7], None)}, 0.0)
    assert results[0]["dev"] == {"above": 2}


def test_a_metric_that_never_changed_is_reported(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 2, "dev/f1": 0.0}, {"step": 2, "loss": 1}, {"step": 4, "dev/f1": 0.0}]
    write_lines(path, lines)
    warn_of_constant_metric(path, "dev/f1")
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "dev/f1 was 0.0000 at all 2 evaluations, so the checkpoint"
    )
    warn_of_constant_metric(path, "loss")  # A single one.
    path.write_text(path.read_text() + json.dumps({"step": 6, "dev/f1": 0.1}) + "\n")
    warn_of_constant_metric(path, "dev/f1")
    assert len(caplog.records) == 1


def test_entity_type_that_only_some_seeds_predict_counts_as_0_in_the_others():
    common = {"best_step": 1, "seconds": 1.0}
    without = common | {"seed": 0, "dev": {"f1": 0.5, "f1/PER": 0.5}}
    with_event = common | {"seed": 1, "dev": {"f1": 0.5, "f1/EVENT": 0.0, "f1/PER": 0.7}}
    for results in ([without, with_event], [with_event, without]):
        scores = summarize_seeds(results, "dev/f1")["scores"]
        assert scores["dev/f1/EVENT"] == {"median": 0.0, "min": 0.0, "max": 0.0}
        assert scores["dev/f1/PER"] == pytest.approx({"median": 0.6, "min": 0.5, "max": 0.7})
