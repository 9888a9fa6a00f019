"""The programs of a sweep: trials that train as one stack, and the memory that they need."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
from absl import logging

from bert_jax.finetuning.finetune_fields import PER_TRIAL
from bert_jax.finetuning.finetune_setup import FinetuneSetup
from bert_jax.finetuning.pruning import MIN_OTHERS
from bert_jax.finetuning.trials import Trial
from bert_jax.runtime import distributed
from bert_jax.runtime.config_fields import flatten
from bert_jax.sweeps import memory
from bert_jax.sweeps.configurations import Configuration, plural


class Program(NamedTuple):
    """Trials that train as one stack, under a name such as 1.1."""

    name: str
    setup: FinetuneSetup
    trials: Sequence[Trial]

    @property
    def group(self) -> str:
        """Names the programs that share a setup."""
        return self.name.partition(".")[0]

    @property
    def is_finished(self) -> bool:
        return all(trial.result_path.exists() for trial in self.trials)


class Group(NamedTuple):
    """Trials that differ only in PER_TRIAL.

    Attributes:
      shared: their other fields, as text.
      parts: program name -> its trials.
    """

    shared: str
    parts: dict[str, Sequence[Trial]]


def group_trials(configurations: Sequence[Configuration]) -> dict[str, list[Trial]]:
    """Groups the trials whose fields outside PER_TRIAL are equal.

    The first seed of all configurations comes first, so that more seeds do not change the first
    programs.
    """
    groups = {}
    by_seed = zip(*(configuration.trials for configuration in configurations), strict=True)
    for trial in itertools.chain.from_iterable(by_seed):
        shared = {k: v for k, v in flatten(trial.config).items() if k not in PER_TRIAL}
        groups.setdefault(repr(shared), []).append(trial)
    return groups


def split(trials: Sequence[Trial], size: int, number: int) -> dict[str, Sequence[Trial]]:
    """Splits the trials of group `number` into programs, by name, of at most `size` (0: all)."""
    starts = range(0, len(trials), size or len(trials))
    parts = [trials[start : start + starts.step] for start in starts]
    return {f"{number}.{part}": stack for part, stack in enumerate(parts, 1)}


def check_pruning(programs: Sequence[Program], prune_from: int) -> None:
    """Raises ValueError if no trial can be pruned from evaluation `prune_from` on; 0: none is.

    Logs the programs with too few trials if there are others.
    """
    if not prune_from:
        return
    start = f"config.prune_from_evaluation={prune_from}"
    small = [program for program in programs if len(program.trials) <= MIN_OTHERS]
    if len(small) == len(programs):
        largest = max(len(program.trials) for program in programs)
        raise ValueError(
            f"{start}: a trial is compared with at least {MIN_OTHERS} others of its program, and "
            f"the largest program has {plural(largest, 'trial')}: set config.max_stacked_trials to "
            f"{MIN_OTHERS + 1} or more (by default a CPU does not stack trials), and more values "
            "of fields in which stacked trials may differ, or more seeds"
        )
    if small:
        names = ", ".join(program.name for program in small)
        logging.warning("%s: no trial is pruned in programs %s, which are too small", start, names)
    evaluations = 0  # Before the last step of a trial.
    for program in programs:
        eval_every = program.setup.config.eval_every or program.setup.steps_per_epoch
        for trial in program.trials:
            evaluations = max(
                evaluations, (program.setup.num_steps(trial.config) - 1) // eval_every
            )
    if evaluations < prune_from:
        raise ValueError(
            f"{start}: trials have at most {plural(evaluations, 'evaluation')} before their last "
            "step, so that none could be pruned: set a smaller number, a smaller "
            "config.base.eval_every, or more epochs"
        )


def check_memory(programs: Sequence[Program]) -> None:
    """Raises ValueError if a stack needs more memory than its devices have."""
    # Another worker may finish a program meanwhile, but all processes must compile the same ones.
    unfinished = " ".join(program.name for program in programs if not program.is_finished)
    names, counts = distributed.allgather_texts(unfinished)[0].split(), {}
    for program in programs:
        is_stacked = len(program.trials) > program.setup.mesh.shape["trial"]
        if not is_stacked or program.name not in names:
            continue
        if program.group not in counts:
            counts[program.group] = fitting_trials(program.setup)
        with distributed.raise_on_all_processes():
            if counts[program.group] < len(program.trials):
                raise too_many_trials(program, counts[program.group])


def too_many_trials(program: Program, count: int) -> ValueError:
    """Returns the error for a program of which only `count` trials fit into memory."""
    advice = f"about {count} fit: set config.max_stacked_trials={count}, or a smaller"
    if not count:
        advice = "not even one fits: set a smaller"
    return ValueError(
        f"not enough memory for program {program.name}, with "
        f"{plural(len(program.trials), 'trial')}: "
        f"{advice} config.base.per_device_batch_size"
    )


def fitting_trials(setup: FinetuneSetup) -> int:
    """Returns how many trials fit into one program, as the compiler plans its memory."""
    try:
        return memory.trials_that_fit(setup, memory.bytes_per_trial(setup))
    except jax.errors.JaxRuntimeError:
        return 0
