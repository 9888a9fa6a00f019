"""Builds the models, optimizer and state shardings of a pre-training configuration.

`bert_jax.pretrain` and the TPU tools share them: what is compiled ahead of time is what runs.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import flax.linen as nn
import jax
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bert_jax.configs.pretrain.fields import PHASE
from bert_jax.data.batches import abstract_rows
from bert_jax.data.features import check_layout
from bert_jax.model.architecture import architecture_of, config_from_settings
from bert_jax.model.encoder import encoders_of
from bert_jax.model.execution import Execution, log_path, plan_execution
from bert_jax.objectives import Objective
from bert_jax.runtime.named_modules import import_part
from bert_jax.sharding.mesh import make_mesh
from bert_jax.sharding.rules import infer_shardings, shard_over_data, with_shardings
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.optimizer import make_optimizer
from bert_jax.training.phases import (
    Phase,
    phase_configs,
    prefix_of,
    pretraining_schedule,
    stable_step,
)
from bert_jax.training.state import TrainState, init_state

# Fields of `config.model` that are not the model config's.
EXECUTION_FIELDS = tuple(field.name for field in dataclasses.fields(Execution))


@dataclasses.dataclass(frozen=True)
class PhaseSetup:
    """A phase, and what its steps need.

    Attributes:
      phase: its steps and rows.
      objective: turns its rows into batches, and computes the losses.
      num_microbatches: per update.
      flops_per_row: the FLOPs of an update per row.
      model: the model, with the phase's own fields; its parameters are those of all phases.
    """

    phase: Phase
    objective: Objective
    num_microbatches: int
    flops_per_row: float
    model: nn.Module


@dataclasses.dataclass(frozen=True)
class PretrainSetup:
    """The model, optimizer and shardings from which the steps of a run are built.

    Attributes:
      config: of the run.
      phases: of the run, in order.
      model: of the first phase.
      mesh: of all phases.
      schedule: step, counted from 0 -> learning rate.
      optimizer: with this schedule.
      init: (key, `pretrained` parameters) -> initial state; to be jitted with `shardings`.
      abstract_state: the shapes, dtypes and shardings of the state.
      shardings: of the state.
      teacher_settings: the settings stored with a teacher's weights; None without a teacher.
      stable_step: the last step at a constant learning rate, whose checkpoint is kept for further
        decays from it; None if the rate decays from the start.
    """

    config: ConfigDict
    phases: tuple[PhaseSetup, ...]
    model: nn.Module
    mesh: Mesh
    schedule: Callable[[int], jax.Array]
    optimizer: optax.GradientTransformation
    init: Callable[..., TrainState]
    abstract_state: TrainState
    shardings: TrainState
    teacher_settings: Mapping | None = None
    stable_step: int | None = None


def setup_pretraining(
    config: ConfigDict,
    phases: list[Phase],
    tokenizer: Tokenizer,
    devices=None,
    source_settings: Mapping | None = None,
    teacher_settings: Mapping | None = None,
) -> PretrainSetup:
    """Builds the setup of all `phases` on `devices` (None: all of them); computes nothing.

    `source_settings` are stored with the weights to start from, `teacher_settings` with those of a
    teacher; None if there are none. Raises ValueError if `make_model_config` does, if the mesh does
    not fit the devices, or if a batch or the rows do not fit the mesh or the model.
    """
    configs = phase_configs(config)
    objectives = [
        build_objective(configs[phase.name], tokenizer, phase, teacher_settings) for phase in phases
    ]
    objective = objectives[0]  # Its parameters are those of all phases.
    source = config_from_settings(source_settings) if source_settings else None
    teacher = config_from_settings(teacher_settings) if teacher_settings else None
    # The embeddings of some models have more rows than their tokenizer has ids.
    vocab_size = tokenizer.vocab_size
    for pretrained in (source, teacher):
        if pretrained:
            vocab_size = max(vocab_size, pretrained.vocab_size)
    model_config = make_model_config(config, vocab_size, source, causal=objective.causal)
    check_next_sentence(config, model_config)
    check_layout(model_config, tokenizer)
    check_stream(config.objective, objective, model_config)
    model_configs = [model_config_of(phase, configs[phase.name], model_config) for phase in phases]
    for phase, each in zip(phases, model_configs, strict=True):
        check_length(phase, each, teacher)
    mesh = make_mesh(**config.mesh, devices=devices)
    plan = plan_execution(model_execution(config), mesh.devices.flat[0], mesh.shape["tensor"])
    models = {each: objective.make_model(each, plan) for each in dict.fromkeys(model_configs)}
    model = models[model_configs[0]]
    num_shards = mesh.shape["data"] * mesh.shape["fsdp"]
    if config.eval_batch_size % num_shards:
        expected = f"expected a multiple of the {num_shards} shards of a batch (data x fsdp)"
        raise ValueError(f"config.eval_batch_size={config.eval_batch_size}: {expected}")
    schedule = pretraining_schedule(config)
    optimizer = make_optimizer(
        config.optimizer,
        schedule,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        beta1=config.beta1,
        beta2=config.beta2,
        epsilon=config.epsilon,
    )
    rows = abstract_rows(phases[0].train, num_rows=1)
    batch = jax.eval_shape(objective.prepare, rows, jax.random.key(config.seed))
    init = functools.partial(init_state, model=model, optimizer=optimizer, batch=batch)
    shapes = jax.eval_shape(init, jax.random.key(config.seed))
    for phase, each in zip(phases, model_configs, strict=True):
        if each != model.config:
            check_same_parameters(phase, models[each], batch, shapes.params)
    rules = (*objective.rules, *architecture_of(model_config).RULES)
    shardings = infer_shardings(shapes, mesh, rules)
    if config.shard_weight_update:
        shardings = shard_over_data(shardings, shapes)
    phase_setups = tuple(
        PhaseSetup(
            phase=phase,
            objective=each,
            num_microbatches=count_microbatches(configs[phase.name], phase, num_shards),
            flops_per_row=each.flops_per_row(
                phase_model_config, phase.train.max_seq_length, phase.train.max_sequences
            ),
            model=models[phase_model_config],
        )
        for phase, each, phase_model_config in zip(phases, objectives, model_configs, strict=True)
    )
    for each in phase_setups:
        for encoder_config in encoders_of(each.model).values():
            log_path(model.plan, encoder_config, each.phase.train.max_seq_length)
    return PretrainSetup(
        config=config,
        phases=phase_setups,
        model=model,
        mesh=mesh,
        schedule=schedule,
        optimizer=optimizer,
        init=init,
        abstract_state=with_shardings(shapes, shardings),
        shardings=shardings,
        teacher_settings=teacher_settings,
        stable_step=stable_step(config),
    )


def check_next_sentence(config: ConfigDict, model_config) -> None:
    """Raises ValueError for `next_sentence` if [CLS] is last: its segment makes a text a pair."""
    if config.next_sentence and getattr(model_config, "cls_last", False):
        raise ValueError(
            f"model.architecture={model_config.architecture} has no next-sentence loss: set "
            "config.next_sentence=False"
        )


def check_stream(name: str, objective: Objective, model_config) -> None:
    """Raises ValueError if an objective would train a head on a stream that it does not read."""
    has_queries = getattr(model_config, "has_query_stream", False) and not objective.causal
    if has_queries and not getattr(objective, "reads_query_stream", False):
        raise ValueError(
            f"config.objective={name} predicts tokens from the content stream, and the head of "
            f"{model_config.architecture} reads the query stream: set config.objective=permutation"
        )


def build_objective(
    config: ConfigDict,
    tokenizer: Tokenizer,
    phase: Phase,
    teacher_settings: Mapping | None = None,
) -> Objective:
    """Builds the objective of a phase, with its teacher if it has one. Raises ValueError.

    `config` is the phase's, of `phase_configs`.
    """
    objective = phase.objective_class.from_config(config, tokenizer, phase.max_predictions)
    return objective.with_teacher(teacher_settings) if teacher_settings else objective


def count_microbatches(config: ConfigDict, phase: Phase, num_shards: int) -> int:
    """Returns the number of microbatches per update; raises ValueError if they are unequal.

    `config` is the phase's, `num_shards` the number of shards of a batch.
    """
    rows_per_device = config.per_device_batch_size
    microbatch_size = max(rows_per_device, 1) * num_shards
    if phase.batch_size % microbatch_size:
        prefix, fix = prefix_of(phase.name), f"use a multiple of {microbatch_size}"
        if rows_per_device:
            fix += f", or {prefix}per_device_batch_size=0 for one microbatch"
        raise ValueError(
            f"{prefix}batch_size {phase.batch_size} is not divisible by {num_shards} data shards x "
            f"per_device_batch_size {rows_per_device or 1}: {fix}"
        )
    return phase.batch_size // microbatch_size if rows_per_device else 1


def model_config_of(phase: Phase, config: ConfigDict, model_config):
    """Returns the model config of a phase: that of the run, with the fields that phases may set.

    `config` is the phase's. Raises ValueError for a field that the architecture does not have.
    """
    fields = {}
    for name in PHASE:
        group, _, field = name.partition(".")
        value = config.model.get(field) if group == "model" else None
        if value is not None:
            if not hasattr(model_config, field):
                raise ValueError(
                    f"{prefix_of(phase.name)}{name}={value}: {model_config.architecture} has no "
                    "such field: set it to None"
                )
            fields[field] = value
    return dataclasses.replace(model_config, **fields)


def check_same_parameters(phase: Phase, model: nn.Module, batch: dict, expected: dict) -> None:
    """Raises ValueError if the model of a phase has other parameters than the run's first."""
    params = jax.eval_shape(model.lazy_init, jax.random.key(0), batch)["params"]
    shapes, others = (
        {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
            for path, leaf in leaves
        }
        for leaves in map(jax.tree_util.tree_leaves_with_path, (params, expected))
    )
    for path in sorted(shapes | others):
        if shapes.get(path) != others.get(path):
            raise ValueError(
                f"{prefix_of(phase.name)}model changes {path}, which is {others.get(path)} in the "
                f"first phase, to {shapes.get(path)}: {model.config.architecture} needs the same "
                "value in all phases"
            )


