"""Estimates the cost of one training step on one device from the scheduled HLO text.

The TPU compiler annotates nearly every scheduled instruction with `estimated_cycles`: its cost
model's estimate of arithmetic and memory traffic, whichever takes longer. Loops (whose bodies are
annotated), collectives and custom kernels have no estimate. Does not need JAX.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np

# The first match on an instruction's `op_name`, its path of Flax modules, wins. A fusion carries
# the name of one of the instructions in it, so the breakdown is approximate.
PARTS = (
    ("masking", r"^(?!.*BertForPreTraining).*(vmap\(|row_key|mask)"),
    ("LayerNorm", r"layer_norm"),
    ("embeddings", r"/embeddings\b"),
    ("heads", r"/(mlm|nsp|pooler)\b|/bert\.pool\b|jvp\(\)"),
    ("attention", r"/(query|key|value|attention_output|attention)/|/b\w+,b\w+->"),
    ("feed-forward", r"/(intermediate|output|feed_forward)/"),
    ("saved activations", r"/encoder/(.*dynamic_(update_)?(slice|index_in_dim)|broadcast_in_dim)"),
    ("other encoder ops", r"/(encoder|layers)/"),
    ("heads", r"BertForPreTraining"),  # Gathers of the masked positions.
    ("optimizer", r"."),
    ("other", r""),  # Without op_name: casts of the parameters, copies.
)
COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
# No cost of their own, or copies that overlap with arithmetic.
FREE = (
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"),
    *("partition-id", "copy-start", "copy-done", "slice-start", "slice-done", "while"),
    *("conditional", "call", "async-start", "async-update", "async-done"),
    *("send", "send-done", "recv", "recv-done"),
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO text: `name = shape opcode(arguments), attributes`."""

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

    def called(self, attribute: str) -> str | None:
        """Returns the name of the computation in `attribute`: "calls", "body", "condition"..."""
        return self.attribute(rf"\b{attribute}=%?([\w.\-]+)")


Computations = dict[str, dict[str, Instruction]]  # By name, each in the order of the schedule.


@dataclasses.dataclass
class Collective:
    """All collectives of one kind.

    Attributes:
      count: runs per step.
      num_bytes: payload per device: the array that is reduced, or the gathered one.
      link_bytes: bytes that one device sends over its links: over n devices, (n - 1) / n of the
        payload to gather or scatter, twice that to reduce. Slices exchange over their hosts'
        network instead: 0.
    """

    count: int = 0
    num_bytes: int = 0
    link_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of one step on one device.

    Attributes:
      cycles: {(part, "forward" | "backward" | "update"): estimated cycles}.
      flops: FLOPs of the matrix products, two per multiply-add.
      collectives: {kind: Collective}.
      costliest: (cycles of all runs, number of runs, instruction), in descending order.
      not_estimated: runs without an estimate, by opcode, kind of fusion or custom-call target.
      loops_counted_once: names of the loops with an unknown trip count.
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
    """Returns the cost of an HLO module (`compiled.as_text()`). Raises ValueError if it is none."""
    computations, entry = parse(text)

    @functools.cache
    def computation_flops(name: str) -> float:
        body = computations[name]
        return sum(
            flops(instruction, body)
            + (computation_flops(inner) if (inner := instruction.called("calls")) else 0.0)
            for instruction in body.values()
        )

    cycles, not_estimated = collections.Counter(), collections.Counter()
    exchanges, costliest, loops_counted_once, total_flops = {}, [], [], 0.0
    for runs, home, instruction in executed(computations, entry):
        fused = instruction.opcode in ("fusion", "custom-call") and instruction.called("calls")
        total_flops += runs * flops(instruction, computations[home])
        total_flops += runs * computation_flops(fused) if fused else 0.0
        if instruction.opcode == "while" and trip_count(instruction, computations) is None:
            loops_counted_once.append(instruction.name)
        found = collectives_in(instruction, computations, home)
        for kind, channel, num_bytes, link_bytes in found:
            # One that overlaps with arithmetic is split into steps of one channel: count one step.
            key = channel or (home, instruction.name)
            exchange = runs * num_bytes, runs * link_bytes, runs, kind
            exchanges[key] = max(exchanges.get(key, exchange), exchange)
        if instruction.cycles is not None:
            cycles[part_of(instruction.op_name)] += runs * instruction.cycles
            costliest.append((runs * instruction.cycles, runs, instruction))
        elif _needs_estimate(instruction) and not found:
            target = instruction.attribute(r'custom_call_target="([^"]*)"')
            name = re.sub(r"[.\d]+$", "", instruction.name)
            not_estimated[target or (name if fused else instruction.opcode)] += runs
    totals = collections.defaultdict(Collective)
    for num_bytes, link_bytes, runs, kind in exchanges.values():
        totals[kind].count += runs
        totals[kind].num_bytes += num_bytes
        totals[kind].link_bytes += link_bytes
    return Cost(
        cycles=dict(cycles),
        flops=total_flops,
        collectives=dict(totals),
        costliest=sorted(costliest, key=lambda row: -row[0]),
        not_estimated=dict(not_estimated),
        loops_counted_once=loops_counted_once,
    )


