"""Tagging with a BiLSTM on features of a frozen encoder; files and scores as in `tagging`."""

import dataclasses

from ml_collections import ConfigDict

from bert_jax.model.feature_based import FEATURES
from bert_jax.model.heads import FEATURE_BASED, Head
from bert_jax.tasks import tagging
from bert_jax.tasks.task import Task
from bert_jax.tokenization import Tokenizer


def get_head(config: ConfigDict) -> Head:
    return FEATURE_BASED


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads the files as `tagging.get_task` does. Also raises ValueError for unknown features."""
    if config.features not in FEATURES:
        raise ValueError(f"features is {config.features!r}: expected one of {', '.join(FEATURES)}")
    task = tagging.get_task(config, tokenizer)
    options = {"features": config.features, "lstm_size": config.lstm_size}
    return dataclasses.replace(task, head=FEATURE_BASED, head_settings=task.head_settings | options)
