"""What both launchers do before a job costs money: find its commit, and check it on this machine.

`launch.py` runs the job through the Cloud TPU API, `launch_gke.py` on a GKE cluster.
"""

import contextlib
import importlib.metadata
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

from bert_jax.runtime.cache import cache_directory
from bert_jax.runtime.command_line import parse_flags, program_name

# From cloud.google.com/tpu/docs. The Cloud TPU API gets no further chips.
SERVED_BY = {
    "the Cloud TPU API (tools/launch_tpu.py)": ("v2", "v3", "v4", "v5e", "v5p", "v6e"),
    "GKE (tools/launch_gke.py)": ("v4", "v5e", "v5p", "v6e", "tpu7x"),
    "Compute Engine (docs/cloud_tpu.md)": ("v5p", "v6e", "tpu7x"),
}


class LaunchError(RuntimeError):
    """The job cannot run."""


def print_status(text: str) -> None:
    print(f"{program_name()}: {text}", file=sys.stderr, flush=True)


def parse_launcher_flags(argv: list[str]) -> list[str]:
    """Parses the launcher's flags as `parse_flags` does; says where the job's flags belong."""
    try:
        return parse_flags(argv)
    except SystemExit as stopped:
        if "Unknown command line flag" not in str(stopped.code):
            raise
        program, message = str(stopped.code).split(": ", 1)
        sys.exit(f"{program}: the flags of the job follow `--`; before it: {message}")


def interrupt_on_signals() -> None:
    """Makes SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does; not SIGHUP under nohup."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.default_int_handler)


def read_capacity(**chosen: bool) -> str:
    """Returns the name of the flag that is set: spot, reserved, ...; "" (on demand) if none is.

    Raises LaunchError if several are.
    """
    names = [name for name, is_chosen in chosen.items() if is_chosen]
    if len(names) > 1:
        given = " and ".join(f"--{name}" for name in names)
        raise LaunchError(f"{given} are mutually exclusive: choose one kind of capacity")
    return "".join(names)


def describe_result(result: str) -> str:
    """Returns a description of the result, such as "failed" or "was preempted"."""
    said = {"preempted": "was preempted", "stopped": "was stopped at the limit of its budget"}
    return said.get(result, result)


def check_served(chip: str, launcher: str) -> None:
    """Raises LaunchError for a chip that the API of `launcher` does not serve."""
    serving = [api for api, chips in SERVED_BY.items() if chip in chips]
    if serving and not any(launcher in api for api in serving):
        raise LaunchError(f"tools/{launcher}.py has no {chip}: use {' or '.join(serving)}")


def check_bucket(bucket: str) -> None:
    """Raises LaunchError unless `bucket` can be the name of a bucket."""
    expected = (
        "expected a bucket's name, without gs://: lower-case letters, digits, '-', '_' and '.'"
    )
    if not bucket:
        raise LaunchError(f"--bucket is missing: {expected}")
    if not re.fullmatch(r"[a-z0-9._-]+", bucket):
        raise LaunchError(f"--bucket={bucket}: {expected}")


def last_commit(root: pathlib.Path) -> str:
    """Returns the last commit of the clone `root`. Raises LaunchError if it has changes."""
    if changed := run_git(root, "status", "--short"):
        raise LaunchError(f"only commits are copied: commit, stash or ignore these\n{changed}")
    return run_git(root, "rev-parse", "HEAD").strip()


def run_git(root: pathlib.Path, *words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=root, encoding="utf-8", errors="replace")


def pack_commit(root: pathlib.Path, commit: str, archive: str) -> None:
    """Writes the files of a commit, and nothing else, to the tar file `archive`."""
    subprocess.run(["git", "archive", f"--output={archive}", commit], cwd=root, check=True)


def run_gcloud(*words: str, **options) -> subprocess.CompletedProcess:
    """Runs `gcloud`, with the options of `subprocess.run`. Raises LaunchError without it."""
    try:
        return subprocess.run(
            ["gcloud", *words],
            check=False,
            encoding="utf-8",
            errors="replace",
            **options,
        )
    except FileNotFoundError:
        install = "https://cloud.google.com/sdk/docs/install"
        raise LaunchError(f"gcloud is not installed: see {install}") from None


@contextlib.contextmanager
def watching(command: list[str], show: Callable[[str], None], seconds: float) -> Iterator[None]:
    """Runs a command beside the block, and gives each line of its output to `show`, in a thread.

    Runs it again `seconds` after it ended, and ends it and what it has started after the block.
    """
    is_over, started = threading.Event(), []

    def end():
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)

    def read():
        while not is_over.is_set():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # A process group of its own.
            )
            started[:] = [process]
            if is_over.is_set():  # Perhaps it was set before `started`.
                end()
            with process:
                for line in process.stdout:
                    show(line.rstrip("\n"))
            is_over.wait(seconds)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        end()
        thread.join()


def check_job(root: pathlib.Path, num_slices: int, num_devices: int, job: list[str]) -> None:
    """Raises LaunchError for a job that would fail on its devices, simulated on this machine.

    `num_devices` is the number of JAX devices of all slices, and `job` the module of bert_jax to
    run, such as "pretrain", and its flags. What passed before is not repeated, unless the clone has
    changes or its commit, the devices, the job, its config file, Python or JAX are others.
    """
    environment = [sys.version, importlib.metadata.version("jax")]
    key = [run_git(root, "rev-parse", "HEAD"), str(num_slices), str(num_devices), *job]
    config = next((word for word in job if re.match("--?config=", word)), "").partition("=")[2]
    with contextlib.suppress(OSError):  # git may ignore the file; without one, the check says so.
        key.append((root / config.partition(":")[0]).read_text(encoding="utf-8", errors="replace"))
    passed = cache_directory("checked_jobs", *environment, *key)
    has_changes = bool(run_git(root, "status", "--short"))
    if passed.exists() and not has_changes:
        print_status(f"this job passed its checks before; to repeat them, remove {passed}")
        return
    devices_flag = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}"}
    check = subprocess.run(
        [sys.executable, "tools/launch_check.py", str(num_slices), *job],
        cwd=root,
        env=os.environ | devices_flag | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if check.returncode:
        raise LaunchError(f"the job would fail: {check.stderr.strip()}")
    if not has_changes:
        with contextlib.suppress(OSError):  # Then the next launch checks it again.
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.touch()
