"""Counts the cycles of the TPU kernels: `tools/kernel_cycles.py` writes the table of them.

The compiler gives kernels no `estimated_cycles`, but it can write their schedule. This compiles
each kernel alone, for each chip and shape, and counts its instruction bundles, one per cycle, plus
delay cycles: of one grid program for attention (in long rows, of each loop in it), and of all grid
programs of a block of tokens for a sublayer's output. Unlike `estimated_cycles`, it excludes memory
stalls and the start-up of grid programs.
"""

import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.dropout import AttentionDropout, HiddenDropout
from bert_jax.model.tpu_kernels import (
    attention_kernel,
    distance_attention_kernel,
    gated_kernel,
    long_attention_kernel,
    sublayer_kernel,
)
from bert_jax.model.tpu_kernels.blocks import LANES, needs_float32
from bert_jax.pods.estimate import compilation
from bert_jax.sharding.mesh import make_mesh

LENGTHS = (128, 384, 512)
PAIR_LENGTH = 256  # Of rows for two texts of 128 tokens, in contrastive pre-training.
# Rows of DeBERTa that were compiled, by chip.
DISTANCES = {"v4": (128, 384, 512), "v5e": (512,), "v5p": (512,), "v6e": (512,)}
SHORTEST_BRANCH = 100  # Bundles.
HEAD_DIM = 64
DTYPES = ("bfloat16", "float32")
# Tokens (for blocks of 256, and of 512), inner and hidden size of the published models' sublayers.
SUBLAYERS = [
    (tokens, inner, hidden)
    for hidden in (128, 256, 512, 768, 1024)
    for inner in (hidden, 4 * hidden)
    for tokens in (2304, 4096)
]
# ALBERT's own: the hidden sizes with the tanh form of GELU for which blocks fit; the length and
# size of the heads of ALBERT_XLARGE.
TANH_HIDDEN = (768, 1024)
LARGE_HEADS = (512, 128)
# Longer rows have the loops of the kernel for 2,048 tokens. With a window, those for 1,024, too.
LONG_LENGTHS = (1024, 2048)
WINDOW = 64  # Of ModernBERT, on each side.
SEGMENTED = "v4", 8192  # The chip with such rows, which have the same loops in all lengths.
# Tokens, inner and hidden size of the gated networks of ModernBERT-base, and of Ettin's with 17 and
# 68 million parameters; the sizes of the others do not divide, or do not fit.
GATED = ((4096, 1152, 768), (4096, 384, 256), (4096, 768, 512))


class Shape(NamedTuple):
    """What a kernel is compiled for.

    `sizes` are the length of rows and the size of a head, for attention; or tokens, inner and
    hidden size, for the output of a sublayer with an `activation`, if there is one, or of a gated
    network.
    """

    has_dropout: bool
    dtype: str
    sizes: tuple[int, ...]
    activation: str | None = None
    rotates: bool = False  # Only in long rows.
    window: int | None = None
    is_gated: bool = False
    is_segmented: bool = False  # Only in long rows.
    has_distances: bool = False  # Disentangled attention.

    @property
    def is_long(self) -> bool:
        return len(self.sizes) == 2 and self.sizes[0] > attention_kernel.MAX_LENGTH

    @property
    def is_sublayer(self) -> bool:
        return len(self.sizes) == 3 and not self.is_gated


def shapes(chip: str) -> list[Shape]:
    """Returns the shapes to compile for a chip."""
    attention = itertools.product((False, True), DTYPES, [(n, HEAD_DIM) for n in LENGTHS])
    found = [Shape(*each) for each in attention]
    found += [Shape(has_dropout, "bfloat16", LARGE_HEADS) for has_dropout in (False, True)]
    found.append(Shape(True, "bfloat16", (PAIR_LENGTH, HEAD_DIM)))
    if chip != "v3":
        found += [
            Shape(True, "bfloat16", (length, HEAD_DIM), has_distances=True)
            for length in DISTANCES.get(chip, ())
        ]
        lengths = [(length, False) for length in LONG_LENGTHS]
        if chip == SEGMENTED[0]:
            lengths.append((SEGMENTED[1], True))
        for length, is_segmented in lengths:
            for has_dropout, rotates, window in (
                (False, False, None),
                (True, False, None),
                (False, True, None),
                (False, True, WINDOW),
            ):
                shape = Shape(has_dropout, "bfloat16", (length, HEAD_DIM), None, rotates, window)
                found.append(shape._replace(is_segmented=is_segmented))
        found += [
            Shape(has_dropout, dtype, sizes, activation)
            for has_dropout, dtype, sizes in itertools.product((False, True), DTYPES, SUBLAYERS)
            for activation in activations(*sizes)
            if sublayer_kernel.block_sizes(*sizes, dtype)
        ]
        found += [Shape(False, "bfloat16", sizes, "gelu", is_gated=True) for sizes in GATED]
    return list({entry(shape): shape for shape in found}.values())


