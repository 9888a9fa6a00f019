"""Describes a job on TPU slices of a GKE cluster as a JobSet (jobset.sigs.k8s.io).

A JobSet has one Kubernetes Job per slice, with one pod per host. The cluster restarts all of them
when one is preempted.
"""

import dataclasses
import math
import re
import shlex

from bert_jax.pods import chips
from bert_jax.pods.launch import job
from bert_jax.pods.launch.budget import LIMIT_REACHED, SAVE_SECONDS, Budget
from bert_jax.pods.launch.job import LaunchError
from bert_jax.runtime.errors import PREEMPTED

# By chip, from cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus.
ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
TOPOLOGY_FORM = (
    "CHIP:SHAPE or CHIP-N, such as v6e:4x4 or v6e-16, and :SLICES for several, "
    f"CHIP one of {', '.join(ACCELERATORS)}"
)
CHIPS_PER_HOST = 4  # Of the machine types that slices of several hosts have.
# The exit codes that mean "run it again". JAX aborts a process that has lost another one: 134. A
# pod that does not end in time gets SIGKILL, 137; SIGTERM before Python handles it is 143.
RESTARTABLE = (PREEMPTED, 134, 137, 143)
# Names of annotations of the JobSet.
BUCKET, NUM_CHIPS, PRICE_PER_HOUR = "bert-jax/bucket", "bert-jax/chips", "bert-jax/price-per-hour"
INITIALIZATION_TIMEOUT = 4 * 3600  # Seconds: another slice may get its capacity later.
JOBSET = "jobset.sigs.k8s.io"  # Prefix of the labels that its controller gives to pods.
# Without a metadata cache, a host sees the files of the others at once.
MOUNT_OPTIONS = "implicit-dirs,metadata-cache:ttl-secs:0,metadata-cache:negative-ttl-secs:0"


@dataclasses.dataclass(frozen=True)
class Topology:
    """Slices of one kind of chip, all of the same shape."""

    chip: str
    shape: str  # Chips of a slice, such as 2x2x4.
    num_slices: int

    @property
    def num_chips(self) -> int:
        return math.prod(map(int, self.shape.split("x"))) * self.num_slices

    @property
    def hosts_per_slice(self) -> int:
        return self.num_chips // self.num_slices // CHIPS_PER_HOST


@dataclasses.dataclass(frozen=True)
class Job:
    """A job on TPU slices.

    Attributes:
      name: of the JobSet.
      topology: the slices.
      placement_policy: workload policy of the slices, which tpu7x slices with several hosts
        need; "": none.
      capacity: "spot", "flex_start", or "": on demand, or of a `reservation`.
      reservation: whose capacity to use; "": none.
      queue, queue_priority: Kueue's local queue and workload priority class; "": none.
      service_account: of Kubernetes, which accesses the bucket; "": the namespace's default.
      grace_seconds: between SIGTERM and SIGKILL.
      bucket: mounted at /gcs in every pod.
      image: container image with Python 3.11 or newer.
      program: module of bert_jax to run.
      budget: what it may cost.
      max_restarts: maximum number of restarts by the cluster.
    """

    name: str
    topology: Topology
    placement_policy: str
    capacity: str
    reservation: str
    queue: str
    queue_priority: str
    service_account: str
    grace_seconds: int
    bucket: str
    image: str
    program: str
    budget: Budget
    max_restarts: int


def parse_topology(text: str) -> Topology:
    """Parses "v5e:4x4", "v5e-16" or, for two slices, "v5e:4x4:2" or "v5e-16:2".

    Raises LaunchError if GKE has no such slice.
    """
    if not text:
        raise LaunchError(f"--topology is missing: expected {TOPOLOGY_FORM}")
    job.check_served(re.match(r"\w*", text)[0], "launch_gke")
    try:
        chip, shape, num_slices = chips.parse_topology(text)
    except ValueError as error:
        raise LaunchError(f"--topology: {error}") from None
    if math.prod(shape) < CHIPS_PER_HOST:
        machines = f"this launcher uses machines with {CHIPS_PER_HOST} chips"
        raise LaunchError(f"--topology={text}: {machines}; the smallest slice is {chip}:2x2")
    topology = Topology(chip, chips.format_shape(shape), num_slices)
    if topology.num_slices > 1 and topology.hosts_per_slice == 1:
        raise LaunchError(f"--topology={text}: GKE connects only slices of several hosts")
    return topology


