"""Checks the numbers of a configuration against their bounds."""

import math
from typing import NamedTuple

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict


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

    def describe(self, value: float) -> str:
        """Returns the bounds in words, for the message about a `value` that they exclude."""
        text = f"{'more than' if self.excludes_minimum else 'at least'} {self.minimum:g}"
        if self.maximum < math.inf:
            text += f" and {'less than' if self.excludes_maximum else 'at most'} {self.maximum:g}"
        elif value == math.inf:
            text += " and less than infinity"
        return text


AT_LEAST_0 = Bounds(0)
AT_LEAST_1 = Bounds(1)
POSITIVE = Bounds(0, excludes_minimum=True)


def check_bounds(config: ConfigDict, bounds: Bounds, *names: str, limited_by: str = "") -> None:
    """Raises ValueError for a field of `names` outside of `bounds`, unless it is None.

    `limited_by` names the fields that give the maximum.
    """
    flat = flatten_dict(config.to_dict(), sep=".")
    for name in names:
        value = flat[name]
        if value is not None and not bounds.contain(value):
            expected = bounds.describe(value) + f", which is {limited_by}" * bool(limited_by)
            raise ValueError(f"config.{name}={value}: expected {expected}")
