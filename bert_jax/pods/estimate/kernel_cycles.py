"""Counts the cycles of the TPU kernels: `tools/kernel_cycles.py` writes the table of them.

The compiler gives kernels no `estimated_cycles`, but it can write their schedule. This compiles
each kernel alone, for each chip and shape, and counts its instruction bundles, one per cycle, plus
delay cycles: of one grid program for attention, and of all grid programs of a block of tokens for a
sublayer's output. Unlike `estimated_cycles`, it excludes memory stalls and the start-up of grid
programs.
"""

import itertools
import json
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

from bert_jax.model.dropout import AttentionDropout, HiddenDropout
from bert_jax.model.tpu_kernels import attention_kernel, sublayer_kernel
from bert_jax.model.tpu_kernels.blocks import needs_float32
from bert_jax.pods.estimate import compilation
from bert_jax.sharding.mesh import make_mesh

LENGTHS = (128, 384, 512)
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


class Shape(NamedTuple):
    """What a kernel is compiled for.

    `sizes` are the length of rows and the size of a head, for attention; or tokens, inner and
    hidden size, for the output of a sublayer with an `activation`, if there is one.
    """

    has_dropout: bool
    dtype: str
    sizes: tuple[int, ...]
    activation: str | None = None

    @property
    def is_sublayer(self) -> bool:
        return len(self.sizes) == 3


def shapes(chip: str) -> list[Shape]:
    """Returns the shapes to compile for a chip."""
    attention = itertools.product((False, True), DTYPES, [(n, HEAD_DIM) for n in LENGTHS])
    found = [Shape(*each) for each in attention]
    found += [Shape(has_dropout, "bfloat16", LARGE_HEADS) for has_dropout in (False, True)]
    if chip != "v3":
        found += [
            Shape(has_dropout, dtype, sizes, activation)
            for has_dropout, dtype, sizes in itertools.product((False, True), DTYPES, SUBLAYERS)
            for activation in activations(*sizes)
            if sublayer_kernel.block_sizes(*sizes, dtype)
        ]
    return list({entry(shape): shape for shape in found}.values())


def activations(tokens: int, inner: int, hidden: int) -> tuple[str | None, ...]:
    """Returns the activations with which a sublayer of these sizes is compiled."""
    if inner == hidden:
        return (None,)
    return ("gelu", "gelu_tanh") if hidden in TANH_HIDDEN else ("gelu",)


def compile_kernels(chip: str, shape: Shape) -> None:
    """Compiles both kernels for one chip; to be run with the compiler's dump switched on."""
    has_dropout, dtype, sizes, activation = shape
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

    else:
        length, head_dim = sizes
        batch, num_pairs = 2 * attention_kernel.MAX_LENGTH // length, 256 // head_dim // 2
        dropout = None
        if has_dropout:
            dropout = AttentionDropout(
                words=abstract(batch, num_pairs, 2, length),
                key_words=abstract(2, length),
                threshold=abstract(),
                scale=float32(),
            )
        projections = abstract(batch, length, 3 * 256, dtype=dtype)
        arguments = projections, float32(3 * 256), abstract(batch, length), dropout
        options = {"head_dim": head_dim}
        options["float32_blocks"] = needs_float32(mesh.devices.item().device_kind)

        def loss(projections, bias, sequence_ids, dropout):
            context, _ = attention_kernel.attention(
                projections, bias, sequence_ids, dropout, **options
            )
            return jnp.sum(context.astype(jnp.float32))

    # Unchecked: kernels do not declare over which axes their outputs vary.
    gradients = jax.shard_map(
        jax.grad(loss, (0, 1)), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    jax.jit(gradients).lower(*arguments).compile()


def count_cycles(schedule: str, runs: Sequence[int] = ()) -> int:
    """Returns the cycles of the loop over the grid in a schedule, in one program.

    A bundle takes one, and on v3 as many more as `vdelay` says. `runs` gives how often
    each branch is taken: then returns the cycles of sum(runs) programs. Raises ValueError if the
    schedule has fewer branches.
    """
    bundles = re.split(r"^(?= *\w+ +(?:\w\w)?: )", schedule, flags=re.MULTILINE)
    bundles = [x for x in bundles if re.match(r" *0x[0-9a-f]+ +(\w\w)?: +> +\{", x)]
    cycles = [1 + sum(map(int, re.findall(r" vdelay (\d+)", x))) for x in bundles]
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


def measure(chip: str, shape: Shape) -> dict[str, int]:
    """Returns the cycles of the forward and of the backward kernel."""
    runs = {"forward": (), "backward": ()}
    if shape.is_sublayer:
        _, chunk = sublayer_kernel.block_sizes(*shape.sizes, shape.dtype)
        num_chunks = shape.sizes[1] // chunk
        if num_chunks > 1:  # Forward, the last, the first, and the others; backward, the first.
            runs = {"forward": (1, 1, num_chunks - 2), "backward": (1, num_chunks - 1)}
    with tempfile.TemporaryDirectory() as directory:
        dump = f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true"
        # Writing all passes takes as long as compiling.
        dump += " --xla_jf_dump_llo_pass_label_regex=final_bundles"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "bert_jax.tools.kernel_cycles",
                f"--chip={chip}",
                f"--shape={json.dumps(shape)}",
            ],
            env=os.environ | {"LIBTPU_INIT_ARGS": dump},
            check=True,
        )
        return {
            kernel: count_cycles(path.read_text(encoding="utf-8"), runs[kernel])
            for kernel in ("forward", "backward")
            for path in pathlib.Path(directory).glob(f"*{kernel}_kernel*[0-9]-final_bundles.txt")
        }


def entry(shape: Shape) -> str:
    """Returns the name of an entry of the table, as `hlo_cost` looks it up."""
    name = "{} {}".format(*shape.sizes)
    if shape.is_sublayer:
        block, _ = sublayer_kernel.block_sizes(*shape.sizes, shape.dtype)
        _, inner, hidden = shape.sizes
        name = f"{shape.activation or 'linear'} {block} {inner} {hidden}"
    return f"{name} {shape.dtype}{' dropout' * shape.has_dropout}"


def measure_chip(chip: str) -> dict[str, dict[str, int]]:
    """Returns the cycles of all kernels for a chip, by name of entry; prints each."""
    cycles = {}
    for shape in shapes(chip):
        cycles[entry(shape)] = measure(chip, shape)
        print(chip, entry(shape), cycles[entry(shape)], flush=True)
    return cycles
