"""Enlarges a model: more layers, wider ones, or more positions, one published rule for each.

Which axes grow follows from the shapes of the parameters in both sizes, so it needs no table for
each architecture.
"""

import dataclasses
import pathlib

import flax
import jax
import numpy as np

from bert_jax.checkpoints.parameters import LoadedModel, model_settings, parameter_shapes
from bert_jax.checkpoints.read import read_model
from bert_jax.checkpoints.save import save_model
from bert_jax.model.architecture import architecture_of, config_from_settings
from bert_jax.model.layer_stack import layers_with, num_stacked_layers

WIDENED = ("bert", "modernbert", "mpnet", "esm", "longformer", "deberta")
"""Architectures that compute only with what is widened; XLNet's encodings of distances are not."""


def write_enlarged(
    source: str,
    destination: str,
    hidden_size: int | None = None,
    num_layers: int | None = None,
    max_position_embeddings: int | None = None,
) -> None:
    """Writes a larger model to a new directory, and prints its sizes.

    Raises ValueError if no size is given, FileExistsError if the directory exists, and what
    `read_model`, `save_model`, `widen`, `deepen` and `lengthen` raise.
    """
    changes = (widen, hidden_size), (deepen, num_layers), (lengthen, max_position_embeddings)
    changes = [(change, size) for change, size in changes if size is not None]
    if not changes:
        raise ValueError("give --hidden_size, --num_layers or --max_position_embeddings")
    if pathlib.Path(destination).exists():
        raise FileExistsError(f"{destination} exists already: choose another --output")
    model = old = read_model(source)
    for change, size in changes:
        model = change(model, size)
    config = config_from_settings(model.settings)
    save_model(destination, config, model.tokenizer, model.params, model.settings)
    before, after = (
        sum(leaf.size for leaf in jax.tree.leaves(each.params)) for each in (old, model)
    )
    print(f"{destination}: {after:,} parameters, {before:,} before")


def deepen(model: LoadedModel, num_layers: int) -> LoadedModel:
    """Returns a model whose further layers are copies of its own, in turn (Gong et al., 2019).

    This is StackBERT's rule ("Efficient Training of BERT by Progressively Stacking", section 4) for
    any number of layers: layer i is a copy of layer i mod L. Where layers differ, as global and
    local ones do, a further layer is a copy of the next one of its kind. Outputs change.

    Raises ValueError as `_larger`, or for a layer of a kind that the model does not have.
    """
    old, new = _larger(model, num_layers=num_layers)
    params = _known_params(model, old)
    if num_stacked_layers(old) != num_stacked_layers(new):  # Else, all have the same parameters.
        sources = _layer_sources(architecture_of(new).encoder_layers(new), old.num_layers)
        before, after = layers_with(old), layers_with(new)
        for path, leaf in params.items():
            if path.startswith("encoder/layers/"):
                name = tuple(path.split("/")[2:])
                rows = [before[name].index(sources[number]) for number in after[name]]
                params[path] = leaf[np.array(rows)]
    return _rebuilt(model, new, params)


def _layer_sources(layers: tuple, num_old: int) -> list[int]:
    """Returns for each layer the number of the old one that it is a copy of."""
    sources = list(range(num_old))
    for number in range(num_old, len(layers)):
        alike = [i for i in range(num_old) if layers[i] == layers[number]]
        if not alike:
            raise ValueError(
                f"--num_layers={len(layers)}: layer {number} is of a kind that the model does not "
                "have, so there is none to copy"
            )
        earlier = sum(layers[i] == layers[number] for i in range(num_old, number))
        sources.append(alike[earlier % len(alike)])
    return sources


