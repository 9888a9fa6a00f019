"""How long a step takes on real chips, relative to what the compiler estimates.

A factor is measured seconds over estimated seconds of computation, at the clock of `pods/chips.py`.
Factors come from measurements that others published, whose shapes benchmarks/published.py compiles
into published.json, or from a file that tools/calibrate.py writes on the machine at hand.
"""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from bert_jax.pods.chips import CHIPS

PUBLISHED = pathlib.Path(__file__).with_name("published.json")
# Four rows of 512 tokens: products are then small, and what cycles do not count takes long.
FEW_TOKENS = 4 * 512
EXPOSED_SHARE = 0.05  # Of the computation. Exposed communication is only known as a minimum.
MIN_MEASUREMENTS = 2  # Of others; a factor of fewer is not trusted.
MIN_SPREAD = 1.25
NUMBERS = ("low", "factor", "high")  # In a file of tools/calibrate.py.
SHAPES = ("max_seq_length", "tokens_per_device", "num_params")  # There: what was measured.
SAME_PARAMS = 1.05  # A larger ratio of the parameters of two models makes them different.


class Range(NamedTuple):
    """A time, or a price, in the unit of what it was made from."""

    low: float
    typical: float
    high: float

    def times(self, factor: float) -> "Range":
        return Range(*(factor * each for each in self))

    def __str__(self) -> str:
        """Returns "3.1 (1.6 to 6.2)": what is typical, and the range."""
        digits = 2 if self.typical < 1 else 1 if self.typical < 100 else 0
        low, typical, high = (f"{each:,.{digits}f}" for each in self)
        return f"{typical} ({low} to {high})"


class TimedStep(NamedTuple):
    """The shapes of a step on one device, and its times, in one unit."""

    rows: int  # Of a microbatch.
    length: int
    num_params: int  # Of the model.
    computation: float
    exposed: float  # Communication that no computation overlaps.


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Measured over estimated seconds of computation on a chip."""

    chip: str
    factor: float  # The median.
    low: float
    high: float
    num_measurements: int  # On this chip; 0 if the figures are of other chips.
    source: str
    measured: Mapping | None = None  # SHAPES, of a file; None: measurements of many shapes.

    def __str__(self) -> str:
        """Returns the factor, its range and its source: "1.1 (0.9 to 1.2): FILE, measured ..."."""
        return f"{self.factor:.2f} ({self.low:.2f} to {self.high:.2f}): {self.source}"


def read_published() -> list[dict]:
    """Returns the published measurements with what the compiler estimates for them."""
    return json.loads(PUBLISHED.read_text(encoding="utf-8"))


def ratio(measurement: dict) -> float:
    """Returns measured over estimated seconds of a published measurement."""
    return measurement["measured_seconds"] / measurement["estimated_seconds"]


def calibrates(measurement: dict) -> bool:
    """Returns whether a measurement counts for factors: of training steps, not of few tokens."""
    return not measurement["is_product"] and measurement["tokens_per_device"] > FEW_TOKENS


def calibration_of(chip: str, file: str | None = None) -> Calibration:
    """Returns the calibration of a chip, from published measurements or a file.

    The factor is the median of the ratios. The range has all of them, and reaches from the factor
    to MIN_SPREAD times less and more, or further: other programs differ by more than a few similar
    ones. A chip without a measured step has the ratios of all chips. Raises ValueError for a `file`
    that is not of tools/calibrate.py, or is of another chip.
    """
    if file:
        return _read_file(chip, file)
    by_chip = {}
    for measurement in filter(calibrates, read_published()):
        by_chip.setdefault(measurement["chip"], []).append(ratio(measurement))
    ratios = by_chip.get(chip, [each for own in by_chip.values() for each in own])
    factor = statistics.median(ratios)
    low, high = _widened(min(ratios), factor, max(ratios))
    count = len(ratios) if chip in by_chip else 0
    source = f"{count} published measurement{'s' * (count > 1)}"
    if not count:
        names = ", ".join(name for name in CHIPS if name in by_chip)
        source = f"published measurements of {names}"
    return Calibration(chip, factor, low, high, count, source)


def _widened(low: float, factor: float, high: float) -> tuple[float, float]:
    return min(low, factor / MIN_SPREAD), max(high, factor * MIN_SPREAD)


def _read_file(chip: str, file: str) -> Calibration:
    path = pathlib.Path(file)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        low, factor, high = (float(stored[name]) for name in NUMBERS)
        measured = {name: int(stored[name]) for name in SHAPES}
        measured_chip, date = stored["chip"], stored["date"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"--calibration={file} is not a file of tools/calibrate.py, with chip, date, "
            f"{', '.join((*NUMBERS, *SHAPES))}: {error!r}"
        ) from error
    if not 0 < low <= factor <= high:
        raise ValueError(
            f"--calibration={file} has low={low}, factor={factor}, high={high}: expected positive "
            "numbers in ascending order"
        )
    if measured_chip != chip:
        raise ValueError(
            f"--calibration={file} was measured on {measured_chip}, not on {chip}: run "
            f"tools/calibrate.py on a {chip}, or leave the flag out"
        )
    # The groups of one run agree better than runs do.
    low, high = _widened(low, factor, high)
    source = f"{file}, measured on {date}"
    if "config" in stored:
        source += f" with {stored['config']}, objective {stored.get('objective')}"
    return Calibration(chip, factor, low, high, 1, source, measured=measured)


def measured_range(calibration: Calibration, computation: float, exposed: float = 0.0) -> Range:
    """Returns the time that an estimated one is likely to take.

    `computation` is estimated at the clock of `CHIPS`, without communication. `exposed`
    communication, of which only a minimum is known, is added as it is. What the published steps
    exposed is in the factor too: little, as their factors are near 1.
    """
    factors = calibration.low, calibration.factor, calibration.high
    return Range(*(computation * factor + exposed for factor in factors))


def why_not_calibrated(calibration: Calibration, steps: Iterable[TimedStep]) -> list[str]:
    """Returns the reasons why the range may miss the truth; [] for a calibrated case.

    `steps` are those of the phases of a run. A measurement of this machine holds for its own
    shapes, those of others for more than FEW_TOKENS.
    """
    return list(dict.fromkeys(reason for step in steps for reason in _reasons(calibration, step)))


def _reasons(calibration: Calibration, step: TimedStep) -> Iterator[str]:
    tokens_per_device = step.rows * step.length
    if measured := calibration.measured:
        shapes = dict(zip(SHAPES, (step.length, tokens_per_device, step.num_params), strict=True))
        for name, found in shapes.items():
            low, high = sorted((found, measured[name]))
            if high > low * (SAME_PARAMS if name == "num_params" else 1):
                yield f"{name} is {found:,}, but {measured[name]:,} was measured"
    else:
        if calibration.num_measurements < MIN_MEASUREMENTS:
            count = "only one" if calibration.num_measurements else "no"
            yield f"{count} measured step of {calibration.chip} is known"
        if tokens_per_device <= FEW_TOKENS:
            yield (
                f"{tokens_per_device:,.0f} tokens per device and microbatch: factors hold above "
                f"{FEW_TOKENS:,}"
            )
    if step.exposed > EXPOSED_SHARE * step.computation:
        yield (
            f"in rows of {step.length} tokens exposed communication is "
            f"{step.exposed / step.computation:.0%} of the computation, and only a minimum of it "
            "is known"
        )
