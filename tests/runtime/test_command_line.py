"""Flags: `--help` lists them, invalid ones give a one-line message, configs are found anywhere."""

import os
import re
import subprocess
import sys

import pytest
from absl import flags
from ml_collections import config_flags

from bert_jax.runtime.command_line import (
    define_config,
    describe_error,
    parse_flags,
    restart_with_huge_pages,
)
from bert_jax.sweeps.settings import known_fields
from tests.helpers.commands import ROOT


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "data.train=",
            "--config.data.train: there is no field 'train'; the fields are data_dir, directory, "
            "labels",
        ),
        (
            "grid.x=1",
            "--config.grid.x: there is no field 'grid'; the fields are batch_size, class_weights, "
            "clip_",
        ),
        (
            "learning_rat=1",
            "--config.learning_rat: there is no field 'learning_rat'; did you mean "
            '"learning_rate"?',
        ),
    ],
)
def test_unknown_field_is_named_with_the_known_ones(argument, message, monkeypatch):
    arguments = ["--config=configs/finetune/glue.py:mrpc", f"--config.{argument}"]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=arguments)
    monkeypatch.setattr("sys.argv", ["finetune.py"])
    with pytest.raises(SystemExit) as exited:
        parse_flags(["finetune", *arguments], values)
    assert str(exited.value).startswith(f"finetune: {message}")


def read_config(path: str, *arguments: str):
    values, arguments = flags.FlagValues(), [f"--config={path}", *arguments]
    define_config("", known_fields, values, arguments)
    parse_flags(["program", *arguments], values)
    return values.config


def test_configs_of_the_package_are_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = read_config("configs/finetune/squad.py:v2,runlocal", "--config.batch_size=4")
    assert config.task == "squad" and config.data.null_answers and config.batch_size == 4
    local_config = (
        "from bert_jax.configs.finetune import reuters_r8\nget_config = reuters_r8.get_config\n"
    )
    (tmp_path / "configs/finetune").mkdir(parents=True)
    (tmp_path / "configs/finetune/squad.py").write_text(local_config)
    assert read_config("configs/finetune/squad.py").data.text == "Text"
    with pytest.raises(SystemExit, match=r"no config file configs/x\.py:tiny .*such as configs/"):
        read_config("configs/x.py:tiny")
    with pytest.raises(SystemExit, match=r"papr.py \(in its directory: paper.py, search.py\)"):
        read_config("configs/sweeps/papr.py")


def write_to_full_disk(path):
    with open(path, "w", encoding="utf-8") as stream:
        stream.write("text" * 10_000)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (
            write_to_full_disk,
            ["/dev/full"],
            r"\[Errno 28\] .*: /dev/full; free disk space, also in ",
        ),
        (open, ["/nowhere/x"], r"\[Errno 2\] No such file or directory: '/nowhere/x'"),
        (os.kill, [1 << 22, 0], r"\[Errno 3\] No such process in test_error_of_the_system_"),
        (int, ["x"], r"invalid literal for int\(\) with base 10: 'x'"),
    ],
    ids=["full disk", "path", "none", "value"],
)
def test_error_of_the_system_names_its_file_or_what_was_done(
    function, arguments, message, monkeypatch
):
    monkeypatch.setitem(globals(), "__name__", "bert_jax.tools.x")  # As a function of ours.
    with pytest.raises((OSError, ValueError)) as raised:
        function(*arguments)
    assert re.match(message, describe_error(raised.value))


LOGS = r"""
import logging as std_logging, sys, warnings
from absl import app, logging
from tqdm import tqdm
from bert_jax.runtime.command_line import keep_running_without_log, restart_with_huge_pages

std_logging.basicConfig()  # As a library may; absl then replaces the handler.
restart_with_huge_pages()
keep_running_without_log()

def main(argv):
    logging.error("logged")
    print("Gr\xf6\xdfe \u4f53\u80b2", flush=True)
    print("printed", file=sys.stderr, flush=True)
    warnings.warn("warned")
    for _ in tqdm(range(3), mininterval=0):
        pass
    open(argv[1], "w").write("done")

app.run(main)
"""


@pytest.mark.parametrize("lost", ["reader", "disk", "closed", "locale"])
def test_log_that_cannot_be_written_ends_no_program(tmp_path, lost):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open("/dev/full", "w") as full:
        streams = {"reader": write_end, "disk": full, "closed": None, "locale": subprocess.PIPE}
        command = [sys.executable, "-X", "utf8=0", "-c", LOGS, str(tmp_path / "file")]
        if lost == "closed":
            command = ["bash", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "bash", *command]
        # ASCII, which has none of the printed characters.
        environment = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
        run = subprocess.run(
            command, stdout=streams[lost], stderr=streams[lost], cwd=ROOT, env=environment
        )
    os.close(write_end)
    assert run.returncode == 0 and (tmp_path / "file").read_text() == "done"
    if lost == "locale":
        assert run.stdout.rstrip() == rb"Gr\xf6\xdfe \u4f53\u80b2"
        assert all(line in run.stderr for line in (b"logged", b"printed", b"warned"))


def check_help(*programs: str) -> None:
    """Runs each program with --help, and with an unknown flag, all at the same time."""
    runs = [
        (argument, subprocess.Popen(
            [sys.executable, *program.split(), argument],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ))
        for program in programs
        for argument in ("--help", "--nosuchflag=1")
    ]  # fmt: skip
    for argument, process in runs:
        output, errors = process.communicate()
        if argument == "--help":
            assert process.returncode == 0 and "Try --helpfull" in output, process.args
        else:
            assert process.returncode == 1 and not output, process.args
            (line,) = errors.strip().splitlines()
            assert line.endswith("Unknown command line flag 'nosuchflag'")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is Linux's")
def test_program_restarts_once_with_its_arguments_for_huge_pages(monkeypatch):
    restarts = []
    monkeypatch.setattr(os, "execv", lambda *arguments: restarts.append(arguments))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "bert_jax.pretrain", "--workdir=run"])
    monkeypatch.delenv("GLIBC_TUNABLES")
    restart_with_huge_pages()
    restart_with_huge_pages()
    arguments = [sys.executable, "-m", "bert_jax.pretrain", "--workdir=run"]
    assert restarts == [(sys.executable, arguments)]
    monkeypatch.setenv("GLIBC_TUNABLES", "")  # Set by the user: nothing is changed.
    restart_with_huge_pages()
    assert len(restarts) == 1


def test_help_lists_the_flags_and_unknown_ones_are_errors():
    check_help("tools/train_vocab.py")


def test_help_of_a_run_lists_its_flags_and_the_fields_of_its_config():
    path = "configs/finetune/squad.py:v2"
    command = [sys.executable, "-m", "bert_jax.finetune", "--help", f"--config={path}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    expected = ("--config:", "--workdir:", "Try --helpfull", f"Fields of {path}, set as --config.")
    assert all(text in run.stdout for text in expected)


@pytest.mark.slow
def test_every_program_has_help():
    paths = [path for path in (ROOT / "tools").glob("*.py") if "__main__" in path.read_text()]
    tools = sorted(str(path.relative_to(ROOT)) for path in paths)
    modules = [f"-m bert_jax.{name}" for name in ("finetune", "predict", "pretrain", "sweep")]
    check_help(*modules, *tools)
