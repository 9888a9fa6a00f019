"""Claims a workdir for a run, compares its settings with the stored ones, and writes files."""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import secrets
import shlex
import socket
from collections.abc import Collection, Iterator
from typing import TextIO

import jax
from absl import logging
from flax.traverse_util import flatten_dict

import bert_jax
from bert_jax.checkpoints.native import load_settings, saved_steps
from bert_jax.runtime import distributed
from bert_jax.runtime.buckets import is_bucket
from bert_jax.runtime.errors import CheckpointError

CLAIM = ".shared"  # A random text, written by process 0 of the last run.

# Settings that may differ: not fields of a configuration.
NO_FIELDS = (
    # Derived from others; checkpoints of earlier versions lack them.
    "languages",
    "trained_length",
    "unreported",
    "evaluations_since_best",
    "pruned",
    "owes_evaluation",
    "lowest_loss",
    "recent_losses",
    # Fields of earlier versions.
    "topology",
    "stacked_trials",
    # Written only to the checkpoint in `best`.
    "has_training_state",
    "score",
    "scores",
    "step",
    "tuned_head_settings",
)


def claim_workdir(
    workdir: pathlib.Path, settings: dict, may_change: Collection[str] = ()
) -> contextlib.AbstractContextManager:
    """Locks a new workdir, or one of a run with the same `settings`, and writes its config.json.

    `may_change` names the fields in which the run may have differed.

    Every process of a run must call it, and hold the result, the lock, as long as the run writes.
    A bucket has no locks: there the last run that claims a workdir has it; see `check_claim`.
    Raises ValueError if another run holds the lock, if the workdir holds checkpoints with other
    settings, or if settings, code or workdir differ between processes; CheckpointError if the
    settings of the last checkpoint cannot be read; OSError if the workdir cannot be written.
    """
    flat = flatten_dict(json.loads(json.dumps(settings)), sep=".")  # JSON turns tuples into lists.
    distributed.check_equal_on_all_processes(flat | {"workdir": str(workdir)} | _code_version())
    token = distributed.allgather_texts(secrets.token_hex())[0]
    path = workdir / CLAIM
    with contextlib.ExitStack() as lock:  # Releases the lock after an error.
        with distributed.raise_on_all_processes():
            if jax.process_index() == 0:
                if not is_bucket(workdir):
                    lock.enter_context(_lock(workdir))
                check_settings(workdir, flat, may_change)
                write_json(workdir / "config.json", settings)
                write_text(path, token)
        with distributed.raise_on_all_processes():
            if not path.exists() or path.read_text(encoding="utf-8") != token:
                raise ValueError(
                    f"workdir {workdir} is not the directory of process 0: all hosts must share "
                    "it, for instance as a mounted bucket"
                )
        return lock.pop_all()