def widen(model: LoadedModel, hidden_size: int) -> LoadedModel:
    """Returns a model of k times the width and heads that computes the same outputs.

    Each unit is there k times, and what reads a unit divides its weight among the copies (Net2Net;
    Chen et al., 2016, section 2.2). The shares are random, between 1 : 3 and 3 : 1 for k = 2: with
    equal ones, copies would have equal gradients, and stay copies (LEMON; Wang et al., 2024). As
    all units have as many copies, LayerNorm normalizes by the same mean and variance. The
    feed-forward layers get k times as many units, too; heads keep their size.

    Raises ValueError as `_larger`, for a width that is no multiple of the old one, and for an
    architecture that is not in `WIDENED`.
    """
    config = config_from_settings(model.settings)
    if config.architecture not in WIDENED:
        expected = ", ".join(WIDENED)
        raise ValueError(
            f"--hidden_size: the outputs of {config.architecture} would change; expected one of "
            f"{expected}"
        )
    times, rest = divmod(hidden_size, config.hidden_size)
    if rest:
        raise ValueError(
            f"--hidden_size={hidden_size}: expected a multiple of the model's {config.hidden_size},"
            " so that all units have as many copies"
        )
    old, new = _larger(
        model,
        hidden_size=hidden_size,
        num_heads=config.num_heads * times,
        intermediate_size=config.intermediate_size * times,
    )
    params = _known_params(model, old)
    shapes = parameter_shapes(new, model.settings.get("head"))
    rng = np.random.default_rng(0)
    for path in sorted(params):
        leaf, shape = params[path], shapes[path].shape
        grown = [axis for axis, size in enumerate(leaf.shape) if shape[axis] != size]
        inputs = leaf.ndim - 2 if path.endswith("/kernel") else None
        for axis in grown:
            if axis != inputs:
                leaf = np.concatenate([leaf] * times, axis)
        if inputs in grown:
            shares = rng.uniform(0.5, 1.5, (times, *leaf.shape)).astype(np.float32)
            leaf = np.concatenate(list(leaf * shares / shares.sum(axis=0)), inputs)
        params[path] = leaf
    for path in _read_by_tables(params, shapes, old):
        params[path] = params[path] / np.float32(times)
    return _rebuilt(model, new, params)


def _read_by_tables(params: dict, shapes: dict, old) -> list[str]:
    """Returns the parameters to divide by k, so that logits over the vocabulary do not grow by it.

    They are those of an untied decoder, or of the LayerNorm before the tied token embeddings,
    unless these keep their width.
    """
    if "mlm/decoder/embedding" in params:
        return ["mlm/decoder/embedding"]
    table = shapes["encoder/embeddings/token_embedding/embedding"].shape
    if table[-1] == (getattr(old, "embedding_size", None) or old.hidden_size):
        return []
    return [path for path in params if path.startswith("mlm/") and "/layer_norm/" in path]


def lengthen(model: LoadedModel, max_position_embeddings: int) -> LoadedModel:
    """Returns a model for longer texts, whose further positions repeat the old ones in turn.

    Longformer's rule (Beltagy et al., 2020, section 5). Texts of the old length keep their outputs.
    With rotary embeddings or relative distances there is no table, and only the limit changes.

    Raises ValueError as `_larger`.
    """
    old, new = _larger(model, max_position_embeddings=max_position_embeddings)
    params = _known_params(model, old)
    shapes = parameter_shapes(new, model.settings.get("head"))
    for path, leaf in params.items():
        if shapes[path].shape != leaf.shape:
            before, positions = np.split(leaf, [len(leaf) - old.max_position_embeddings])
            repeats = -(-max_position_embeddings // len(positions))
            longer = np.concatenate([positions] * repeats)[:max_position_embeddings]
            params[path] = np.concatenate([before, longer])
    return _rebuilt(model, new, params)


def _larger(model: LoadedModel, **sizes: int) -> tuple:
    """Returns the model config, and the one with larger `sizes`.

    Raises ValueError if the first of them is not larger, or the model config is invalid.
    """
    config = config_from_settings(model.settings)
    name, size = next(iter(sizes.items()))
    if size <= getattr(config, name):
        raise ValueError(f"--{name}={size}: expected more than the model's {getattr(config, name)}")
    return config, dataclasses.replace(config, **sizes)


def _known_params(model: LoadedModel, config) -> dict[str, np.ndarray]:
    """Returns path -> parameter. Raises ValueError for a module that only an objective knows."""
    shapes = parameter_shapes(config, model.settings.get("head"))
    params = flax.traverse_util.flatten_dict(model.params, sep="/")
    if unknown := sorted(params.keys() - shapes.keys()):
        raise ValueError(
            f"{unknown[0]} belongs to no part of {config.architecture} or its heads, so it is not "
            "known which of its axes grow: remove this module, which only pre-training uses"
        )
    return {path: np.asarray(leaf) for path, leaf in params.items()}


def _rebuilt(model: LoadedModel, config, params: dict) -> LoadedModel:
    params = flax.traverse_util.unflatten_dict(params, sep="/")
    settings = model.settings | model_settings(config, params)
    return model._replace(params=params, settings=settings)
