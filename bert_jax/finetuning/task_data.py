"""Reads what a run trains on: examples, rows, head, and the parameters to start from."""

import dataclasses
import functools
from collections.abc import Sequence

from absl import logging
from ml_collections import ConfigDict

from bert_jax.checkpoints.parameters import LoadedModel
from bert_jax.data.features import RowShape, check_segments, max_features
from bert_jax.finetuning.class_weights import find_class_weights
from bert_jax.finetuning.pretrained_head import initial_params
from bert_jax.model.architecture import config_from_settings
from bert_jax.model.heads import TARGET_SCALE, Head, find_head, with_lstm, with_target_std
from bert_jax.runtime.named_modules import import_part
from bert_jax.tasks.baselines import score_baselines
from bert_jax.tasks.duplicates import count_duplicates
from bert_jax.tasks.hub_fields import with_hub_fields
from bert_jax.tasks.tables import content_hash
from bert_jax.tasks.task import OUTSIDE_FRACTION, Task
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.state import parameters_hash

TO_PREDICT = (
    "to predict with a trained model, run python -m bert_jax.predict --model=DIR --input=FILE "
    "--output=FILE"
)


@dataclasses.dataclass(frozen=True)
class TaskData:
    """What a run trains on: the same for runs that differ only in `KEEPING_EXAMPLES`.

    Attributes:
      task: its examples, and its head with the weights of the classes.
      head_settings: of the head, as checkpoints store them.
      pretrained: the parameters to start from; the others are randomly initialized.
      shape: the rows of examples.
      train_shape: the rows to train on, which also hold the outputs of any teacher.
      fields: `config.data` as it was read, with the splits and columns of a data set of the Hub.
      contents: hashes of the files, weights and vocabulary that are read, by name, which
        checkpoints store.
    """

    task: Task
    head_settings: dict
    pretrained: dict
    shape: RowShape
    train_shape: RowShape
    fields: dict
    contents: dict

    @functools.cached_property
    def baselines(self) -> list[dict]:
        """The scores of `score_baselines`, computed once for all trials."""
        return score_baselines(self.task)

    @functools.cached_property
    def duplicates(self) -> list[dict]:
        """The counts of `count_duplicates`, computed once for all trials."""
        return count_duplicates(self.task)


def read_task_data(
    config: ConfigDict, source: LoadedModel, labels_of_run: Sequence[str] = ()
) -> TaskData:
    """Reads the examples of `config`, and what the head takes from the initial weights.

    `source` has these weights; `labels_of_run` are the labels of a run to resume. Raises ValueError
    or FileNotFoundError if the configuration or the files are invalid.
    """
    config = with_hub_fields(config)
    saved_head, tokenizer = source.settings.get("head"), source.tokenizer
    task = read_task(config, saved_head, tokenizer, labels_of_run)
    if not task.train:
        raise ValueError(f"task={config.task} has no examples to train on; {TO_PREDICT}")
    if 0 < config.train_fraction < 1 and not task.notes.get(OUTSIDE_FRACTION):
        raise ValueError(
            f"config.train_fraction={config.train_fraction:g}: no training example is left out. "
            "Expected a smaller fraction; a task of your own must call limit_examples of "
            "bert_jax/tasks/task.py with the notes of the task that it returns"
        )

    head_settings = {"task": task.head.name, "labels": list(task.labels)}
    head_settings |= {"max_seq_length": config.max_seq_length} | task.head_settings
    if lstm_size := config.model.lstm_size:
        if not task.head.lstm_module:
            name = task.head.name
            raise ValueError(f"config.model.lstm_size={lstm_size}: expected 0 for task {name}")
        head_settings["lstm_size"] = lstm_size
        task = dataclasses.replace(task, head=with_lstm(task.head))
    if find_head(head_settings).module is not task.head.module:
        raise ValueError(
            f"the head of task {config.task} has the module of another head than {task.head.name}, "
            "whose name it has: give it a name of its own, that of the module with HEAD"
        )
    model_config = config_from_settings(source.settings)
    pretrained = initial_params(
        source.params, model_config, saved_head, head_settings, config.new_head
    )
    if "head" in pretrained:
        tuned = {name: saved_head[name] for name in task.tuned if name in saved_head}
        task = task.with_settings(tuned)
        head_settings |= tuned
        # A pretrained head keeps the scale of its outputs, whatever the labels of this run.
        for name in TARGET_SCALE:
            head_settings.pop(name, None)
            if name in saved_head:
                head_settings[name] = saved_head[name]
    if "target_std" in head_settings:
        head = with_target_std(task.head, head_settings["target_std"])
        task = dataclasses.replace(task, head=head)

    check_segments(model_config, task.train)
    for split in task.splits:
        check_segments(model_config, split.features)
    sequences_per_feature = len(task.train[0].sequences)
    shape = row_shape(config.max_seq_length, sequences_per_feature, task.head, tokenizer.pad_id)

    data_dir = config.data.get("data_dir", "")
    contents = {name: content_hash(each, data_dir) for name, each in task.files.items()}
    contents |= {"init_from": parameters_hash(pretrained), "vocabulary": tokenizer.sha256[:16]}
    return TaskData(
        task=task,
        head_settings=head_settings,
        pretrained=pretrained,
        shape=shape,
        train_shape=shape,
        fields=config.data.to_dict(),
        contents=contents,
    )


