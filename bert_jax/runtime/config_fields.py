"""The fields of a configuration: value, meaning and bounds in one table, what may change by table.

`fields.py` in configs/pretrain, configs/finetune and configs/sweeps holds the tables of each
program: dotted name of a field -> `Field`. From them are made the configuration itself, `--help`,
and the checks of missing fields, of numbers, and of resumed runs.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from absl import flags
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


class Bounds(NamedTuple):
    """The finite numbers from `minimum` to `maximum`, either of which may be excluded."""

    minimum: float
    maximum: float = math.inf
    excludes_minimum: bool = False
    excludes_maximum: bool = False

    def contain(self, value: float) -> bool:
        """Returns whether `value` is within the bounds; not a number never is."""
        above = value > self.minimum if self.excludes_minimum else value >= self.minimum
        below = value < self.maximum if self.excludes_maximum else value <= self.maximum
        return above and below and value < math.inf

    def describe(self, value: float = 0) -> str:
        """Returns the bounds in words, also for the message about a `value` that they exclude."""
        text = f"{'more than' if self.excludes_minimum else 'at least'} {self.minimum:g}"
        if self.maximum < math.inf:
            text += f" and {'less than' if self.excludes_maximum else 'at most'} {self.maximum:g}"
        elif value == math.inf:
            text += " and less than infinity"
        return text


AT_LEAST_0 = Bounds(0)
AT_LEAST_1 = Bounds(1)
POSITIVE = Bounds(0, excludes_minimum=True)


class Field(NamedTuple):
    """A field: the default value, its meaning for `--help`, and the bounds of a number.

    Bounds of None: any value, or they depend on other fields, and are checked where these are read.
    `kind` is the type of a field whose default is None.
    """

    default: object
    meaning: str
    bounds: Bounds | None = None
    kind: type | None = None


def make_config(fields: Mapping[str, Field]) -> ConfigDict:
    """Returns a configuration of the default values; dotted names are fields of groups."""
    config = ConfigDict()
    for name, field in fields.items():
        *groups, last = name.split(".")
        group = config
        for each in groups:
            if each not in group:
                group[each] = ConfigDict()
            group = group[each]
        group[last] = placeholder(field.kind) if field.default is None else field.default
    return config


def check_required(
    config: ConfigDict, fields: Mapping[str, Field], file: str, prefix: str = "config."
) -> None:
    """Raises ValueError if `config` lacks any of `fields`, those of the configuration in `file`.

    A default instead would hide a typo. Only those of `model` have defaults: the size's, or those
    of the weights to start from. `prefix` begins the names of fields of `config`.
    """
    missing = list(dict.fromkeys(_missing_fields(config, fields)))
    if not missing:
        return
    shown = ", ".join(prefix + name for name in missing[:3])
    others = f" and {len(missing) - 3} others" if len(missing) > 3 else ""
    verb = "is" if len(missing) == 1 else "are"
    fix = f"start from get_config() of {file}, and change what differs"
    raise ValueError(f"{shown}{others} {verb} missing: {fix}")


def _missing_fields(config: ConfigDict, fields: Mapping[str, Field]) -> Iterator[str]:
    """Yields the fields that `config` lacks, or once for each of its fields the missing group."""
    for name in fields:
        group, path = config, name.split(".")
        for depth, part in enumerate(path, 1):
            if not isinstance(group, ConfigDict) or part not in group:
                if path[0] != "model" or depth == 1:
                    yield ".".join(path[:depth])
                break
            group = group[part]


def check_numbers(config: ConfigDict, fields: Mapping[str, Field]) -> None:
    """Raises ValueError for a field outside of its bounds in `fields`, unless it is None."""
    values = flatten(config)
    for name, field in fields.items():
        if field.bounds and name in values:
            _check_value(name, values[name], field.bounds)


def check_bounds(config: ConfigDict, bounds: Bounds, name: str, limited_by: str = "") -> None:
    """Raises ValueError for a field outside of `bounds`, unless it is None.

    `limited_by` names the fields or the model that give the maximum.
    """
    _check_value(name, flatten(config)[name], bounds, f", which is {limited_by}" * bool(limited_by))


def _check_value(name: str, value: float | None, bounds: Bounds, reason: str = "") -> None:
    if value is not None and not bounds.contain(value):
        raise ValueError(f"config.{name}={value}: expected {bounds.describe(value)}{reason}")


def flatten(config: ConfigDict) -> dict[str, object]:
    """Returns the values of all fields by dotted name.

    Without Flax's `flatten_dict`, whose import takes a second that a launcher need not wait.
    """

    def leaves(values: Mapping, prefix: str) -> Iterator[tuple[str, object]]:
        for name, value in values.items():
            if isinstance(value, Mapping):
                yield from leaves(value, f"{prefix}{name}.")
            else:
                yield prefix + name, value

    return dict(leaves(config.to_dict(), ""))


def format_fields(config: ConfigDict, fields: Mapping[str, Field]) -> str:
    """Formats the fields of a configuration for `--help`, as absl formats flags.

    Those of your own, which are not in `fields`, are listed last, with their values only.
    """
    values = flatten(config)
    names = [name for name in fields if name in values or isinstance(config.get(name), ConfigDict)]
    texts = []
    for name in dict.fromkeys([*names, *values]):
        field = fields.get(name, Field(None, ""))
        dashes = "--" if name in values else ""  # A group has no flag.
        text = f"  {dashes}config.{name}: {field.meaning}".rstrip(": ")
        texts.append(flags.text_wrap(text, indent="    ", firstline_indent="  "))
        if name not in values:
            continue
        notes = [f"default: {values[name]!r}"]
        if values[name] is None and field.kind:
            notes.append(field.kind.__name__)
        if field.bounds:
            notes.append(field.bounds.describe())
        texts.append(flags.text_wrap(f"({'; '.join(notes)})", indent="    "))
    return "\n".join(texts)
