"""Runs a pre-training on a TPU slice of any number of hosts, and again when it was preempted.

python tools/launch_tpu.py launch --name=base --project=PROJECT --zone=us-central2-b \
    --accelerator_type=v4-32 --spot --bucket=BUCKET -- \
    --config=configs/pretrain/bert_base.py --workdir=/gcs/runs/base --config.corpus=/gcs/corpus/128

What follows `--` are arguments of `python -m bert_jax.pretrain`. The actions:

launch    create, copy, install, run and follow; after a preemption all of them again; delete
create    ask for the slice (a queued resource) and wait for it
copy      the last commit of this checkout, to every worker
install   the pinned packages, on every worker; mounts --bucket at /gcs
run       start the job on every worker, in the background; follow
follow    show the log of worker 0 until the job ends; Ctrl-C leaves the job alone
status    of the slice, and of the job on every worker
stop      SIGTERM to the job on every worker: it saves, and exits with 75
delete    the slice, after which it costs nothing

--backend=xpk does the same on a GKE cluster, which copies, installs and restarts by itself: its
actions are launch, run, follow, status and delete. --dry_run prints the commands, and runs none.
docs/cloud_tpu.md tells the whole path.
"""

import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import launch_commands as commands
from absl import app, flags
from launch_commands import LaunchError, Target, hosts_of_slice

from bert_jax.runtime.exit_status import PREEMPTED

BACKEND = flags.DEFINE_enum("backend", "gcloud", ["gcloud", "xpk"], "Cloud TPU; GKE through xpk.")
DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the commands, run none.")
DELETE_WHEN_DONE = flags.DEFINE_bool(
    "delete_when_done", True, "`launch` deletes the slice at the end, whatever the end."
)
POLL_SECONDS = flags.DEFINE_float("poll_seconds", 30, "Between two questions about a state.", 0)
# The fields of Target.
flags.DEFINE_string("name", None, "Of the slice or workload.", required=True)
flags.DEFINE_string("project", None, "Google Cloud project.", required=True)
flags.DEFINE_string("zone", None, "For instance us-central2-b.", required=True)
flags.DEFINE_string("accelerator_type", None, "For instance v4-32 or v6e-16.", required=True)
flags.DEFINE_string("bucket", "", "Bucket mounted at /gcs; xpk: the attached storage's name.")
flags.DEFINE_bool("spot", False, "gcloud: at the spot price, and preemptible.")
flags.DEFINE_string("runtime_version", "", "gcloud: empty chooses by the accelerator type.")
flags.DEFINE_string("service_account", "", "gcloud: empty is the project's default.")
flags.DEFINE_string("valid_until_duration", "", "gcloud: give up queueing after it, as in 6h.")
flags.DEFINE_string("cluster", "", "xpk: the GKE cluster.")
flags.DEFINE_integer("num_slices", 1, "xpk: slices of accelerator_type.", 1)
flags.DEFINE_integer("max_restarts", 20, "Of `launch`, after preemptions.", 0)

GCLOUD_ONLY = ("spot", "runtime_version", "service_account", "valid_until_duration")
XPK_ONLY = ("cluster", "num_slices")
DRY_RUN_ASSUMES = (
    "launch_tpu: a dry run. It takes every command to succeed, the slice to become ACTIVE at once, "
    "and the job to finish without a preemption"
)
ROOT = pathlib.Path(__file__).parents[1]
RESULTS = {
    "finished": "the job has finished",
    "failed": "the job failed; its last lines are above, and starting it again would not help",
    "stopped": "the job was stopped; `run` goes on from its last checkpoint",
    "preempted": "the job was preempted; `launch` goes on from its last checkpoint",
    "none": "no job has been started: `run` starts it",
}
# States of a queued resource, and of its node, from which a slice does not come back.
LOST = ("GONE", "FAILED", "SUSPENDING", "SUSPENDED", "DELETING", "PREEMPTED", "TERMINATED")


class NoAnswer(RuntimeError):
    """The cloud cannot be asked: what is there is left as it is."""


def say(text: str) -> None:
    if not DRY_RUN.value:
        print(f"launch_tpu: {text}", file=sys.stderr, flush=True)


def execute(command: list[str], check: bool = True, tries: int = 1) -> int:
    """Runs the command and returns its exit status; LaunchError if `check` and that is not 0.

    `tries` is for what may fail by the network, and can be done again.
    """
    print(shlex.join(command), flush=True)
    if DRY_RUN.value:
        return 0
    status = subprocess.run(command, check=False).returncode
    for _ in range(tries - 1):
        if status:
            say(f"exit status {status}, trying again")
            time.sleep(POLL_SECONDS.value)
            status = subprocess.run(command, check=False).returncode
    if check and status:
        raise LaunchError(f"`{shlex.join(command[:5])} ...` failed with exit status {status}")
    return status


