"""Runs a job on TPU slices of a GKE cluster, which restarts it after each preemption.

`tools/launch_gke.py` documents the actions, which are the methods of `GkeJob`.
"""

import dataclasses
import json
import math
import pathlib
import re
import subprocess
import tempfile
import time

from bert_jax.pods.launch import job
from bert_jax.pods.launch.budget import LIMIT_REACHED, Budget
from bert_jax.pods.launch.job import LaunchError, print_status
from bert_jax.pods.launch.jobset import (
    BUCKET,
    NUM_CHIPS,
    PRICE_PER_HOUR,
    Job,
    archive_path,
    elapsed_path,
    make_jobset,
)

INSTALL_JOBSET = (
    "the cluster has no JobSet: run `kubectl apply --server-side -f https://github.com/"
    "kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml`"
)
LOG_IN = (
    "log in with `gcloud auth login` and `gcloud container clusters get-credentials CLUSTER "
    "--location=REGION --project=PROJECT`, or select the cluster with --context"
)
JOB_KEPT_MESSAGE = (
    "Nothing was stopped: if the job exists, the cluster runs it, restarts it by itself, and is "
    "being billed. `launch` or `follow` shows the log again, and `delete` ends the job"
)
# Labels of the pod of process 0.
FIRST_POD = {"jobset.sigs.k8s.io/job-index": "0", "batch.kubernetes.io/job-completion-index": "0"}


# The name of a pod, and the exit code of its job once it has ended.
EXIT = (
    '{.metadata.name}{" "}'
    '{.status.containerStatuses[?(@.name=="job")].state.terminated.exitCode}{"\\n"}'
)


