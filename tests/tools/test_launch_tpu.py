"""The TPU launcher as a user runs it, with a fake gcloud whose hosts run the real tpu_worker.sh."""

import ast
import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from bert_jax.pods.launch import cloud_tpu
from bert_jax.pods.launch.budget import LIMIT_REACHED
from bert_jax.pods.launch.cloud_tpu import slice_size
from bert_jax.pods.launch.job import LaunchError
from bert_jax.runtime.errors import INTERRUPTED, PREEMPTED
from tests.helpers import commands

TOOLS = commands.ROOT / "tools"

# Logs its arguments and follows the plan: `states` has the states of each slice in turn, of which
# the last persists; `jobs` are the exit codes of the job on each slice (one code, or one per host),
# "wait", the state in which the slice is lost, or "unreachable" after its start. `errors` counts
# the coming failures of commands that contain a word. Imports little and reads Python's literals,
# because it runs a dozen times per launch.
FAKE_GCLOUD = """
import os, sys, time
cloud, words = os.environ["FAKE_CLOUD"], sys.argv[1:]
with open(f"{cloud}/calls", "a") as calls: print(words, file=calls)
if words[0] == "alpha": del words[0]
with open(f"{cloud}/plan") as file: plan = eval(file.read())
def save():  # A `watch` may read it now.
    with open(f"{cloud}/plan.new", "w") as file: print(plan, file=file)
    os.replace(f"{cloud}/plan.new", f"{cloud}/plan")
is_watch = any(word.endswith(" watch") for word in words)  # Runs beside another command.
for word, count in plan["errors"].items():
    if count and not is_watch and any(word in other for other in words):
        plan["errors"][word] -= 1
        save()
        sys.exit("network is unreachable")
verb, states = " ".join(words[2:4]), plan["slices"][0] if plan["slices"] else []
exists = plan["exists"]
if verb == "queued-resources create":
    metadata = next((word for word in words if word.startswith("--metadata=")), "")
    kind = next((word for word in words if word.startswith("--accelerator-type=")), "")
    plan |= {"exists": True, "metadata": metadata.partition("=")[2], "type": kind.partition("=")[2]}
elif not exists:
    sys.exit("NOT_FOUND: " + words[4])
elif "failedData" in words[5]:
    print(plan["reason"])
elif verb == "queued-resources describe":
    print(states[0])
    plan["slices"][0] = states[1:] or states
elif verb == "tpu-vm describe":
    if plan.get("tpu") == "NOT_FOUND": sys.exit("NOT_FOUND: " + words[4])
    if "acceleratorType" in words[5]:
        print(plan["type"])
    elif "json" not in words[5]:
        print("READY")
    else:  # Every slice was created an hour ago.
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 3600))
        pairs = [pair.split("=") for pair in plan["metadata"].split(",") if pair]
        print(str({"createTime": created, "metadata": dict(pairs)}).replace("'", '"'))
elif verb == "queued-resources delete":
    plan |= {"exists": False, "slices": plan["slices"][1:], "jobs": plan["jobs"][1:], "tpu": ""}
else:
    hosts = [f"{cloud}/slices{len(plan['slices'])}-host{i}" for i in range(plan["hosts"])]
    homes, job = hosts, plan["jobs"][0]
    command = next((w for w in words if w.startswith("--command=")), "").partition("=")[2]
    if "--worker=0" in words: homes = homes[:1]
    if command.endswith(" follow") and job in ("SUSPENDED", "NOT_FOUND", "unreachable"):
        if job == "SUSPENDED": plan["slices"][0] = [job]
        if job == "NOT_FOUND": plan["tpu"] = job
        if job == "unreachable": plan["errors"] = {"tpus": 21}
        save()
        sys.exit("the connection was closed")
    if plan["slices"][0] != ["ACTIVE"] or plan.get("tpu"): sys.exit("the TPU is not READY")
    watches = []
    for index, home in enumerate(homes):
        os.makedirs(home, exist_ok=True)
        if words[3] == "scp":
            with open(words[4], "rb") as source, open(f"{home}/launch.tar", "wb") as target:
                target.write(source.read())
            continue
        unpack, _, installs = command.partition(" && bash launch/code/tools/tpu_worker.sh install")
        does = job[index] if isinstance(job, list) else job
        environment = os.environ | {"HOME": home, "HOST": os.path.basename(home), "JOB": str(does)}
        environment["PATH"] = f"{cloud}/host_bin:{os.environ['PATH']}"
        sys.stdout.flush()
        mode = os.P_NOWAIT if is_watch else os.P_WAIT
        watches += [os.spawnvpe(mode, "bash", ["bash", "-c", "cd; " + unpack], environment)]
        if installs:
            os.makedirs(f"{home}/launch/venv/bin", exist_ok=True)
            os.symlink(f"{cloud}/job", f"{home}/launch/venv/bin/python")
    if is_watch: sys.exit(max(os.waitpid(process, 0)[1] for process in watches))
    if command.endswith("follow") and job != "wait":  # All hosts end before the next command.
        files = [f"{host}/launch/exit_code" for host in hosts]
        while not all(os.path.exists(file) and os.path.getsize(file) for file in files):
            time.sleep(0.01)
save()
"""
FAKE_JOB = """
import os, sys, time
with open(os.environ["HOME"] + "/arguments", "w") as file: print(sys.argv[1:], file=file)
print("the job of", os.environ["HOST"], "began", flush=True)
does = os.environ["JOB"]
if does.isdecimal(): sys.exit(int(does))
if not does.startswith("abort"):
    import signal
    if does == "save": signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved") or 75))
    open(os.environ["HOME"] + "/ready", "w")
    while True: time.sleep(0.01)  # `pause` would miss a signal just before it.
print(does, flush=True)
os.abort()
"""
# Reaches the limit once the job waits.
FAKE_TIMEOUT = """
import os, subprocess, sys, time
home, words = os.environ["HOME"], sys.argv[1:]
with open(home + "/timeout", "w") as file: print(words[:3], file=file)
job = subprocess.Popen(words[3:])
while job.poll() is None and not os.path.exists(home + "/ready"): time.sleep(0.01)
if is_late := job.poll() is None: job.terminate()
code = job.wait()
sys.exit(124 if is_late else code)
"""
HOST0 = "#!/bin/sh\necho host0\n"
LOST_PEER = "abort: the distributed service detected fatal errors"  # JAX's own words.
AWKWARD = """--config.note=it's a "quote", $HOME `id` \\ and  two  spaces; a * too"""
JOB = ["--config=configs/tiny.py:arg", "--workdir=/gcs/runs/tiny", AWKWARD]
STEPS = ["create", "scp", "install", "start", "follow"]


