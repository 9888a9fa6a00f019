"""Which fields a configuration of fine-tuning must have: those of our own for the same task."""

import importlib

from ml_collections import ConfigDict

from bert_jax.runtime.config_fields import check_fields

# Task -> the file in configs/finetune that has all of its fields.
CONFIG_FILES = {
    "text_classification": "text_classification",
    "glue": "glue",
    "squad": "squad",
    "tagging": "tagging",
    "multiple_choice": "swag",
    "retrieval": "retrieval",
}


def check_required_fields(config: ConfigDict, prefix: str = "config.") -> None:
    """Raises ValueError if `config` lacks a field, instead of a default that would hide a typo.

    A task of one's own has its own fields in `data`, and in `model` only `lstm_size` is required:
    the others default to those of the checkpoint. `prefix` is as in `check_fields`.
    """
    name = CONFIG_FILES.get(config.get("task", "text_classification"))
    file = name or "text_classification"
    expected = importlib.import_module(f"bert_jax.configs.finetune.{file}").get_config()
    del expected.program
    if not name:
        expected.data = ConfigDict()
    expected.model = ConfigDict({"lstm_size": expected.model.lstm_size})
    check_fields(config, expected, f"configs/finetune/{file}.py", prefix)
