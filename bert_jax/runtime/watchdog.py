"""Reports a stalled run with the stacks of all its threads, ends one that was asked to stop, and
explains an abort."""

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time

from absl import logging

from bert_jax.runtime.command_line import exit_now
from bert_jax.runtime.errors import INTERRUPTED, PREEMPTED


class Watchdog:
    """A thread that reports whenever `beat` has not been called for `limit_seconds`.

    It never ends the run: an apparent stall may be a long compilation. `start_stop_timeout` does.
    """

    # Per process, which has one run at a time. `slowest` is the longest limited activity so far.
    activity, since, limited, slowest = "starting", 0.0, False, 0.0

    def __init__(self, limit_seconds: float):
        self._progress, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, args=(limit_seconds,), daemon=True)
        self.beat("starting")
        self._thread.start()

    def beat(self, activity: str, limited: bool = True) -> None:
        """Reports progress, and the next `activity`; `limited` says whether it has a time limit."""
        now = time.monotonic()
        if Watchdog.limited:
            Watchdog.slowest = max(Watchdog.slowest, now - Watchdog.since)
        Watchdog.activity, Watchdog.since, Watchdog.limited = activity, now, limited
        self._progress.set()

    def close(self) -> None:
        """Ends the thread."""
        self._closed = True
        self.beat("ending")
        self._thread.join()

    def _watch(self, limit):
        while not self._closed:
            if self._progress.wait(limit):
                self._progress.clear()
            else:
                seconds = time.monotonic() - self.since
                logging.error("No progress for %.0f s while %s. Stacks:", seconds, self.activity)
                faulthandler.dump_traceback(sys.stderr, all_threads=True)


def start_stop_timeout(timeout: float, is_distributed: bool) -> None:
    """Ends this process, once asked to stop, after `timeout` seconds without progress.

    An activity may also take up to three times as long as the slowest one so far, and any time if
    it is not limited, as compiling and saving are not.
    Must be called in the main thread once the signal handlers are installed. Those run only
    between bytecode instructions: never while it waits for a collective that hangs.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)  # Receives the signal number.
    if is_distributed:  # JAX has its own SIGTERM handler: this writes "Stack ...", then calls it.
        faulthandler.register(signal.SIGTERM, write_end, all_threads=False, chain=True)
    threading.Thread(target=_end_if_stuck, args=(read_end, timeout), daemon=True).start()


def _end_if_stuck(read_end, timeout):
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, ord("S"))
    while (received := os.read(read_end, 1)[0]) not in asked:
        pass
    requested_at = time.monotonic()
    while not Watchdog.limited or time.monotonic() < max(requested_at, Watchdog.since) + timeout:
        timeout = max(timeout, 3 * Watchdog.slowest)
        time.sleep(0.1)
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    advice = "Run the same command to resume from the last checkpoint"
    message = f"asked to stop, but no progress for {timeout:.0f} s while {Watchdog.activity}"
    exit_now(f"{message}. {advice}", INTERRUPTED if received == signal.SIGINT else PREEMPTED)


# Says that it ignores signals; then repeats what it reads, until the process that writes ends.
_EXPLAIN = """
trap '' INT TERM HUP
echo ready
while IFS= read -r line; do
  printf '%s\\n' "$line" >&2
  case $line in 'Fatal Python error: Aborted') aborted=yes ;; esac
done
if test "$aborted"; then printf '\\n%s\\n' "$0" >&2; fi
"""


def explain_abort(message: str) -> subprocess.Popen | None:
    """Makes `message` the last line of this process if it is aborted, as by JAX in C++.

    No Python code can run then: a shell writes it, which gets what faulthandler writes. Keep the
    result until the end. It is None in process 1 of a container, with which all others are killed:
    there faulthandler writes to stderr, without the message.
    """
    if os.getpid() == 1:
        faulthandler.enable(all_threads=False)
        return None
    shell = subprocess.Popen(
        ["sh", "-c", _EXPLAIN, message],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C and the end of the terminal do not reach it.
    )
    shell.stdout.readline()  # From now on signals do not end it.
    faulthandler.enable(shell.stdin, all_threads=False)
    return shell
