"""Reports a stalled run with the stacks of all its threads."""

import faulthandler
import sys
import threading
import time

from absl import logging


class Watchdog:
    """A thread that reports whenever `beat` has not been called for `limit_seconds`.

    It never ends the run: an apparent stall may be a long compilation or evaluation.
    """

    def __init__(self, limit_seconds: float):
        self._limit = limit_seconds
        self._activity, self._since = "starting", time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def beat(self, activity: str) -> None:
        """Reports progress; `activity` is what the run does next."""
        self._activity, self._since = activity, time.monotonic()

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self):
        reported = self._since
        while not self._closed.wait(self._limit / 10):
            now = time.monotonic()
            if now - max(self._since, reported) > self._limit:
                reported = now
                logging.error(
                    "No progress for %.0f s while %s. Stacks of all threads:",
                    now - self._since,
                    self._activity,
                )
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