def parse(text: str) -> tuple[Computations, str]:
    """Parses HLO text into its computations and the name of the entry. Raises ValueError."""
    computations, entry, body = {}, None, None
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")) and line.endswith("{"):
            name = line.removeprefix("ENTRY ").lstrip("%").split(" ", 1)[0]
            body = computations[name] = {}
            entry = name if line.startswith("ENTRY") else entry
        elif line.startswith("}"):
            body = None
        elif body is not None:
            found = re.match(
                r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)(.*)$", line
            )
            if found:
                body[found[1]] = Instruction(*found.groups())
    if entry is None:
        raise ValueError("not the text of an HLO module: it has no ENTRY computation")
    return computations, entry


def executed(
    computations: Computations, name: str, runs: int = 1
) -> Iterator[tuple[int, str, Instruction]]:
    """Yields (runs per step, computation, instruction) of a computation and those it calls.

    Loops are entered, all branches of conditionals too, fusions are not. A loop with an unknown
    trip count runs once.
    """
    for instruction in computations[name].values():
        yield runs, name, instruction
        if instruction.opcode not in ("while", "conditional", "call", "async-start"):
            continue
        trips = trip_count(instruction, computations) if instruction.opcode == "while" else 1
        for called in re.findall(
            r"\b(?:body|calls|to_apply|\w+_computations?)=(\{[^}]*\}|[^,\s]+)",
            instruction.attributes,
        ):
            for computation in re.findall(r"[\w.\-]+", called):
                yield from executed(computations, computation, runs * (trips or 1))


def trip_count(loop: Instruction, computations: Computations) -> int | None:
    """Returns the trip count that the compiler notes, or the bound of a loop that counts from 0."""
    known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    if known:
        return int(known)
    bounds = [
        int(instruction.arguments)
        for instruction in computations[loop.called("condition")].values()
        if instruction.opcode == "constant" and re.match(r"[su]32\[\]", instruction.shape)
    ]
    return bounds[0] if len(bounds) == 1 else None


def part_of(op_name: str) -> tuple[str, str]:
    """Returns (part of the model, "forward" | "backward" | "update") of an `op_name`."""
    path = op_name.partition("/")[2]
    part = next(part for part, pattern in PARTS if re.search(pattern, "/" + path if path else ""))
    if "transpose(" in path:
        return part, "backward"
    return part, "update" if part in ("optimizer", "other") else "forward"


def array_bytes(shape: str) -> int:
    """Returns the bytes of a shape without padding: `(f32[8,128]{1,0}, s32[])` -> 4100."""
    return sum(
        math.prod(sizes) * (8 if kind == "pred" else int(re.search(r"\d+", kind)[0])) // 8
        for kind, sizes in _arrays(shape)
        if kind not in ("token", "opaque")
    )


