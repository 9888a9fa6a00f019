r"""Compares published measurements of TPUs with the compiler's estimates of the same shapes.

python benchmarks/published.py                      # What is not stored yet; hours on two cores.
python benchmarks/published.py --only=v6e-product --again
python benchmarks/published.py --table              # The table, without compiling.

Each measurement is compiled for one device of its chip, and stored with its estimate in
bert_jax/pods/estimate/published.json, from which the factors of
`bert_jax/pods/estimate/calibration.py` are made. docs/log/2026-11-tpu-calibration.md says what is
comparable.

- Decoders: forward and backward pass of a loop over two layers, embedding and logits included, in
  bfloat16; its iterations count as often as the model has layers. A chip holds the weights of a
  layer as if they had been gathered, and with tensor parallelism its share of them. Layers compute
  again what the published configuration says; offloaded arrays count as saved. Splash attention is
  counted in the schedules of its kernels, as ours are. Neither communication nor the update of the
  parameters, which are sharded over all chips, is in the estimate; both are in the measurement.
- BERT is our step with `kernels=plain`, which like the published one has no kernels, with LAMB, of
  which a chip computes its share.
- ViT: the same layers without a causal mask, in float32 as in big_vision, and the Adam update.
"""

import datetime
import functools
import importlib.metadata
import json
import re
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from absl import app, flags
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jax.sharding import SingleDeviceSharding

from bert_jax.configs.pretrain import pod_large
from bert_jax.pods.chips import CHIPS
from bert_jax.pods.estimate import calibration, compilation, hlo_cost, kernel_cycles, planned
from bert_jax.pods.estimate.hlo_text import executed_instructions, parse_hlo
from bert_jax.training.pretrain_setup import setup_pretraining

ONLY = flags.DEFINE_list("only", [], "Names of measurements to compile. Default: all.")
AGAIN = flags.DEFINE_bool("again", False, "Compile what is stored already, too.")
TABLE = flags.DEFINE_bool("table", False, "Print the table of what is stored; compile nothing.")
ATTENTION = flags.DEFINE_string(
    "attention", None, "Internal: compile this, [chip, length, head_dim, Splash]."
)

LAYERS = 2  # In the loop that is compiled.
MAXTEXT = "github.com/AI-Hypercomputer/maxtext"
RECIPES = "github.com/AI-Hypercomputer/tpu-recipes"
PROJECTIONS = "query", "key", "value"


