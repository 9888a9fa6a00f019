"""Reads the teacher of a pre-training run, and what the student and the step take from it."""

import jax
from absl import logging
from ml_collections import ConfigDict

from bert_jax.checkpoints.parameters import LoadedModel, log_report
from bert_jax.checkpoints.read import abstract_params, read_model
from bert_jax.model.architecture import architecture_of, config_from_settings
from bert_jax.objectives import Objective, learns_from_teacher
from bert_jax.sharding.rules import infer_shardings, with_shardings
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.pretrain_setup import PretrainSetup


def read_teacher(
    config: ConfigDict, objective_class: type[Objective], tokenizer: Tokenizer
) -> LoadedModel | None:
    """Reads `config.distillation.teacher`, if given. Raises ValueError if it cannot teach."""
    directory, layers = config.distillation.teacher, config.distillation.init_layers
    if layers and not directory:
        raise ValueError(
            "config.distillation.init_layers needs the teacher of these layers: set "
            "config.distillation.teacher=DIR, with config.objective=distillation"
        )
    if not directory:
        return None
    if not learns_from_teacher(objective_class):
        fix = "set config.objective=distillation, or leave the teacher out"
        raise ValueError(
            f"config.distillation.teacher={directory}: objective {config.objective} does not "
            f"use a teacher: {fix}"
        )
    if layers and config.init_from:
        raise ValueError(
            "init_from and distillation.init_layers both say what the student starts from: set "
            "only one of them"
        )
    teacher = read_model(directory)
    log_report(directory, teacher.report)
    if teacher.tokenizer.sha256 != tokenizer.sha256:
        raise ValueError(
            f"the corpus was not built with the tokenizer of the teacher in {directory}: build it "
            f"with --vocab={directory}, whose tokenizer is then used unchanged"
        )
    return teacher


def student_weights(setup: PretrainSetup, teacher: LoadedModel | None) -> LoadedModel | None:
    """Returns what the student starts from, if it is the teacher's layers; logs which."""
    layers = setup.config.distillation.init_layers
    if not (teacher and layers):
        return None
    modules = setup.abstract_state.params
    params = setup.phases[0].objective.initial_params(teacher.params, modules)
    fresh = ", ".join(sorted({*modules} - {*params})) or "nothing"
    logging.info(
        "Starting from layers %s of %s; newly initialized: %s",
        ", ".join(map(str, layers)),
        setup.config.distillation.teacher,
        fresh,
    )
    return teacher._replace(params=params)


def place_frozen(setup: PretrainSetup, teacher: LoadedModel | None) -> dict:
    """Returns what the step reads beside the state: the teacher's parameters on the devices.

    They are sharded by the rules of the teacher's architecture; without a teacher there are none.
    """
    if not teacher:
        return {}
    frozen = setup.phases[0].objective.frozen_params(teacher.params)
    return jax.device_put(frozen, _shardings(setup, frozen))


def abstract_frozen(setup: PretrainSetup) -> dict:
    """Returns the shapes, dtypes and shardings of `place_frozen`."""
    if not setup.teacher_settings:
        return {}
    params = abstract_params(setup.teacher_settings)
    frozen = setup.phases[0].objective.frozen_params(params)
    return with_shardings(frozen, _shardings(setup, frozen))


def _shardings(setup: PretrainSetup, frozen: dict) -> dict:
    rules = architecture_of(config_from_settings(setup.teacher_settings)).RULES
    return infer_shardings(frozen, setup.mesh, rules)
