"""The table of fields: it builds the configuration, and says what each field means and may be."""

import pytest
from absl import app, flags
from ml_collections import ConfigDict

from bert_jax.runtime.command_line import define_config, parse_flags
from bert_jax.runtime.config_fields import (
    AT_LEAST_1,
    Bounds,
    Field,
    check_numbers,
    check_required,
    flatten,
    format_fields,
    make_config,
)
from bert_jax.sweeps.settings import known_fields
from tests.helpers.commands import ROOT

FILES = ROOT.glob("configs/*/[!_]*.py")
NO_CONFIGS = ("fields", "recipes")
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in FILES if path.stem not in NO_CONFIGS)

FIELDS = {
    "corpus": Field("", "A directory."),
    "batch_size": Field(32, "Rows per update.", AT_LEAST_1),
    "phase": Field({}, "A second phase."),
    "phase.steps": Field(None, "Default: none.", Bounds(0, 9), kind=int),
    "layers": Field((), "Their numbers."),
}


def read_config(path: str) -> ConfigDict:
    values, argv = flags.FlagValues(), ["program", f"--config={path}"]
    define_config("", known_fields, values, argv)
    parse_flags(argv, values)
    return values.config


@pytest.mark.parametrize("path", CONFIGS)
def test_every_field_has_a_meaning(path):
    """Except the values of a grid or a search, which have the names of fields of `base`."""
    config = read_config(path)
    names, known = flatten(config), known_fields(config)
    assert len(names) > 30
    missing = [name for name in names if name not in known or not known[name].meaning]
    missing.remove("program") if "sweeps" in path else None
    assert [name for name in missing if not name.startswith(("grid.", "search."))] == []


def test_configurations_of_a_table_share_no_values():
    one, other = make_config(FIELDS), make_config(FIELDS)
    assert one.to_dict() == {
        "corpus": "",
        "batch_size": 32,
        "phase": {"steps": None},
        "layers": (),
    }
    one.phase.steps = 3
    one.phase.unlock().new = 1
    assert other.phase.to_dict() == {"steps": None} and FIELDS["phase"].default == {}
    with pytest.raises(TypeError):
        other.phase.steps = "many"


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        (["corpus"], r"^config\.corpus is missing: start from get_config\(\) of a\.py, and"),
        (["phase"], r"^config\.phase is missing"),
        (["phase.steps", "layers"], r"^config\.phase\.steps, config\.layers are missing"),
        (["corpus", "batch_size", "phase", "layers"], r"config\.phase and 1 others are missing"),
    ],
)
def test_missing_fields_are_named_with_the_file_that_has_them(removed, message):
    config = make_config(FIELDS)
    check_required(config, FIELDS, "a.py")
    for name in removed:
        group, _, field = name.rpartition(".")
        del (config[group] if group else config)[field]
    with pytest.raises(ValueError, match=message):
        check_required(config, FIELDS, "a.py")


def test_numbers_are_checked_where_they_are_given():
    config = make_config(FIELDS)
    check_numbers(config, FIELDS)
    check_numbers(config, FIELDS | {"absent": Field(1, "", AT_LEAST_1)})
    config.phase.steps = 10
    with pytest.raises(ValueError, match=r"^config\.phase\.steps=10: expected at least 0 and"):
        check_numbers(config, FIELDS)


def test_fields_are_shown_with_their_meaning_values_and_bounds():
    config = make_config(FIELDS)
    config.own = 3
    assert format_fields(config, FIELDS).splitlines() == [
        "  --config.corpus: A directory.",
        "    (default: '')",
        "  --config.batch_size: Rows per update.",
        "    (default: 32; at least 1)",
        "  config.phase: A second phase.",
        "  --config.phase.steps: Default: none.",
        "    (default: None; int; at least 0 and at most 9)",
        "  --config.layers: Their numbers.",
        "    (default: ())",
        "  --config.own",
        "    (default: 3)",
    ]


def ask_for_help(*arguments: str):
    """Parses flags as a program does that defines --config; returns its exit code or message."""
    values = flags.FlagValues()
    flags.DEFINE_flag(app.HelpFlag(), values)
    define_config("", known_fields, values, [*arguments])
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


def test_help_explains_the_fields_of_an_own_configuration(tmp_path, capsys):
    path = tmp_path / "own.py"
    path.write_text(
        "from bert_jax.configs.finetune import fields\n"
        "from bert_jax.runtime.config_fields import Field\n"
        'FIELDS = {"data.corpus": Field("", "A directory of my own.")}\n'
        "def get_config():\n"
        '    return fields.make_task_config("my.task", FIELDS)\n'
    )
    assert ask_for_help(f"--config={path}", "--help") == 0
    output = capsys.readouterr().out
    assert "  --config.data.corpus: A directory of my own.\n    (default: '')" in output
    assert "  --config.learning_rate: Peak, after the warm-up.\n" in output


def test_help_with_a_missing_config_names_it():
    assert "no config file configs/x.py" in ask_for_help("--help", "--config=configs/x.py")