def ask(command: list[str], pretended: str) -> subprocess.CompletedProcess:
    """Runs the command for its output; a dry run takes that to be what is `pretended`."""
    if DRY_RUN.value:
        print(shlex.join(command), flush=True)
        return subprocess.CompletedProcess(command, 0, pretended, "")
    return subprocess.run(command, check=False, capture_output=True, text=True)


def git(*words: str) -> str:
    answer = subprocess.run(["git", *words], check=False, capture_output=True, text=True, cwd=ROOT)
    if answer.returncode:
        reason = answer.stderr.strip().splitlines()[0]
        raise LaunchError(f"only commits are copied, and {ROOT} has none: git says {reason!r}")
    return answer.stdout.strip()


def pack(target: Target) -> str:
    """Packs the last commit and returns where: a directory for xpk, else a .tar.gz."""
    commit = git("rev-parse", "--short", "--verify", "HEAD")
    if changed := git("diff", "--name-only", "HEAD"):
        files = ", ".join(changed.splitlines())
        raise LaunchError(f"only commits are copied, and these files have changed since: {files}")
    if untracked := git("ls-files", "--others", "--exclude-standard"):
        say(f"not copied, since not committed: {', '.join(untracked.splitlines())}")
    packed = f"{tempfile.gettempdir()}/{target.name}-{commit}"
    if BACKEND.value == "xpk":
        words = ["checkout-index", "--all", "--force", f"--prefix={packed}/"]
    else:
        packed += ".tar.gz"
        words = ["archive", f"--output={packed}", "HEAD"]
    execute(["git", "-C", str(ROOT), *words])
    return packed


def slice_state(target: Target) -> str:
    """Of the queued resource or of its lost node; GONE if there is none."""
    for _ in range(20):  # The network between here and there may fail for a while.
        answer = ask(commands.describe(target), pretended="ACTIVE")
        if answer.returncode == 0:
            break
        if "NOT_FOUND" in answer.stderr:
            return "GONE"
        if "gcloud auth login" in answer.stderr:
            raise NoAnswer(f"gcloud is not logged in: {' '.join(answer.stderr.split())}")
        say(f"no answer about {target.name}, asking again: {answer.stderr.strip()}")
        time.sleep(POLL_SECONDS.value)
    else:
        raise NoAnswer(
            f"no answer about {target.name}, which may exist, go on with its job and cost money: "
            "once the network is back, `status` tells, `launch` takes it over, `delete` ends it"
        )
    state = answer.stdout.strip()
    if state == "ACTIVE":  # It stays so for a while after its node is lost.
        node = ask(commands.describe_node(target), pretended="READY").stdout.strip()
        state = node if node in LOST else state
    return state


def job_states(target: Target) -> dict[str, str]:
    """{host name: exit status, running, stopped, lost or none}, of the workers that answer."""
    pretended = "\n".join(f"worker-{index} 0" for index in range(target.num_hosts))
    answer = ask(commands.on_workers(target, "status"), pretended)
    return dict(re.findall(r"^(\S+) (\d+|running|stopped|lost|none)$", answer.stdout, re.MULTILINE))


def job_result(states: dict[str, str], num_hosts: int) -> str:
    """finished, failed, stopped, preempted, none; or running, also while only some workers are."""
    values = set(states.values())
    if values - {"0", str(PREEMPTED), "running", "stopped", "lost", "none"}:
        return "failed"
    if len(states) < num_hosts or "running" in values:
        return "running"
    if "stopped" in values:
        return "stopped"
    return {"0": "finished", "none": "none"}.get("".join(values), "preempted")


# The actions. Those that see the job end return its `job_result`.


def create(target: Target) -> None:
    execute(commands.create(target))
    wait_for_slice(target)


def wait_for_slice(target: Target) -> None:
    began, shown, polls = time.monotonic(), "", 0
    while (state := slice_state(target)) != "ACTIVE" and state not in LOST:
        if state != shown or polls % 20 == 0:
            say(f"{target.name} is {state}, {(time.monotonic() - began) / 60:.0f} minutes so far")
        shown, polls = state, polls + 1
        time.sleep(POLL_SECONDS.value)
    if state != "ACTIVE":
        why = "quota, capacity or a wrong argument" if state == "FAILED" else "it was taken back"
        reason = shlex.join(commands.describe(target)).replace("state.state", "state")
        raise LaunchError(
            f"{target.name} is {state} ({why}): see `{reason}`; `delete` it and try again, "
            "perhaps in another zone or without --spot"
        )
    say(f"{target.name} is ACTIVE, and costs money")


