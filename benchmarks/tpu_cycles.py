"""Compares the estimated cycles of our update step on TPU with transformers' Flax and KerasHub.

make .venv-keras/installed
.venv-keras/bin/pip install 'jax[tpu]'
.venv-keras/bin/pip install --target=runs/transformers-flax transformers==4.57.1  # Last with Flax.
.venv-keras/bin/python benchmarks/tpu_cycles.py --transformers=runs/transformers-flax

All steps are compiled for one device of each chip by the TPU compiler, without a TPU: BERT_LARGE,
rows of 512 tokens, bfloat16, dropout 0.1 everywhere, masked LM and next sentence, Adam. Our
step uses configs/pretrain/pod_large.py, with masking on the device; the step of transformers uses
FlaxBertForPreTraining with `optax.adamw` and its loss over the logits of all positions. The step of
KerasHub is that of benchmarks/train_step.py, in `mixed_bfloat16`: BertMaskedLM, without next
sentence, with its loss at the masked positions and Keras's AdamW. Cycles are the compiler's
estimates, for our kernels counted in schedules: see docs/tpu.md. The unrolled layers of the peers
take the compiler many minutes per chip. `--peers=keras_hub` needs no transformers. To try it:

    .venv-keras/bin/python benchmarks/tpu_cycles.py --peers=keras_hub --chips=v4 --size=tiny \
        --rows=4 --length=128

docs/log/2026-11-tpu-peers.md has the figures.

On one device a step also updates all parameters, 0.5 million cycles per row on v4. The peers are
compiled as their users compile them, with the compiler's defaults; our step has the options of
bert_jax/sharding/compiler_options.py, with which `--tuned` compiles the peers, too. For v6e, the
peers are extrapolated from 2 and 4 layers, and too low: dropout uses the non-partitionable threefry
of JAX before 0.5, because with today's the step does not compile in an hour (one layer of one row
takes 4 % more cycles with it), and the compiler has no estimate for scatters on SparseCores. For
tpu7x, a device of which is half a chip, the peers are extrapolated in the same way.
"""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sides import define_peers

from bert_jax.configs.pretrain import pod_large
from bert_jax.model.config import BertConfig
from bert_jax.pods import chips
from bert_jax.pods.estimate import compilation, hlo_cost, planned
from bert_jax.sharding.compiler_options import compiler_options, product_options
from bert_jax.sharding.mesh import make_mesh
from bert_jax.training.pretrain_setup import setup_pretraining

CHIPS = flags.DEFINE_list("chips", list(chips.CHIPS), "Chips to compile for.")
flags.register_validator(
    "chips",
    lambda names: set(names) <= set(chips.CHIPS),
    f"expected some of {', '.join(chips.CHIPS)}",
)
ROWS = flags.DEFINE_integer("rows", 16, "Number of rows per device.", 1)
SIZE = flags.DEFINE_string("size", "large", "Published size of the model.")
LENGTH = flags.DEFINE_integer("length", 512, "Number of tokens per row.", 1)
PEERS = define_peers("transformers", "keras_hub")
TUNED = flags.DEFINE_boolean(
    "tuned", False, "Compile the peers with the compiler options of our step, too."
)
TRANSFORMERS = flags.DEFINE_string("transformers", None, "Directory of transformers 4.57.1.")
EXTRAPOLATE = flags.DEFINE_list(
    "extrapolate",
    ["v6e", "tpu7x"],
    "Chips for which 2 and 4 layers of the peers are compiled instead of all, with the random "
    "counters of JAX before 0.5.",
)


class Step(NamedTuple):
    """A jitted update step, and its arguments as arrays or ShapeDtypeStructs."""

    update: Callable
    arguments: tuple


def our_cycles(chip: str) -> int:
    config = pod_large.get_config(chip)
    config.model.size = SIZE.value
    config.batch_size = config.long_phase.batch_size = ROWS.value
    phases = planned.planned_phases(config, (128, LENGTH.value))
    devices = [compilation.describe_device(chip)]
    setup = setup_pretraining(config, phases, planned.UNCASED_ENGLISH, devices)
    _, hlo = compilation.compile_step(setup, setup.phases[-1])
    return hlo_cost.step_cost(hlo, chip).cycles.total()


