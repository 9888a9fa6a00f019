"""Multi-process runs, one process per host: initialization, agreement, and a common last step."""

import contextlib
import itertools
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from bert_jax.runtime.command_line import exit_now
from bert_jax.runtime.errors import INTERRUPTED


def initialize(
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    initialization_timeout: int = 300,
    heartbeat_timeout: int = 100,
) -> None:
    """Connects this process to the others, before any other use of JAX; timeouts in seconds.

    Without a `coordinator`, "HOST:PORT" of process 0, JAX asks the cluster (Cloud TPU, GKE, Slurm,
    MPI). Exits if not all connect in time. Raises ValueError for wrong or missing arguments.
    """
    if coordinator and not (
        re.fullmatch(r".+:\d+", coordinator) and process_id in range(num_processes or 0)
    ):
        raise ValueError(
            f"--coordinator={coordinator} --num_processes={num_processes} "
            f"--process_id={process_id}: expected HOST:PORT of process 0, the number of processes, "
            "and the index of this one, from 0"
        )
    name = "this host" if process_id is None else f"process {process_id}"
    message = (
        f"{name}: not all of {num_processes or 'the'} processes connected to "
        f"{coordinator or 'process 0'} within {initialization_timeout} s. Run the same command on "
        "every host, and check the logs of the missing processes, the port, and the firewall"
    )
    timer = threading.Timer(initialization_timeout, exit_now, (message, 1))
    timer.start()  # JAX itself would abort without a message.
    # JAX then catches SIGTERM and agrees with all processes on the last step; see StopRequest.
    jax.config.update("jax_enable_preemption_service", True)
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes if coordinator else None,
            process_id,
            initialization_timeout=initialization_timeout + 60,
            heartbeat_timeout_seconds=heartbeat_timeout,
        )
    except ValueError as error:
        raise ValueError(
            f"{error} Without a cluster, pass --coordinator, --num_processes and --process_id"
        ) from error
    finally:
        timer.cancel()
    count = jax.process_count()
    if num_processes and count != num_processes:
        raise ValueError(
            f"found {count} processes, but --num_processes={num_processes}: run the command on "
            "every host (--worker=all), or correct the number"
        )
    logging.info("Process %d of %d, %d devices", jax.process_index(), count, jax.device_count())


class LostProcess(RuntimeError):
    """Another process of the run died or does not respond."""


def is_lost_process_error(error: Exception) -> bool:
    """Returns whether a runtime error is about the connection to other processes."""
    words = "UNAVAILABLE|DEADLINE_EXCEEDED|Gloo|oordination|heartbeat|onnection|barrier"
    return re.search(words, str(error)) is not None


def allgather_texts(text: str) -> list[str]:
    """Returns the `text` of every process, by process index."""
    if jax.process_count() == 1:
        return [text]
    content = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(content.size, np.int32))
    rows = multihost_utils.process_allgather(np.pad(content, (0, sizes.max() - content.size)))
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


@contextlib.contextmanager
def raise_on_all_processes() -> Iterator[None]:
    """Re-raises one process's error as a ValueError in the others, which would wait for it.

    The body itself must not wait for other processes.
    """
    try:
        yield
    except Exception as error:
        allgather_texts(str(error) or repr(error))  # A bare `assert` has no message.
        raise
    for process, message in enumerate(allgather_texts("")):
        if message:
            raise ValueError(f"process {process}: {message}")


def check_equal_on_all_processes(settings: dict[str, object]) -> None:
    """Raises ValueError in every process if the flat `settings` of any two differ."""
    first, *rest = map(json.loads, allgather_texts(json.dumps(settings)))
    for process, values in enumerate(rest, 1):
        for name in sorted(first.keys() | values.keys()):
            if first.get(name) != values.get(name):
                raise ValueError(
                    f"process {process} has {name}={values.get(name)!r}, but process 0 has "
                    f"{first.get(name)!r}: start all with the same command and files"
                )


def stop_signals(is_distributed: bool) -> list[signal.Signals]:
    """Returns the signals that stop a run, for which it must install handlers.

    SIGTERM means that the host is reclaimed, SIGINT is Ctrl-C, and SIGHUP means that the terminal
    was closed. SIGHUP is left out if it was ignored when the program started, as under nohup.
    """
    numbers = [signal.SIGINT]
    if not is_distributed:  # JAX handles SIGTERM in a multi-process run.
        numbers.append(signal.SIGTERM)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


class StopRequest:
    """Stops all processes after the same step, on SIGTERM, SIGHUP or Ctrl-C."""

    _steps = itertools.count(1)  # JAX needs numbers that no run of this process repeats.

    def __init__(self):
        self.interrupted = self._stop_requested = False
        self._is_distributed = jax.process_count() > 1
        signals = stop_signals(self._is_distributed)
        self._previous = {number: signal.signal(number, self._handle) for number in signals}

    def should_stop(self) -> bool:
        """Returns whether to stop now; every process must call this after each step."""
        if self._is_distributed:
            return multihost_utils.reached_preemption_sync_point(next(self._steps))
        return self._stop_requested

    @property
    def requested_at_end(self) -> bool:
        """Whether a signal came after the last step; always False with several processes."""
        return self._stop_requested and not self._is_distributed

    def close(self) -> None:
        """Restores the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number, frame):
        self._stop_requested = True
        if number == signal.SIGINT:
            if self.interrupted:
                os._exit(INTERRUPTED)
            self.interrupted = True
            print("\nInterrupted: saving this step. Press Ctrl-C again to exit.", file=sys.stderr)
        if self._is_distributed:  # JAX then agrees with the other processes on the last step.
            os.kill(os.getpid(), signal.SIGTERM)