class Splash(NamedTuple):
    """Sizes of the blocks of JAX's splash attention."""

    q: int = 512
    kv: int = 512
    q_dkv: int = 512
    kv_dkv: int = 512
    is_fused: bool = False  # Whether one kernel computes all gradients.

    def sizes(self) -> splash_attention_kernel.BlockSizes:
        return splash_attention_kernel.BlockSizes(
            block_q=self.q,
            block_kv=self.kv,
            block_q_dkv=self.q_dkv,
            block_kv_dkv=self.kv_dkv,
            block_q_dq=None if self.is_fused else self.q_dkv,
            block_kv_dq=None if self.is_fused else self.kv_dkv,
            use_fused_bwd_kernel=self.is_fused,
        )

    def num_programs(self, kernel: str, length: int) -> int:
        """Returns how many programs of a kernel see a key, in one head of one causal row."""
        queries, keys = (self.q, self.kv) if kernel == "fwd" else (self.q_dkv, self.kv_dkv)
        return sum(1 + (end - 1) // keys for end in range(queries, length + 1, queries))


class Transformer(NamedTuple):
    """The layers of a model, or a chip's share of them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    is_gated: bool = True
    is_parallel: bool = False  # Whether both sublayers read the same normalized input.
    is_tied: bool = False  # Whether the logits use the embedding.
    patch: int = 0  # Of an image, in ViT, whose `vocab` are the classes.
    splash: Splash | None = Splash()
    saved: tuple[str, ...] | None = ()  # What a layer keeps for its gradient; None: everything.
    options: Mapping = {}  # Of the compiler.
    loss_by_row: bool = False  # Computes logits twice, row by row: those of all would not fit.

    def flops(self, rows: int, length: int, counts_attention: bool = True) -> float:
        """Returns the FLOPs of a step as MaxText counted them, of a causal model."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        layer = attention + (2 + self.is_gated) * self.hidden * self.inner
        weights = self.layers * layer + (2 - self.is_tied) * self.vocab * self.hidden
        pairs = 6 * self.layers * self.heads * self.head_dim * length * counts_attention
        return rows * length * (6 * weights + pairs)


class Product(NamedTuple):
    """The product of two square bfloat16 matrices."""

    size: int
    options: Mapping = {}


class Bert(NamedTuple):
    """A step of BERT_LARGE, whose update is sharded over all chips."""


class Measurement(NamedTuple):
    """What was published, in the terms of one device."""

    name: str
    chip: str
    num_chips: int
    program: Transformer | Product | Bert
    rows: int  # Per device; with tensor parallelism, of the devices that share a row.
    length: int
    seconds: float  # Of a step.
    source: str
    figure: str  # What the source says.


def maxtext_2023(layers: int, hidden: int, heads: int, inner: int, splash=None) -> Transformer:
    return Transformer(
        layers, hidden, heads, heads, 256, inner, 32_768, False, True, True, splash=splash
    )


def from_rate(program: Transformer, rows: int, length: int, tflops: float, **options) -> float:
    """Returns the seconds of a step from TFLOP/s per chip."""
    return program.flops(rows, length, **options) / (tflops * 1e12)


V4_22B = maxtext_2023(48, 6144, 24, 24_576)
V4_52B = maxtext_2023(32, 12_288, 32, 49_152)
V5E_16B = maxtext_2023(32, 5120, 32, 32_768, Splash())
V5E_32B = maxtext_2023(32, 10_240, 32, 32_768, Splash())
V5E_64B = maxtext_2023(64, 10_240, 32, 32_768, Splash())
DOTS = *PROJECTIONS, "attention_output", "inner", "mlp_output"
V5P_32B = Transformer(32, 8192, 64, 64, 128, 28_672, 32_000, saved=DOTS)
V5P_64B = V5P_32B._replace(layers=64)
TRILLIUM = {"xla_tpu_scoped_vmem_limit_kib": 98_304}
# Published with blocks of 2,048, which take the compiler many minutes.
LONG_BLOCKS = Splash(1024, 1024, 1024, 1024, is_fused=True)
LLAMA_8B = Transformer(
    32, 4096, 32, 8, 128, 14_336, 128_256, splash=LONG_BLOCKS,
    saved=(*PROJECTIONS, "attention_output"), options=TRILLIUM,
)  # fmt: skip
LLAMA_70B = Transformer(
    80, 8192, 64, 8, 128, 28_672, 128_256, splash=LONG_BLOCKS, saved=PROJECTIONS, options=TRILLIUM
)
VIT_S16 = Transformer(12, 384, 6, 6, 64, 1536, 1000, False, patch=16, splash=None, saved=None)
EPOCHS, IMAGES, IMAGE_BATCH, HOURS = 90, round(0.99 * 1_281_167), 1024, 6.5


def tensor_share(program: Transformer, tensor: int) -> Transformer:
    """Returns what one of `tensor` chips computes of a row that they share."""
    heads, kv_heads = program.heads // tensor, program.kv_heads // tensor
    inner, vocab = program.inner // tensor, program.vocab // tensor
    return program._replace(heads=heads, kv_heads=kv_heads, inner=inner, vocab=vocab)


def square_product(chip: str, size: int, tflops: float, source: str) -> Measurement:
    name, seconds = f"{chip}-product-{size}", 2 * size**3 / (tflops * 1e12)
    figure = f"{tflops:.0f} TFLOP/s per device"
    return Measurement(name, chip, 1, Product(size), 1, size, seconds, source, figure)


def trillium(name: str, chips: int, program, rows, length, seconds, folder: str) -> Measurement:
    source = f"{RECIPES}, training/trillium/{folder}/README.md"
    figure = f"{seconds} s per step"
    return Measurement(name, "v6e", chips, program, rows, length, seconds, source, figure)


MEASUREMENTS = (
    # Rows are sorted by length into batches of 58 rows of 128 tokens, 30 of 256 or 16 of 512 per
    # core, of which a chip has two; the longest decide when all have finished.
    Measurement(
        "v4-mlperf-64", "v4", 64, Bert(), 32, 512, 13.98 / 56,
        "github.com/mlcommons/training_results_v1.0, Google/results/tpu-v4-128-TF/bert",
        "13.98 s per 56 steps",
    ),
    Measurement(
        "v4-mlperf-4096", "v4", 4096, Bert(), 2, 512, 0.205 / 21,
        "github.com/mlcommons/training_results_v2.0, Google/results/cloud-tpu-v4-8192-TF/bert",
        "0.205 s per 21 steps",
    ),
    Measurement(
        "v4-maxtext-22b", "v4", 64, V4_22B, 16, 1024,
        from_rate(V4_22B, 16, 1024, 156, counts_attention=False),
        f"{MAXTEXT}, README.md of 2023-04-27", "156 TFLOP/s per chip",
    ),
    Measurement(
        "v4-maxtext-52b", "v4", 192, V4_52B, 10, 1024,
        from_rate(V4_52B, 10, 1024, 154, counts_attention=False),
        f"{MAXTEXT}, README.md of 2023-04-27", "154 TFLOP/s per chip",
    ),
    *(
        Measurement(
            f"v5e-maxtext-{size}", "v5e", 256, program, rows, 2048,
            from_rate(program, rows, 2048, tflops),
            f"{MAXTEXT}, README.md of 2023-12-08", f"{tflops} TFLOP/s per chip",
        )
        for size, program, rows, tflops in (
            ("16b", V5E_16B, 6, 120), ("32b", V5E_32B, 4, 132), ("64b", V5E_64B, 2, 118),
        )
    ),
    *(
        square_product("v5e", size, tflops, "github.com/jax-ml/jax, docs/pallas/tpu/matmul.ipynb")
        for size, tflops in ((4096, 166.132), (8192, 181.823))
    ),
    *(
        Measurement(
            f"v5p-maxtext-{size}", "v5p", 64, tensor_share(program, 4), 4 * rows, 2048,
            from_rate(program, rows, 2048, tflops),
            f"{MAXTEXT}, src/maxtext/configs/tpu/v5p/README.md", f"{tflops} TFLOP/s per chip",
        )
        for size, program, rows, tflops in (("32b", V5P_32B, 6, 328), ("64b", V5P_64B, 3, 323))
    ),
    Measurement(
        "v5p-llama2-70b", "v5p", 512,
        LLAMA_70B._replace(
            vocab=32_000, splash=Splash(), options={},
            saved=(*PROJECTIONS, "attention_output", "mlp_output"),
        ),
        4, 4096, 4 * 4096 / 692,
        f"{MAXTEXT}, docs/reference/models/tiering.md", "692 tokens/s per chip",
    ),
    trillium("v6e-llama3-8b", 8, LLAMA_8B, 3, 8192, 3.443, "Llama3.1-8B-MaxText/v6e-8"),
    trillium(
        "v6e-llama3-70b", 256, LLAMA_70B._replace(loss_by_row=True),
        5, 8192, 42.656, "Llama3.1-70B-MaxText/v6e-256",
    ),
    trillium(
        "v6e-mistral-7b", 8, LLAMA_8B._replace(vocab=32_000), 6, 8192, 6.320, "Mistral-7B-MaxText"
    ),
    trillium(
        "v6e-llama2-70b", 256,
        LLAMA_70B._replace(vocab=32_000, splash=Splash(1024, 512, 2048, 512)),
        2, 4096, 9.052, "Llama2-70B-MaxText",
    ),
    Measurement(
        "v6e-product-8192", "v6e", 1, Product(8192, {"xla_tpu_scoped_vmem_limit_kib": 65_536}),
        1, 8192, 1.328756e-3, f"{RECIPES}, microbenchmarks/README.md", "1.329 ms",
    ),
    Measurement(
        "tpu7x-llama3-70b", "tpu7x", 64,
        LLAMA_70B._replace(
            saved=(*PROJECTIONS, "context"), options={"xla_tpu_scoped_vmem_limit_kib": 61_440}
        ),
        2, 8192, 12.20, f"{RECIPES}, training/ironwood/README.md", "12.20 s per step",
    ),
    *(
        square_product("tpu7x", size, tflops, f"{RECIPES}, microbenchmarks/ironwood/README.md")
        for size, tflops in (
            (1024, 349.727), (2048, 679.285), (4096, 892.945), (16_384, 950.129), (32_768, 956.382),
        )
    ),
    Measurement(
        "v3-vit-s16", "v3", 4, VIT_S16, IMAGE_BATCH // 8, 196,
        HOURS * 3600 / (EPOCHS * IMAGES / IMAGE_BATCH),
        "github.com/google-research/big_vision, big_vision/configs/vit_s16_i1k.py",
        "90 epochs in 6 to 7 hours",
    ),
)  # fmt: skip


def make_attention(model: Transformer, length: int) -> Callable:
    """Returns attention of queries, keys and values `[rows, heads, length, head_dim]`."""
    if model.splash is None:
        return functools.partial(plain_attention, is_causal=not model.patch)
    return splash_attention(model.splash, model.heads, length)


def splash_attention(splash: Splash, heads: int, length: int) -> Callable:
    mask = splash_attention_mask.CausalMask((length, length))
    attend = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * heads),
        block_sizes=splash.sizes(),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="context",
    )
    return jax.vmap(attend)


