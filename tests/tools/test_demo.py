"""Interrupts the demo with Ctrl-C."""

import os
import signal
import subprocess
import sys

from tests.helpers import commands

ROOT = commands.ROOT
CHILD = """
import sys, time
try:
    print("running", flush=True)
    while True: time.sleep(0.01)  # `pause` would miss a signal just before it.
except KeyboardInterrupt:
    sys.exit("saved" if sys.argv[1:] == ["saves"] else 7)
"""


def interrupted_demo(*arguments: str) -> tuple[int, str]:
    """Returns the exit code and output of a demo whose only command is interrupted."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from bert_jax.tools import demo; demo.run('-c', *{(CHILD, *arguments)})",
        ],
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    while "running\n" not in lines:
        lines.append(process.stdout.readline())
        assert lines[-1], lines  # Empty if it has ended.
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches all processes of a terminal.
    output, _ = process.communicate()
    return process.returncode, "".join(lines) + output


def test_demo_is_made_before_the_notebooks_are_executed():
    command = ["make", "--dry-run", "notebooks"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "tools/demo.py" in output.partition("nbconvert")[0]


def test_interrupted_demo_ends_with_the_output_and_exit_code_of_its_command():
    exit_code, output = interrupted_demo("saves")
    assert exit_code == 1 and output.endswith("running\nsaved\n") and "Traceback" not in output
    exit_code, output = interrupted_demo()
    assert exit_code == 7 and output.endswith("running\n")
