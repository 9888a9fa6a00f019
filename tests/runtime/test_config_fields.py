"""Every field of our configurations has a comment, which `--help` shows."""

import copy

import pytest
from absl import app, flags
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from bert_jax.runtime.command_line import define_config, parse_flags, print_config_fields
from bert_jax.runtime.config_fields import describe_fields, format_fields
from tests.helpers.commands import ROOT

CONFIGS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("configs/*/[!_]*.py"))


def read_fields(path: str) -> list:
    """Returns the fields of a config file, found as the command line finds it."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bert_jax.runtime.command_line.format_fields", found.append)
        print_config_fields(["program", f"--config={path}"])
    return found[0]


@pytest.mark.parametrize("path", CONFIGS)
def test_every_field_has_a_comment(path):
    """Except the values of a grid or a search, which have the names of fields of `base`."""
    fields = [field for field in read_fields(path) if not field.is_group]
    assert len(fields) > 30
    missing = [field.name for field in fields if not field.comment]
    assert [name for name in missing if not name.startswith(("grid.", "search."))] == []


def first_config() -> ConfigDict:
    config = ConfigDict()
    # Above,
    # on two lines.
    config.above = "#no comment"
    config.after = 1  # After.
    config.bare = 2
    config.group = ConfigDict()  # A group.
    config.group.inner = placeholder(int)  # Of the group, None: default.

    # Not directly above.

    config.both = (1, 2)  # Both, after.
    config.mesh = ConfigDict({"data": -1})  # In a dict.
    return config


def second_config() -> ConfigDict:
    config = first_config()
    config.group = ConfigDict()
    config.group.inner = 3
    config.after = 4  # A higher value.
    return config


def test_comments_belong_to_the_field_and_to_later_values():
    fields = {field.name: (field.value, field.comment) for field in describe_fields(second_config)}
    assert fields.pop("group")[1] == "A group."
    assert fields.pop("mesh")[1] == "In a dict."
    assert fields == {
        "above": ("#no comment", "Above, on two lines."),
        "after": (4, "After. A higher value."),
        "bare": (2, ""),
        "group.inner": (3, ""),  # Another group, without the comments of the first.
        "both": ((1, 2), "Both, after."),
        "mesh.data": (-1, "In a dict."),
    }
    assert list(fields) == ["above", "after", "bare", "group.inner", "both", "mesh.data"]
    assert ConfigDict.__setitem__.__name__ == "__setitem__"  # No longer recorded.


def test_removed_and_copied_fields_are_listed_as_they_are():
    def get_config():
        config = copy.deepcopy(first_config())
        del config.above
        config.new = 1  # New.
        return config

    fields = {field.name: field.comment for field in describe_fields(get_config)}
    assert "above" not in fields and fields["new"] == "New." and "group.inner" in fields


def test_fields_are_shown_with_their_defaults():
    lines = format_fields(describe_fields(first_config)).splitlines()
    assert lines[:4] == [
        "  --config.above: Above, on two lines.",
        "    (default: '#no comment')",
        "  --config.after: After.",
        "    (default: 1)",
    ]
    assert "  config.group: A group." in lines and "    (default: None; int)" in lines
    assert lines[-3:] == ["  config.mesh: In a dict.", "  --config.mesh.data", "    (default: -1)"]


def ask_for_help(*arguments: str):
    """Parses flags as a program does that defines --config; returns its exit code or message."""
    values = flags.FlagValues()
    flags.DEFINE_flag(app.HelpFlag(), values)
    define_config("", values, [*arguments])
    with pytest.raises(SystemExit) as exited:
        parse_flags(["program", *arguments], values)
    return exited.value.code


@pytest.mark.parametrize("arguments", [["--config", "{}", "--help"], ["--help", "--config={}"]])
def test_help_with_a_config_lists_its_fields(arguments, capsys):
    path = "configs/finetune/squad.py:v2"
    assert ask_for_help(*[argument.format(path) for argument in arguments]) == 0
    output = capsys.readouterr().out
    assert f"Fields of {path}, set as --config.FIELD=VALUE:" in output
    assert (
        "--config.data.null_answers: Questions may have no answer.\n    (default: True)" in output
    )


def test_help_with_a_missing_config_names_it():
    assert "no config file configs/x.py" in ask_for_help("--help", "--config=configs/x.py")
