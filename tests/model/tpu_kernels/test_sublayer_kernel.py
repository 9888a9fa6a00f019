"""The kernel of sublayer outputs, in interpret mode, equals plain JAX with the same dropout."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.bert import RULES, EncoderLayer
from bert_jax.model.config import BertConfig
from bert_jax.model.dropout import Dropout, hidden_dropout, layer_dropout
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.layer_stack import run_layers
from bert_jax.model.layers import activate, gelu_and_slope
from bert_jax.model.tpu_kernels import sublayer_kernel
from bert_jax.model.tpu_kernels.layer import uses_sublayer_kernel
from bert_jax.sharding.collectives import sum_over_data
from bert_jax.sharding.mesh import batch_sharding, make_mesh
from bert_jax.sharding.rules import infer_shardings
from tests.helpers.models import example_batch, random_params

EPSILON = 1e-12


def make_arguments(tokens: int, inner: int, hidden: int, activation: str | None, dtype="float32"):
    """Returns inputs, x, params and the gradient of the output."""
    normal = np.random.default_rng(0).normal
    shapes = [(tokens, inner), (tokens, hidden), (inner, hidden), *[(hidden,)] * 3]
    inputs, x, kernel, *vectors = (np.float32(normal(size=shape)) for shape in shapes)
    vectors += [np.float32(normal(size=inner))] if activation else []
    params = sublayer_kernel.SublayerParams(kernel / math.sqrt(inner), *vectors)
    return *jax.tree.map(lambda each: jnp.asarray(each, dtype), (inputs, x)), params


def plain(activation, dropout, inputs, x, params):
    kernel, bias, scale, shift, inner_bias = params
    if activation:
        inputs = activate(activation, inputs + inner_bias.astype(inputs.dtype))
    product = inputs @ kernel.astype(inputs.dtype) + bias.astype(inputs.dtype)
    total = (x + (dropout.apply(product[None])[0] if dropout else product)).astype(jnp.float32)
    centered = total - jnp.mean(total, axis=-1, keepdims=True)
    variance = jnp.mean(centered**2, axis=-1, keepdims=True)
    return (centered / jnp.sqrt(variance + EPSILON) * scale + shift).astype(x.dtype)


def in_kernel(activation, dropout, inputs, x, params):
    options = sublayer_kernel.Options(activation, EPSILON, interpret=True)
    zeros = jnp.zeros((1, *x.shape), x.dtype)
    stacks = sublayer_kernel.Stacks(inputs[None], x[None], sums=zeros, outputs=zeros)
    return sublayer_kernel.sublayer(options, stacks, 0, dropout, inputs, x, params)[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(function, activation, dropout, *arguments):
    """Returns the output and the gradients of inputs, x and params, in float32."""
    weights = np.random.default_rng(1).normal(size=arguments[1].shape)

    def loss(*arguments):
        y = function(activation, dropout, *arguments)
        return jnp.sum(weights * y.astype(jnp.float32)), y

    (_, y), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*arguments)
    return jax.tree.map(lambda each: each.astype(jnp.float32), (y, *gradients))


def errors(actual, expected) -> list[float]:
    """Returns the maximum error of each array, relative to its maximum."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in pairs]
    return [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs]


def test_tanh_form_of_gelu_and_its_derivative_equal_float64_formulas():
    x = np.linspace(-8, 8, 1601)
    scale = math.sqrt(2 / math.pi)  # Hendrycks and Gimpel (2016), section 2.
    tanh = np.tanh(scale * (x + 0.044715 * x**3))
    slope = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * scale * (1 + 3 * 0.044715 * x**2)
    for dtype in ("float32", "bfloat16"):
        actual = gelu_and_slope("gelu_tanh", jnp.float32(x), dtype)
        np.testing.assert_allclose(actual[0], 0.5 * x * (1 + tanh), atol=1e-6)
        # Where it vanishes, a rounding error of tanh counts |x| times its slope, up to 20 times.
        np.testing.assert_allclose(actual[1], slope, atol=2e-5)


