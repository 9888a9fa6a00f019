"""A configuration has every field of ours for its task, or an error names those that it lacks."""

import importlib

import pytest
from ml_collections import ConfigDict

from bert_jax.configs.finetune import text_classification
from bert_jax.finetuning.finetune_fields import CONFIGS, check_numbers, check_required_fields
from tests.helpers.commands import ROOT

NO_CONFIGS = ("fields", "recipes")
PATHS = ROOT.glob("configs/finetune/[!_]*.py")
FILES = sorted(path.stem for path in PATHS if path.stem not in NO_CONFIGS)


def get_config(file: str) -> ConfigDict:
    return importlib.import_module(f"bert_jax.configs.finetune.{file}").get_config()


@pytest.mark.parametrize("file", FILES)
def test_our_configurations_are_complete_and_of_a_known_task(file):
    config = get_config(file)
    check_required_fields(config)
    assert config.task in CONFIGS


@pytest.mark.parametrize("file", [each.__name__.rpartition(".")[2] for each in CONFIGS.values()])
def test_each_missing_field_is_named_with_the_file_that_has_it(file):
    fields = [f"data.{name}" for name in get_config(file).data]
    fields += ["tracker", "teacher", "distillation", "mesh.trial"]
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
    with pytest.raises(ValueError, match=r"^config\.init_from, .* and \d+ others are missing"):
        check_required_fields(ConfigDict())


def test_fields_of_the_architecture_and_of_an_own_task_are_its_own():
    config = text_classification.get_config()
    config.model = ConfigDict()
    check_required_fields(config)
    config.task, config.data = "my.task", ConfigDict({"corpus": "a"})
    check_required_fields(config)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("num_epochs", -1.0, "at least 0"),
        ("per_device_batch_size", -1, "at least 0"),
        ("eval_every", -1, "at least 0"),
        ("weight_decay", -0.1, "at least 0"),
        ("decay_power", float("nan"), "at least 0"),
        ("seed", -1, "at least 0"),
        ("model.lstm_size", -1, "at least 0"),
        ("max_train_examples", -1, "at least 0"),
        ("max_eval_examples", -1, "at least 0"),
        ("train_fraction", -0.1, "at least 0 and at most 1"),
        ("train_fraction", 1.1, "at least 0 and at most 1"),
        ("num_seeds", 0, "at least 1"),
        ("batch_size", 0, "at least 1"),
        ("log_every", 0, "at least 1"),
        ("stall_seconds", 0, "at least 1"),
        ("learning_rate", 0.0, "more than 0"),
        ("learning_rate", float("inf"), "more than 0 and less than infinity"),
        ("clip_norm", 0.0, "more than 0"),
        ("layer_decay", 0.0, "more than 0 and at most 1"),
        ("layer_decay", 1.1, "more than 0 and at most 1"),
        ("warmup_fraction", 1.1, "at least 0 and at most 1"),
        ("distillation.alpha", -0.1, "at least 0 and at most 1"),
        ("distillation.temperature", 0.5, "at least 1"),
    ],
)
def test_number_out_of_its_bounds_is_named_with_them(name, value, expected):
    config = text_classification.get_config()
    config.update_from_flattened_dict({name: value})
    with pytest.raises(ValueError) as raised:
        check_numbers(config)
    assert str(raised.value) == f"config.{name}={value}: expected {expected}"
