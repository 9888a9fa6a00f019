"""Weights, settings and vocabulary out of a directory of any format: ours and other libraries'."""

import pathlib

import flax
import jax
import jax.numpy as jnp

from bert_jax.interop.google import load_google
from bert_jax.interop.huggingface import WEIGHTS_FILENAMES, load_huggingface
from bert_jax.interop.parameters import LoadedModel, LoadReport, num_outputs, parameter_shapes
from bert_jax.model.config import BertConfig
from bert_jax.model.heads import make_model
from bert_jax.training.checkpoint import load_checkpoint


def read_model(directory: str | pathlib.Path) -> LoadedModel:
    """Parameters, settings and tokenizer of a directory of any format, and what was left out.

    Raises FileNotFoundError where there is no model, CheckpointError for a damaged checkpoint, and
    as `load_huggingface` and `load_google` for those.
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
                f"{directory} holds the runs of several seeds: give one of them, as {seeds[0]}"
            ) from error
        if shards := list(directory.glob("*.index.json")):
            raise FileNotFoundError(
                f"{shards[0]}: weights in several files are not read: put them into one, by "
                "transformers' save_pretrained(DIR, max_shard_size='100GB')"
            ) from error
        raise FileNotFoundError(
            f"{error}; or, of other libraries, bert_config.json or {' or '.join(WEIGHTS_FILENAMES)}"
        ) from error
    if "head" in settings:  # As far as scoring has changed it.
        settings["head"] |= settings.get("scored_head", {})
    paths = tuple(flax.traverse_util.flatten_dict(params, sep="/"))
    training = settings.get("has_training_state", True)
    report = LoadReport(paths, (), ("training",) if training else ())
    return LoadedModel(params, settings, tokenizer, report)


def abstract_params(settings: dict) -> dict:
    """The tree of shapes and dtypes of a checkpoint's parameters, from its settings."""
    config, head = BertConfig(**settings["bert"]), settings.get("head")
    if head and head["task"] == "feature_based":
        row = {"tokens": jnp.zeros((1, 2), jnp.int32), "pairs": jnp.zeros((1, 1, 3), jnp.int32)}
        return jax.eval_shape(make_model(config, head).init, jax.random.key(0), row)["params"]
    shapes = parameter_shapes(config, num_outputs(head))
    absent = tuple(f"{part}/" for part in settings.get("absent", ()))
    return flax.traverse_util.unflatten_dict(
        {
            path: jax.ShapeDtypeStruct(shape, jnp.float32)
            for path, shape in shapes.items()
            if not path.startswith(absent)
        },
        sep="/",
    )