def _lock(workdir: pathlib.Path) -> TextIO:
    """Creates `workdir`; returns its lock, an open file that is released when the process ends.

    On a mounted bucket only this host sees the lock: two hosts do not notice each other.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = (workdir / ".lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise OSError(f"workdir {workdir}: {error}. Expected a writable directory") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise ValueError(
            f"workdir {workdir} is in use by {lock.read() or 'another process'}: wait until it "
            "ends, or stop it, or use another workdir"
        ) from None
    except OSError as error:
        logging.warning("%s: %s. Make sure that no other run uses it", lock.name, error)
    with contextlib.suppress(OSError):  # On a full disk the lock does not name its holder.
        lock.truncate(0)
        os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
    return lock


def _code_version() -> dict[str, str]:
    """Identifies the code: hosts that run different programs would deadlock or diverge."""
    root, code = pathlib.Path(bert_jax.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        code.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return {"version of jax": jax.__version__, "hash of bert_jax/*.py": code.hexdigest()[:12]}


def read_claim(workdir: pathlib.Path) -> str:
    """Returns what identifies the run that has claimed `workdir`."""
    path = workdir / CLAIM
    return path.read_text(encoding="utf-8") if path.exists() else ""


def check_claim(workdir: pathlib.Path, claim: str) -> None:
    """Raises ValueError if another run has claimed `workdir` since `read_claim` returned `claim`.

    A run checks it before each save to a bucket: a new run does not wait for a killed one, and one
    that still runs does not overwrite what the new run writes.
    """
    if read_claim(workdir) != claim:
        raise ValueError(
            f"workdir {workdir}: another run has started in it, and this one stops. Run one at a "
            "time in a workdir"
        )


def check_settings(workdir: pathlib.Path, settings: dict, may_change: Collection[str] = ()) -> None:
    """Raises ValueError if the run in `workdir` had other settings; removes a stale result.

    Fields of `may_change` may differ.
    """
    parents = (workdir / "checkpoints", workdir / "best")
    checkpoints = [parent / str(step) for parent in parents for step in saved_steps(parent)[-1:]]
    result_path = workdir / "result.json"
    result = json.loads(result_path.read_text(encoding="utf-8")) if result_path.exists() else {}
    # A run that diverged or only predicted has no checkpoint, nor has one of a sweep that keeps the
    # weights of its best trials.
    has_none = "diverged" in result or "weights_removed" in result or result.get("steps") == 0
    if not checkpoints and not has_none:
        result_path.unlink(missing_ok=True)  # The checkpoints of an earlier run were removed.
        return
    path = checkpoints[0] if checkpoints else workdir / "config.json"
    try:
        saved = load_settings(path) if checkpoints else json.loads(path.read_text(encoding="utf-8"))
    except CheckpointError as error:
        raise CheckpointError(f"{error}. Remove it to resume from the one before it") from error
    saved = flatten_dict(saved, sep=".")
    advice = "docs/pretraining.md, Stop and resume, lists the fields that may change"
    lengths = {name for name in settings if name.endswith(".num_steps")} | {"num_epochs"}
    if "num_epochs" not in settings:  # In fine-tuning, num_steps follows from the data.
        lengths.add("num_steps")
    if any(saved.get(name) != settings.get(name) for name in lengths):
        advice = f"{how_to_train_further(workdir, settings | saved)}{advice}"
    check_equal_settings(saved, settings, path, may_change, advice)


def how_to_train_further(workdir: pathlib.Path, settings: dict) -> str:
    """Returns what to do instead of extending the run in `workdir`, which has flat `settings`."""
    reason = "A run cannot be extended, because its learning rates depend on num_steps"
    if "init_optimizer" not in settings:  # A fine-tuning run.
        weights = shlex.quote(str(workdir))
        further = f"start another one, in another workdir, with config.init_from={weights}"
        return f"{reason}. To train it further, {further}. "
    if settings.get("decay_steps") is not None:
        lengths = [n for name, n in settings.items() if f".{name}".endswith(".num_steps")]
        stable_step = sum(lengths) - settings["decay_steps"]
        steps = [step for step in saved_steps(workdir / "checkpoints") if step <= stable_step]
        return (
            f"{reason}. To continue from its last step at a constant learning rate, start another "
            "one in another workdir, with other decay_steps, num_steps or later phases, and "
            f"--config.branch_from={shlex.quote(str(workdir))}/checkpoints/"
            f"{max(steps, default=stable_step)}. "
        )
    # With the same seed it would begin with the batches that this run began with.
    return (
        f"{reason}. To train it further for N steps, M of them warm-up, start another one from its "
        "weights and moments, with another seed for other batches and masks:\n"
        f"  python -m bert_jax.pretrain --config=FILE --workdir=DIR "
        f"--config.corpus={shlex.quote(settings['corpus'])} "
        f"--config.init_from={shlex.quote(str(workdir))} "
        f"--config.init_optimizer --config.seed={settings['seed'] + 1} --config.num_steps=N "
        f"--config.warmup_steps=M --config.long_phase.num_steps=0\n"
    )


def check_equal_settings(
    saved: dict, settings: dict, path: pathlib.Path, may_change: Collection[str], advice: str
) -> None:
    """Raises ValueError if flat settings differ from those in `path`, except fields `may_change`.

    `advice` says what can be done instead.
    """
    if differences := describe_differences(saved, settings, path, may_change):
        raise ValueError(
            f"the workdir belongs to a run with other settings:\n{differences}\n"
            f"Use the same settings to resume it, or another workdir to start a new run. {advice}"
        )


def describe_differences(
    saved: dict, settings: dict, path: pathlib.Path, may_change: Collection[str]
) -> str:
    """Returns a line for each flat setting that is not as in `path`, except fields `may_change`."""
    return "\n".join(
        f"  {name}: {_describe_difference(name, saved, settings, path)}"
        for name in sorted(saved.keys() | settings.keys())
        if _compared_value(name, saved) != _compared_value(name, settings)
        if name not in may_change and name.partition(".")[0] not in NO_FIELDS
        # Ignores a field that an earlier version lacked if it is not set now either.
        if name in saved or settings[name]
    )


def _compared_value(name: str, settings: dict) -> object:
    """Returns what is compared of a flat setting: of `branch_from`, which may move, the step."""
    value = settings.get(name)
    return pathlib.PurePath(value).name if name == "branch_from" and value else value


def _describe_difference(name: str, saved: dict, settings: dict, path: pathlib.Path) -> str:
    """Returns how a flat setting differs from the one in `path`; names the file of a hash."""
    then, now = saved.get(name), settings.get(name)
    if name == "corpora" and then and now:
        paths = " or ".join(filter(None, map(settings.get, ("corpus", "long_phase.corpus"))))
        sizes = [" and ".join(map(_describe_rows, corpora)) for corpora in (then, now)]
        changed = "is another corpus or mixture, or was built again"
        return f"{paths} {changed}: {sizes[0]} rows for training in {path}, {sizes[1]} now"
    part, _, field = name.partition(".")
    if part == "contents" and then and now:
        flags = [each for each in (f"data.{field}", field) if settings.get(each)]
        source = f"config.{flags[0]}={settings[flags[0]]}" if flags else field
        return f"{source} has changed: the hash of its contents is {then} in {path}, {now} now"
    return f"{then!r} in {path}, {now!r} now"


def _describe_rows(corpus: dict) -> str:
    """Returns the number of rows of a phase's corpus, or of each corpus and weight of a mixture."""
    counts = [each["splits"]["train"]["rows"] for each in (corpus, *corpus.get("mixture", ()))]
    if len(counts) == 1:
        return f"{counts[0]:,}"
    parts = zip(counts, corpus["weights"], strict=True)
    return " + ".join(f"{count:,} of weight {weight:g}" for count, weight in parts)


def write_json(path: pathlib.Path, value: dict) -> None:
    """Writes `value` as JSON, atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes `text` atomically, even if other processes do: the file is complete or absent."""
    unfinished = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    with add_path_to_errors(path):
        if is_bucket(path):  # An object appears once it is complete.
            path.write_text(text, encoding="utf-8")
            return
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)


@contextlib.contextmanager
def add_path_to_errors(path: pathlib.Path) -> Iterator[None]:
    """Adds `path` and a remedy to the message of an OSError."""
    try:
        yield
    except OSError as error:
        fix = "Make the bucket writable" if is_bucket(path) else "Free disk space"
        raise OSError(
            f"{path} could not be written: {error}. {fix}, and run the same command again"
        ) from error