def copy(target: Target, archive: str = "") -> None:
    execute(commands.scp(target, archive or pack(target)), tries=3)
    unpack = "rm -rf launch/code && mkdir -p launch/code && tar -xzf launch.tar.gz -C launch/code"
    execute(commands.ssh(target, unpack), tries=3)


def install(target: Target) -> None:
    execute(commands.on_workers(target, "install"), tries=3)
    if target.bucket:
        execute(commands.on_workers(target, "mount", target.bucket), tries=3)


def run(target: Target) -> str:
    execute(commands.on_workers(target, "start", *commands.job_arguments(target)), tries=3)
    return follow(target)


def follow(target: Target) -> str:
    patience = 20
    while patience:
        execute(commands.on_workers(target, "follow", worker="0"), check=False)
        states = job_states(target)
        result = job_result(states, target.num_hosts)
        if result in ("running", "failed") and slice_state(target) in LOST:
            break  # Whatever the hosts that are left say of it.
        if result == "failed":
            execute(commands.on_workers(target, "last_lines"), check=False)
        if result != "running":
            return result
        say(f"the job on the workers: {states or 'none answers'}")
        patience -= bool(set(states.values()) - {"running"})  # The others should end soon, too.
        time.sleep(POLL_SECONDS.value)
    return "preempted"


def attempt(target: Target, archive: str, again: bool) -> str:
    """Brings the job up, on a fresh slice if `again`, and follows it."""
    state = "GONE" if DRY_RUN.value else slice_state(target)
    if state != "GONE" and (again or state in LOST):
        delete(target)
        state = "GONE"
    if state == "ACTIVE" and "running" in job_states(target).values():
        say(f"a job is running on {target.name} already: following it")
        return follow(target)
    if state == "GONE":
        execute(commands.create(target))
    wait_for_slice(target)
    copy(target, archive)
    install(target)
    return run(target)


def supervise(target: Target, archive: str) -> str:
    """From nothing to the end of the job, through preemptions."""
    for restarts in range(target.max_restarts + 1):
        try:
            result = attempt(target, archive, again=restarts > 0)
        except LaunchError:
            if slice_state(target) not in set(LOST) - {"FAILED", "GONE"}:
                raise
            result = "preempted"
        if result != "preempted":
            break
        say(f"{target.name} was preempted, after {restarts} of {target.max_restarts} restarts")
    return result


def launch(target: Target) -> str:
    on_gcloud = BACKEND.value == "gcloud"
    packed = pack(target)  # Once: a restart runs the same code, whatever is committed meanwhile.
    try:
        result = supervise(target, packed) if on_gcloud else run_workload(target, packed)
    except LaunchError as error:
        result = error
    if not DELETE_WHEN_DONE.value:
        say(f"{target.name} is kept, and costs money until you `delete` it")
    elif not on_gcloud or slice_state(target) != "GONE":
        delete(target)
    if isinstance(result, LaunchError):
        raise result
    return result


def status(target: Target) -> None:
    if BACKEND.value == "xpk":
        execute(commands.xpk(target, "list", f"--filter-by-job=^{target.name}$"))
        return
    print(f"{target.name}: {slice_state(target)}")
    for host, state in sorted(job_states(target).items()):
        print(f"{host}: {state}")


def stop(target: Target) -> None:
    execute(commands.on_workers(target, "stop"))


def delete(target: Target) -> None:
    if BACKEND.value == "xpk":
        execute(commands.xpk(target, "delete", f"--workload={target.name}", "--force"))
        return
    for _ in range(3):  # What is left costs money.
        if not execute(commands.delete(target), check=False) or slice_state(target) == "GONE":
            return
    raise LaunchError(f"{target.name} is not deleted, and may cost money: see above, and `delete`")


def follow_workload(target: Target) -> str:
    waiting = (f"--wait-for-job-completion={target.name}", "--timeout=1")
    while True:
        status(target)  # Logs kubectl in, besides.
        execute(commands.kubectl_logs(target), check=False)
        code = execute(commands.xpk(target, "list", *waiting), check=False)
        if code != 124:  # xpk's "not yet"; 125 is "ended, but not well".
            break
        time.sleep(POLL_SECONDS.value)
    if code not in (0, 125):
        raise LaunchError(f"xpk does not know how {target.name} ended: see `status`")
    return "failed" if code else "finished"


def run_workload(target: Target, code: str = "") -> str:
    execute(commands.xpk_create(target, code or pack(target)))
    return follow_workload(target)


ACTIONS = {
    "gcloud": {
        "launch": launch,
        "create": create,
        "copy": copy,
        "install": install,
        "run": run,
        "follow": follow,
        "status": status,
        "stop": stop,
        "delete": delete,
    },
    "xpk": {
        "launch": launch,
        "run": run_workload,
        "follow": follow_workload,
        "status": status,
        "delete": delete,
    },
}