def _arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns (dtype, sizes) of each array in a shape."""
    return [
        (kind, tuple(int(size) for size in sizes.replace("<=", "").split(",") if size))
        for kind, sizes in re.findall(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\]", shape)
    ]


def _needs_estimate(instruction: Instruction) -> bool:
    """Returns whether an instruction without an estimate makes the total too low."""
    if instruction.opcode in FREE or instruction.opcode.startswith(COLLECTIVES):
        return False
    if re.search(r'custom_call_target="(AllocateBuffer|ConcatBitcast)"', instruction.attributes):
        return False
    return any(math.prod(sizes) > 1 for _, sizes in _arrays(instruction.shape))


def flops(instruction: Instruction, siblings: dict[str, Instruction]) -> float:
    """Returns the FLOPs of a matrix product or convolution, 0 for any other instruction.

    On TPU a batched product is a convolution whose batch is a dilated window: as in XLA's own cost
    analysis, only positions with an element of both operands count.
    """
    if instruction.opcode not in ("dot", "convolution"):
        return 0.0
    result = _arrays(instruction.shape)[0][1]
    left, right = (_arrays(siblings[name].shape)[0][1] for name in instruction.operands)
    if instruction.opcode == "dot":
        contracted = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
        return 2.0 * math.prod(result) * math.prod(left[int(d)] for d in contracted.split(",") if d)
    labels = instruction.attribute(r"dim_labels=(\S+?)(?:,|$)")
    left_labels, right_labels, result_labels = re.split(r"_|->", labels)
    total = 2.0 * result[result_labels.index("b")] * result[result_labels.index("f")]
    total *= right[right_labels.index("i")]
    window = instruction.attribute(r"window=\{([^}]*)\}") or ""
    fields = dict(field.split("=") for field in window.split())

    def field(name, axis, default):
        return fields[name].split("x")[axis] if name in fields else default

    for axis in range(len(result) - 2):
        total *= _num_products(
            left[left_labels.index(str(axis))],
            right[right_labels.index(str(axis))],
            result[result_labels.index(str(axis))],
            stride=int(field("stride", axis, 1)),
            pad=int(field("pad", axis, "0_0").split("_")[0]),
            left_dilation=int(field("lhs_dilate", axis, 1)),
            right_dilation=int(field("rhs_dilate", axis, 1)),
        )
    return total


@functools.cache
def _num_products(left, right, result, *, stride, pad, left_dilation, right_dilation) -> int:
    """Returns the pairs of result and window positions that fall on an element of `left`."""
    position = np.arange(result)[:, None] * stride + np.arange(right) * right_dilation - pad
    inside = (position >= 0) & (position <= (left - 1) * left_dilation)
    return int(np.sum(inside & (position % left_dilation == 0)))


def collectives_in(
    instruction: Instruction, computations: Computations, home: str
) -> list[tuple[str, str | None, int, float]]:
    """Returns (kind, channel, num_bytes, link_bytes) of the collectives that an instruction is.

    There are several in a fusion, and none in most instructions. `home` is its computation.
    """
    if instruction.opcode == "fusion":
        fused = instruction.called("calls")
        found = [
            each
            for inner in computations[fused].values()
            for each in collectives_in(inner, computations, fused)
        ]
        if fused.startswith("all-reduce-scatter"):  # How the TPU compiler writes a reduce-scatter.
            return [("reduce-scatter", *each, link_bytes / 2) for _, *each, link_bytes in found]
        return found
    kind = instruction.opcode.removesuffix("-start")
    between_slices = kind == "send" and "megascale" in instruction.attributes
    if kind not in COLLECTIVES and not between_slices:
        return []
    payload = sum(array_bytes(computations[home][name].shape) for name in instruction.operands)
    if between_slices:
        return [("between slices", None, payload, 0.0)]
    size = group_size(instruction.attributes)
    share = 1.0 if kind == "collective-permute" else (size - 1) / size
    if kind == "all-reduce":  # Its result may have a wider dtype.
        payload = max(payload, array_bytes(instruction.shape))
        share *= 2
    elif kind == "all-gather":
        payload *= size
    return [(kind, instruction.attribute(r"channel_id=(\d+)"), payload, payload * share)]


def group_size(attributes: str) -> int:
    """Returns the number of devices per group, from any notation of `replica_groups`."""
    found = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes)
    if found:  # mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found[2]))
    found = re.search(r"replica_groups=\[\d+,(\d+)\]", attributes)
    if found:  # [groups,size]<=[devices]
        return int(found[1])
    found = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    return len(found[1].split(",")) if found else 1
