"""Adds a teacher's outputs to the training examples.

The teacher is fixed and has no dropout, so that its outputs are computed once, before training. It
reads the examples with its own tokenizer and the settings of its training; only if there is an
output for each token (tags, spans) must both models read the same tokens.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from bert_jax.checkpoints.parameters import log_report
from bert_jax.checkpoints.read import read_model
from bert_jax.data.features import LabelLayout, ModelInput
from bert_jax.finetuning.finetune_setup import FinetuneSetup, setup_finetuning
from bert_jax.finetuning.pretrained_head import check_modules
from bert_jax.finetuning.step import predict
from bert_jax.finetuning.task_data import TaskData, read_task_data
from bert_jax.finetuning.trials import pad_to_trial_axis, stack_trees
from bert_jax.model.heads import HEADS, find_head
from bert_jax.sharding.mesh import batch_sharding
from bert_jax.tasks import spans
from bert_jax.tasks.tag_sets import scheme_of_labels
from bert_jax.tasks.task import Task


def with_teacher(config: ConfigDict, data: TaskData) -> TaskData:
    """Returns the data with the outputs of `config.teacher`, if there is one to learn from.

    Raises ValueError if it has another head or other labels, or does not fit the examples.
    """
    task = data.task
    if not config.teacher:
        if task.head.takes_guide:
            raise ValueError("config.teacher is not set: this loss needs a guide, a bi-encoder")
        return data
    if not (task.head.soft_loss or task.head.takes_guide):
        others = ", ".join(name for name, head in HEADS.items() if head.soft_loss)
        raise ValueError(
            f"config.teacher={config.teacher}: expected none, as there are no soft targets for "
            f"{task.head.name} with this loss, only for {others}"
        )
    teacher = read_teacher(config, task)
    is_per_position = task.head.input_kind == "positions"
    if is_per_position:
        check_same_tokens(config.teacher, teacher.data.task.train, task.train)
    outputs = predict_examples(teacher)
    train = [
        dataclasses.replace(feature, teacher_outputs=output)
        for feature, output in zip(task.train, outputs, strict=True)
    ]
    shape = outputs[0].shape[-1:] if is_per_position else outputs[0].shape
    layout = LabelLayout(dtype=np.float32, per_position=is_per_position, shape=shape)
    return dataclasses.replace(
        data,
        task=dataclasses.replace(task, train=train),
        train_shape=dataclasses.replace(data.shape, teacher_layout=layout),
        contents=data.contents | {"teacher": teacher.data.contents["init_from"]},
    )


def read_teacher(config: ConfigDict, task: Task) -> FinetuneSetup:
    """Returns the setup with which the teacher predicts the training examples of `config`."""
    teacher = read_model(config.teacher)
    log_report(config.teacher, teacher.report)
    head = teacher.settings.get("head")
    check_head(config.teacher, head, task)
    config = config.copy_and_resolve_references()
    config.update({"init_from": config.teacher, "teacher": "", "new_head": False})
    # It only predicts: the fields of the student's training do not apply.
    config.update({"layer_decay": 1.0, "freeze_layers": 0, "class_weights": ()})
    config.lora.update({"rank": 0, "alpha": 0.0, "targets": ""})
    config.model.lstm_size = 0
    config.max_eval_examples = 1
    max_length = teacher.settings["architecture"]["max_position_embeddings"]
    config = with_settings_of_head(config, head, max_length)
    logging.info("Reading the training examples as the teacher in %s does", config.init_from)
    return setup_finetuning(config, teacher, read_task_data(config, teacher))


def with_settings_of_head(
    config: ConfigDict, head: Mapping, max_position_embeddings: int
) -> ConfigDict:
    """Returns `config` with the settings that `head` was trained with, as `bert_jax.load` does.

    Settings that an imported head does not store are those that `bert_jax.load` assumes.
    """
    check_modules(head)
    settings = {"max_seq_length": max_position_embeddings}
    predicts = find_head(head).predicts
    if predicts == "span":
        settings |= spans.span_config(head, max_position_embeddings)._asdict()
    elif predicts == "tag":
        settings["scheme"] = scheme_of_labels(head["labels"])
    settings |= {name: value for name, value in head.items() if name not in ("task", "labels")}
    config = config.copy_and_resolve_references()
    for fields in (config, config.data, config.get("similarity", {})):
        for name, value in settings.items():
            if name in fields:
                fields[name] = value
    if "features" not in head:  # In a feature-based head, the BiLSTM is part of the head itself.
        config.model.lstm_size = head.get("lstm_size", 0)
    return config


def check_head(directory: str, head: dict | None, task: Task) -> None:
    """Raises ValueError if the head of the teacher in `directory` does not fit the task.

    It must be of the same kind, and have the same labels.
    """
    name = task.head.name
    if not head or head["task"] != name:
        has = f"a head for {head['task']}" if head else "no head"
        raise ValueError(
            f"config.teacher={directory} has {has}, and this task needs one for {name}: "
            "expected a model that was fine-tuned for it"
        )
    # A regression has one label, which is only a name.
    if list(head["labels"]) != list(task.labels) and task.head.predicts != "value":
        labels, expected = ",".join(head["labels"]), ",".join(task.labels)
        raise ValueError(
            f"config.teacher={directory} has the labels {labels}, and the task {expected}: "
            "expected the same in the same order; where the task has config.data.labels, it sets "
            "the order"
        )


def check_same_tokens(
    directory: str, teacher: Sequence[ModelInput], student: Sequence[ModelInput]
) -> None:
    """Raises ValueError if the teacher in `directory` and the student do not read the same tokens.

    `teacher` and `student` are the training examples as each of them reads them.
    """
    is_same = len(teacher) == len(student) and all(
        np.array_equal(np.concatenate(x.sequences), np.concatenate(y.sequences))
        for x, y in zip(teacher, student, strict=True)
    )
    if not is_same:
        raise ValueError(
            f"config.teacher={directory} tokenizes the training examples differently, and "
            "this task has an output for each token: expected the student's vocabulary, and the "
            "same max_seq_length and fields of config.data"
        )


def predict_examples(teacher: FinetuneSetup) -> list[np.ndarray]:
    """Returns the outputs of the teacher's head for each training example."""
    data, steps = teacher.data, teacher.steps
    stack = stack_trees(pad_to_trial_axis([data.pretrained], teacher.mesh))
    prediction, *_ = predict(
        steps.predict,
        jax.device_put(stack, steps.stack_shardings.params),
        data.task.head,
        data.task.train,
        data.shape,
        teacher.rows_per_prediction,
        batch_sharding(teacher.mesh),
    )
    return prediction.outputs