def check_placement(settings: Job) -> None:
    """Raises LaunchError if GKE could not place the slices without a workload policy."""
    topology = settings.topology
    if topology.chip == "tpu7x" and topology.hosts_per_slice > 1 and not settings.placement_policy:
        raise LaunchError(
            f"slices of tpu7x:{topology.shape} need a workload policy: create one with `gcloud "
            "compute resource-policies create workload-policy NAME --type=HIGH_THROUGHPUT "
            f"--accelerator-topology={topology.shape} --region=REGION`, and set "
            "--placement_policy=NAME"
        )


def make_jobset(settings: Job, commit: str, arguments: list[str]) -> dict:
    """Returns the JobSet, as JSON values, that runs a job of the `commit` with these arguments."""
    topology = settings.topology
    # What `status` needs to know.
    annotations = {BUCKET: settings.bucket, NUM_CHIPS: str(topology.num_chips)}
    if settings.budget.price_per_hour is not None:
        annotations[PRICE_PER_HOUR] = str(settings.budget.price_per_hour)
    if topology.num_slices > 1:  # Each Job on a node pool, which is a slice, of its own.
        name = "alpha.jobset.sigs.k8s.io/exclusive-topology"
        annotations[name] = "cloud.google.com/gke-nodepool"
    # Any other failure of a pod restarts all slices, because each needs the others.
    exit_codes = {"containerName": "job", "operator": "NotIn", "values": [*RESTARTABLE]}
    rule = {"name": "failed", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    slice_job = {
        "parallelism": topology.hosts_per_slice,
        "completions": topology.hosts_per_slice,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": exit_codes}]},
        "template": make_pod(settings, pod_command(settings, commit, arguments)),
    }
    slices = {"name": "slice", "replicas": topology.num_slices, "template": {"spec": slice_job}}
    kueue = {"queue-name": settings.queue, "priority-class": settings.queue_priority}
    labels = {f"kueue.x-k8s.io/{name}": value for name, value in kueue.items() if value}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": settings.name, "labels": labels, "annotations": annotations},
        "spec": {
            "failurePolicy": {"maxRestarts": settings.max_restarts, "rules": [rule]},
            "replicatedJobs": [slices],
        },
    }


def make_pod(settings: Job, command: str) -> dict:
    """Returns the template of the pods, each of which runs the shell `command` on its host."""
    node = {
        "cloud.google.com/gke-tpu-accelerator": ACCELERATORS[settings.topology.chip],
        "cloud.google.com/gke-tpu-topology": settings.topology.shape,
    }
    if settings.placement_policy:
        node["cloud.google.com/placement-policy-name"] = settings.placement_policy
    if settings.reservation:
        node["cloud.google.com/reservation-affinity"] = "specific"
        node["cloud.google.com/reservation-name"] = settings.reservation
    tolerations = []
    if settings.capacity:
        label = f"cloud.google.com/gke-{settings.capacity.replace('_', '-')}"
        node[label] = "true"
        tolerations = [{"key": label, "operator": "Exists"}]
    account = {"serviceAccountName": settings.service_account} if settings.service_account else {}
    container = {
        "name": "job",
        "image": settings.image,
        "workingDir": "/root",
        "command": ["bash", "-c", command],
        "env": make_environment(settings),
        # Of the TPU runtime, of JAX's coordinator, and of the exchange between slices.
        "ports": [{"containerPort": port} for port in (8471, 8482, 8080)],
        # Autopilot would evict a pod that installs more than its default of 1 GiB.
        "resources": {
            "limits": {"google.com/tpu": str(CHIPS_PER_HOST), "ephemeral-storage": "10Gi"}
        },
        "volumeMounts": [{"name": "bucket", "mountPath": "/gcs"}],
    }
    attributes = {"bucketName": settings.bucket, "mountOptions": MOUNT_OPTIONS}
    bucket = {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}
    return {
        "metadata": {"annotations": {"gke-gcsfuse/volumes": "true"}},
        "spec": {
            **account,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": settings.grace_seconds,
            "nodeSelector": node,
            "tolerations": tolerations,
            "containers": [container],
            "volumes": [{"name": "bucket", "csi": bucket}],
        },
    }


def make_environment(settings: Job) -> list[dict]:
    """Returns the variables by which JAX finds the slices; GKE sets the hosts of one.

    JAX would ask the metadata server for a variable that is missing. An empty address stands for
    the first host of the only slice.
    """
    labels = {
        name: {"valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{JOBSET}/{name}']"}}}
        for name in ("job-index", "jobset-uid")
    }
    index, first_host = labels["job-index"], ""
    if settings.topology.num_slices == 1:
        index = {"value": "0"}
    else:
        first_host = f"{settings.name}-slice-0-0.{settings.name}"  # In the JobSet's own domain.
    return [
        {"name": "MEGASCALE_SLICE_ID"} | index,
        {"name": "MEGASCALE_NUM_SLICES", "value": str(settings.topology.num_slices)},
        {"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": first_host},
        {"name": "JOBSET_UID"} | labels["jobset-uid"],
        {"name": "PYTHONUNBUFFERED", "value": "1"},
    ]


