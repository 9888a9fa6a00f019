"""The commands of the launchers in docs/cloud_tpu.md get as far as their first call of a cloud."""

import os
import re
import shlex
import string

import pytest

from tests.helpers import commands

VALUES = {"PROJECT": "project", "ZONE": "us-central2-b", "BUCKET": "bucket"}
ANSWER = "the cloud was called"


def commands_of_page(program: str) -> list[list[str]]:
    """Returns the arguments of each `python tools/PROGRAM.py` in the page's blocks of commands."""
    page = (commands.ROOT / "docs/cloud_tpu.md").read_text()
    blocks = re.findall(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    start = f"python tools/{program}.py "
    return [
        shlex.split(string.Template(line.removeprefix(start)).substitute(VALUES), comments=True)
        for line in lines
        if line.startswith(start)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "count"), [("launch_tpu", 5), ("launch_gke", 3)])
def test_documented_commands_pass_all_checks(program, count, tmp_path, monkeypatch):
    for name in ("gcloud", "kubectl"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{ANSWER}' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    documented = commands_of_page(program)
    assert len(documented) == count
    for code, errors in commands.run_each(f"tools.{program}", documented):
        assert code == 1 and ANSWER in errors and "Traceback" not in errors, errors
