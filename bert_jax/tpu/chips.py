"""The data sheets of TPU chips, and the names of topologies."""

import dataclasses
import re

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Data-sheet figures of one JAX device: half a chip on v3 and tpu7x, a chip otherwise."""

    clock_hz: float  # Peak bf16 FLOP/s over FLOPs per cycle, two per cell of the matrix units.
    hbm_bytes: int
    usable_hbm_bytes: float  # What the compiler allows a program: more than hbm_bytes on v5p.
    link_bytes_per_second: float  # To the neighbors, over all links, in one direction.
    dimensions: int  # Of the torus.
    devices_per_chip: int = 1
    megacore: bool = False  # Whether the compiler joins the two cores of a chip into one device.


# Sources: Cloud TPU's system architecture pages (HBM; interconnect, half of it in each direction),
# Jouppi et al. (2020) for the links of v3 and (2023) for the links of v4. Google does not publish
# the clock of v6e and tpu7x: 1750 MHz follows from 918 TFLOP/s, and 2200 MHz from 2307 TFLOP/s per
# chip, if a device has four matrix units of 256 x 256. The two devices of a chip share its links.
CHIPS = {
    "v3": Chip(940e6, 16 * GIB, 15.48 * GIB, 4 * 656e9 / 8 / 2, dimensions=2, devices_per_chip=2),
    "v4": Chip(1050e6, 32 * GIB, 30.75 * GIB, 6 * 50e9, dimensions=3, megacore=True),
    "v5e": Chip(1500e6, 16 * GIB, 15.75 * GIB, 400e9 / 2, dimensions=2),
    "v5p": Chip(1750e6, 95 * GIB, 95.74 * GIB, 1200e9 / 2, dimensions=3, megacore=True),
    "v6e": Chip(1750e6, 32 * GIB, 31.25 * GIB, 800e9 / 2, dimensions=2),
    "tpu7x": Chip(2200e6, 96 * GIB, 94.75 * GIB, 1200e9 / 2 / 2, dimensions=3, devices_per_chip=2),
}


def parse_topology(topology: str) -> tuple[str, list[int], int]:
    """Parses "v4:4x4x4:2": chip, slice shape in chips, number of slices. Raises ValueError."""
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)(?::([1-9]\d*))?", topology)
    name, shape, num_slices = match.groups() if match else ("", "", None)
    sizes = [int(size) for size in shape.split("x") if size]
    if name not in CHIPS or len(sizes) != CHIPS[name].dimensions:
        examples = (f"{name}:{'x'.join('4' * chip.dimensions)}" for name, chip in CHIPS.items())
        expected = f"CHIP:SHAPE or CHIP:SHAPE:SLICES, such as {', '.join(examples)}"
        raise ValueError(f"unknown topology {topology!r}: expected {expected}")
    return name, sizes, int(num_slices or 1)
