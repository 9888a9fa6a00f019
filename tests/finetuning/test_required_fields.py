"""A configuration has every field of ours for its task, or an error names those that it lacks."""

import importlib

import pytest
from ml_collections import ConfigDict

from bert_jax.configs.finetune import text_classification
from bert_jax.finetuning.required_fields import CONFIG_FILES, check_required_fields
from tests.helpers.commands import ROOT

PATHS = ROOT.glob("configs/finetune/[!_]*.py")
FILES = sorted(path.stem for path in PATHS if path.stem != "recipes")  # No configuration.


def get_config(file: str) -> ConfigDict:
    return importlib.import_module(f"bert_jax.configs.finetune.{file}").get_config()


@pytest.mark.parametrize("file", FILES)
def test_our_configurations_are_complete_and_of_a_known_task(file):
    config = get_config(file)
    check_required_fields(config)
    assert config.task in CONFIG_FILES


@pytest.mark.parametrize("file", CONFIG_FILES.values())
def test_each_missing_field_is_named_with_the_file_that_has_it(file):
    fields = [f"data.{name}" for name in get_config(file).data]
    fields += ["tracker", "teacher", "distillation", "mesh.trial", "model.lstm_size"]
    for field in fields:
        config = get_config(file)
        *group, name = field.split(".")
        del (config[group[0]] if group else config)[name]
        message = rf"^config\.base\.{field} is missing: start from get_config\(\) of .*/{file}\.py"
        with pytest.raises(ValueError, match=message):
            check_required_fields(config, "config.base.")


def test_several_missing_fields_are_counted():
    config = text_classification.get_config()
    del config.model, config.tracker
    with pytest.raises(ValueError, match=r"^config\.model, config\.tracker are missing: "):
        check_required_fields(config)
    with pytest.raises(ValueError, match=r"^config\.batch_size, .* and \d+ others are missing"):
        check_required_fields(ConfigDict())


def test_fields_of_the_architecture_and_of_an_own_task_are_its_own():
    config = text_classification.get_config()
    config.model = ConfigDict({"lstm_size": 0})
    check_required_fields(config)
    config.task, config.data = "my.task", ConfigDict({"corpus": "a"})
    check_required_fields(config)