def arguments_of(action, *words, job=JOB, **flags):
    """Returns the launcher's arguments after `action`; a flag that is None is left out."""
    flags = {"name": "tiny", "project": "proj", "zone": "us-central2-b", "bucket": "data"} | flags
    flags = {"accelerator_type": "v4-16", "poll_seconds": 0} | flags
    given = (f"--{name}={value}" for name, value in flags.items() if value is not None)
    return [*words, *given, *(["--", *job] if action in ("launch", "run") and job else [])]


class Cloud:
    """A repository with one commit, and the fake programs of a cloud."""

    def __init__(self, path: pathlib.Path):
        self.path, self.checkout = path, path / "checkout"
        (self.checkout / "tools").mkdir(parents=True)
        for name in ("launch_tpu.py", "tpu_worker.sh"):
            shutil.copy(TOOLS / name, self.checkout / "tools")
        self.launch_check("")
        for words in (
            ["init", "--quiet"],
            ["add", "."],
            ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message=all"],
        ):
            subprocess.run(["git", *words], cwd=self.checkout, check=True)
        self.program("bin/gcloud", FAKE_GCLOUD)
        self.program("job", FAKE_JOB)
        self.program("host_bin/hostname", 'echo "$HOST"', "/bin/sh")
        # The real one looks only once a second whether the job has ended.
        tail = f'exec {shutil.which("tail")} --sleep-interval=0.01 "$@"'
        self.program("host_bin/tail", tail, "/bin/sh")
        self.plan()
        self.environment = os.environ | {
            "FAKE_CLOUD": str(path),
            "XDG_CACHE_HOME": f"{path}/cache",
            "PATH": f"{path}/bin:{os.environ['PATH']}",
        }

    def launch_check(self, text):
        (self.checkout / "tools/launch_check.py").write_text(text)

    def program(self, name, text, interpreter=f"{sys.executable} -S"):
        file = self.path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!{interpreter}\n{text}\n")
        file.chmod(0o755)

    def plan(self, jobs=(0,), slices=None, hosts=2, reason="", **errors):
        slices = slices or [["ACTIVE"]] * len(jobs)
        plan = {"jobs": jobs, "slices": slices, "hosts": hosts, "errors": errors, "exists": False}
        plan |= {"reason": reason, "metadata": ""}
        (self.path / "plan").write_text(repr(plan))

    def fail(self, **errors):
        plan = ast.literal_eval((self.path / "plan").read_text())
        (self.path / "plan").write_text(repr(plan | {"errors": errors}))

    def start(self, action, *words, **flags):
        arguments = arguments_of(action, *words, **flags)
        return subprocess.Popen(
            [sys.executable, self.checkout / "tools" / "launch_tpu.py", action, *arguments],
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
        """Returns a word for each call that changes something or shows the log."""
        words = {"create", "scp", "install", "start", "follow", "delete"}
        calls = [" ".join(call).split() for call in self.calls()]
        return [next(word for word in call if word in words) for call in calls if words & {*call}]

    def created(self):
        return [call for call in self.calls() if "create" in call]

    def job_arguments(self):
        return [ast.literal_eval(file.read_text()) for file in self.path.glob("*/arguments")]


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path)
    yield cloud
    sessions = {int(file.read_text()) for file in tmp_path.glob("*/launch/pid")}
    for process in psutil.process_iter():  # Jobs that wait.
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) in sessions:
                process.kill()