def row_shape(max_seq_length: int, sequences_per_feature: int, head: Head, pad_id: int) -> RowShape:
    """Returns the shape of rows that are large enough for any feature."""
    return RowShape(
        length=max_seq_length * sequences_per_feature,
        max_sequences=max_features(max_seq_length, head.tokens_per_slot) * sequences_per_feature,
        label_layout=head.label_layout,
        pad_id=pad_id,
        sequences_per_feature=sequences_per_feature,
    )


def read_task(
    config: ConfigDict,
    saved_head: dict | None,
    tokenizer: Tokenizer,
    labels_of_run: Sequence[str] = (),
) -> Task:
    """Reads the examples of `config`; `saved_head` describes the head in the weights.

    Labels found in the examples keep the order of the run to resume, or of a head with the same
    labels, because earlier versions may have sorted them otherwise. Raises ValueError or
    FileNotFoundError if the configuration or the files are invalid.
    """
    try:
        module = import_part("bert_jax.tasks", config.task, "get_task")
    except ValueError as error:
        raise ValueError(f"config.task={config.task}: {error}") from None
    task, order = module.get_task(config, tokenizer), list(labels_of_run)
    if not order and saved_head and saved_head["task"] == task.head.name and not config.new_head:
        order = list(saved_head["labels"])
    is_found = "labels" in config.data and not any(map(str, config.data.labels))
    if is_found and order != list(task.labels) and sorted(order) == sorted(task.labels):
        origin = "the run in the workdir" if labels_of_run else "the head in the weights"
        logging.info("The order of the labels is that of %s: %s", origin, ", ".join(order))
        config = config.copy_and_resolve_references()
        config.data.labels = tuple(order)
        task = module.get_task(config, tokenizer)
    weights = find_class_weights(config.class_weights, task, config.train_fraction)
    return dataclasses.replace(task, head=dataclasses.replace(task.head, class_weights=weights))


def log_task(task: Task, shape: RowShape, num_steps: int) -> None:
    """Logs the sizes of the task's splits, and how full the rows of its training set are."""
    if task.train:
        num_tokens, num_rows = sum(map(len, task.train)), len(shape.pack(task.train))
        logging.info(
            "%d training features in rows of %d tokens, %.0f %% full; %d steps",
            len(task.train),
            shape.length,
            100 * num_tokens / (num_rows * shape.length),
            num_steps,
        )
    if task.splits:
        splits = (f"{split.name} ({split.describe_size()})" for split in task.splits)
        logging.info("Splits: %s", ", ".join(splits))
    if any(task.notes.values()):
        notes = (f"{name}: {count}" for name, count in task.notes.items() if count)
        logging.info("Notes: %s", "; ".join(notes))
