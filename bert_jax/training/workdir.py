"""Whose directory a workdir is: its settings are written once, and compared from then on."""

import hashlib
import json
import pathlib
import secrets

import jax

from bert_jax.runtime import distributed
from bert_jax.training.checkpoint import CheckpointError, load_settings, saved_steps

# Settings that a run may be continued with differently: they change nothing, or (the layout over
# devices) only rounding. Where a corpus lies is one of them, since what it holds is compared by
# itself.
FREE_TO_CHANGE = (
    "corpus",
    "long_phase.corpus",
    "mesh.",
    "shard_weight_update",
    "per_device_batch_size",
    "log_every",
    "eval_",
    "num_seeds",
    "checkpoint_every",
    "keep_",
    "stall_seconds",
    "topology",
    "model.remat",
    "model.scan_layers",
    "bert.remat",
    "bert.scan_layers",
    # What the checkpoint in `best` tells of itself.
    "has_training_state",
    "score",
    "step",
)


TOKEN = ".shared"


def claim_together(workdir: pathlib.Path, settings: dict) -> None:
    """`claim_workdir` by the first process; called by all, which must share settings and workdir.

    Raises ValueError in all of them if they do not.
    """
    distributed.check_same_everywhere(flatten(settings) | {"workdir": str(workdir)} | _program())
    token = ""
    with distributed.errors_shared():
        if jax.process_index() == 0:
            claim_workdir(workdir, settings)
            token = secrets.token_hex()  # A text of no meaning, for the others to find there.
            write_text(workdir / TOKEN, token)
    (token, *_) = distributed.gather_texts(token)
    with distributed.errors_shared():
        path = workdir / TOKEN
        if not path.exists() or path.read_text() != token:
            raise ValueError(
                f"--workdir={workdir} is another directory here than in process 0: all hosts must "
                "share it, as by a mounted bucket"
            )


def _program() -> dict[str, str]:
    """What runs: hosts that compile different programs would wait for one another, or diverge."""
    root, code = pathlib.Path(__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        code.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return {"version of jax": jax.__version__, "hash of bert_jax/*.py": code.hexdigest()[:12]}


def claim_workdir(workdir: pathlib.Path, settings: dict) -> None:
    """Writes config.json; ValueError if the workdir holds checkpoints of other settings.

    Raises OSError where nothing can be written, and CheckpointError for a damaged checkpoint.
    """
    if "://" in str(workdir) or ":/" in str(workdir):
        raise ValueError(f"--workdir={workdir}: mount the bucket, and give a path below the mount")
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        for directory in (workdir / "checkpoints", workdir / "best"):
            if steps := saved_steps(directory):
                check_same_settings(directory / str(steps[-1]), settings)
                break
        else:
            # Of a run whose checkpoints are gone.
            (workdir / "result.json").unlink(missing_ok=True)
    except OSError as error:
        raise type(error)(
            f"--workdir={workdir}: {error}. Expected a directory that can be made or written to"
        ) from error
    write_json(workdir / "config.json", settings)


def check_same_settings(checkpoint: pathlib.Path, settings: dict) -> None:
    """ValueError that tells all differences, if `checkpoint` is of other settings.

    CheckpointError if they cannot be read.
    """
    # What JSON makes of them: lists of tuples.
    try:
        saved = load_settings(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. Remove it to go on from what was saved before") from error
    found, wanted = (flatten(each) for each in (saved, json.loads(json.dumps(settings))))
    differences = [
        f"  {name}: {found.get(name)!r} in {checkpoint}, {wanted.get(name)!r} now"
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name) != wanted.get(name) and not name.startswith(FREE_TO_CHANGE)
    ]
    if differences:
        raise ValueError(
            f"{checkpoint.parents[1]} belongs to a run with other settings:\n"
            + "\n".join(differences)
            + "\nGive these settings to go on with it, or another --workdir to start anew"
        )


def write_json(path: pathlib.Path, value: dict) -> None:
    """`write_text` of `value` as JSON."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes `text` so that the file is whole or not there; OSError names the file."""
    unfinished = path.with_name(path.name + ".tmp")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    except OSError as error:
        raise type(error)(
            f"{path} could not be written: {error}. Free the disk (or mend the cause) and run the "
            "same command again"
        ) from error


def flatten(value, prefix: str = "") -> dict:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    if not isinstance(value, dict):
        return {prefix: value}
    flat = {}
    for name, inner in value.items():
        flat |= flatten(inner, f"{prefix}.{name}" if prefix else name)
    return flat
