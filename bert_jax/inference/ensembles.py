"""Averages the outputs of models with the same head, such as runs with different seeds."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from scipy.special import expit, logit, softmax

from bert_jax.data.features import ModelInput
from bert_jax.inference.pretrained_model import PretrainedModel
from bert_jax.model.heads import Outputs, find_head

_SMALLEST = np.finfo(np.float32).tiny
_MEANS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "class": lambda each: np.log(np.maximum(softmax(each, axis=-1).mean(axis=0), _SMALLEST)),
    "label_set": lambda each: logit(np.clip(expit(each).mean(axis=0), _SMALLEST, 1 - 2**-53)),
    "choice": lambda each: each.mean(axis=0),  # The score of one choice, of a feature of its own.
    "value": lambda each: each.mean(axis=0),
    "tag": lambda each: each.mean(axis=0),
    "span": lambda each: each.mean(axis=0),
}
"""The mean of outputs `[models, ...]`, by what a head predicts."""
_TUNED = ("calibration_temperature", "null_threshold", "logit_thresholds")
"""Settings of a head that are tuned on the outputs of one model."""


def average_outputs(predicts: str, outputs: Iterable[Outputs]) -> list[np.ndarray]:
    """Returns the head's output for each feature, from those of each model.

    Probabilities are averaged of classes, and of each label of a set; the result is their logarithm
    or log-odds, which the softmax or the sigmoid turns into them. Values are averaged, and the
    logits of choices, of tags for each word, and of answers for each start and end: BERT (Devlin et
    al., 2019, table 2) averages the n-best lists of answers instead. `predicts` is that of a
    `Head`, one of `_MEANS`.
    """
    stacked = (np.stack(each).astype(np.float64) for each in zip(*outputs, strict=True))
    return [_MEANS[predicts](each).astype(np.float32) for each in stacked]


def make_ensemble(models: Sequence[PretrainedModel], columns: Iterable[str]) -> PretrainedModel:
    """Returns the first of the models, with the settings that hold for all of them.

    A tuned threshold, for "no answer" or of a label, is the mean of theirs; a temperature of
    calibration, which fits the probabilities of one model, is left out. `columns` are fields of
    `config.data` that say how the models read examples.

    Raises ValueError unless the models read the same features and have heads with the same
    settings.
    """
    first, *others = models
    if not first.head:
        raise ValueError(f"model={first.source} has no fine-tuned head, which ensembles need")
    if find_head(first.head).predicts not in _MEANS:
        raise ValueError(
            f"model={first.source} has a head for {first.head['task']}: the vectors of different "
            "models have no mean: give one --model"
        )
    read = _what_is_read(first, columns)
    for model in others:
        own = _what_is_read(model, columns)
        for name in read | own:
            if own.get(name) != read.get(name):
                raise ValueError(
                    f"model={model.source} differs from {first.source} in {name}: expected models "
                    "that read the same tokens for the same labels, such as runs of several seeds"
                )
    head = {name: value for name, value in first.head.items() if name not in _TUNED}
    if "null_threshold" in first.head:
        head["null_threshold"] = float(np.mean([each.head["null_threshold"] for each in models]))
    if all("logit_thresholds" in each.head for each in models):
        values = np.mean([each.head["logit_thresholds"] for each in models], axis=0)
        head["logit_thresholds"] = values.tolist()
    return dataclasses.replace(first, settings=first.settings | {"head": head})


def _what_is_read(model: PretrainedModel, columns: Iterable[str]) -> dict[str, object]:
    """Returns what the models of an ensemble must have in common, by name."""
    data = model.settings.get("data", {})
    read = {f"config.data.{name}": data.get(name) for name in columns}
    read |= {name: value for name, value in (model.head or {}).items() if name not in _TUNED}
    read["max_position_embeddings"] = model.config.max_position_embeddings
    return read | {"vocabulary": model.tokenizer.files()}


def average_models(
    predicts: str, members: Sequence[Callable[[Sequence[ModelInput]], Outputs]]
) -> Callable[[Sequence[ModelInput]], Outputs]:
    """Returns the function features -> outputs, averaged over those of the `members`."""

    def apply(features: Sequence[ModelInput]) -> Outputs:
        features = list(features)
        return average_outputs(predicts, (member(features) for member in members))

    return apply
