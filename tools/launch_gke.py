r"""Runs a job on TPU slices of a GKE cluster, which restarts it after each preemption.

python tools/launch_gke.py launch --name=base --topology=v6e:4x4 --spot --bucket=BUCKET -- \
    --config=configs/pretrain/pod_base.py:v6e --workdir=/gcs/runs/base \
    --config.corpus=/gcs/corpus/128 --config.long_phase.corpus=/gcs/corpus/512

Everything after `--` is passed to `python -m bert_jax.pretrain`, or to another --program. The
cluster is kubectl's current one. v6e:4x4:2 means two slices. The actions:

launch    copy the last commit to --bucket, create the job (a JobSet), and follow it; with --print,
          only print the JobSet, and the commands that copy the commit and create the job
follow    show the log of process 0, and the end of any other, until the job ends; Ctrl-C leaves it
status    show the state of the job and of its pods, and its cost so far
delete    delete the job, which ends it

docs/cloud_tpu.md explains each step. Not yet run on a real cloud: watch the first launch.
"""

import json
import pathlib
import shlex
import subprocess
import sys

from absl import app, flags

from bert_jax.pods.chips import CHIPS
from bert_jax.pods.launch import budget
from bert_jax.pods.launch.gke import JOB_KEPT_MESSAGE, GkeJob, archive_address
from bert_jax.pods.launch.job import (
    LaunchError,
    check_bucket,
    check_job,
    describe_result,
    interrupt_on_signals,
    last_commit,
    parse_launcher_flags,
    print_status,
    read_capacity,
)
from bert_jax.pods.launch.jobset import Job, check_placement, make_jobset, parse_topology
from bert_jax.runtime.command_line import describe_error
from bert_jax.runtime.errors import INTERRUPTED, PREEMPTED

ROOT = pathlib.Path(__file__).resolve().parents[1]
ACTIONS = ("launch", "follow", "status", "delete")

NAME = flags.DEFINE_string("name", None, "Name of the job.", required=True)
TOPOLOGY = flags.DEFINE_string(
    "topology", None, "Slices, such as v6e:4x4 or v6e-16, and v6e:4x4:2 or v6e-16:2 for two."
)
CONTEXT = flags.DEFINE_string("context", "", "Context of kubectl; default: the current one.")
PROGRAM = flags.DEFINE_enum(
    "program", "pretrain", ["pretrain", "finetune", "sweep"], "Module of bert_jax to run."
)
POLICY = flags.DEFINE_string(
    "placement_policy", "", "Workload policy, which slices of tpu7x with several hosts need."
)
SPOT = flags.DEFINE_bool("spot", False, "Use spot capacity: cheaper, but may be preempted.")
FLEX_START = flags.DEFINE_bool(
    "flex_start", False, "Wait for flex-start capacity: not preempted, kept for at most 7 days."
)
RESERVATION = flags.DEFINE_string("reservation", "", "Use the capacity of this reservation.")
QUEUE = flags.DEFINE_string("queue", "", "Local queue of Kueue, which then starts the job.")
QUEUE_PRIORITY = flags.DEFINE_string("queue_priority", "", "Kueue's priority class of the job.")
SERVICE_ACCOUNT = flags.DEFINE_string(
    "service_account", "", "Kubernetes service account of the pods; default: the namespace's."
)
GRACE_SECONDS = flags.DEFINE_integer(
    "grace_seconds", None, "Seconds between SIGTERM and SIGKILL; default: 15 with --spot, else 300."
)
BUCKET = flags.DEFINE_string("bucket", "", "Cloud Storage bucket to mount at /gcs in every pod.")
IMAGE = flags.DEFINE_string("image", "python:3.13", "Container image with Python 3.11 or newer.")
budget.define_flags()
MAX_RESTARTS = flags.DEFINE_integer("max_restarts", 20, "Maximum number of restarts.", 0)
POLL_SECONDS = flags.DEFINE_float("poll_seconds", 30, "Seconds between polls of the job.", 0)
PRINT = flags.DEFINE_bool(
    "print", False, "Print the JobSet of `launch` and the commands to run it; call no cloud."
)


