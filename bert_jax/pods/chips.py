"""The data sheets of TPU chips, the slices that exist, and the names of topologies."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Data-sheet figures of one JAX device: half a chip on v3 and tpu7x, a chip otherwise."""

    # Peak bf16 FLOP/s divided by FLOPs per cycle, two per cell of the matrix units. With a
    # `max_clock_hz`, Google does not publish the clock: any between both agrees with the peak.
    clock_hz: float
    hbm_bytes: int
    usable_hbm_bytes: float  # What the compiler allows a program: more than hbm_bytes on v5p.
    link_bytes_per_second: float  # To the neighbors, over all links, in one direction.
    dimensions: int  # Dimensions of the torus.
    devices_per_chip: int = 1
    megacore: bool = False  # Whether the compiler joins the two cores of a chip into one device.
    max_clock_hz: float | None = None

    @property
    def clocks_hz(self) -> tuple[float, ...]:
        """The clock, or the slowest and the fastest one where it is not published."""
        return (self.clock_hz, self.max_clock_hz) if self.max_clock_hz else (self.clock_hz,)


# Sources: Cloud TPU's system architecture pages (HBM; interconnect, half of it in each direction),
# Jouppi et al. (2020) for the links of v3 and (2023) for the links of v4. The two devices of a chip
# share its links. Google does not publish the clocks of v6e and tpu7x, and its pages give v6e two
# or four matrix units of 256 x 256. Two would need 3500 MHz for 918 TFLOP/s, and could not do the
# 369,231 FLOPs per cycle that the compiler estimates for a product of 8192 x 8192 matrices; four
# need 1750 MHz. At that clock the product has 70 % of the peak, where v5e has 88 and v5p 90; it
# would have 100 % at 2486 MHz, the maximum. tpu7x, also with four per device: 2200 MHz for 2307
# TFLOP/s per chip, 80 %, and 2732 MHz.
CHIPS = {
    "v3": Chip(940e6, 16 * GIB, 15.48 * GIB, 4 * 656e9 / 8 / 2, dimensions=2, devices_per_chip=2),
    "v4": Chip(1050e6, 32 * GIB, 30.75 * GIB, 6 * 50e9, dimensions=3, megacore=True),
    "v5e": Chip(1500e6, 16 * GIB, 15.75 * GIB, 400e9 / 2, dimensions=2),
    "v5p": Chip(1750e6, 95 * GIB, 95.74 * GIB, 1200e9 / 2, dimensions=3, megacore=True),
    "v6e": Chip(1750e6, 32 * GIB, 31.25 * GIB, 800e9 / 2, dimensions=2, max_clock_hz=2486e6),
    "tpu7x": Chip(
        2200e6,
        96 * GIB,
        94.75 * GIB,
        1200e9 / 2 / 2,
        dimensions=3,
        devices_per_chip=2,
        max_clock_hz=2732e6,
    ),
}

# The slices that exist, from cloud.google.com/tpu/docs (a page per chip) and, for tpu7x,
# cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus. In three dimensions: SMALL_SLICES_3D,
# and all shapes of multiples of 4 in ascending order with at most MAX_CHIPS.
SLICES_2D = {
    "v2": "2x2 4x4 8x8 8x16 16x16",
    "v3": "2x2 4x4 4x8 8x8 8x16 16x16 16x32 32x32",
    "v5e": "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16",
    "v6e": "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16",
}
SMALL_SLICES_3D = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
MAX_CHIPS = {"v4": 3072, "v5p": 6144, "tpu7x": 9216}  # v4 and v5p: 12x16x16 and 16x16x24.

# Chip in the Cloud TPU API -> what a chip counts in the number of an accelerator type: its two
# TensorCores, or 1.
CORES_IN_NAME = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2, "v5litepod": 1, "v6e": 1}


@functools.cache
def slice_shapes(chip: str) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of all existing slices of a chip, by ascending number of chips."""
    if chip in SLICES_2D:
        return tuple(tuple(map(int, shape.split("x"))) for shape in SLICES_2D[chip].split())
    cubes = MAX_CHIPS[chip] // 4**3
    large = [
        (4 * a, 4 * b, 4 * c)
        for a, b in itertools.combinations_with_replacement(range(1, cubes + 1), 2)
        for c in range(b, cubes // (a * b) + 1)
    ]
    return tuple(sorted((*SMALL_SLICES_3D, *large), key=math.prod))


def default_shape(chip: str, num_chips: int) -> tuple[int, ...] | None:
    """Returns the most compact shape of a slice of `num_chips`, or None if there is none."""
    shapes = [shape for shape in slice_shapes(chip) if math.prod(shape) == num_chips]
    return min(shapes, key=sum, default=None)


def nearest_shapes(chip: str, num_chips: int, shape: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Returns the existing slices nearest to one that does not exist.

    Returns the slice with the same number of chips that is most similar to `shape`; if there is
    none, the most compact slices with the next smaller and the next larger number of chips.
    """
    counts = [math.prod(each) for each in slice_shapes(chip)]
    smaller = max((count for count in counts if count <= num_chips), default=None)
    larger = min((count for count in counts if count >= num_chips), default=None)

    def distance(each: tuple[int, ...]) -> float:
        if smaller != larger or len(each) != len(shape):
            return sum(each)
        pairs = zip(each, sorted(shape), strict=True)
        return sum(abs(math.log(size / other)) for size, other in pairs)

    return [
        min((each for each in slice_shapes(chip) if math.prod(each) == count), key=distance)
        for count in dict.fromkeys((smaller, larger))
        if count
    ]


