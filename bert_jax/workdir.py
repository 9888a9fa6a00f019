"""Whose directory a workdir is: its settings are written once, and compared from then on."""

import json
import pathlib

from bert_jax.checkpoint import saved_steps

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
    "checkpoint_every",
    "keep_",
    "stall_seconds",
    "topology",
    "model.remat",
    "model.scan_layers",
    "bert.remat",
    "bert.scan_layers",
)


def claim_workdir(workdir: pathlib.Path, settings: dict) -> None:
    """Writes config.json; ValueError if the workdir holds checkpoints of other settings."""
    path = workdir / "config.json"
    workdir.mkdir(parents=True, exist_ok=True)
    if not path.exists() or not saved_steps(workdir / "checkpoints"):
        write_json(path, settings)
        return
    found, wanted = flatten(json.loads(path.read_text())), flatten(settings)
    differences = [
        f"  {name}: {found.get(name)!r} in {path}, {wanted.get(name)!r} now"
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name) != wanted.get(name) and not name.startswith(FREE_TO_CHANGE)
    ]
    if differences:
        raise ValueError(
            f"{workdir} belongs to a run with other settings:\n"
            + "\n".join(differences)
            + "\nGive these settings to go on with it, or another --workdir to start anew"
        )


def write_json(path: pathlib.Path, value: dict) -> None:
    """Writes `value` so that the file is whole or not there."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(value, indent=2) + "\n")
    unfinished.replace(path)


def flatten(value, prefix: str = "") -> dict:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    if not isinstance(value, dict):
        return {prefix: value}
    flat = {}
    for name, inner in value.items():
        flat |= flatten(inner, f"{prefix}.{name}" if prefix else name)
    return flat
