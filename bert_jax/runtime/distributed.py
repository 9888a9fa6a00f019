"""Multi-process runs, one process per host: initialization, agreement, and a common last step."""

import contextlib
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

from bert_jax.runtime.command_line import INTERRUPTED


def initialize(
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    initialization_timeout: int = 300,
    heartbeat_timeout: int = 100,
) -> None:
    """Connects this process with the others; must run before any other use of JAX.

    Ends the process with exit code 1 and a message if they do not connect in time.

    Args:
      coordinator: "HOST:PORT" of process 0; None asks the cluster (Cloud TPU, GKE, Slurm, MPI).
      num_processes: expected number of processes; None accepts the cluster's.
      process_id: index of this process; None asks the cluster.
      initialization_timeout: seconds to wait for the other processes.
      heartbeat_timeout: seconds without a heartbeat before a process is considered dead.

    Raises ValueError if the arguments and the cluster do not agree, or do not suffice.
    """
    if coordinator and (num_processes is None or process_id is None):
        raise ValueError("--coordinator needs --num_processes and --process_id")
    if coordinator and not re.fullmatch(r".+:\d+", coordinator):
        raise ValueError(
            f"--coordinator={coordinator}: expected HOST:PORT, with a free port on the host of "
            "process 0, the same for all processes"
        )
    if coordinator and process_id >= num_processes:
        raise ValueError(
            f"--process_id={process_id}, but --num_processes={num_processes}: indices start at 0"
        )

    def give_up():  # JAX itself would abort without a message.
        print(
            f"\nprocess {'of this host' if process_id is None else process_id}: not all of "
            f"{num_processes or 'the'} processes connected to {coordinator or 'process 0'} within "
            f"{initialization_timeout} s. Run the same command on every host (--process_id=0 on "
            "that of --coordinator), check the logs of the missing processes, and that the port is "
            "free and not blocked by a firewall",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    # JAX then catches SIGTERM and agrees with all processes on the last step; see Preemption.
    jax.config.update("jax_enable_preemption_service", True)
    timer = threading.Timer(initialization_timeout, give_up)
    timer.daemon = True
    timer.start()
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
            f"the cluster does not define the processes ({error}): give --coordinator=HOST:PORT "
            "--num_processes=N --process_id=I"
        ) from error
    finally:
        timer.cancel()
    found = jax.process_count()
    if num_processes and found != num_processes:
        raise ValueError(
            f"found {found} processes, but --num_processes={num_processes}: run the command on "
            "every host of the slice (--worker=all), or correct the number"
        )
    logging.info("Process %d of %d, %d devices", jax.process_index(), found, jax.device_count())


class LostProcess(RuntimeError):
    """Another process of the run died or does not respond."""


def is_lost_process_error(error: Exception) -> bool:
    """Returns whether a runtime error is about the connection with other processes."""
    words = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "Gloo", "oordination", "heartbeat", "onnection")
    return any(word in str(error) for word in (*words, "barrier"))


def allgather_texts(text: str) -> list[str]:
    """Returns the `text` of every process, by process index."""
    if jax.process_count() == 1:
        return [text]
    content = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([content.size], np.int32)).ravel()
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: content.size] = content
    rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


@contextlib.contextmanager
def raise_on_all_processes() -> Iterator[None]:
    """Raises an error of one process in all of them: as ValueError where none was raised.

    Otherwise the others would wait for it in their next collective. The body itself must not
    wait for other processes.
    """
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    # The message of an error may be empty, as with a bare `assert`.
    messages = allgather_texts("" if error is None else str(error) or repr(error))
    if error:
        raise error
    for process, message in enumerate(messages):
        if message:
            raise ValueError(f"process {process}: {message}")


def check_equal_on_all_processes(settings: dict[str, object]) -> None:
    """Raises ValueError in every process if the flat `settings` of any differ from process 0's."""
    first, *others = map(json.loads, allgather_texts(json.dumps(settings)))
    for process, other in enumerate(others, 1):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"process {process} has {name}={other.get(name)!r}, but process 0 has "
                    f"{first.get(name)!r}: start all with the same command and the same files"
                )


class Preemption:
    """Stops all processes after the same step, on SIGTERM (a host is reclaimed) or Ctrl-C."""

    def __init__(self):
        self.interrupted = False
        self._stop_requested = False
        self._is_distributed = jax.process_count() > 1
        self._previous = {signal.SIGINT: signal.signal(signal.SIGINT, self._interrupt)}
        if not self._is_distributed:  # Otherwise JAX handles SIGTERM.
            self._previous[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._request_stop)

    def should_stop_after(self, step: int) -> bool:
        """Returns whether `step` is the last; every process must ask after each step."""
        if self._is_distributed:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._stop_requested

    def close(self) -> None:
        """Restores the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request_stop(self, number, frame):
        self._stop_requested = True

    def _interrupt(self, number, frame):
        if self.interrupted:
            os._exit(INTERRUPTED)
        print("\nInterrupted: saving this step. Press Ctrl-C again to exit now.", file=sys.stderr)
        self.interrupted = self._stop_requested = True
        if self._is_distributed:
            os.kill(os.getpid(), signal.SIGTERM)
