"""Runs a job on a Cloud TPU slice, and restarts it on a new slice after each preemption.

`tools/launch_tpu.py` documents the actions, which are the methods of `Slice`.
"""

import dataclasses
import datetime
import json
import math
import pathlib
import re
import shlex
import subprocess
import tempfile
import time

from bert_jax.pods import chips
from bert_jax.pods.launch import job
from bert_jax.pods.launch.budget import LIMIT_REACHED, SAVE_SECONDS, Budget
from bert_jax.pods.launch.job import LaunchError, print_status
from bert_jax.runtime.errors import PREEMPTED

WORKER = "launch/code/tools/tpu_worker.sh"
RUNTIME_VERSIONS = {  # From cloud.google.com/tpu/docs/runtimes.
    **dict.fromkeys(("v2", "v3", "v4"), "tpu-ubuntu2204-base"),
    "v5p": "v2-alpha-tpuv5",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v6e": "v2-alpha-tpuv6e",
}
MAX_FLEX_SECONDS = 7 * 24 * 3600  # From cloud.google.com/tpu/docs/request-using-flex-start.
# States of a queued resource, or of its TPU, that never become ACTIVE again.
LOST = ("SUSPENDING", "SUSPENDED", "DELETING", "PREEMPTED", "TERMINATED")
# Exit codes of a job that did not fail: it finished, can be resumed, or was stopped at its limit.
NOT_FAILED = {"0", str(PREEMPTED), str(LIMIT_REACHED)}
SLICE_KEPT_MESSAGE = (
    "Nothing was stopped: if the slice exists, it is being billed, and its job may still be "
    "running. `launch` resumes watching it, `follow` only shows the log, and `delete` deletes the "
    "slice"
)

DELETION_NEEDS_LAUNCH = (
    "at the limit of its budget, the job stops by itself, but only `launch` deletes the slice, "
    "which is billed until then"
)


def slice_size(accelerator_type: str) -> tuple[str, int, int]:
    """Returns (type of chip, number of chips, number of hosts) of v4-32 or, by shape, v4:2x2x4.

    v5e-16 is v5litepod-16. See cloud.google.com/tpu/docs. Raises LaunchError for a slice that does
    not exist.
    """
    if ":" in accelerator_type:
        return size_of_shape(accelerator_type)
    api_name = accelerator_type.replace("v5e-", "v5litepod-")
    name = api_name.partition("-")[0]
    chip, num_chips = chips.parse_accelerator_type(api_name) or ("", 0)
    is_whole = chip and chips.accelerator_type(chip, num_chips) == api_name
    if is_whole and chips.default_shape(chip, num_chips):
        return chip, num_chips, chips.num_hosts(chip, num_chips)
    job.check_served(name, "launch_tpu")
    wrong = f"--accelerator_type={accelerator_type} is unknown"
    if not accelerator_type:
        wrong = "--accelerator_type is missing"
    expected = "CHIP-N, such as v4-32, CHIP one of v2, v3, v4, v5litepod (v5e), v5p or v6e"
    if name in chips.CORES_IN_NAME:
        unit = "TensorCores" if chips.CORES_IN_NAME[name] == 2 else "chips"
        expected = f"{name}-N, N the number of {unit} of a slice that exists"
    if chip:
        expected += f"; {chips.describe_nearest(chip, num_chips)}"
    raise LaunchError(f"{wrong}: expected {expected}")


