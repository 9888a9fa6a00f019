"""Estimates the cost of one training step on one device from the scheduled HLO text.

The TPU compiler annotates nearly every scheduled instruction with `estimated_cycles`: its cost
model's estimate of arithmetic and memory traffic, whichever takes longer. Loops (whose bodies are
annotated) and collectives have no estimate. The cycles of our kernels are in a table beside them,
which tools/kernel_cycles.py makes.
"""

import collections
import functools
import json
import math
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.model.tpu_kernels import attention_kernel, gated_kernel, sublayer_kernel
from bert_jax.pods.chips import CHIPS
from bert_jax.pods.estimate.hlo_text import (
    Computations,
    Instruction,
    array_bytes,
    arrays_of,
    executed_instructions,
    group_size,
    parse_hlo,
    trip_count,
)

KERNEL_TABLE = pathlib.Path(attention_kernel.__file__).with_name("cycles.json")
DTYPES = {16: "bfloat16", 32: "float32"}  # By their bits.
# The first match on an instruction's `op_name`, its path of Flax modules, wins. A fusion carries
# the name of one of the instructions in it, so the breakdown is approximate.
MODEL_PARTS = (
    (
        "masking",
        r"^(?!.*(Pretraining|ReplacedToken|SpanBoundary|Distillation)Model).*(vmap\(|row_key|mask)",
    ),
    ("LayerNorm", r"layer_norm"),
    ("embeddings", r"/embeddings\b"),
    ("heads", r"/(mlm|nsp|sbo|pooler|discriminator|projection)\b|/encoder\.pool\b"),
    ("sublayer output", r"/(sublayer|gated_output)/"),
    (
        "attention",
        r"/(query|key|value|query_key_value|attention_output|attention)/|/b\w+,b\w+->",
    ),
    ("feed-forward", r"/(intermediate|output|feed_forward)/"),
    ("saved activations", r"/encoder/(.*dynamic_(update_)?(slice|index_in_dim)|broadcast_in_dim)"),
    ("other encoder ops", r"/(encoder|layers)/"),
    # Losses, gathers of the masked positions, and what distillation compares.
    ("heads", r"(Pretraining|SpanBoundary|Distillation)Model|jvp\(\)"),
    ("optimizer", r"."),
    ("other", r""),  # Without op_name: casts of the parameters, copies.
)
# Of fine-tuning, which masks nothing, but maps over trials.
FINETUNING_PARTS = (("batch loss", r"batch_loss\b"), *MODEL_PARTS[1:])
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# No cost of their own, or copies that overlap with arithmetic.
# fmt: off
FREE = {
    "after-all", "AllocateBuffer", "async-done", "async-start", "async-update", "bitcast",
    "call", "call-done", "call-start", "ConcatBitcast", "conditional", "constant",
    "copy-done", "copy-start", "get-tuple-element", "parameter", "partition-id", "recv",
    "recv-done", "send", "send-done", "slice-done", "slice-start", "tuple", "while",
}
# fmt: on
NO_ESTIMATE = str(2**63 - 1)  # What the compiler writes for scatters on the SparseCores of v6e.


class MissingKernelCycles(ValueError):
    """The table of our kernels' cycles has no entry for a chip and shape."""


class Cost(NamedTuple):
    """Cost of one step on one device."""

    cycles: collections.Counter  # By (part, "forward" | "backward" | "update").
    flops: float  # Of the matrix products, two per multiply-add.
    collectives: dict[str, dict[str, float]]  # {kind: {"count", "bytes", "link_bytes"}}.
    largest_collectives: dict[str, dict[str, float]]  # By kind and arrays, descending bytes.
    exposed_link_bytes: float  # Of collectives, those that no arithmetic overlaps.
    costliest: list[tuple[int, int, Instruction]]  # (Cycles of all runs, runs, ...), descending.
    without_estimate: dict[str, int]  # Runs without an estimate, by `Instruction.kind`.
    loops_counted_once: list[str]  # Those with an unknown trip count.


