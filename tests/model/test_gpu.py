"""Attention in GPU kernels, interpreted, equals plain JAX, with the same dropout mask.

The kernels are also lowered for a GPU, which needs none.
"""

import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    NamedSharding,
    use_abstract_mesh,
)
from jax.sharding import PartitionSpec as P

from bert_jax.model import bert, execution, gpu
from bert_jax.model.attention import attention
from bert_jax.model.config import BertConfig
from bert_jax.model.dropout import Dropout, attention_dropout
from bert_jax.model.encoder import EncoderModel
from bert_jax.model.execution import Execution, layer_class
from bert_jax.model.pretraining import PretrainingModel, example_batch
from bert_jax.sharding.collectives import sum_over_data
from bert_jax.sharding.mesh import AXES, batch_sharding, make_mesh

ATTENTION = {"plain": attention, "gpu": gpu.attention}


def make_inputs(length: int, hidden_size: int, dtype="float32"):
    """Returns query, key, value and the gradient of the output of three rows, and packed ids."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(3, length, hidden_size)), dtype) for _ in range(4)]
    ids = np.ones((3, length), np.int32)
    ids[1, length // 3 :] = 2
    ids[1, length // 2 :] = 0  # Padding.
    ids[2] = 0
    return arrays, jnp.asarray(ids)


def make_dropout(num_heads: int, length: int, rate: float, rows=(5, 0, 1000)):
    if rate == 0:
        return None
    dropout = Dropout(jax.random.key(3), jnp.asarray(rows), rate)
    return attention_dropout(dropout, num_heads, length)


@functools.partial(jax.jit, static_argnames=("kind", "num_heads", "causal", "rate"))
def output_and_gradients(kind, arrays, ids, *, num_heads, causal=False, rate=0.0):
    *inputs, dcontext = arrays
    dropout = make_dropout(num_heads, ids.shape[1], rate)

    def attend(query, key, value):
        return ATTENTION[kind](
            query, key, value, ids, num_heads=num_heads, causal=causal, dropout=dropout
        )

    context, transpose = jax.vjp(attend, *inputs)
    return context, *transpose(dcontext)


@pytest.mark.parametrize(
    ("length", "num_heads", "head_dim", "rate", "causal"),
    [
        (5, 1, 16, 0.0, True),  # Shorter than a block.
        (100, 3, 64, 0.5, True),  # An odd number of heads, and of rows in the last block.
        (192, 2, 32, 0.1, False),
        pytest.param(128, 2, 128, 0.3, False, marks=pytest.mark.slow),
        pytest.param(384, 4, 64, 0.0, False, marks=pytest.mark.slow),
        pytest.param(512, 12, 64, 0.1, False, marks=pytest.mark.slow),
        pytest.param(600, 2, 64, 0.1, True, marks=pytest.mark.slow),
    ],
)
def test_kernels_equal_plain_attention(length, num_heads, head_dim, rate, causal):
    arrays, ids = make_inputs(length, num_heads * head_dim)
    expected, actual = (
        output_and_gradients(kind, arrays, ids, num_heads=num_heads, causal=causal, rate=rate)
        for kind in ("plain", "gpu")
    )
    for plain, kernel in zip(expected, actual, strict=True):
        np.testing.assert_allclose(kernel, plain, rtol=1e-5, atol=1e-5)


def test_attention_and_its_gradient_equal_float64():
    arrays, ids = make_inputs(20, 32)
    query, key, value, dcontext = (np.asarray(x, np.float64).reshape(3, 20, 2, 16) for x in arrays)
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) / 4
    scores[np.broadcast_to((ids[:, :, None] != ids[:, None])[:, None], scores.shape)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    dweights = np.einsum("bqhd,bkhd->bhqk", dcontext, value)
    dscores = weights * (dweights - np.sum(weights * dweights, -1, keepdims=True)) / 4
    expected = (
        np.einsum("bhqk,bkhd->bqhd", weights, value),
        np.einsum("bhqk,bkhd->bqhd", dscores, key),
        np.einsum("bhqk,bqhd->bkhd", dscores, query),
        np.einsum("bhqk,bqhd->bkhd", weights, dcontext),
    )
    actual = output_and_gradients("gpu", arrays, ids, num_heads=2)
    for exact, kernel in zip(expected, actual, strict=True):
        np.testing.assert_allclose(kernel, exact.reshape(3, 20, 32), rtol=1e-4, atol=1e-5)


def test_bfloat16_error_is_at_most_twice_that_of_plain_attention():
    rounded, ids = make_inputs(128, 128, "bfloat16")
    exact = [x.astype("float32") for x in rounded]
    run = functools.partial(output_and_gradients, ids=ids, num_heads=2, rate=0.1)
    expected = run("plain", exact)
    both = zip(expected, run("plain", rounded), run("gpu", rounded), strict=True)
    for exact, plain, kernel in both:
        assert kernel.dtype == jnp.bfloat16
        plain_error, error = (jnp.linalg.norm((x - exact).ravel()) for x in (plain, kernel))
        assert error < 2 * plain_error


@pytest.mark.parametrize(
    "sizes", [(2, 2, 2), pytest.param((1, 4, 2), marks=pytest.mark.slow)], ids=str
)
def test_kernels_on_a_mesh_have_the_gradients_of_plain_attention_on_one_device(sizes):
    arrays, ids = make_inputs(16, 64)
    batch = dict(zip(("query", "key", "value", "dcontext"), arrays, strict=True)) | {"ids": ids}
    batch = {name: np.concatenate([x, x[:1]]) for name, x in batch.items()}  # Four rows.
    batch["rows"] = np.arange(4)
    factors = np.random.default_rng(1).uniform(0.8, 1.2, (3, 64)).astype(np.float32)

    def gradients(kind, factors, batch):
        def loss(factors):
            names = ("query", "key", "value")
            inputs = [batch[name] * factors[index] for index, name in enumerate(names)]
            dropout = make_dropout(4, 16, 0.1, batch["rows"])
            context = ATTENTION[kind](*inputs, batch["ids"], num_heads=4, dropout=dropout)
            return jnp.sum(context * batch["dcontext"])

        return jax.grad(loss)(factors)

    expected = jax.jit(functools.partial(gradients, "plain"))(factors, batch)
    mesh = make_mesh(*sizes, devices=jax.devices()[: math.prod(sizes)])
    replicated = NamedSharding(mesh, P())
    run = sum_over_data(functools.partial(gradients, "gpu"), mesh, replicated)
    batch = jax.device_put(batch, batch_sharding(mesh))
    actual = jax.jit(run)(jax.device_put(factors, replicated), batch)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-4)


def test_kernels_work_under_vmap_with_a_rate_for_each_trial():
    (query, key, value, dcontext), ids = make_inputs(16, 64)
    rates, keys = np.array([0.1, 0.4], np.float32), jax.random.split(jax.random.key(0), 2)

    def run(kind):
        def trial(dropout_key, rate, query):
            dropout = attention_dropout(Dropout(dropout_key, jnp.arange(3), rate), 2, 16)

            def attend(query, key, value):
                return ATTENTION[kind](query, key, value, ids, num_heads=2, dropout=dropout)

            context, transpose = jax.vjp(attend, query, key, value)
            return context, *transpose(dcontext)

        return jax.jit(jax.vmap(trial))(keys, rates, jnp.stack([query, 2 * query]))

    for kernel, plain in zip(run("gpu"), run("plain"), strict=True):
        np.testing.assert_allclose(kernel, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("scan_layers", "remat"),
    [
        (False, "none"),
        pytest.param(True, "none", marks=pytest.mark.slow),
        pytest.param(True, "full", marks=pytest.mark.slow),
        pytest.param(False, "dots", marks=pytest.mark.exhaustive),
    ],
)
def test_model_has_the_same_outputs_and_gradients_with_the_kernels(scan_layers, remat):
    rng = np.random.default_rng(0)
    batch = example_batch() | {
        "tokens": jnp.array(rng.integers(5, 50, (2, 24))),
        "segment_ids": jnp.zeros((2, 24), jnp.int32),
        "position_ids": jnp.arange(24) % 8 + jnp.zeros((2, 1), int),
        "sequence_ids": jnp.array(np.repeat([[1, 2, 0], [1, 1, 1]], 8, axis=1)),
        "target_positions": jnp.array([[1, 2], [3, 4]]),
        "pooled_positions": jnp.array([[0, 8], [0, 0]]),
    }
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=50, **sizes)

    @functools.partial(jax.jit, static_argnums=1)
    def value_and_gradients(params, kind):
        def loss(params):
            execution = Execution(kernels=kind, scan_layers=scan_layers, remat=remat)
            model = PretrainingModel(config, execution)
            dropout = Dropout(jax.random.key(1), jnp.arange(2), 0.1)
            mlm, nsp = model.apply({"params": params}, batch, dropout)
            return jnp.mean(jax.nn.logsumexp(mlm[..., :50], -1)) + jnp.mean(jnp.square(nsp))

        return jax.value_and_grad(loss)(params)

    params = PretrainingModel(config).init(jax.random.key(0), example_batch())["params"]
    (plain, dplain), (kernel, dkernel) = (
        value_and_gradients(params, kind) for kind in ("plain", "gpu")
    )
    np.testing.assert_allclose(kernel, plain, rtol=1e-6)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), dkernel, dplain
    )


def abstract_gpu():
    """Returns the mesh of one GPU that is not here."""
    device = AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    types = (AxisType.Auto,) * len(AXES)
    return AbstractMesh((1,) * len(AXES), AXES, axis_types=types, abstract_device=device)


def lower(function, *arguments) -> str:
    """Returns the program that a GPU gets."""
    traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("head_dim", gpu.HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_lower_for_a_gpu_and_no_array_there_has_length_x_length(head_dim, dtype):
    arguments = jax.eval_shape(lambda: make_inputs(384, 2 * head_dim, dtype))
    run = functools.partial(output_and_gradients, num_heads=2, rate=0.1)
    with use_abstract_mesh(abstract_gpu()):
        program = lower(functools.partial(run, "gpu"), *arguments)
    assert program.count("xla.gpu.triton") == 2 and "384x384" not in program
    assert "384x384" in lower(functools.partial(run, "plain"), *arguments)


@pytest.mark.parametrize("kernels", ["gpu", "plain"])
def test_gradients_of_a_whole_encoder_on_a_gpu_have_no_length_x_length(kernels):
    config = BertConfig(vocab_size=50, hidden_size=32, num_layers=3, num_heads=2)
    model = EncoderModel(config, Execution(kernels=kernels, dtype="bfloat16"))
    params = jax.eval_shape(model.init, jax.random.key(0), example_batch())["params"]
    batch = jax.eval_shape(
        lambda: dict.fromkeys(
            ("tokens", "segment_ids", "position_ids", "sequence_ids"), jnp.zeros((2, 384), int)
        )
    )

    def loss(params, batch):
        dropout = Dropout(jax.random.key(1), jnp.arange(2), 0.1)
        return jnp.sum(model.apply({"params": params}, batch, dropout), dtype=jnp.float32)

    with use_abstract_mesh(abstract_gpu()):
        program = lower(jax.grad(loss), params, batch)
    assert ("384x384" in program) == (kernels == "plain")


def test_layers_are_unrolled_on_a_cpu_and_looped_over_elsewhere_by_default():
    default, unrolled = Execution(), Execution(scan_layers=False)
    assert execution.plain_path(default, BertConfig()) == "unrolled"
    with use_abstract_mesh(abstract_gpu()):
        assert execution.plain_path(default, BertConfig()) == "scan"
        assert execution.plain_path(unrolled, BertConfig()) == "unrolled"


OLD, AMD = ("Tesla T4", "7.5"), ("AMD Instinct MI300X", "gfx942")
EXPECTED = "expected an NVIDIA GPU with 8.0 or higher"


@pytest.mark.parametrize(
    ("fields", "tensor", "device", "reason"),
    [
        ({"num_heads": 16}, 1, None, "the head size is 48: expected one of 16, 32, 64, 128"),
        ({}, 4, None, "num_heads is 12: with tensor=4, expected a multiple of 8"),
        ({}, 1, OLD, f"Tesla T4 has compute capability 7.5: {EXPECTED}"),
        ({}, 1, AMD, f"AMD Instinct MI300X has compute capability gfx942: {EXPECTED}"),
        ({}, 1, ("NVIDIA A100", "8.0"), ""),
        ({}, 2, ("NVIDIA A100", "8.0"), ""),
        ({}, 1, ("NVIDIA H100", "9.0"), ""),
        ({}, 1, ("NVIDIA B200", "10.0"), ""),
    ],
)
def test_layers_that_the_kernels_cannot_compute_fall_back_and_say_so_once(
    caplog, monkeypatch, fields, tensor, device, reason
):
    caplog.set_level("INFO", "absl")
    execution._log_gpu_kernels.cache_clear()
    if device is not None:
        kind, capability = device
        names = {"platform": "gpu", "device_kind": kind, "compute_capability": capability}
        monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(**names)])
    mesh = types.SimpleNamespace(shape={"tensor": tensor})
    found = mesh, jax.devices()[0]
    monkeypatch.setattr(execution, "mesh_and_device", lambda: found)
    expected = bert.EncoderLayer if reason else gpu.GpuEncoderLayer
    for _ in range(2):
        assert layer_class(Execution(kernels="gpu"), BertConfig(**fields)) is expected
    (message,) = [record.message for record in caplog.records]
    ending = f"runs without the kernels for GPUs: {reason}" if reason else "in the kernels for GPUs"
    assert message.startswith("The attention of the 12 layers of hidden size 768")
    assert message.endswith(ending)


def test_kernels_that_are_interpreted_say_so_once(caplog):
    execution._log_gpu_kernels.cache_clear()
    for _ in range(2):
        assert layer_class(Execution(kernels="gpu"), BertConfig()) is gpu.GpuEncoderLayer
    (record,) = caplog.records
    assert record.message.endswith("the kernels for GPUs, interpreted on the cpu, which is slow")


def test_a_jax_without_triton_falls_back(monkeypatch):
    monkeypatch.setattr(gpu, "triton", None)
    assert "no Triton backend in this JAX" in gpu.why_unsupported(jax.devices()[0], 64)


def test_a_model_that_falls_back_has_the_outputs_of_the_plain_one(caplog):
    execution._log_gpu_kernels.cache_clear()
    config = BertConfig(vocab_size=50, hidden_size=96, num_layers=2, num_heads=2)
    plain = EncoderModel(config, Execution(kernels="plain"))
    batch = example_batch() | {"tokens": jnp.array([[7, 30]])}
    params = plain.init(jax.random.key(0), batch)["params"]
    model = EncoderModel(config, Execution(kernels="gpu"))
    expected, found = (each.apply({"params": params}, batch) for each in (plain, model))
    np.testing.assert_array_equal(found, expected)
    (message,) = [record.message for record in caplog.records]
    assert "without the kernels for GPUs: the head size is 48" in message


@pytest.mark.parametrize("kernels", ["auto", "plain", "tpu"])
def test_layers_are_those_of_the_architecture_unless_the_kernels_are_asked_for(kernels):
    assert layer_class(Execution(kernels=kernels), BertConfig()) is bert.EncoderLayer