def pod_command(settings: Job, commit: str, arguments: list[str]) -> str:
    """Returns the shell command of a pod: unpack the commit, install it, and run the job.

    The shell stays process 1 of its container, and passes SIGTERM on to Python: so the job can
    explain an abort by JAX (`watchdog.explain_abort`). Each step before it is tried three times, so
    that a short failure of the network on one host does not end the job. A bucket that cannot be
    written, or that does not rename directories, as saving does, ends it. The first pod records in
    the bucket, every minute, how long the job has run in all its attempts. At the limit of the
    budget, all pods stop Python; their exit code lets the JobSet fail. The first of them marks the
    limit in the bucket, because the others may stop by agreement with it before their own clocks
    are there, with an exit code that would restart the JobSet.
    """
    num_hosts = settings.topology.hosts_per_slice * settings.topology.num_slices
    if num_hosts > 1:
        timeout = f"--initialization_timeout={INITIALIZATION_TIMEOUT}"
        arguments = [*arguments, "--multihost", f"--num_processes={num_hosts}", timeout]
    run, limit = shlex.join(["python", "-m", f"bert_jax.{settings.program}", *arguments]), ""
    if (limit_seconds := settings.budget.limit_seconds) < math.inf:
        run = f"timeout --foreground --kill-after={SAVE_SECONDS} $seconds {run}"
        limit = f"""seconds=$(({math.ceil(limit_seconds)} - earlier - SECONDS))
if test $seconds -le 0; then
  echo "the job has reached the limit of its budget" >&2
  exit {LIMIT_REACHED}
fi
{{ sleep $seconds && touch $spent.limit; }} >/dev/null 2>&1 &
"""
    run = f"""{limit}{run} &
job=$! code=0 signals=
trap 'signals=1; kill -TERM $job || true' TERM
wait $job || code=$?
while test $signals; do signals= code=0; wait $job || code=$?; done # A signal ends `wait`.
case $code in
  {"|".join(map(str, RESTARTABLE))}) if test -e $spent.limit; then code={LIMIT_REACHED}; fi ;;
esac
exit $code"""
    return f"""set -e
retry() {{ "$@" || {{ sleep 20; "$@"; }} || {{ sleep 120; "$@"; }}; }}
if ! mountpoint --quiet /gcs; then
  echo "gs://{settings.bucket} is not mounted at /gcs: does the cluster have GcsFuseCsiDriver?" >&2
  exit 1
fi
try=/gcs/.try.$HOSTNAME
try_bucket() {{ mkdir -p $try/a && touch $try/a/file && mv $try/a $try/b && rm -r $try; }}
if ! retry try_bucket; then
  echo "gs://{settings.bucket} must be writable and have a hierarchical namespace" >&2
  exit 1
fi
spent=/gcs/{elapsed_path("$JOBSET_UID")}
read_earlier() {{
  names=$(ls ${{spent%/*}}) || return
  earlier=0
  if grep --quiet --line-regexp "${{spent##*/}}" <<<"$names"; then earlier=$(cat $spent); fi
}}
if ! retry read_earlier || [[ ! $earlier =~ ^[0-9]+$ ]]; then
  echo "$spent: expected the seconds that earlier attempts ran" >&2
  exit 1
fi
write() {{ echo $((earlier + SECONDS)) >$spent.new && mv $spent.new $spent; }}
record() {{ while sleep 60 && kill -0 $$; do write || true; done; }}
if test $MEGASCALE_SLICE_ID.$JOB_COMPLETION_INDEX = 0.0; then
  record >/dev/null 2>&1 &
fi
mkdir -p code
retry tar -xf /gcs/{archive_path(commit)} -C code
cd code
retry python -m pip install --quiet --require-hashes --requirement=requirements.lock
retry python -m pip install --quiet --editable='.[tpu,optuna]'
{run}
"""


def archive_path(commit: str) -> str:
    """Returns where the bucket holds the code of a commit."""
    return f"launch/{commit}.tar"


def elapsed_path(uid: str) -> str:
    """Returns where the bucket holds for how many seconds the JobSet of this uid has run."""
    return f"launch/{uid}.seconds"
