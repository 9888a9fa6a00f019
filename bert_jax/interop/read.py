"""Reads a model directory of any format: native, Hugging Face's or Google's."""

import pathlib

import flax
import jax
import jax.numpy as jnp

from bert_jax.interop.files import WEIGHTS_FILENAMES
from bert_jax.interop.google import load_google
from bert_jax.interop.huggingface import load_huggingface
from bert_jax.interop.parameters import LoadedModel, LoadReport, parameter_shapes
from bert_jax.model.config import BertConfig
from bert_jax.model.heads import make_model
from bert_jax.training.checkpoint import load_checkpoint


def read_model(directory: str | pathlib.Path) -> LoadedModel:
    """Reads a model directory of any format.

    Raises FileNotFoundError without a model, CheckpointError if a native checkpoint is damaged, and
    otherwise as `load_huggingface` and `load_google`.
    """
    directory = pathlib.Path(directory).absolute()
    if any((directory / name).exists() for name in WEIGHTS_FILENAMES):
        return load_huggingface(directory)
    if (directory / "bert_config.json").exists():
        return load_google(directory)
    try:
        params, settings, tokenizer = load_checkpoint(directory, abstract_params)
    except FileNotFoundError as error:
        if seeds := sorted(directory.glob("seed_*")):
            raise FileNotFoundError(
                f"{directory} holds the runs of several seeds: give one of them, such as {seeds[0]}"
            ) from error
        if shards := list(directory.glob("*.index.json")):
            raise FileNotFoundError(
                f"{shards[0]}: weights in several files are not supported: merge them with "
                "transformers' save_pretrained(DIR, max_shard_size='100GB')"
            ) from error
        raise FileNotFoundError(
            f"{error}; or bert_config.json or {' or '.join(WEIGHTS_FILENAMES)} of another library"
        ) from error
    if "head" in settings:  # Evaluation may have tuned some of the head's settings.
        settings["head"] |= settings.get("scored_head", {})
    paths = tuple(flax.traverse_util.flatten_dict(params, sep="/"))
    unused = ("training",) if settings.get("has_training_state", True) else ()
    return LoadedModel(params, settings, tokenizer, LoadReport(paths, (), unused))


def abstract_params(settings: dict) -> dict:
    """Returns the shapes and dtypes of a native checkpoint's parameters, from its settings."""
    config, head = BertConfig(**settings["bert"]), settings.get("head")
    if head and head["task"] == "feature_based":
        row = {"tokens": jnp.zeros((1, 2), jnp.int32), "pairs": jnp.zeros((1, 1, 3), jnp.int32)}
        return jax.eval_shape(make_model(config, head).init, jax.random.key(0), row)["params"]
    absent = tuple(f"{part}/" for part in settings.get("absent", ()))
    params = {
        path: jax.ShapeDtypeStruct(shape, jnp.float32)
        for path, shape in parameter_shapes(config, len(head["labels"]) if head else 0).items()
        if not path.startswith(absent)
    }
    return flax.traverse_util.unflatten_dict(params, sep="/")
