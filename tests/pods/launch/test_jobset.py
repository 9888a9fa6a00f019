"""The JobSet is valid, its pods run the job, and JAX finds the hosts of its slices."""

import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile

import pytest
import yaml
from jax._src import clusters
from jax._src.clusters import cloud_tpu_cluster

from bert_jax.pods.launch.budget import LIMIT_REACHED, Budget
from bert_jax.pods.launch.job import LaunchError
from bert_jax.pods.launch.jobset import (
    RESTARTABLE,
    Job,
    check_placement,
    make_environment,
    make_jobset,
    parse_topology,
    pod_command,
)
from bert_jax.runtime.errors import PREEMPTED

COMMIT = "0123abc"
ARGUMENTS = ["--config=configs/tiny.py", "--workdir=/gcs/runs/tiny"]


def settings(topology="v6e:4x4", **changes) -> Job:
    values = {"name": "tiny", "topology": parse_topology(topology), "placement_policy": ""}
    values |= {"capacity": "spot", "reservation": "", "queue": "", "queue_priority": ""}
    values |= {"service_account": "", "grace_seconds": 15, "bucket": "data", "image": "python:3.13"}
    values |= {"program": "pretrain", "budget": Budget(None, math.inf), "max_restarts": 20}
    return Job(**(values | changes))


def pod_spec(topology="v6e:4x4", **changes) -> dict:
    return slices_of(jobset(topology, **changes))["template"]["spec"]["template"]["spec"]


def jobset(topology="v6e:4x4", **changes) -> dict:
    return make_jobset(settings(topology, **changes), COMMIT, ARGUMENTS)


def slices_of(jobset: dict) -> dict:
    (slices,) = jobset["spec"]["replicatedJobs"]
    return slices


@pytest.mark.parametrize(
    ("text", "num_chips", "hosts_per_slice"),
    [
        ("v4:2x2x1", 4, 1),
        ("v4:2x2x4", 16, 4),
        ("v4-32", 16, 4),
        ("v5e-16:2", 32, 4),
        ("v4:12x16x16", 3072, 768),
        ("v5p:4x4x8", 128, 32),
        ("v5p:16x16x24", 6144, 1536),
        ("v5e:2x4", 8, 2),
        ("v6e:16x16:2", 512, 64),
        ("tpu7x:2x2x2:3", 24, 2),
    ],
)
def test_chips_and_hosts_of_a_topology(text, num_chips, hosts_per_slice):
    topology = parse_topology(text)
    assert (topology.num_chips, topology.hosts_per_slice) == (num_chips, hosts_per_slice)


@pytest.mark.parametrize(
    "text",
    [
        "v4",
        "v4:4x4",
        "v4:4x2x2",
        "v4:2x2x8",
        "v4:4x4x6",
        "v4:0x4x4",
        "v4:16x16x16",
        "v5p:16x16x28",
        "v6e:16x32",
        "v5e:4x4x4",
        "v5e:3x3",
        "v6e:4x4:0",
        "v6e:4x4:x",
        "v6e:4x4:2:2",
        "v6e:4x4x",
    ],
)
def test_topology_that_does_not_exist_is_an_error(text):
    with pytest.raises(LaunchError, match=f"--topology: .*topology '{text}'"):
        parse_topology(text)


def test_missing_topology_and_unknown_chip_are_errors():
    with pytest.raises(LaunchError, match="--topology is missing"):
        parse_topology("")
    with pytest.raises(LaunchError, match=r"--topology: unknown topology 'v9:4x4x4'"):
        parse_topology("v9:4x4x4")


@pytest.mark.parametrize("topology", ["v4:2x2x4", "v5e:4x4:2", "v6e:2x2", "tpu7x:4x4x4"])
@pytest.mark.parametrize("capacity", ["", "spot"])
def test_job_is_valid_for_kubernetes(topology, capacity):
    validate = pytest.importorskip("kubernetes_validate")
    changes = {"capacity": capacity, "service_account": "me"}
    spec = slices_of(jobset(topology, **changes))["template"]["spec"]
    manifest = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "tiny"}, "spec": spec}
    validate.validate(manifest, "1.32", strict=True)
    validate.validate(manifest, "1.36", strict=True)
    container = spec["template"]["spec"]["containers"][0]
    with pytest.raises(validate.ValidationError):  # It does look inside.
        container["images"] = container.pop("image")
        validate.validate(manifest, "1.36", strict=True)


def close_objects(schema: dict) -> dict:
    """Returns an OpenAPI schema that refuses unknown fields, as JSON schema."""
    schema = dict(schema)
    if schema.pop("x-kubernetes-int-or-string", False):
        schema["type"] = ["integer", "string"]
    if "properties" in schema:
        schema["additionalProperties"] = False
        schema["properties"] = {k: close_objects(v) for k, v in schema["properties"].items()}
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            schema[name] = close_objects(schema[name])
    return schema


