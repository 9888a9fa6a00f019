"""Reads an entire checkpoint to find any damage, and copies it; `tools/check_checkpoint.py`.

Besides its files, which `checksums.py` compares, it checks the values and shapes of all arrays.
"""

import filecmp
import json
import pathlib
import shutil

import jax
import numpy as np

from bert_jax.checkpoints.checksums import check_files, read_checksums
from bert_jax.checkpoints.native import load_checkpoint, read_arrays, reading
from bert_jax.checkpoints.read import MAX_WEIGHT, abstract_params, count_non_finite
from bert_jax.runtime.buckets import is_bucket
from bert_jax.runtime.errors import CheckpointError


def load_training_state(directory: pathlib.Path) -> dict:
    """Returns `step` and `opt_state` on the default device; raises CheckpointError."""
    with reading(directory):
        training = read_arrays(directory / "training")
        if set(training) != {"step", "opt_state"}:
            raise ValueError("training/ is incomplete, or not a training state")
        return training


def verify_checkpoint(directory: pathlib.Path) -> dict[str, int]:
    """Reads an entire checkpoint; returns its `step` (or 0), and bytes of `params` and `training`.

    Raises CheckpointError if anything is missing, changed, not finite or from another model.
    """
    check_files(directory)
    params, settings, _ = load_checkpoint(directory, abstract_params, verify_checksums=False)
    has_state = settings.get("has_training_state", True)
    training = load_training_state(directory) if has_state else {}
    for path in directory.glob("*/array_metadatas/*"):  # Orbax reads these only when resuming.
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
    sizes = {"step": int(training.get("step", 0)), "params": 0, "training": 0}
    shapes = {leaf.shape for leaf in jax.tree.leaves(params)}
    for path, leaf in jax.tree.leaves_with_path({"params": params, "training": training}):
        name = jax.tree_util.keystr(path)
        if leaf.ndim and leaf.shape not in shapes:  # Moments have the shapes of parameters.
            problem = f"no parameter has the shape of {name}, {list(leaf.shape)}"
            raise CheckpointError(f"{directory}: training/ belongs to other parameters: {problem}")
        if count_non_finite(np.asarray(leaf)):
            problem = f"{name} holds values that are not finite, or above {MAX_WEIGHT:g}"
            raise CheckpointError(f"{directory}: {problem}")
        sizes[path[0].key] += leaf.nbytes
    return sizes


def print_summary(directory: pathlib.Path) -> None:
    """Verifies a checkpoint and prints a summary; raises CheckpointError."""
    sizes = verify_checkpoint(directory)
    count = len(read_checksums(directory))
    checksums = f"the checksums of {count} files match"
    if not count:
        checksums = "written without checksums, so changed values cannot be detected"
    step, state = "", "without training state"
    if sizes["training"]:
        step, state = f"step {sizes['step']:,}, ", f"training state {sizes['training']:,} bytes"
    parameters = f"parameters {sizes['params']:,} bytes"
    print(f"{directory}: complete, {step}{parameters}, {state}; {checksums}")


def copy_verified(source: pathlib.Path, destination: pathlib.Path) -> None:
    """Copies a checkpoint, under a temporary name until the copy has been verified."""
    if is_bucket(source):
        fix = f"copy it with gcloud storage cp --recursive {source} DIR, and check the copy"
        raise ValueError(f"{source} is on a bucket: {fix}")
    if destination.exists():
        raise FileExistsError(f"{destination} exists already: choose another --copy_to")
    if destination.is_relative_to(source):
        raise ValueError(f"{destination} is within the checkpoint: choose another --copy_to")
    unfinished = destination.with_name(destination.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(source, unfinished)
    print_summary(unfinished)
    for path in source.rglob("*"):
        copied = unfinished / path.relative_to(source)
        if path.is_file() and not filecmp.cmp(path, copied, shallow=False):
            raise OSError(f"{copied} differs from {path}: the disk or its connection is faulty")
    unfinished.rename(destination)
    print(f"copied to {destination}")
