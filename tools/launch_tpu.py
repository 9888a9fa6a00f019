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
follow    show the log of worker 0, and the end of any other, until the job ends; Ctrl-C leaves it
status    show the state of the slice, its cost so far, and the state of the job on every host
delete    delete the slice, which stops billing

docs/cloud_tpu.md explains each step. Not yet run on a real cloud: watch the first launch.
"""

import math
import pathlib
import subprocess
import sys

from absl import app, flags

from bert_jax.pods.launch import budget
from bert_jax.pods.launch.cloud_tpu import (
    DELETION_NEEDS_LAUNCH,
    SLICE_KEPT_MESSAGE,
    Slice,
    slice_size,
)
from bert_jax.pods.launch.job import (
    LaunchError,
    check_bucket,
    describe_result,
    interrupt_on_signals,
    parse_launcher_flags,
    print_status,
    read_capacity,
)
from bert_jax.runtime.command_line import describe_error
from bert_jax.runtime.errors import INTERRUPTED, PREEMPTED

ACTIONS = ("launch", "create", "copy", "run", "follow", "status", "delete")

NAME = flags.DEFINE_string("name", None, "Name of the slice.", required=True)
PROJECT = flags.DEFINE_string("project", None, "Google Cloud project.", required=True)
ZONE = flags.DEFINE_string("zone", None, "Zone, such as us-central2-b.", required=True)
TYPE = flags.DEFINE_string(
    "accelerator_type",
    "",
    "Accelerator type, such as v4-32, v6e-16 or, for v5e, v5litepod-16; or by shape, v4:2x2x4.",
)
PROGRAM = flags.DEFINE_enum(
    "program", "pretrain", ["pretrain", "finetune", "sweep"], "Module of bert_jax to run."
)
RUNTIME_VERSION = flags.DEFINE_string(
    "runtime_version", None, "TPU software version; the default depends on --accelerator_type."
)
SPOT = flags.DEFINE_bool("spot", False, "Use spot capacity: cheaper, but may be preempted.")
RESERVED = flags.DEFINE_bool("reserved", False, "Use capacity that the project has reserved.")
FLEX_START = flags.DEFINE_bool(
    "flex_start", False, "Wait for flex-start capacity: not preempted, kept for at most 7 days."
)
NETWORK = flags.DEFINE_string("network", "", "Network of the hosts; the default is `default`.")
SUBNETWORK = flags.DEFINE_string("subnetwork", "", "Subnetwork of the hosts.")
INTERNAL_IPS = flags.DEFINE_bool(
    "internal_ips",
    False,
    "Give the hosts no external addresses; run this program in their network.",
)
SERVICE_ACCOUNT = flags.DEFINE_string(
    "service_account", "", "Email of the hosts' service account; default: the project's."
)
BUCKET = flags.DEFINE_string("bucket", "", "Cloud Storage bucket to mount at /gcs on every host.")
budget.define_flags()
MAX_RESTARTS = flags.DEFINE_integer(
    "max_restarts", 20, "Maximum number of restarts by `launch`.", 0
)
DELETE = flags.DEFINE_bool("delete_when_done", True, "Delete the slice at the end of `launch`.")
POLL_SECONDS = flags.DEFINE_float(
    "poll_seconds", 30, "Seconds between polls of the slice's state.", 0
)


def read_slice() -> Slice:
    """Returns the slice and the job that the flags describe. Raises LaunchError."""
    _, num_chips, _ = slice_size(TYPE.value)  # Raises for a missing or unknown type.
    limits = budget.read_budget(num_chips)
    if limits.limit_seconds < math.inf and not DELETE.value:
        raise LaunchError("--nodelete_when_done contradicts --max_hours and --max_price")
    return Slice(
        root=pathlib.Path(__file__).resolve().parents[1],
        name=NAME.value,
        project=PROJECT.value,
        zone=ZONE.value,
        accelerator_type=TYPE.value,
        runtime_version=RUNTIME_VERSION.value or "",
        capacity=read_capacity(
            spot=SPOT.value, reserved=RESERVED.value, flex_start=FLEX_START.value
        ),
        network=NETWORK.value,
        subnetwork=SUBNETWORK.value,
        internal_ips=INTERNAL_IPS.value,
        service_account=SERVICE_ACCOUNT.value,
        bucket=BUCKET.value,
        program=PROGRAM.value,
        budget=limits,
        max_restarts=MAX_RESTARTS.value,
        delete_when_done=DELETE.value,
        poll_seconds=POLL_SECONDS.value,
    )


def main(argv: list[str]) -> None:
    action, arguments = "".join(argv[1:2]), argv[2:]
    interrupt_on_signals()
    try:
        if action not in ACTIONS:
            raise LaunchError(f"expected one of {', '.join(ACTIONS)}, got {action or 'nothing'}")
        if bool(arguments) != (action in ("launch", "run")):
            raise LaunchError("`launch` and `run` need the arguments of the job after `--`")
        tpu = read_slice()
        if action == "run" and tpu.budget.limit_seconds < math.inf:
            raise LaunchError(f"`run` takes no --max_hours or --max_price: {DELETION_NEEDS_LAUNCH}")
        if action in ("launch", "copy"):
            check_bucket(BUCKET.value)
        if arguments:
            tpu.check_job(*arguments)
        state = tpu.slice_state(tries=1)  # Fails now if a flag is wrong or nobody is logged in.
        if state == "NOT_FOUND" and action not in ("launch", "create"):
            raise LaunchError(f"there is no slice {NAME.value}")
        result = getattr(tpu, action)(*arguments)
    except (LaunchError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"launch_tpu: {describe_error(error)}")
    except KeyboardInterrupt:
        print_status(f"interrupted. {SLICE_KEPT_MESSAGE}")
        sys.exit(INTERRUPTED)
    if isinstance(result, str):
        print_status(f"the job on {NAME.value} {describe_result(result)}")
        codes = {"finished": 0, "preempted": PREEMPTED, "stopped": budget.LIMIT_REACHED}
        sys.exit(codes.get(result, 1))


if __name__ == "__main__":
    flags.FLAGS.set_gnu_getopt()  # Flags may follow the action.
    app.run(main, flags_parser=parse_launcher_flags)
