r"""Runs a job on a Cloud TPU slice, and restarts it on a new slice after each preemption.

python tools/launch_tpu.py launch --name=base --project=PROJECT --zone=us-central2-b \
    --accelerator_type=v4-32 --spot --bucket=BUCKET -- \
    --config=configs/pretrain/pod_base.py:v4 --workdir=/gcs/runs/base \
    --config.corpus=/gcs/corpus/128 --config.long_phase.corpus=/gcs/corpus/512

Everything after `--` is passed to `python -m bert_jax.pretrain`, or to another program: with
`--program=sweep` it starts a sweep, which several slices can share. The actions:

launch    create, copy, run and follow; repeat after a preemption; delete the slice at the end
create    request the slice (a queued resource) and wait until it is active
copy      copy the last commit to every host, install it, and mount --bucket at /gcs
run       start the job in the background on every host, and follow it
follow    show the log of worker 0 until the job ends; Ctrl-C leaves the job running
status    show the state of the slice and of the job on every host
delete    delete the slice, which stops billing

docs/cloud_tpu.md explains each step. Not yet run on a real cloud: watch the first launch.
"""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time

from absl import app, flags

from bert_jax.errors import INTERRUPTED, PREEMPTED
from bert_jax.runtime.command_line import parse_flags

NAME = flags.DEFINE_string("name", None, "Name of the slice.", required=True)
PROJECT = flags.DEFINE_string("project", None, "Google Cloud project.", required=True)
ZONE = flags.DEFINE_string("zone", None, "Zone, such as us-central2-b.", required=True)
TYPE = flags.DEFINE_string(
    "accelerator_type", None, "Accelerator type, such as v4-32 or v6e-16.", required=True
)
PROGRAM = flags.DEFINE_enum(
    "program", "pretrain", ["pretrain", "finetune", "sweep"], "Module of bert_jax to run."
)
RUNTIME_VERSION = flags.DEFINE_string(
    "runtime_version", None, "TPU software version; the default depends on --accelerator_type."
)
SPOT = flags.DEFINE_bool("spot", False, "Use spot capacity: cheaper, but may be preempted.")
BUCKET = flags.DEFINE_string("bucket", "", "Cloud Storage bucket to mount at /gcs on every host.")
MAX_RESTARTS = flags.DEFINE_integer(
    "max_restarts", 20, "Maximum number of restarts by `launch`.", 0
)
DELETE = flags.DEFINE_bool("delete_when_done", True, "Delete the slice at the end of `launch`.")
POLL_SECONDS = flags.DEFINE_float(
    "poll_seconds", 30, "Seconds between polls of the slice's state.", 0
)

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORKER = "launch/code/tools/tpu_worker.sh"
RUNTIME_VERSIONS = {  # From cloud.google.com/tpu/docs/runtimes.
    **dict.fromkeys(("v2", "v3", "v4"), "tpu-ubuntu2204-base"),
    "v5p": "v2-alpha-tpuv5",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v6e": "v2-alpha-tpuv6e",
}
# States of a queued resource, or of its TPU, that never become ACTIVE again.
LOST = ("SUSPENDING", "SUSPENDED", "DELETING", "PREEMPTED", "TERMINATED")
RESOURCE_IS_KEPT = (
    "Nothing was stopped: if the slice exists, it is being billed, and its job may still be "
    "running. `launch` resumes watching it, `follow` only shows the log, and `delete` deletes the "
    "slice"
)


class LaunchError(RuntimeError):
    """The job cannot run. `launch` deletes its slice."""


def print_status(text: str) -> None:
    print(f"launch_tpu: {text}", file=sys.stderr, flush=True)


def slice_size(accelerator_type: str) -> tuple[str, int, int]:
    """Returns (type of chip, number of chips, number of hosts); see cloud.google.com/tpu/docs."""
    chip, _, suffix = accelerator_type.partition("-")
    size = int(suffix) if suffix.isdecimal() else 0
    if chip in ("v2", "v3", "v4", "v5p") and size and size % 8 == 0:  # TensorCores.
        return chip, size // 2, size // 8
    if chip in ("v5litepod", "v6e") and (size in (1, 4, 8) or (size >= 16 and size % 4 == 0)):
        return chip.replace("litepod", "e"), size, size // 4 if size > 8 else 1
    raise LaunchError(
        f"--accelerator_type={accelerator_type} is unknown: expected v2-N, v3-N, v4-N or v5p-N, N "
        "a multiple of 8; or v5litepod-N or v6e-N, N 1, 4, 8, or a multiple of 4 from 16"
    )


