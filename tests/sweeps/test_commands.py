"""The command of a trial has exactly its configuration."""

import shlex

import pytest
from absl import flags
from ml_collections.config_flags.tuple_parser import TupleParser

from bert_jax.configs.sweeps import paper
from bert_jax.runtime.command_line import define_config
from bert_jax.sweeps.commands import finetune_command, flag_text
from bert_jax.sweeps.configurations import flatten, override
from bert_jax.sweeps.settings import known_fields

VALUES = {
    "nothing": {},
    "numbers": {"learning_rate": 3e-5, "batch_size": 8, "num_epochs": 2.0},
    "a placeholder": {"model.dropout_rate": 0.2, "model.scan_layers": False},
    "text": {"data.train": "own files/it's $1.csv", "data.text_pair": "b"},
    "tuples": {"class_weights": "balanced", "data.labels": ("a b", "c")},
    "weights": {"class_weights": (1.0, 2.5)},
    "awkward texts": {"data.labels": ("it's", 'say "no"', "None", "1", "naïve 😀", "a\\b", "")},
    "a label that reads as a value": {"data.labels": ("None",)},
    "a flag": {"new_head": True, "save_training_state": False},
}


@pytest.mark.parametrize("arg", ["text_classification", "glue:mrpc,runlocal"])
@pytest.mark.parametrize("case", VALUES)
def test_command_has_the_configuration_of_the_trial(case, arg):
    config = paper.get_config(arg)
    known = {k: v for k, v in VALUES[case].items() if k in flatten(config.base)}
    trial = override(config.base, known, "grid")
    trial.seed = 3
    command = finetune_command(config.base_config, trial, "runs/best of all")
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "bert_jax.finetune"]
    assert words[4] == "--workdir=runs/best of all"
    values, argv = flags.FlagValues(), ["finetune", words[3], *words[5:]]
    define_config("", known_fields, values, argv)
    values(argv)
    assert repr(sorted(flatten(values.config).items())) == repr(sorted(flatten(trial).items()))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (("balanced",), "balanced"),
        ((1.0, 2.5), "1.0,2.5"),
        ((1e-5,), "(1e-05,)"),
        (("1",), '("1",)'),
        (("a b", "c"), '("a b", "c")'),
        ((), "()"),
        (3e-5, "3e-05"),
        (False, "False"),
    ],
)
def test_flag_has_no_more_quotes_than_its_value_needs(value, text):
    assert flag_text(value) == text
    assert not isinstance(value, tuple) or TupleParser().parse(text) == value
    assert "'" not in text  # The quotes of the shell.


def test_no_command_for_a_configuration_of_another_file():
    trial = paper.get_config("squad").base
    assert finetune_command("", trial, "runs/best") == ""
    assert finetune_command("configs/finetune/glue.py:mrpc", trial, "runs/best") == ""
