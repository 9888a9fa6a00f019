"""Claims of programs by workers that share the directory of a sweep, on one or several machines.

Claim N of a program is the directory `claims/N`. Creating a directory succeeds only once, so that
exactly one worker gets each claim: tested on local disks, and documented for NFS and for buckets
mounted with gcsfuse. Claim N + 1 takes over the program of a dead worker. A worker is dead if its
process on this machine has ended, or if its `heartbeat` has not changed for TIMEOUT, by the clock
of the worker that waits.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import threading
import time

from bert_jax.runtime.command_line import exit_now
from bert_jax.runtime.errors import PREEMPTED
from bert_jax.training.workdir import write_json

INTERVAL = 10  # Seconds between two heartbeats.
TIMEOUT = 100  # Seconds without a heartbeat before a worker is considered dead.


class Claim:
    """A claimed program: held until the `with` block ends, or this process does."""

    def __init__(self, directory: pathlib.Path):
        self._directory, self._lock = directory, (directory / "lock").open("w", encoding="utf-8")
        with contextlib.suppress(OSError):  # Without locks, others rely on the heartbeat.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._successor = directory.with_name(str(int(directory.name) + 1))
        self._ended = threading.Event()
        self._write(0)
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()

    def release(self):
        self._ended.set()
        self._thread.join()
        write_json(self._directory / "heartbeat", {"ended": True})
        self._lock.close()

    def _beat(self):
        count = 0
        while not self._ended.wait(INTERVAL):
            with contextlib.suppress(OSError):  # The next one may succeed.
                if self._successor.exists():
                    exit_now(
                        f"another worker has taken over {self._directory.parents[1]}: this one "
                        f"sent no heartbeat for more than {TIMEOUT} s. Run the same command to "
                        "join it",
                        PREEMPTED,
                    )
                count += 1
                self._write(count)

    def _write(self, count: int):
        worker = f"process {os.getpid()} on {socket.gethostname()}"
        value = {"worker": worker, "mount": _mount(self._directory), "count": count}
        write_json(self._directory / "heartbeat", value)


def try_claim(directory: pathlib.Path, seen: dict) -> Claim | None:
    """Claims the program of `directory`; returns None if a live worker holds it.

    `seen`, the heartbeats read so far and when, must be the same dict in all calls of a process.
    """
    claims = directory / "claims"
    claims.mkdir(parents=True, exist_ok=True)
    count = len(list(claims.iterdir()))
    if count and holder(directory, seen):
        return None
    new = claims / str(count)
    try:
        new.mkdir()
    except OSError:
        if new.exists():  # Another worker was faster.
            return None
        raise
    return Claim(new)


def holder(directory: pathlib.Path, seen: dict) -> str:
    """Names the live worker that holds the program of `directory`; empty if there is none."""
    claims = sorted((directory / "claims").glob("*"), key=lambda path: int(path.name))
    if not claims:
        return ""
    path, now = claims[-1] / "heartbeat", time.monotonic()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:  # Not yet written, or just replaced.
        text = "{}"
    if seen.setdefault(path, (text, now))[0] != text:
        seen[path] = text, now
    value = json.loads(text)
    if "ended" in value or now - seen[path][1] > TIMEOUT:
        return ""
    if value.get("mount") == _mount(directory):
        # An error means that it is locked, or that this file system has no locks.
        with (
            contextlib.suppress(OSError),
            (claims[-1] / "lock").open("a", encoding="utf-8") as file,
        ):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return ""
    return value.get("worker", "a worker that is starting")


def _mount(directory: pathlib.Path) -> str:
    """Identifies the mounted file system, whose locks all processes that use it see."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot} {directory.stat().st_dev}"