def plain_attention(queries, keys, values, is_causal: bool):
    scores = jnp.einsum("bhqd,bhkd->bhqk", queries, keys)
    if is_causal:
        length = queries.shape[2]
        scores = jnp.where(jnp.tri(length, dtype=bool), scores, -1e9)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(values.dtype)
    return jnp.einsum("bhqk,bhkd->bhqd", weights, values)


def normalize(x, scale):
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-6) * scale).astype(x.dtype)


def rotate(x):
    """Applies rotary positions to `[rows, heads, length, head_dim]`."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[2])[:, None] * frequency
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def layer(model: Transformer, attend: Callable, weights: dict, x):
    """Applies a layer to `[rows, length, hidden]`."""
    normalized = normalize(x, weights["attention_scale"])
    queries, keys, values = (
        checkpoint_name(jnp.einsum("ble,ehd->bhld", normalized, weights[name]), name)
        for name in PROJECTIONS
    )
    if not model.is_parallel and not model.patch:
        queries, keys = rotate(queries), rotate(keys)
    context = attend(queries * model.head_dim**-0.5, keys, values)
    output = jnp.einsum("bhld,hde->ble", context, weights["attention_output"])
    output = checkpoint_name(output, "attention_output")
    if not model.is_parallel:
        x = x + output
        normalized = normalize(x, weights["inner_scale"])
    activation = jax.nn.silu if model.is_gated else jax.nn.gelu if model.patch else jax.nn.relu
    inner = checkpoint_name(normalized @ weights["inner"], "inner")
    inner = activation(inner)
    if model.is_gated:
        inner = inner * checkpoint_name(normalized @ weights["gate"], "inner")
    result = x + checkpoint_name(inner @ weights["mlp_output"], "mlp_output")
    return result + output if model.is_parallel else result


def loss_fn(model: Transformer, attend: Callable, weights: dict, batch: dict):
    """Returns the mean loss of all tokens, or of all images."""
    if model.patch:
        images = batch["inputs"]
        rows, size, _, channels = images.shape
        grid, patch = size // model.patch, model.patch
        patches = images.reshape(rows, grid, patch, grid, patch, channels)
        x = patches.transpose(0, 1, 3, 2, 4, 5).reshape(rows, grid * grid, -1)
        x = x @ weights["embedding"]
    else:
        x = weights["embedding"][batch["inputs"]]
    apply = functools.partial(layer, model, attend)
    if model.saved is not None:
        policy = jax.checkpoint_policies.save_only_these_names(*model.saved)
        apply = jax.checkpoint(apply, policy=policy)
    x, _ = jax.lax.scan(lambda x, each: (apply(each, x), None), x, weights["layers"])
    x = normalize(x, weights["scale"])
    if model.patch:
        x = jnp.mean(x, axis=1)
    matrix = weights["embedding"].T if model.is_tied else weights["logits"]
    if model.loss_by_row:
        row_loss = jax.checkpoint(lambda row: mean_loss(row[0] @ matrix, row[1]))
        return jnp.mean(jax.lax.map(row_loss, (x, batch["targets"])))
    return mean_loss(x @ matrix, batch["targets"])


def mean_loss(logits, targets):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return jnp.mean(losses)


def abstract_arguments(model: Transformer, rows: int, length: int) -> tuple:
    """Returns the shapes of weights and batch, with the weights of LAYERS layers stacked."""
    dtype = jnp.float32 if model.patch else jnp.bfloat16

    def array(*sizes, dtype=dtype):
        return jax.ShapeDtypeStruct(sizes, dtype)

    hidden, heads, kv_heads, head_dim = model.hidden, model.heads, model.kv_heads, model.head_dim
    each = {
        "attention_scale": array(hidden),
        "inner_scale": array(hidden),
        "query": array(hidden, heads, head_dim),
        "key": array(hidden, kv_heads, head_dim),
        "value": array(hidden, kv_heads, head_dim),
        "attention_output": array(heads, head_dim, hidden),
        "inner": array(hidden, model.inner),
        "mlp_output": array(model.inner, hidden),
    }
    if model.is_gated:
        each["gate"] = array(hidden, model.inner)
    stacked = jax.tree.map(lambda leaf: array(LAYERS, *leaf.shape), each)
    weights = {"layers": stacked, "scale": array(hidden)}
    weights["embedding"] = array(3 * model.patch**2 or model.vocab, hidden)
    if not model.is_tied:
        weights["logits"] = array(hidden, model.vocab)
    if model.patch:
        size = round(length**0.5) * model.patch
        inputs, targets = array(rows, size, size, 3), array(rows, dtype=jnp.int32)
    else:
        inputs = targets = array(rows, length, dtype=jnp.int32)
    return weights, {"inputs": inputs, "targets": targets}


def compile_for(chip: str, program: Callable, arguments: tuple, options: Mapping = {}) -> str:
    """Returns the scheduled HLO of a program for one device of a chip."""
    sharding = SingleDeviceSharding(compilation.describe_device(chip))
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments
    )
    compiled = jax.jit(program).lower(*arguments).compile(compiler_options=dict(options))
    return compiled.as_text()


def check_flops(measurement: Measurement, counted: float) -> None:
    """Raises ValueError if products of the program were not counted as often as there are layers.

    Against `Transformer.flops` without attention, whose kernels have no FLOPs, `counted` lacks the
    table of embeddings, and has what layers compute again, at most a third, and plain attention.
    """
    expected = measurement.program.flops(measurement.rows, measurement.length, False)
    if not 0.7 < counted / expected < 1.7:
        raise ValueError(
            f"{measurement.name}: the products of the program have {counted:.3g} FLOPs, "
            f"{counted / expected:.2f} of the model's: is the loop over {LAYERS} layers unrolled, "
            "or another one inside of it?"
        )


def transformer_cycles(measurement: Measurement) -> float:
    """Returns the cycles of a step: those in the loops over LAYERS layers count for all layers."""
    model, rows, length = measurement.program, measurement.rows, measurement.length
    attend = make_attention(model._replace(splash=quick_blocks(model.splash)), length)
    gradient = jax.value_and_grad(functools.partial(loss_fn, model, attend), allow_int=True)
    program, arguments = gradient, abstract_arguments(model, rows, length)
    if model.patch:
        optimizer = optax.adam(1e-3, mu_dtype=jnp.bfloat16)

        def program(weights, batch, state):
            loss, gradients = gradient(weights, batch)
            updates, state = optimizer.update(gradients, state, weights)
            return loss, optax.apply_updates(weights, updates), state

        arguments = (*arguments, jax.eval_shape(optimizer.init, arguments[0]))
    text = compile_for(measurement.chip, program, arguments, model.options)
    in_loop = model.layers / LAYERS
    total = sum(
        cycles * (in_loop if runs == LAYERS else 1)
        for cycles, runs, _ in hlo_cost.step_cost(text, measurement.chip).costliest
    )
    computations, entry = parse_hlo(text)
    flops = 0.0
    for runs, instruction, _ in executed_instructions(computations, entry):
        flops += runs * (in_loop if runs == LAYERS else 1) * hlo_cost.flops(instruction)
        if instruction.kind == "tpu_custom_call":
            kernel = re.search(r"splash_mha_([a-z]+)", instruction.name)[1]
            cycles = splash_cycles(measurement.chip, length, model.head_dim, model.splash)[kernel]
            total += in_loop * runs * rows * model.heads * cycles
    check_flops(measurement, flops)
    return total


def quick_blocks(splash: Splash | None) -> Splash | None:
    """Returns blocks that compile fast, for a program in which kernels have no estimate.

    The one kernel for all gradients writes those of the queries once for each block of keys, which
    the program then sums: the number of these blocks stays.
    """
    if splash is None:
        return None
    return Splash(128, 128, 128, splash.kv_dkv if splash.is_fused else 128, splash.is_fused)


@functools.cache
def splash_cycles(chip: str, length: int, head_dim: int, splash: Splash) -> dict[str, float]:
    """Returns the cycles of each kernel of splash attention, for a head of a row."""
    shape = json.dumps([chip, length, head_dim, splash])
    schedules = kernel_cycles.schedules([__file__, f"--attention={shape}"])
    cores = 2 if CHIPS[chip].megacore else 1
    found = {}
    for kernel in ("fwd", "dkv") if splash.is_fused else ("fwd", "dkv", "dq"):
        (schedule,) = (text for name, text in schedules.items() if f"splash_mha_{kernel}" in name)
        cycles = kernel_cycles.count_cycles(schedule)
        found[kernel] = splash.num_programs(kernel, length) * cycles / cores
    return found


def compile_attention(chip: str, length: int, head_dim: int, splash: Splash) -> None:
    """Compiles the gradient of attention for a row, with the compiler's dump switched on."""
    attend = splash_attention(splash, 2, length)

    def loss(*arrays):
        return jnp.sum(attend(*arrays).astype(jnp.float32))

    arrays = (jax.ShapeDtypeStruct((1, 2, length, head_dim), "bfloat16"),) * 3
    compile_for(chip, jax.grad(loss, (0, 1, 2)), arrays)


