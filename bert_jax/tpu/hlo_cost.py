"""What one step of a compiled program costs on one device, read from its scheduled HLO text.

The TPU compiler leaves an `estimated_cycles` with nearly every instruction that it schedules: its
own cost model's guess at arithmetic and memory traffic, whichever is longer. It leaves none with
loops (their bodies have it), with collectives, nor with a custom kernel. Needs no JAX.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np

# First match on the instruction's `op_name` wins: the path of Flax modules that it came from. The
# compiler gives a fusion the name of one of its members, so the division is a good guess.
PARTS = (
    ("masking", r"^(?!.*BertForPreTraining).*(vmap\(|row_key|corrupt)"),
    ("LayerNorm", r"layer_norm"),
    ("embeddings", r"/embeddings\b"),
    ("heads", r"/(mlm|nsp|pooler)\b|/bert\.pool\b|jvp\(\)"),
    ("attention", r"/(query|key|value|attention_output|attention)/|/b\w+,b\w+->"),
    ("feed-forward", r"/(intermediate|output|feed_forward)/"),
    ("kept for backward", r"/encoder/(.*dynamic_(update_)?(slice|index_in_dim)|broadcast_in_dim)"),
    ("rest of the layers", r"/(encoder|layers)/"),
    ("heads", r"BertForPreTraining"),  # Gathering the masked positions.
    ("optimizer", r"."),
    ("other", r""),  # Nameless: casts of all parameters, copies.
)
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
# Costs nothing, or is a copy that runs beside the arithmetic.
FREE = (
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"),
    *("partition-id", "copy-start", "copy-done", "slice-start", "slice-done", "while"),
    *("conditional", "call", "async-start", "async-update", "async-done"),
    *("send", "send-done", "recv", "recv-done"),
)
BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO: `name = shape opcode(arguments), attributes`, all of them text."""

    name: str
    shape: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.arguments)

    def attribute(self, pattern: str) -> str | None:
        found = re.search(pattern, self.attributes)
        return found[1] if found else None

    @property
    def op_name(self) -> str:
        return self.attribute(r'op_name="([^"]*)"') or ""

    @property
    def cycles(self) -> int | None:
        found = self.attribute(r'"estimated_cycles":"?(\d+)')
        return None if found is None else int(found)

    def called(self, kind: str) -> str | None:
        return self.attribute(rf"\b{kind}=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind: how often a step runs them, and over what.

    `num_bytes` is the payload on one device: the array to reduce, or the one that was gathered.
    `link_bytes` is what one device must send for it: twice (n - 1) / n of the payload in an
    all-reduce over n devices, (n - 1) / n of it when gathering or scattering. What goes between
    slices goes over the hosts' network: it counts in the one and not in the other.
    """

    count: int = 0
    num_bytes: int = 0
    link_bytes: float = 0.0

    def __add__(self, other: "Collective") -> "Collective":
        return Collective(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))


def _values(record) -> tuple:
    return tuple(getattr(record, field.name) for field in dataclasses.fields(record))


def _most(exchange: tuple[str, Collective]) -> float:
    return exchange[1].num_bytes


@dataclasses.dataclass(frozen=True)
class Cost:
    """One step of one device.

    Fields:
      cycles: {(part, "forward" | "backward" | "update"): the compiler's estimate}.
      flops: of the matrix products, two for each multiply-add.
      collectives: {kind: Collective}.
      costliest: (cycles of all runs, runs, instruction), the costliest first.
      not_estimated: {opcode, kind of fusion or target of a custom call: runs}.
      loops_counted_once: names of the loops whose trips the text does not tell.
    """

    cycles: dict[tuple[str, str], int]
    flops: float
    collectives: dict[str, Collective]
    costliest: list[tuple[int, int, Instruction]]
    not_estimated: dict[str, int]
    loops_counted_once: list[str]

    @property
    def total_cycles(self) -> int:
        return sum(self.cycles.values())


def step_cost(text: str) -> Cost:
    """The cost of a module in HLO text (`compiled.as_text()`); ValueError if it is not one."""
    computations, entry = parse(text)
    by_name = {
        name: {instruction.name: instruction for instruction in body}
        for name, body in computations.items()
    }

    @functools.cache
    def flops_of(name: str) -> float:
        total = 0.0
        for instruction in computations[name]:
            total += flops(instruction, by_name[name])
            inner = instruction.called("calls")
            total += flops_of(inner) if inner else 0.0
        return total

    cycles, not_estimated = collections.Counter(), collections.Counter()
    exchanges, costliest, unknown = {}, [], []
    num_flops = 0.0
    for times, home, instruction in executed(computations, entry, unknown):
        num_flops += times * flops(instruction, by_name[home])
        inner = instruction.called("calls")
        fused = inner if instruction.opcode in ("fusion", "custom-call") else None
        num_flops += times * flops_of(fused) if fused else 0.0
        found = collectives_in(instruction, computations, by_name, home)
        for kind, channel, record in found:
            record = Collective(*(times * value for value in _values(record)))
            # What runs beside the arithmetic is written in steps, all of one channel.
            key = channel or (home, instruction.name)
            exchanges[key] = max(exchanges.get(key, (kind, record)), (kind, record), key=_most)
        if instruction.cycles is not None:
            cycles[part_of(instruction.op_name)] += times * instruction.cycles
            costliest.append((times * instruction.cycles, times, instruction))
        elif _takes_time(instruction) and not found:
            target = instruction.attribute(r'custom_call_target="([^"]*)"')
            name = re.sub(r"[.\d]+$", "", instruction.name)
            not_estimated[target or (name if fused else instruction.opcode)] += times
    costliest.sort(key=lambda row: -row[0])
    collectives = {}
    for kind, record in exchanges.values():
        collectives[kind] = collectives.get(kind, Collective()) + record
    return Cost(dict(cycles), num_flops, collectives, costliest, dict(not_estimated), unknown)


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """{computation: its instructions, in the order of the schedule}, and the entry's name."""
    computations, entry, body = {}, None, None
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")) and line.endswith("{"):
            name = line.removeprefix("ENTRY ").lstrip("%").split(" ", 1)[0]
            body = computations[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif line.startswith("}"):
            body = None
        elif body is not None:
            found = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$", line)
            if found:
                body.append(Instruction(*found.groups()[:3], *_split_arguments(found[4])))
    if entry is None:
        raise ValueError("this is not the text of an HLO module: it has no ENTRY computation")
    return computations, entry


def _split_arguments(rest: str) -> tuple[str, str]:
    depth = 1
    for index, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return rest[:index], rest[index + 1 :]
    return rest, ""


def executed(
    computations: dict[str, list[Instruction]], name: str, unknown: list[str], times: int = 1
) -> Iterator[tuple[int, str, Instruction]]:
    """(times a step runs it, its computation, instruction), loops entered and not fusions.

    Every branch of a conditional counts. Loops whose trips are not to be told go to `unknown`.
    """
    for instruction in computations[name]:
        yield times, name, instruction
        if instruction.opcode == "while":
            trips = trip_count(instruction, computations)
            if trips is None:
                unknown.append(instruction.name)
            inner = [(instruction.called("body"), trips or 1)]
        elif instruction.opcode == "conditional":
            branches = instruction.attribute(r"branch_computations=\{([^}]*)\}") or ", ".join(
                filter(None, map(instruction.called, ("true_computation", "false_computation")))
            )
            inner = [(branch.strip().lstrip("%"), 1) for branch in branches.split(",")]
        elif instruction.opcode in ("call", "async-start"):
            inner = [(instruction.called("to_apply") or instruction.called("calls"), 1)]
        else:
            continue
        for called, trips in inner:
            yield from executed(computations, called, unknown, times * trips)


def trip_count(loop: Instruction, computations: dict[str, list[Instruction]]) -> int | None:
    """Trips of a `while`: as the compiler notes them, or the bound of a loop that counts from 0."""
    known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    if known:
        return int(known)
    bounds = [
        int(instruction.arguments)
        for instruction in computations[loop.called("condition")]
        if instruction.opcode == "constant" and re.match(r"[su]32\[\]", instruction.shape)
    ]
    return bounds[0] if len(bounds) == 1 else None


def part_of(op_name: str) -> tuple[str, str]:
    """(part of the model, "forward", "backward" or "update") of an instruction's `op_name`."""
    path = op_name.partition("/")[2]
    part = next(part for part, pattern in PARTS if re.search(pattern, "/" + path if path else ""))
    if "transpose(" in path:
        return part, "backward"
    return part, "update" if part in ("optimizer", "other") else "forward"


def array_bytes(shape: str) -> int:
    """Bytes of the arrays in a shape: `(f32[8,128]{1,0}, s32[])` -> 4100; tiles' padding aside."""
    return sum(
        math.prod(sizes) * (BITS.get(kind) or int(re.search(r"\d+", kind)[0])) // 8
        for kind, sizes in _arrays(shape)
        if kind not in ("token", "opaque")
    )


def _arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (kind, tuple(int(size) for size in sizes.replace("<=", "").split(",") if size))
        for kind, sizes in re.findall(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\]", shape)
    ]


def _takes_time(instruction: Instruction) -> bool:
    """Whether an instruction without an estimate would have needed one."""
    if instruction.opcode in FREE or instruction.opcode.startswith(COLLECTIVES):
        return False
    if re.search(r'custom_call_target="(AllocateBuffer|ConcatBitcast)"', instruction.attributes):
        return False
    return any(math.prod(sizes) > 1 for _, sizes in _arrays(instruction.shape))


def flops(instruction: Instruction, siblings: dict[str, Instruction]) -> float:
    """FLOPs of one matrix product or convolution, 0 for anything else.

    On TPU a batched product is a convolution whose batch is a dilated window: of its positions
    only those count that meet an element of both sides, as in XLA's own cost analysis.
    """
    if instruction.opcode not in ("dot", "convolution"):
        return 0.0
    result = _arrays(instruction.shape)[0][1]
    left, right = (_arrays(siblings[name].shape)[0][1] for name in instruction.operands)
    if instruction.opcode == "dot":
        contracted = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
        return 2.0 * math.prod(result) * math.prod(left[int(d)] for d in contracted.split(",") if d)
    labels = instruction.attribute(r"dim_labels=(\S+?)(?:,|$)")
    of_left, of_right, of_result = re.split(r"_|->", labels)
    total = 2.0 * result[of_result.index("b")] * result[of_result.index("f")]
    total *= right[of_right.index("i")]
    window = instruction.attribute(r"window=\{([^}]*)\}") or ""
    fields = dict(field.split("=") for field in window.split())

    def field(name, axis, default):
        return fields[name].split("x")[axis] if name in fields else default

    for axis in range(len(result) - 2):
        total *= _met_positions(
            left[of_left.index(str(axis))],
            right[of_right.index(str(axis))],
            result[of_result.index(str(axis))],
            stride=int(field("stride", axis, 1)),
            pad=int(field("pad", axis, "0_0").split("_")[0]),
            left_dilation=int(field("lhs_dilate", axis, 1)),
            right_dilation=int(field("rhs_dilate", axis, 1)),
        )
    return total


@functools.cache
def _met_positions(left, right, result, *, stride, pad, left_dilation, right_dilation) -> int:
    """Pairs of elements of the result and the window that meet an element of the left side."""
    position = np.arange(result)[:, None] * stride + np.arange(right) * right_dilation - pad
    inside = (position >= 0) & (position <= (left - 1) * left_dilation)
    return int(np.sum(inside & (position % left_dilation == 0)))


def collectives_in(
    instruction: Instruction, computations: dict, by_name: dict, computation: str
) -> list[tuple[str, str | None, Collective]]:
    """(kind, channel, record) of the collective an instruction is, or of those fused into it."""
    if instruction.opcode == "fusion":
        called = instruction.called("calls")
        found = [
            found
            for inner in computations[called]
            for found in collectives_in(inner, computations, by_name, called)
        ]
        if called.startswith("all-reduce-scatter"):  # How TPU writes a reduce-scatter.
            found = [
                (
                    "reduce-scatter",
                    channel,
                    dataclasses.replace(record, link_bytes=record.link_bytes / 2),
                )
                for _, channel, record in found
            ]
        return found
    siblings = by_name[computation]
    if instruction.opcode == "send" and "megascale" in instruction.attributes:
        num_bytes = array_bytes(siblings[instruction.operands[0]].shape)
        return [("between slices", None, Collective(1, num_bytes))]  # By the hosts, not over links.
    kind = instruction.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return []
    num_bytes = sum(array_bytes(siblings[name].shape) for name in instruction.operands)
    if kind == "all-reduce":  # TPU may widen on the way.
        num_bytes = max(num_bytes, array_bytes(instruction.shape))
    size = group_size(instruction.attributes)
    if kind == "all-gather":
        num_bytes *= size
    share = 1.0 if kind == "collective-permute" else (size - 1) / size
    link_bytes = num_bytes * share * (2 if kind == "all-reduce" else 1)
    channel = instruction.attribute(r"channel_id=(\d+)")
    return [(kind, channel, Collective(1, num_bytes, link_bytes))]


def group_size(attributes: str) -> int:
    """Devices that take part together, from any of the ways `replica_groups` is written."""
    found = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes)
    if found:  # mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found[2]))
    found = re.search(r"replica_groups=\[\d+,(\d+)\]", attributes)
    if found:  # [groups,size]<=[devices]
        return int(found[1])
    found = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    return len(found[1].split(",")) if found else 1
