"""Measures the peak memory and time of `bert_jax.load`.

python benchmarks/restore.py runs/base

Loads in new processes with one CPU device, whatever devices wrote the checkpoint. Peak memory
should be close to the size of the parameters: no optimizer state, no second copy.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time

from absl import app, flags

REPEATS = flags.DEFINE_integer("repeats", 3, "Number of new processes.")
HERE = flags.DEFINE_bool("here", False, "Measure once, in this process.")


def resident() -> int:
    """Returns the resident memory of this process in bytes."""
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def measure(directory: str) -> dict[str, float]:
    """Returns the seconds, parameter bytes and peak memory growth of one load."""
    import jax

    import bert_jax

    jax.devices()
    load = bert_jax.load  # Imports its module, which is not to be measured.
    before, started = resident(), time.monotonic()
    model = load(directory)
    seconds = time.monotonic() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    return {"seconds": seconds, "parameters": size, "growth": peak - before}


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        raise app.UsageError("expected one argument: a workdir or a checkpoint")
    if HERE.value:
        print(json.dumps(measure(argv[1])))
        return
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    runs = []
    for _ in range(REPEATS.value):
        command = [sys.executable, __file__, "--here", argv[1]]
        result = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
        if result.returncode:
            sys.exit(result.stderr)
        runs.append(json.loads(result.stdout.splitlines()[-1]))
    seconds, size, growth = (
        statistics.median(run[name] for run in runs) for name in ("seconds", "parameters", "growth")
    )
    print(
        f"parameters {size / 2**20:,.1f} MiB; peak memory growth "
        f"{growth / 2**20:,.1f} MiB, ratio {growth / size:.2f}; {seconds:.2f} s (medians of "
        f"{len(runs)})"
    )


if __name__ == "__main__":
    app.run(main)
