"""Averages the outputs of models with the same head, such as runs with different seeds."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from scipy.special import expit, logit, softmax

from bert_jax.data.features import ModelInput
from bert_jax.inference.predictions import split_into_blocks
from bert_jax.inference.pretrained_model import PretrainedModel
from bert_jax.model.heads import TARGET_SCALE, Outputs, find_head
from bert_jax.tasks.spans import N_BEST, RankedAnswers
from bert_jax.tasks.squad import AnswerPredictor

_SMALLEST = np.finfo(np.float32).tiny
_MEANS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "class": lambda each: np.log(np.maximum(softmax(each, axis=-1).mean(axis=0), _SMALLEST)),
    "label_set": lambda each: logit(np.clip(expit(each).mean(axis=0), _SMALLEST, 1 - 2**-53)),
    "choice": lambda each: each.mean(axis=0),  # The score of one choice, of a feature of its own.
    "value": lambda each: each.mean(axis=0),
    "tag": lambda each: each.mean(axis=0),
}
"""The mean of outputs `[models, ...]`, by what a head predicts."""
_TUNED = ("calibration_temperature", "null_threshold", "logit_thresholds")
"""Settings of a head that are tuned on the outputs of one model."""
_OWN = (*_TUNED, *TARGET_SCALE)
"""Settings that may differ: also the scale of a regression, which each model's outputs undo."""


def average_outputs(predicts: str, outputs: Iterable[Outputs]) -> list[np.ndarray]:
    """Returns the head's output for each feature, from those of each model.

    Probabilities are averaged of classes, and of each label of a set; the result is their logarithm
    or log-odds, which the softmax or the sigmoid turns into them. Values are averaged, and the
    logits of choices, and of tags for each word. `predicts` is that of a `Head`, one of `_MEANS`.
    """
    stacked = (np.stack(each).astype(np.float64) for each in zip(*outputs, strict=True))
    return [_MEANS[predicts](each).astype(np.float32) for each in stacked]


def make_ensemble(models: Sequence[PretrainedModel], columns: Iterable[str]) -> PretrainedModel:
    """Returns the first of the models, with the settings that hold for all of them.

    A tuned threshold is the mean of theirs, of a label as `average_outputs` averages its log-odds,
    so that a label that all models reject is rejected; a model without one has 0. A temperature of
    calibration, which fits the probabilities of one model, is left out. `columns` are fields of
    `config.data` that say how the models read examples.

    Raises ValueError unless the models read the same features and have heads with the same
    settings. Of models that answer questions, only `null_answers` must be the same.
    """
    first, *others = models
    if not first.head:
        raise ValueError(f"model={first.source} has no fine-tuned head, which ensembles need")
    if find_head(first.head).predicts not in (*_MEANS, "span"):
        raise ValueError(
            f"model={first.source} has a head for {first.head['task']}: embeddings of different "
            "models cannot be averaged: give one --model"
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
    if any("null_threshold" in each.head for each in models):
        thresholds = [each.head.get("null_threshold", 0.0) for each in models]
        head["null_threshold"] = float(np.mean(thresholds))
    if any("logit_thresholds" in each.head for each in models):
        untuned = [0.0] * len(head["labels"])
        thresholds = [[each.head.get("logit_thresholds") or untuned] for each in models]
        (mean,) = average_outputs("label_set", thresholds)
        head["logit_thresholds"] = mean.tolist()
    return dataclasses.replace(first, settings=first.settings | {"head": head})


def _what_is_read(model: PretrainedModel, columns: Iterable[str]) -> dict[str, object]:
    """Returns what the models of an ensemble must have in common, by name."""
    data, head = model.settings.get("data", {}), model.head or {}
    if head and find_head(head).predicts == "span":
        return {"task": head["task"], "null_answers": head.get("null_answers", False)}
    # Runs of earlier versions lack fields, which are empty in later ones.
    read = {f"config.data.{name}": data.get(name) or None for name in columns}
    read |= {name: value for name, value in head.items() if name not in _OWN}
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


def predict_answers(
    applies: Sequence[Callable[[Sequence[ModelInput]], Outputs]],
    predictors: Sequence[AnswerPredictor],
    examples: Iterable,
) -> Iterator[Sequence]:
    """Yields the predictions of each block of questions, averaged by `average_answers`.

    `applies` and `predictors` are those of each model, which has its own tokens and lengths. The
    first predictor, which has the settings of the ensemble, describes the answers.
    """
    first = predictors[0]
    for block in split_into_blocks(examples):
        found = [
            predictor.find_answers(apply(predictor.features(block)))
            for apply, predictor in zip(applies, predictors, strict=True)
        ]
        averaged = [
            average_answers(each, first.null_threshold) for each in zip(*found, strict=True)
        ]
        yield first.describe_answers(block, averaged)


def average_answers(found: Sequence[RankedAnswers], null_threshold: float | None) -> RankedAnswers:
    """Returns the `N_BEST` answers to a question by their mean probability over models.

    A model that does not list a text gives it the probability 0; the place of a text is that where
    a model finds it most probable. The no-answer score difference is averaged: "no answer" ranks
    first if it exceeds the threshold, and else behind an answer; None: questions always have
    answers.
    """
    probabilities: dict[str, float] = collections.defaultdict(float)
    places = {}
    for answer in sorted(
        (answer for ranked in found for answer in ranked.answers),
        key=lambda answer: -answer.probability,
    ):
        probabilities[answer.text] += answer.probability / len(found)
        places.setdefault(answer.text, answer)
    answers = [answer._replace(probability=probabilities[text]) for text, answer in places.items()]
    answers.sort(key=lambda answer: -answer.probability)
    null_odds = float(np.mean([ranked.null_odds for ranked in found]))
    if null_threshold is not None:
        is_null = null_odds > null_threshold
        first = next((each for each in answers if bool(each.text) != is_null), answers[0])
        answers.remove(first)
        answers.insert(0, first)
    return RankedAnswers(answers[:N_BEST], null_odds)