def make_dropout(tokens: int, rate: float = 0.1):
    @jax.jit
    def make(rate):
        return hidden_dropout(Dropout(jax.random.key(0), np.arange(1), rate), (tokens,))

    return make(rate)


@pytest.mark.parametrize(
    ("tokens", "inner", "hidden", "activation", "has_dropout"),
    [
        pytest.param(512, 128, 128, None, True, marks=pytest.mark.slow),
        (512, 2304, 128, "gelu", True),  # Three chunks: the first, one between, and the last.
        (768, 1024, 256, "gelu", False),
        pytest.param(512, 256, 128, "gelu_tanh", True, marks=pytest.mark.slow),
        pytest.param(1024, 1536, 768, None, True, marks=pytest.mark.exhaustive),  # Two chunks.
    ],
)
def test_kernel_equals_plain_jax(tokens, inner, hidden, activation, has_dropout):
    dropout = make_dropout(tokens) if has_dropout else None
    arguments = activation, dropout, *make_arguments(tokens, inner, hidden, activation)
    assert max(errors(run(in_kernel, *arguments), run(plain, *arguments))) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("activation", sublayer_kernel.ACTIVATIONS)
def test_bfloat16_error_is_at_most_twice_that_of_plain_jax(activation):
    sizes, dropout = (512, 1536, 128, activation), make_dropout(512)
    arguments = activation, dropout, *make_arguments(*sizes, dtype="bfloat16")
    exact = run(plain, activation, dropout, *jax.tree.map(jnp.float32, arguments[2:]))
    for error, plain_error in zip(
        *(errors(run(function, *arguments), exact) for function in (in_kernel, plain)), strict=True
    ):
        assert error <= 2 * plain_error


def test_kernel_reads_and_writes_saved_arrays_at_its_layer():
    inputs, x, params = jax.device_get(make_arguments(512, 128, 128, None))
    three = [np.stack([each + n for n in range(3)]) for each in (inputs, x, params.matrix)]
    stacks = sublayer_kernel.Stacks(
        inputs=three[0],
        residuals=three[1],
        sums=np.full((3, *x.shape), 7, np.float32),
        outputs=np.full((4, *x.shape), 8, np.float32),
        matrices=three[2],
    )
    options = sublayer_kernel.Options(None, EPSILON, offset=1, interpret=True)
    kernel = jax.jit(functools.partial(sublayer_kernel.sublayer, options), static_argnums=1)
    y, sums, outputs = jax.device_get(kernel(stacks, 1, None, inputs, x, params))
    of_layer = inputs + 1, x + 1, params._replace(matrix=params.matrix + 1)
    np.testing.assert_array_equal(sums[::2], 7)
    np.testing.assert_array_equal(outputs[[0, 1, 3]], 8)
    np.testing.assert_array_equal(outputs[2], y)
    expected = x + 1 + of_layer[0] @ (params.matrix + 1) + params.bias
    np.testing.assert_allclose(sums[1], expected, atol=1e-5 * np.abs(expected).max())
    assert max(errors(y, plain(None, None, *of_layer))) < 1e-5


@pytest.mark.slow
def test_kernel_works_under_vmap_with_a_rate_for_each_trial():
    rates = np.array([0.1, 0.4], np.float32)
    arguments = jax.device_get(make_arguments(512, 128, 128, "gelu"))
    arguments = jax.tree.map(lambda each: np.float32(np.stack([each, 1.1 * each])), arguments)

    def trial(function, rate, *arguments):
        return run(function, "gelu", make_dropout(512, rate), *arguments)

    together = jax.vmap(functools.partial(trial, in_kernel))(rates, *arguments)
    apart = [
        trial(plain, rate, *jax.tree.map(lambda each, n=n: each[n], arguments))
        for n, rate in enumerate(rates)
    ]
    assert max(errors(together, jax.tree.map(lambda *each: np.stack(each), *apart))) < 1e-5


