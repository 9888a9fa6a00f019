"""Worker processes. Each imports this module, which therefore imports nothing that is large."""

import errno
import multiprocessing.synchronize
import signal
import time

import pytest

from bert_corpus.parallel import worker_processes


def slow_for_early(item):
    time.sleep(0.05 if item == 0 else 0)
    return item * item


def fail_at_three(item):
    if item == 3:
        raise ValueError("item 3")
    return item


def test_ordered_map_keeps_order_and_reads_only_a_few_items_ahead():
    read = []

    def items():
        for item in range(100):
            read.append(item)
            yield item

    with worker_processes(slow_for_early, 2) as ordered_map:
        results = ordered_map(items())
        assert next(results) == 0
        assert len(read) <= 6
        assert list(results) == [item * item for item in range(1, 100)]


@pytest.mark.parametrize("error", [OSError(errno.EROFS, "Read-only file system"), ImportError()])
def test_system_without_shared_locks_uses_one_process_with_a_warning(monkeypatch, caplog, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", fail)
    with worker_processes(slow_for_early, 2) as ordered_map:
        assert list(ordered_map(range(4))) == [0, 1, 4, 9]
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "one process" in warning and "/dev/shm" in warning


def blocked_signals(item):
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_ctrl_c_reaches_only_the_parent_process():
    with worker_processes(blocked_signals, 2) as ordered_map:
        assert all(ordered_map(range(10)))
    assert not blocked_signals(None)


def test_ordered_map_raises_the_error_of_a_worker():
    with (
        worker_processes(fail_at_three, 2) as ordered_map,
        pytest.raises(ValueError, match="item 3"),
    ):
        list(ordered_map(range(10)))
