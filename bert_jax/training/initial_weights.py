"""Builds the initial state of pre-training: fresh, from weights, or from a teacher's layers."""

import itertools

import jax
from absl import logging
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from bert_jax.checkpoints.checksums import check_files
from bert_jax.checkpoints.native import find_checkpoint, load_settings
from bert_jax.checkpoints.parameters import (
    LoadedModel,
    log_report,
    modules_of,
    trained_length,
)
from bert_jax.checkpoints.read import read_model
from bert_jax.objectives.replaced_tokens import has_own_tables, trainable_params
from bert_jax.runtime import distributed
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.moments import read_moments
from bert_jax.training.optimizer import with_moments
from bert_jax.training.phases import Phase
from bert_jax.training.pretrain_setup import PretrainSetup
from bert_jax.training.pretrain_teacher import student_weights
from bert_jax.training.state import TrainState


def read_source(config: ConfigDict, tokenizer: Tokenizer) -> LoadedModel | None:
    """Reads `config.init_from`, if given. Raises ValueError if the run cannot start from it."""
    source = read_model(config.init_from) if config.init_from else None
    settings = source.settings if source and "training" in source.report.unused else {}
    optimizer = (
        None if "head" in settings else settings.get("optimizer")
    )  # That of fine-tuning does not count.
    if config.init_optimizer_from:
        _check_moments(config)
    elif config.init_optimizer and optimizer != config.optimizer:
        raise ValueError(
            f"config.init_optimizer needs a pre-training run with optimizer {config.optimizer}, "
            f"and init_from={config.init_from!r} is none: set it to one, or init_optimizer=False, "
            "or init_optimizer_from to the run from which the weights were made"
        )
    if not source:
        return None
    log_report(config.init_from, source.report)
    if source.tokenizer.sha256 != tokenizer.sha256:
        raise ValueError(
            f"the corpus was not built with the tokenizer of the weights in {config.init_from}: "
            f"build it with --vocab={config.init_from}, whose tokenizer is then used unchanged"
        )
    return source


def _check_moments(config: ConfigDict) -> None:
    """Raises ValueError if `config.init_optimizer_from` has no moments that the run could take."""
    where = f"config.init_optimizer_from={config.init_optimizer_from!r}"
    if not config.init_from:
        raise ValueError(f"{where} needs weights to start from: set config.init_from")
    settings = load_settings(find_checkpoint(config.init_optimizer_from))
    has_moments = settings.get("has_training_state", True) and "head" not in settings
    if not has_moments or settings.get("optimizer") != config.optimizer:
        raise ValueError(
            f"{where} is no pre-training run with optimizer {config.optimizer}: set it to one, or "
            'to ""'
        )


def choose_weights(
    setup: PretrainSetup, source: LoadedModel | None, teacher: LoadedModel | None
) -> LoadedModel | None:
    """Returns the weights that the model of `setup` starts from, of `source` or `teacher`; logs it.

    None: all are fresh. Raises ValueError if a module has other parameters in the source.
    """
    return keep_modules(source, setup) if source else student_weights(setup, teacher)


def keep_modules(source: LoadedModel, setup: PretrainSetup) -> LoadedModel:
    """Returns the weights that the model of `setup` starts from; logs what is fresh.

    Raises ValueError if a module has other parameters in the weights.
    """
    config, modules = setup.config, modules_of(setup.abstract_state.params)
    if "difference" in modules and has_own_tables(source.params):
        own = {"modules": sorted({*source.settings["modules"], "difference"})}
        source = source._replace(
            params=trainable_params(source.params), settings=source.settings | own
        )
    fresh = sorted(set(modules) - set(source.settings["modules"]))
    has_moments = config.init_optimizer or config.init_optimizer_from
    names = ", ".join(fresh + ["optimizer"] * (not has_moments)) or "nothing"
    logging.info("Starting from %s; newly initialized: %s", config.init_from, names)
    params = flatten_dict(source.params, sep="/")
    kept = tuple(f"{module}/" for module in modules)
    params = {path: leaf for path, leaf in params.items() if path.startswith(kept)}
    expected = flatten_dict(setup.abstract_state.params, sep="/")
    for module in set(modules) - set(fresh):
        found, wanted = (
            {path: leaf.shape for path, leaf in tree.items() if path.startswith(f"{module}/")}
            for tree in (params, expected)
        )
        for path in sorted(found | wanted):
            if found.get(path) != wanted.get(path):
                raise ValueError(
                    f"{path} is {found.get(path, 'absent')} in {config.init_from}, but "
                    f"{wanted.get(path, 'absent')} in this run: set the fields that decide the "
                    f"size of {module}, such as config.generator's, as that run did"
                )
    return source._replace(params=unflatten_dict(params, sep="/"))


def initial_state(setup: PretrainSetup, source: LoadedModel | None) -> TrainState:
    """Returns the state before the first step, with the weights and moments to start from."""
    config, init = setup.config, jax.jit(setup.init, out_shardings=setup.shardings)
    state = init(jax.random.key(config.seed), pretrained=source and source.params)
    path = config.init_optimizer_from or (config.init_from if config.init_optimizer else "")
    if not path:
        return state
    with distributed.raise_on_all_processes():
        directory = find_checkpoint(path)
        if config.checksums:
            check_files(directory, ("training", "vocabulary"))
        moments = read_moments(directory, state.params, source)
    opt_state = with_moments(state.opt_state, moments)
    return state.replace(opt_state=jax.device_put(opt_state, setup.shardings.opt_state))


def trained_lengths(phases: list[Phase], source: LoadedModel | None) -> list[int | None]:
    """Returns the length up to which positions are trained after each phase; None if unknown."""
    trained = trained_length(source.settings) if source else 0
    if trained is None:
        return [None] * len(phases)
    lengths = itertools.accumulate((phase.train.max_seq_length for phase in phases), max)
    return [max(length, trained) for length in lengths]
