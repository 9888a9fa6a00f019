"""What a run trains on, and what it logs of it."""

import dataclasses
from types import SimpleNamespace

import pytest

from bert_jax.configs.finetune import text_classification
from bert_jax.data.features import ModelInput
from bert_jax.finetuning import task_data
from bert_jax.finetuning.task_data import log_task
from bert_jax.model import heads
from bert_jax.tasks.task import Split, Task

EMPTY = Task(heads.CLASSIFICATION, ("a", "b", "c"), [], (), "dev/f1")


def test_splits_and_notes_that_do_not_exist_are_not_logged(caplog):
    caplog.set_level("INFO", "absl")
    log_task(EMPTY, None, 0)
    log_task(dataclasses.replace(EMPTY, notes={"truncated": 3}), None, 0)
    assert [record.getMessage() for record in caplog.records] == ["Notes: truncated: 3"]


def test_log_counts_examples_of_splits_not_their_features(caplog):
    caplog.set_level("INFO", "absl")
    features = [ModelInput((), ())] * 1500
    splits = [
        Split("dev", features, None, None, counts={"queries": 1200, "passages": 300}),
        Split("test", features, None, None, counts={"questions": 700}),
        Split("other", features, None, None),
    ]
    log_task(dataclasses.replace(EMPTY, splits=tuple(splits)), None, 0)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == (
        "Splits: dev (1,200 queries, 300 passages), test (700 questions), other (1,500 examples)"
    )


def test_fraction_of_train_that_leaves_out_no_example_is_refused(monkeypatch):
    """Such as that of a task of one's own that does not read the field."""
    notes = {"train examples dropped": 3}  # By max_train_examples.
    task = dataclasses.replace(EMPTY, train=[ModelInput((), ())] * 9, notes=notes)
    monkeypatch.setattr(task_data, "read_task", lambda *_: task)
    config = text_classification.get_config()
    config.train_fraction = 0.5
    source = SimpleNamespace(settings={}, tokenizer=None)
    with pytest.raises(ValueError, match=r"^config\.train_fraction=0\.5: .*limit_examples"):
        task_data.read_task_data(config, source)