@pytest.mark.parametrize("topology", ["v4:2x2x4", "v5e:4x4:2"])
def test_jobset_is_valid_for_its_published_definition(topology):
    if not (path := os.environ.get("BERT_JAX_JOBSET_CRD")):
        pytest.skip("BERT_JAX_JOBSET_CRD is not set; `make manifest-test` fetches the definition")
    jsonschema = pytest.importorskip("jsonschema")
    definition = yaml.load(pathlib.Path(path).read_text(), yaml.CSafeLoader)
    (version,) = definition["spec"]["versions"]
    assert version["name"] == "v1alpha2"
    schema = close_objects(version["schema"]["openAPIV3Schema"])
    manifest = jobset(topology, queue="team", service_account="me")
    jsonschema.validate(manifest, schema)
    del manifest["spec"]["failurePolicy"]["rules"][0]["name"]
    with pytest.raises(jsonschema.ValidationError, match="'name' is a required property"):
        jsonschema.validate(manifest, schema)


def test_several_slices_get_a_node_pool_each():
    one, two = jobset("v5e:4x4"), jobset("v5e:4x4:2")
    annotation = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    assert annotation not in one["metadata"]["annotations"]
    assert two["metadata"]["annotations"][annotation] == "cloud.google.com/gke-nodepool"
    assert (slices_of(one)["replicas"], slices_of(two)["replicas"]) == (1, 2)
    assert slices_of(two)["template"]["spec"]["completions"] == 4
    assert "--num_processes=8" in pod_command(settings("v5e:4x4:2"), COMMIT, ARGUMENTS)


def test_slices_of_tpu7x_with_several_hosts_need_a_workload_policy():
    for topology in ("tpu7x:2x2x1", "v4:2x2x4"):
        check_placement(settings(topology))
    with pytest.raises(LaunchError, match="need a workload policy: create one"):
        check_placement(settings("tpu7x:2x2x4"))
    check_placement(settings("tpu7x:2x2x4", placement_policy="near"))
    nodes = pod_spec("tpu7x:2x2x4", placement_policy="near")["nodeSelector"]
    assert nodes["cloud.google.com/placement-policy-name"] == "near"


@pytest.mark.parametrize(
    ("changes", "selected"),
    [
        ({"capacity": ""}, {}),
        ({"capacity": "spot"}, {"gke-spot": "true"}),
        ({"capacity": "flex_start"}, {"gke-flex-start": "true"}),
        (
            {"capacity": "", "reservation": "mine"},
            {"reservation-affinity": "specific", "reservation-name": "mine"},
        ),
    ],
)
def test_capacity_selects_nodes_and_tolerates_their_taint(changes, selected):
    pod = pod_spec(**changes)
    names = {"gke-tpu-accelerator": "tpu-v6e-slice", "gke-tpu-topology": "4x4"} | selected
    assert pod["nodeSelector"] == {f"cloud.google.com/{k}": v for k, v in names.items()}
    tolerated = [{"key": f"cloud.google.com/{name}", "operator": "Exists"} for name in selected]
    assert pod["tolerations"] == (tolerated if changes["capacity"] else [])


def test_service_account_and_queue_are_set_if_given():
    assert "serviceAccountName" not in pod_spec() and jobset()["metadata"]["labels"] == {}
    assert pod_spec(service_account="me")["serviceAccountName"] == "me"
    labels = jobset(queue="team")["metadata"]["labels"]
    assert labels == {"kueue.x-k8s.io/queue-name": "team"}


@pytest.mark.parametrize("num_slices", [1, 2])
def test_jax_finds_the_hosts_without_the_metadata_server(num_slices, monkeypatch):
    def ask_metadata(key):
        raise AssertionError(f"asked the metadata server for {key}")

    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", ask_metadata)
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    wait = classmethod(lambda cls, address, timeout: None)
    monkeypatch.setattr(cloud_tpu_cluster.BaseTpuCluster, "wait_for_coordinator", wait)
    found = []
    for index in range(num_slices):
        hosts = [f"tiny-slice-{index}-{host}.tiny" for host in range(4)]
        for host in range(4):
            # What GKE sets in the pods of a slice.
            monkeypatch.setenv("TPU_WORKER_ID", str(host))
            monkeypatch.setenv("TPU_WORKER_HOSTNAMES", ",".join(hosts))
            labels = {"jobset.sigs.k8s.io/job-index": str(index)}
            labels["jobset.sigs.k8s.io/jobset-uid"] = "1234"
            for variable in make_environment(settings(f"v5e:4x4:{num_slices}")):
                value = variable.get("value")
                if value is None:
                    path = variable["valueFrom"]["fieldRef"]["fieldPath"]
                    value = labels[path.removeprefix("metadata.labels['").removesuffix("']")]
                monkeypatch.setenv(variable["name"], value)
            detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
            found.append(detect(None, None, None, None, None, 300)[:3])
    count = 4 * num_slices
    assert found == [("tiny-slice-0-0.tiny:8482", count, index) for index in range(count)]


