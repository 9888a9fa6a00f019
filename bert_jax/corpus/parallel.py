"""Maps a function over a stream of any length on all cores, in order and in bounded memory."""

import collections
import concurrent.futures
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator

_function: Callable  # set once when a worker process starts


def ordered_map(function: Callable, items: Iterable, num_processes: int = 0) -> Iterator:
    """Yields `function(item)` for each item, in order; `num_processes` 0 means one per core.

    Unlike `Pool.imap`, reads ahead only two items per process, and raises when a process dies, for
    instance from lack of memory. `function`, sent to each process once, may bind large objects.
    """
    num_processes = num_processes or usable_cores()
    if num_processes == 1:
        yield from map(function, items)
        return
    executor = concurrent.futures.ProcessPoolExecutor(
        num_processes,
        # Forking would copy locks that other threads of the parent hold.
        multiprocessing.get_context("spawn"),
        _start_worker,
        (function,),
    )
    try:
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
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _start_worker(function: Callable) -> None:
    global _function
    _function = function
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Every core already has a process.


def _apply(item):
    return _function(item)
