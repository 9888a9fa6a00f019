"""Prints time and memory by the length of rows, beside transformers in torch, on a CPU.

.venv-parity/bin/python benchmarks/long_rows.py

One layer in float32, forward and backward, on one row of a single sequence: that of BERT_BASE, and
the global and the local one of ModernBERT-base. Both sides compute the gradient of the mean square
of the hidden states, without dropout; transformers with `scaled_dot_product_attention`, its best on
a CPU. Each side runs in a process of its own on the same cores, and they alternate by steps.
Memory is the peak of a step beyond what was resident before the first: the weights and the program.
Both are linear in the length where a row of 4 times as many tokens takes 4 times as much.
"""

import ctypes
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

import numpy as np
from absl import app, flags, logging
from sides import define_peers, python_of

from bert_jax.model.config import BertConfig
from bert_jax.model.modernbert import ModernBertConfig
from bert_jax.runtime.command_line import TUNABLE

VOCABULARY = 1000
LENGTHS = flags.DEFINE_list("lengths", ["512", "2048", "8192"], "Numbers of tokens per row.")
REPEATS = flags.DEFINE_integer("repeats", 3, "Number of timed steps, after one other.", 1)
THREADS = flags.DEFINE_integer("threads", 0, "Number of cores per process; 0: all.")
PEERS = define_peers("transformers")
LAYERS = {"bert": "BERT_BASE", "g": "ModernBERT, global", "l": "ModernBERT, local"}
SIDE = flags.DEFINE_enum("side", None, ["bert_jax", "transformers"], "Internal: run this side.")
LAYER = flags.DEFINE_enum("layer", None, list(LAYERS), "Internal: measure this layer alone.")


def layer_config(layer: str, length: int) -> BertConfig | ModernBertConfig:
    fields = {"num_layers": 1, "vocab_size": VOCABULARY, "max_position_embeddings": length}
    if layer == "bert":
        return BertConfig.named("base", **fields)
    return ModernBertConfig(attention_pattern=layer, **fields)


def bert_jax_step(config, tokens: np.ndarray):
    """Returns a function that computes the gradient for int32 `[1, length]` tokens."""
    import jax
    import jax.numpy as jnp

    from bert_jax.model.encoder import EncoderModel

    model = EncoderModel(config)
    positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
    batch = {
        "tokens": tokens,
        "segment_ids": np.zeros_like(tokens),
        "position_ids": positions,
        "sequence_ids": np.ones_like(tokens),
    }
    params = jax.jit(model.init)(jax.random.key(0), batch)

    def loss(params, batch):
        return jnp.mean(jnp.square(model.apply(params, batch)))

    gradient = jax.jit(jax.grad(loss)).lower(params, batch).compile()
    return lambda: jax.block_until_ready(gradient(params, batch))


def resident_memory(key: str) -> int:
    """Returns the bytes of this process: "VmRSS" now, "VmHWM" at most since `reset_peak`."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(re.search(rf"{key}:\s+(\d+) kB", status)[1])


def reset_peak() -> None:
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def serve(side: str, layer: str, length: int) -> None:
    """Runs a step for each line of the standard input; prints its seconds and bytes."""
    config = layer_config(layer, length)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (1, length), np.int32)
    if side == "transformers":
        import transformers_side

        step = transformers_side.encoder_gradient(config, tokens)
    else:
        step = bert_jax_step(config, tokens)
    ctypes.CDLL(None).malloc_trim(0)  # What was freed is not resident any more.
    before = resident_memory("VmRSS")
    for _ in sys.stdin:
        reset_peak()
        started = time.perf_counter()
        step()
        seconds = time.perf_counter() - started
        print(json.dumps([seconds, resident_memory("VmHWM") - before]), flush=True)


def start(side: str, layer: str, length: int) -> subprocess.Popen:
    environment = os.environ | {"GLIBC_TUNABLES": TUNABLE, "JAX_PLATFORMS": "cpu"}
    command = [python_of(side), __file__, f"--side={side}", f"--layer={layer}"]
    return subprocess.Popen(
        [*command, f"--lengths={length}"],
        env=environment | {"PYTHONWARNINGS": "ignore"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        bufsize=1,
    )


def next_step(process: subprocess.Popen) -> tuple[float, int]:
    """Runs a step in a process of `serve`, and returns its seconds and bytes."""
    process.stdin.write("\n")
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{' '.join(process.args)} ended with exit code {process.wait()}")
    return tuple(json.loads(line))


def compare(layer: str, length: int) -> None:
    """Prints a row of the table."""
    processes = {side: start(side, layer, length) for side in ("bert_jax", *PEERS.value)}
    steps = [{side: next_step(process) for side, process in processes.items()}]
    steps += [
        {side: next_step(process) for side, process in processes.items()}
        for _ in range(REPEATS.value)
    ]
    for process in processes.values():
        process.stdin.close()
        process.wait()
    line, ours = f"{LAYERS[layer]:20} {length:6}", None
    for side in processes:
        seconds = statistics.median(step[side][0] for step in steps[1:])
        mebibytes = max(step[side][1] for step in steps[1:]) / 2**20
        ours = ours or seconds
        line += f"   {side} {1e3 * seconds:7,.0f} ms {mebibytes:6,.0f} MiB"
        line += "" if side == "bert_jax" else f"   ratio {seconds / ours:.2f}"
    print(line, flush=True)


def main(argv: list[str]) -> None:
    del argv
    lengths = list(map(int, LENGTHS.value))
    if SIDE.value:
        logging.set_verbosity(logging.WARNING)
        serve(SIDE.value, LAYER.value, lengths[0])
        return
    cores = sorted(os.sched_getaffinity(0))[: THREADS.value or None]
    os.sched_setaffinity(0, cores)  # Inherited by the processes started here.
    print(f"load average {os.getloadavg()[0]:.1f}; huge pages, {len(cores)} cores; medians")
    for layer in [LAYER.value] if LAYER.value else LAYERS:
        for length in lengths:
            compare(layer, length)


if __name__ == "__main__":
    app.run(main)
