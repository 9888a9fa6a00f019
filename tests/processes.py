"""Starts a run as several real processes on this machine, for tests that watch and kill them."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def start(
    workdir,
    corpus,
    *fields: str,
    num_processes: int = 1,
    devices_each: int = 1,
    last: tuple[str, ...] = (),
    **flags,
) -> list[subprocess.Popen]:
    """The processes of one pre-training of a tiny model, as `launch` starts them.

    `fields` are of the configuration, `flags` of the command; the last process alone gets `last`.
    """
    command = [
        "bert_jax.pretrain",
        "--config=configs/pretrain/bert_tiny.py:runlocal",
        f"--config.corpus={corpus}",
        "--config.long_phase.num_steps=0",
        "--config.max_predictions=10",
        "--config.model.max_position_embeddings=64",
        "--config.stall_seconds=100",  # Stacks are shown before `finish` loses patience.
        *[f"--config.{field}" for field in fields],
        *[f"--{name}={value}" for name, value in flags.items()],
    ]
    return launch(
        command, workdir, num_processes=num_processes, devices_each=devices_each, last=last
    )


def launch(
    command: list[str],
    workdir,
    *,
    num_processes: int = 1,
    devices_each: int = 1,
    last: tuple[str, ...] = (),
) -> list[subprocess.Popen]:
    """`python -m COMMAND --workdir=WORKDIR` in processes that are one run.

    What they print goes to `workdir`.<process>.log; the last process alone gets `last`.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices_each} "
        "--xla_backend_optimization_level=0",
    }
    command = [sys.executable, "-m", *command, f"--workdir={workdir}"]
    together = []
    if num_processes > 1:
        together = [f"--coordinator=localhost:{free_port()}", f"--num_processes={num_processes}"]
    processes = []
    for process in range(num_processes):
        own = [*together, f"--process_id={process}"] if together else []
        own += last if process == num_processes - 1 else ()
        with log_of(workdir, process).open("w") as log:
            processes.append(
                subprocess.Popen(
                    [*command, *own], stdout=log, stderr=log, env=environment, cwd=ROOT
                )
            )
            processes[-1].log = log.name
    return processes


def log_of(workdir, process: int = 0) -> pathlib.Path:
    return pathlib.Path(f"{workdir}.{process}.log")


def finish(processes: list[subprocess.Popen], seconds: float = 300) -> list[int]:
    """Waits for all; their exit statuses. Where one stands still, what all said is shown."""
    try:
        return [process.wait(seconds) for process in processes]
    except subprocess.TimeoutExpired as error:
        logs = [pathlib.Path(process.log).read_text()[-8000:] for process in processes]
        raise AssertionError("\n\n".join([str(error), *logs])) from error


def run(workdir, corpus, *fields: str, **options) -> None:
    """Starts the processes and waits until they have succeeded."""
    statuses = finish(start(workdir, corpus, *fields, **options))
    assert not any(statuses), log_of(workdir).read_text()[-3000:]


@contextlib.contextmanager
def ended(processes: list[subprocess.Popen]):
    """Leaves no process behind."""
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def wait_for(path: pathlib.Path, text: str, started, seconds: float = 200) -> None:
    """Returns once the file at `path` holds `text`; all processes must be alive until then."""
    deadline = time.monotonic() + seconds
    while not (path.exists() and text in path.read_text()):
        for number, process in enumerate(started):
            assert process.poll() is None, f"process {number} ended early: {process.args}"
        if time.monotonic() > deadline:
            raise TimeoutError(f"{text!r} is not in {path} after {seconds} s")
        time.sleep(0.05)