def check_length(phase: Phase, model_config, teacher=None) -> None:
    """Raises ValueError if the model or its teacher has too few positions for the rows."""
    max_length, corpus = phase.train.max_seq_length, f"{prefix_of(phase.name)}corpus"
    if max_length > model_config.max_position_embeddings:
        raise ValueError(
            f"{corpus} has rows of {max_length} tokens, but max_position_embeddings is "
            f"{model_config.max_position_embeddings}: build the corpus with a smaller "
            f"max_seq_length, or set config.model.max_position_embeddings={max_length}"
        )
    if teacher and max_length > teacher.max_position_embeddings:
        raise ValueError(
            f"{corpus} has rows of {max_length} tokens, and the teacher only "
            f"{teacher.max_position_embeddings} positions: build it with a smaller max_seq_length"
        )


def make_model_config(config: ConfigDict, vocab_size: int, source=None, *, causal: bool = False):
    """Returns the model config of `config.model`; fields of None follow the size or the weights.

    `causal` is that of the objective; `source` is the model config of the weights to start from, or
    None. Raises ValueError for a field that is invalid or contradicts these weights.
    """
    given = {name: value for name, value in config.model.items() if value is not None}
    fields = {name: value for name, value in given.items() if name not in EXECUTION_FIELDS}
    name = fields.pop("architecture", source.architecture if source else "bert")
    try:
        config_class = import_part("bert_jax.model", name, "encoder_layers").Config
    except ValueError as error:
        raise ValueError(f"config.model.architecture={name}: {error}") from None
    known = {field.name for field in dataclasses.fields(config_class)}
    if hasattr(config_class, "named"):
        known.add("size")
    # If the weights choose the architecture, fields of others are None.
    stated = config.model if "architecture" in given else fields
    unknown = set(stated) - known - {"architecture", *EXECUTION_FIELDS}
    if unknown:
        fix = (
            "in a configuration of your own, set config.model to the fields that it has, or start "
            "from one of the architecture, such as configs/pretrain/modernbert_base.py"
        )
        raise ValueError(f"config.model.{min(unknown)}: {name} has no such field: {fix}")
    if "size" in fields:
        named = config_class.named(fields.pop("size"), **fields)
        fields |= {name: getattr(named, name) for name in config_class.size_fields}
        # Other fields that this size sets, such as Ettin's rotations.
        for field in dataclasses.fields(named):
            if getattr(named, field.name) != field.default:
                fields[field.name] = getattr(named, field.name)
    elif (
        source is None
        and hasattr(config_class, "named")
        and not (set(config_class.size_fields) <= set(fields))
    ):
        fix = "set config.init_from=DIR, the weights to start from, or"
        if config.init_from:
            fix = "this tool does not read the weights:"
        raise ValueError(f"the model's size is unknown: {fix} set config.model.size")
    if source and causal != source.causal:
        trained = "left_to_right" if source.causal else "masked_lm"
        raise ValueError(
            f"objective is {config.objective}, but the weights in {config.init_from} were trained "
            f"with {trained}: set config.objective={trained}"
        )
    if source and name != source.architecture:
        raise ValueError(
            f"model.architecture is {name}, but {source.architecture} in {config.init_from}"
        )
    for field in source.fixed_fields if source else ():
        stored = getattr(source, field)
        if (value := fields.get(field, stored)) != stored:
            message = f"model.{field} is {value}, but {stored} in {config.init_from}"
            fix = f"set config.model.{field}={stored}"
            raise ValueError(f"{message}: {fix}, or use configs/pretrain/continue.py")
    fields |= {"vocab_size": vocab_size, "causal": causal}
    return dataclasses.replace(source, **fields) if source else config_class(**fields)


def model_execution(config: ConfigDict) -> Execution:
    """Returns how the model of `config.model` runs; fields of None have their defaults."""
    given = {name: config.model.get(name) for name in EXECUTION_FIELDS}
    return Execution(**{name: value for name, value in given.items() if value is not None})
