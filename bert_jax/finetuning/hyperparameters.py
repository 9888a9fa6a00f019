"""Builds the hyperparameters of a trial, and the schedule and optimizer that use them."""

import dataclasses

import numpy as np
import optax
from ml_collections import ConfigDict

from bert_jax.training.optimizer import (
    Hyperparameters,
    make_optimizer,
    make_schedule,
    scale_updates_by_layer,
)

RATES = ("dropout_rate", "attention_dropout_rate")
"""Fields of `config.model` in which trials may differ; None means the rate of the weights."""


def model_config_of_trial(trial: ConfigDict, model_config):
    """Returns `model_config`, that of the weights, with the dropout rates that the trial sets."""
    rates = {name: trial.model[name] for name in RATES if trial.model[name] is not None}
    return dataclasses.replace(model_config, **rates)


def make_hyperparameters(trial: ConfigDict, model_config, num_steps: int) -> Hyperparameters:
    """Returns the hyperparameters of a trial; `model_config` is that of the weights."""
    model_config = model_config_of_trial(trial, model_config)
    attention_dropout_rate = model_config.attention_dropout_rate
    if attention_dropout_rate is None:
        attention_dropout_rate = model_config.dropout_rate
    warmup_steps = trial.warmup_steps
    if warmup_steps is None:
        warmup_steps = round(trial.warmup_fraction * num_steps)
    return Hyperparameters(
        learning_rate=np.float32(trial.learning_rate),
        weight_decay=np.float32(trial.weight_decay),
        warmup_steps=np.float32(warmup_steps),
        num_steps=np.float32(max(num_steps, 1)),
        dropout_rate=np.float32(model_config.dropout_rate),
        attention_dropout_rate=np.float32(attention_dropout_rate),
    )


def finetune_schedule(config: ConfigDict, values: Hyperparameters) -> optax.Schedule:
    """Returns the learning rate of each step; the values may be traced."""
    return make_schedule(
        values.learning_rate,
        values.num_steps,
        values.warmup_steps,
        decay_from=config.decay_from,
        power=config.decay_power,
    )


def finetune_optimizer(
    config: ConfigDict, model_config, trains_encoder: bool, values: Hyperparameters
) -> optax.GradientTransformation:
    """Builds the optimizer of a trial; the values may be traced."""
    optimizer = make_optimizer(
        config.optimizer,
        finetune_schedule(config, values),
        weight_decay=values.weight_decay,
        clip_norm=config.clip_norm,
    )
    num_frozen = config.freeze_layers if trains_encoder else model_config.num_layers
    return scale_updates_by_layer(optimizer, model_config, config.layer_decay, num_frozen)
