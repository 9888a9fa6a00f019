"""Flag parsing, exit codes, and the exceptions that end a run with a one-line message."""

import os
import pathlib
import re
import signal
import sys
import traceback

from absl import flags

PREEMPTED = os.EX_TEMPFAIL
"""75: stopped after saving a checkpoint, or lost another process; run the same command again."""
INTERRUPTED = 128 + signal.SIGINT
"""130: stopped by Ctrl-C."""
ABORTED = 128 + signal.SIGABRT
"""134, as reported by shells: JAX aborts when it loses another process. Run the command again."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


class NonFiniteLoss(RuntimeError):
    """The loss or a norm of a training step is NaN or infinite."""


class Preempted(Exception):
    """The run saved `step` and stopped, on SIGTERM or because of Ctrl-C (`interrupted`)."""

    def __init__(self, step: int, interrupted: bool):
        self.exit_code = INTERRUPTED if interrupted else PREEMPTED
        super().__init__(f"Stopped and saved at step {step}. Run the same command to resume.")


def parse_flags(argv: list[str]) -> list[str]:
    """Returns the positional arguments; exits with a one-line message for an invalid flag.

    For `app.run(flags_parser=parse_flags)`.
    """
    try:
        return flags.FLAGS(argv)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as raised:
        error = raised
        while isinstance(error, Exception) and error.args:  # Unwrap nested exceptions.
            error = error.args[0]
        # A config file rejects its argument with a ValueError: drop the traceback above it.
        message = re.sub(
            r"Error whilst parsing config file:\n.*\nValueError: ", "", str(error), flags=re.DOTALL
        )
        *_, (frame, _) = traceback.walk_tb(raised.__traceback__)
        config = frame.f_locals.get("self")
        if re.fullmatch(r"'\w+'", message) and hasattr(config, "keys"):
            # ConfigDict's KeyError names only the missing key.
            message = f"there is no field {message}; there are {', '.join(map(str, config.keys()))}"
        if "Traceback" not in message:
            message = message.replace("\n", ": ")
        sys.exit(f"{program_name()}: {message}")


def program_name() -> str:
    """Returns the name of the started script, which begins every message."""
    return pathlib.Path(sys.argv[0]).stem
