"""Maps a function over a stream of any length with all cores, in order and in bounded memory."""

import collections
import concurrent.futures
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_function: Callable  # what a worker process applies, set once when it starts


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], num_processes: int = 0
) -> Iterator[Result]:
    """Yields `function(item)` for each item, in order.

    Unlike `Pool.imap`, it reads ahead by a few items for each process and no more, and it raises,
    rather than waits for ever, when a process dies (of too little memory, say).

    Args:
      function: sent once to each process, so what a `functools.partial` binds may be large.
      items: read in this process.
      num_processes: 0 takes one for each core; 1 works in this process.
    """
    num_processes = num_processes or usable_cores()
    if num_processes == 1:
        yield from map(function, items)
        return
    executor = concurrent.futures.ProcessPoolExecutor(
        num_processes,
        # A fork would copy the parent's threads' locks as they happen to be held.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(function,),
    )
    try:
        items = iter(items)
        ahead = itertools.islice(items, 2 * num_processes)
        pending = collections.deque(_submit(executor, item) for item in ahead)
        while pending:
            result = pending.popleft().result()
            pending.extend(_submit(executor, item) for item in itertools.islice(items, 1))
            yield result
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def usable_cores() -> int:
    """Returns the number of cores that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _submit(executor: concurrent.futures.Executor, item: Item) -> concurrent.futures.Future:
    # This may start a process, which inherits the mask: Ctrl-C is the parent's to deal with.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return executor.submit(_apply, item)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _start_worker(function: Callable) -> None:
    global _function
    _function = function
    # Each core has a process already.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _apply(item: Item) -> Result:
    return _function(item)
