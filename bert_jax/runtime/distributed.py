"""Several processes (one a host) as one program: joining, agreeing, stopping at the same step."""

import contextlib
import json
import os
import re
import signal
import sys
import threading

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from bert_jax.runtime.exit_status import INTERRUPTED


def join(
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_seconds: int = 300,
    heartbeat_seconds: int = 100,
) -> None:
    """Connects this process with the others; the first thing that a run of several does.

    Ends the process with a message and status 1 if they do not meet in time: the runtime itself
    would abort without one.

    Args:
      coordinator: "host:port" of process 0; None asks the cluster (Cloud TPU, GKE, Slurm, MPI).
      num_processes: how many there must be; None takes what the cluster says.
      process_id: of this one; None asks the cluster.
      timeout_seconds: how long to wait for the others.
      heartbeat_seconds: a process that is silent for so long is taken for lost.

    Raises ValueError where the arguments do not say what the cluster does not tell either, or
    where there are more or fewer processes than expected.
    """
    if coordinator and (num_processes is None or process_id is None):
        raise ValueError("--coordinator needs --num_processes and --process_id beside it")
    if coordinator and not re.fullmatch(r".+:\d+", coordinator):
        raise ValueError(
            f"--coordinator={coordinator}: expected HOST:PORT, with any free port of process 0's "
            "host, the same in all processes"
        )
    if coordinator and process_id >= num_processes:
        raise ValueError(
            f"--process_id={process_id}, but --num_processes={num_processes}: they count from 0"
        )

    def give_up():
        print(
            f"\nprocess {'of this host' if process_id is None else process_id}: not all of "
            f"{num_processes or 'the'} processes met at {coordinator or 'process 0'} within "
            f"{timeout_seconds} s. Run the same command on every host (the one that --coordinator "
            "names with --process_id=0), look at the logs of those that are missing, and make sure "
            "that the port is free there and that no firewall keeps the others from it",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    # JAX traps SIGTERM, and agrees with all processes on a step to stop at; see Preemption.
    jax.config.update("jax_enable_preemption_service", True)
    waiting = threading.Timer(timeout_seconds, give_up)
    waiting.daemon = True
    waiting.start()
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes if coordinator else None,
            process_id,
            initialization_timeout=timeout_seconds + 60,
            heartbeat_timeout_seconds=heartbeat_seconds,
        )
    except ValueError as error:
        raise ValueError(
            f"the cluster does not say who takes part ({error}): give --coordinator=HOST:PORT "
            "--num_processes=N --process_id=I"
        ) from error
    finally:
        waiting.cancel()
    found = jax.process_count()
    if num_processes and found != num_processes:
        raise ValueError(
            f"{found} processes take part, but --num_processes={num_processes}: run the command on "
            "every host of the slice (--worker=all), or correct the number"
        )
    logging.info("Process %d of %d, %d devices", jax.process_index(), found, jax.device_count())


class LostProcess(RuntimeError):
    """Another process of the run is gone, or does not answer."""


def tells_of_a_lost_process(error: Exception) -> bool:
    """Whether a runtime error is about the connection with other processes."""
    words = (
        *("UNAVAILABLE", "DEADLINE_EXCEEDED", "Gloo", "oordination", "heartbeat", "onnection"),
        "barrier",  # Which the others never came to.
    )
    return any(word in str(error) for word in words)


def gather_texts(text: str) -> list[str]:
    """The `text` of each process, in all of them."""
    if jax.process_count() == 1:
        return [text]
    content = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([content.size], np.int32)).ravel()
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: content.size] = content
    rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


@contextlib.contextmanager
def errors_shared():
    """What one process raises inside is raised in all, as ValueError in those that were well.

    Else they would wait for it at their next meeting. Inside, processes must not wait for another.
    """
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    # An error may have no text of its own, as `assert` leaves it.
    messages = gather_texts("" if error is None else str(error) or repr(error))
    if error:
        raise error
    for process, message in enumerate(messages):
        if message:
            raise ValueError(f"process {process}: {message}")


def check_same_everywhere(settings: dict[str, object]) -> None:
    """Raises ValueError in every process if the flat `settings` of one differ from process 0's."""
    all_settings = [json.loads(text) for text in gather_texts(json.dumps(settings))]
    first = all_settings[0]
    for process, other in enumerate(all_settings):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"process {process} has {name}={other.get(name)!r}, but process 0 has "
                    f"{first.get(name)!r}: start all of them with the same command and the same "
                    "files"
                )


class Preemption:
    """SIGTERM (a host is about to be taken away) or Ctrl-C: all processes stop after one step."""

    def __init__(self):
        self.interrupted = False
        self._told = False
        self._several = jax.process_count() > 1
        self._before = {signal.SIGINT: signal.signal(signal.SIGINT, self._interrupt)}
        if not self._several:  # Else JAX has trapped it.
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._tell)

    def stops_after(self, step: int) -> bool:
        """Whether `step` is the last; asked by every process after each step."""
        if self._several:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._told

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _tell(self, number, frame):
        self._told = True

    def _interrupt(self, number, frame):
        if self.interrupted:
            os._exit(INTERRUPTED)
        print("\nInterrupted: stops after saving this step. Again: at once", file=sys.stderr)
        self.interrupted = self._told = True
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
