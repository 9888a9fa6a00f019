"""Tagging by a BiLSTM on features of a frozen encoder; its files and scores are tagging's."""

import dataclasses

from ml_collections import ConfigDict

from bert_jax.model.feature_based import FEATURES
from bert_jax.tasks import tagging
from bert_jax.tasks.task import Task
from bert_jax.tokenization import Tokenizer


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Raises ValueError for features that are not there, and as `tagging.get_task`."""
    if config.features not in FEATURES:
        raise ValueError(f"features is {config.features!r}: expected one of {', '.join(FEATURES)}")
    task = tagging.get_task(config, tokenizer)
    own = {"task": "feature_based", "features": config.features, "lstm_size": config.lstm_size}
    return dataclasses.replace(task, settings=task.settings | own)
