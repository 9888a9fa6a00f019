"""Prints a line every few seconds while a long operation runs."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

INTERVAL = 5.0  # Seconds.


@contextlib.contextmanager
def progress(text: str, interval: float = INTERVAL) -> Iterator[None]:
    """Prints `text` and the seconds so far to stderr, every `interval` seconds of the block."""
    started, is_done = time.monotonic(), threading.Event()

    def report() -> None:
        while not is_done.wait(interval):
            seconds = time.monotonic() - started
            print(f"{text}: {seconds:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