def segments(shape: Shape) -> long_attention_kernel.Segments | None:
    if not shape.is_segmented:
        return None
    length, _ = shape.sizes
    return long_attention_kernel.choose_segments(length, "TPU v4", shape.dtype, shape.has_dropout)


def activations(tokens: int, inner: int, hidden: int) -> tuple[str | None, ...]:
    """Returns the activations with which a sublayer of these sizes is compiled."""
    if inner == hidden:
        return (None,)
    return ("gelu", "gelu_tanh") if hidden in TANH_HIDDEN else ("gelu",)


def compile_kernels(chip: str, shape: Shape) -> None:
    """Compiles both kernels for one chip; to be run with the compiler's dump switched on."""
    has_dropout, dtype, sizes, activation, rotates, window, *_ = shape
    mesh = make_mesh(devices=[compilation.describe_device(chip)])
    sharding = NamedSharding(mesh, P())

    def abstract(*sizes, dtype="int32"):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    def float32(*sizes):
        return abstract(*sizes, dtype="float32")

    if shape.is_sublayer:
        tokens, inner, hidden = sizes
        words, dropout = abstract(1, tokens), None
        if has_dropout:
            dropout = HiddenDropout((words, words), abstract(), float32())
        inputs, x = (abstract(tokens, size, dtype=dtype) for size in (inner, hidden))
        stack = abstract(1, *x.shape, dtype=dtype)
        stacks = sublayer_kernel.Stacks(
            inputs=abstract(1, *inputs.shape, dtype=dtype),
            residuals=stack,
            sums=stack,
            outputs=stack,
        )
        params = sublayer_kernel.SublayerParams(
            matrix=abstract(inner, hidden, dtype=dtype),
            bias=float32(hidden),
            scale=float32(hidden),
            shift=float32(hidden),
            inner_bias=float32(inner) if activation else None,
        )
        arguments = inputs, x, params, stacks, dropout

        def loss(inputs, x, params, stacks, dropout):
            options = sublayer_kernel.Options(activation, epsilon=1e-12)
            y, _, _ = sublayer_kernel.sublayer(options, stacks, 0, dropout, inputs, x, params)
            return jnp.sum(y.astype(jnp.float32))

    elif shape.is_gated:
        tokens, inner, hidden = sizes
        inputs, x = (abstract(tokens, size, dtype=dtype) for size in (2 * inner, hidden))
        stacks = gated_kernel.Stacks(
            *(abstract(1, *each.shape, dtype=dtype) for each in (inputs, x, x))
        )
        arguments = inputs, x, abstract(inner, hidden, dtype=dtype), stacks

        def loss(inputs, x, matrix, stacks):
            options = gated_kernel.Options(activation)
            y, _ = gated_kernel.gated_output(options, stacks, 0, inputs, x, matrix)
            return jnp.sum(y.astype(jnp.float32))

    else:
        length, head_dim = sizes
        batch, num_pairs = max(2 * attention_kernel.MAX_LENGTH // length, 2), 256 // head_dim // 2
        dropout = None
        if has_dropout:
            dropout = AttentionDropout(
                words=abstract(batch, num_pairs, 2, length),
                key_words=abstract(2, length),
                threshold=abstract(),
                scale=float32(),
            )
        projections = abstract(batch, length, 3 * 256, dtype=dtype)
        table = abstract(2 * length, 256, dtype=dtype)
        rotation = (float32(batch, length, head_dim // 2),) * 2 if rotates else None
        bias = None if rotates else float32(3 * 256)
        arguments = projections, bias, abstract(batch, length), dropout, rotation, table
        device_kind = mesh.devices.item().device_kind

        def loss(projections, bias, sequence_ids, dropout, rotation, table):
            options = {"head_dim": head_dim}
            if shape.has_distances:
                context, _ = distance_attention_kernel.attention(
                    projections,
                    bias,
                    sequence_ids,
                    dropout,
                    None,
                    0,
                    (table, table),
                    options=distance_attention_kernel.Options(),
                )
            elif shape.is_long:
                mask = AttentionMask(sequence_ids, window=window)
                context = long_attention_kernel.long_attention(
                    projections, bias, mask, dropout, rotation, segments=segments(shape), **options
                )
            else:
                options["float32_blocks"] = needs_float32(device_kind)
                context, _ = attention_kernel.attention(
                    projections, bias, sequence_ids, dropout, **options
                )
            return jnp.sum(context.astype(jnp.float32))

    # Unchecked: kernels do not declare over which axes their outputs vary.
    gradients = jax.shard_map(
        jax.value_and_grad(loss, (0, 1)), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    jax.jit(gradients).lower(*arguments).compile()


def count_cycles(schedule: str, runs: Sequence[int] = ()) -> int:
    """Returns the cycles of the loop over the grid in a schedule, in one program.

    A bundle takes one, and on v3 as many more as `vdelay` says. `runs` gives how often
    each branch is taken: then returns the cycles of sum(runs) programs. Raises ValueError if the
    schedule has fewer branches.
    """
    bundles = [x for x in _bundles(schedule) if re.match(r" *\w+ +(\w\w)?: +> +\{", x)]
    cycles = [_cycles(bundle) for bundle in bundles]
    if not runs:
        return sum(cycles)
    ends, branches = {}, []
    for n, bundle in enumerate(bundles):
        if re.match(r" *\w+ +PF: ", bundle):  # "Predicated region fallthrough": it ends before.
            ends |= dict.fromkeys(re.findall(r"region (\d+)", bundle), n)
    for n, bundle in enumerate(bundles):
        region = re.search(r"sbr\.rel .* target = \$region(\d+)", bundle)
        if region and ends.get(region[1], 0) > n + SHORTEST_BRANCH:
            branches = [each for each in branches if each[1] <= n] + [(n, ends[region[1]])]
    # The longest; the others start copies and wait for them.
    branches = sorted(sorted(branches, key=lambda each: each[0] - each[1])[: len(runs)])
    if len(branches) != len(runs):
        raise ValueError(f"the schedule has {len(branches)} branches: expected {len(runs)}")
    taken = [sum(cycles[start:end]) for start, end in branches]
    outside = sum(cycles) - sum(taken)
    return sum(runs) * outside + sum(n * each for n, each in zip(runs, taken, strict=True))


def count_loops(schedule: str) -> list[tuple[int, int]]:
    """Returns the depth of each loop of a schedule, and the cycles of one iteration, in order.

    Those of a loop exclude those of the loops in it. The loop over the grid has depth 0.
    """
    bundles, loops = _bundles(schedule), []
    for start, bundle in enumerate(bundles):
        if re.match(r" *\w+ +LB: ", bundle):
            regions = set(re.findall(r"Start region (\d+)", bundle))
            ends = [
                n
                for n, each in enumerate(bundles)
                if n >= start and regions & set(re.findall(r"target = \$region(\d+)", each))
            ]
            loops.append((start, ends[-1] + 2))  # One bundle after its branch still belongs to it.
    found = []
    for start, end in loops:
        depth = sum(first < start and end <= last for first, last in loops)
        inner = [each for each in loops if start < each[0] and each[1] <= end]
        own = set(range(start, end)).difference(*(range(*each) for each in inner))
        found.append((depth, sum(_cycles(bundles[n]) for n in own)))
    return found


def _bundles(schedule: str) -> list[str]:
    bundles = re.split(r"^(?= *\w+ +(?:\w\w)?: )", schedule, flags=re.MULTILINE)
    return [x for x in bundles if re.match(r" *(0x[0-9a-f]+|0) +(\w\w)?: *>* *\{", x)]


def _cycles(bundle: str) -> int:
    return 1 + sum(map(int, re.findall(r" vdelay (\d+)", bundle)))


def long_attention_cycles(
    schedule: str, length: int, is_band: bool, is_segmented: bool = False
) -> dict[str, int]:
    """Returns the cycles of what the kernel for long rows repeats.

    "program" is the rest of it; "tile" is for each 128 positions, "group" for each group of
    queries, and "block" for each block of keys that a group reads. Of rows in segments, "group" is
    for each segment of keys that a group sees, "finish" once for each group, and "next", with a
    window, for each tile of queries that sees another segment. `length` is that of the keys in a
    program. Raises ValueError if the schedule has other loops.
    """
    (_, program), *loops = count_loops(schedule)
    prepare, *groups = [cycles for depth, cycles in loops if depth == 1]
    blocks = [cycles for depth, cycles in loops if depth == 2]
    more = {}
    if is_segmented:
        start, *groups = groups
        following = groups.pop(1) if is_band else 0
        more = {"finish": start + groups.pop(1), "next": following}
    if len(groups) not in (1, 2) or len(blocks) != (not is_band):
        raise ValueError(f"the loops of the schedule are {loops}: expected those of the kernel")
    at_once = 2 - length // LANES % 2
    tile = math.ceil((prepare + sum(groups[1:])) / at_once)  # Backward, the last finishes tiles.
    return {"program": program, "tile": tile, "group": groups[0], "block": sum(blocks)} | more


def measure(chip: str, shape: Shape) -> dict[str, int | dict[str, int]]:
    """Returns the cycles of the forward and of the backward kernel."""
    runs = {"forward": (), "backward": ()}
    if shape.is_sublayer:
        _, chunk = sublayer_kernel.block_sizes(*shape.sizes, shape.dtype)
        num_chunks = shape.sizes[1] // chunk
        if num_chunks > 1:  # Forward, the last, the first, and the others; backward, the first.
            runs = {"forward": (1, 1, num_chunks - 2), "backward": (1, num_chunks - 1)}
    program = "bert_jax.tools.kernel_cycles"
    found = schedules(["-m", program, f"--chip={chip}", f"--shape={json.dumps(shape)}"])

    def count(schedule, kernel):
        if shape.is_long:
            is_band = shape.window is not None
            _, length = _long_options(shape, kernel).segments or shape.sizes[::-1]
            return long_attention_cycles(schedule, length, is_band, shape.is_segmented)
        return count_cycles(schedule, runs[kernel])

    return {
        kernel: count(schedule, kernel)
        for kernel in ("forward", "backward")
        for name, schedule in found.items()
        if f"{kernel}_kernel" in name
    }


def schedules(arguments: list[str]) -> dict[str, str]:
    """Runs Python with `arguments`; returns the schedules of what it compiles, by file name."""
    with tempfile.TemporaryDirectory() as directory:
        dump = f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true"
        # Writing all passes takes as long as compiling.
        dump += " --xla_jf_dump_llo_pass_label_regex=final_bundles"
        environment = os.environ | {"LIBTPU_INIT_ARGS": dump}
        subprocess.run([sys.executable, *arguments], env=environment, check=True)
        return {
            path.name: path.read_text(encoding="utf-8")
            for path in pathlib.Path(directory).glob("*[0-9]-final_bundles.txt")
        }


def _long_options(shape: Shape, kernel: str) -> long_attention_kernel.Options:
    length, head_dim = shape.sizes
    options = long_attention_kernel.make_options(
        length, shape.window, head_dim, shape.has_dropout, segments(shape)
    )
    return options.of_forward() if kernel == "forward" else options


def entry(shape: Shape, kernel: str = "backward") -> str:
    """Returns the name of an entry of the table, as `hlo_cost` looks it up.

    Only of rows in segments does it depend on the `kernel`, "forward" or "backward".
    """
    name = "{} {}{}".format(shape.sizes[0], "distances_" * shape.has_distances, shape.sizes[1])
    if shape.is_sublayer:
        block, _ = sublayer_kernel.block_sizes(*shape.sizes, shape.dtype)
        _, inner, hidden = shape.sizes
        name = f"{shape.activation or 'linear'} {block} {inner} {hidden}"
    elif shape.is_gated:
        block = gated_kernel.block_size(*shape.sizes, shape.dtype)
        _, inner, hidden = shape.sizes
        name = f"gated_{shape.activation} {block} {inner} {hidden}"
    elif shape.is_long:
        options = _long_options(shape, kernel)
        name = f"{long_attention_kernel.variant(options, shape.rotates)} {options.group}"
    return f"{name} {shape.dtype}{' dropout' * shape.has_dropout}"


def measure_chip(chip: str) -> dict[str, dict]:
    """Returns the cycles of all kernels for a chip, by name of entry; prints each."""
    cycles = {}
    for shape in shapes(chip):
        for kernel, measured in measure(chip, shape).items():
            cycles.setdefault(entry(shape, kernel), {})[kernel] = measured
        print(chip, entry(shape), cycles[entry(shape)], flush=True)
    return cycles
