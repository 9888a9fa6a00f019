"""Builds the model, optimizer, state shardings and phases of a pre-training configuration.

`bert_jax.pretrain` and the TPU tools share them: what is compiled ahead of time is what runs.
"""

import collections
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bert_jax.checkpoints.transformers_names import check_positions
from bert_jax.configs.pretrain.fields import (
    MAKE_LATER_PHASES,
    PHASE,
    known_fields,
    phases_of,
)
from bert_jax.data.batches import abstract_rows
from bert_jax.data.features import ONE_SEGMENT
from bert_jax.data.row_stream import RowStream
from bert_jax.data.rows import Rows, manifest_checksum
from bert_jax.model.architecture import architecture_of, config_from_settings
from bert_jax.model.encoder import encoders_of
from bert_jax.model.execution import Execution, log_path, plan_execution
from bert_jax.objectives import Objective, find_objective
from bert_jax.runtime import config_fields
from bert_jax.runtime.config_fields import POSITIVE, Bounds, check_bounds
from bert_jax.runtime.named_modules import import_part
from bert_jax.sharding.mesh import make_mesh
from bert_jax.sharding.rules import infer_shardings, shard_over_data, with_shardings
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.optimizer import (
    make_optimizer,
    make_schedule,
    make_stable_schedule,
)
from bert_jax.training.state import TrainState, init_state

# Fields of `config.model` that are not the model config's.
EXECUTION_FIELDS = tuple(field.name for field in dataclasses.fields(Execution))


@dataclasses.dataclass(frozen=True)
class Phase:
    """Consecutive steps of a run, on rows of one length.

    Attributes:
      train: the rows to train on, of a mixture those of the first corpus. To compile a step, only
        their `max_seq_length` and `max_sequences` are needed.
      heldout: the rows to evaluate on; None if the step is only compiled.
      start, stop: the steps `[start, stop)` of the run.
      batch_size: rows per step, over all devices.
      max_predictions: maximum number of targets in a row.
      objective_class: the `Objective` of the run, the same in all phases.
      name: the group of its fields in the configuration, such as "long_phase"; "" of the first.
      stream: the rows of its steps, in order; None if the step is only compiled.
    """

    train: Rows
    heldout: Rows | None
    start: int
    stop: int
    batch_size: int
    max_predictions: int
    objective_class: type[Objective]
    name: str = ""
    stream: RowStream | None = None

    @property
    def num_steps(self) -> int:
        return self.stop - self.start

    @property
    def num_rows(self) -> int:
        """The rows of all its steps."""
        return self.num_steps * self.batch_size


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
        fix = f"use a multiple of {microbatch_size}"
        if rows_per_device:
            fix += ", or per_device_batch_size=0 for one microbatch"
        raise ValueError(
            f"batch_size {phase.batch_size} is not divisible by {num_shards} data shards x "
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
                    f"config.{phase.name}.{name}={value}: {model_config.architecture} has no such "
                    "field: set it to None"
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
                f"config.{phase.name}.model changes {path}, which is {others.get(path)} in the "
                f"first phase, to {shapes.get(path)}: {model.config.architecture} needs the same "
                "value in all phases"
            )


def check_length(phase: Phase, model_config, teacher=None) -> None:
    """Raises ValueError if the model or its teacher has too few positions for the rows."""
    max_length = phase.train.max_seq_length
    if max_length > model_config.max_position_embeddings:
        raise ValueError(
            f"the corpus has rows of {max_length} tokens, but max_position_embeddings is "
            f"{model_config.max_position_embeddings}: build the corpus with a smaller "
            f"max_seq_length, or set config.model.max_position_embeddings={max_length}"
        )
    if teacher and max_length > teacher.max_position_embeddings:
        raise ValueError(
            f"the corpus has rows of {max_length} tokens, and the teacher only "
            f"{teacher.max_position_embeddings} positions: build it with a smaller max_seq_length"
        )


def check_segments(phases: list[Phase], model_config) -> None:
    """Raises ValueError if a corpus has sentence pairs, but the model has a single segment."""
    for rows in (rows for phase in phases for rows in phase.stream.corpora):
        labels = rows.manifest["splits"]["train"]["nsp_labels"]
        if getattr(model_config, "type_vocab_size", 0) == 1 and any(labels.values()):
            raise ValueError(f"the corpus has pairs, but {ONE_SEGMENT}")


def phase_configs(config: ConfigDict) -> dict[str, ConfigDict]:
    """Returns the configuration of each phase with steps, by the name of its group of fields.

    That of the first phase is `config`. That of another is the one of the phase before, with the
    phase's own fields instead: those that are not None, and its `max_predictions` in any case.
    Those of the learning rate are left out: see `pretraining_schedule`.
    """
    configs, previous = {}, config
    for name, own in phases_of(config).items():
        if not own.num_steps:
            continue
        if name:
            previous = copy.deepcopy(previous).unlock()
            previous.max_predictions = own.max_predictions
            values = config_fields.flatten(own)
            for each in ("learning_rate", "warmup_steps"):
                del values[each]
            if own.corpus is not None and own.mixture is None:
                values["mixture"] = ()
            given = {field: value for field, value in values.items() if value is not None}
            previous.update_from_flattened_dict(given)
        configs[name] = previous
    return configs