@dataclasses.dataclass(frozen=True)
class GkeJob:
    """A job in a GKE cluster.

    Attributes:
      name: of its JobSet.
      context: of kubectl, which selects the cluster; "": the current one.
      poll_seconds: seconds between queries of the job's status.
    """

    name: str
    context: str
    poll_seconds: float

    def kubectl(self, *words: str, **options) -> subprocess.CompletedProcess:
        """Runs `kubectl`, with the options of `subprocess.run`. Raises LaunchError without it."""
        try:
            return subprocess.run(
                self.command(*words),
                check=False,
                encoding="utf-8",
                errors="replace",
                **options,
            )
        except FileNotFoundError:
            install = "gcloud components install kubectl gke-gcloud-auth-plugin"
            raise LaunchError(f"kubectl is not installed: run `{install}`") from None

    def command(self, *words: str) -> list[str]:
        """Returns the command `kubectl` with these words, for the job's cluster."""
        return ["kubectl", *words, *[f"--context={self.context}"] * bool(self.context)]

    def query(self, tries: int = 20) -> dict | None:
        """Returns the JobSet, with its status, or None if there is none.

        Raises TimeoutError after `tries` tries.
        """
        words = ("get", "jobset", self.name, "--output=json")
        for attempt in range(tries):
            time.sleep(self.poll_seconds if attempt else 0)
            result = self.kubectl(*words, capture_output=True)
            if result.returncode == 0:
                return json.loads(result.stdout)
            if "(NotFound)" in result.stderr:
                return None
            print_status(f"cannot query {self.name}: {strip_log_lines(result.stderr)}")
        raise TimeoutError(f"kubectl did not reach the cluster. {JOB_KEPT_MESSAGE}")

    def check_cluster(self) -> bool:
        """Returns whether the JobSet exists. Raises LaunchError if the cluster cannot be used."""
        result = self.kubectl("get", "jobset", self.name, capture_output=True)
        if result.returncode and "(NotFound)" not in result.stderr:
            no_jobset = "doesn't have a resource type" in result.stderr
            advice = INSTALL_JOBSET if no_jobset else LOG_IN
            raise LaunchError(f"{strip_log_lines(result.stderr)}\n{advice}")
        return result.returncode == 0

    def launch(self, root: pathlib.Path, settings: Job, arguments: list[str]) -> str:
        """Copies the last commit of `root`, creates the JobSet, and follows it.

        Only follows a job that is already running.
        """
        if (jobset := self.query()) is not None:
            if result := outcome(jobset):
                ended = job.describe_result(at_limit(self.exits()) or result)
                raise LaunchError(f"{self.name} {ended}: `delete` it before the next launch")
            print_status(f"{self.name} is already running, with its own flags; following it")
            return self.follow()
        commit = job.last_commit(root)  # Restarts run the same code.
        with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
            job.pack_commit(root, commit, archive.name)
            target = archive_address(settings.bucket, commit)
            if job.run_gcloud("storage", "cp", archive.name, target).returncode:
                raise LaunchError(
                    f"the commit was not copied to gs://{settings.bucket}; see the error above. It "
                    "needs `gcloud auth login`, and a bucket that exists and that you may write to"
                )
        jobset = json.dumps(make_jobset(settings, commit, arguments))
        # If the connection was lost, the job may exist, and be billed, although `apply` failed.
        if self.kubectl("apply", "--filename=-", input=jobset).returncode and self.query() is None:
            raise LaunchError("the cluster did not accept the job; see the error above")
        print_status(f"{self.name} is created, and costs money once its pods run")
        return self.follow()

    def follow(self) -> str:
        """Shows the log of process 0 until the job ends, and which pods fail.

        Returns finished, failed, preempted, or stopped: at the limit of its budget.
        """
        shown = set()

        def show_exit(line: str) -> None:  # A pod that has ended may be reported several times.
            pod, _, code = line.partition(" ")
            if code not in ("", "0") and line not in shown:
                shown.add(line)
                print_status(f"pod {pod} ended with exit code {code}")

        watch = self.command("get", "pods", "--watch", f"--output=jsonpath={EXIT}", self.pods())
        with job.watching(watch, show_exit, self.poll_seconds):
            result = self.follow_log()
        for line in (exits := self.exits()):  # Also of those that have ended just now.
            show_exit(line)
        if result != "finished":  # At the last restart, the first exit code may be another pod's.
            result = at_limit(exits) or result
        if result == "failed":
            self.kubectl("logs", "--prefix", "--tail=40", "--container=job", self.pods())
        return result

    def exits(self) -> list[str]:
        """Returns "POD CODE" for each pod, without a code if it has not ended."""
        every = "{range .items[*]}" + EXIT + "{end}"
        words = ("get", "pods", f"--output=jsonpath={every}", self.pods())
        return self.kubectl(*words, capture_output=True).stdout.splitlines()

    def follow_log(self) -> str:
        """Shows the log of process 0 until the job ends. Returns finished, failed or preempted."""
        last_seen = None
        while True:
            # Fails until the pod runs, and ends with it; the status says more.
            words = ("logs", "--follow", "--tail=200", "--container=job", self.pods(**FIRST_POD))
            self.kubectl(*words, stderr=subprocess.DEVNULL)
            if (jobset := self.query()) is None:
                raise LaunchError(f"{self.name} was deleted")
            if result := outcome(jobset):
                return result
            status = jobset.get("status", {})
            restarts = status.get("restarts", 0)
            restart = f"restart {restarts}: " if restarts else ""
            is_queued = "Suspended" in true_conditions(status)
            reason = (
                "queued by Kueue" if is_queued else "waiting for the pods, which `status` lists"
            )
            if (message := f"{restart}{reason}") != last_seen:
                print_status(message)
            last_seen = message
            time.sleep(self.poll_seconds)

    def pods(self, **labels: str) -> str:
        """Returns kubectl's option that selects the pods, or those with further `labels`."""
        labels = {"jobset.sigs.k8s.io/jobset-name": self.name} | labels
        return "--selector=" + ",".join(f"{name}={value}" for name, value in labels.items())

    def status(self, price_per_chip_hour: float | None = None) -> None:
        """Prints the state of the JobSet, of its pods, and what the job has cost so far.

        The JobSet knows its price; `price_per_chip_hour` takes precedence.
        """
        self.kubectl("get", "jobset", self.name)
        self.kubectl("get", "pods", "--output=wide", self.pods())
        if (jobset := self.query()) is None:
            raise LaunchError(f"{self.name} was deleted")
        metadata = jobset["metadata"]
        known = metadata.get("annotations", {})
        if BUCKET not in known:
            print("cost: unknown, because an earlier version created the job")
            return
        price = float(known[PRICE_PER_HOUR]) if PRICE_PER_HOUR in known else None
        if price_per_chip_hour is not None:
            price = price_per_chip_hour * int(known[NUM_CHIPS])
        address = f"gs://{known[BUCKET]}/{elapsed_path(metadata['uid'])}"
        read = job.run_gcloud("storage", "cat", address, capture_output=True)
        if read.returncode:
            print("cost: not recorded yet; a running job records it once a minute")
            print_status(f"cannot read {address}: {read.stderr.strip()}")
            return
        print(f"ran for {Budget(price, math.inf).describe(float(read.stdout))}")

    def delete(self) -> None:
        """Deletes the JobSet, which ends the job; Autopilot then removes the hosts."""
        if self.kubectl("delete", "jobset", self.name).returncode and self.query() is not None:
            raise LaunchError(f"{self.name} was not deleted and may cost money; `delete` it again")


def archive_address(bucket: str, commit: str) -> str:
    """Returns the address from which the pods unpack the code of a commit."""
    return f"gs://{bucket}/{archive_path(commit)}"


def strip_log_lines(errors: str) -> str:
    """Returns the errors of kubectl without the lines of its log, such as "E1126 17:01:23 ..."."""
    return re.sub(r"^[A-Z]\d{4} .*\n", "", errors, flags=re.MULTILINE).strip()


def true_conditions(status: dict) -> set[str]:
    """Returns the types of the conditions of a JobSet that hold, such as Suspended."""
    conditions = status.get("conditions", [])
    return {each["type"] for each in conditions if each.get("status") == "True"}


def at_limit(exits: list[str]) -> str:
    """Returns "stopped" if one of `GkeJob.exits` says that the job reached its limit, else ""."""
    is_at_limit = any(line.endswith(f" {LIMIT_REACHED}") for line in exits)
    return "stopped" if is_at_limit else ""


def outcome(jobset: dict) -> str:
    """Returns how the job ended, by the status of its JobSet: finished, failed, preempted or ""."""
    status = jobset.get("status", {})
    state = status.get("terminalState", "")
    reasons = {condition.get("reason") for condition in status.get("conditions", [])}
    if state == "Failed" and "ReachedMaxRestarts" in reasons:
        return "preempted"
    return {"Completed": "finished", "Failed": "failed"}.get(state, "")
