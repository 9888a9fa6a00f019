"""Writes the cycles of the TPU kernels, which tools/tpu_report.py adds to the compiler's estimates.

python tools/kernel_cycles.py                  # writes bert_jax/model/tpu_kernels/cycles.json
python tools/kernel_cycles.py --chip=tpu7x     # writes the entries of one chip, and keeps others
"""

import json

from absl import app, flags

from bert_jax.pods.chips import CHIPS
from bert_jax.pods.estimate.hlo_cost import KERNEL_TABLE
from bert_jax.pods.estimate.kernel_cycles import Shape, compile_kernels, measure_chip
from bert_jax.runtime.command_line import parse_flags

CHIP = flags.DEFINE_enum("chip", None, list(CHIPS), "Chip to compile for. Default: all.")
SHAPE = flags.DEFINE_string(
    "shape", None, "Only compile the kernels for --chip and this shape, a JSON list."
)


def main(_) -> None:
    if SHAPE.value:  # In a separate process, with the compiler's dump enabled.
        compile_kernels(CHIP.value, Shape(*json.loads(SHAPE.value)))
        return
    table = json.loads(KERNEL_TABLE.read_text(encoding="utf-8"))
    for chip in [CHIP.value] if CHIP.value else CHIPS:
        table[chip] = measure_chip(chip)
        KERNEL_TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