def size_of_shape(topology: str) -> tuple[str, int, int]:
    """Returns what `slice_size` does, of a slice by its shape. Raises LaunchError."""
    job.check_served(topology.partition(":")[0], "launch_tpu")
    try:
        chip, shape, num_slices = chips.parse_topology(topology)
    except ValueError as error:
        raise LaunchError(f"--accelerator_type: {error}") from None
    if num_slices > 1:
        several = "tools/launch_gke.py runs a job on several"
        raise LaunchError(f"--accelerator_type={topology}: expected one slice; {several}")
    num_chips = math.prod(shape)
    return chip, num_chips, chips.num_hosts(chip, num_chips)


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice of a Cloud TPU pod, and the job that it runs.

    Attributes:
      root: the clone whose last commit the slice runs.
      name, project, zone: of the slice in Google Cloud.
      accelerator_type: such as v4-32, or by shape, v4:2x2x4.
      runtime_version: TPU software version; "": the default of the chip.
      capacity: "spot", "reserved", "flex_start", or "": on demand.
      network, subnetwork: of the hosts; "": those of the project called default.
      internal_ips: whether the hosts have no external addresses.
      service_account: as which the hosts access the bucket; "": the project's default.
      bucket: mounted at /gcs on every host.
      program: module of bert_jax to run.
      budget: what it may cost.
      max_restarts: maximum number of restarts by `launch`.
      delete_when_done: whether `launch` deletes the slice at its end.
      poll_seconds: seconds between queries of the slice's state.
    """

    root: pathlib.Path
    name: str
    project: str
    zone: str
    accelerator_type: str
    runtime_version: str
    capacity: str
    network: str
    subnetwork: str
    internal_ips: bool
    service_account: str
    bucket: str
    program: str
    budget: Budget
    max_restarts: int
    delete_when_done: bool
    poll_seconds: float

    def gcloud(
        self, *words: str, capture: bool = False, tries: int = 1, release: str = ""
    ) -> subprocess.CompletedProcess:
        """Runs `gcloud compute tpus` until it succeeds, up to `tries` times.

        `release` is "alpha" for options that only `gcloud alpha` has.
        """
        command = [*[release] * bool(release), *self.command(*words)]
        if not capture:
            print(shlex.join(["gcloud", *command]), flush=True)
        for remaining in reversed(range(tries)):
            result = job.run_gcloud(*command, capture_output=capture)
            if result.returncode == 0 or not remaining:
                return result
            print_status("the command failed; trying again")
            time.sleep(self.poll_seconds)

    def command(self, *words: str) -> list[str]:
        """Returns the arguments of `gcloud` for a command of `gcloud compute tpus`."""
        options = (f"--project={self.project}", f"--zone={self.zone}", "--quiet")
        return ["compute", "tpus", *words, *options]

    def ssh(self, command: str, worker: str = "all", **options) -> subprocess.CompletedProcess:
        """Runs a command on the hosts, with the options of `gcloud`."""
        return self.gcloud(*self.ssh_arguments(command, worker), **options)

    def ssh_arguments(self, command: str, worker: str = "all") -> list[str]:
        """Returns the words after `gcloud compute tpus` that run a command on the hosts."""
        # Without keepalive messages, ssh waits forever for a host that has vanished.
        alive = "--ssh-flag=-oServerAliveInterval=60"
        options = [f"--worker={worker}", *self.address(), alive, f"--command={command}"]
        return ["tpu-vm", "ssh", self.name, *options]

    def address(self) -> list[str]:
        """Returns the option of ssh and scp for hosts without external addresses."""
        return ["--internal-ip"] * self.internal_ips

    def describe(self, kind: str, output: str, tries: int = 20) -> str | None:
        """Returns what `describe` prints in the format `output`, or None if there is no slice.

        `kind` is "queued-resources" or "tpu-vm". Raises TimeoutError after `tries` tries: an
        unknown state is no reason to delete a slice.
        """
        for attempt in range(tries):
            time.sleep(self.poll_seconds if attempt else 0)
            result = self.gcloud(kind, "describe", self.name, f"--format={output}", capture=True)
            if result.returncode == 0:
                return result.stdout.strip()
            if "NOT_FOUND" in result.stderr:
                return None
            print_status(f"cannot query {self.name}: {result.stderr.strip()}")
        raise TimeoutError(f"gcloud did not report the state of {self.name}. {SLICE_KEPT_MESSAGE}")

    def slice_state(self, tries: int = 20) -> str:
        """Returns the state of the slice, or NOT_FOUND. Raises TimeoutError after `tries` tries."""
        state = self.describe("queued-resources", "value(state.state)", tries)
        if state is None:
            return "NOT_FOUND"
        if state == "ACTIVE":  # It stays ACTIVE for a while after its TPU is lost.
            describe = ["tpu-vm", "describe", self.name]
            tpu = self.gcloud(*describe, "--format=value(state)", capture=True)
            if tpu.stdout.strip() in LOST or "NOT_FOUND" in tpu.stderr:
                return "PREEMPTED"
        return state

    def job_states(self) -> tuple[dict[str, str], str]:
        """Returns {host: exit code, running or none} of the hosts that answer, and their output."""
        output = self.ssh(f"bash {WORKER} status || echo $(hostname) none", capture=True).stdout
        return dict(re.findall(r"^(\S+) (\d+|running|none)$", output, re.MULTILINE)), output

    def billed(self) -> tuple[float, Budget]:
        """Returns for how many seconds the job's slices have been billed, and its budget.

        The slice knows for how long those before it were, and the price; the flags take precedence.
        Raises LaunchError if the slice is lost, or TimeoutError if gcloud does not answer.
        """
        described = self.describe("tpu-vm", "json(createTime,metadata)")
        if described is None:
            raise LaunchError(f"cannot read the creation time of {self.name}: its TPU is lost")
        node = json.loads(described)
        known = node.get("metadata") or {}
        age = time.time() - datetime.datetime.fromisoformat(node["createTime"]).timestamp()
        price = self.budget.price_per_hour
        if price is None and "price_per_hour" in known:
            price = float(known["price_per_hour"])
        budget = dataclasses.replace(self.budget, price_per_hour=price)
        return float(known.get("billed_seconds", 0)) + age, budget

    def deadline(self) -> float:
        """Returns the time (`time.time()`) at which the job reaches the limit of its budget."""
        limit = self.budget.limit_seconds
        return time.time() + limit - self.billed()[0] if limit < math.inf else math.inf

    def create(self, billed_seconds: float = 0) -> bool:
        """Requests the slice unless it exists, and waits. Returns whether it is active.

        `billed_seconds` is for how long the slices before it were billed.
        """
        if self.slice_state() == "NOT_FOUND":
            words, release = self.request(billed_seconds)
            created = self.gcloud("queued-resources", "create", *words, release=release)
            # If the connection was lost, the slice may exist although the command failed.
            if created.returncode and self.slice_state() == "NOT_FOUND":
                raise LaunchError(f"{self.name} was not created because of the error above")
        last_state = None
        while (state := self.slice_state()) not in ("ACTIVE", "FAILED", "NOT_FOUND", *LOST):
            if state != last_state:
                print_status(f"{self.name} is {state}")
            last_state = state
            time.sleep(self.poll_seconds)
        if state == "NOT_FOUND":
            raise LaunchError(f"{self.name} was deleted while waiting for it")
        if state == "FAILED":
            query = ("describe", self.name, "--format=value(state.failedData.error.message)")
            reason = self.gcloud("queued-resources", *query, capture=True).stdout.strip()
            unknown = "Google Cloud gave no reason; it may be quota, capacity or a flag"
            raise LaunchError(f"the request for {self.name} FAILED: {reason or unknown}")
        print_status(f"{self.name} is {state}{' and costs money' if state == 'ACTIVE' else ''}")
        return state == "ACTIVE"

    def request(self, billed_seconds: float) -> tuple[list[str], str]:
        """Returns the arguments of `queued-resources create`, and the release of gcloud."""
        chip, num_chips, _ = slice_size(self.accelerator_type)
        accelerator_type = chips.accelerator_type(chip, num_chips)
        name = accelerator_type.partition("-")[0]
        words = [self.name, f"--node-id={self.name}"]
        if shape := self.accelerator_type.partition(":")[2]:
            words += [f"--type={name}", f"--topology={shape}"]
        else:
            words.append(f"--accelerator-type={accelerator_type}")
        words.append(f"--runtime-version={self.runtime_version or RUNTIME_VERSIONS[name]}")
        options = {"network": self.network, "subnetwork": self.subnetwork}
        options["service-account"] = self.service_account
        words += [f"--{option}={value}" for option, value in options.items() if value]
        words += ["--internal-ips"] * self.internal_ips
        metadata = {"billed_seconds": round(billed_seconds)} if billed_seconds else {}
        if self.budget.price_per_hour is not None:
            metadata["price_per_hour"] = self.budget.price_per_hour
        if metadata:
            words.append("--metadata=" + ",".join(f"{k}={v}" for k, v in metadata.items()))
        if self.capacity == "flex_start":
            seconds = self.budget.limit_seconds - billed_seconds + SAVE_SECONDS
            duration = f"--max-run-duration={math.ceil(min(seconds, MAX_FLEX_SECONDS))}s"
            return [*words, "--provisioning-model=flex-start", duration], "alpha"
        return [*words, *[f"--{self.capacity}"] * bool(self.capacity)], ""

    def copy(self, commit: str = "") -> None:
        """Copies a commit (default: the last one) to every host and installs it."""
        with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
            job.pack_commit(self.root, commit or job.last_commit(self.root), archive.name)
            target = f"{self.name}:launch.tar"
            words = (archive.name, target, "--worker=all", *self.address())
            copied = self.gcloud("tpu-vm", "scp", *words, tries=3)
        unpack = "rm -rf launch/code && mkdir -p launch/code && tar -xf launch.tar -C launch/code"
        install = f"{unpack} && bash {WORKER} install {self.bucket}"
        if copied.returncode or self.ssh(install, tries=3).returncode:
            raise LaunchError("the code could not be copied and installed; see the errors above")

    def run(self, *arguments: str) -> str:
        """Starts the job on every host, unless its budget is spent, and follows it."""
        deadline = self.deadline()
        if (seconds := deadline - time.time()) <= 0:
            return "stopped"
        limits = []
        if seconds < math.inf:
            limits = [f"LIMIT_SECONDS={math.ceil(seconds)}", f"SAVE_SECONDS={SAVE_SECONDS}"]
        num_hosts = slice_size(self.accelerator_type)[2]
        multihost = ["--multihost", f"--num_processes={num_hosts}"] if num_hosts > 1 else []
        command = ["bash", WORKER, "start", f"bert_jax.{self.program}", *arguments, *multihost]
        self.ssh(shlex.join(["env", *limits, *command] if limits else command), tries=3)
        return self.follow(deadline)

    def follow(self, deadline: float = math.inf) -> str:
        """Shows the log of worker 0 until the job ends, and which workers fail.

        Returns finished, failed, preempted, or stopped: at `deadline`, the limit of its budget.
        """
        shown = set()

        def show_exit(line: str) -> None:  # Each watch reports what has ended before it, too.
            if line not in shown:
                shown.add(line)
                print_status(line)

        watch = ["gcloud", *self.command(*self.ssh_arguments(f"bash {WORKER} watch"))]
        while True:
            with job.watching(watch, show_exit, self.poll_seconds):
                self.ssh(f"bash {WORKER} follow", worker="0")
            states, output = self.job_states()
            codes = set(states.values())
            if codes == {"0"}:
                return "finished"
            if codes and codes <= NOT_FAILED:
                return "stopped" if str(LIMIT_REACHED) in codes else "preempted"
            if codes == {"none"}:
                raise LaunchError(f"no job was started on {self.name}; `run` starts one")
            # Still running, unreachable, or failed, perhaps because another host was lost.
            state = self.slice_state()
            if state in LOST:
                return "preempted"
            if state == "NOT_FOUND":
                raise LaunchError(f"{self.name} was deleted")
            if codes - {*NOT_FAILED, "running", "none"}:
                print(output)
                return "failed"
            if time.time() > deadline + SAVE_SECONDS:
                print_status(f"the limit of the budget has passed: {states or 'no answer'}")
                return "stopped"
            lost = "lost the connection to worker 0, or waiting for the others"
            print_status(f"{lost}: {states or 'no answer'}")
            time.sleep(self.poll_seconds)

    def launch(self, *arguments: str) -> str:
        """Creates the slice, copies the code, and runs the job; again after each preemption."""
        commit = job.last_commit(self.root)  # Restarts run the same code.
        if self.budget.limit_seconds < math.inf:
            print_status(f"keep this program running: {DELETION_NEEDS_LAUNCH}")
        billed_seconds = 0.0  # Of all slices so far.
        for restart in range(self.max_restarts + 1):
            if restart:
                print_status(f"{self.name} was preempted; restart {restart} of {self.max_restarts}")
                self.delete()
            queried_at, error = math.inf, None
            try:
                existed = self.slice_state() == "ACTIVE"
                result = "preempted"
                if self.create(billed_seconds):
                    billed_seconds, _ = self.billed()
                    queried_at = time.time()
                    result = self.attempt(existed, commit, *arguments)
            except (LaunchError, subprocess.CalledProcessError) as raised:
                result, error = "preempted" if self.slice_state() in LOST else "failed", raised
            billed_seconds += max(time.time() - queried_at, 0)
            if result == "preempted" and billed_seconds >= self.budget.limit_seconds:
                result = "stopped"
            if result != "preempted":
                break
        if billed_seconds:
            print_status(f"{self.name} was billed for {self.budget.describe(billed_seconds)}")
        if self.delete_when_done:
            self.delete()
        else:
            print_status(f"{self.name} is kept and costs money until you `delete` it")
        if result == "failed" and error:
            raise error
        return result

    def attempt(self, existed: bool, commit: str, *arguments: str) -> str:
        """Runs the job on the active slice to its end or to a preemption; see `follow`.

        Follows one that is already running, if the slice existed.
        """
        if existed:
            states, _ = self.job_states()
            if "running" in states.values():
                print_status(
                    f"a job is already running on {self.name}, with its own flags; following it"
                )
                return self.follow()  # Its hosts stop it at the limit that it was started with.
            if len(states) < slice_size(self.accelerator_type)[2]:
                raise TimeoutError(f"not all hosts of {self.name} answer. {SLICE_KEPT_MESSAGE}")
        self.copy(commit)
        return self.run(*arguments)

    def status(self) -> None:
        """Prints the state of the slice, what it has cost so far, and the job on every host."""
        state = self.slice_state()
        print(f"{self.name}: {state}")
        if state == "ACTIVE":
            chip, num_chips, _ = slice_size(self.accelerator_type)
            given = chips.accelerator_type(chip, num_chips)
            found = self.describe("tpu-vm", "value(acceleratorType)")
            if found and found != given:  # Its price would be that of another number of chips.
                raise LaunchError(f"--accelerator_type={given}: {self.name} is a {found}")
            seconds, budget = self.billed()
            print(f"billed for {budget.describe(seconds)}")
        print(self.job_states()[1], end="")

    def delete(self) -> None:
        """Deletes the slice, if it exists."""
        if self.slice_state() == "NOT_FOUND":
            return
        deleted = self.gcloud("queued-resources", "delete", self.name, "--force", tries=3)
        if deleted.returncode and self.slice_state() != "NOT_FOUND":
            raise LaunchError(f"{self.name} was not deleted and may cost money; `delete` it")
        print_status(f"{self.name} was deleted")

    def check_job(self, *arguments: str) -> None:
        """Raises LaunchError for a job that would fail on the slice, simulated on this machine."""
        chip, num_chips, _ = slice_size(self.accelerator_type)
        num_devices = num_chips * (2 if chip in ("v2", "v3") else 1)
        job.check_job(
            self.root, num_slices=1, num_devices=num_devices, job=[self.program, *arguments]
        )