def target_from_flags(arguments: list[str]) -> Target:
    """LaunchError for what would otherwise go wrong later, on machines that cost money."""
    backend = BACKEND.value
    for name in GCLOUD_ONLY if backend == "xpk" else XPK_ONLY:
        if flags.FLAGS[name].present:
            raise LaunchError(f"--{name} means nothing to --backend={backend}")
    fields = [field.name for field in dataclasses.fields(Target) if field.name != "arguments"]
    target = Target(*(flags.FLAGS[name].value for name in fields), tuple(arguments))
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", target.name):
        raise LaunchError(
            f"--name={target.name}: expected at most 40 of a-z, 0-9 and -, first a letter, last "
            "not -"
        )
    if backend == "xpk" and not target.cluster:
        raise LaunchError("--backend=xpk needs --cluster, the GKE cluster to run on")
    hosts_of_slice(target.accelerator_type)
    return target


def check_job(action: str, target: Target) -> None:
    """LaunchError if the job could not run on the slice, or would leave nothing behind."""
    words = dict(
        re.findall(r"^--(workdir|config)=(.*)$", "\n".join(target.arguments), re.MULTILINE)
    )
    if len(words) < 2:
        raise LaunchError(f"{action} needs the arguments of the run: -- --config=... --workdir=...")
    if action == "launch" and not target.bucket:
        raise LaunchError("launch needs --bucket: it deletes the slice and what is on its disks")
    if not re.fullmatch(r"([a-z0-9][a-z0-9._-]{1,61}[a-z0-9])?", target.bucket):
        raise LaunchError(
            f"--bucket={target.bucket}: expected a name alone, without gs:// or a path"
        )
    if target.num_hosts > 1 and not target.bucket:
        raise LaunchError(f"{target.num_hosts} hosts must share the workdir: give --bucket")
    if target.bucket and not words["workdir"].startswith("/gcs/"):
        raise LaunchError(
            f"--workdir={words['workdir']} is lost with the slice: expected one below /gcs, where "
            "--bucket is"
        )
    config = words["config"].partition(":")[0]
    if config.startswith(("/", "..")):  # Even one that is in a commit lies elsewhere on the hosts.
        raise LaunchError(f"--config={config}: expected a path below {ROOT}, without that in front")
    if not git("ls-files", config):
        raise LaunchError(f"--config={config} is not in a commit, and only commits are copied")
    check = [sys.executable, str(ROOT / "tools" / "launch_check.py")]
    check += [target.accelerator_type, str(target.num_slices), *target.arguments]
    answer = subprocess.run(check, check=False, capture_output=True, text=True, cwd=ROOT)
    if answer.returncode:
        raise LaunchError(f"the job would fail: {' '.join(answer.stderr.split())}")


def main(argv: list[str], arguments: list[str]) -> None:
    try:
        actions = ACTIONS[BACKEND.value]
        if len(argv) != 2 or argv[1] not in actions:
            raise LaunchError(
                f"expected one of {', '.join(actions)}, got {shlex.join(argv[1:]) or 'nothing'}; "
                "arguments of the run go behind --"
            )
        target = target_from_flags(arguments)
        needed = {"gcloud": ["gcloud"], "xpk": ["xpk", "kubectl"]}[BACKEND.value]
        needed = ["git"] if DRY_RUN.value else ["git", *needed]
        if missing := [program for program in needed if not shutil.which(program)]:
            raise LaunchError(
                f"{' and '.join(missing)} not found on the PATH: docs/cloud_tpu.md says what to "
                "install; --dry_run needs only git"
            )
        if argv[1] in ("launch", "run"):
            check_job(argv[1], target)
        result = actions[argv[1]](target)
        if DRY_RUN.value:
            print(DRY_RUN_ASSUMES, file=sys.stderr)
    except (LaunchError, NoAnswer) as error:
        sys.exit(f"launch_tpu: {error}")
    except KeyboardInterrupt:
        sys.exit(
            "\nlaunch_tpu: interrupted. Nothing was stopped in the cloud: `follow` goes on "
            "showing the job, `launch` also restarts it after a preemption, and the slice costs "
            "money until you `delete` it"
        )
    if result:
        say(f"{target.name}: {RESULTS[result]}")
        sys.exit({"finished": 0, "stopped": 0, "preempted": PREEMPTED}.get(result, 1))


if __name__ == "__main__":
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    flags.FLAGS.set_gnu_getopt()  # Flags may follow the action.
    app.run(lambda argv: main(argv, sys.argv[end + 1 :]), argv=sys.argv[:end])
