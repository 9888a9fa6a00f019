r"""Estimates levanter's training step of ModernBERT-base on TPUs, without a TPU.

python3.13 -m venv .venv-levanter
.venv-levanter/bin/pip install -e . 'jax[tpu]==0.10.2' \
    marin-levanter==0.2.227.dev40316220070 'marin-finelog>=0.2.10.dev0'
.venv-levanter/bin/python benchmarks/levanter_step.py
.venv-levanter/bin/python benchmarks/levanter_step.py --attention=splash --logits=predictions

The step is compiled by the TPU compiler for one device of each chip, as tools/tpu_report.py
compiles ours: 16 rows of 1,024 tokens, vocabulary of 50,368, float32 parameters that are cast to
bfloat16, no dropout, the gradient clipped by its norm, AdamW. docs/log/2026-11-modernbert.md has
the figures of both.

levanter has the model, `levanter.models.modernbert`, but no masked-LM training: the loss and the
update are written here, with its parts. Its model computes the logits of all positions;
`--logits=predictions` calls its head and decoder for 30 % of a row, as our step does. Its layers
are a Python list, without gradient checkpointing; `--checkpoint=layers` computes each layer again
in the backward pass, as levanter's other models do by default.

What favors levanter: a row is one sequence, without any mask of sequences, and is masked before
the step. What does not: its decoder has a matrix of its own in training, 39 million parameters
more, and the step has the compiler's default options, not those of
bert_jax/sharding/compiler_options.py.

The compiler has no estimate for kernels. Those of splash attention, in levanter's blocks of 512,
are compiled in one layer's attention and counted in their schedules (one bundle per cycle, no
memory stalls), as our kernels are: docs/tpu.md. A program of a kernel computes a block of queries
and one of keys; half of the programs are the last of a sum and write it.
"""

import functools
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import optax
from absl import app, flags, logging
from haliax import Axis, NamedArray
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from levanter.layers.attention import AttentionBackend
from levanter.models.modernbert import (
    ModernBertAttention,
    ModernBertConfig,
    ModernBertEncoderLayer,
    ModernBertForMaskedLM,
)

from bert_jax.pods.chips import CHIPS, GIB
from bert_jax.pods.estimate import compilation, hlo_cost
from bert_jax.pods.estimate.kernel_cycles import count_cycles
from bert_jax.sharding.mesh import make_mesh
from bert_jax.training.metrics import PEAK_FLOPS

CHIP_NAMES = flags.DEFINE_list("chips", ["v4", "v5e", "v6e"], "Chips to compile for.")
flags.register_validator(
    "chips", lambda names: set(names) <= set(CHIPS), f"expected some of {', '.join(CHIPS)}"
)
ATTENTION = flags.DEFINE_multi_enum(
    "attention", ["splash", "vanilla"], ["splash", "vanilla"], "levanter's backends to compile."
)
CHECKPOINT = flags.DEFINE_multi_enum(
    "checkpoint", ["none", "layers"], ["none", "layers"], "What the backward pass computes again."
)
LOGITS = flags.DEFINE_multi_enum(
    "logits", ["predictions", "all"], ["predictions", "all"], "Positions with logits."
)
COMPILE_LAYER = flags.DEFINE_integer(
    "compile_layer", None, "Only compile the attention of this layer, for the chip of --chips.", 0
)

ROWS, LENGTH, VOCAB_SIZE = 16, 1024, 50368
PREDICTIONS = 308  # Per row, 30 %.
BLOCK = 512  # Of queries and of keys, levanter's default. A window of 64 needs all four of a row.
KERNELS = ("fwd", "dq", "dkv")
FLOPS_PER_TOKEN = 811e6  # That windows need, as tools/tpu_report.py counts them for our step.
Batch, Position = Axis("batch", ROWS), Axis("position", LENGTH)


