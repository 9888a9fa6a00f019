"""Reports a run that stands still, with the stacks of all its threads, so that it can be mended."""

import faulthandler
import sys
import threading
import time

from absl import logging


class Watchdog:
    """A thread that speaks up when `beat` has not been called for `limit_seconds`, and again.

    It reports and ends nothing: what looks stalled may be a long compilation or evaluation.
    """

    def __init__(self, limit_seconds: float):
        self._limit = limit_seconds
        self._doing, self._since = "starting", time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def beat(self, doing: str) -> None:
        """All is well; `doing` is what comes next."""
        self._doing, self._since = doing, time.monotonic()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self):
        reported = self._since
        while not self._stopped.wait(self._limit / 10):
            now = time.monotonic()
            if now - max(self._since, reported) > self._limit:
                reported = now
                logging.error(
                    "No progress for %.0f s while %s. The stacks of all threads:",
                    now - self._since,
                    self._doing,
                )
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
