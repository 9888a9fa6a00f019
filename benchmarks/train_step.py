"""Compares a whole training step with transformers in torch and with KerasHub on JAX.

make .venv-parity/installed .venv-keras/installed
.venv-parity/bin/python benchmarks/train_step.py

Dropout 0.1, gradients clipped, AdamW. Our step also unpacks and masks the rows; the others get
masked rows. transformers is BertForPreTraining with torch's AdamW, eager, which computes the logits
of all positions: its matrix products have 4.6 times our FLOPs for tiny, and 2.7 times for mini. The
ratio at equal FLOPs, printed beside each ratio of times, is that of the rates in FLOP/s.
KerasHub is BertMaskedLM, without next-sentence prediction, with Keras's AdamW in one jitted step
that donates its state (benchmarks/keras_side.py). Its last layer finishes all positions, ours only
those that are predicted: 1.12 times our FLOPs for mini. Each measurement runs in its own process on
the same cores, and the sides alternate. `--peers=keras_hub` compares with
KerasHub alone, and also runs in `.venv-keras`.

On a CPU: 32 rows of 128 tokens in float32. With huge pages, the aims are a ratio to transformers
of at least 7 for tiny and 8 for mini, a ratio to KerasHub of at least 1.5, and for mini at least
60 % of the rate of the step's matrix products, which are timed alone in the process of our step,
after it (benchmarks/products.py), as is one large product. docs/results.md says which aims are met,
docs/log/2026-11-cpu-step.md why the rest are not. There are two tables: all sides with glibc asking
for huge pages, and none. Our mains ask for them (bert_jax/runtime/command_line.py), scripts of the
others do not. benchmarks/step_profile.py shows where the time goes.

ModernBERT, with masks of 30 %, no dropout and no pairs, as modernbert:ROWSxTOKENS: the first four
layers of the base model (global, local, local, global) and its vocabulary of 50,368.

    .venv-parity/bin/python benchmarks/train_step.py --workloads=modernbert:2x1024

transformers is ModernBertForMaskedLM with scaled_dot_product_attention, which computes all pairs of
local layers, too; "transformers_sparse" is the same with its `sparse_prediction`, logits of the
masked positions alone. KerasHub has no ModernBERT. The aim is a ratio of at least 1.5.

On an NVIDIA GPU, with `jax[cuda12]` and a torch for CUDA in the environments:

    python benchmarks/train_step.py --device=gpu

BERT_BASE at 128 and BERT_LARGE at 512 tokens in bfloat16, torch with its fused attention, autocast
and `torch.compile`, KerasHub with `mixed_bfloat16`; the aim is a ratio of at least 1.3 to
transformers. Not run on a GPU yet.
"""

import dataclasses
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

import numpy as np
from absl import app, flags, logging
from sides import define_peers, python_of

from bert_jax.model.architecture import architecture_of
from bert_jax.model.config import BertConfig
from bert_jax.model.modernbert import ModernBertConfig
from bert_jax.objectives.masked_lm import flops_per_row
from bert_jax.runtime.command_line import TUNABLE
from bert_jax.training.metrics import PEAK_FLOPS

DEVICE = flags.DEFINE_enum("device", "cpu", ["cpu", "gpu"], "Device to measure on.")
WORKLOADS = flags.DEFINE_list(
    "workloads",
    None,
    "Published size of BERT, or modernbert; rows and tokens per row, such as tiny:32x128.",
)
REPEATS = flags.DEFINE_integer("repeats", 2, "Number of processes per side.", 1)
STEPS = flags.DEFINE_integer("steps", 10, "Number of timed steps per process, after two others.", 1)
THREADS = flags.DEFINE_integer("threads", 0, "Number of cores per process; 0: all.")
PEERS = define_peers("transformers", "transformers_sparse", "keras_hub")
SIDE = flags.DEFINE_enum(
    "side",
    None,
    ["bert_jax", "transformers", "transformers_sparse", "keras_hub"],
    "Internal: measure this side in this process.",
)
DEFAULTS = {"cpu": ["tiny:32x128", "mini:32x128"], "gpu": ["base:256x128", "large:32x512"]}
PEERS_OF_BERT = "transformers", "keras_hub"
PEERS_OF_MODERNBERT = "transformers", "transformers_sparse"
MASK_ID = 103


