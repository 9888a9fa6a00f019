"""Compares a whole training step with transformers' BertForPreTraining and torch's AdamW.

make .venv-parity/installed && .venv-parity/bin/python benchmarks/train_step.py

Dropout 0.1, gradients clipped, AdamW. Our step also unpacks and masks the rows; transformers gets
masked rows. Each measurement runs in its own process on the same cores, and the sides alternate.

On a CPU: 32 rows of 128 tokens in float32; the aim is a ratio of at least 2.5. There are two
tables: both sides with glibc asking for huge pages, and both without. Our mains ask for them
(bert_jax/runtime/command_line.py), a torch script does not.

On an NVIDIA GPU, with `jax[cuda12]` and a torch for CUDA in the environment:

    python benchmarks/train_step.py --device=gpu

BERT_BASE at 128 and BERT_LARGE at 512 tokens in bfloat16, torch with its fused attention, autocast
and `torch.compile`; the aim is a ratio of at least 1.3. Not run on a GPU yet.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

import numpy as np
from absl import app, flags, logging

from bert_jax.model.config import BertConfig
from bert_jax.model.pretraining import flops_per_row
from bert_jax.runtime.command_line import TUNABLE
from bert_jax.training.metrics import PEAK_FLOPS

DEVICE = flags.DEFINE_enum("device", "cpu", ["cpu", "gpu"], "Device to measure on.")
WORKLOADS = flags.DEFINE_list(
    "workloads", None, "Published size, rows and tokens per row, such as tiny:32x128."
)
REPEATS = flags.DEFINE_integer("repeats", 2, "Number of processes per side.")
STEPS = flags.DEFINE_integer("steps", 10, "Number of timed steps per process, after two others.")
THREADS = flags.DEFINE_integer("threads", 0, "Number of cores per process; 0: all.")
SIDE = flags.DEFINE_enum(
    "side", None, ["bert_jax", "transformers"], "Internal: measure this side in this process."
)
DEFAULTS = {"cpu": ["tiny:32x128", "mini:32x128"], "gpu": ["base:256x128", "large:32x512"]}
MASK_ID = 103


class Workload(NamedTuple):
    size: str
    batch: int
    length: int

    @property
    def num_predictions(self) -> int:
        return -(-15 * self.length // 100)

    def tokens(self) -> np.ndarray:
        return np.random.default_rng(0).integers(1000, 30_000, (self.batch, self.length))

    def config(self) -> BertConfig:
        return BertConfig.named(self.size)


def parse_workload(text: str) -> Workload:
    size, _, shape = text.partition(":")
    return Workload(size, *map(int, shape.split("x")))


def bert_jax_step(config: BertConfig, workload: Workload, scan_layers: bool = False):
    """Returns a function that runs one step and waits for it."""
    import jax

    from bert_jax.data.masking import Masking
    from bert_jax.model.bert import RULES
    from bert_jax.model.execution import Execution
    from bert_jax.objectives.masked_lm import MaskedLm
    from bert_jax.sharding.mesh import make_mesh
    from bert_jax.sharding.rules import infer_shardings
    from bert_jax.training.optimizer import make_optimizer, make_schedule
    from bert_jax.training.pretrain_step import init_state, make_pretrain_step

    masking = Masking(
        special_ids=(0, 100, 101, 102, MASK_ID),
        mask_id=MASK_ID,
        vocab_size=config.vocab_size,
        word_start=np.ones(config.vocab_size, bool),
        max_predictions=workload.num_predictions,
    )
    objective = MaskedLm(masking)
    # Unrolled, as a run on one device should be (configs/pretrain/demo.py).
    dtype = "bfloat16" if DEVICE.value == "gpu" else "float32"
    model = objective.make_model(config, Execution(scan_layers=scan_layers, dtype=dtype))
    optimizer = make_optimizer("adamw", make_schedule(1e-4, 1000, 10))
    init = functools.partial(
        init_state, model=model, optimizer=optimizer, example_batch=objective.example_batch()
    )
    abstract = jax.eval_shape(init, jax.random.key(0))
    shardings = infer_shardings(abstract, make_mesh(), RULES)
    state = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
    update = make_pretrain_step(model, optimizer, shardings, objective, seed=0)
    batch, length = workload.batch, workload.length
    pairs = np.zeros((batch, 8, 3), np.uint16)
    pairs[:, 0] = (0, length // 2, length)
    rows = jax.device_put(
        {
            "tokens": workload.tokens().astype(np.uint16),
            "sequence_bounds": pairs,
            "nsp_labels": np.zeros((batch, 8), np.uint8),
            "row_ids": np.arange(batch, dtype=np.uint32),
            "epochs": np.zeros(batch, np.uint32),
        }
    )

    def step():
        nonlocal state
        state, metrics = update(state, rows)
        jax.block_until_ready((state, metrics))

    return step


def transformers_step(config: BertConfig, workload: Workload):
    """Returns the step of transformers and torch: eager on a CPU, compiled on a GPU."""
    import torch
    import transformers

    device = "cuda" if DEVICE.value == "gpu" else "cpu"
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = transformers.BertForPreTraining(
        transformers.BertConfig(
            num_hidden_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            intermediate_size=config.intermediate_size,
        )
    )
    model = model.train().to(device)
    plain = [p for name, p in model.named_parameters() if "bias" in name or "LayerNorm" in name]
    decayed = [p for p in model.parameters() if all(p is not q for q in plain)]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, eps=1e-6)
    batch, length = workload.batch, workload.length
    tokens = torch.tensor(workload.tokens())
    segments = (torch.arange(length) >= length // 2).long().expand(batch, length)
    labels = torch.full_like(tokens, -100)
    masked = slice(1, 1 + workload.num_predictions)
    labels[:, masked] = tokens[:, masked]
    inputs = {
        "input_ids": tokens.masked_fill(labels != -100, MASK_ID),
        "token_type_ids": segments,
        "attention_mask": torch.ones_like(tokens),
        "labels": labels,
        "next_sentence_label": torch.zeros(batch, dtype=torch.long),
    }
    inputs = {name: x.to(device) for name, x in inputs.items()}
    run = torch.compile(model) if device == "cuda" else model

    def step():
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = run(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def measure(side: str, workload: Workload) -> list[float]:
    """Returns the seconds of each timed step, in this process."""
    make_step = {"bert_jax": bert_jax_step, "transformers": transformers_step}[side]
    step = make_step(workload.config(), workload)
    seconds = []
    for _ in range(2 + STEPS.value):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return seconds[2:]


def measure_in_process(side: str, workload: str, huge_pages: bool) -> list[float]:
    """Measures in a separate process."""
    environment = os.environ | {"GLIBC_TUNABLES": TUNABLE if huge_pages else ""}
    environment |= {"PYTHONWARNINGS": "ignore"}
    if DEVICE.value == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, __file__, f"--side={side}", f"--workloads={workload}"]
    command += [f"--steps={STEPS.value}", f"--device={DEVICE.value}"]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    return json.loads(output.splitlines()[-1])


def device_kind() -> str:
    """Returns the name of the GPU, as in JAX and the driver."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.check_output(query, text=True).splitlines()[0]