def peer_cycles(make_step: Callable[[BertConfig], Step], chip: str) -> int:
    """Compiles the step of a peer for all layers, or extrapolates from 2 and 4."""
    config = BertConfig.named(SIZE.value)
    if chip not in EXTRAPOLATE.value:
        return compiled_cycles(make_step(config), chip)
    two, four = (
        compiled_cycles(make_step(dataclasses.replace(config, num_layers=num_layers)), chip)
        for num_layers in (2, 4)
    )
    return two + (four - two) * (config.num_layers - 2) // 2


def compiled_cycles(step: Step, chip: str) -> int:
    mesh = make_mesh(devices=[compilation.describe_device(chip)])
    options = {}
    if TUNED.value:
        hidden_size = BertConfig.named(SIZE.value).hidden_size
        options = compiler_options(mesh, hidden_size) | product_options(mesh)
    sharding = NamedSharding(mesh, P())
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        step.arguments,
    )
    # With the present default counters, transformers does not compile in an hour for v6e.
    with jax.threefry_partitionable(chip not in EXTRAPOLATE.value):
        lowered = step.update.lower(*arguments)
    compiled = lowered.compile(compiler_options=options)
    return hlo_cost.step_cost(compiled.as_text(), chip).cycles.total()


def keras_hub_step(config: BertConfig) -> Step:
    import keras_side

    state, update = keras_side.make_pretrain_step(config, "bfloat16")
    num_predictions = -(-15 * LENGTH.value // 100)
    tokens = np.zeros((ROWS.value, LENGTH.value), np.int32)
    masked = np.zeros((ROWS.value, num_predictions), np.int32)
    rows = {"tokens": tokens, "segment_ids": tokens, "mlm_positions": masked, "mlm_targets": masked}
    return Step(update, (state, keras_side.pretrain_batch(rows)))


def transformers_step(config: BertConfig) -> Step:
    os.environ["USE_TF"] = "0"  # transformers 4 refuses the TensorFlow that KerasHub installs.
    if TRANSFORMERS.value:
        sys.path.insert(0, str(pathlib.Path(TRANSFORMERS.value).resolve()))
    import transformers

    model = transformers.FlaxBertForPreTraining(
        transformers.BertConfig(
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.intermediate_size,
        ),
        dtype=jnp.bfloat16,
        _do_init=False,
    )
    optimizer = optax.adamw(1e-4)

    def init():
        params = model.init_weights(jax.random.key(0), (1, LENGTH.value))
        return params, optimizer.init(params)

    def loss_fn(params, batch, key):
        inputs = batch["input_ids"], batch["attention_mask"], batch["token_type_ids"]
        outputs = model(*inputs, params=params, dropout_rng=key, train=True)
        labels, is_labeled = batch["labels"], batch["labels"] >= 0
        loss = optax.softmax_cross_entropy_with_integer_labels
        mlm = loss(outputs.prediction_logits.astype(jnp.float32), labels * is_labeled)
        nsp = loss(outputs.seq_relationship_logits.astype(jnp.float32), batch["next_sentence"])
        return jnp.sum(mlm * is_labeled) / jnp.sum(is_labeled) + jnp.mean(nsp)

    def update_step(params, opt_state, batch, key):
        key = jax.random.wrap_key_data(key)
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch, key)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    names = ("input_ids", "attention_mask", "token_type_ids", "labels")
    shape = (ROWS.value, LENGTH.value)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in names}
    batch["next_sentence"] = jax.ShapeDtypeStruct((ROWS.value,), jnp.int32)
    arguments = (*jax.eval_shape(init), batch, jax.ShapeDtypeStruct((2,), jnp.uint32))
    return Step(jax.jit(update_step, donate_argnums=(0, 1)), arguments)


def main(_) -> None:
    steps = {"transformers": transformers_step, "keras_hub": keras_hub_step}
    columns = [column for peer in PEERS.value for column in (peer, "ratio")]
    print(f"{SIZE.value}, {ROWS.value} rows of {LENGTH.value} tokens per device: cycles per row\n")
    print(
        f"| chip | bert_jax | {' | '.join(columns)} |\n{'| --- ' * (2 + len(columns))}|", flush=True
    )
    for chip in CHIPS.value:
        ours = our_cycles(chip) / ROWS.value
        cells = [f"{ours:,.0f}"]
        for peer in PEERS.value:
            cycles = peer_cycles(steps[peer], chip) / ROWS.value
            cells += [f"{cycles:,.0f}", f"{cycles / ours:.2f}"]
        print(f"| {chip} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    app.run(main)
