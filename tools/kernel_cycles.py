"""Writes the cycles of the TPU kernels, which tools/tpu_report.py adds to the compiler's estimates.

python tools/kernel_cycles.py     # writes bert_jax/model/tpu/cycles.json
"""

import json

from absl import app, flags

from bert_jax.runtime.command_line import parse_flags
from bert_jax.tpu.hlo_cost import KERNEL_TABLE
from bert_jax.tpu.kernel_cycles import Shape, compile_kernels, measure_all

CHIP = flags.DEFINE_string("chip", None, "Only compile the kernels for this chip and --shape.")
SHAPE = flags.DEFINE_string("shape", None, "JSON list: an entry of `shapes`.")


def main(_) -> None:
    if CHIP.value:  # In a separate process, with the compiler's dump enabled.
        compile_kernels(CHIP.value, Shape(*json.loads(SHAPE.value)))
        return
    KERNEL_TABLE.write_text(json.dumps(measure_all(), indent=1) + "\n")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
