"""The GKE launcher as a user runs it, with a fake kubectl that acts as the cluster's controllers.

Its pods run their real shell command, each in a directory of its own.
"""

import ast
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest

from bert_jax.pods.launch.budget import LIMIT_REACHED
from bert_jax.pods.launch.gke import GkeJob
from bert_jax.pods.launch.job import LaunchError, run_gcloud
from bert_jax.runtime.errors import INTERRUPTED, PREEMPTED
from tests.helpers import commands

# Logs its arguments and follows the plan: `attempts` has, for each start of the JobSet, the exit
# codes of its pods (in a tuple, the controller sees the first alone), or "wait" or "unreachable"
# after their start, or "deleted"; "queued" before it. It applies the failure policies of the
# JobSet. `errors` counts the coming failures of commands that contain a word; `answer` is the error
# of all. After a command in `lost` was performed, the connection is lost, for a number of queries.
# `gcloud` is the error of that program.
FAKE_KUBECTL = """
import json, os, signal, subprocess, sys, time
cloud, words = os.environ["FAKE_CLOUD"], sys.argv[1:]
with open(f"{cloud}/calls", "a") as calls: print(words, file=calls)
if words[1] == "pods" and any("exitCode" in word for word in words):
    exits = open(f"{cloud}/exits", "a+")
    exits.seek(0)
    while text := exits.read() or "--watch" in words and os.getppid() > 1:
        if text is not True: print(text, end="", flush=True)
        time.sleep(0.01)
    sys.exit()
with open(f"{cloud}/plan") as file: plan = eval(file.read())
def save():
    with open(f"{cloud}/plan", "w") as file: print(plan, file=file)
if plan.get("answer"): sys.exit(f'E1126 17:01:23.0 memcache.go: refused\\n{plan["answer"]}')
for word, count in plan["errors"].items():
    if count and any(word in other for other in words):
        plan["errors"][word] -= 1
        save()
        sys.exit("Unable to connect to the server: dial tcp: i/o timeout")
jobset = plan["jobset"]
if words[0] == "apply":
    plan |= {"jobset": json.load(sys.stdin), "status": {"restarts": 0}}
    plan["jobset"]["metadata"]["uid"] = "1234"
elif words[1] == "pods" or (words[0] == "logs" and not jobset):
    print("NAME-OF-POD  Running")
elif not jobset:
    sys.exit(f'Error from server (NotFound): jobsets.jobset.x-k8s.io "{words[2]}" not found')
elif words[0] == "get":
    print(json.dumps(jobset | {"status": plan["status"]}))
elif words[0] == "delete":
    plan["jobset"] = None
elif "--follow" not in words:
    for host in sorted(os.listdir(f"{cloud}/hosts")):
        print(f"[pod/{host}]", open(f"{cloud}/hosts/{host}/log").read(), end="")
elif plan["attempts"] and "terminalState" not in plan["status"]:
    plan["status"]["conditions"] = [{"type": "Suspended", "status": "True"}]
    if plan["attempts"][0] == "queued":
        del plan["attempts"][0]
        save()
        sys.exit("no pods")
    del plan["status"]["conditions"]
    slices = jobset["spec"]["replicatedJobs"][0]
    job, policy = slices["template"]["spec"], jobset["spec"]["failurePolicy"]
    container = job["template"]["spec"]["containers"][0]
    attempt, num_hosts = plan["attempts"].pop(0), job["completions"] * slices["replicas"]
    does = attempt if isinstance(attempt, (list, tuple)) else [attempt] * num_hosts
    logs, codes = [], []
    for index, each in enumerate(does):
        home = f"{cloud}/hosts/{index}"
        os.makedirs(home, exist_ok=True)
        environment = os.environ | {"HOSTNAME": f"host{index}", "JOB": str(each), "HOME": home}
        environment["PATH"] = f"{cloud}/pod_bin:{os.environ['PATH']}"
        environment |= {"MEGASCALE_SLICE_ID": "0", "JOB_COMPLETION_INDEX": str(index)}
        environment["JOBSET_UID"] = jobset["metadata"]["uid"]
        command = [word.replace("/gcs/", f"{cloud}/bucket/", 2) for word in container["command"]]
        command = [word.replace("tar -xf /gcs/", f"tar -xf {cloud}/bucket/") for word in command]
        with open(f"{home}/log", "w") as log:
            streams = {"stdout": log, "stderr": log}
            codes.append(subprocess.run(command, cwd=home, env=environment, **streams).returncode)
        with open(f"{cloud}/exits", "a") as file:
            print(f"tiny-slice-0-{index}-{len(plan['attempts'])}", codes[-1], file=file)
    log = open(f"{cloud}/hosts/0/log").read()
    if attempt in ("deleted", "unreachable", "wait"):
        if attempt == "deleted": plan["jobset"] = None
        if attempt == "unreachable": plan["errors"] = {"jobset": 20}
        save()
        print(log, end="", flush=True)
        while attempt == "wait": time.sleep(0.01)  # `pause` would miss a signal before it.
        sys.exit("error: unexpected EOF")
    print(log, end="")
    if isinstance(attempt, tuple): del codes[1:]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "NotIn")
    failed, status = [code for code in codes if code], plan["status"]
    is_fatal = any(code not in rule["onExitCodes"]["values"] for code in failed)
    reason = "PodFailurePolicy" if is_fatal else "BackoffLimitExceeded"
    (rule,) = policy["rules"]
    if not failed: status["terminalState"] = "Completed"
    elif reason in rule["onJobFailureReasons"] and rule["action"] == "FailJobSet":
        status |= {"terminalState": "Failed", "conditions": [{"reason": rule["action"]}]}
    elif status["restarts"] == policy["maxRestarts"]:
        status |= {"terminalState": "Failed", "conditions": [{"reason": "ReachedMaxRestarts"}]}
    else: status["restarts"] += 1
if words[0] in plan["lost"]:
    plan["errors"]["--output=json"] = plan["lost"].pop(words[0])
    save()
    sys.exit("Unable to connect to the server: unexpected EOF")
save()
"""
FAKE_GCLOUD = """
import os, shutil, sys
cloud = os.environ["FAKE_CLOUD"]
with open(f"{cloud}/calls", "a") as calls: print(sys.argv[1:], file=calls)
with open(f"{cloud}/plan") as file: plan = eval(file.read())
if plan["gcloud"]: sys.exit(plan["gcloud"])
path = sys.argv[-1].replace("gs://data/", f"{cloud}/bucket/")
if sys.argv[2] == "cat": sys.exit(print(open(path).read()))
os.makedirs(os.path.dirname(path), exist_ok=True)
shutil.copy(sys.argv[3], path)
"""
FAKE_PYTHON = """
import os, sys
home, does = os.environ["HOME"], os.environ["JOB"]
with open(f"{home}/python", "a") as file: print(sys.argv[1:], file=file)
if sys.argv[2] == "pip": sys.exit()
print("the job of", os.environ["HOSTNAME"], "began", flush=True)
sys.exit(int(does) if does.isdecimal() else 0)
"""
AWKWARD = """--config.note=it's a "quote", $HOME `id` \\ and  two  spaces; a * too"""
JOB = ["--config=configs/tiny.py:arg", "--workdir=/gcs/runs/tiny", AWKWARD]
PYTHON = f"{sys.executable} -S"