CONFIG = BertConfig(num_layers=2, hidden_size=128, num_heads=2, intermediate_size=256)
FAST, PLAIN = ExecutionPlan(uses_kernels=True), ExecutionPlan()


def make_encoder_arguments(length: int):
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 8, length, CONFIG.hidden_size)).astype(np.float32)
    batch = {"x": x, "dy": dy, "ids": np.ones((8, length), np.int32), "rows": np.arange(8)}
    params = random_params(Encoder(CONFIG), example_batch(), std=0.02)
    return {"layers": params["layers"]}, batch


def gradients(plan, params, batch):
    def loss(params):
        x, settings = batch["x"], Dropout(jax.random.key(1), batch["rows"], 0.1)
        places, length = EncoderLayer.dropout_places, x.shape[1]
        dropout = layer_dropout(settings, places, CONFIG.num_layers, CONFIG.num_heads, length)
        mask = AttentionMask(batch["ids"])
        y = run_layers(CONFIG, plan, params["layers"], x, mask, dropout)
        return jnp.sum(y * batch["dy"])

    return jax.grad(loss)(params)


@pytest.mark.slow
def test_rows_that_attention_pads_run_in_the_kernel_too():
    arguments = make_encoder_arguments(length=64)
    run = jax.jit(gradients, static_argnums=0)
    actual, expected = (run(plan, *arguments) for plan in (FAST, PLAIN))
    assert "backward_kernel_gelu" in str(jax.make_jaxpr(run, static_argnums=0)(FAST, *arguments))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "count"),
    [({"data": 2}, 4), pytest.param({"data": 1, "fsdp": 2}, 0, marks=pytest.mark.exhaustive)],
    ids=["data", "fsdp"],
)
def test_encoder_on_a_mesh_has_the_gradients_of_plain_jax_on_one_device(sizes, count):
    params, batch = make_encoder_arguments(length=128)
    expected = gradients(PLAIN, params, batch)
    mesh = make_mesh(**sizes, devices=jax.devices()[:2])
    shardings = infer_shardings(params, mesh, RULES)
    step = sum_over_data(functools.partial(gradients, FAST), mesh, shardings)
    arguments = (
        jax.device_put(params, shardings),
        jax.device_put(batch, batch_sharding(mesh)),
    )
    actual = jax.jit(step, out_shardings=shardings)(*arguments)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), rtol=1e-5)
    # Of both sublayers, forward and backward.
    text = str(jax.make_jaxpr(step)(*arguments))
    assert sum(text.count(f"{name}_kernel_{kind}") > 0 for name, kind in KERNELS) == count


KERNELS = [(name, kind) for name in ("forward", "backward") for kind in ("gelu", "linear")]


@pytest.mark.parametrize(
    ("fields", "dtype", "num_tokens", "expected"),
    [
        ({}, "float32", 512, True),
        ({}, "float32", 256, False),  # One block: half of a chip of two cores would be idle.
        ({}, "float32", 640, False),  # No whole blocks.
        # Too large in float32.
        ({"hidden_size": 1024, "intermediate_size": 4096}, "float32", 512, False),
        ({"hidden_size": 1024, "intermediate_size": 4096}, "bfloat16", 512, True),
        ({"intermediate_size": 200}, "float32", 512, False),
        ({"hidden_size": 64}, "float32", 512, False),
        ({"activation": "gelu_tanh"}, "float32", 512, True),
        ({"activation": "relu"}, "float32", 512, False),
    ],
)
def test_kernel_runs_where_its_blocks_are_whole_and_fit(fields, dtype, num_tokens, expected):
    config = dataclasses.replace(CONFIG, **fields)
    assert uses_sublayer_kernel(config, dtype, num_tokens) is expected


def test_kernel_does_not_run_in_stacked_trials():
    seen = []

    def run(x):
        seen.append(uses_sublayer_kernel(CONFIG, "float32", 512))
        return x

    mesh = make_mesh(devices=jax.devices()[:1])
    for axis in ("data", "trial"):
        jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={axis})(jnp.ones(1))
    assert seen == [True, False]
