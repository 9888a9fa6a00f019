"""Counts the cycles of the TPU kernels of attention, for tools/tpu_report.py.

The compiler gives kernels no `estimated_cycles`, but it can write their schedule. This compiles
them alone, for each chip and shape, and counts the cycles of one program of the grid: its
instruction bundles, one a cycle, and delays. It is an estimate like the others: no waiting for
memory, no start of a program.

python tools/kernel_cycles.py     # writes bert_jax/model/kernels/attention_tpu.json, in 9 minutes
"""

import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax import partitioning
from bert_jax.model.dropout import AttentionDropout
from bert_jax.model.kernels import attention_tpu
from bert_jax.runtime.command_line import parse_flags
from bert_jax.tools import hlo_cost, tpu_compile

CHIP = flags.DEFINE_string("chip", None, "Only compile the kernels for this chip and --shape.")
SHAPE = flags.DEFINE_string("shape", None, "JSON list of length, dtype, and whether with dropout.")

CHIPS = ("v3", "v4", "v5e", "v5p", "v6e")
LENGTHS = (128, 384, 512)
HEAD_DIM = 64
DTYPES = ("bfloat16", "float32")


def compile_kernels(chip: str, *shape) -> None:
    """Compiles both kernels for one chip; to be run with the compiler's dump switched on."""
    length, dtype, has_dropout = shape
    mesh = partitioning.make_mesh(devices=[tpu_compile.describe_device(chip)])
    sharding = NamedSharding(mesh, P())

    def abstract(*sizes, dtype="int32"):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    batch = 2 * attention_tpu.MAX_LENGTH // length
    x, ids = abstract(batch, length, 3 * 256, dtype=dtype), abstract(batch, length)
    bias = abstract(3 * 256, dtype="float32")
    num_pairs = 256 // HEAD_DIM // 2
    words = (
        abstract(batch, num_pairs, 2, length),
        abstract(2, length),
        abstract(),
        abstract(dtype="float32"),
    )
    dropout = AttentionDropout(*words) if has_dropout else None

    settings = {"head_dim": HEAD_DIM}
    settings["float32_blocks"] = attention_tpu.needs_float32(mesh.devices.item().device_kind)

    def loss(projections, bias, ids, dropout):
        out, _ = attention_tpu.attention(projections, bias, ids, dropout, **settings)
        return jnp.sum(out.astype(jnp.float32))

    gradients = jax.shard_map(
        jax.grad(loss, (0, 1)), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    jax.jit(gradients).lower(x, bias, ids, dropout).compile()


def count_cycles(schedule: str) -> int:
    """Returns the cycles of one program of a kernel: of the loop over the grid in a schedule.

    A bundle takes one, and those of v3 wait as many more as `vdelay` says.
    """
    bundles = re.split(r"^(?= *\w+ +(?:\w\w)?: )", schedule, flags=re.MULTILINE)
    bundles = [x for x in bundles if re.match(r" *0x[0-9a-f]+ +(\w\w)?: +> +\{", x)]
    return len(bundles) + sum(int(n) for x in bundles for n in re.findall(r" vdelay (\d+)", x))


def measure(chip: str, *shape) -> dict[str, int]:
    """Returns the cycles of the forward and of the backward kernel."""
    with tempfile.TemporaryDirectory() as directory:
        dump = f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true"
        subprocess.run(
            [sys.executable, __file__, f"--chip={chip}", f"--shape={json.dumps(shape)}"],
            env=os.environ | {"LIBTPU_INIT_ARGS": dump},
            check=True,
        )
        return {
            kernel: count_cycles(path.read_text())
            for kernel in ("forward", "backward")
            for path in pathlib.Path(directory).glob(f"*{kernel}_kernel*[0-9]-final_bundles.txt")
        }


def main(_) -> None:
    if CHIP.value:
        compile_kernels(CHIP.value, *json.loads(SHAPE.value))
        return
    table = {}
    for chip, *shape in itertools.product(CHIPS, LENGTHS, DTYPES, (False, True)):
        cycles = measure(chip, *shape)
        print(chip, *shape, cycles, flush=True)
        length, dtype, has_dropout = shape
        entry = f"{length} {HEAD_DIM} {dtype}{' dropout' * has_dropout}"
        table.setdefault(chip, {})[entry] = cycles
    hlo_cost.KERNEL_TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