def read_settings() -> Job:
    """Returns the job that the flags describe. Raises LaunchError."""
    check_bucket(BUCKET.value)
    capacity = read_capacity(
        spot=SPOT.value, flex_start=FLEX_START.value, reservation=bool(RESERVATION.value)
    )
    if QUEUE_PRIORITY.value and not QUEUE.value:
        raise LaunchError("--queue_priority needs --queue, the local queue of Kueue")
    grace_seconds = GRACE_SECONDS.value
    topology = parse_topology(TOPOLOGY.value or "")
    return Job(
        name=NAME.value,
        topology=topology,
        placement_policy=POLICY.value,
        capacity="" if RESERVATION.value else capacity,
        reservation=RESERVATION.value,
        queue=QUEUE.value,
        queue_priority=QUEUE_PRIORITY.value,
        service_account=SERVICE_ACCOUNT.value,
        grace_seconds=(15 if SPOT.value else 300) if grace_seconds is None else grace_seconds,
        bucket=BUCKET.value,
        image=IMAGE.value,
        program=PROGRAM.value,
        budget=budget.read_budget(topology.num_chips),
        max_restarts=MAX_RESTARTS.value,
    )


def run(action: str, arguments: list[str]) -> str | None:
    """Performs the action; returns the result of `launch` or `follow`. Raises LaunchError."""
    if action not in ACTIONS:
        raise LaunchError(f"expected one of {', '.join(ACTIONS)}, got {action or 'nothing'}")
    if bool(arguments) != (action == "launch"):
        raise LaunchError("`launch`, and only it, needs the arguments of the job after `--`")
    gke_job = GkeJob(NAME.value, CONTEXT.value, POLL_SECONDS.value)
    if action == "launch":
        settings = read_settings()
        check_placement(settings)
        topology = settings.topology
        num_devices = topology.num_chips * CHIPS[topology.chip].devices_per_chip
        check_job(
            ROOT,
            num_slices=topology.num_slices,
            num_devices=num_devices,
            job=[PROGRAM.value, *arguments],
        )
        if PRINT.value:
            commit = last_commit(ROOT)
            print(json.dumps(make_jobset(settings, commit, arguments), indent=2))
            print_status(f"nothing was copied or created. {commands_by_hand(settings, commit)}")
            return None
    exists = gke_job.check_cluster()
    if action == "launch":
        return gke_job.launch(ROOT, settings, arguments)
    if not exists:
        raise LaunchError(f"there is no job {NAME.value}")
    if action == "status":
        return gke_job.status(flags.FLAGS.price_per_chip_hour)
    return getattr(gke_job, action)()


def commands_by_hand(settings: Job, commit: str) -> str:
    """Returns the commands that copy a commit for the pods and create the printed JobSet."""
    archive = f"launch-{commit[:12]}.tar"
    context = f" --context={shlex.quote(CONTEXT.value)}" if CONTEXT.value else ""
    return f"""Its pods need the commit in the bucket. With the JobSet saved as jobset.json, run:

git -C {shlex.quote(str(ROOT))} archive --output=/tmp/{archive} {commit}
gcloud storage cp /tmp/{archive} {archive_address(settings.bucket, commit)}
kubectl apply --filename=jobset.json{context}"""


def main(argv: list[str]) -> None:
    interrupt_on_signals()
    try:
        result = run("".join(argv[1:2]), argv[2:])
    except (LaunchError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"launch_gke: {describe_error(error)}")
    except KeyboardInterrupt:
        print_status(f"interrupted. {JOB_KEPT_MESSAGE}")
        sys.exit(INTERRUPTED)
    if result:
        print_status(f"the job {NAME.value} {describe_result(result)}")
        codes = {"finished": 0, "preempted": PREEMPTED, "stopped": budget.LIMIT_REACHED}
        sys.exit(codes.get(result, 1))


if __name__ == "__main__":
    flags.FLAGS.set_gnu_getopt()  # Flags may follow the action.
    app.run(main, flags_parser=parse_launcher_flags)
