"""Reads a model directory of any format: native, Hugging Face's or Google's."""

import pathlib

import flax
import jax
import numpy as np
from absl import logging

from bert_jax.checkpoints.google import is_google, load_google
from bert_jax.checkpoints.huggingface import load_huggingface
from bert_jax.checkpoints.native import load_checkpoint
from bert_jax.checkpoints.parameters import (
    LoadedModel,
    LoadReport,
    model_settings,
    parameter_shapes,
)
from bert_jax.checkpoints.peft import CONFIG_FILENAME as ADAPTER_CONFIG
from bert_jax.checkpoints.peft import load_adapter
from bert_jax.checkpoints.sentence_transformers import MODULES_FILENAME
from bert_jax.checkpoints.tensors import WEIGHTS_FILENAMES, unreadable_weights
from bert_jax.model.architecture import config_from_settings
from bert_jax.objectives.replaced_tokens import (
    GeneratorSettings,
    generator_params,
    usable_params,
)
from bert_jax.runtime.buckets import as_path, is_bucket
from bert_jax.runtime.errors import CheckpointError
from bert_jax.runtime.model_files import find_snapshot, hub_hint, read_optional

# No model has larger weights, but bit flips in a checkpoint without checksums often produce them.
MAX_WEIGHT = 1e18


def read_model(
    directory: str | pathlib.Path, verify_checksums: bool = True, allow_non_finite: bool = False
) -> LoadedModel:
    """Reads a model directory of any format; on a bucket, only a native one.

    For `verify_checksums`, see `load_checkpoint`. Weights that are NaN, infinite or above
    MAX_WEIGHT are an error, or with `allow_non_finite` a warning with their number.

    Raises FileNotFoundError for a missing model, CheckpointError for a damaged native checkpoint or
    such weights, and otherwise as `load_huggingface` and `load_google`.
    """
    model = _read_any_format(directory, verify_checksums)
    for path, leaf in flax.traverse_util.flatten_dict(model.params, sep="/").items():
        if count := count_non_finite(np.asarray(leaf)):
            values = "value that is" if count == 1 else "values that are"
            problem = (
                f"{directory}: {path} has {count:,} {values} NaN, infinite or above {MAX_WEIGHT:g}"
            )
            if not allow_non_finite:
                raise CheckpointError(
                    f"{problem}, of {leaf.size:,}: use an earlier checkpoint, or another copy of "
                    "the file, or load it anyway with allow_non_finite"
                )
            logging.warning("%s, of %s", problem, f"{leaf.size:,}")
    return model


def count_non_finite(values: np.ndarray) -> int:
    """Returns the number of values that are NaN, infinite or above MAX_WEIGHT; fast if none is."""
    if not jax.dtypes.issubdtype(values.dtype, np.floating):
        return 0
    flat = values.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        if flat.dtype == np.float32 and np.dot(flat, flat) < MAX_WEIGHT:
            return 0
        return flat.size - int(np.count_nonzero(np.abs(flat) <= MAX_WEIGHT))


def _read_any_format(directory: str | pathlib.Path, verify_checksums: bool) -> LoadedModel:
    name, directory = str(directory), as_path(directory)
    if is_bucket(directory):
        return _read_native(directory, verify_checksums)
    directory = find_snapshot(directory.expanduser().absolute())
    if directory.is_file():
        raise NotADirectoryError(f"{directory} is a file: give its directory, {directory.parent}")
    if any((directory / filename).exists() for filename in (*WEIGHTS_FILENAMES, MODULES_FILENAME)):
        return load_huggingface(directory)
    if is_google(directory):
        return load_google(directory)
    if "peft_type" in read_optional(directory / ADAPTER_CONFIG):
        return load_adapter(directory, lambda base: _read_base(directory, base, verify_checksums))
    if not directory.exists():
        hint = "expected a workdir, a checkpoint, or a directory of another library"
        raise FileNotFoundError(f"{directory} does not exist; {hub_hint(name) or hint}")
    try:
        return _read_native(directory, verify_checksums)
    except FileNotFoundError as error:
        if found := unreadable_weights(directory) or _describe_contents(directory):
            raise FileNotFoundError(found) from None
        hint = f"or bert_config.json or {' or '.join(WEIGHTS_FILENAMES)} of another library"
        if [*directory.glob("seed_*"), *directory.glob("trials/*")]:
            raise
        raise FileNotFoundError(f"{error}; {hint}") from None