def compare(workload: str, huge_pages: bool) -> None:
    """Prints the row of a workload: the medians of both sides, and their ratio."""
    seconds = {"bert_jax": [], "transformers": []}
    for _ in range(REPEATS.value):
        for side, steps in seconds.items():
            steps += measure_in_process(side, workload, huge_pages)
    ours, reference = (statistics.median(steps) for steps in seconds.values())
    _, batch, length = parsed = parse_workload(workload)
    row_flops = flops_per_row(
        parsed.config(), length, parsed.num_predictions, 1, next_sentence=True
    )
    cells = []
    for step in (ours, reference):
        cell = f"{1e3 * step:.0f} ms, {batch * length / step:,.0f} tokens/s"
        if DEVICE.value == "gpu":
            cell += f", MFU {batch * row_flops / step / PEAK_FLOPS[device_kind()]:.0%}"
        cells.append(cell)
    print(f"{workload:14} {cells[0]:>38} {cells[1]:>38}   {reference / ours:.2f}", flush=True)


def main(argv: list[str]) -> None:
    del argv
    workloads = WORKLOADS.value or DEFAULTS[DEVICE.value]
    if SIDE.value:
        logging.set_verbosity(logging.WARNING)
        print(json.dumps(measure(SIDE.value, parse_workload(workloads[0]))))
        return
    load = os.getloadavg()[0]
    if load > 0.5:  # torch's threads wait for each other, so torch slows down more.
        print(f"Other programs are running (load average {load:.1f}): the ratios favor bert_jax.")
    cores = sorted(os.sched_getaffinity(0))[: THREADS.value or None]
    os.sched_setaffinity(0, cores)  # Inherited by the processes started here.
    for huge_pages in (True, False) if DEVICE.value == "cpu" else (False,):
        print(f"\nHuge pages {'on' if huge_pages else 'off'} for both, {len(cores)} cores; medians")
        print(f"{'':14} {'bert_jax':>38} {'transformers':>38}   ratio")
        for workload in workloads:
            compare(workload, huge_pages)


if __name__ == "__main__":
    app.run(main)