def has_own_schedule(phase: ConfigDict) -> bool:
    """Returns whether a warm-up and decay begin with a phase after the first."""
    return not (phase.learning_rate is None and phase.warmup_steps is None)


class ScheduledSteps(NamedTuple):
    """Consecutive phases with one warm-up and decay: their names, peak, steps and warm-up."""

    phases: list[str]
    peak: float
    num_steps: int
    warmup_steps: int


def scheduled_steps(config: ConfigDict) -> list[ScheduledSteps]:
    """Returns the parts of a run that have a warm-up and decay of their own.

    A new one begins with each phase that sets a learning rate or a warm-up (LAMB's re-warm-up).
    """
    parts, peak = [], config.learning_rate
    for name, own in phases_of(config).items():
        if not own.num_steps:
            continue
        if name and has_own_schedule(own):
            peak = own.learning_rate or peak
            parts.append(ScheduledSteps([name], peak, own.num_steps, own.warmup_steps or 0))
        elif not parts:
            parts.append(ScheduledSteps([name], peak, own.num_steps, config.warmup_steps))
        else:
            last = parts.pop()
            parts.append(
                last._replace(phases=[*last.phases, name], num_steps=last.num_steps + own.num_steps)
            )
    return parts


def pretraining_schedule(config: ConfigDict) -> optax.Schedule:
    """Returns the learning rate of each step, counted from 0."""
    schedules, parts = [], scheduled_steps(config)
    for part in parts:
        numbers = part.peak, part.num_steps, part.warmup_steps
        if config.decay_steps is None:
            schedules.append(make_schedule(*numbers, config.decay_from, config.decay_power))
        else:
            decay_steps = config.decay_steps if part is parts[-1] else 0
            schedules.append(make_stable_schedule(*numbers, decay_steps, config.decay_shape))
    ends = itertools.accumulate(part.num_steps for part in parts[:-1])
    return optax.join_schedules(schedules, list(ends))


def stable_step(config: ConfigDict) -> int | None:
    """Returns the last step at a constant learning rate; None if it decays from the start."""
    if config.decay_steps is None:
        return None
    return sum(own.num_steps for own in phases_of(config).values()) - config.decay_steps


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


def open_phases(config: ConfigDict) -> list[Phase]:
    """Opens the corpora of all phases with steps. Raises ValueError or CorpusError.

    A later phase on a corpus of an earlier one continues where that one has stopped.
    """
    phases, rows_read = [], collections.Counter()
    open_rows = functools.cache(functools.partial(Rows, shuffle_seed=config.seed))
    open_heldout = functools.cache(functools.partial(Rows, split="heldout"))
    objective_class = find_objective(config.objective)
    for name, phase_config in phase_configs(config).items():
        check_has_corpus(name, phase_config)
        weights = corpus_weights(name, phase_config)
        corpora = [open_rows(directory) for directory in weights]
        for rows in corpora:
            check_rows(name, phase_config, rows, corpora[0])
        contents = [manifest_checksum(rows.manifest) for rows in corpora]
        # The long phase begins its corpora, as it always has: runs of earlier versions resume.
        first_rows = [0 if name == "long_phase" else rows_read[each] for each in contents]
        stream = RowStream(corpora, list(weights.values()), first_rows)
        heldout = open_heldout(phase_config.corpus)
        start = phases[-1].stop if phases else 0
        phase = plan_phase(phase_config, objective_class, name, corpora[0], heldout, start)
        phases.append(dataclasses.replace(phase, stream=stream))
        for each, count in zip(contents, stream.rows_of_each(phase.num_rows), strict=True):
            rows_read[each] += int(count)
    check_same_documents(phases)
    check_positions(config.model, phases[0].train.tokenizer.pad_id)
    return phases


def corpus_weights(name: str, config: ConfigDict) -> dict[str, float]:
    """Returns the weight of each corpus of the phase `name`, whose own `config` this is.

    Raises ValueError for a mixture that is not pairs of other directories and positive weights.
    """
    weights = {config.corpus: 1.0}
    for pair in config.mixture:
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)
        is_number = is_pair and isinstance(pair[1], int | float)
        if not is_number or not POSITIVE.contain(pair[1]) or pair[0] in weights:
            prefix = f"config.{name}." if name else "config."
            raise ValueError(
                f"{prefix}mixture={config.mixture}: expected pairs of another directory and its "
                f'weight, more than 0, such as (("corpus/books", 0.5),), got {pair!r}'
            )
        weights[pair[0]] = float(pair[1])
    return weights


def check_has_corpus(name: str, config: ConfigDict) -> None:
    """Raises ValueError if the phase `name`, with this `config`, has no corpus."""
    if not config.corpus:
        prefix = f"config.{name}." if name else "config."
        raise ValueError(
            f"no corpus for {config.num_steps:,} steps on {'long' if name else 'short'} rows: "
            f"set {prefix}corpus=DIR, or {prefix}num_steps=0 to skip this phase"
        )