def gcloud(*words: str, capture: bool = False, tries: int = 1) -> subprocess.CompletedProcess:
    """Runs `gcloud compute tpus` until it succeeds, up to `tries` times."""
    options = (f"--project={PROJECT.value}", f"--zone={ZONE.value}", "--quiet")
    command = ["gcloud", "compute", "tpus", *words, *options]
    if not capture:
        print(shlex.join(command), flush=True)
    for remaining in reversed(range(tries)):
        result = subprocess.run(command, check=False, capture_output=capture, text=True)
        if result.returncode == 0 or not remaining:
            return result
        print_status("the command failed; trying again")
        time.sleep(POLL_SECONDS.value)


def ssh(command: str, worker: str = "all", **options) -> subprocess.CompletedProcess:
    # Without keepalive messages, ssh waits forever for a host that has vanished.
    alive = "--ssh-flag=-oServerAliveInterval=60"
    words = (NAME.value, f"--worker={worker}", alive, f"--command={command}")
    return gcloud("tpu-vm", "ssh", *words, **options)


def slice_state(tries: int = 20) -> str:
    """Returns the state of the slice, or NOT_FOUND. Raises TimeoutError after `tries` queries."""
    describe = ("describe", NAME.value)
    for attempt in range(tries):
        time.sleep(POLL_SECONDS.value if attempt else 0)
        result = gcloud("queued-resources", *describe, "--format=value(state.state)", capture=True)
        if "NOT_FOUND" in result.stderr:
            return "NOT_FOUND"
        if result.returncode == 0:
            break
        print_status(f"cannot query {NAME.value}: {result.stderr.strip()}")
    else:
        raise TimeoutError(f"gcloud did not report the state of {NAME.value}. {RESOURCE_IS_KEPT}")
    state = result.stdout.strip()
    if state == "ACTIVE":  # It stays ACTIVE for a while after its TPU is lost.
        tpu = gcloud("tpu-vm", *describe, "--format=value(state)", capture=True)
        state = "PREEMPTED" if tpu.stdout.strip() in LOST or "NOT_FOUND" in tpu.stderr else state
    return state


def job_states() -> tuple[dict[str, str], str]:
    """Returns {host: exit code, running or none} of the hosts that answer, and their output."""
    output = ssh(f"bash {WORKER} status || echo $(hostname) none", capture=True).stdout
    return dict(re.findall(r"^(\S+) (\d+|running|none)$", output, re.MULTILINE)), output


def create() -> bool:
    """Requests the slice unless it exists, and waits. Returns whether it is active, not lost."""
    if slice_state() == "NOT_FOUND":
        version = RUNTIME_VERSION.value or RUNTIME_VERSIONS[TYPE.value.partition("-")[0]]
        words = [f"--node-id={NAME.value}", f"--accelerator-type={TYPE.value}"]
        words += [f"--runtime-version={version}", *["--spot"] * SPOT.value]
        gcloud("queued-resources", "create", NAME.value, *words)
    last_state = None
    while (state := slice_state()) not in ("ACTIVE", "FAILED", "NOT_FOUND", *LOST):
        if state != last_state:
            print_status(f"{NAME.value} is {state}")
        last_state = state
        time.sleep(POLL_SECONDS.value)
    if state in ("FAILED", "NOT_FOUND"):
        describe = f"gcloud compute tpus queued-resources describe {NAME.value}"
        reason = f"quota, capacity or a flag: see above, or run `{describe}`"
        raise LaunchError(f"{NAME.value} is {state} because of {reason}")
    print_status(f"{NAME.value} is {state}{' and costs money' if state == 'ACTIVE' else ''}")
    return state == "ACTIVE"


def last_commit() -> str:
    if changed := subprocess.check_output(["git", "status", "--short"], cwd=ROOT, text=True):
        raise LaunchError(f"only commits are copied: commit, stash or ignore these\n{changed}")
    return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()


def copy(commit: str = "") -> None:
    """Copies a commit (default: the last one) to every host and installs it."""
    with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
        pack = ["git", "archive", f"--output={archive.name}", commit or last_commit()]
        subprocess.run(pack, cwd=ROOT, check=True)
        target = f"{NAME.value}:launch.tar"
        copied = gcloud("tpu-vm", "scp", archive.name, target, "--worker=all", tries=3)
    unpack = "rm -rf launch/code && mkdir -p launch/code && tar -xf launch.tar -C launch/code"
    install = f"{unpack} && bash {WORKER} install {BUCKET.value}"
    if copied.returncode or ssh(install, tries=3).returncode:
        raise LaunchError("the code could not be copied and installed; see the errors above")


def run(*arguments: str) -> str:
    num_hosts = slice_size(TYPE.value)[2]
    multihost = ["--multihost", f"--num_processes={num_hosts}"] if num_hosts > 1 else []
    command = ["bash", WORKER, "start", f"bert_jax.{PROGRAM.value}", *arguments, *multihost]
    ssh(shlex.join(command), tries=3)
    return follow()