class CheckpointedLayer(eqx.Module):
    """A layer of which the backward pass has the input alone."""

    layer: ModernBertEncoderLayer

    def __call__(self, x: NamedArray, mask, *, pos_ids=None) -> NamedArray:
        return eqx.filter_checkpoint(self.layer)(x, mask, pos_ids=pos_ids)


class Variant(NamedTuple):
    """What differs between the steps."""

    attention: str
    checkpoint: str
    logits: str


class State(NamedTuple):
    """What an update changes."""

    params: ModernBertForMaskedLM
    opt_state: Any
    step: jax.Array


def make_model(variant: Variant) -> ModernBertForMaskedLM:
    config = ModernBertConfig(attn_backend=AttentionBackend(variant.attention))
    model = ModernBertForMaskedLM.init(Axis("vocab", VOCAB_SIZE), config, key=jax.random.key(0))
    if variant.checkpoint == "layers":
        layers = [CheckpointedLayer(layer) for layer in model.model.layers]
        model = eqx.tree_at(lambda tree: tree.model.layers, model, layers)
    return model


def loss_fn(model: ModernBertForMaskedLM, batch: dict[str, NamedArray]) -> jax.Array:
    """Returns the mean loss of the positions with a weight, from logits in float32."""
    model = jmp.get_policy("params=float32,compute=bfloat16").cast_to_compute(model)
    hidden = model.activations(batch["tokens"])
    if "positions" in batch:
        hidden = hidden.flatten_axes((Batch, Position), "token").take("token", batch["positions"])
    logits = model.decoder(model.head(hidden)).astype(jnp.float32)
    targets = hax.nn.one_hot(batch["targets"], model.Vocab, dtype=logits.dtype)
    loss = hax.nn.cross_entropy_loss(logits, model.Vocab, targets, weight=batch["weights"])
    return loss.scalar()


def make_batch(variant: Variant) -> dict[str, NamedArray]:
    predicted = (Batch, Position)
    batch = {"tokens": hax.zeros(predicted, dtype=jnp.int32)}
    if variant.logits == "predictions":
        predicted = (Axis("prediction", ROWS * PREDICTIONS),)
        batch["positions"] = hax.zeros(predicted, dtype=jnp.int32)
    batch["targets"] = hax.zeros(predicted, dtype=jnp.int32)
    return batch | {"weights": hax.zeros(predicted, dtype=jnp.float32)}


def compile_step(variant: Variant, mesh: jax.sharding.Mesh) -> tuple[dict[str, int], str]:
    """Compiles the update; returns its memory and scheduled HLO. Raises DoesNotFit."""
    clipped = optax.clip_by_global_norm(1.0)
    optimizer = optax.chain(clipped, optax.adamw(8e-4, b2=0.98, eps=1e-6, weight_decay=0.0125))

    def init():
        params = make_model(variant)
        state = State(params, optimizer.init(params), jnp.zeros((), jnp.int32))
        return state, make_batch(variant)

    def update(state, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(state.params, batch)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state, state.step + 1), loss

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # For splash attention.
        state, batch = abstract(jax.eval_shape(init), mesh)
        return compilation.compile_program(jax.jit(update, donate_argnums=0), state, batch)


def compile_layer(mesh: jax.sharding.Mesh, index: int) -> None:
    """Compiles the gradient of one layer's attention, with the compiler's dump switched on."""
    config = ModernBertConfig(attn_backend=AttentionBackend.SPLASH)

    def init():
        layer = ModernBertAttention.init(config, index, key=jax.random.key(0))
        arguments = layer, hax.zeros((Batch, Position, config.Embed))
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), arguments)

    def loss(layer, x):
        return hax.sum(layer(x, None).astype(jnp.float32)).scalar()

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.jit(jax.grad(loss, (0, 1))).lower(*abstract(jax.eval_shape(init), mesh)).compile()


def abstract(tree, mesh: jax.sharding.Mesh):
    sharding = NamedSharding(mesh, P())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