def _read_base(adapter: pathlib.Path, base: str, verify_checksums: bool) -> LoadedModel:
    """Reads the base model of an adapter: of a relative path, one beside it comes first."""
    beside = (adapter / base).resolve()
    return _read_any_format(beside if beside.exists() else base, verify_checksums)


def _describe_contents(directory: pathlib.Path) -> str:
    """Describes what a directory without weights holds of another library; "" if nothing."""
    if found := _describe_checkpoints(directory):
        return found
    if "model_type" in read_optional(directory / "config.json"):
        expected = ", ".join(WEIGHTS_FILENAMES)
        return f"{directory} holds config.json, but no weights: download one of {expected}"
    names = ("config.json", *WEIGHTS_FILENAMES)
    inside = sorted(
        path for path in directory.glob("*/") if any((path / n).exists() for n in names)
    )
    if inside and not (directory / "checkpoints").exists():
        return (
            f"{directory} holds no model, but directories of models: use one, such as {inside[0]}"
        )
    return ""


def _describe_checkpoints(directory: pathlib.Path) -> str:
    """Describes the checkpoints in an output folder of transformers' Trainer; "" if it has none."""
    by_step = {}
    for path in directory.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdecimal() and any((path / name).exists() for name in WEIGHTS_FILENAMES):
            by_step[int(step)] = path
    if not by_step:
        return ""
    last = by_step[max(by_step)]
    best = read_optional(last / "trainer_state.json").get("best_model_checkpoint")
    chosen = directory / pathlib.Path(best).name if best else last
    names = ", ".join(by_step[step].name for step in sorted(by_step))
    why = "the best, as its trainer_state.json says" if best else "the last"
    return f"{directory} holds checkpoints of transformers' Trainer, {names}: use {chosen}, {why}"


def _read_native(directory: pathlib.Path, verify_checksums: bool) -> LoadedModel:
    params, settings, tokenizer = load_checkpoint(directory, abstract_params, verify_checksums)
    if "head" in settings:  # Evaluation may have tuned some of the head's settings.
        settings["head"] |= settings.get("tuned_head_settings", {})
    params = usable_params(params)
    paths = tuple(flax.traverse_util.flatten_dict(params, sep="/"))
    unused = ("training",) if settings.get("has_training_state", True) else ()
    return LoadedModel(params, settings, tokenizer, LoadReport(paths, (), unused))


def generator_of(model: LoadedModel) -> LoadedModel:
    """Returns the generator of an ELECTRA run as a masked LM of its own, embeddings included.

    Raises ValueError if the model has none.
    """
    if "generator" not in model.params:
        raise ValueError(
            "the weights have no generator: only the checkpoints of a run with "
            "objective=replaced_tokens have one beside the discriminator"
        )
    generator = GeneratorSettings(**model.settings["generator"])
    config = generator.config(config_from_settings(model.settings))
    params = generator_params(model.params)
    settings = model.settings | model_settings(config, params)
    return model._replace(params=params, settings=settings)


def abstract_params(settings: dict) -> dict:
    """Returns the shapes and dtypes of a native checkpoint's parameters, from its settings."""
    shapes = parameter_shapes(config_from_settings(settings), settings.get("head"))
    modules = tuple(f"{module}/" for module in settings["modules"])
    params = {path: leaf for path, leaf in shapes.items() if path.startswith(modules)}
    return flax.traverse_util.unflatten_dict(params, sep="/")