def num_hosts(chip: str, num_chips: int) -> int:
    """Returns the number of hosts of a slice: v5e and v6e have one with 8 chips, others have 4."""
    per_host = 8 if chip in ("v5e", "v6e") and num_chips <= 8 else 4
    return max(num_chips // per_host, 1)


def format_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def accelerator_type(chip: str, num_chips: int) -> str | None:
    """Returns the Cloud TPU API's name of a slice, such as v4-32; None for a chip that it lacks."""
    if chip == "tpu7x":
        return None
    name = "v5litepod" if chip == "v5e" else chip
    return f"{name}-{num_chips * CORES_IN_NAME[name]}"


def parse_accelerator_type(name: str) -> tuple[str, int] | None:
    """Returns the chip and the number of chips of a name such as v4-32, None for other text.

    The number of chips is rounded down; such a slice need not exist.
    """
    match = re.fullmatch(rf"({'|'.join(CORES_IN_NAME)})-([1-9]\d*)", name)
    if not match:
        return None
    chip = "v5e" if match[1] == "v5litepod" else match[1]
    return chip, int(match[2]) // CORES_IN_NAME[match[1]]


def describe_nearest(chip: str, num_chips: int, shape: tuple[int, ...] = ()) -> str:
    """Returns advice that names the nearest slices: "try v4:2x2x4 (v4-32), the nearest"."""
    texts = []
    for each in nearest_shapes(chip, num_chips, shape):
        name = accelerator_type(chip, math.prod(each))
        texts.append(f"{chip}:{format_shape(each)}" + (f" ({name})" if name else ""))
    return f"try {' or '.join(texts)}, the nearest"


def parse_topology(topology: str) -> tuple[str, list[int], int]:
    """Parses "v4:4x4x4:2" or "v4-128:2": chip, slice shape in chips, number of slices.

    An accelerator type stands for the most compact slice of its size; v5e-8 is v5litepod-8. Raises
    ValueError for another form, or a slice that does not exist.
    """
    match = re.fullmatch(r"(\w+)(:\d+(?:x\d+)+|-\d+)(?::([1-9]\d*))?", topology)
    name, size, num_slices = match.groups() if match else ("", "", None)
    if size.startswith("-"):
        accelerator = topology.partition(":")[0].replace("v5e-", "v5litepod-")
        name, num_chips = parse_accelerator_type(accelerator) or ("", 0)
        is_whole = name in CHIPS and accelerator_type(name, num_chips) == accelerator
        sizes = default_shape(name, num_chips) if is_whole else None
        if name in CHIPS and not sizes:
            raise ValueError(
                f"accelerator type {topology!r} does not exist: {describe_nearest(name, num_chips)}"
            )
    else:
        sizes = tuple(map(int, re.findall(r"\d+", size)))
    if name not in CHIPS or len(sizes) != CHIPS[name].dimensions:
        examples = ", ".join(f"{name}:{'x'.join('4' * CHIPS[name].dimensions)}" for name in CHIPS)
        raise ValueError(
            f"unknown topology {topology!r}: expected CHIP:SHAPE or CHIP:SHAPE:SLICES, such as "
            f"{examples}, or an accelerator type, such as v4-32, v5e-8 or v6e-8:2"
        )
    if sizes not in slice_shapes(name):
        nearest = describe_nearest(name, math.prod(sizes), sizes)
        raise ValueError(f"topology {topology!r} does not exist: {nearest}")
    return name, list(sizes), int(num_slices or 1)


def shape_name(topology: str) -> str:
    """Returns the name of a topology by its shape, such as v4:2x2x4 for v4-32. Raises ValueError.

    It is the one that the compiler and the tables of docs/tpu.md have.
    """
    chip, shape, num_slices = parse_topology(topology)
    return f"{chip}:{format_shape(shape)}" + (f":{num_slices}" if num_slices > 1 else "")


def both_names(topology: str) -> str:
    """Returns both names of a topology: "v4:2x2x4 (v4-32)", "v4:2x2x4:2 (2 x v4-32)"."""
    chip, shape, num_slices = parse_topology(topology)
    accelerator = accelerator_type(chip, math.prod(shape))
    times = f"{num_slices} x " if num_slices > 1 else ""
    return shape_name(topology) + (f" ({times}{accelerator})" if accelerator else "")