@functools.cache
def kernel_cycles(chip: str, index: int) -> dict[str, float]:
    """Returns the cycles per token of each splash kernel of a layer."""
    with tempfile.TemporaryDirectory() as directory:
        dump = f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true"
        dump += " --xla_jf_dump_llo_pass_label_regex=final_bundles"
        subprocess.run(
            [sys.executable, __file__, f"--chips={chip}", f"--compile_layer={index}"],
            env=os.environ | {"LIBTPU_INIT_ARGS": dump},
            check=True,
        )
        schedules = {
            kernel: next(
                pathlib.Path(directory).glob(f"*splash_mha_{kernel}_*[0-9]-final_bundles.txt")
            ).read_text(encoding="utf-8")
            for kernel in KERNELS
        }
    programs = ModernBertConfig().num_heads * (LENGTH // BLOCK) ** 2 / LENGTH  # Per token.
    cores = 2 if CHIPS[chip].megacore else 1
    return {name: programs * mean_cycles(text) / cores for name, text in schedules.items()}


def mean_cycles(schedule: str) -> float:
    """Returns the mean cycles of a program, half of which write a sum."""
    whole = count_cycles(schedule)
    try:  # The two longest branches: the block itself, and what writes the sum.
        without_writing = max(count_cycles(schedule, runs) for runs in ((1, 0), (0, 1)))
    except ValueError:  # What writes is too short to be told apart.
        return whole
    return (without_writing + whole) / 2


def splash_cycles(chip: str, variant: Variant) -> float:
    """Returns the cycles per token of all splash kernels of a step."""
    if variant.attention != "splash":
        return 0.0
    config = ModernBertConfig()
    runs = {"fwd": 2 if variant.checkpoint == "layers" else 1, "dq": 1, "dkv": 1}
    total = 0.0
    for index in range(config.num_layers):
        kernels = kernel_cycles(chip, 0 if config.is_global_layer(index) else 1)
        total += sum(runs[name] * kernels[name] for name in KERNELS)
    return total


def cells(chip: str, variant: Variant) -> list[str]:
    """Returns the figures of a step: HBM, cycles outside and inside of kernels, their sum, MFU."""
    device = compilation.describe_device(chip)
    try:
        hbm, hlo = compile_step(variant, make_mesh(devices=[device]))
    except compilation.DoesNotFit as error:
        needed = f" {error.num_bytes / GIB:.1f}" if error.num_bytes else ""
        return [f"does not fit{needed}", "", "", "", ""]
    cost = hlo_cost.step_cost(hlo, chip)
    outside = cost.cycles.total() / (ROWS * LENGTH)
    without_estimate = dict(cost.without_estimate)
    logging.info("%.0f cycles per token, without those of %s", outside, without_estimate)
    kernels = splash_cycles(chip, variant)
    total = outside + kernels
    mfu = FLOPS_PER_TOKEN * CHIPS[chip].clock_hz / (PEAK_FLOPS[device.device_kind] * total)
    figures = [f"{outside:,.0f}", f"{kernels:,.0f}", f"{total:,.0f}", f"{mfu:.1%}"]
    return [f"{sum(hbm.values()) / GIB:.1f}", *figures]


def main(_) -> None:
    if COMPILE_LAYER.value is not None:  # In a process of its own.
        mesh = make_mesh(devices=[compilation.describe_device(CHIP_NAMES.value[0])])
        compile_layer(mesh, COMPILE_LAYER.value)
        return
    columns = ["chip", *Variant._fields, "HBM, GiB", "outside of kernels", "kernels", "sum", "MFU"]
    print("Cycles per token, and MFU by the FLOPs that windows need.\n")
    print(f"| {' | '.join(columns)} |\n{'| --- ' * len(columns)}|", flush=True)
    variants = itertools.product(ATTENTION.value, CHECKPOINT.value, LOGITS.value)
    for chip, variant in itertools.product(CHIP_NAMES.value, map(Variant._make, variants)):
        print(f"| {' | '.join([chip, *variant, *cells(chip, variant)])} |", flush=True)


if __name__ == "__main__":
    app.run(main)
