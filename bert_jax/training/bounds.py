"""Checks the numbers of a configuration against their bounds."""

import math

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict


def check_bounds(config: ConfigDict, *bounds: tuple[str, float, float]) -> None:
    """Raises ValueError for a field outside its bounds (names, min, max), unless it is None."""
    flat = flatten_dict(config.to_dict(), sep=".")
    for names, minimum, maximum in bounds:
        for name in names.split():
            value = flat[name]
            if value is None or (minimum <= value <= maximum and value < math.inf):
                continue
            limit = ""
            if maximum < math.inf:
                limit = f" and at most {maximum:g}"
            elif value == math.inf:
                limit = " and less than infinity"
            raise ValueError(f"--config.{name}={value}: expected at least {minimum:g}{limit}")
