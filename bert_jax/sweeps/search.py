"""Searches for the best configuration with Optuna, in rounds of trials that train as stacks.

Each round asks Optuna for `config.trials_per_round` configurations. They are run with the first
number of epochs in `config.halving`, then the best 1/R of them with the second, which is R times as
large, and so on: successive halving (Jamieson and Talwalkar, 2016). Each run starts from step 0,
because the learning rate decays over its own number of steps. A configuration's score is the median
of the report; those that were dropped or have no median tell Optuna where not to look.

There is no database: a proposal is a function of the scores before it and of its number, so the
results of the trials are the state of a search. Resumed, or on another machine, it proposes the
same configurations again, finds their results, and continues.
"""

import importlib.metadata
import importlib.util
import itertools
import math
import pathlib
from collections.abc import Iterator

from ml_collections import ConfigDict

from bert_jax.runtime.config_fields import flatten
from bert_jax.sweeps.configurations import Configuration, make_configurations
from bert_jax.sweeps.summaries import summarize

KINDS = ("uniform", "log_uniform", "integer", "choice")


def rounds(config: ConfigDict, directory: pathlib.Path) -> Iterator[list[Configuration]]:
    """Yields the configurations of each stage, which must have run when the next are requested."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    search = flatten(config.search)
    epochs = [float(number) for number in config.halving] or [config.base.num_epochs]
    configurations: dict[str, Configuration] = {}  # All so far, by their values.
    for first in range(0, config.num_trials, config.trials_per_round):
        asked = []
        for number in range(first, min(first + config.trials_per_round, config.num_trials)):
            seed = config.base.seed * 1_000_003 + number
            study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
            trial = study.ask()
            values = {name: suggest(trial, name, spec) for name, spec in search.items()}
            asked.append((trial, values))
        for stage, num_epochs in enumerate(epochs):
            overrides = []
            for trial, values in asked:
                values = values | {"num_epochs": values.get("num_epochs", num_epochs)}
                overrides.append((f"trial {trial.number} of the search", values))
            new = {}
            for where, values in overrides:
                if repr(values) not in configurations:
                    new.setdefault(repr(values), (where, values))
            configurations |= zip(
                new, make_configurations(config, list(new.values()), directory), strict=True
            )
            yield [configurations[key] for key in new]
            scored = []
            for (trial, values), (_, overridden) in zip(asked, overrides, strict=True):
                configuration = configurations[repr(overridden)]
                summary = summarize(configuration, configuration.trials[0].result["metric"])
                score = summary.median
                if score == -math.inf:  # At least half of its trials diverged.
                    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                else:
                    trial.report(score, stage)
                    scored.append((summary, trial, values))
            # Stable: of equal ones, the earlier one comes first.
            scored.sort(key=lambda entry: entry[0].rank, reverse=True)
            if num_epochs == epochs[-1]:
                for summary, trial, _ in scored:
                    study.tell(trial, summary.median)
                break
            kept = math.ceil(len(scored) * num_epochs / epochs[stage + 1])
            for _, trial, _ in scored[kept:]:
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            asked = [(trial, values) for _, trial, values in scored[:kept]]


def suggest(trial, name: str, spec: tuple) -> object:
    """Asks for a value of a field; floats have three significant digits, to fit in names."""
    kind, *limits = spec
    if kind == "choice":
        return trial.suggest_categorical(name, limits)
    if kind == "integer":
        return trial.suggest_int(name, *limits)
    return float(f"{trial.suggest_float(name, *limits, log=kind == 'log_uniform'):.3g}")


def stages(config: ConfigDict) -> list[tuple[int, float]]:
    """Returns the configurations and epochs of each stage of a search, if none diverge or repeat.

    In a search over `num_epochs` the epochs are the ones of `base`.
    """
    epochs, planned = list(config.halving) or [config.base.num_epochs], []
    for first in range(0, config.num_trials, config.trials_per_round):
        count = min(config.trials_per_round, config.num_trials - first)
        planned.append((count, epochs[0]))
        for fewer, more in itertools.pairwise(epochs):
            count = math.ceil(count * fewer / more)
            planned.append((count, more))
    return planned


def max_trials(config: ConfigDict) -> int:
    """Returns the number of trials of a search, unless some diverge or are proposed twice."""
    return sum(count for count, _ in stages(config)) * config.num_seeds


def num_first_rounds(config: ConfigDict) -> float:
    """Returns how many times the epochs of the first stage a search has."""
    planned = [count * epochs for count, epochs in stages(config)]
    return sum(planned) / planned[0]


def version() -> str:
    """Returns the version of Optuna: another one might propose other configurations."""
    return importlib.metadata.version("optuna")


def check_search(config: ConfigDict) -> None:
    """Validates the fields of a search. Raises ValueError, or ImportError without Optuna."""
    if not importlib.util.find_spec("optuna"):
        raise ImportError("config.search needs Optuna: pip install 'bert_jax[optuna]'")
    for name, spec in flatten(config.search).items():
        kind, *limits = spec if isinstance(spec, tuple | list) and spec else [None]
        is_number = [isinstance(limit, int | float) for limit in limits]
        is_range = len(limits) == 2 and all(is_number) and limits[0] < limits[1]
        is_valid = bool(limits) if kind == "choice" else is_range and kind in KINDS
        if not is_valid or (kind == "log_uniform" and limits[0] <= 0):
            raise ValueError(
                f"config.search.{name}={spec!r}: expected ('uniform', LOW, HIGH), "
                "('log_uniform', LOW, HIGH) with LOW > 0, ('integer', LOW, HIGH) or "
                "('choice', VALUE, ...)"
            )
    epochs = config.halving
    if list(epochs) != sorted(set(epochs)) or (epochs and epochs[0] <= 0):
        raise ValueError(f"config.halving={epochs}: expected increasing numbers of epochs")
    if not config.search or ("num_epochs" in config.search and epochs):
        reason = "is empty" if not config.search else "has num_epochs, which config.halving sets"
        raise ValueError(f"config.search {reason}: set distributions of other fields")
