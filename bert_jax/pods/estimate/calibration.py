"""How long a step takes on real chips, relative to what the compiler estimates.

A factor is measured seconds over estimated seconds of computation, at the clock of `pods/chips.py`.
Factors come from measurements that others published, whose shapes benchmarks/published.py compiles
into published.json, or from a file that tools/calibrate.py writes on the machine at hand.
"""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bert_jax.pods.chips import CHIPS

PUBLISHED = pathlib.Path(__file__).with_name("published.json")
# Four rows of 512 tokens: products are then small, and what cycles do not count takes long.
FEW_TOKENS = 4 * 512
EXPOSED_SHARE = 0.05  # Of the computation. Exposed communication is only known as a minimum.
MIN_MEASUREMENTS = 2  # Of others; a factor of fewer is not trusted.
MIN_SPREAD = 1.25
NUMBERS = ("low", "factor", "high")  # In a file of tools/calibrate.py.
SHAPES = ("max_seq_length", "tokens_per_device", "num_params")  # There, of each phase.
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
    num_measurements: int  # On this chip; with few, the figures are of all chips.
    source: str
    measured: Sequence[Mapping] = ()  # SHAPES of each phase, of a file.

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

    The factor is the median of the ratios. The range has all of them, and reaches at least from
    factor / MIN_SPREAD to factor * MIN_SPREAD: other programs differ by more than a few similar
    ones. A chip with fewer than MIN_MEASUREMENTS steps has the ratios of all chips. Raises
    ValueError for a `file` that is not of tools/calibrate.py, or is of another chip.
    """
    if file:
        return _read_file(chip, file)
    by_chip = {}
    for measurement in filter(calibrates, read_published()):
        by_chip.setdefault(measurement["chip"], []).append(ratio(measurement))
    ratios = by_chip.get(chip, [])
    count, source = len(ratios), f"{len(ratios)} published measurements"
    if count < MIN_MEASUREMENTS:
        ratios = [each for own in by_chip.values() for each in own]
        names = ", ".join(name for name in CHIPS if name in by_chip)
        source = f"{len(ratios)} published measurements of {names}"
    factor = statistics.median(ratios)
    low, high = _widened(min(ratios), factor, max(ratios))
    return Calibration(chip, factor, low, high, count, source)


def _widened(low: float, factor: float, high: float) -> tuple[float, float]:
    return min(low, factor / MIN_SPREAD), max(high, factor * MIN_SPREAD)


def _read_file(chip: str, file: str) -> Calibration:
    path = pathlib.Path(file)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        low, factor, high = (float(stored[name]) for name in NUMBERS)
        measured = [{name: int(each[name]) for name in SHAPES} for each in stored["phases"]]
        measured_chip, date = stored["chip"], stored["date"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"--calibration={file} is not a file of tools/calibrate.py, with chip, date, "
            f"{', '.join(NUMBERS)}, and phases with {', '.join(SHAPES)}: {error!r}"
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


def calibrated_range(calibration: Calibration, computation: float, exposed: float = 0.0) -> Range:
    """Returns the range of the real time of a step, or a run, in the unit of its estimate.

    `computation` is estimated at the clock of `CHIPS`, without communication. `exposed`
    communication, of which only a minimum is known, is added without a factor. The factor already
    contains the exposed communication of the published steps: this part is counted twice, but is
    small, as factors are near 1.
    """
    factors = calibration.low, calibration.factor, calibration.high
    return Range(*(computation * factor + exposed for factor in factors))


def why_not_calibrated(calibration: Calibration, steps: Iterable[TimedStep]) -> list[str]:
    """Returns the reasons why the range may miss the truth; [] for a calibrated case.

    `steps` are those of the phases of a run. A file of tools/calibrate.py holds for the shapes that
    it was measured with, published measurements for more than FEW_TOKENS tokens per device.
    """
    return list(dict.fromkeys(reason for step in steps for reason in _reasons(calibration, step)))


def _reasons(calibration: Calibration, step: TimedStep) -> Iterator[str]:
    tokens_per_device = step.rows * step.length
    if calibration.measured:
        shapes = step.length, tokens_per_device, step.num_params
        if not any(_is_same(each, *shapes) for each in calibration.measured):
            measured = " or ".join(
                _describe(*map(each.get, SHAPES)) for each in calibration.measured
            )
            yield f"{_describe(*shapes)} were not measured, but {measured}"
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


def _is_same(measured: Mapping, length: int, tokens_per_device: int, num_params: int) -> bool:
    low, high = sorted((num_params, measured["num_params"]))
    shapes = measured["max_seq_length"], measured["tokens_per_device"]
    return shapes == (length, tokens_per_device) and high <= low * SAME_PARAMS


def _describe(length: int, tokens_per_device: int, num_params: int) -> str:
    tokens = f"{tokens_per_device:,} tokens per device in rows of {length}"
    return f"{tokens} with {num_params:,} parameters"
