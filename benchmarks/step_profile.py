"""Prints where a training step on a CPU spends its time, by the parts of the model.

.venv/bin/python benchmarks/step_profile.py --workloads=mini:32x128

The step of benchmarks/train_step.py, traced by `jax.profiler`. "products" are matrix products, with
what XLA fuses into them; "other" is everything else. Operations run one after the other; what is
left of a step is the time between them, and the tracing itself.
"""

import collections
import glob
import os
import tempfile
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from absl import app, flags
from train_step import DEFAULTS, WORKLOADS, bert_jax_update, parse_workload

from bert_jax.pods.estimate.hlo_cost import part_of
from bert_jax.pods.estimate.hlo_text import executed_instructions, parse_hlo
from bert_jax.runtime.command_line import restart_with_huge_pages

STEPS = flags.DEFINE_integer("traced_steps", 10, "Number of steps to trace, after three others.", 1)


def operations(text: str) -> dict[str, tuple[str, str]]:
    """Returns (part and direction, "products" or "other") of each instruction of HLO text."""
    computations, entry = parse_hlo(text)
    result, with_products = {}, set()
    for _, instruction, fusion in executed_instructions(computations, entry):
        if instruction.opcode == "dot":
            with_products.add((fusion or instruction).name)
        # The events of a caller enclose those of what it calls.
        if fusion is None and instruction.opcode not in ("while", "call", "conditional"):
            kind = "products" if instruction.name in with_products else "other"
            result[instruction.name] = " ".join(part_of(instruction.op_name)), kind
    return result


def traced_milliseconds(directory: str) -> collections.Counter:
    """Returns the total milliseconds of each instruction, by name, over all traced steps."""
    (file,) = glob.glob(f"{directory}/**/*.xplane.pb", recursive=True)
    result = collections.Counter()
    for plane in jax.profiler.ProfileData.from_file(file).planes:
        for event in (event for line in plane.lines for event in line.events):
            if name := dict(event.stats).get("hlo_op"):
                result[name] += event.duration_ns / 1e6
    return result


def profile(workload_text: str) -> None:
    """Prints the table of a workload."""
    workload = parse_workload(workload_text)
    update, state, rows = bert_jax_update(workload.config(), workload)
    update = update.lower(state, rows).compile()
    names = operations(update.as_text())
    for _ in range(3):
        state, _ = jax.block_until_ready(update(state, rows))
    with tempfile.TemporaryDirectory() as directory:
        started = time.perf_counter()
        with jax.profiler.trace(directory):
            for _ in range(STEPS.value):
                state, _ = jax.block_until_ready(update(state, rows))
        step = 1e3 * (time.perf_counter() - started) / STEPS.value
        milliseconds = traced_milliseconds(directory)
    table = collections.defaultdict(collections.Counter)
    for name, (part, kind) in names.items():
        table[part][kind] += milliseconds[name] / STEPS.value
    print(f"\n{workload_text}: {step:.0f} ms per step, traced\n{'ms':34} products   other")
    total = collections.Counter()
    for part, kinds in sorted(table.items(), key=lambda item: -item[1].total()):
        print(f"{part:34} {kinds['products']:8.1f} {kinds['other']:7.1f}")
        total += kinds
    print(f"{'sum':34} {total['products']:8.1f} {total['other']:7.1f}")
    print(f"{'between operations':34} {step - total.total():16.1f}", flush=True)


def main(argv: list[str]) -> None:
    del argv
    restart_with_huge_pages()
    for workload in WORKLOADS.value or DEFAULTS["cpu"]:
        profile(workload)


if __name__ == "__main__":
    app.run(main)
