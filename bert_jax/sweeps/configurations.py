"""The configurations of a sweep: copies of its base with other values, and their trials."""

import copy
import difflib
import itertools
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from bert_jax.finetuning.trials import Trial
from bert_jax.runtime.config_fields import flatten

Overrides = Sequence[tuple[str, dict[str, object]]]
"""Where each configuration is given, and its values of fields of `base`."""


class Configuration(NamedTuple):
    """A configuration: its values of the fields that vary, and its trials, one per seed."""

    values: dict[str, object]
    trials: list[Trial]

    def __str__(self) -> str:
        texts = (f"{name}={format_value(value)}" for name, value in self.values.items())
        return ", ".join(texts) or "base"


def grid_overrides(config: ConfigDict) -> Overrides:
    """Returns the combinations of the grid, then the configurations of `config.trials`.

    With `train_fractions`, each of them for each fraction; without any, `base` for each fraction.
    """
    grid = flatten(config.grid)
    overrides = [
        ("grid", dict(zip(grid, values, strict=True)))
        for values in itertools.product(*grid.values())
        if grid
    ]
    overrides += [(f"trials[{index}]", values) for index, values in enumerate(config.trials)]
    if not config.train_fractions:
        return overrides
    return [
        (where, values | {"train_fraction": fraction})
        for where, values in overrides or [("train_fractions", {})]
        for fraction in config.train_fractions
    ]


def make_configurations(
    config: ConfigDict, overrides: Overrides, directory: pathlib.Path
) -> list[Configuration]:
    """Returns the configurations that set other values of fields of `base`, with their trials.

    The workdir of a trial is named after the values of the fields in which configurations differ
    (in a search, of all), and its seed. Raises ValueError for invalid fields or values.
    """
    configs = [override(config.base, values, where) for where, values in overrides]
    fields = dict.fromkeys(name for _, values in overrides for name in values)
    resolved = [
        {name: flatten(configuration)[name] for name in fields} for configuration in configs
    ]
    varying = [
        name
        for name in fields
        if "search" in config or len({repr(values[name]) for values in resolved}) > 1
    ]
    configurations, sources = [], {}
    for (where, _), base, values in zip(overrides, configs, resolved, strict=True):
        values = {name: values[name] for name in varying}
        label = ",".join(f"{name}={format_value(value)}" for name, value in values.items())
        label = re.sub(r"[^\w.,=+-]+", "_", label)  # A valid file name.
        if label in sources or len(label) > 200:
            problem = f"{label} is too long for the name of a trial"
            if label in sources:
                problem = f"duplicate configuration {label or 'base'}, already in {sources[label]}"
            advice = "list each once, with short values that differ in letters or digits"
            raise ValueError(f"{where}: {problem}: {advice}")
        sources[label] = where
        trials = []
        for seed in range(base.seed, base.seed + config.num_seeds):
            trial = base.copy_and_resolve_references()
            trial.seed = seed
            name = f"{label},seed={seed}".lstrip(",")
            trials.append(Trial(trial, directory / name))
        configurations.append(Configuration(values, trials))
    return configurations


def override(base: ConfigDict, values: dict, where: str) -> ConfigDict:
    """Returns a copy of `base` with other `values`, by dotted name. Raises ValueError."""
    config, known = copy.deepcopy(base), flatten(base)
    for name, value in values.items():
        location = f"{where}.{name}"
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1, cutoff=0)[0]
            raise ValueError(
                f"{location}: there is no such field in `base`; did you mean {nearest}?"
            )
        if name in ("seed", "num_seeds"):
            fix = "config.base.seed sets the first one, config.num_seeds their number"
            raise ValueError(f"{location}={value}: seeds cannot be varied here; {fix}")
        *parents, field = name.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        expected = node.get_type(field)
        is_none = value is None and known[name] is not None
        if expected is tuple and value is not None:  # As flags do: balanced is ("balanced",).
            value = tuple(value) if isinstance(value, tuple | list) else (value,)
        try:
            if is_none or (isinstance(value, bool) and expected is not bool):
                raise TypeError
            node[field] = value
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{location}: {value!r} is of type {type(value).__name__}; expected "
                f"{expected.__name__}, as in `base`, where it is {known[name]!r}"
            ) from error
    return config


def format_value(value: object) -> str:
    """Formats a value of a field: 5e-05, 3 (of 3.0), default (of None), a,b (of a tuple)."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, tuple | list):
        return ",".join(map(format_value, value)) or "none"
    return "default" if value is None else str(value)


def plural(count: int, noun: str) -> str:
    """Returns 1 trial, 2 trials."""
    return f"{count} {noun}{'s' * (count != 1)}"