class Workload(NamedTuple):
    size: str
    batch: int
    length: int

    @property
    def is_modernbert(self) -> bool:
        return self.size == "modernbert"

    @property
    def masking_percent(self) -> int:
        return 30 if self.is_modernbert else 15

    @property
    def num_predictions(self) -> int:
        return -(-self.masking_percent * self.length // 100)

    @property
    def next_sentence(self) -> bool:
        return not self.is_modernbert

    @property
    def peers(self) -> list[str]:
        known = PEERS_OF_MODERNBERT if self.is_modernbert else PEERS_OF_BERT
        return [peer for peer in PEERS.value if peer in known]

    def tokens(self) -> np.ndarray:
        return np.random.default_rng(0).integers(1000, 30_000, (self.batch, self.length))

    def masked_rows(self) -> dict[str, np.ndarray]:
        """Returns what the peers read: int32 `[batch, length]` or `[batch, num_predictions]`."""
        tokens = self.tokens().astype(np.int32)
        segment_ids = (np.arange(self.length) >= self.length // 2).astype(np.int32)
        positions = np.arange(1, 1 + self.num_predictions, dtype=np.int32)
        targets = tokens[:, positions]
        tokens[:, positions] = MASK_ID
        return {
            "tokens": tokens,
            "segment_ids": np.tile(segment_ids, (self.batch, 1)),
            "mlm_positions": np.tile(positions, (self.batch, 1)),
            "mlm_targets": targets,
        }

    def config(self) -> BertConfig | ModernBertConfig:
        if self.is_modernbert:
            return ModernBertConfig(num_layers=4)
        return BertConfig.named(self.size)

    def flops(self, side: str = "bert_jax") -> float:
        """Returns the FLOPs of the matrix products of a side's step."""
        config, length, targets = self.config(), self.length, self.num_predictions
        pairs = int(self.next_sentence)
        if side == "bert_jax":
            return self.batch * flops_per_row(config, length, targets, pairs, self.next_sentence)
        if self.is_modernbert:  # All pairs of positions in all layers.
            config = dataclasses.replace(config, attention_pattern="g")
        # The peers finish the last layer at all positions, where transformers also predicts.
        forward = architecture_of(config).flops_per_row(
            config,
            length,
            num_outputs=length,
            num_targets=length if side == "transformers" else targets,
            num_pairs=pairs * (side == "transformers"),
        )
        return 3 * self.batch * forward


class Measurement(NamedTuple):
    seconds: list[float]  # Of each timed step.
    products_rate: float | None  # FLOP/s of the products of our step of BERT; None for the others.
    large_rate: float | None = None  # FLOP/s of one product of 4096 x 1024 x 1024.


def dtype() -> str:
    """Returns the dtype of the computation of all sides."""
    return "bfloat16" if DEVICE.value == "gpu" else "float32"


def parse_workload(text: str) -> Workload:
    """Reads SIZE:ROWSxTOKENS. Raises ValueError."""
    match = re.fullmatch(r"(\w+):(\d+)x(\d+)", text)
    if not match:
        raise ValueError(f"--workloads={text}: expected SIZE:ROWSxTOKENS, such as tiny:32x128")
    workload = Workload(match[1], int(match[2]), int(match[3]))
    workload.config()  # Raises an error for an unknown size.
    return workload


def bert_jax_update(config, workload: Workload, scan_layers: bool = False):
    """Returns the jitted update step, which donates its state, an initial state and rows."""
    import jax

    from bert_jax.data.masking import Masking
    from bert_jax.model.execution import Execution, plan_execution
    from bert_jax.objectives.masked_lm import MaskedLm
    from bert_jax.sharding.mesh import make_mesh
    from bert_jax.sharding.rules import infer_shardings
    from bert_jax.training.optimizer import make_optimizer, make_schedule
    from bert_jax.training.pretrain_step import make_pretrain_step
    from bert_jax.training.state import init_state

    masking = Masking(
        special_ids=(0, 100, 101, 102, MASK_ID),
        mask_id=MASK_ID,
        vocab_size=config.vocab_size,
        word_start=np.ones(config.vocab_size, bool),
        max_predictions=workload.num_predictions,
        rate=workload.masking_percent / 100,
    )
    objective = MaskedLm(masking, workload.next_sentence)
    # Unrolled, as a run on one device should be (configs/pretrain/demo.py).
    execution = Execution(scan_layers=scan_layers, dtype=dtype())
    model = objective.make_model(config, plan_execution(execution, jax.devices()[0]))
    optimizer = make_optimizer("adamw", make_schedule(1e-4, 1000, 10))
    num_rows, length = workload.batch, workload.length
    pairs = np.zeros((num_rows, 8, 3), np.uint16)
    pairs[:, 0] = (0, length // 2, length)
    rows = jax.device_put(
        {
            "tokens": workload.tokens().astype(np.uint16),
            "sequence_bounds": pairs,
            "nsp_labels": np.zeros((num_rows, 8), np.uint8),
            "row_ids": np.arange(num_rows, dtype=np.uint32),
            "epochs": np.zeros(num_rows, np.uint32),
        }
    )
    batch = jax.eval_shape(objective.prepare, rows, jax.random.key(0))
    init = functools.partial(init_state, model=model, optimizer=optimizer, batch=batch)
    abstract = jax.eval_shape(init, jax.random.key(0))
    shardings = infer_shardings(abstract, make_mesh(), architecture_of(config).RULES)
    state = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
    update = make_pretrain_step(model, optimizer, shardings, objective, seed=0)
    return update, state, rows


def bert_jax_step(config, workload: Workload, scan_layers: bool = False):
    """Returns a function that runs one step and waits for it."""
    import jax

    update, state, rows = bert_jax_update(config, workload, scan_layers)

    def step():
        nonlocal state
        state, metrics = update(state, rows)
        jax.block_until_ready((state, metrics))

    return step


def make_step(side: str, workload: Workload):
    """Returns a function that runs one step of a side and waits for it."""
    config = workload.config()
    if side in ("transformers", "transformers_sparse"):
        import transformers_side

        device = "cuda" if DEVICE.value == "gpu" else "cpu"
        if workload.is_modernbert:
            model = transformers_side.modernbert(config, sparse=side == "transformers_sparse")
        else:
            model = transformers_side.bert(config)
        return transformers_side.pretrain_step(model, workload.masked_rows(), device)
    if side == "keras_hub":
        import keras_side

        return keras_side.pretrain_step(config, workload.masked_rows(), dtype())
    return bert_jax_step(config, workload)


def check_device(side: str) -> None:
    """Raises ValueError if a side would not run on the GPU that `--device` asks for."""
    if DEVICE.value == "cpu":
        return
    if side in ("transformers", "transformers_sparse"):
        import torch

        found, fix = torch.cuda.is_available(), "install a torch for CUDA"
    else:
        import jax

        found, fix = jax.default_backend() == "gpu", "pip install 'jax[cuda12]'"
    if not found:
        raise ValueError(f"--device=gpu: {side} finds no GPU with {sys.executable}; {fix}")


def measure(side: str, workload: Workload) -> Measurement:
    """Measures in this process."""
    check_device(side)
    step = make_step(side, workload)
    seconds = []
    for _ in range(2 + STEPS.value):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    if side != "bert_jax" or workload.is_modernbert:
        return Measurement(seconds[2:], None)
    from products import Product, flops_per_second, step_products

    _, batch, length = workload
    products = step_products(workload.config(), batch, length, workload.num_predictions)
    large = [Product(count=10, stack=1, rows=4096, inner=1024, columns=1024)]
    rates = [flops_per_second(each, dtype(), STEPS.value) for each in (products, large)]
    return Measurement(seconds[2:], products_rate=rates[0], large_rate=rates[1])


def measure_in_process(side: str, workload: str, huge_pages: bool) -> Measurement:
    """Measures in a separate process."""
    environment = os.environ | {"GLIBC_TUNABLES": TUNABLE if huge_pages else ""}
    environment |= {"PYTHONWARNINGS": "ignore"}
    if DEVICE.value == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
    command = [python_of(side), __file__, f"--side={side}", f"--workloads={workload}"]
    command += [f"--steps={STEPS.value}", f"--device={DEVICE.value}"]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    return Measurement(**json.loads(output.splitlines()[-1]))


def device_kind() -> str:
    """Returns the name of the GPU, as in JAX and the driver. Raises ValueError without one."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.check_output(query, encoding="utf-8", errors="replace").splitlines()[0]
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"--device=gpu: nvidia-smi lists no NVIDIA GPU ({error})") from None


def compare(workload: str, huge_pages: bool) -> None:
    """Prints the medians of all sides for a workload, their ratios to ours, and our share."""
    parsed = parse_workload(workload)
    measurements = {side: [] for side in ("bert_jax", *parsed.peers)}
    for _ in range(REPEATS.value):
        for side, of_side in measurements.items():
            of_side.append(measure_in_process(side, workload, huge_pages))
    medians = {
        side: statistics.median(step for each in of_side for step in each.seconds)
        for side, of_side in measurements.items()
    }
    for side, step in medians.items():
        line = f"{workload:16} {side:19} {1e3 * step:6.0f} ms"
        line += f" {parsed.batch * parsed.length / step:11,.0f} tokens/s"
        ratio, flops = step / medians["bert_jax"], parsed.flops(side) / parsed.flops()
        line += f"   ratio {ratio:.2f}"
        if side != "bert_jax":
            line += f", at equal FLOPs {ratio / flops:.2f} (it computes {flops:.2f} times ours)"
        if DEVICE.value == "gpu":
            peak = PEAK_FLOPS.get(device_kind())
            line += f"   MFU {parsed.flops() / step / peak:.0%}" if peak else "   MFU unknown"
        print(line, flush=True)
    if parsed.is_modernbert:
        return
    step_rate = parsed.flops() / medians["bert_jax"]
    products_rate, large_rate = (
        statistics.median(getattr(each, name) for each in measurements["bert_jax"])
        for name in ("products_rate", "large_rate")
    )
    print(
        f"{workload:16} our step: {step_rate / 1e9:,.0f} GFLOP/s, {step_rate / products_rate:.0%} "
        f"of the {products_rate / 1e9:,.0f} GFLOP/s of its matrix products alone, "
        f"{step_rate / large_rate:.0%} of the {large_rate / 1e9:,.0f} of one large product",
        flush=True,
    )


def main(argv: list[str]) -> None:
    del argv
    workloads = WORKLOADS.value or DEFAULTS[DEVICE.value]
    if SIDE.value:
        logging.set_verbosity(logging.WARNING)
        print(json.dumps(measure(SIDE.value, parse_workload(workloads[0]))._asdict()))
        return
    for workload in workloads if flags.FLAGS["peers"].present else ():
        for peer in sorted({*PEERS.value} - {*parse_workload(workload).peers}):
            print(f"{workload}: there is no comparison with {peer}")
    # These raise errors before the first measurement.
    for side in {peer for workload in workloads for peer in parse_workload(workload).peers}:
        python_of(side)
    device = device_kind() if DEVICE.value == "gpu" else "cpu"
    load = os.getloadavg()[0]
    if load > 0.5:  # torch's threads wait for each other, so it slows down more than the others.
        print(f"Other programs are running: load average {load:.1f}.")
    cores = sorted(os.sched_getaffinity(0))[: THREADS.value or None]
    os.sched_setaffinity(0, cores)  # Inherited by the processes started here.
    for huge_pages in (True, False) if DEVICE.value == "cpu" else (False,):
        on = "on" if huge_pages else "off"
        print(f"\n{device}, huge pages {on} for all sides, {len(cores)} cores; medians")
        for workload in workloads:
            compare(workload, huge_pages)


if __name__ == "__main__":
    app.run(main)
