"""Exact search against FAISS's flat index: 1,000 queries in 1 million vectors of 384 dimensions.

.venv/bin/pip install faiss-cpu
.venv/bin/python benchmarks/search.py

Random vectors of length 1 in float32, which both have in memory before they are timed: FAISS in
`IndexFlatIP`, bert_jax in a NumPy array. Each measurement runs in its own process, and the sides
alternate. Both use all cores, and ask glibc for huge pages, as `bert_jax.predict` does. Seconds are
for the second search of a process; bert_jax compiles in the first, whose seconds are printed, too.
The aim is a ratio of at least 1.
"""

import json
import logging as std_logging
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
from absl import app, flags

from bert_jax.runtime.command_line import TUNABLE

NUM_VECTORS = flags.DEFINE_integer("num_vectors", 1_000_000, "Number of vectors.", lower_bound=1)
NUM_QUERIES = flags.DEFINE_integer("num_queries", 1000, "Number of queries.", lower_bound=1)
SIZE = flags.DEFINE_integer("size", 384, "Dimensions of the vectors.", lower_bound=1)
TOP_K = flags.DEFINE_integer("top_k", 10, "Vectors to find for each query.", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 3, "Number of processes per side.", lower_bound=1)
SIDES = "bert_jax", "faiss"
SIDE = flags.DEFINE_enum("side", None, SIDES, "Internal: measures this side in this process.")


def unit_vectors(rng: np.random.Generator, count: int) -> np.ndarray:
    vectors = rng.standard_normal((count, SIZE.value), np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def measure(side: str, directory: pathlib.Path) -> list[float]:
    """Returns the seconds of the first and second search, and the CPU's seconds of the second.

    Writes what the second found.
    """
    std_logging.getLogger("faiss").setLevel("WARNING")  # Logs which of its libraries it loads.
    queries, vectors = (np.load(directory / f"{name}.npy") for name in ("queries", "vectors"))
    if side == "faiss":
        import faiss

        index = faiss.IndexFlatIP(SIZE.value)
        index.add(vectors)
        del vectors

        def search():
            return index.search(queries, TOP_K.value)
    else:
        import bert_jax

        def search():
            return bert_jax.search(queries, vectors, TOP_K.value)

    seconds = []
    for _ in range(2):
        started, cpu_started = time.perf_counter(), time.process_time()
        scores, indices = search()
        seconds.append(time.perf_counter() - started)
        cpu_seconds = time.process_time() - cpu_started
    np.savez(directory / f"{side}.npz", scores=scores, indices=indices)
    return [*seconds, cpu_seconds]


def main(argv: list[str]) -> None:
    if SIDE.value:
        print(json.dumps(measure(SIDE.value, pathlib.Path(argv[1]))))
        return
    seconds = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as name:
        rng, directory = np.random.default_rng(0), pathlib.Path(name)
        for file, count in (("queries", NUM_QUERIES.value), ("vectors", NUM_VECTORS.value)):
            np.save(directory / f"{file}.npy", unit_vectors(rng, count))
        own_flags = [f"--size={SIZE.value}", f"--top_k={TOP_K.value}"]
        for _ in range(REPEATS.value):
            for side in SIDES:
                load = os.getloadavg()[0]
                command = [sys.executable, __file__, f"--side={side}", *own_flags, name]
                environment = os.environ | {
                    "JAX_PLATFORMS": "cpu",
                    "PYTHONWARNINGS": "ignore",
                    "GLIBC_TUNABLES": TUNABLE,
                }
                run = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
                first, second, cpu = json.loads(run.stdout.splitlines()[-1])
                seconds[side].append(second)
                note = f"{second:.2f} s, {cpu:.2f} of all cores; first search {first:.2f} s"
                print(f"{side:>9}: {note}; load average {load:.1f}", flush=True)
        found = {side: dict(np.load(directory / f"{side}.npz")) for side in SIDES}
    ratio = statistics.median(seconds["faiss"]) / statistics.median(seconds["bert_jax"])
    equal = np.mean(found["faiss"]["indices"] == found["bert_jax"]["indices"])
    apart = np.abs(found["faiss"]["scores"] - found["bert_jax"]["scores"]).max()
    print(f"faiss / bert_jax, medians: {ratio:.2f}; scores at most {apart:.1e} apart, ", end="")
    print(f"{equal:.4%} of the indices equal")


if __name__ == "__main__":
    app.run(main)
