"""The errors that end a run with a message, and the exit codes of the main programs."""

import os
import signal

PREEMPTED = os.EX_TEMPFAIL
"""75: stopped after saving a checkpoint, or lost another process; run the same command again."""
DIVERGED = os.EX_DATAERR
"""65: the loss diverged; the same command would diverge again."""
INTERRUPTED = 128 + signal.SIGINT
"""130: stopped by Ctrl-C."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


class Diverged(RuntimeError):
    """At training step `step` the loss is far above its lowest, or it or a norm is not finite."""

    def __init__(self, message: str, step: int):
        self.step = step
        super().__init__(message)


class RunStopped(Exception):
    """The run saved `step` and stopped, on SIGTERM or because of Ctrl-C (`interrupted`)."""

    def __init__(self, step: int, interrupted: bool):
        self.exit_code = INTERRUPTED if interrupted else PREEMPTED
        super().__init__(f"Stopped and saved at step {step}. Run the same command to resume.")
