"""Compares the estimated cycles of our update step on TPU with transformers' Flax BERT.

pip install --target=runs/transformers-flax transformers==4.57.1     # The last with Flax.
pip install 'jax[tpu]'
python benchmarks/tpu_cycles.py --transformers=runs/transformers-flax

Both steps are compiled for one device of each chip by the TPU compiler, without a TPU: BERT_LARGE,
rows of 512 tokens, bfloat16, dropout 0.1 everywhere, masked LM and next sentence, Adam. Our
step uses configs/pretrain/pod_large.py, with masking on the device; the step of transformers uses
FlaxBertForPreTraining with `optax.adamw` and its loss over the logits of all positions. Cycles are
the compiler's estimates, for our kernels counted in schedules: see docs/tpu.md. The unrolled layers
of transformers take the compiler many minutes per chip.

With 16 rows (libtpu 0.0.42.1, 2026-11-25, all in one run of 23 minutes on two cores), in million
cycles per row:

| chip | bert_jax | transformers | ratio |
| --- | --- | --- | --- |
| v3 (one core) | 23.43 | 43.79 | 1.87 |
| v4 | 7.16 | 15.41 | 2.15 |
| v5e | 12.07 | 26.16 | 2.17 |
| v5p | 6.05 | 14.75 | 2.44 |
| v6e | 6.15 | 11.58 | 1.88 |

On one device a step also updates all parameters, 0.5 million cycles per row on v4. Only our step
lets the compiler choose the order of accumulation. For v6e, transformers is extrapolated from 2 and
4 layers, and too low: dropout uses the random counters of JAX before 0.5, because with the present
ones the step does not compile in an hour (one layer of one row takes 4 % more cycles with them),
and the compiler has no estimate for scatters on SparseCores. For tpu7x, neither step was compiled;
transformers would be extrapolated as for v6e, and figures be of one device, half a chip.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import optax
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.configs.pretrain import pod_large
from bert_jax.sharding.mesh import make_mesh
from bert_jax.tpu import compilation, hlo_cost
from bert_jax.training.pretrain_setup import setup_pretraining

CHIPS = flags.DEFINE_list("chips", list(compilation.CHIPS), "Chips to compile for.")
ROWS = flags.DEFINE_integer("rows", 16, "Number of rows per device.", 1)
TRANSFORMERS = flags.DEFINE_string("transformers", None, "Directory of transformers 4.57.1.")
EXTRAPOLATE = flags.DEFINE_list(
    "extrapolate",
    ["v6e", "tpu7x"],
    "Chips for which 2 and 4 layers of transformers are compiled instead of 24, with the random "
    "counters of JAX before 0.5.",
)
LENGTH, NUM_LAYERS = 512, 24


def our_cycles(chip: str) -> int:
    config = pod_large.get_config(chip)
    config.batch_size = config.long_phase.batch_size = ROWS.value
    phases = compilation.planned_phases(config, (128, LENGTH))
    devices = [compilation.describe_device(chip)]
    setup = setup_pretraining(config, phases, compilation.UNCASED_ENGLISH, devices)
    _, hlo = compilation.compile_step(setup, phases[-1])
    return hlo_cost.step_cost(hlo, chip).cycles.total()


def transformers_cycles(chip: str) -> int:
    if chip not in EXTRAPOLATE.value:
        return transformers_cycles_with(chip, NUM_LAYERS)
    two, four = (transformers_cycles_with(chip, num_layers) for num_layers in (2, 4))
    return two + (four - two) * (NUM_LAYERS - 2) // 2


def transformers_cycles_with(chip: str, num_layers: int) -> int:
    from transformers import BertConfig, FlaxBertForPreTraining

    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        intermediate_size=4096,
    )
    model = FlaxBertForPreTraining(config, dtype=jnp.bfloat16, _do_init=False)
    optimizer = optax.adamw(1e-4)

    def init():
        params = model.init_weights(jax.random.key(0), (1, LENGTH))
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

    sharding = NamedSharding(make_mesh(devices=[compilation.describe_device(chip)]), P())
    names = ("input_ids", "attention_mask", "token_type_ids", "labels")
    batch = {name: jax.ShapeDtypeStruct((ROWS.value, LENGTH), jnp.int32) for name in names}
    batch["next_sentence"] = jax.ShapeDtypeStruct((ROWS.value,), jnp.int32)
    arguments = (*jax.eval_shape(init), batch, jax.ShapeDtypeStruct((2,), jnp.uint32))
    arguments = jax.tree.map(lambda leaf: leaf.update(sharding=sharding), arguments)
    # With the present default counters, the step does not compile in an hour for v6e.
    with jax.threefry_partitionable(chip not in EXTRAPOLATE.value):
        lowered = jax.jit(update_step, donate_argnums=(0, 1)).lower(*arguments)
    compiled = lowered.compile()
    return hlo_cost.step_cost(compiled.as_text(), chip).cycles.total()


def main(_) -> None:
    if TRANSFORMERS.value:
        sys.path.insert(0, str(pathlib.Path(TRANSFORMERS.value).resolve()))
    print(
        f"BERT_LARGE, {ROWS.value} rows of {LENGTH} tokens per device: estimated cycles per row\n\n"
        "| chip | bert_jax | transformers | ratio |\n| --- | --- | --- | --- |",
        flush=True,
    )
    for chip in CHIPS.value:
        ours, reference = (
            cycles(chip) / ROWS.value for cycles in (our_cycles, transformers_cycles)
        )
        print(f"| {chip} | {ours:,.0f} | {reference:,.0f} | {reference / ours:.2f} |", flush=True)


if __name__ == "__main__":
    app.run(main)