def check_rows(name: str, config: ConfigDict, rows: Rows, first: Rows) -> None:
    """Raises ValueError if rows are not those that the phase `name`, with this `config`, needs.

    `first` are the rows of the first corpus of its mixture.
    """
    labels = rows.manifest["splits"]["train"]["nsp_labels"]
    if config.next_sentence and not any(labels.values()):
        raise ValueError(
            f"{rows.source} has {rows.manifest['config']['rows']}, not sentence pairs: set "
            "config.next_sentence=False, or build it with rows=sentence_pairs"
        )
    for size in ("max_seq_length", "max_sequences"):
        if getattr(rows, size) != getattr(first, size):
            raise ValueError(
                f"{rows.source} and {first.source} cannot be mixed: {size} is "
                f"{getattr(rows, size)} and {getattr(first, size)}; build both with the same"
            )
    if (expected := config.max_seq_length) and rows.max_seq_length != expected:
        prefix = f"config.{name}." if name else "config."
        raise ValueError(
            f"{rows.source} has rows of {rows.max_seq_length} tokens, but {prefix}max_seq_length="
            f"{expected}: set {prefix}corpus to one that was built with max_seq_length={expected}, "
            f"or {prefix}max_seq_length={rows.max_seq_length}"
        )


def check_same_documents(phases: list[Phase]) -> None:
    """Raises ValueError if the corpora differ in vocabulary or in the documents they hold out."""
    first = phases[0].train
    for rows in (rows for phase in phases for rows in phase.stream.corpora):
        both = f"{first.source} and {rows.source}"
        is_same = {"vocab": first.tokenizer.sha256 == rows.tokenizer.sha256}
        for name in ("seed", "heldout_fraction"):
            is_same[name] = first.manifest["config"][name] == rows.manifest["config"][name]
        for name in is_same:
            if not is_same[name]:
                raise ValueError(
                    f"{both} differ in {name}: build both with the same, so that the run trains "
                    "on no held-out document"
                )
        # The share of held-out documents also depends on filters and rows, in small corpora.
        if first.manifest.get("heldout_share") != rows.manifest.get("heldout_share"):
            raise ValueError(
                f"{both} hold out other documents, as they are small: build both with a larger "
                "heldout_fraction"
            )


def plan_phase(
    config: ConfigDict,
    objective_class: type[Objective],
    name: str,
    rows,
    heldout: Rows | None,
    start: int,
) -> Phase:
    """Returns the phase `name`, which begins at step `start`; `config` is of `phase_configs`."""
    given = config.max_predictions
    try:
        max_predictions = objective_class.max_predictions(config, given, rows.max_seq_length)
    except ValueError as error:
        prefix = f"config.{name}." if name else "config."
        raise ValueError(f"{prefix}max_predictions={given}: {error}") from None
    return Phase(
        train=rows,
        heldout=heldout,
        start=start,
        stop=start + config.num_steps,
        batch_size=config.batch_size,
        max_predictions=max_predictions,
        objective_class=objective_class,
        name=name,
    )


def check_numbers(config: ConfigDict) -> None:
    """Validates the numeric fields of a pre-training configuration. Raises ValueError."""
    phases = phases_of(config)
    for name, own in phases.items():
        if name.startswith("later_phases."):
            check_fields_of_phase(name, own)
    config_fields.check_numbers(config, known_fields(config))
    total = sum(own.num_steps for own in phases.values())
    lengths = {name: f"{name}.num_steps" if name else "num_steps" for name in phases}
    if not total:
        names = " and ".join(lengths.values())
        raise ValueError(f"{names} are 0: there is nothing to train")
    first = scheduled_steps(config)[0]
    # A first phase that is skipped leaves its warm-up unused if the next one has its own.
    if config.num_steps or not has_own_schedule(phases[first.phases[0]]):
        limit = " + ".join(lengths[name] for name in first.phases)
        check_bounds(config, Bounds(0, first.num_steps), "warmup_steps", limited_by=limit)
    for name in filter(None, phases):
        limit = Bounds(0, phases[name].num_steps)
        check_bounds(config, limit, f"{name}.warmup_steps", limited_by=lengths[name])
    last = scheduled_steps(config)[-1]
    limit = Bounds(0, last.num_steps - last.warmup_steps)
    check_bounds(config, limit, "decay_steps", limited_by="the steps after the last warm-up")
    if config.decay_shape is not None and config.decay_steps is None:
        raise ValueError(
            f"config.decay_shape={config.decay_shape} has no effect: set decay_steps, too"
        )
    # The first two steps are not profiled.
    check_bounds(config, Bounds(0, max(total - 2, 0)), "profile_steps")


def check_fields_of_phase(name: str, phase: ConfigDict) -> None:
    """Raises ValueError if a later phase has an unknown field, or lacks one."""
    found = config_fields.flatten(phase).keys()
    for names, problem in (
        (found - PHASE.keys(), "a phase has no such field"),
        (PHASE.keys() - found, "it is missing"),
    ):
        if names:
            raise ValueError(f"config.{name}.{min(names)}: {problem}; {MAKE_LATER_PHASES}")
