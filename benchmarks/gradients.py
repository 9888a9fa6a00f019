"""Measures what each hand-written gradient saves in a whole training step on the CPU.

python benchmarks/gradients.py --size=mini

The step comes from benchmarks/train_step.py. Each variant replaces one hand-written gradient
(GELU, LayerNorm, softmax or dropout) by JAX's own; "none" replaces nothing. Every measurement runs
in its own process, and the variants alternate. Prints the median step time and the peak memory,
each also relative to "none".
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time

from absl import app, flags, logging
from train_step import REPEATS, STEPS, Workload, bert_jax_step

from bert_jax.model import attention, dropout, layers
from bert_jax.model.config import BertConfig
from bert_jax.runtime.command_line import TUNABLE

SIZE = flags.DEFINE_string("size", "mini", "Published size of the model.")
SCAN = flags.DEFINE_bool("scan", False, "Loop over the layers instead of unrolling them.")
VARIANTS = ("none", "gelu", "layer_norm", "softmax", "dropout")
VARIANT = flags.DEFINE_enum(
    "variant", None, VARIANTS, "Internal: measure this variant in this process."
)


def use_automatic_gradient(variant: str) -> None:
    """Replaces a function with a hand-written gradient by the plain function."""
    if variant == "gelu":
        layers.gelu = layers.gelu.fun
    elif variant == "layer_norm":
        layers.layer_norm = layers.layer_norm.fun
    elif variant == "softmax":
        attention._softmax = attention._softmax.fun
    elif variant == "dropout":
        dropout._dropout = dropout._dropout.fun
        attention._weighted_values_with_dropout = attention._weighted_values_with_dropout.fun
        dropout._add_with_dropout = dropout._add_with_dropout.fun


def measure(variant: str) -> tuple[float, float]:
    """Returns the median seconds per step and the peak memory in bytes of this process."""
    use_automatic_gradient(variant)
    workload = Workload(SIZE.value, 32, 128)
    step = bert_jax_step(BertConfig.named(SIZE.value), workload, SCAN.value)
    seconds = []
    for _ in range(2 + STEPS.value):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_in_process(variant: str) -> tuple[float, float]:
    environment = os.environ | {"GLIBC_TUNABLES": TUNABLE, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, f"--variant={variant}", f"--size={SIZE.value}"]
    command += [f"--scan={SCAN.value}", f"--steps={STEPS.value}"]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    return json.loads(output.splitlines()[-1])


def main(argv: list[str]) -> None:
    del argv
    if VARIANT.value:
        logging.set_verbosity(logging.WARNING)
        print(json.dumps(measure(VARIANT.value)))
        return
    results = {variant: [] for variant in VARIANTS}
    for _ in range(REPEATS.value):
        for variant in VARIANTS:
            results[variant].append(measure_in_process(variant))
    medians = {
        variant: [statistics.median(values) for values in zip(*measured, strict=True)]
        for variant, measured in results.items()
    }
    print(f"{'replaced by JAX':16} {'ms per step':>12} {'ratio':>6} {'peak MiB':>9} {'ratio':>6}")
    for variant, (seconds, memory) in medians.items():
        ratios = seconds / medians["none"][0], memory / medians["none"][1]
        print(
            f"{variant:16} {1e3 * seconds:12.0f} {ratios[0]:6.2f} {memory / 2**20:9.0f} "
            f"{ratios[1]:6.2f}"
        )


if __name__ == "__main__":
    app.run(main)
