"""Maps a function over streams of any length on all cores, in order and in bounded memory."""

import collections
import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator

from absl import logging

_function: Callable  # set once when a worker process starts


@contextlib.contextmanager
def worker_processes(function: Callable, num_processes: int = 0) -> Iterator[Callable]:
    """Starts processes, one per core if 0, and yields a function, `ordered_map(items)`.

    `ordered_map` yields `function(item)` for each item, in order. Unlike `Pool.imap`, it reads
    ahead only two items per process, and raises when a process dies, for instance from lack of
    memory. `function`, sent to each process once, may bind large objects. Where the system has no
    shared semaphores it warns, and calls `function` in this process.
    """
    num_processes = num_processes or usable_cores()
    others = multiprocessing.active_children()
    if num_processes > 1 and (reason := _why_no_semaphores()):
        logging.warning(
            "Using one process, because locks between processes need a writable /dev/shm (%s). To "
            "use all cores, mount one: mount -t tmpfs tmpfs /dev/shm",
            reason,
        )
        num_processes = 1
    if num_processes == 1:
        yield functools.partial(map, function)
        return
    # glibc would raise its limit with each large array it frees, and give less memory back.
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 17))
    executor = concurrent.futures.ProcessPoolExecutor(
        num_processes,
        # Forking would copy locks that other threads of the parent hold.
        multiprocessing.get_context("spawn"),
        _start_worker,
        (function,),
    )

    def ordered_map(items: Iterable) -> Iterator:
        pending: collections.deque = collections.deque()
        for item in items:
            # A worker started here inherits the mask, so that only the parent handles Ctrl-C.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                pending.append(executor.submit(_apply, item))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if len(pending) == 2 * num_processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    try:
        yield ordered_map
    except KeyboardInterrupt:  # Does not wait for what the processes are doing.
        for process in set(multiprocessing.active_children()).difference(others):
            process.terminate()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _why_no_semaphores() -> str:
    """Returns why processes cannot share a lock on this system, or "" if they can."""
    try:
        multiprocessing.get_context("spawn").Lock()
    except (ImportError, OSError) as error:
        return str(error) or repr(error)
    return ""


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _start_worker(function: Callable) -> None:
    global _function
    _function = function
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Every core already has a process.


def _exit_with_parent() -> None:
    """Ends this process when its parent is killed; it would wait for work forever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _apply(item):
    return _function(item)
