"""The commands of tools/launch_tpu.py: for each, a function of the target that returns its words.

The parsers of gcloud 528 and xpk 1.16 accept them.
"""

import dataclasses
import re
import shlex

from bert_jax.runtime.exit_status import PREEMPTED

RUNTIME_VERSIONS = {  # cloud.google.com/tpu/docs/runtimes, 2025.
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5p": "v2-alpha-tpuv5",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v6e": "v2-alpha-tpuv6e",
}


class LaunchError(RuntimeError):
    """What the user is told in one line."""


@dataclasses.dataclass(frozen=True)
class Target:
    """What to run, and where. `arguments` are those of `bert_jax.pretrain`."""

    name: str
    project: str
    zone: str
    accelerator_type: str
    bucket: str
    spot: bool
    runtime_version: str
    service_account: str
    valid_until_duration: str
    cluster: str
    num_slices: int
    max_restarts: int
    arguments: tuple[str, ...]

    @property
    def num_hosts(self) -> int:
        """Host machines, each with one process of the job."""
        return self.num_slices * hosts_of_slice(self.accelerator_type)


def hosts_of_slice(accelerator_type: str) -> int:
    """Host machines of one slice; LaunchError if there is no such type.

    The number in v2 to v5p types counts TensorCores, eight to a host; in v5litepod and v6e types
    it counts chips, four to a host, but 1, 4 or 8 on one host (cloud.google.com/tpu/docs).
    """
    match = re.fullmatch(r"(\w+)-([1-9]\d*)", accelerator_type)
    generation, size = (match[1], int(match[2])) if match else ("", 0)
    if generation in ("v5litepod", "v6e"):
        if size in (1, 4, 8):
            return 1
        if size >= 16 and size % 4 == 0:
            return size // 4
    elif generation in RUNTIME_VERSIONS and size % 8 == 0:
        return size // 8
    raise LaunchError(
        f"--accelerator_type={accelerator_type} is unknown: expected v2-N, v3-N, v4-N or v5p-N "
        "with N cores, a multiple of 8; or v5litepod-N or v6e-N with N chips, 1, 4, 8 or a "
        "multiple of 4 from 16"
    )


def chips_of_slice(accelerator_type: str) -> tuple[str, int]:
    """(kind of chip, as in a topology, number of chips) of a type that `hosts_of_slice` knows."""
    generation, _, size = accelerator_type.partition("-")
    if generation in ("v5litepod", "v6e"):
        return generation.replace("litepod", "e"), int(size)
    return generation, int(size) // 2


def gcloud(target: Target, *words: str) -> list[str]:
    place = [f"--project={target.project}", f"--zone={target.zone}"]
    return ["gcloud", "compute", "tpus", *words, *place, "--quiet"]


def create(target: Target) -> list[str]:
    generation = target.accelerator_type.partition("-")[0]
    words = [
        f"--node-id={target.name}",
        f"--accelerator-type={target.accelerator_type}",
        f"--runtime-version={target.runtime_version or RUNTIME_VERSIONS[generation]}",
    ]
    words += ["--spot"] * target.spot
    for option in ("service_account", "valid_until_duration"):
        if value := getattr(target, option):
            words.append(f"--{option.replace('_', '-')}={value}")
    return gcloud(target, "queued-resources", "create", target.name, *words)


def describe(target: Target) -> list[str]:
    format_ = "--format=value(state.state)"
    return gcloud(target, "queued-resources", "describe", target.name, format_)


def describe_node(target: Target) -> list[str]:
    return gcloud(target, "tpu-vm", "describe", target.name, "--format=value(state)")


def delete(target: Target) -> list[str]:
    return gcloud(target, "queued-resources", "delete", target.name, "--force")


def scp(target: Target, archive: str) -> list[str]:
    return gcloud(target, "tpu-vm", "scp", archive, f"{target.name}:launch.tar.gz", "--worker=all")


def ssh(target: Target, command: str, worker: str = "all") -> list[str]:
    words = [target.name, f"--worker={worker}", f"--command={command}"]
    return gcloud(target, "tpu-vm", "ssh", *words)


def on_workers(target: Target, *words: str, worker: str = "all") -> list[str]:
    return ssh(target, shlex.join(["bash", "launch/code/tools/tpu_worker.sh", *words]), worker)


def job_arguments(target: Target) -> list[str]:
    if target.num_hosts == 1:
        return [*target.arguments]
    several = ["--multihost", f"--num_processes={target.num_hosts}"]
    # On a cluster each host fetches and installs by itself, and one that gives up fails them all.
    patience = ["--join_seconds=1800"] if target.cluster else []
    return [*patience, *target.arguments, *several]


def xpk(target: Target, *words: str) -> list[str]:
    place = [f"--cluster={target.cluster}", f"--project={target.project}", f"--zone={target.zone}"]
    return ["xpk", "workload", *words, *place]


def xpk_create(target: Target, code: str) -> list[str]:
    install = "pip install --require-hashes -r requirements.lock && pip install -e '.[tpu]'"
    job = shlex.join(["python", "-m", "bert_jax.pretrain", *job_arguments(target)])
    words = [
        f"--workload={target.name}",
        f"--tpu-type={target.accelerator_type}",
        f"--num-slices={target.num_slices}",
        "--base-docker-image=python:3.11",
        f"--script-dir={code}",
        f"--max-restarts={target.max_restarts}",
        f"--restart-on-exit-codes={PREEMPTED}",
        "--termination-grace-period-seconds=300",  # For the last save.
        f"--command={install} && exec {job}",  # exec: a SIGTERM to the shell is one to the job.
    ]
    words += [f"--storage={target.bucket}"] if target.bucket else []
    return xpk(target, "create", *words)


def kubectl_logs(target: Target) -> list[str]:
    labels = {
        "jobset.sigs.k8s.io/jobset-name": target.name,
        "jobset.sigs.k8s.io/job-index": "0",
        "batch.kubernetes.io/job-completion-index": "0",
    }
    selector = ",".join(f"{label}={value}" for label, value in labels.items())
    return ["kubectl", "logs", "--follow", "--tail=200", f"--selector={selector}"]
