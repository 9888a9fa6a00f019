"""The phases of a pre-training run: their fields, corpora, rows and learning rates.

`config` is a run's, or a phase's own: a copy in which its fields replace those of the first phase.
"""

import collections
import copy
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import optax
from ml_collections import ConfigDict

from bert_jax.checkpoints.transformers_names import check_positions
from bert_jax.configs.pretrain.fields import (
    MAKE_LATER_PHASES,
    PHASE,
    TRAINING,
    known_fields,
    phases_of,
)
from bert_jax.data.features import ONE_SEGMENT
from bert_jax.data.row_stream import RowStream, parse_mixture, source_names, weights_by_size
from bert_jax.data.rows import Rows, manifest_checksum
from bert_jax.objectives import Objective, find_objective
from bert_jax.runtime import config_fields
from bert_jax.runtime.config_fields import Bounds, check_bounds
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.optimizer import make_schedule, make_stable_schedule


@dataclasses.dataclass(frozen=True)
class Phase:
    """Consecutive steps of a run, on rows of one length.

    Attributes:
      train: the rows to train on, of a mixture those of the first corpus. To compile a step, only
        their `max_seq_length` and `max_sequences` are needed.
      heldout: the rows to evaluate on, by the name of their corpus (`source_names`); None if the
        step is only compiled.
      start, stop: the steps `[start, stop)` of the run.
      batch_size: rows per step, over all devices.
      max_predictions: maximum number of targets in a row.
      objective_class: the `Objective` of the run, the same in all phases.
      name: the group of its fields in the configuration, such as "long_phase"; "" of the first.
      stream: the rows of its steps, in order; None if the step is only compiled.
    """

    train: Rows
    heldout: dict[str, Rows] | None
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

    @property
    def corpora(self) -> Sequence[Rows]:
        """The corpora that its `stream` is of: one, or those of a mixture."""
        return self.stream.corpora


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
            given = {field: value for field, value in values.items() if value is not None}
            previous.update_from_flattened_dict(given)
        configs[name] = previous
    return configs


def open_phases(config: ConfigDict) -> list[Phase]:
    """Opens the corpora of all phases with steps. Raises ValueError or CorpusError.

    A later phase on a corpus of an earlier one continues where that one has stopped.
    """
    phases, rows_read, uses_temperature = [], collections.Counter(), False
    open_rows = functools.cache(functools.partial(Rows, shuffle_seed=config.seed))
    open_heldout = functools.cache(functools.partial(Rows, split="heldout"))
    objective_class = find_objective(config.objective)
    for name, phase_config in phase_configs(config).items():
        check_has_corpus(name, phase_config)
        given = corpus_weights(name, phase_config)
        corpora = [open_rows(directory) for directory in given]
        for rows in corpora:
            check_rows(name, phase_config, rows, corpora[0])
        weights = list(given.values())
        if None in weights:
            temperature = phase_config.corpus_temperature or 1.0
            weights = weights_by_size([rows.num_rows for rows in corpora], temperature)
            uses_temperature |= len(weights) > 1
        contents = [manifest_checksum(rows.manifest) for rows in corpora]
        check_distinct(name, corpora, contents)
        # The long phase begins its corpora, as it always has: runs of earlier versions resume.
        first_rows = [0 if name == "long_phase" else rows_read[each] for each in contents]
        stream = RowStream(corpora, weights, first_rows)
        heldout = dict(zip(source_names(given), map(open_heldout, given), strict=True))
        start = phases[-1].stop if phases else 0
        phase = plan_phase(phase_config, objective_class, name, corpora[0], heldout, start)
        phases.append(dataclasses.replace(phase, stream=stream))
        for each, count in zip(contents, stream.rows_of_each(phase.num_rows), strict=True):
            rows_read[each] += int(count)
    check_same_documents(phases)
    if config.next_sentence:
        check_same_labels(phases)
    if config.corpus_temperature is not None and not uses_temperature:
        raise ValueError(
            f"config.corpus_temperature={config.corpus_temperature} has no effect: no phase has a "
            "mixture without weights, such as config.corpus=wiki,books"
        )
    return phases


def plan_phase(
    config: ConfigDict,
    objective_class: type[Objective],
    name: str,
    rows,
    heldout: dict[str, Rows] | None,
    start: int,
) -> Phase:
    """Returns the phase `name`, which begins at step `start`; `config` is of `phase_configs`."""
    given = config.max_predictions
    try:
        max_predictions = objective_class.max_predictions(config, given, rows.max_seq_length)
    except ValueError as error:
        prefix = prefix_of(name)
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


def prefix_of(name: str) -> str:
    """Returns what precedes the names of the fields of the phase `name` in a message."""
    return f"config.{name}." if name else "config."