# A job that prints its identity, then follows its arguments.
FAKE_PYTHON = """
import os, signal, sys, time
if sys.argv[2] == "pip": sys.exit(print("pip", sys.argv[3:]))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("process", os.getpid(), "in", os.listdir("."), sys.argv[1:], flush=True)
does = os.environ["JOB"]
if does == "abort": os.abort()
while does == "wait": time.sleep(0.01)  # `pause` would miss a signal just before it.
if does == "limit":  # Stops by agreement with a pod that has reached it.
    open(os.environ["BUCKET"] + "/gcs/launch/1234.seconds.limit", "w")
    sys.exit(75)
if does == "record":
    spent = os.environ["BUCKET"] + "/gcs/launch/1234.seconds"
    os.remove(spent)
    while not os.path.exists(spent): pass
    sys.exit()
sys.exit(int(does))
"""


def write_program(path: pathlib.Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def pod(tmp_path):
    """Returns the words that start the pod's command in a temporary root, and its environment."""
    (tmp_path / "gcs/launch").mkdir(parents=True)
    (tmp_path / "requirements.lock").touch()
    with tarfile.open(tmp_path / f"gcs/launch/{COMMIT}.tar", "w") as archive:
        archive.add(tmp_path / "requirements.lock", "requirements.lock")
    (tmp_path / "bin").mkdir()
    write_program(tmp_path / "bin/python", f"#!{sys.executable} -S\n{FAKE_PYTHON}")
    write_program(tmp_path / "bin/mountpoint", '#!/bin/sh\ntest -d "$BUCKET"\n')
    # Nobody waits, no limit is reached, and the time is recorded for the job that waits for it.
    sleep = 'case $1 in 20 | 120) ;; 60) test "$JOB" = record ;; *) false ;; esac'
    write_program(tmp_path / "bin/sleep", f"#!/bin/sh\n{sleep}\n")
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOSTNAME": "host0"}
    environment |= {"BUCKET": str(tmp_path), "JOB": "0", "JOBSET_UID": "1234"}
    environment |= {"MEGASCALE_SLICE_ID": "0", "JOB_COMPLETION_INDEX": "0"}
    return words_in(tmp_path), environment, tmp_path


def words_in(root: pathlib.Path, **changes) -> list[str]:
    """Returns the words that start a pod's command, with the bucket in a temporary root."""
    (container,) = pod_spec(**changes)["containers"]
    *words, command = container["command"]
    for before in ("try=", "spent=", "tar -xf "):
        command = command.replace(f"{before}/gcs/", f"{before}{root}/gcs/")
    return [*words, command]


@pytest.mark.parametrize("code", [0, 1, PREEMPTED])
def test_pod_unpacks_installs_and_ends_with_the_exit_code_of_the_job(pod, code):
    words, environment, root = pod
    run = subprocess.run(
        words, cwd=root, env=environment | {"JOB": str(code)}, capture_output=True, text=True
    )
    assert run.returncode == code, run.stderr
    *installs, job = run.stdout.splitlines()
    assert len(installs) == 2 and "--require-hashes" in installs[0] and "[tpu" in installs[1]
    assert "in ['requirements.lock'] ['-m', 'bert_jax.pretrain', '--config=" in job
    assert (code in RESTARTABLE) == (code == PREEMPTED)


def test_sigterm_reaches_python(pod):
    words, environment, root = pod
    started = subprocess.Popen(
        words, cwd=root, env=environment | {"JOB": "wait"}, stdout=subprocess.PIPE, text=True
    )
    line = next(line for line in started.stdout if line.startswith("process"))
    assert int(line.split()[1]) != started.pid  # Which can thus explain an abort.
    started.send_signal(signal.SIGTERM)
    assert started.wait() == PREEMPTED


def test_pod_records_how_long_all_attempts_ran_and_stops_at_the_limit(pod):
    _, environment, root = pod
    words = words_in(root, budget=Budget(None, 7200))
    spent = root / "gcs/launch/1234.seconds"
    spent.write_text("3600\n")
    log = 'echo "$@" >$BUCKET/timeout; shift 3; exec "$@"'
    write_program(root / "bin/timeout", f"#!/bin/sh\n{log}\n")
    run = subprocess.run(words, cwd=root, env=environment | {"JOB": "record"}, capture_output=True)
    assert run.returncode == 0, run.stderr
    assert 3600 <= int(spent.read_text()) < 7200
    options, kill_after, seconds, *job = (root / "timeout").read_text().split()
    assert (options, kill_after) == ("--foreground", "--kill-after=1800")
    assert 0 < int(seconds) <= 3600 and job[:3] == ["python", "-m", "bert_jax.pretrain"]
    # Of another job: the recorder of the first one may still write.
    (root / "gcs/launch/5678.seconds").write_text("7200\n")
    environment |= {"JOBSET_UID": "5678"}
    run = subprocess.run(words, cwd=root, env=environment, capture_output=True)
    assert run.returncode == LIMIT_REACHED and b"process" not in run.stdout
    assert LIMIT_REACHED not in RESTARTABLE


def test_job_that_is_stopped_at_the_limit_ends_with_its_exit_code(pod):
    _, environment, root = pod
    words = words_in(root, budget=Budget(None, 1))
    run = subprocess.run(words, cwd=root, env=environment | {"JOB": "wait"}, capture_output=True)
    assert run.returncode == LIMIT_REACHED


@pytest.mark.parametrize(("job", "code"), [("75", 75), ("limit", LIMIT_REACHED), ("1", 1)])
def test_pod_that_stops_with_one_at_the_limit_does_not_restart_the_job(pod, job, code):
    _, environment, root = pod
    words = words_in(root, budget=Budget(None, 7200))
    run = subprocess.run(words, cwd=root, env=environment | {"JOB": job}, capture_output=True)
    assert run.returncode == code, run.stderr


def test_sigterm_reaches_python_through_the_limit(pod):
    _, environment, root = pod
    started = subprocess.Popen(
        words_in(root, budget=Budget(None, 7200)),
        cwd=root,
        env=environment | {"JOB": "wait"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert any(line.startswith("process") for line in started.stdout)
    started.send_signal(signal.SIGTERM)
    assert started.wait() == PREEMPTED


@pytest.mark.parametrize(
    ("record", "failures", "seconds"),
    [("3600", 2, 3600), ("3600", 3, None), ("", 0, None), ("x", 0, None), (None, 9, 0)],
)
def test_time_of_earlier_attempts_is_read_or_the_job_ends(pod, record, failures, seconds):
    _, environment, root = pod
    spent, counter = root / "gcs/launch/1234.seconds", root / "failures"
    if record is not None:
        spent.write_text(record)
    counter.write_text("fail\n" * failures)
    fail = f"if test -s {counter}; then sed -i 1d {counter}; exit 1; fi"
    write_program(root / "bin/cat", f'#!/bin/sh\n{fail}\nexec {shutil.which("cat")} "$@"\n')
    write_program(root / "bin/timeout", '#!/bin/sh\necho "left $3"\n')
    words = words_in(root, budget=Budget(None, 7200))
    run = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True)
    left = re.findall(r"^left (\d+)$", run.stdout, re.MULTILINE)
    if seconds is None:
        assert run.returncode == 1 and "1234.seconds: expected the seconds" in run.stderr
        assert not left and spent.read_text() == record
    else:
        assert 7200 - seconds - 1000 < int(left[0]) <= 7200 - seconds, run.stderr


@pytest.mark.parametrize("program", ["mv", "tar", "python"])
@pytest.mark.parametrize(("failures", "succeeds"), [(2, True), (3, False)])
def test_short_failure_before_the_job_is_survived(pod, program, failures, succeeds):
    words, environment, root = pod
    path, counter = root / "bin" / program, root / "failures"
    # The last of the tries runs the program itself.
    target = path.rename(f"{path}.real") if path.exists() else shutil.which(program)
    counter.write_text("fail\n" * failures)
    fail = f'if test -s {counter}; then sed -i 1d {counter}; echo "no answer" >&2; exit 1; fi'
    write_program(path, f'#!/bin/sh\n{fail}\nexec {target} "$@"\n')
    run = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True)
    assert (run.returncode == 0) == succeeds == ("process" in run.stdout), run.stderr
    assert run.stderr.count("no answer") == failures
    assert run.returncode not in RESTARTABLE


def test_pod_without_its_code_or_bucket_fails(pod):
    words, environment, root = pod
    (root / f"gcs/launch/{COMMIT}.tar").unlink()
    run = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode not in (0, *RESTARTABLE) and "tar: " in run.stderr
    shutil.rmtree(root / "gcs")
    (root / "gcs").touch()
    run = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode == 1 and "gs://data must be writable and have" in run.stderr
    environment["BUCKET"] = str(root / "nothing")
    run = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode == 1 and "gs://data is not mounted at /gcs" in run.stderr


def test_abort_in_a_container_is_restarted(pod):
    words, environment, root = pod
    unshare = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this system does not let users create a namespace of processes")
    run = subprocess.run(
        [*unshare, *words], cwd=root, env=environment | {"JOB": "abort"}, capture_output=True
    )
    assert b"process " in run.stdout and b"process 1 in" not in run.stdout
    assert run.returncode == 128 + signal.SIGABRT and run.returncode in RESTARTABLE
