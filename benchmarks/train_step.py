"""A whole training step on the CPU against transformers' BertForPreTraining with torch's AdamW.

make .venv-parity/installed && .venv-parity/bin/python benchmarks/train_step.py

Batch 32 x 128 with 20 predictions per row, float32, dropout 0.1, gradients clipped, AdamW. Our step
also unpacks and masks the rows; transformers gets masked ones. Each measurement is a process of its
own on the same cores, and the sides alternate. The aim is a ratio of at least 2.5.

There are two tables: both sides with glibc asking for huge pages, and both without. Our mains ask
for them (bert_jax/runtime/command_line.py), a torch script does not.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np
from absl import app, flags, logging

from bert_jax.model.config import BertConfig
from bert_jax.runtime.command_line import TUNABLE

SIZES = flags.DEFINE_list("sizes", ["tiny", "mini"], "Published sizes: 2/128 and 4/256.")
REPEATS = flags.DEFINE_integer("repeats", 2, "Number of processes per side.")
STEPS = flags.DEFINE_integer("steps", 10, "Number of timed steps per process, after two others.")
THREADS = flags.DEFINE_integer("threads", 0, "Number of cores per process; 0: all.")
SIDE = flags.DEFINE_enum(
    "side", None, ["bert_jax", "transformers"], "Only measures this side, here."
)
BATCH, LENGTH, PREDICTIONS, MASK_ID = 32, 128, 20, 103


def random_tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(1000, 30_000, (BATCH, LENGTH))


def bert_jax_step(config: BertConfig):
    """Returns a function that runs one step and waits for it."""
    import jax

    from bert_jax import partitioning
    from bert_jax.data.masking import Masking
    from bert_jax.model.bert import BertForPreTraining
    from bert_jax.training.optimizer import make_optimizer, make_schedule
    from bert_jax.training.pretrain_step import init_state, make_pretrain_step

    model = BertForPreTraining(config)
    optimizer = make_optimizer("adamw", make_schedule(1e-4, 1000, 10))
    init = functools.partial(init_state, model=model, optimizer=optimizer)
    abstract = jax.eval_shape(init, jax.random.key(0))
    shardings = partitioning.infer_shardings(abstract, partitioning.make_mesh())
    state = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
    masking = Masking(
        special_ids=(0, 100, 101, 102, MASK_ID),
        mask_id=MASK_ID,
        vocab_size=config.vocab_size,
        word_start=np.ones(config.vocab_size, bool),
        max_predictions=PREDICTIONS,
    )
    update = make_pretrain_step(model, optimizer, shardings, masking, seed=0)
    pairs = np.zeros((BATCH, 8, 3), np.uint16)
    pairs[:, 0] = (0, LENGTH // 2, LENGTH)
    rows = jax.device_put(
        {
            "tokens": random_tokens().astype(np.uint16),
            "sequence_bounds": pairs,
            "nsp_labels": np.zeros((BATCH, 8), np.uint8),
            "row_ids": np.arange(BATCH, dtype=np.uint32),
            "epochs": np.zeros(BATCH, np.uint32),
        }
    )

    def step():
        nonlocal state
        state, metrics = update(state, rows)
        jax.block_until_ready((state, metrics))

    return step


def transformers_step(config: BertConfig):
    """Returns the same with transformers and torch, eager, with its default attention."""
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = transformers.BertForPreTraining(
        transformers.BertConfig(
            num_hidden_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            intermediate_size=config.intermediate_size,
        )
    ).train()
    plain = [p for name, p in model.named_parameters() if "bias" in name or "LayerNorm" in name]
    decayed = [p for p in model.parameters() if all(p is not q for q in plain)]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, eps=1e-6)
    tokens = torch.tensor(random_tokens())
    segments = (torch.arange(LENGTH) >= LENGTH // 2).long().expand(BATCH, LENGTH)
    labels = torch.full_like(tokens, -100)
    labels[:, 1 : 1 + PREDICTIONS] = tokens[:, 1 : 1 + PREDICTIONS]
    inputs = {
        "input_ids": tokens.masked_fill(labels != -100, MASK_ID),
        "token_type_ids": segments,
        "attention_mask": torch.ones_like(tokens),
        "labels": labels,
        "next_sentence_label": torch.zeros(BATCH, dtype=torch.long),
    }

    def step():
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def measure(side: str, size: str) -> list[float]:
    """Returns the seconds of each timed step, in this process."""
    # Unrolled, as a CPU run should be (configs/pretrain/demo.py).
    config = BertConfig.named(size, scan_layers=False)
    step = {"bert_jax": bert_jax_step, "transformers": transformers_step}[side](config)
    seconds = []
    for _ in range(2 + STEPS.value):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return seconds[2:]


def measure_in_process(side: str, size: str, huge_pages: bool) -> list[float]:
    """Measures in a process of its own."""
    environment = os.environ | {"GLIBC_TUNABLES": TUNABLE if huge_pages else ""}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, f"--side={side}", f"--sizes={size}"]
    command.append(f"--steps={STEPS.value}")
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    return json.loads(output.splitlines()[-1])


def main(argv: list[str]) -> None:
    del argv
    if SIDE.value:
        logging.set_verbosity(logging.WARNING)
        print(json.dumps(measure(SIDE.value, SIZES.value[0])))
        return
    load = os.getloadavg()[0]
    if load > 0.5:  # torch's threads wait for each other, so that it loses more than its share.
        print(f"Other programs are running (load average {load:.1f}): the ratios favor bert_jax.")
    cores = sorted(os.sched_getaffinity(0))[: THREADS.value or None]
    os.sched_setaffinity(0, cores)  # Inherited by the processes started here.
    for huge_pages in (True, False):
        print(f"\nHuge pages {'on' if huge_pages else 'off'} for both, {len(cores)} cores; medians")
        print(f"{'':8} {'bert_jax':>20} {'transformers':>20}   ratio of sequences/s")
        for size in SIZES.value:
            seconds = {"bert_jax": [], "transformers": []}
            for _ in range(REPEATS.value):
                for side, steps in seconds.items():
                    steps += measure_in_process(side, size, huge_pages)
            ours, theirs = (statistics.median(steps) for steps in seconds.values())
            cells = [f"{1e3 * s:.0f} ms, {BATCH / s:.0f} seq/s" for s in (ours, theirs)]
            print(f"{size:8} {cells[0]:>20} {cells[1]:>20}   {theirs / ours:.2f}", flush=True)


if __name__ == "__main__":
    app.run(main)