def follow() -> str:
    """Shows the log until the job ends. Returns finished, failed or preempted."""
    while True:
        ssh(f"bash {WORKER} follow", worker="0")
        states, output = job_states()
        codes = set(states.values())
        if codes == {"0"}:
            return "finished"
        if codes and codes <= {"0", str(PREEMPTED)}:
            return "preempted"
        if codes == {"none"}:
            raise LaunchError(f"no job was started on {NAME.value}; `run` starts one")
        # Still running, unreachable, or failed, perhaps because another host was lost.
        state = slice_state()
        if state in LOST:
            return "preempted"
        if state == "NOT_FOUND":
            raise LaunchError(f"{NAME.value} was deleted")
        if codes - {"0", str(PREEMPTED), "running", "none"}:
            print(output)
            return "failed"
        print_status(
            f"lost the connection to worker 0, or waiting for the others: {states or 'no answer'}"
        )
        time.sleep(POLL_SECONDS.value)


def launch(*arguments: str) -> str:
    commit = last_commit()  # Restarts run the same code.
    for restart in range(MAX_RESTARTS.value + 1):
        if restart:
            print_status(f"{NAME.value} was preempted; restart {restart} of {MAX_RESTARTS.value}")
            delete()
        try:
            result, error = attempt(commit, *arguments), None
        except (LaunchError, subprocess.CalledProcessError) as raised:
            result, error = "preempted" if slice_state() in LOST else "failed", raised
        if result != "preempted":
            break
    if DELETE.value:
        delete()
    else:
        print_status(f"{NAME.value} is kept and costs money until you `delete` it")
    if result == "failed" and error:
        raise error
    return result


def attempt(commit: str, *arguments: str) -> str:
    """Runs the job to its end or to a preemption; follows one that is already running."""
    existed = slice_state() == "ACTIVE"
    if not create():
        return "preempted"
    if existed:
        states, _ = job_states()
        if "running" in states.values():
            print_status(f"a job is already running on {NAME.value}; following it")
            return follow()
        if len(states) < slice_size(TYPE.value)[2]:
            raise TimeoutError(f"not all hosts of {NAME.value} answer. {RESOURCE_IS_KEPT}")
    copy(commit)
    return run(*arguments)


def status() -> None:
    print(f"{NAME.value}: {slice_state()}\n{job_states()[1]}", end="")


def delete() -> None:
    if slice_state() == "NOT_FOUND":
        return
    deleted = gcloud("queued-resources", "delete", NAME.value, "--force", tries=3)
    if deleted.returncode and slice_state() != "NOT_FOUND":
        raise LaunchError(f"{NAME.value} was not deleted and may cost money; `delete` it")


def check_job(*arguments: str) -> None:
    """Raises LaunchError for a job that would fail on the slice, simulated by launch_check.py."""
    chip, num_chips, _ = slice_size(TYPE.value)
    devices = num_chips * (2 if chip in ("v2", "v3") else 1)
    devices_flag = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    words = (chip, str(num_chips), PROGRAM.value, *arguments)
    command = [sys.executable, "tools/launch_check.py", *words]
    environment = os.environ | devices_flag | {"JAX_PLATFORMS": "cpu"}
    check = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if check.returncode:
        raise LaunchError(f"the job would fail: {check.stderr.strip()}")


def main(argv: list[str]) -> None:
    action, arguments = "".join(argv[1:2]), argv[2:]
    actions = {f.__name__: f for f in (launch, create, copy, run, follow, status, delete)}
    try:
        if action not in actions:
            raise LaunchError(f"expected one of {', '.join(actions)}, got {action or 'nothing'}")
        if bool(arguments) != (action in ("launch", "run")):
            raise LaunchError("`launch` and `run` need the arguments of the job after `--`")
        slice_size(TYPE.value)  # Raises for an unknown type.
        if action in ("launch", "copy") and not re.fullmatch(r"[a-z0-9._-]+", BUCKET.value):
            raise LaunchError(f"--bucket={BUCKET.value}: expected a bucket's name, without gs://")
        if arguments:
            check_job(*arguments)
        state = slice_state(tries=1)  # Fails now if a flag is wrong or nobody is logged in.
        if state == "NOT_FOUND" and action not in ("launch", "create"):
            raise LaunchError(f"there is no slice {NAME.value}")
        result = actions[action](*arguments)
    except (LaunchError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"launch_tpu: {error}")
    except KeyboardInterrupt:
        print_status(f"interrupted. {RESOURCE_IS_KEPT}")
        sys.exit(INTERRUPTED)
    if isinstance(result, str):
        print_status(
            f"the job on {NAME.value} {'has ' if result == 'finished' else 'was '}{result}"
        )
        sys.exit({"finished": 0, "preempted": PREEMPTED}.get(result, 1))


if __name__ == "__main__":
    flags.FLAGS.set_gnu_getopt()  # Flags may follow the action.
    app.run(main, flags_parser=parse_flags)