def corpus_weights(name: str, config: ConfigDict) -> dict[str, float | None]:
    """Returns the weight of each corpus of the phase `name`, whose own `config` this is.

    Without weights they are None, and follow from the sizes. Raises ValueError as `parse_mixture`
    does.
    """
    try:
        return parse_mixture(config.corpus)
    except ValueError as error:
        raise ValueError(f"{prefix_of(name)}corpus={config.corpus}: {error}") from None


def check_has_corpus(name: str, config: ConfigDict) -> None:
    """Raises ValueError if the phase `name`, with this `config`, has no corpus."""
    if not config.corpus:
        prefix = prefix_of(name)
        rows = {"": " on short rows", "long_phase": " on long rows"}.get(name, "")
        raise ValueError(
            f"no corpus for {config.num_steps:,} steps{rows}: "
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
        prefix = prefix_of(name)
        raise ValueError(
            f"{rows.source} has rows of {rows.max_seq_length} tokens, but {prefix}max_seq_length="
            f"{expected}: set {prefix}corpus to one that was built with max_seq_length={expected}, "
            f"or {prefix}max_seq_length={rows.max_seq_length}"
        )


def check_distinct(name: str, corpora: Sequence[Rows], contents: Sequence[int]) -> None:
    """Raises ValueError if two corpora of the phase `name` have the same `contents`, a checksum."""
    first = {}
    for rows, checksum in zip(corpora, contents, strict=True):
        other = first.setdefault(checksum, rows)
        if other is not rows:
            raise ValueError(
                f"{prefix_of(name)}corpus: {other.source} and {rows.source} are the same corpus; "
                "list it once, with the sum of the weights"
            )


def check_same_labels(phases: list[Phase]) -> None:
    """Raises ValueError if the labels of two corpora mean different things: next or swapped."""
    kinds = {}
    for rows in itertools.chain(*(phase.corpora for phase in phases)):
        kinds.setdefault(rows.manifest["config"]["rows"] == "sentence_order", rows)
    if len(kinds) > 1:
        raise ValueError(
            f"{kinds[True].source} has labels of swapped sentences (rows=sentence_order), and "
            f"{kinds[False].source} of next sentences: build all corpora with the same rows"
        )


def check_same_documents(phases: list[Phase]) -> None:
    """Raises ValueError if the corpora differ in vocabulary, or hold out others of their documents.

    Corpora of the same inputs, such as those of short and long rows, hold out the same documents.
    """
    corpora = list(dict.fromkeys(itertools.chain(*(phase.corpora for phase in phases))))
    first = corpora[0]
    for rows in corpora:
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
    # In small corpora the share of held-out documents also depends on filters and rows.
    for one, other in itertools.combinations(corpora, 2):
        same_share = one.manifest.get("heldout_share") == other.manifest.get("heldout_share")
        if not same_share and inputs_of(one) & inputs_of(other):
            raise ValueError(
                f"{one.source} and {other.source} hold out different documents, because the "
                "corpora are small: build both with a larger heldout_fraction"
            )


def inputs_of(rows: Rows) -> set[tuple[str, int]]:
    """Returns the name and size of each input that the corpus of `rows` was built from."""
    inputs = rows.manifest["config"]["inputs"]
    return {(pathlib.PurePath(each["path"]).name, each["bytes"]) for each in inputs}


def check_special_tokens(tokenizer: Tokenizer, model_config) -> None:
    """Raises ValueError if padding or the mask has another id than the model expects."""
    check_positions(model_config, tokenizer.pad_id)
    expected = getattr(model_config, "mask_id", tokenizer.mask_id)
    if expected != tokenizer.mask_id:
        raise ValueError(
            f"model.mask_id is {expected}, but in the vocabulary of the corpus [MASK] has the id "
            f"{tokenizer.mask_id}: use the model's vocabulary, or state config.model.mask_id="
            f"{tokenizer.mask_id} in a configuration of your own"
        )


def check_segments(phases: list[Phase], model_config) -> None:
    """Raises ValueError if a corpus has sentence pairs, but the model has a single segment."""
    for rows in itertools.chain(*(phase.corpora for phase in phases)):
        labels = rows.manifest["splits"]["train"]["nsp_labels"]
        if getattr(model_config, "type_vocab_size", 0) == 1 and any(labels.values()):
            raise ValueError(f"the corpus has pairs, but {ONE_SEGMENT}")


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


def schedule_of(config: ConfigDict, name: str) -> ScheduledSteps:
    """Returns the warm-up and decay that the phase `name` belongs to."""
    return next(part for part in scheduled_steps(config) if name in part.phases)


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
    for name in ("decay_from", "decay_power"):
        default = TRAINING[name].default
        if config.decay_steps is not None and config[name] != default:
            raise ValueError(
                f"config.{name}={config[name]} has no effect with decay_steps="
                f"{config.decay_steps}: set config.{name}={default}"
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
