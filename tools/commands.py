"""Exits a tool after Ctrl-C, and runs other programs."""

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from bert_jax.runtime.command_line import program_name
from bert_jax.runtime.errors import INTERRUPTED


def exit_interrupted(hint: str) -> NoReturn:
    """Exits a tool after Ctrl-C. `hint` says what the same command does if it is run again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A second would change the exit code.
    print(f"\n{program_name()}: interrupted; {hint}", file=sys.stderr)
    sys.exit(INTERRUPTED)


def run_command(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Runs a command to its end, also after Ctrl-C; exits with its exit code if it fails."""
    # Ctrl-C reaches the command too: let it save and exit first.
    handler = signal.signal(signal.SIGINT, lambda *_: None)
    exit_code = subprocess.run(command, env=environment).returncode
    signal.signal(signal.SIGINT, handler)
    if exit_code:
        sys.exit(exit_code if exit_code > 0 else 128 - exit_code)
