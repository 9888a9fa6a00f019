"""Prints the cycles of JAX's splash attention and of the kernel for long rows, without a TPU.

python benchmarks/splash_cycles.py
python benchmarks/splash_cycles.py --chips=v6e --lengths=8192

Both are counted in the schedules of the TPU compiler, as tools/kernel_cycles.py does: instruction
bundles per token of one layer and of one device (v4: both cores), forward and backward, without
memory stalls and the start of programs. Queries, keys and values are those of ModernBERT-base, 12
heads of 64 in bfloat16, without dropout; a row is one sequence. Splash is compiled here, with
segment ids, `--block` queries and keys in a block and its fused backward kernel, and with a window
in longer rows `--local_block`; its programs count as if they took all branches, but those without a
visible pair not at all. Cycles of the own kernel are those of cycles.json, which rotates
queries and keys, too. What either side needs around its kernels is not counted: splash reads and
writes `[heads, length, 64]`, which takes copies.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.model.tpu_kernels import long_attention_kernel
from bert_jax.pods import chips
from bert_jax.pods.estimate import compilation, hlo_cost, kernel_cycles
from bert_jax.sharding.mesh import make_mesh

HEADS, HEAD_DIM, ROWS = 12, 64, 2
WINDOW = 64  # On each side.
KERNELS = "splash_mha_fwd", "splash_mha_dkv"  # The second computes all gradients.
CHIPS = flags.DEFINE_list("chips", ["v4", "v5e", "v6e"], "Chips to compile for.")
LENGTHS = flags.DEFINE_list("lengths", ["1024", "8192"], "Numbers of tokens per row.")
BLOCK = flags.DEFINE_integer("block", 1024, "Queries and keys in a block.", 128)
LOCAL_BLOCK = flags.DEFINE_integer("local_block", 256, "The same, windows in longer rows.", 128)
SHAPE = flags.DEFINE_string("shape", None, "Internal: compile this, [chip, length, window].")


def block_size(length: int, window: int | None) -> int:
    # In short rows, the start of programs costs more than what a window saves.
    return LOCAL_BLOCK.value if window and length > BLOCK.value else min(BLOCK.value, length)


def splash_gradient(length: int, window: int | None):
    """Returns splash attention's gradient of queries, keys, values `[rows, heads, length, 64]`."""
    mask = splash_attention_mask.FullMask((length, length))
    if window:
        mask = splash_attention_mask.LocalMask((length, length), (window, window), 0)
    block = block_size(length, window)
    sizes = splash_attention_kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        use_fused_bwd_kernel=True,
    )
    attend = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * HEADS),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
    )

    def loss(arrays, ids):
        rows = jax.vmap(attend)(*arrays, splash_attention_kernel.SegmentIds(ids, ids))
        return jnp.sum(rows.astype(jnp.float32))

    return jax.grad(loss)


def splash_arrays(length: int, sharding=None):
    def abstract(*sizes, dtype):
        return jax.ShapeDtypeStruct((ROWS, *sizes), dtype, sharding=sharding)

    arrays = (abstract(HEADS, length, HEAD_DIM, dtype="bfloat16"),) * 3
    return arrays, abstract(length, dtype="int32")


def compile_splash(chip: str, length: int, window: int | None) -> None:
    """Compiles both kernels; to be run with the compiler's dump switched on."""
    mesh = make_mesh(devices=[compilation.describe_device(chip)])
    gradient = jax.shard_map(
        splash_gradient(length, window), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    arguments = splash_arrays(length, NamedSharding(mesh, P()))
    jax.jit(gradient).lower(*arguments).compile()


def num_programs(length: int, window: int | None) -> int:
    """Returns the number of programs of a kernel, for all rows, that see some key."""
    size = block_size(length, window)
    block = np.arange(length // size)
    # Of the nearest positions of two blocks.
    distance = np.abs(block[:, None] - block) * size - (size - 1)
    return ROWS * HEADS * int(np.sum(distance <= (length if window is None else window)))


def splash_cycles(chip: str, length: int, window: int | None) -> list[float]:
    """Returns the cycles per token of splash attention, forward and backward."""
    shape = json.dumps([chip, length, window])
    blocks = [f"--block={BLOCK.value}", f"--local_block={LOCAL_BLOCK.value}"]
    schedules = kernel_cycles.schedules([__file__, f"--shape={shape}", *blocks])
    names = [[name for name in schedules if kernel in name] for kernel in KERNELS]
    cycles = [kernel_cycles.count_cycles(schedules[name]) for (name,) in names]
    programs = num_programs(length, window)
    cores = 2 if chips.CHIPS[chip].megacore else 1
    return [programs * each / (ROWS * length * cores) for each in cycles]


def own_cycles(chip: str, length: int, window: int | None) -> list[float]:
    """Returns those of the kernel for long rows, by cycles.json."""
    kind = "TPU v4" if chip == "v4" else ""  # Other chips hold whole rows.
    segments = long_attention_kernel.choose_segments(length, kind, "bfloat16", False)
    options = long_attention_kernel.make_options(length, window, HEAD_DIM, False, segments)
    variant = long_attention_kernel.variant(options, rotates=True)
    times, _ = hlo_cost.long_attention_runs(variant, length, options.group, None)
    table = json.loads(hlo_cost.KERNEL_TABLE.read_text(encoding="utf-8"))[chip]
    entry = table[f"{variant} {options.group} bfloat16"]
    programs = HEADS * HEAD_DIM / 128 / (2 if chips.CHIPS[chip].megacore else 1)
    return [
        programs * sum(times[name] * each for name, each in entry[direction].items()) / length
        for direction in ("forward", "backward")
    ]


def main(_) -> None:
    if SHAPE.value:
        compile_splash(*json.loads(SHAPE.value))
        return
    print("| chip | row | window | splash | own kernel | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for chip in CHIPS.value:
        for length in map(int, LENGTHS.value):
            for window in (None, WINDOW):
                splash, own = (
                    cycles(chip, length, window) for cycles in (splash_cycles, own_cycles)
                )
                both = " | ".join("{:.1f} + {:.1f}".format(*each) for each in (splash, own))
                ratio = sum(splash) / sum(own)
                print(f"| {chip} | {length:,} | {window} | {both} | {ratio:.1f} |", flush=True)


if __name__ == "__main__":
    app.run(main)
