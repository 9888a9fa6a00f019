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
        self._activity, self._since = "starting", time.monotonic()
        self._progress, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, args=(limit_seconds,), daemon=True)
        self._thread.start()

    def beat(self, activity: str) -> None:
        """Reports progress; `activity` is what the run does next."""
        self._activity, self._since = activity, time.monotonic()
        self._progress.set()

    def close(self) -> None:
        """Ends the thread."""
        self._closed = True
        self._progress.set()
        self._thread.join()

    def _watch(self, limit):
        while not self._closed:
            if self._progress.wait(limit):
                self._progress.clear()
            else:
                seconds = time.monotonic() - self._since
                logging.error("No progress for %.0f s while %s. Stacks:", seconds, self._activity)
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