def step_cost(
    text: str,
    chip: str = "v4",
    clock_hz: float | None = None,
    document_tokens: int | None = None,
    unknown_trips: int | None = None,
    parts: Sequence[tuple[str, str]] = MODEL_PARTS,
) -> Cost:
    """Returns the cost of an HLO module (`compiled.as_text()`) on a chip, by default at its clock.

    Only exposed communication depends on the clock: faster arithmetic hides less of it. Long rows
    hold documents of `document_tokens` on average; None: each row is one, which costs the most.
    `unknown_trips` is the trip count of loops in which the program does not have it; None: they
    count once. `parts` are as in MODEL_PARTS. Raises ValueError for other text, and
    MissingKernelCycles.
    """
    computations, entry = parse_hlo(text)
    cycles, without_estimate = collections.Counter(), collections.Counter()
    collectives, costliest, unknown_loops, total_flops = {}, [], [], 0.0
    cycles_by_name, links_by_name = {}, collections.Counter()  # Of one run.
    communicating = set()  # Fusions with collectives.
    kernels = json.loads(KERNEL_TABLE.read_text(encoding="utf-8")).get(chip, {})
    trips = unknown_trips or 1
    for runs, instruction, fusion in executed_instructions(
        computations, entry, unknown_trips=trips
    ):
        kernel = kernel_cost(instruction, chip, kernels, document_tokens)
        total_flops += runs * (kernel[1] if kernel else flops(instruction))
        is_loop = instruction.opcode == "while" and unknown_trips is None
        if is_loop and trip_count(instruction, computations) is None:
            unknown_loops.append(instruction.name)
        if figures := collective_traffic(instruction, fusion, chip):
            kind, arrays, num_bytes, link_bytes = figures
            communicating.add(fusion)
            # An overlapped collective is split into steps that share a channel: count one step.
            # Explicit collectives share a channel too: `op_name` and arrays distinguish them.
            channel = instruction.attribute(r"channel_id=(\d+)") or instruction.name
            channel = kind, channel, instruction.op_name, arrays
            if instruction.opcode.endswith("-start"):
                channel = instruction.name
            if channel not in collectives:
                links_by_name[(fusion or instruction).name] += link_bytes
            total = runs * num_bytes, runs * link_bytes, runs, kind, arrays
            collectives[channel] = max(total, collectives.get(channel, total))
        if fusion:
            continue  # The estimate of the fusion includes its instructions.
        is_free = instruction.kind in FREE or instruction.opcode.startswith(COLLECTIVES)
        is_free |= instruction in communicating
        estimate = instruction.attribute(r'"estimated_cycles":"?(\d+)')
        if estimate == NO_ESTIMATE:
            estimate = ""
        if estimate := kernel[0] if kernel else estimate:
            part, direction = part_of(instruction.op_name, parts)
            cycles[f"{part} kernel" if kernel else part, direction] += runs * int(estimate)
            cycles_by_name[instruction.name] = int(estimate)
            costliest.append((runs * int(estimate), runs, instruction))
        elif not is_free and any(math.prod(sizes) > 1 for _, sizes in arrays_of(instruction.shape)):
            without_estimate[instruction.kind] += runs
    by_kind, by_arrays = (collections.defaultdict(collections.Counter) for _ in range(2))
    for num_bytes, link_bytes, runs, kind, arrays in collectives.values():
        for total in (by_kind[kind], by_arrays[f"{kind} {arrays}"]):
            total.update(count=runs, bytes=num_bytes, link_bytes=link_bytes)
    largest = dict(sorted(by_arrays.items(), key=lambda item: -item[1]["bytes"]))
    costliest.sort(key=lambda row: -row[0])
    rate = CHIPS[chip].link_bytes_per_second / (clock_hz or CHIPS[chip].clock_hz)
    overlaps = {name: count * rate for name, count in cycles_by_name.items()}
    _, exposed = exposed_link_bytes(computations, entry, overlaps, links_by_name, trips)
    return Cost(
        cycles=cycles,
        flops=total_flops,
        collectives=by_kind,
        largest_collectives=largest,
        exposed_link_bytes=exposed,
        costliest=costliest,
        without_estimate=without_estimate,
        loops_counted_once=unknown_loops,
    )