def bert_cycles(measurement: Measurement) -> float:
    """Returns the cycles of our step without kernels, with LAMB, for one device."""
    config = pod_large.get_config(measurement.chip)
    config.optimizer, config.model.kernels, config.overlap_collectives = "lamb", "plain", False
    config.long_phase.batch_size = config.per_device_batch_size = measurement.rows
    config.eval_batch_size = 1
    phases = planned.planned_phases(config, (128, measurement.length))[-1:]
    devices = [compilation.describe_device(measurement.chip)]
    setup = setup_pretraining(config, phases, planned.UNCASED_ENGLISH, devices)
    _, hlo = compilation.compile_step(setup, setup.phases[-1])
    cycles = hlo_cost.step_cost(hlo, measurement.chip).cycles
    shared = sum(each for (_, direction), each in cycles.items() if direction == "update")
    return cycles.total() - shared + shared / measurement.num_chips


def estimated_cycles(measurement: Measurement) -> float:
    """Compiles what was measured, and returns the cycles of a step."""
    program = measurement.program
    if isinstance(program, Bert):
        return bert_cycles(measurement)
    if isinstance(program, Product):
        matrix = jax.ShapeDtypeStruct((program.size, program.size), "bfloat16")
        text = compile_for(measurement.chip, jnp.matmul, (matrix, matrix), program.options)
        return hlo_cost.step_cost(text, measurement.chip).cycles.total()
    return transformer_cycles(measurement)


