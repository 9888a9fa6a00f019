"""Times the steps of a pre-training run: throughput, and goodput over all its restarts."""

import contextlib
import json
import pathlib
import time
from collections.abc import Iterable, Iterator

import psutil
from absl import logging

from bert_jax.training.forecast import duration
from bert_jax.training.metrics import MetricsWriter, throughput
from bert_jax.training.workdir import write_json

SHORT_RUN_SECONDS = 1800  # Starting and compiling take a few minutes at most.


class StepTimer:
    """Measures throughput between reports, and the goodput of the run.

    Goodput is productive seconds over wall seconds since the first process of the run started,
    which `first_start.json` in the workdir stores. Productive seconds are those in training steps
    that no restart repeats, including the wait for their batches; they are counted with each
    report. Not productive are: startup and restoring; compiling, and the first step after it;
    evaluating and saving; the time between two processes of the run, such as the wait for a new
    slice; and the steps after the last checkpoint, which a restart repeats. For these, `writer`
    removes the records after the checkpoint, and the count continues from the last record before
    it, up to `log_every` steps earlier.

    The host time of a step is the part in which the host does not wait for its devices: it reads
    the batch and dispatches the step. All hosts take the same time for a step, since each waits for
    the others in its collectives; the slowest of them is the one with the longest host time.

    `started` is the `time.monotonic()` at which this process began the run, and `writes` says
    whether it writes shared files.
    """

    def __init__(
        self, workdir: pathlib.Path, writer: MetricsWriter, started: float, *, writes: bool
    ):
        self._began = started - writer.seconds
        self._productive = writer.productive_seconds
        path, self._first_start = workdir / "first_start.json", psutil.Process().create_time()
        if path.exists():
            self._first_start = json.loads(path.read_text(encoding="utf-8"))["unix_time"]
        elif writes:
            write_json(path, {"unix_time": self._first_start})
        self._step, self._since, self._seconds = 0, 0.0, 0.0
        self._waited_for_devices, self._waited_for_data = 0.0, 0.0  # Since `start`.
        if self._productive:
            self.log()

    def seconds(self) -> float:
        """Returns the seconds of the run, as if it had never been interrupted."""
        return time.monotonic() - self._began

    def start(self, step: int) -> None:
        """Starts to count after `step`; only training steps follow until `stop`."""
        self._step, self._since = step, time.monotonic()
        self._waited_for_devices, self._waited_for_data = 0.0, 0.0

    def batches(self, batches: Iterable) -> Iterator:
        """Yields `batches`, and counts the seconds that each of them takes to arrive."""
        started = time.monotonic()
        for batch in batches:
            self._waited_for_data += time.monotonic() - started
            yield batch
            started = time.monotonic()

    @contextlib.contextmanager
    def waiting_for_devices(self) -> Iterator[None]:
        """Does not count the seconds of its body as host time."""
        started = time.monotonic()
        yield
        self._waited_for_devices += time.monotonic() - started

    def stop(self) -> None:
        """Counts the seconds since `start`, before a report, an evaluation or a save."""
        self._seconds = time.monotonic() - self._since
        self._productive += self._seconds

    def measure(self, step: int, batch_size: int, row_flops: float) -> dict[str, float]:
        """Returns the metrics at the `stop` after `step`.

        Times and speed are means over the steps since `start`; without one, they are left out.
        """
        values = {"seconds": self.seconds(), "productive_seconds": self._productive}
        values["goodput"] = self.goodput()
        if step > self._step:
            num_steps = step - self._step
            values["step_seconds"] = self._seconds / num_steps
            values["data_wait_seconds"] = self._waited_for_data / num_steps
            values["host_seconds"] = (self._seconds - self._waited_for_devices) / num_steps
            values |= throughput(batch_size, values["step_seconds"], row_flops)
        return values

    def goodput(self) -> float:
        """Returns productive seconds over wall seconds since the first start, in [0, 1]."""
        return self._productive / (time.time() - self._first_start)

    def log(self) -> None:
        """Logs the goodput up to now."""
        productive, wall = duration(self._productive), duration(time.time() - self._first_start)
        text = "Goodput %.1f%%: %s of training steps in the %s since the first start"
        if time.time() - self._first_start < SHORT_RUN_SECONDS:
            text += "; in such a short run, most of the rest is startup and compilation"
        logging.info(text, 100 * self.goodput(), productive, wall)