def arguments_of(action, *words, job=JOB, **flags):
    """Returns the launcher's arguments after `action`; a flag that is None is left out."""
    flags = {"name": "tiny", "poll_seconds": 0} | flags
    if action == "launch":
        flags = {"topology": "v4:2x2x2", "bucket": "data"} | flags
    given = (f"--{name}={value}" for name, value in flags.items() if value is not None)
    return [*words, *given, *(["--", *job] if action == "launch" and job else [])]


def pod_of(jobset):
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


class Cloud:
    """A repository with one commit, and the fake programs of a cloud."""

    def __init__(self, path: pathlib.Path):
        self.path, self.checkout = path, path / "checkout"
        (self.checkout / "tools").mkdir(parents=True)
        shutil.copy(commands.ROOT / "tools/launch_gke.py", self.checkout / "tools")
        (self.checkout / "tools/launch_check.py").write_text("")
        for words in (
            ["init", "--quiet"],
            ["add", "."],
            ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message=all"],
        ):
            subprocess.run(["git", *words], cwd=self.checkout, check=True)
        for name, text in (("bin/kubectl", FAKE_KUBECTL), ("bin/gcloud", FAKE_GCLOUD)):
            self.program(name, text)
        self.program("pod_bin/python", FAKE_PYTHON)
        # The bucket is mounted, nobody waits, records the time, or reaches a limit.
        self.program("pod_bin/mountpoint", "")
        self.program("pod_bin/sleep", "import sys; sys.exit(sys.argv[1] not in ('20', '120'))")
        self.plan()
        self.environment = os.environ | {
            "FAKE_CLOUD": str(path),
            "XDG_CACHE_HOME": f"{path}/cache",
            "PATH": f"{path}/bin:{os.environ['PATH']}",
        }

    def program(self, name, text):
        file = self.path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!{PYTHON}\n{text}\n")
        file.chmod(0o755)

    def plan(self, *attempts, answer="", gcloud="", lost=None, jobset=None, **errors):
        plan = {"attempts": [*attempts], "errors": errors, "answer": answer, "jobset": jobset}
        plan |= {"gcloud": gcloud, "lost": lost or {}, "status": {}}
        (self.path / "plan").write_text(repr(plan))

    def read_plan(self):
        return ast.literal_eval((self.path / "plan").read_text())

    def start(self, action, *words, **flags):
        arguments = arguments_of(action, *words, **flags)
        return subprocess.Popen(
            [sys.executable, self.checkout / "tools" / "launch_gke.py", action, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            start_new_session=True,
        )

    def run(self, action, *words, **flags):
        process = self.start(action, *words, **flags)
        output, errors = process.communicate()
        return subprocess.CompletedProcess([], process.returncode, output, errors)

    def calls(self):
        file = self.path / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [ast.literal_eval(line) for line in lines]

    def steps(self):
        """Returns the first word of each call, except of queries; storage is the copy."""
        return [call[0] for call in self.calls() if call[0] != "get"]

    def python_arguments(self, host):
        lines = (self.path / "hosts" / str(host) / "python").read_text().splitlines()
        return [ast.literal_eval(line) for line in lines]


@pytest.fixture
def cloud(tmp_path):
    return Cloud(tmp_path)


def test_launch_copies_the_commit_creates_the_jobset_and_follows_it(cloud):
    cloud.plan("queued", 0)
    queue = {"queue": "team", "queue_priority": "low"}
    result = cloud.run("launch", "--spot", context="here", topology="v4-16", **queue)
    assert result.returncode == 0, result.stderr
    labels = {"kueue.x-k8s.io/queue-name": "team", "kueue.x-k8s.io/priority-class": "low"}
    assert cloud.read_plan()["jobset"]["metadata"]["labels"] == labels
    assert result.stderr.count("queued by Kueue\n") == 1
    assert cloud.steps() == ["storage", "apply", "logs", "logs"]
    assert all("--context=here" in call for call in cloud.calls() if call[0] != "storage")
    assert "the job of host0 began" in result.stdout
    assert result.stderr.endswith("the job tiny finished\n")
    for host in range(2):
        *installs, run = cloud.python_arguments(host)
        assert [words[:3] for words in installs] == [["-m", "pip", "install"]] * 2
        multihost = ["--multihost", "--num_processes=2", "--initialization_timeout=14400"]
        assert run == ["-m", "bert_jax.pretrain", *JOB, *multihost]
        home = cloud.path / "hosts" / str(host)
        assert (home / "code/tools/launch_gke.py").is_file() and not (home / "code/.git").exists()
    assert not list((cloud.path / "bucket").glob(".try*"))


@pytest.mark.slow
def test_sweep_on_one_host_runs_without_multihost_flags(cloud):
    cloud.plan(0)
    result = cloud.run("launch", topology="v6e:2x2", program="sweep")
    assert result.returncode == 0, result.stderr
    assert cloud.python_arguments(0)[-1] == ["-m", "bert_jax.sweep", *JOB]


@pytest.mark.slow
def test_preempted_pods_are_restarted_by_the_cluster(cloud):
    cloud.plan([75, 75], [0, 143], [137, 134], 0)
    result = cloud.run("launch")
    assert result.returncode == 0, result.stderr
    assert cloud.steps() == ["storage", "apply", *["logs"] * 4]
    assert [f"restart {n}: waiting for" in result.stderr for n in (1, 2, 3, 4)] == [True] * 3 + [0]
    for pod, code in {"0-3": 75, "1-3": 75, "1-2": 143, "0-1": 137, "1-1": 134}.items():
        assert f"pod tiny-slice-0-{pod} ended with exit code {code}" in result.stderr
    assert result.stderr.count("ended with exit code") == 5
    runs = [words for words in cloud.python_arguments(1) if words[1] == "bert_jax.pretrain"]
    assert len(runs) == 4 and all(run == runs[0] for run in runs)


def test_launch_ends_after_max_restarts(cloud):
    cloud.plan(75, 75, 75)
    result = cloud.run("launch", "--max_restarts=1")
    assert result.returncode == PREEMPTED
    assert result.stderr.endswith("the job tiny was preempted\n")
    assert "tiny was preempted: `delete` it" in cloud.run("launch").stderr


def test_failed_job_shows_the_logs_of_its_pods_and_is_not_restarted(cloud):
    cloud.plan([75, 1], 0)
    result = cloud.run("launch")
    assert result.returncode == 1 and cloud.steps() == ["storage", "apply", "logs", "logs"]
    assert "[pod/1] the job of host1 began" in result.stdout
    assert result.stderr.count("pod tiny-slice-0-1-1 ended with exit code 1\n") == 1
    assert result.stderr.endswith("the job tiny failed\n")
    result = cloud.run("launch")
    assert result.returncode == 1 and "tiny failed: `delete` it" in result.stderr


def test_job_that_has_spent_its_budget_is_stopped_by_its_cluster(cloud):
    cloud.plan(0)
    (cloud.path / "bucket/launch").mkdir(parents=True)
    (cloud.path / "bucket/launch/1234.seconds").write_text("22500\n")
    result = cloud.run("launch", price_per_chip_hour=2, max_price=100)
    assert result.returncode == LIMIT_REACHED and cloud.steps() == ["storage", "apply", "logs"]
    assert result.stderr.endswith("the job tiny was stopped at the limit of its budget\n")
    assert "stopped at the limit of its budget: `delete` it" in cloud.run("launch").stderr


def test_job_at_its_limit_was_stopped_even_if_the_controller_saw_another_exit_first(cloud):
    cloud.plan((75, LIMIT_REACHED))
    assert cloud.run("launch", "--max_restarts=0").returncode == LIMIT_REACHED


@pytest.mark.slow
def test_ctrl_c_leaves_the_job_and_launch_or_follow_shows_its_log_again(cloud):
    cloud.plan("wait", "wait", 0)
    for action in ("launch", "follow"):
        launched = cloud.start(action)
        assert any("began" in line for line in launched.stdout)
        os.killpg(launched.pid, signal.SIGINT)
        _, errors = launched.communicate()
        assert launched.returncode == INTERRUPTED
        assert "interrupted. Nothing was stopped: if the job" in errors.splitlines()[-1]
    result = cloud.run("launch")
    assert result.returncode == 0 and "tiny is already running, with its own" in result.stderr
    assert cloud.steps() == ["storage", "apply", *["logs"] * 3]


@pytest.mark.slow
def test_short_network_failures_are_survived(cloud):
    cloud.plan(0)
    (cloud.path / "plan").write_text(
        repr(cloud.read_plan() | {"errors": {"--follow": 2, "--output=json": 3}})
    )
    result = cloud.run("launch")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("cannot query tiny: Unable to connect") == 3


@pytest.mark.slow
def test_long_network_failure_leaves_the_job(cloud):
    cloud.plan("unreachable", 0)
    result = cloud.run("launch")
    assert result.returncode == 1
    message = "kubectl did not reach the cluster. Nothing was stopped"
    assert message in result.stderr.splitlines()[-1]
    assert cloud.run("follow").returncode == 0


@pytest.mark.slow
def test_job_that_is_deleted_elsewhere_ends_the_launch(cloud):
    cloud.plan("deleted")
    result = cloud.run("launch")
    assert result.returncode == 1 and "launch_gke: tiny was deleted" in result.stderr


def test_status_and_delete(cloud):
    cloud.plan("wait")
    launched = cloud.start("launch", price_per_chip_hour=2)
    assert any("began" in line for line in launched.stdout)
    status = cloud.run("status")
    assert status.returncode == 0 and "cost: not recorded yet" in status.stdout
    (cloud.path / "bucket/launch/1234.seconds").write_text("5400\n")
    status = cloud.run("status").stdout
    assert "NAME-OF-POD" in status and "ran for 1.5 hours, at 16.00 per hour: 24.00\n" in status
    assert "at 24.00 per hour: 36.00\n" in cloud.run("status", price_per_chip_hour=3).stdout
    assert cloud.run("delete").returncode == 0
    os.killpg(launched.pid, signal.SIGINT)
    launched.communicate()
    result = cloud.run("delete")
    assert result.returncode == 1 and "launch_gke: there is no job tiny" in result.stderr


def test_job_that_the_cluster_refuses_is_reported(cloud):
    cloud.plan(apply=1)
    result = cloud.run("launch")
    assert result.returncode == 1 and cloud.steps() == ["storage", "apply"]
    assert "the cluster did not accept the job" in result.stderr.splitlines()[-1]


def test_job_that_was_created_although_the_connection_was_lost_is_followed(cloud):
    cloud.plan(0, lost={"apply": 1})
    result = cloud.run("launch")
    assert result.returncode == 0, result.stderr
    assert cloud.steps() == ["storage", "apply", "logs"]


@pytest.mark.slow
def test_job_that_may_have_been_created_is_reported_as_such(cloud):
    cloud.plan(0, lost={"apply": 20})
    result = cloud.run("launch")
    assert result.returncode == 1 and cloud.steps() == ["storage", "apply"]
    message = "did not reach the cluster. Nothing was stopped: if the job exists, the cluster runs"
    assert message in result.stderr.splitlines()[-1]
    assert cloud.run("launch").returncode == 0


def test_job_that_was_not_deleted_is_reported(cloud):
    cloud.plan(jobset={"kind": "JobSet"}, delete=1)
    result = cloud.run("delete")
    assert result.returncode == 1 and cloud.steps() == ["delete"]
    assert "tiny was not deleted and may cost money" in result.stderr.splitlines()[-1]
    cloud.plan(jobset={"kind": "JobSet"}, lost={"delete": 1})
    assert cloud.run("delete").returncode == 0


@pytest.mark.parametrize(
    "answer",
    [
        "ERROR: (gcloud.storage.cp) You do not currently have an active account selected.",
        "ERROR: (gcloud.storage.cp) gs://data not found: 404.",
    ],
)
def test_commit_that_cannot_be_copied_is_reported(cloud, answer):
    cloud.plan(gcloud=answer)
    result = cloud.run("launch")
    assert result.returncode == 1 and cloud.steps() == ["storage"]
    *_, error, advice = result.stderr.splitlines()
    assert error == answer and "the commit was not copied to gs://data; see the error" in advice
    assert "It needs `gcloud auth login`, and a bucket that exists and" in advice


def test_bucket_that_is_not_writable_fails_the_job(cloud):
    cloud.plan(0)
    # The pods see a file in the place of their own directory in the bucket.
    (cloud.path / "bucket").mkdir()
    for host in range(2):
        (cloud.path / f"bucket/.try.host{host}").touch()
    result = cloud.run("launch")
    assert result.returncode == 1
    assert "gs://data must be writable and have a hierarchical namespace" in result.stdout


@pytest.mark.parametrize(
    ("answer", "advice"),
    [
        ('error: the server doesn\'t have a resource type "jobset"', "the cluster has no JobSet"),
        ("error: You must be logged in to the server (Unauthorized)", "gcloud auth login"),
        pytest.param(
            "The connection to the server localhost:8080 was refused",
            "get-credentials CLUSTER",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_error_of_kubectl_is_passed_on_with_advice(cloud, answer, advice):
    cloud.plan(answer=answer)
    result = cloud.run("launch")
    assert result.returncode == 1 and cloud.steps() == []
    assert f"launch_gke: {answer}" in result.stderr and advice in result.stderr.splitlines()[-1]


def test_print_shows_the_jobset_without_a_cloud(cloud):
    options = {"placement_policy": "near", "service_account": "me", "max_hours": 2}
    result = cloud.run("launch", "--print", "--flex_start", topology="tpu7x:2x2x4:2", **options)
    assert result.returncode == 0 and not cloud.calls()
    jobset = json.loads(result.stdout)
    assert jobset["metadata"]["name"] == "tiny" and jobset["kind"] == "JobSet"
    pod = pod_of(jobset)
    assert pod["serviceAccountName"] == "me"
    assert pod["nodeSelector"]["cloud.google.com/gke-flex-start"] == "true"
    assert "seconds=$((7200 - earlier - SECONDS))" in pod["containers"][0]["command"][-1]


def test_commands_beside_a_printed_jobset_run_it(cloud):
    cloud.plan(0)
    printed = cloud.run("launch", "--print", context="my cluster", reservation="mine")
    nodes = pod_of(json.loads(printed.stdout))["nodeSelector"]
    assert nodes["cloud.google.com/reservation-name"] == "mine"
    assert not cloud.calls() and "nothing was copied or created" in printed.stderr
    printed_commands = printed.stderr.splitlines()[-3:]
    assert printed_commands[2] == "kubectl apply --filename=jobset.json --context='my cluster'"
    for command in printed_commands:  # The fake reads from its input what it applies.
        options = {"shell": True, "check": True, "env": cloud.environment, "text": True}
        subprocess.run(command, cwd=cloud.path, input=printed.stdout, **options)
    result = cloud.run("follow")
    assert (
        result.returncode == 0
        and "the job of host1 began" in (cloud.path / "hosts/1/log").read_text()
    ), result.stderr
    archive = pathlib.Path(re.search(r"--output=(\S+)", printed_commands[0])[1])
    archive.unlink()


def test_uncommitted_changes_are_refused(cloud):
    (cloud.checkout / "new.py").write_text("")
    result = cloud.run("launch")
    assert result.returncode == 1 and "?? new.py" in result.stderr and cloud.steps() == []


def test_mistakes_are_refused_before_a_cloud_is_called(cloud, monkeypatch):
    messages = [
        ("launch", {"topology": "v6e:4x5"}, "--topology: topology 'v6e:4x5' does not exist: try"),
        ("launch", {"topology": None}, "--topology is missing: expected CHIP:SHAPE"),
        (
            "launch",
            {"spot": 1, "reservation": "a"},
            "--spot and --reservation are mutually exclusive",
        ),
        ("launch", {"max_hours": -1}, "--max_hours=-1.0: expected a positive number"),
        ("launch", {"queue_priority": "low"}, "--queue_priority needs --queue"),
        (
            "launch",
            {"topology": "v3:4x4"},
            "has no v3: use the Cloud TPU API (tools/launch_tpu.py)",
        ),
        ("launch", {"topology": "v6e:2x2:2"}, "GKE connects only slices of several hosts"),
        ("launch", {"topology": "tpu7x:4x4x4"}, "need a workload policy: create one with `gcloud"),
        ("launch", {"bucket": "gs://data"}, "--bucket=gs://data: expected a bucket's name"),
        ("launch", {"bucket": None}, "--bucket is missing: expected a bucket's name"),
        ("launch", {"bucket": "Data"}, "--bucket=Data: expected a bucket's name, without"),
        ("launch", {"name": None}, "--name must have a value"),
        ("launch", {"job": None}, "needs the arguments of the job after `--`"),
        ("launch", {"config": "a.py"}, "Unknown command line flag 'config'"),
        ("launch", {"workdir": "a"}, "the flags of the job follow `--`; before it: Unknown"),
        ("fly", {}, "expected one of launch, follow, status, delete, got fly"),
    ]
    for name in ("FAKE_CLOUD", "PATH"):
        monkeypatch.setenv(name, cloud.environment[name])
    cases = [[action, *arguments_of(action, **flags)] for action, flags, _ in messages]
    results = commands.run_each("tools.launch_gke", cases)
    for (code, errors), (*_, message) in zip(results, messages, strict=True):
        assert code == 1 and message in errors and "Traceback" not in errors, errors
    assert not cloud.calls()


def test_job_that_would_fail_is_refused_before_a_cloud_is_called(cloud):
    check = "import os, sys; sys.exit(f'{sys.argv[1:]} {os.environ[\"XLA_FLAGS\"]}')"
    (cloud.checkout / "tools/launch_check.py").write_text(check)
    result = cloud.run("launch", topology="tpu7x:2x2x2", placement_policy="near")
    words = ["1", "pretrain", *JOB]
    message = f"the job would fail: {words} --xla_force_host_platform_device_count=16"
    assert result.returncode == 1 and message in result.stderr and not cloud.calls()


def test_missing_programs_say_how_to_install_them(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="gcloud is not installed"):
        run_gcloud("storage", "cp")
    with pytest.raises(LaunchError, match="kubectl is not installed"):
        GkeJob("base", "", 0).status()
