"""Parses the scheduled HLO text that a compiler writes: computations, instructions, shapes."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

FUSIONS = ("fusion", "custom-call")
CALLERS = (*FUSIONS, "async-start", "call-start", "call", "while", "conditional")
COMPUTATION_OR_INSTRUCTION = re.compile(
    r"^(ENTRY )?%([\w.\-]+) .*\{$|"
    r"^ +(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)(.*)$",
    re.MULTILINE,
)


class Instruction(NamedTuple):
    """One line of HLO text; in `operands`, shapes replace the names of other instructions."""

    name: str
    shape: str
    opcode: str
    operands: str
    attributes: str

    def attribute(self, pattern: str) -> str:
        """Returns the group of `pattern` in the attributes; "" without a match."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else ""

    @property
    def op_name(self) -> str:
        return self.attribute(r'op_name="([^"]*)"')

    @property
    def kind(self) -> str:
        """The target of a custom call, the name of a fusion without its number, or the opcode."""
        if self.opcode == "fusion":
            return re.sub(r"[.\d]+$", "", self.name)
        return self.attribute(r'custom_call_target="([^"]*)"') or self.opcode

    @property
    def called(self) -> list[str]:
        """The computations that the instruction runs: a fusion, a loop body, branches."""
        if self.opcode not in CALLERS:
            return []
        pattern = r"\b(?:body|calls|to_apply|\w+_computations?)=(\{[^}]*\}|[^,\s]+)"
        return re.findall(r"%([\w.\-]+)", " ".join(re.findall(pattern, self.attributes)))


Computations = dict[str, list[Instruction]]  # By name, each in the order of the schedule.


def parse_hlo(text: str) -> tuple[Computations, str]:
    """Parses HLO text into its computations and the name of the entry. Raises ValueError."""
    computations, entry = {}, None
    for match in COMPUTATION_OR_INSTRUCTION.finditer(text):
        is_entry, computation, name, shape, opcode, operands, attributes = match.groups()
        if computation:
            body, shapes = computations.setdefault(computation, []), {}
            entry = computation if is_entry else entry
        else:
            shapes[name] = shape
            words = re.findall(r"[\w.\-]+", operands)
            operands = " ".join(shapes.get(word, word) for word in words)
            body.append(Instruction(name, shape, opcode, operands, attributes))
    if entry is None:
        raise ValueError("not the text of an HLO module: it has no ENTRY computation")
    return computations, entry


def executed_instructions(
    computations: Computations,
    name: str,
    runs: int = 1,
    fusion: Instruction | None = None,
    unknown_trips: int = 1,
) -> Iterator[tuple[int, Instruction, Instruction | None]]:
    """Yields (runs per step, instruction, its fusion or None) of a computation and those it calls.

    A caller follows everything it calls, including all branches of a conditional. A loop with an
    unknown trip count runs `unknown_trips` times.
    """
    for instruction in computations[name]:
        trips = trip_count(instruction, computations) if instruction.opcode == "while" else 1
        inside = fusion or (instruction if instruction.opcode in FUSIONS else None)
        for called in instruction.called:
            total = runs * (trips or unknown_trips)
            yield from executed_instructions(computations, called, total, inside, unknown_trips)
        yield runs, instruction, fusion


def trip_count(loop: Instruction, computations: Computations) -> int | None:
    """Returns the trip count noted by the compiler, or the bound of a loop that counts from 0."""
    if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(known)
    bounds = [
        int(instruction.operands)
        for instruction in computations[loop.attribute(r"\bcondition=%([\w.\-]+)")]
        if instruction.opcode == "constant" and re.match(r"[su]32\[\]", instruction.shape)
    ]
    return bounds[0] if len(bounds) == 1 else None


def array_bytes(shape: str) -> int:
    """Returns the bytes of a shape without padding: `(f32[8,128]{1,0}, s32[])` -> 4100."""
    return sum(math.prod(sizes) * bits // 8 for bits, sizes in arrays_of(shape))


def arrays_of(shape: str) -> list[tuple[int, tuple[int, ...]]]:
    """Returns (bits per element, sizes) of each array in a shape."""
    return [
        (int(bits or 8), tuple(map(int, re.findall(r"\d+", sizes))))
        for bits, sizes in re.findall(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,<=]*)\]", shape)
    ]


def group_size(attributes: str) -> int:
    """Returns the number of devices per group, from any notation of `replica_groups`.

    Raises ValueError for another one.
    """
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
        # mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", match[2]))
    # [groups,size]<=[devices] or {{0,1},{2,3}}
    match = re.search(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]*)\})", attributes)
    if not match:
        raise ValueError(f"expected groups of devices in one of three notations, in: {attributes}")
    return int(match[1] or match[2].count(",") + 1)