def stored_entry(measurement: Measurement, cycles: float) -> dict:
    """Returns what published.json stores of a measurement."""
    return {
        "name": measurement.name,
        "chip": measurement.chip,
        "num_chips": measurement.num_chips,
        "is_product": isinstance(measurement.program, Product),
        "tokens_per_device": measurement.rows * measurement.length,
        "measured_seconds": measurement.seconds,
        "estimated_seconds": cycles / CHIPS[measurement.chip].clock_hz,
        "figure": measurement.figure,
        "source": measurement.source,
        "compiler": f"libtpu {importlib.metadata.version('libtpu')}",
        "date": datetime.date.today().isoformat(),
    }


def store(entry: dict) -> None:
    """Writes an entry to published.json, in the order of MEASUREMENTS."""
    entries = {each["name"]: each for each in calibration.read_published()} | {entry["name"]: entry}
    ordered = [entries[each.name] for each in MEASUREMENTS if each.name in entries]
    calibration.PUBLISHED.write_text(json.dumps(ordered, indent=2) + "\n", encoding="utf-8")


def milliseconds(seconds: float) -> str:
    """Returns a time in milliseconds with four digits, or with all before the point."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 1 else f"{1e3 * seconds:.4g}"


def table(entries: list[dict]) -> str:
    """Formats stored entries as a Markdown table, and the factor of each chip as another."""
    columns = "measurement, chips, published, tokens per device, measured ms, estimated ms, ratio"
    lines = [
        f"| {columns.replace(', ', ' | ')} |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for each in entries:
        mark = "" if calibration.calibrates(each) else " *"
        lines.append(
            f"| `{each['name']}`{mark} | {each['num_chips']:,} | {each['figure']} | "
            f"{each['tokens_per_device']:,} | {milliseconds(each['measured_seconds'])} | "
            f"{milliseconds(each['estimated_seconds'])} | {calibration.ratio(each):.2f} |"
        )
    lines += ["", "| chip | measurements | factor | range |", "| --- | ---: | ---: | --- |"]
    for chip in CHIPS:
        found = calibration.calibration_of(chip)
        lines.append(
            f"| {chip} | {found.num_measurements} | {found.factor:.2f} | "
            f"{found.low:.2f} to {found.high:.2f} |"
        )
    lines.append("")
    for name, is_product in (("training steps", False), ("single products", True)):
        errors = [
            abs(calibration.ratio(each) - 1) for each in entries if each["is_product"] == is_product
        ]
        found = f"{statistics.median(errors):.0%}" if errors else "not known"
        lines.append(f"Median error of {len(errors)} {name}: {found}.")
    return "\n".join(lines)


def main(_) -> None:
    by_name = {measurement.name: measurement for measurement in MEASUREMENTS}
    if ATTENTION.value:  # In a process of its own.
        *shape, splash = json.loads(ATTENTION.value)
        compile_attention(*shape, Splash(*splash))
        return
    if unknown := set(ONLY.value) - set(by_name):
        raise app.UsageError(f"--only has unknown names: {', '.join(sorted(unknown))}")
    stored = {each["name"] for each in calibration.read_published()}
    for name in (ONLY.value or by_name) if not TABLE.value else ():
        if name in stored and not AGAIN.value:
            continue
        entry = stored_entry(by_name[name], estimated_cycles(by_name[name]))
        print(f"{name}: measured over estimated {calibration.ratio(entry):.3f}", flush=True)
        store(entry)
    print(table(calibration.read_published()))


if __name__ == "__main__":
    app.run(main)
