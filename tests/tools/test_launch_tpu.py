"""The TPU launcher as a user runs it, against a gcloud and an xpk that only play the cloud.

The workers' side is real: what goes through `ssh --command` is run by a shell in one directory for
each worker, where only packages and the job are played.
"""

import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from bert_jax.runtime.exit_status import ABORTED, PREEMPTED
from tests import helpers

TOOLS = helpers.ROOT / "tools"
sys.path.insert(0, str(TOOLS))
from launch_commands import LaunchError, chips_of_slice, hosts_of_slice  # noqa: E402

# What is on the PATH: notes its arguments, then does as plan.json says. `states` are those of each
# slice that is created, the last of them for good; `jobs` what its job does: an exit status for
# all workers or for each, "wait" for SIGTERM, or "vanish" with its slice.
FAKE_GCLOUD = """
import json, os, pathlib, subprocess, sys
cloud, words = pathlib.Path(os.environ["FAKE_CLOUD"]), sys.argv[1:]
with open(cloud / "calls", "a") as calls:
    calls.write(json.dumps(["gcloud", *words]) + chr(10))
plan, state = json.loads((cloud / "plan.json").read_text()), cloud / "state.json"
if plan.get("logged_out"): sys.exit("no active account. Please run: $ gcloud auth login")
slice_ = json.loads(state.read_text()) if state.exists() else {"created": 0, "states": []}
def save(): state.write_text(json.dumps(slice_))
def value(flag): return next(w.partition("=")[2] for w in words if w.startswith(flag + "="))
def fail(why): sys.exit("ERROR: " + why)
verb = " ".join(words[2:4])
if verb == "queued-resources create":
    if slice_["states"]: fail("ALREADY_EXISTS")
    slice_["states"] = plan["states"][slice_["created"]]
    slice_["created"] += 1
elif not slice_["states"]:
    fail("NOT_FOUND: no " + words[4])
elif verb == "queued-resources describe":
    if plan.get("silent"):
        plan["silent"] -= 1
        (cloud / "plan.json").write_text(json.dumps(plan))
        fail("network is unreachable")
    print(slice_["states"][0])
    slice_["states"] = slice_["states"][1:] or slice_["states"]
elif verb == "tpu-vm describe":
    print(slice_.get("node", "READY"))
elif verb == "queued-resources delete":
    if plan.get("undeletable"):
        plan["undeletable"] -= 1
        (cloud / "plan.json").write_text(json.dumps(plan))
        fail("network is unreachable")
    slice_ = {"created": slice_["created"], "states": []}
elif slice_["states"][0] != "ACTIVE":
    fail("the TPU is not READY")
else:
    homes = [cloud / f"slice{slice_['created']}-worker{i}" for i in range(plan["workers"])]
    if value("--worker") != "all": homes = [homes[int(value("--worker"))]]
    job = plan["jobs"][slice_["created"] - 1]
    for index, home in enumerate(homes):
        home.mkdir(exist_ok=True)
        python = home / "launch/venv/bin/python"
        if words[3] == "scp" and plan.get("dropped"):
            plan["dropped"] -= 1
            (cloud / "plan.json").write_text(json.dumps(plan))
            fail("connection dropped")
        if words[3] == "scp":
            (home / "launch.tar.gz").write_bytes(pathlib.Path(words[4]).read_bytes())
            continue
        command = value("--command")
        if command.endswith("tpu_worker.sh install"):
            python.parent.mkdir(parents=True)
            python.symlink_to(cloud / "job")
        elif " mount " in command:
            pass
        elif command.endswith(" follow") and job == "vanish":
            slice_["states"] = ["SUSPENDED"]
        elif command.endswith(" follow") and job == "silence":
            (cloud / "plan.json").write_text(json.dumps(plan | {"silent": 20}))
            fail("network is unreachable")
        elif command.endswith(" status") and plan.get("silent"):
            fail("network is unreachable")
        else:
            does = job[index] if isinstance(job, list) else job
            environment = os.environ | {"HOME": str(home), "HOST": home.name, "JOB": str(does)}
            environment["PATH"] = f"{cloud}/worker_bin:{os.environ['PATH']}"
            code = subprocess.run(["bash", "-c", command], env=environment, cwd=home).returncode
            if code: sys.exit(code)
save()
for verb in plan.get("unheard", []):
    if any(verb in word for word in words):
        plan["unheard"].remove(verb)
        (cloud / "plan.json").write_text(json.dumps(plan))
        fail("connection lost")
"""
FAKE_JOB = """
import json, os, pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
pathlib.Path.home().joinpath("arguments.json").write_text(json.dumps(sys.argv[1:]))
print("the job of", os.environ["HOST"], "began", flush=True)
if os.environ["JOB"] in ("wait", "vanish", "silence"): signal.pause()
if os.environ["JOB"].startswith("abort"):
    print(os.environ["JOB"], flush=True)
    os.abort()
sys.exit(int(os.environ["JOB"]))
"""
FAKE_XPK = """
import json, os, pathlib, sys
cloud, name = pathlib.Path(os.environ["FAKE_CLOUD"]), pathlib.Path(sys.argv[0]).name
with open(cloud / "calls", "a") as calls:
    calls.write(json.dumps([name, *sys.argv[1:]]) + chr(10))
plan = json.loads((cloud / "plan.json").read_text())
if any(word.startswith("--wait-for-job-completion") for word in sys.argv):
    code = plan["waits"].pop(0)
    (cloud / "plan.json").write_text(json.dumps(plan))
    sys.exit(code)
"""
LOST = "abort: the distributed service detected fatal errors"  # JAX's words.
AWKWARD = """--config.note=it's a "quote", $HOME `id` \\ and  two  spaces; a * too"""
JOB = ["--config=configs/tiny.py:arg", "--workdir=/gcs/runs/tiny", AWKWARD]
TWO_HOSTS = ["--multihost", "--num_processes=2"]
UP = ["ACTIVE"]


