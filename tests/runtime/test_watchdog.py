"""The watchdog reports a stall, and ends only a run that was asked to stop."""

import os
import re
import signal
import subprocess
import sys
import threading

import pytest

from bert_jax.runtime import watchdog
from bert_jax.runtime.errors import INTERRUPTED, PREEMPTED
from bert_jax.runtime.watchdog import Watchdog
from tests.helpers import commands

# Waits in C for a lock that it holds, as for a collective that hangs: no handler in Python runs.
# Another thread says so once the kernel shows that the first one waits for the word of the lock.
STUCK = """
import ctypes, pathlib, threading, time
from bert_jax.runtime import main
from bert_jax.runtime.watchdog import Watchdog

def say_when_waiting(thread, address):
    path = pathlib.Path(f"/proc/self/task/{thread}/syscall")
    while f"{address:#x}" not in path.read_text().split()[:2]:
        time.sleep(0.01)
    print("stuck", flush=True)

def train_and_evaluate(config, workdir):
    Watchdog(100).beat("running step 7")
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    arguments = threading.get_native_id(), ctypes.addressof(mutex)
    threading.Thread(target=say_when_waiting, args=arguments, daemon=True).start()
    libc.pthread_mutex_lock(mutex)

main.start(train_and_evaluate, "pretrain", lambda config: {})
"""


def test_stall_is_reported_with_the_activity_and_the_stacks(capfd, caplog, monkeypatch):
    reported = threading.Event()
    dump_traceback = watchdog.faulthandler.dump_traceback

    def dump_and_notify(*args, **kwargs):
        dump_traceback(*args, **kwargs)
        if "while running step 7" in caplog.text:  # On a busy machine "starting" stalls, too.
            reported.set()

    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback", dump_and_notify)
    dog = Watchdog(0.05)
    dog.beat("running step 7")
    assert reported.wait(200)
    dog.close()
    assert "test_stall_is_reported" in capfd.readouterr().err  # The stack of this thread.


def test_no_report_while_there_is_progress(capfd):
    dog = Watchdog(1000)
    dog.beat("running step 1")
    dog.close()
    assert "No progress" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGTERM, PREEMPTED), (signal.SIGINT, INTERRUPTED)],
)
@pytest.mark.slow
def test_stuck_process_that_is_asked_to_stop_exits(tmp_path, number, exit_code):
    flags = ["--config=configs/pretrain/bert_tiny.py", f"--workdir={tmp_path}", "--stop_timeout=1"]
    command = [sys.executable, "-c", STUCK, *flags]
    with (tmp_path / "log").open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, cwd=commands.ROOT)
    with commands.ended([process]):
        commands.wait_for(tmp_path / "log", "stuck", [process])
        process.send_signal(number)
        assert process.wait(200) == exit_code
    log = (tmp_path / "log").read_text()
    # More than the --stop_timeout of 1 s if the activity before took long.
    assert re.search(r"asked to stop, but no progress for \d+ s while running step 7\. Run", log)
    assert "in train_and_evaluate" in log  # The stack.


def test_slow_save_is_not_interrupted(monkeypatch):
    dog, waits = Watchdog(1000), []
    dog.beat("saving step 7", limited=False)

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            dog.beat("running step 8")

    def exit_now(message, exit_code):
        raise SystemExit(exit_code)

    monkeypatch.setattr(Watchdog, "slowest", 0.0)  # Of other tests.
    monkeypatch.setattr(watchdog.time, "sleep", sleep)
    monkeypatch.setattr(watchdog, "exit_now", exit_now)
    read_end, write_end = os.pipe()
    os.write(write_end, bytes([signal.SIGTERM]))
    with pytest.raises(SystemExit):
        watchdog._end_if_stuck(read_end, 0)
    assert len(waits) >= 3
    dog.close()


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGTERM, PREEMPTED), (signal.SIGINT, INTERRUPTED)]
)
def test_slow_steps_are_not_interrupted(monkeypatch, number, exit_code):
    dog, clock = Watchdog(1000), [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(watchdog.time, "sleep", lambda seconds: clock.append(clock.pop() + 1))
    monkeypatch.setattr(watchdog, "exit_now", lambda _, code: clock.append(code))
    monkeypatch.setattr(Watchdog, "slowest", 0.0)
    dog.beat("compiling", limited=False)
    clock[0] = 500.0  # Does not count: it was not limited.
    dog.beat("running step 2")
    clock[0] = 600.0
    dog.beat("running step 3")
    read_end, write_end = os.pipe()
    os.write(write_end, bytes([number]))
    watchdog._end_if_stuck(read_end, 60)
    assert clock == [900.0, exit_code]
    dog.close()


@pytest.mark.parametrize(
    ("end", "code", "explained"),
    [("os.abort()", -signal.SIGABRT, True), ("os._exit(3)", 3, False)],
)
def test_an_abort_ends_with_the_message(end, code, explained):
    """Also of what catches signals: Ctrl-C goes to both processes."""
    program = f"""
import os, signal
from bert_jax.runtime import watchdog
shell = watchdog.explain_abort("of ours: 100% 'so' \\\\n")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    shell.send_signal(number)
{end}
"""
    run = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert run.returncode == code
    if explained:
        assert run.stderr.startswith("Fatal Python error: Aborted\n")
        assert run.stderr.endswith("\n\nof ours: 100% 'so' \\n\n")
    else:
        assert run.stderr == ""