def exposed_link_bytes(
    computations: Computations,
    name: str,
    overlaps: dict[str, float],
    links: dict[str, float],
    unknown_trips: int = 1,
) -> tuple[float, float]:
    """Returns the bytes that the links can send during a computation, and those it waits for.

    `overlaps` and `links` are, by instruction, the bytes that the links can send during its
    arithmetic, and the bytes of a collective. The links serve collectives in the order in which
    they start; "done" waits for its own bytes and for earlier ones, and a synchronous collective
    for all of its bytes.
    """
    total, exposed, in_flight = 0.0, 0.0, {}
    for instruction in computations[name]:
        overlap = overlaps.get(instruction.name, 0.0)
        if instruction.opcode in ("while", "call", "conditional"):
            trips = trip_count(instruction, computations) if instruction.opcode == "while" else 1
            runs = trips or unknown_trips
            for called in instruction.called:
                inner = exposed_link_bytes(computations, called, overlaps, links, unknown_trips)
                overlap, exposed = overlap + runs * inner[0], exposed + runs * inner[1]
        total += overlap
        for started in in_flight:
            hidden = min(overlap, in_flight[started])
            in_flight[started], overlap = in_flight[started] - hidden, overlap - hidden
        if instruction.opcode.endswith("-start"):
            # Of itself, or of what it wraps.
            names = {instruction.name}
            for called in instruction.called:
                names |= {each.name for _, each, _ in executed_instructions(computations, called)}
            num_bytes = sum(links.get(name, 0.0) for name in names)
            if num_bytes:  # A local copy uses no link: its "done" does not wait for collectives.
                in_flight[instruction.name] = num_bytes
        elif instruction.opcode.endswith("-done"):
            start = instruction.name.replace("-done", "-start")
            while start in in_flight:
                exposed += in_flight.pop(next(iter(in_flight)))
        else:
            exposed += links.get(instruction.name, 0.0)
    return total, exposed + sum(in_flight.values())


def part_of(op_name: str, parts: Sequence[tuple[str, str]] = MODEL_PARTS) -> tuple[str, str]:
    """Returns (part of the model, "forward" | "backward" | "update") of an `op_name`."""
    path = "".join(op_name.partition("/")[1:])
    part = next(part for part, pattern in parts if re.search(pattern, path))
    if "transpose(" in path:
        return part, "backward"
    return part, "update" if part in ("optimizer", "other") else "forward"


def flops(instruction: Instruction) -> float:
    """Returns the FLOPs of a matrix product or convolution, 0 for any other instruction.

    On TPU a batched product is a convolution whose batch is a dilated window: as in XLA's own cost
    analysis, only positions where both operands have an element count.
    """
    if instruction.opcode not in ("dot", "convolution"):
        return 0.0
    arrays = arrays_of(f"{instruction.shape} {instruction.operands}")
    result, left, right = (sizes for _, sizes in arrays)
    if instruction.opcode == "dot":
        contracted = re.findall(r"\d+", instruction.attribute(r"lhs_contracting_dims=\{(.*?)\}"))
        return 2.0 * math.prod([*result, *(left[int(axis)] for axis in contracted)])
    labels = instruction.attribute(r"dim_labels=(\S+?)(?:,|$)")
    left, right, result = (
        dict(zip(names, sizes, strict=True))
        for names, sizes in zip(re.split(r"_|->", labels), (left, right, result), strict=True)
    )
    window = re.findall(r"(\w+)=(\S+)", instruction.attribute(r"window=\{([^}]*)\}"))
    total = 2.0 * result["b"] * result["f"] * right["i"]
    for axis in map(str, range(len(result) - 2)):
        field = {name: int(value.split("x")[int(axis)].split("_")[0]) for name, value in window}
        window_position = np.arange(right[axis]) * field.get("rhs_dilate", 1) - field.get("pad", 0)
        position = np.arange(result[axis])[:, None] * field.get("stride", 1) + window_position
        index, between = np.divmod(position, field.get("lhs_dilate", 1))
        total *= int(np.sum((between == 0) & (index >= 0) & (index < left[axis])))
    return total


