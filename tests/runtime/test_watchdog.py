"""The watchdog reports a stall, and nothing else."""

import threading

from bert_jax.runtime import watchdog
from bert_jax.runtime.watchdog import Watchdog


def test_stall_is_reported_with_the_activity_and_the_stacks(capfd, caplog, monkeypatch):
    reported = threading.Event()
    dump_traceback = watchdog.faulthandler.dump_traceback

    def dump_and_notify(*args, **kwargs):
        dump_traceback(*args, **kwargs)
        reported.set()

    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback", dump_and_notify)
    dog = Watchdog(0.05)
    dog.beat("running step 7")
    assert reported.wait(30)
    dog.close()
    report = capfd.readouterr().err + caplog.text
    assert "while running step 7" in report
    assert "test_stall_is_reported" in report  # The stack of this thread.


def test_no_report_while_there_is_progress(capfd):
    dog = Watchdog(1000)
    dog.beat("running step 1")
    dog.close()
    assert "No progress" not in capfd.readouterr().err
