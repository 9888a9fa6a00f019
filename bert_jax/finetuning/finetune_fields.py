"""The fields of all fine-tuning configurations, and which of them may change."""

from ml_collections import ConfigDict

from bert_jax.configs.finetune import (
    feature_based,
    fields,
    glue,
    multiple_choice,
    retrieval,
    squad,
    tagging,
    text_classification,
)
from bert_jax.configs.finetune.fields import FIELDS, OPTIONAL, PATHS, RUNNING, TRAINING
from bert_jax.runtime import config_fields
from bert_jax.runtime.config_fields import Field

# Task -> the configuration that has all of its fields.
CONFIGS = {
    "text_classification": text_classification,
    "glue": glue,
    "squad": squad,
    "tagging": tagging,
    "multiple_choice": multiple_choice,
    "retrieval": retrieval,
}

PER_TRIAL = frozenset(fields.PER_TRIAL)
"""Fields in which the trials of a stack may differ: they change no shape of the program."""

KEEPING_EXAMPLES = PER_TRIAL | {*TRAINING, *RUNNING}
"""Fields that change neither the examples of a task nor the weights to start from."""

MAY_CHANGE = {*PATHS, *RUNNING}.union(*(each.DATA_PATHS for each in CONFIGS.values()))
"""Fields that may differ when a run is resumed, of any task."""


def known_fields(config: ConfigDict) -> dict[str, Field]:
    """Returns the fields of a configuration; for a task of one's own, those that all have."""
    task = CONFIGS.get(config.get("task", "text_classification"))
    data = task.DATA_PATHS | task.DATA if task else {}
    return FIELDS | OPTIONAL | data | feature_based.FIELDS


def check_required_fields(config: ConfigDict, prefix: str = "config.") -> None:
    """Raises ValueError if `config` lacks a field that its task, or every task, has.

    `prefix` is as in `check_required`.
    """
    task = CONFIGS.get(config.get("task", "text_classification"))
    fields = FIELDS | task.DATA_PATHS | task.DATA if task else FIELDS
    file = (task or text_classification).__name__.rpartition(".")[2]
    config_fields.check_required(config, fields, f"configs/finetune/{file}.py", prefix)


def check_numbers(config: ConfigDict) -> None:
    """Raises ValueError for a number that is out of the bounds of its field."""
    config_fields.check_numbers(config, known_fields(config))