def kernel_cost(
    instruction: Instruction, chip: str, kernels: dict, document_tokens: int | None = None
) -> tuple[int, float] | None:
    """Returns (cycles, FLOPs) of one of our kernels; None for any other instruction.

    `kernels` is the part of KERNEL_TABLE for the chip, `document_tokens` as in `step_cost`. The
    FLOPs count the products; in attention two of size length x length forward and four backward,
    without the scores that the backward pass computes again, and in disentangled attention the
    terms of distances. In long rows, they count what the kernel reads. Raises MissingKernelCycles
    if the table has no entry.
    """
    name = re.search(r"/(forward|backward)_kernel_(\w+?)(_dropout)?/", instruction.op_name)
    if instruction.kind != "tpu_custom_call" or not name:
        return None
    operands, (direction, variant, has_dropout) = arrays_of(instruction.operands), name.groups()
    if variant in (*sublayer_kernel.ACTIVATIONS, "linear"):
        (bits, (*batch, _, num_tokens, inner)), (_, (*_, hidden)) = operands[1], operands[2]
        tokens, _ = sublayer_kernel.block_sizes(num_tokens, inner, hidden, DTYPES[bits])
        programs = math.prod(batch) * num_tokens / tokens
        sizes = f"{variant} {tokens} {inner} {hidden}"
        kernel_flops = 2.0 * math.prod(batch) * num_tokens * inner * hidden
    elif variant.startswith("gated_"):
        (bits, (_, num_tokens, _)), (_, (inner, hidden)) = operands[1], operands[-1]
        tokens = gated_kernel.block_size(num_tokens, inner, hidden, DTYPES[bits])
        programs = num_tokens / tokens
        sizes = f"{variant} {tokens} {inner} {hidden}"
        kernel_flops = 2.0 * num_tokens * inner * hidden
    elif variant.startswith("long_"):
        is_segmented = "_segments" in variant
        (_, (*batch, groups)), (bits, (*_, length, width)) = (
            operands[n] for n in (1, 5 if is_segmented else 3)
        )
        hidden = width // 3
        sizes = f"{variant} {length // groups}"
        programs = math.prod(batch) * hidden / attention_kernel.LANES
        times, pairs = long_attention_runs(variant, length, length // groups, document_tokens)
        products = 2 if direction == "forward" else 4
        kernel_flops = products * 2.0 * math.prod(batch) * pairs * hidden
    else:
        (_, (*batch, _, length)), (bits, (*_, width)) = (
            operands[1],
            operands[3 if variant.startswith("distances_") else 4],
        )
        hidden = width // 3  # Of queries, keys and values together.
        sizes = f"{length} {variant}"
        blocks = attention_kernel.MAX_LENGTH // length * attention_kernel.LANES
        programs = math.prod(batch) * hidden / blocks
        products = 2.0
        if variant.startswith("distances_"):  # Two terms, of a row and a block more.
            products += 2 * (length + attention_kernel.LANES) / length
        products *= 1 if direction == "forward" else 2
        kernel_flops = products * 2.0 * math.prod(batch) * length**2 * hidden
    entry = f"{sizes} {DTYPES[bits]}" + (" dropout" if has_dropout else "")
    try:
        cycles = kernels[entry][direction]
    except KeyError as error:
        raise MissingKernelCycles(
            f"{KERNEL_TABLE.name} has no entry {entry!r} for {chip}: add its shape to "
            "bert_jax/pods/estimate/kernel_cycles.py, if it is missing there, and run "
            f"`python tools/kernel_cycles.py --chip={chip}`"
        ) from error
    if isinstance(cycles, dict):  # Of each loop in a program.
        cycles = sum(times[name] * each for name, each in cycles.items())
    return math.ceil(programs * cycles / (2 if CHIPS[chip].megacore else 1)), kernel_flops


def long_attention_runs(
    variant: str, length: int, group: int, document_tokens: int | None
) -> tuple[dict[str, float], float]:
    """Returns how often the kernel for long rows runs its parts, in a row, and the pairs it reads.

    The parts are those of `kernel_cycles.long_attention_cycles`, and `variant` is the kernel's.
    """
    kind, keys = re.search(r"(band|keys)(\d+)$", variant).groups()
    keys, groups, tiles = int(keys), length // group, length // attention_kernel.LANES
    blocks, pairs = 0.0, length * keys
    if kind == "keys":
        blocks = read_blocks(length, group, keys, document_tokens)
        pairs = blocks * group * keys
    times = {"program": 1, "tile": tiles, "group": groups, "block": blocks}
    if segments := re.search(r"_segments(\d+)x(\d+)", variant):
        num_queries, num_keys = (length // int(size) for size in segments.groups())
        times |= {"finish": groups, "next": 0}
        if kind == "keys":
            visits = read_blocks(length, group, int(segments[2]), document_tokens)
            times |= {"program": num_keys * num_queries, "group": visits}
        else:
            times |= {"program": 3 * num_keys, "next": 2 * (num_keys - 1)}
            pairs += times["next"] * attention_kernel.LANES * keys
    return times, pairs


@functools.cache
def read_blocks(length: int, group: int, keys: int, document_tokens: int | None) -> float:
    """Returns how many blocks of keys all groups of queries of a row read, in the mean.

    Documents of random lengths, exponential with the mean `document_tokens`, follow one another;
    the end of a row cuts them. None: each row is one.
    """
    num_rows = 1 if document_tokens is None else 256
    stream, starts = num_rows * length, [np.arange(0, num_rows * length, length)]
    if document_tokens is not None:
        rng = np.random.default_rng(0)
        count = 2 * stream // document_tokens + 100
        ends = np.cumsum(np.ceil(rng.exponential(document_tokens, count)).astype(int))
        starts.append(ends[ends < stream])
    starts = np.unique(np.concatenate(starts))
    firsts = np.arange(0, stream, group)
    first = starts[np.searchsorted(starts, firsts, side="right") - 1]
    end = np.append(starts, stream)[np.searchsorted(starts, firsts + group - 1, side="right")]
    # Blocks do not cross rows.
    return float(np.sum(-(-end // keys) - first // keys)) / num_rows


def collective_traffic(
    instruction: Instruction, fusion: Instruction | None, chip: str
) -> tuple | None:
    """Returns (kind, arrays, payload in bytes, bytes over links) of a collective, else None.

    The payload is the arrays that are reduced, or the gathered ones. Over its links, a device sends
    (n - 1) / n of it to gather or scatter over n devices, twice that to reduce. What is exchanged
    all to all also takes the links of the devices between. Slices exchange data over their hosts'
    network instead.
    """
    kind = instruction.opcode.removesuffix("-start")
    payload = array_bytes(instruction.operands)
    if kind == "send" and "megascale" in instruction.attributes:
        return "between slices", instruction.operands, payload, 0.0
    if kind not in COLLECTIVES:
        return None
    share = 1.0
    if kind != "collective-permute":
        size = group_size(instruction.attributes)
        share = (size - 1) / size
    if kind.endswith("all-to-all"):  # On a torus, an array crosses a quarter of each dimension.
        dimensions = CHIPS[chip].dimensions
        share *= max(1.0, dimensions / 4 * size ** (1 / dimensions))
    if kind == "all-reduce":
        payload = max(payload, array_bytes(instruction.shape))  # The result may have a wider dtype.
        if fusion and fusion.called[0].startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # How the TPU compiler writes it.
        else:
            share *= 2
    elif kind == "all-gather":
        payload *= size
    arrays = instruction.shape if kind == "all-gather" else instruction.operands
    return kind, re.sub(r"\{.*?\}| index \d+", "", arrays), payload, payload * share