class Cloud:
    """A checkout with one commit, and the programs of a cloud that plays `plan`."""

    def __init__(self, path: pathlib.Path, **plan):
        self.path, self.checkout = path, path / "checkout"
        (self.checkout / "tools").mkdir(parents=True)
        for name in ("launch_tpu.py", "launch_commands.py", "tpu_worker.sh"):
            shutil.copy(TOOLS / name, self.checkout / "tools")
        (self.checkout / "tools/launch_check.py").write_text("")  # Its own tests are below.
        (self.checkout / "configs").mkdir()
        (self.checkout / "configs/tiny.py").write_text("")
        (self.checkout / ".gitignore").write_text("__pycache__/\n")
        self.git("init", "--quiet")
        self.git("add", ".")
        self.git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message=all")
        self.program("bin/gcloud", FAKE_GCLOUD)
        self.program("bin/xpk", FAKE_XPK)
        self.program("bin/kubectl", FAKE_XPK)
        self.program("job", FAKE_JOB)
        self.program("worker_bin/hostname", "import os; print(os.environ['HOST'])")
        self.plan(**plan)
        self.environment = os.environ | {
            "FAKE_CLOUD": str(path),
            "PATH": f"{path}/bin:{os.environ['PATH']}",
            "TMPDIR": str(path),
        }

    def git(self, *words):
        subprocess.run(["git", *words], cwd=self.checkout, check=True)

    def program(self, name, text):
        file = self.path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!{sys.executable} -S\n{text}")
        file.chmod(0o755)

    def plan(self, states=(UP,), jobs=(0,), workers=2, **more):
        plan = {"states": states, "jobs": jobs, "workers": workers} | more
        (self.path / "plan.json").write_text(json.dumps(plan))

    def command(self, action, *words, job=JOB, accelerator_type="v4-16", **flags):
        flags = dict(name="tiny", project="proj", zone="us-central2-b", bucket="data") | flags
        words = [f"--accelerator_type={accelerator_type}", "--poll_seconds=0", *words]
        words += [f"--{name}={value}" for name, value in flags.items() if value is not None]
        tool = self.checkout / "tools" / "launch_tpu.py"
        return [sys.executable, tool, action, *words, *(["--", *job] if job else [])]

    def run(self, action, *words, **settings):
        return subprocess.run(
            self.command(action, *words, **settings),
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
        )

    def calls(self, start=0):
        file = self.path / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines][start:]

    def steps(self):
        """The calls in a word or two each, without the questions."""
        steps = []
        for call in self.calls():
            step = " ".join(call[3:5]) if call[3] == "queued-resources" else call[4]
            if call[4] == "ssh":
                command = next(word for word in call if word.startswith("--command="))
                words = shlex.split(command)
                step = words[2] if "tpu_worker.sh" in command else "unpack"
            steps.append(step.removeprefix("queued-resources "))
        return [step for step in steps if step not in ("describe", "status")]

    def job_arguments(self):
        return [json.loads(file.read_text()) for file in sorted(self.path.glob("*/arguments.json"))]

    def close(self):
        for file in self.path.glob("*/launch/job/pid"):
            try:
                os.killpg(int(file.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path)
    yield cloud
    cloud.close()


SET_UP = ["create", "scp", "unpack", "install", "mount", "start", "follow"]


def test_launch_goes_from_nothing_to_a_finished_job_and_cleans_up(cloud):
    cloud.plan(states=[["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]])
    result = cloud.run("launch", "--spot", "--valid_until_duration=6h")
    assert result.returncode == 0, result.stderr
    assert cloud.steps() == [*SET_UP, "delete"]
    assert cloud.calls()[1] == [
        *("gcloud", "compute", "tpus", "queued-resources", "create", "tiny", "--node-id=tiny"),
        *("--accelerator-type=v4-16", "--runtime-version=tpu-ubuntu2204-base", "--spot"),
        *("--valid-until-duration=6h", "--project=proj", "--zone=us-central2-b", "--quiet"),
    ]
    shown = [line.split(" is ")[1] for line in result.stderr.splitlines() if " is " in line]
    assert [line.split(",")[0] for line in shown] == [
        *("WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
    ]
    assert result.stderr.endswith("tiny: the job has finished\n")


def test_every_worker_gets_the_arguments_unchanged(cloud):
    assert cloud.run("launch").returncode == 0
    assert cloud.job_arguments() == [["-m", "bert_jax.pretrain", *JOB, *TWO_HOSTS]] * 2


def test_a_single_host_is_not_told_of_others(cloud):
    cloud.plan(workers=1)
    assert cloud.run("launch", accelerator_type="v6e-8").returncode == 0
    assert cloud.job_arguments() == [["-m", "bert_jax.pretrain", *JOB]]


@pytest.mark.parametrize("end", [PREEMPTED, [PREEMPTED, 0], [LOST, 75], "vanish"])
def test_a_preempted_job_is_started_again_on_a_new_slice(cloud, end):
    cloud.plan(states=[UP, UP], jobs=[end, 0])
    result = cloud.run("launch")
    assert result.returncode == 0, result.stderr
    assert cloud.steps() == [*SET_UP, "delete", *SET_UP, "delete"]
    creates = [call for call in cloud.calls() if "create" in call]
    assert creates[0] == creates[1]
    starts = [call for call in cloud.calls() if any("worker.sh start" in word for word in call)]
    assert starts[0] == starts[1]


def test_a_slice_that_is_taken_back_before_the_job_runs_is_asked_for_again(cloud):
    cloud.plan(states=[["PROVISIONING", "SUSPENDED"], UP], jobs=[None, 0])
    assert cloud.run("launch").returncode == 0
    assert cloud.steps() == ["create", "delete", *SET_UP, "delete"]


def test_max_restarts_ends_it(cloud):
    cloud.plan(states=[UP] * 2, jobs=[75] * 2)
    result = cloud.run("launch", "--max_restarts=1")
    assert result.returncode == 75
    assert cloud.steps() == [*SET_UP, "delete"] * 2
    assert "after 1 of 1 restarts" in result.stderr
    assert "`launch` goes on from its last checkpoint" in result.stderr


def test_a_job_that_aborts_for_another_reason_than_a_lost_host_has_failed(cloud):
    cloud.plan(jobs=["abort"])
    result = cloud.run("launch")
    assert result.returncode == 1 and f"exit status {ABORTED}\n" in result.stdout


@pytest.mark.parametrize("end", [1, [0, 1], [75, 3]])
def test_a_failed_job_is_not_started_again_and_its_log_is_shown(cloud, end):
    cloud.plan(jobs=[end])
    result = cloud.run("launch")
    assert result.returncode == 1 and "the job failed" in result.stderr
    assert cloud.steps() == [*SET_UP, "last_lines", "delete"]
    worker, code = ("worker0", 1) if end == 1 else ("worker1", end[1])
    assert f"== slice1-{worker}, exit status {code}\nthe job of" in result.stdout


def test_a_slice_can_be_kept(cloud):
    result = cloud.run("launch", "--nodelete_when_done")
    assert result.returncode == 0 and cloud.steps() == SET_UP
    assert "costs money until you `delete` it" in result.stderr


def test_a_failed_request_says_what_to_do_and_is_not_repeated(cloud):
    cloud.plan(states=[["WAITING_FOR_RESOURCES", "FAILED"]])
    result = cloud.run("create")
    assert result.returncode == 1 and cloud.steps() == ["create"]
    assert "tiny is FAILED (quota, capacity" in result.stderr and "`delete` it" in result.stderr
    assert cloud.run("delete").returncode == 0
    assert cloud.run("launch").returncode == 1  # No second slice is planned: create fails.
    assert cloud.steps()[-1] == "create"


def test_a_silent_network_is_asked_again_and_a_dead_one_is_reported(cloud):
    cloud.plan(states=[["PROVISIONING", "ACTIVE"]], silent=3)
    result = cloud.run("create")
    assert result.returncode == 0 and result.stderr.count("network is unreachable") == 3
    cloud.plan(silent=99)
    result = cloud.run("status")
    assert result.returncode == 1 and "no answer about tiny" in result.stderr.splitlines()[-1]


def test_who_is_not_logged_in_is_told_so_at_once(cloud):
    cloud.plan(logged_out=True)
    result = cloud.run("launch")
    assert result.returncode == 1 and len(cloud.calls()) == 1
    assert "not logged in: no active account" in result.stderr.splitlines()[-1]


def test_a_dropped_connection_is_tried_again_and_a_dead_one_ends_the_launch(cloud):
    cloud.plan(dropped=2)
    result = cloud.run("launch")
    assert result.returncode == 0 and result.stderr.count("trying again") == 2
    assert cloud.steps() == ["create", "scp", "scp", *SET_UP[1:], "delete"]
    cloud.plan(dropped=99, states=[["ACTIVE"]] * 2)
    result = cloud.run("launch")
    assert result.returncode == 1 and "scp" in result.stderr.splitlines()[-1]


def test_what_was_done_though_its_answer_was_lost_is_not_done_twice(cloud):
    cloud.plan(unheard=["sh start", "delete"])
    result = cloud.run("launch")
    assert result.returncode == 0 and result.stderr.count("connection lost") == 2, result.stderr
    assert cloud.steps() == [*SET_UP[:-1], "start", "follow", "delete"]


def test_a_slice_that_cannot_be_asked_about_is_left_alone(cloud):
    """Twenty times in a row: who watches is off the network, and the job perhaps well."""
    cloud.plan(jobs=["silence"])
    result = cloud.run("launch")
    assert result.returncode == 1 and "`launch` takes it over" in result.stderr.splitlines()[-1]
    assert "delete" not in cloud.steps()
    assert cloud.run("status", job=None).stdout.count("running") == 2


def test_a_slice_that_is_not_deleted_is_said_to_cost_money(cloud):
    cloud.plan(undeletable=2)
    assert cloud.run("launch").returncode == 0
    assert cloud.steps() == [*SET_UP, *["delete"] * 3]
    cloud.plan(undeletable=3, states=[UP] * 2, jobs=[0] * 2)
    result = cloud.run("launch")
    assert result.returncode == 1 and "and may cost money" in result.stderr.splitlines()[-1]


def test_a_lost_node_under_an_active_request_counts_as_lost(cloud):
    assert cloud.run("create").returncode == 0
    state = json.loads((cloud.path / "state.json").read_text())
    (cloud.path / "state.json").write_text(json.dumps(state | {"node": "PREEMPTED"}))
    assert "tiny: PREEMPTED" in cloud.run("status").stdout


def test_ctrl_c_leaves_the_job_stop_ends_it_and_launch_takes_it_over(cloud):
    cloud.plan(jobs=["wait"])
    launched = subprocess.Popen(
        cloud.command("launch"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=cloud.environment,
        start_new_session=True,
    )
    for line in launched.stdout:
        if "began" in line:
            break
    os.killpg(launched.pid, signal.SIGINT)
    _, errors = launched.communicate()
    assert launched.returncode == 1
    assert "interrupted. Nothing was stopped in the cloud" in errors.splitlines()[-1]
    assert "delete" not in cloud.steps()

    status = cloud.run("status", job=None)
    assert status.stdout == "tiny: ACTIVE\nslice1-worker0: running\nslice1-worker1: running\n"
    again = cloud.run("run", job=[*JOB, "--config.seed=1"])
    assert again.returncode == 1 and "another job is running already" in again.stderr
    assert cloud.run("stop", job=None).returncode == 0
    followed = cloud.run("follow", job=None)
    assert followed.returncode == 0 and "the job was stopped" in followed.stderr
    assert cloud.run("status", job=None).stdout.count("stopped") == 2


def test_follow_tells_a_preemption_by_its_exit_status(cloud):
    cloud.plan(jobs=[75])
    for action in ("create", "copy", "install"):
        assert cloud.run(action, job=None).returncode == 0
    nothing = cloud.run("follow", job=None)
    assert nothing.returncode == 1 and "no job has been started" in nothing.stderr
    assert cloud.run("run").returncode == 75
    assert cloud.run("follow", job=None).returncode == 75


@pytest.mark.parametrize("backend", ["gcloud", "xpk"])
def test_a_dry_run_prints_every_command_and_calls_nothing(cloud, backend):
    flags = {"cluster": "pod", "backend": "xpk"} if backend == "xpk" else {}
    printed = cloud.run("launch", "--dry_run", **flags)
    assert printed.returncode == 0, printed.stderr
    assert not cloud.calls() and "It takes every command to succeed" in printed.stderr
    cloud.plan(waits=[0])
    assert cloud.run("launch", **flags).returncode == 0
    commands = [shlex.split(line) for line in printed.stdout.splitlines()]
    assert all(call in commands for call in cloud.calls())


def test_only_what_is_committed_is_copied_and_changes_are_refused(cloud):
    (cloud.checkout / "notes.txt").write_text("not committed")
    result = cloud.run("launch", "--nodelete_when_done")
    assert result.returncode == 0 and "not committed: notes.txt" in result.stderr
    code = cloud.path / "slice1-worker1" / "launch" / "code"
    assert sorted(path.name for path in code.iterdir()) == [".gitignore", "configs", "tools"]
    (cloud.checkout / ".gitignore").write_text("changed")
    result = cloud.run("launch")
    assert result.returncode == 1 and "have changed since: .gitignore" in result.stderr
    assert cloud.steps() == SET_UP  # Nor is what is there deleted.
    shutil.rmtree(cloud.checkout / ".git")
    cloud.git("init", "--quiet")
    result = cloud.run("copy")
    assert result.returncode == 1 and "only commits are copied" in result.stderr


def test_xpk_runs_follows_and_deletes_the_workload(cloud):
    cloud.plan(waits=[124, 0])
    result = cloud.run("launch", "--num_slices=2", backend="xpk", cluster="pod")
    assert result.returncode == 0, result.stderr
    create, *rest = cloud.calls()
    assert create[:3] == ["xpk", "workload", "create"] and create.count("--storage=data") == 1
    assert {"--workload=tiny", "--tpu-type=v4-16", "--num-slices=2"} < set(create)
    assert {"--max-restarts=20", "--restart-on-exit-codes=75"} < set(create)
    command = next(word for word in create if word.startswith("--command="))
    job = ["python", "-m", "bert_jax.pretrain", "--join_seconds=1800", *JOB]
    job += ["--multihost", "--num_processes=4"]  # The user's own --join_seconds would come last.
    assert shlex.split(command.partition(" exec ")[2]) == job
    code = next(word for word in create if word.startswith("--script-dir=")).partition("=")[2]
    assert (pathlib.Path(code) / "tools" / "launch_tpu.py").exists()
    assert [call[0] for call in rest] == ["xpk", "kubectl", "xpk"] * 2 + ["xpk"]
    assert rest[-1][:4] == ["xpk", "workload", "delete", "--workload=tiny"]


def test_xpk_reports_a_failed_workload(cloud):
    cloud.plan(waits=[125])
    result = cloud.run("launch", backend="xpk", cluster="pod")
    assert result.returncode == 1 and "the job failed" in result.stderr


def test_number_of_hosts_of_each_kind_of_slice():
    hosts = {"v2-8": 1, "v3-32": 4, "v4-32": 4, "v4-128": 16, "v5p-32": 4}
    hosts |= {"v5litepod-1": 1, "v5litepod-8": 1, "v5litepod-16": 4, "v6e-4": 1, "v6e-64": 16}
    assert {name: hosts_of_slice(name) for name in hosts} == hosts
    for name in ("v4", "v4-12", "v4-0", "v5e-16", "v6e-2", "v6e-12", "tpu-8", "v4-32x"):
        with pytest.raises(LaunchError, match="v5litepod-N or v6e-N"):
            hosts_of_slice(name)


@pytest.mark.parametrize(
    ("action", "settings", "message"),
    [
        ("launch", {"accelerator_type": "v4-33"}, "--accelerator_type=v4-33 is unknown: expected"),
        ("launch", {"name": "Tiny_1"}, "--name=Tiny_1: expected at most 40 of a-z"),
        ("launch", {"zone": None}, "--zone must have a value"),
        ("launch", {"bucket": None}, "launch needs --bucket"),
        ("launch", {"job": None}, "needs the arguments of the run: -- --config="),
        ("run", {"job": ["--config=a.py", "--workdir=runs"]}, "--workdir=runs is lost with the"),
        ("run", {"bucket": ""}, "2 hosts must share the workdir: give --bucket"),
        (
            "launch",
            {"job": ["--config=new.py:v4", "--workdir=/gcs/a"]},
            "new.py is not in",
        ),
        ("run", {"job": ["--config=../a.py", "--workdir=/gcs/a"]}, "without that in front"),
        ("fly", {}, "expected one of launch, create, copy"),
        ("stop", {"backend": "xpk", "cluster": "pod"}, "expected one of launch, run, follow"),
        ("launch", {"backend": "xpk"}, "--backend=xpk needs --cluster"),
        ("launch", {"cluster": "pod"}, "--cluster means nothing to --backend=gcloud"),
        ("run", {"backend": "xpk", "cluster": "pod", "spot": "true"}, "--spot means nothing to"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_called(cloud, action, settings, message):
    result = cloud.run(action, **settings)
    assert result.returncode == 1 and message in result.stderr + result.stdout
    assert "Traceback" not in result.stderr and not cloud.calls()


@pytest.mark.parametrize("backend", ["gcloud", "xpk"])
@pytest.mark.parametrize("action", ["launch", "run"])
def test_a_job_that_launch_check_refuses_calls_nothing(cloud, backend, action):
    refuses = "import sys; sys.exit(f'the mesh does not divide {sys.argv[1:3]}')"
    (cloud.checkout / "tools/launch_check.py").write_text(refuses)
    flags = {"cluster": "pod", "backend": "xpk"} if backend == "xpk" else {}
    result = cloud.run(action, **flags)
    assert result.returncode == 1 and not cloud.calls()
    assert "the job would fail: the mesh does not divide ['v4-16', '1']" in result.stderr


@pytest.mark.parametrize(
    ("backend", "missing"), [("gcloud", "git and gcloud"), ("xpk", "git and xpk and kubectl")]
)
def test_a_missing_program_is_named(cloud, backend, missing):
    (cloud.path / "empty").mkdir()
    cloud.environment["PATH"] = str(cloud.path / "empty")
    result = cloud.run("status", backend=backend, cluster="pod" if backend == "xpk" else None)
    assert result.returncode == 1
    assert f"launch_tpu: {missing}" in result.stderr and "on the PATH" in result.stderr


def test_number_of_chips_of_each_kind_of_slice():
    chips = {"v3-32": ("v3", 16), "v4-128": ("v4", 64), "v5p-8": ("v5p", 4), "v6e-64": ("v6e", 64)}
    chips["v5litepod-16"] = ("v5e", 16)
    assert {name: chips_of_slice(name) for name in chips} == chips
