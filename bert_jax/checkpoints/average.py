"""Averages the weights of several checkpoints of one run or of runs alike."""

import pathlib
from collections.abc import Sequence

import flax
import numpy as np

from bert_jax.checkpoints.parameters import LoadedModel
from bert_jax.checkpoints.read import read_model


def average_models(checkpoints: Sequence[pathlib.Path]) -> LoadedModel:
    """Returns the last model with the mean of the weights of all, summed in float64, as float32.

    Raises ValueError if there are fewer than two, or they differ in architecture, parameters, head
    or vocabulary; and what `read_model` raises.
    """
    if len(checkpoints) < 2:
        raise ValueError(f"expected at least two checkpoints to average, got {len(checkpoints)}")
    sums, first = {}, None
    for path in checkpoints:
        model = read_model(path)
        weights = flax.traverse_util.flatten_dict(model.params, sep="/")
        if first is None:
            first, sums = model, {name: np.zeros(leaf.shape) for name, leaf in weights.items()}
        if difference := _difference(first, model):
            raise ValueError(
                f"{checkpoints[0]} and {path} cannot be averaged: they differ in {difference}"
            )
        for name, leaf in weights.items():
            sums[name] += np.asarray(leaf, np.float64)
    mean = {name: (total / len(checkpoints)).astype(np.float32) for name, total in sums.items()}
    return model._replace(
        params=flax.traverse_util.unflatten_dict(mean, sep="/"),
        settings=model.settings | {"averaged": [str(path) for path in checkpoints]},
    )


def _difference(first: LoadedModel, other: LoadedModel) -> str:
    """Returns what two models differ in that an average needs to be equal; "" if nothing."""
    if first.tokenizer.sha256 != other.tokenizer.sha256:
        return "their vocabulary"
    values, others = first.settings["architecture"], other.settings["architecture"]
    for name in sorted(values | others):
        if values.get(name) != others.get(name):
            return f"architecture.{name}, {values.get(name)!r} and {others.get(name)!r}"
    if (head := first.settings.get("head")) != other.settings.get("head"):
        return f"their head, {head} and {other.settings.get('head')}"
    shapes, other_shapes = (
        {
            name: leaf.shape
            for name, leaf in flax.traverse_util.flatten_dict(model.params, sep="/").items()
        }
        for model in (first, other)
    )
    for name in sorted(shapes | other_shapes):
        if shapes.get(name) != other_shapes.get(name):
            found = (shapes.get(name, "absent"), other_shapes.get(name, "absent"))
            return f"{name}, {found[0]} and {found[1]}"
    return ""
