"""The watchdog speaks when nothing happens, and only then."""

import threading

from bert_jax.runtime import watchdog
from bert_jax.runtime.watchdog import Watchdog


def test_stall_is_reported_with_what_was_going_on_and_the_stacks(capfd, caplog):
    reported = threading.Event()
    original = watchdog.faulthandler.dump_traceback
    try:
        watchdog.faulthandler.dump_traceback = lambda *args, **kwargs: (
            original(*args, **kwargs),
            reported.set(),
        )
        dog = Watchdog(0.05)
        dog.beat("running step 7")
        assert reported.wait(30)
        dog.close()
    finally:
        watchdog.faulthandler.dump_traceback = original
    said = capfd.readouterr().err + caplog.text
    assert "while running step 7" in said
    assert "test_stall_is_reported" in said  # This thread's stack.


def test_no_report_while_there_is_progress(capfd):
    dog = Watchdog(1000)
    dog.beat("running step 1")
    dog.close()
    assert "No progress" not in capfd.readouterr().err
