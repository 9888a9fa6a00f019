"""Commands that tests run as processes: to start them, wait, stop them, and read their logs."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]


RUN_EACH = """
import gc, importlib, json, os, runpy, sys
from absl.flags import FLAGS

program, separator, cases = json.load(sys.stdin)
importlib.import_module(program)
sys.modules.pop(program)  # It runs again, as the main program; what it imports does not.
for flag in list(FLAGS.flags_by_module_dict().get(program, ())):
    delattr(FLAGS, flag.name)
gc.collect()
gc.freeze()  # A fork would copy what it looks through.
for arguments in cases:
    sys.stderr.flush()
    if not (child := os.fork()):
        sys.argv = [program, *arguments]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(separator, code, separator, file=sys.stderr, flush=True)
"""


def run_each(program: str, cases: list[list[str]], cwd=ROOT) -> list[tuple[int, str]]:
    """Runs `python -m program` with each list of arguments; returns its exit code and stderr.

    The processes are forks of one that has imported what the program imports, to save time.
    """
    separator = "-- end --"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN_EACH],
        input=json.dumps([program, separator, cases]),
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    )
    texts = run.stderr.split(separator)
    assert len(texts) == 2 * len(cases) + 1, run.stderr
    return [(int(code), text) for text, code in zip(texts[:-1:2], texts[1::2], strict=True)]


_reserved: list[socket.socket] = []


def free_port() -> int:
    """Returns a TCP port for a server to be started, reserved among tests.

    The UDP port of the same number, kept until this process ends, reserves it among all test
    processes. The kernel assigns ports from 32768 on to programs that ask for an arbitrary port,
    so such a port could be taken before the server starts.
    """
    for port in range(20_000, 32_768):
        reservation = socket.socket(type=socket.SOCK_DGRAM)
        with contextlib.suppress(OSError), socket.socket() as listener:
            reservation.bind(("localhost", port))
            listener.bind(("localhost", port))
            _reserved.append(reservation)
            return port
        reservation.close()
    raise OSError("all ports from 20000 to 32767 are in use")


def start(
    workdir,
    corpus,
    *fields: str,
    num_processes: int = 1,
    devices_per_process: int = 1,
    last_flags: tuple[str, ...] = (),
    logs=None,
    program: str = "bert_jax.pretrain",
    **flags,
) -> list[subprocess.Popen]:
    """Starts the pre-training of a tiny model in `num_processes` processes; see `launch`.

    `fields` are set in the config, and `flags` on the command line.
    """
    command = [
        program,
        "--config=configs/pretrain/bert_tiny.py:runlocal",
        f"--config.corpus={corpus}",
        "--config.long_phase.num_steps=0",
        "--config.model.max_position_embeddings=64",
        "--config.stall_seconds=100",  # The watchdog reports before `finish` times out.
        *[f"--config.{field}" for field in fields],
        *[f"--{name}={value}" for name, value in flags.items()],
    ]
    return launch(
        command,
        workdir,
        num_processes=num_processes,
        devices_per_process=devices_per_process,
        last_flags=last_flags,
        logs=logs,
    )


def launch(
    command: list[str],
    workdir,
    *,
    num_processes: int = 1,
    devices_per_process: int = 1,
    last_flags: tuple[str, ...] = (),
    logs=None,
) -> list[subprocess.Popen]:
    """Starts `python -m COMMAND --workdir=WORKDIR` in processes that form one run.

    Their output goes to `log_of(logs, process)`, where `logs` is WORKDIR unless given; only the
    last process gets `last_flags`.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices_per_process} "
        "--xla_backend_optimization_level=0",
    }
    command = [sys.executable, "-m", *command, f"--workdir={workdir}"]
    if num_processes > 1:
        command += [f"--coordinator=localhost:{free_port()}", f"--num_processes={num_processes}"]
    processes = []
    for process in range(num_processes):
        process_flags = [f"--process_id={process}"] if num_processes > 1 else []
        process_flags += last_flags if process == num_processes - 1 else ()
        with log_of(logs or workdir, process).open("w") as log:
            processes.append(
                subprocess.Popen(
                    [*command, *process_flags], stdout=log, stderr=log, env=environment, cwd=ROOT
                )
            )
            processes[-1].log = log.name
    return processes


def log_of(workdir, process: int = 0) -> pathlib.Path:
    return pathlib.Path(f"{workdir}.{process}.log")


def finish(processes: list[subprocess.Popen], seconds: float = 600) -> list[int]:
    """Waits for all processes and returns their exit codes; shows all logs on a timeout."""
    try:
        return [process.wait(seconds) for process in processes]
    except subprocess.TimeoutExpired as error:
        logs = [pathlib.Path(process.log).read_text()[-8000:] for process in processes]
        raise AssertionError("\n\n".join([str(error), *logs])) from error


def run(workdir, corpus, *fields: str, **options) -> None:
    """Runs a pre-training as `start` does, and asserts that it succeeds."""
    exit_codes = finish(start(workdir, corpus, *fields, **options))
    assert not any(exit_codes), log_of(options.get("logs") or workdir).read_text()[-3000:]


@contextlib.contextmanager
def ended(processes: list[subprocess.Popen]):
    """Kills the processes that still run at the end of the block."""
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def wait_for(path: pathlib.Path, text: str, processes, seconds: float = 600) -> None:
    """Waits until the file at `path` contains `text`; all processes must be alive until then."""
    wait_until(lambda: contains(path, text), f"{text!r} is not in {path}", processes, seconds)


def wait_until(condition, otherwise: str, processes=(), seconds: float = 600) -> None:
    """Waits until `condition()` holds; all processes must be alive until then.

    Raises AssertionError if one ends before, or TimeoutError; both messages say `otherwise`.
    """
    deadline = time.monotonic() + seconds
    while True:
        # Before the condition, which a process may fulfill last of all.
        ended = [process.args for process in processes if process.poll() is not None]
        if condition():
            return
        assert not ended, f"{otherwise}; ended early: {ended}"
        if time.monotonic() > deadline:
            raise TimeoutError(f"{otherwise} after {seconds} s")
        time.sleep(0.01)


def contains(path: pathlib.Path, text: str) -> bool:
    """Returns whether the file exists and contains `text`; a process may still be writing it."""
    try:
        return text.encode() in path.read_bytes()
    except FileNotFoundError:
        return False
