"""Writes a model that was loaded, changed or built in Python: the inverse of `read_model`."""

import os
import pathlib
import shutil
from collections.abc import Mapping

import flax
import numpy as np

from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.parameters import model_settings
from bert_jax.checkpoints.read import abstract_params
from bert_jax.model.heads import HEADS, find_head
from bert_jax.tokenizers.tokenizer import Tokenizer


def save_model(
    directory: str | os.PathLike,
    config,
    tokenizer: Tokenizer,
    params: Mapping,
    settings: Mapping,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint, with parameters in float32; it appears only once it is complete.

    Raises FileExistsError if `directory` exists, unless it is empty, or is a checkpoint and
    `overwrite` is True; ValueError for a checkpoint from which a run can resume, for the address of
    a bucket, or if parameters, settings and vocabulary do not fit together; and CheckpointError if
    the checkpoint cannot be written.
    """
    if ":/" in str(directory):
        raise ValueError(f"{directory}: mount the bucket, and save to a path below the mount")
    directory = pathlib.Path(directory).expanduser().absolute()
    is_empty = directory.is_dir() and not any(directory.iterdir())
    is_checkpoint = (directory / "params").is_dir() and (directory / "config/metadata").is_file()
    if directory.exists() and not is_empty and not (overwrite and is_checkpoint):
        fix = "pass overwrite=True to replace it" if is_checkpoint else "choose another directory"
        raise FileExistsError(f"{directory} exists already: {fix}")
    _check_not_resumable(directory)
    params = _float32(params)
    settings = dict(settings) | model_settings(config, params)
    settings.pop("tuned_head_settings", None)  # `read_model` merged them into the head's.
    _check_model(config, tokenizer, params, settings)
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    write_checkpoint(unfinished, params, settings, tokenizer)
    if directory.exists():
        shutil.rmtree(directory)
    unfinished.rename(directory)


def _check_not_resumable(directory: pathlib.Path) -> None:
    """Raises ValueError for a checkpoint of a run: its training state would be lost."""
    is_step = directory.parent.name == "checkpoints" and directory.name.isdecimal()
    if (directory / "training").exists() or (
        is_step and (directory.parents[1] / "config.json").exists()
    ):
        raise ValueError(
            f"{directory} is a checkpoint from which a run resumes, and saving a model there would "
            "lose the training state: choose a directory outside of the run's checkpoints/"
        )


def _float32(params: Mapping) -> dict:
    """Returns the parameters as float32 NumPy arrays. Raises ValueError for other than floats."""
    if "encoder" not in params:
        raise ValueError(f"params must have 'encoder', got only {', '.join(map(repr, params))}")
    arrays = {}
    for path, leaf in flax.traverse_util.flatten_dict(dict(params), sep="/").items():
        if not np.issubdtype(dtype := np.asarray(leaf).dtype, np.floating) and dtype.kind != "V":
            raise ValueError(f"params: {path} is {dtype}, expected floating point")
        arrays[path] = np.asarray(leaf, np.float32)
    return flax.traverse_util.unflatten_dict(arrays, sep="/")


def check_head(head: Mapping | None) -> None:
    """Raises ValueError for a head that is unknown, or has labels that are not strings."""
    if head is None:
        return
    labels = head.get("labels")
    are_labels = isinstance(labels, list | tuple) and all(isinstance(each, str) for each in labels)
    if not isinstance(head.get("task"), str) or not are_labels:
        expected = f"a 'task' ({', '.join(HEADS)}) and a list of 'labels', which are strings"
        raise ValueError(f"settings['head'] must have {expected}, got {dict(head)!r:.200}")
    find_head(head)


def _check_model(config, tokenizer: Tokenizer, params: dict, settings: dict) -> None:
    """Raises ValueError if the model could not be loaded or used again."""
    head = settings.get("head")
    check_head(head)
    if "head" in params and not head:
        fix = "set it to {'task': 'classification', 'labels': [...]} or the like"
        raise ValueError(f"params have a 'head', but settings have none: {fix}, or rename the head")
    if head and head["labels"] and "head" not in params:  # An embedding head has no parameters.
        reason = "params have no 'head': add it, or remove settings['head']"
        raise ValueError(f"settings have a head for {head['task']}, but {reason}")
    if head and find_head(head).input_kind == "pooled" and "pooler" not in params["encoder"]:
        raise ValueError(f"a head for {head['task']} needs params['encoder']['pooler']")
    if tokenizer.vocab_size > config.vocab_size:
        sizes = f"{tokenizer.vocab_size:,} ids, and config.vocab_size is {config.vocab_size:,}"
        raise ValueError(f"the tokenizer has {sizes}: use the tokenizer of the parameters")
    found, expected = _shapes(params), _shapes(abstract_params(settings))
    for module in settings["modules"]:
        paths = {path for path in found | expected if path.startswith(f"{module}/")}
        if not paths & expected.keys():
            continue  # A module of one's own, of which any shape is right.
        for path in sorted(paths):
            shape, other = found.get(path, "absent"), expected.get(path, "absent")
            if shape != other:
                raise ValueError(f"params: {path} is {shape}, expected {other}")


def _shapes(tree: dict) -> dict[str, list[int]]:
    flat = flax.traverse_util.flatten_dict(tree, sep="/")
    return {path: list(leaf.shape) for path, leaf in flat.items()}