def test_launch_creates_copies_runs_follows_and_deletes(cloud):
    cloud.plan(slices=[["WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "ACTIVE"]])
    network = {"network": "net", "subnetwork": "sub", "service_account": "me@proj.com"}
    result = cloud.run("launch", "--spot", "--internal_ips", **network)
    assert result.returncode == 0, result.stderr
    assert cloud.steps() == [*STEPS, "delete"]
    assert cloud.created() == [
        [
            "compute",
            "tpus",
            "queued-resources",
            "create",
            "tiny",
            "--node-id=tiny",
            "--accelerator-type=v4-16",
            "--runtime-version=tpu-ubuntu2204-base",
            "--network=net",
            "--subnetwork=sub",
            "--service-account=me@proj.com",
            "--internal-ips",
            "--spot",
            "--project=proj",
            "--zone=us-central2-b",
            "--quiet",
        ]
    ]
    assert all("--internal-ip" in call for call in cloud.calls() if {"ssh", "scp"} & {*call})
    arguments = ["-m", "bert_jax.pretrain", *JOB, "--multihost", "--num_processes=2"]
    assert cloud.job_arguments() == [arguments] * 2
    assert result.stderr.count("is WAITING_FOR_RESOURCES") == 1
    assert result.stderr.endswith("the job on tiny finished\n")


def test_capacity_and_shape_of_the_slice_are_requested(cloud, monkeypatch):
    for name in ("FAKE_CLOUD", "PATH"):
        monkeypatch.setenv(name, cloud.environment[name])
    v5e_16, flex_start = ["--accelerator-type=v5litepod-16"], "--provisioning-model=flex-start"
    requests = [
        (["--reserved"], "v5e:4x4", ["--type=v5litepod", "--topology=4x4", "--reserved"]),
        (["--flex_start"], "v5e-16", [*v5e_16, flex_start, "--max-run-duration=604800s"]),
        (["--flex_start", "--max_hours=2"], "v5e-16", [flex_start, "--max-run-duration=9000s"]),
        ([], "v4:2x2x4", ["--type=v4", "--topology=2x2x4"]),
    ]
    cloud.plan(jobs=[0] * len(requests))
    cases = []
    for given, name, _ in requests:
        cases.append(["create", *arguments_of("create", *given, accelerator_type=name)])
        cases.append(["delete", *arguments_of("delete", accelerator_type=name)])
    for code, errors in commands.run_each("tools.launch_tpu", cases):
        assert code == 0, errors
    for call, (given, _, words) in zip(cloud.created(), requests, strict=True):
        assert set(words) <= set(call)
        assert call[: call.index("compute")] == ["alpha"] * ("--flex_start" in given)
        assert any(word.startswith("--topology") for word in call) == (words[0][:6] == "--type")
        version = "tpu-ubuntu2204-base" if "--type=v4" in call else "v2-alpha-tpuv5-lite"
        assert f"--runtime-version={version}" in call and "--spot" not in call


@pytest.mark.slow
def test_sweep_on_a_single_host_runs_without_multihost_flags(cloud):
    cloud.plan(hosts=1)
    result = cloud.run("launch", accelerator_type="v6e-8", program="sweep")
    assert result.returncode == 0, result.stderr
    assert cloud.job_arguments() == [["-m", "bert_jax.sweep", *JOB]]


@pytest.mark.parametrize(
    "end",
    [
        [LOST_PEER, 75],
        "NOT_FOUND",
        pytest.param(75, marks=pytest.mark.slow),
        pytest.param([75, 0], marks=pytest.mark.slow),
        pytest.param("SUSPENDED", marks=pytest.mark.slow),
        pytest.param(143, marks=pytest.mark.slow),
    ],
)
def test_preempted_job_restarts_on_a_new_slice(cloud, end):
    cloud.plan(jobs=[end, 0])
    result = cloud.run("launch")
    assert result.returncode == 0, result.stderr
    assert cloud.steps() == [*STEPS, "delete"] * 2
    starts = [call for call in cloud.calls() if any(" start " in word for word in call)]
    assert starts[0] == starts[1]


@pytest.mark.slow
def test_slice_preempted_before_it_starts_is_requested_again(cloud):
    cloud.plan(jobs=[None, 0], slices=[["PROVISIONING", "SUSPENDED"], ["ACTIVE"]])
    assert cloud.run("launch").returncode == 0
    assert cloud.steps() == ["create", "delete", *STEPS, "delete"]


@pytest.mark.slow
def test_launch_ends_after_max_restarts(cloud):
    cloud.plan(jobs=[75, 75])
    assert cloud.run("launch", "--max_restarts=1").returncode == PREEMPTED
    assert cloud.steps() == [*STEPS, "delete"] * 2


def test_relaunch_never_deletes_the_slice_of_a_running_job(cloud):
    cloud.plan(jobs=["wait"])
    for flags in ({}, {"max_hours": 0.4}):  # The slice was created an hour ago.
        launched = cloud.start("launch", **flags)
        assert any("began" in line for line in launched.stdout), launched.stderr.read()
        os.killpg(launched.pid, signal.SIGINT)
        _, errors = launched.communicate()
        assert launched.returncode == INTERRUPTED
        cloud.fail(json=3, follow=1)
    assert errors.count("cannot query tiny") == 3 and "lost the connection to worker 0" in errors
    assert cloud.steps() == [*STEPS, "follow", "follow"]


def test_exit_of_worker_2_is_shown_while_the_others_run(cloud):
    cloud.plan(jobs=[["wait", "wait", 7, "wait"]], hosts=4)
    launched = cloud.start("launch", accelerator_type="v4-32")
    shown = "slices1-host2: the job ended (exit code 7): the job of slices1-host2 began"
    assert any(shown in line for line in launched.stderr)
    status = cloud.run("status", accelerator_type="v4-32", price_per_chip_hour=2).stdout
    assert status.count(" running\n") == 3
    hours, price = re.search(r"billed for (\S+) hours, at 32.00 per hour: (\S+)\n", status).groups()
    assert 1 <= float(hours) < 2 and 32 <= float(price) < 64
    other = cloud.run("status", accelerator_type="v4-8", price_per_chip_hour=2)
    assert other.returncode == 1 and "--accelerator_type=v4-8: tiny is a v4-32" in other.stderr
    os.killpg(launched.pid, signal.SIGTERM)
    _, errors = launched.communicate()
    assert launched.returncode == INTERRUPTED
    assert "interrupted. Nothing was stopped" in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("pid", "code", "shown"),
    [
        ("", "", ""),
        ("dead", "0\n", ""),
        ("dead", "7\n", "host0: the job ended (exit code 7): last line\n"),
        ("dead", "", "host0: the job ended (exit code none): last line\n"),
    ],
)
def test_watch_reports_a_job_that_ended_before_it(tmp_path, pid, code, shown):
    for name, text in {"launch/pid": pid, "launch/exit_code": code, "hostname": HOST0}.items():
        if text:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
    (tmp_path / "launch").mkdir(exist_ok=True)
    (tmp_path / "launch/log").write_text("first line\nlast line\n")
    (tmp_path / "hostname").chmod(0o755)
    environment = os.environ | {"HOME": f"{tmp_path}", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["bash", TOOLS / "tpu_worker.sh", "watch"]
    assert subprocess.check_output(words, env=environment, text=True) == shown


def test_follow_shows_what_every_watch_reports_once(monkeypatch, capsys):
    @contextlib.contextmanager
    def watching(command, show, seconds):
        show("host2: the job ended (exit code 7)")
        yield

    answers = [{}, {"host0": "75", "host2": "75"}]
    monkeypatch.setattr(cloud_tpu.job, "watching", watching)
    monkeypatch.setattr(cloud_tpu.Slice, "ssh", lambda self, *words, **options: None)
    monkeypatch.setattr(cloud_tpu.Slice, "job_states", lambda self: (answers.pop(0), ""))
    monkeypatch.setattr(cloud_tpu.Slice, "slice_state", lambda self: "ACTIVE")
    fields = dict.fromkeys(each.name for each in dataclasses.fields(cloud_tpu.Slice))
    tiny = cloud_tpu.Slice(**fields | {"name": "tiny", "internal_ips": False, "poll_seconds": 0})
    assert tiny.follow() == "preempted" and not answers
    assert capsys.readouterr().err.count("host2: the job ended") == 1


def test_job_saves_and_its_slice_is_deleted_at_max_price(cloud):
    cloud.program("host_bin/timeout", FAKE_TIMEOUT)
    cloud.plan(jobs=[75, "save"])
    # 8 chips: 100 pays for 6.25 hours, of which each slice has been billed for one.
    result = cloud.run("launch", max_price=100, price_per_chip_hour=2)
    assert result.returncode == LIMIT_REACHED, result.stderr
    assert cloud.steps() == [*STEPS, "delete"] * 2
    first, second = (call[-4] for call in cloud.created())
    assert first == "--metadata=price_per_hour=16.0"
    seconds = re.fullmatch(r"--metadata=billed_seconds=(\d+),price_per_hour=16.0", second)[1]
    assert 3600 <= int(seconds) < 5400
    for host in range(2):
        limit = ast.literal_eval((cloud.path / f"slices1-host{host}/timeout").read_text())
        assert limit[:2] == ["--foreground", "--kill-after=1800"]
        assert 3.25 * 3600 < int(limit[2]) <= 4.25 * 3600
    assert "saved" in result.stdout and "tiny was billed for 2." in result.stderr
    assert result.stderr.endswith("tiny was stopped at the limit of its budget\n")


@pytest.mark.slow
def test_job_does_not_start_once_its_budget_is_spent(cloud):
    assert cloud.run("launch", max_hours=0.5).returncode == LIMIT_REACHED
    assert cloud.steps() == ["create", "scp", "install", "delete"]


@pytest.mark.parametrize(
    ("job", "code"),
    [
        ("trap 'exit 75' TERM; while :; do sleep 0.05; done", LIMIT_REACHED),
        ("trap '' TERM; exec sleep 1000", 137),
    ],
)
def test_worker_stops_the_job_at_its_limit(tmp_path, job, code):
    program = tmp_path / "launch/venv/bin/python"
    program.parent.mkdir(parents=True)
    (tmp_path / "launch/code").mkdir()
    program.write_text(f"#!/bin/sh\n{job}\n")
    program.chmod(0o755)
    limits = {"HOME": str(tmp_path), "LIMIT_SECONDS": "0.1", "SAVE_SECONDS": "0.1"}
    output = ""
    for action in ("start", "follow", "status"):
        words = ["bash", TOOLS / "tpu_worker.sh", action]
        output = subprocess.check_output(words, env=os.environ | limits, text=True)
    assert output.split()[1] == str(code)


@pytest.mark.parametrize("end", [[75, 3], "abort", pytest.param([0, 1], marks=pytest.mark.slow)])
def test_failed_job_shows_its_log_and_is_not_restarted(cloud, end):
    cloud.plan(jobs=[end])
    result = cloud.run("launch", "--nodelete_when_done")
    assert result.returncode == 1 and cloud.steps() == STEPS
    host, code = ("host0", 134) if end == "abort" else ("host1", end[1])
    assert f"{host} {code}\nthe job of slices1-{host} began" in result.stdout
    assert "costs money until you `delete` it" in result.stderr


@pytest.mark.parametrize(
    ("reason", "message"),
    [("Quota exceeded", "Quota exceeded"), ("", "Google Cloud gave no reason; it may be quota")],
)
def test_failed_request_is_reported_and_deleted(cloud, reason, message):
    cloud.plan(slices=[["WAITING_FOR_RESOURCES", "FAILED"]], reason=reason)
    result = cloud.run("launch")
    assert result.returncode == 1 and cloud.steps() == ["create", "delete"]
    *_, deleted, error = result.stderr.splitlines()
    assert deleted.endswith("tiny was deleted")
    assert f"the request for tiny FAILED: {message}" in error


def test_request_that_does_not_reach_the_cloud_is_reported(cloud):
    cloud.plan(create=1)
    result = cloud.run("launch")
    assert result.returncode == 1 and cloud.steps() == ["create"]
    network, error = result.stderr.splitlines()
    assert network == "network is unreachable"
    assert error == "launch_tpu: tiny was not created because of the error above"


@pytest.mark.slow
def test_short_network_failures_are_retried(cloud):
    cloud.plan(scp=2, follow=1, status=1, delete=2)
    result = cloud.run("launch")
    assert result.returncode == 0, result.stderr
    assert cloud.steps() == [
        *("create", *["scp"] * 3, "install", "start", "follow", "follow", *["delete"] * 3)
    ]


def test_healthy_slice_is_kept_when_the_network_of_the_launcher_fails(cloud):
    cloud.plan(jobs=["unreachable"])
    result = cloud.run("launch")
    assert result.returncode == 1 and cloud.steps() == [*STEPS]
    message = "gcloud did not report the state of tiny. Nothing was stopped"
    assert message in result.stderr.splitlines()[-1]
    assert cloud.run("status").stdout.count(" running\n") == 2


@pytest.mark.slow
def test_slice_that_is_not_deleted_is_reported(cloud):
    cloud.plan(delete=3)
    result = cloud.run("launch")
    assert result.returncode == 1 and cloud.steps() == [*STEPS, *["delete"] * 3]
    assert "tiny was not deleted and may cost money" in result.stderr.splitlines()[-1]


@pytest.mark.slow
def test_ctrl_c_leaves_the_slice_and_launch_follows_its_job_again(cloud):
    cloud.plan(jobs=["wait"])
    for _ in range(2):
        launched = cloud.start("launch")
        assert any("began" in line for line in launched.stdout)
        os.killpg(launched.pid, signal.SIGINT)
        _, errors = launched.communicate()
        assert launched.returncode == INTERRUPTED
        assert "interrupted. Nothing was stopped: if the slice" in errors.splitlines()[-1]
    assert cloud.steps() == [*STEPS, "follow"]
    assert cloud.run("status").stdout.count(" running\n") == 2
    assert cloud.run("delete").returncode == 0
    result = cloud.run("delete")
    assert result.returncode == 1 and "there is no slice tiny" in result.stderr


def test_single_actions_do_what_launch_does(cloud):
    for action in ("create", "copy", "run", "follow"):
        assert cloud.run(action).returncode == 0
    assert cloud.steps() == [*STEPS, "follow"]


def test_uncommitted_changes_are_refused(cloud):
    (cloud.checkout / "new.py").write_text("")
    result = cloud.run("launch")
    assert result.returncode == 1 and "?? new.py" in result.stderr and cloud.steps() == []


def test_mistakes_are_refused_before_gcloud_is_called(cloud, monkeypatch):
    messages = [
        ("launch", {"accelerator_type": "v4-33"}, "--accelerator_type=v4-33 is unknown: expected"),
        ("launch", {"accelerator_type": "tpu7x-16"}, "has no tpu7x: use GKE (tools/launch_gke.py)"),
        ("launch", {"accelerator_type": "tpu7x:2x2x2"}, "has no tpu7x: use GKE (tools/launch_gke"),
        ("launch", {"accelerator_type": "v4:2x2x3"}, "'v4:2x2x3' does not exist: try v4:2x2x2 (v4"),
        ("launch", {"accelerator_type": "v6e:4x4:2"}, "=v6e:4x4:2: expected one slice; tools/laun"),
        ("launch", {"spot": 1, "reserved": 1}, "--spot and --reserved are mutually exclusive"),
        ("launch", {"max_hours": 1, "delete_when_done": 0}, "--nodelete_when_done contradicts"),
        ("run", {"max_hours": 1}, "`run` takes no --max_hours or --max_price"),
        ("launch", {"max_price": 5}, "--max_price needs --price_per_chip_hour"),
        ("launch", {"zone": None}, "--zone must have a value"),
        ("launch", {"bucket": "gs://data"}, "--bucket=gs://data: expected a bucket's name"),
        ("launch", {"bucket": None}, "--bucket is missing: expected a bucket's name"),
        ("launch", {"accelerator_type": None}, "--accelerator_type is missing: expected CHIP-N,"),
        ("launch", {"workdir": "a"}, "the flags of the job follow `--`; before it: Unknown"),
        ("run", {"job": None}, "need the arguments of the job after `--`"),
        ("launch", {"config": "a.py"}, "Unknown command line flag 'config'"),
        ("fly", {}, "expected one of launch, create, copy, run, follow, status, delete, got fly"),
    ]
    for name in ("FAKE_CLOUD", "PATH"):
        monkeypatch.setenv(name, cloud.environment[name])
    cases = [[action, *arguments_of(action, **flags)] for action, flags, _ in messages]
    results = commands.run_each("tools.launch_tpu", cases)
    for (code, errors), (*_, message) in zip(results, messages, strict=True):
        assert code == 1 and message in errors and "Traceback" not in errors
    assert not cloud.calls()


def test_job_that_would_fail_is_refused_before_gcloud_is_called(cloud):
    cloud.launch_check("import os, sys; sys.exit(f'{sys.argv[1:]} {os.environ[\"XLA_FLAGS\"]}')")
    result = cloud.run("launch", accelerator_type="v3-32")
    words = ["1", "pretrain", *JOB]
    message = f"the job would fail: {words} --xla_force_host_platform_device_count=32"
    assert result.returncode == 1 and message in result.stderr and not cloud.calls()


def test_chips_and_hosts_of_every_kind_of_slice():
    sizes = {"v2-8": ("v2", 4, 1), "v3-32": ("v3", 16, 4), "v4-128": ("v4", 64, 16)}
    sizes |= {"v5p-32": ("v5p", 16, 4), "v5litepod-8": ("v5e", 8, 1), "v6e-64": ("v6e", 64, 16)}
    sizes |= {"v5e-8": ("v5e", 8, 1), "v5e:4x4": ("v5e", 16, 4), "v4:4x4x8": ("v4", 128, 32)}
    assert {name: slice_size(name) for name in sizes} == sizes
    missing = ("v4", "v4-12", "v4-0", "v5e-12", "v6e-2", "v6e-12", "tpu-8", "v4-32x", "v4-33")
    for name in (*missing, "v3-16", "v4-24", "v6e-20", "v6e-512", "v5litepod-12", "v5p-20000"):
        with pytest.raises(LaunchError, match=f"--accelerator_type={name} is unknown"):
            slice_size(name)
    with pytest.raises(LaunchError, match=r"one of v2, v3, v4, v5litepod \(v5e\), v5p or v6e$"):
        slice_size("tpu-8")
    nearest = (
        r"N the number of chips of .*; try v6e:2x4 \(v6e-8\) or v6e:4x4 \(v6e-16\), the nearest"
    )
    with pytest.raises(LaunchError, match=f"expected v6e-N, {nearest}$"):
        slice_size("v6e-12")
