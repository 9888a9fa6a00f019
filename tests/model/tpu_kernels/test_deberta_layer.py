"""DeBERTa's layers on the fast path equal those that `model/deberta.py` defines."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.deberta import RULES, DebertaConfig, SharedInputs, encoder_layers
from bert_jax.model.dropout import Dropout, layer_dropout
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.layer_stack import run_layers
from bert_jax.model.tpu_kernels import distance_attention_kernel
from bert_jax.model.tpu_kernels.deberta_layer import why_unsupported
from bert_jax.sharding.collectives import sum_over_data
from bert_jax.sharding.mesh import batch_sharding, make_mesh
from bert_jax.sharding.rules import infer_shardings
from tests.helpers.models import example_batch

CONFIG = DebertaConfig(
    vocab_size=50, num_layers=2, hidden_size=128, num_heads=2, intermediate_size=128, num_buckets=64
)
PLAIN = ExecutionPlan(scans_layers=True)


def make_inputs(config: DebertaConfig, batch: int, length: int):
    """Returns hidden states, their gradient, relative embeddings, and packed sequence ids."""
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, batch, length, config.hidden_size)).astype(np.float32)
    distances = rng.normal(size=(2 * config.span, config.hidden_size)).astype(np.float32)
    ids = np.ones((batch, length), np.int32)
    ids[1, length // 3 :] = 2
    ids[1, length // 2 :] = 0  # Padding.
    return x, dy, distances, ids


def make_params(config: DebertaConfig) -> dict:
    params = jax.jit(Encoder(config).init)(jax.random.key(0), example_batch())["params"]["layers"]
    rng = np.random.default_rng(1)  # Biases and scales are constant so far.
    return jax.tree.map(lambda x: np.float32(x + 0.1 * rng.normal(size=x.shape)), params)


def outputs_and_gradients(
    config, plan, rate, params, x, dy, distances, ids, positions=None, rows=None
):
    rows = jnp.arange(len(ids)) if rows is None else rows
    settings = Dropout(jax.random.key(1), rows, rate)
    places = encoder_layers(config)[0].dropout_places
    dropout = layer_dropout(settings, places, config.num_layers, config.num_heads, x.shape[1])

    def loss(params, x, distances):
        inputs = SharedInputs(AttentionMask(ids, config.causal), distances)
        own_dropout = dropout if rate else {}
        y = run_layers(config, plan, params, x.astype(plan.dtype), inputs, own_dropout, positions)
        return jnp.sum(y.astype(jnp.float32) * dy[:, : y.shape[1]]), y

    (_, y), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(params, x, distances)
    return y.astype(jnp.float32), *gradients


def compare(fields, batch, length, rate, num_positions=None, **plan):
    """Returns pairs of outputs and gradients on both paths, divided by the largest of each."""
    config = dataclasses.replace(CONFIG, **fields)
    inputs = make_inputs(config, batch, length)
    positions = None
    if num_positions:
        positions = np.random.default_rng(1).integers(0, length, (batch, num_positions))
    plans = [dataclasses.replace(each, **plan) for each in (ExecutionPlan(True), PLAIN)]
    assert [plan.path(config, length) for plan in plans] == ["fast", "scan"]
    actual, expected = (
        jax.tree.leaves(
            jax.jit(outputs_and_gradients, static_argnums=(0, 1, 2))(
                config, plan, rate, make_params(config), *inputs, positions
            )
        )
        for plan in plans
    )
    # The gradient of a bias that adds the same to all scores of a query is 0, but for rounding.
    scales = [max(np.abs(x).max(), 1.0) for x in expected]
    return [(a / s, b / s) for a, b, s in zip(actual, expected, scales, strict=True)]


@pytest.mark.parametrize(
    ("fields", "batch", "length", "rate", "num_positions", "remat"),
    [
        pytest.param({}, 2, 100, 0.1, None, "none", marks=pytest.mark.slow),
        ({"hidden_size": 256, "num_heads": 4}, 4, 128, 0.1, None, "none"),
        ({"shares_projections": False}, 4, 256, 0.1, 9, "none"),
        ({"causal": True, "num_buckets": 0}, 2, 384, 0.0, None, "full"),
        ({}, 2, 512, 0.1, None, "dots"),
    ],
    ids=str,
)
@pytest.mark.exhaustive
def test_fast_path_equals_layers_as_defined(
    monkeypatch, fields, batch, length, rate, num_positions, remat
):
    # In float32, rows of 512 do not fit on a TPU, but the same code computes them in bfloat16.
    monkeypatch.setattr(distance_attention_kernel, "FLOAT32_LENGTH", 512)
    for actual, expected in compare(fields, batch, length, rate, num_positions, remat=remat):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 2)], ids=str)
def test_on_a_mesh_it_has_the_gradients_of_plain_layers_on_one_device(sizes):
    config = dataclasses.replace(CONFIG, hidden_size=256, num_heads=4)
    x, dy, distances, ids = make_inputs(config, 4, 128)
    params = {"layers": make_params(config), "layer_inputs": {"distances": distances}}
    batch = {"x": x, "dy": dy, "ids": ids, "rows": np.arange(4)}

    def gradients(plan, params, batch):
        _, layers, _, distances = outputs_and_gradients(
            config,
            plan,
            0.1,
            params["layers"],
            batch["x"],
            batch["dy"],
            params["layer_inputs"]["distances"],
            batch["ids"],
            rows=batch["rows"],
        )
        return {"layers": layers, "layer_inputs": {"distances": distances}}

    expected = gradients(PLAIN, params, batch)
    mesh = make_mesh(*sizes, devices=jax.devices()[: math.prod(sizes)])
    shardings = infer_shardings(params, mesh, RULES)
    plan = ExecutionPlan(True, tensor_shards=sizes[-1])
    assert plan.path(config, 128) == "fast"
    compute = sum_over_data(functools.partial(gradients, plan), mesh, shardings)
    compute = jax.jit(compute, out_shardings=shardings)
    batch = jax.device_put(batch, batch_sharding(mesh))
    actual = compute(jax.device_put(params, shardings), batch)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = np.abs(b).max()
        np.testing.assert_allclose(a / scale, b / scale, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [pytest.param(128, marks=pytest.mark.slow), pytest.param(512)])
@pytest.mark.exhaustive
def test_words_of_both_heads_in_bfloat16_equal_layers_as_defined(length):
    for actual, expected in compare({}, 2, length, 0.1, dtype="bfloat16"):
        error = np.abs(actual.astype(np.float32) - expected.astype(np.float32))
        assert error.max() < 0.1 and error.mean() < 0.01


@pytest.mark.parametrize(
    ("fields", "length", "device_kind", "dtype", "reason"),
    [
        ({}, 512, "TPU v4", "bfloat16", ""),
        ({}, 384, "TPU v4", "float32", ""),
        ({}, 512, "TPU v4", "float32", "rows of 512 tokens in float32"),
        ({}, 513, "TPU v4", "bfloat16", "rows of 513 tokens"),
        ({}, 512, "TPU v3", "bfloat16", "TPU v3"),
        ({"convolution_width": 3}, 512, "TPU v4", "bfloat16", "convolution"),
        ({"position_scores": "c2p"}, 512, "TPU v4", "bfloat16", "both terms"),
        ({"num_heads": 4}, 512, "TPU v4", "bfloat16", "heads of 32"),
        ({"num_heads": 1}, 512, "TPU v4", "bfloat16", "heads of 128"),
        ({"hidden_size": 192, "num_heads": 3}, 512, "TPU v4", "bfloat16", "192 lanes"),
        ({"num_layers": 1}, 512, "TPU v4", "bfloat16", "single layer"),
    ],
    ids=str,
)
def test_says_which_layers_it_cannot_run(fields, length, device_kind, dtype, reason):
    config = dataclasses.replace(CONFIG, **fields)
    found = why_unsupported(config, length, 1, device_kind, dtype)
    assert (reason in found) if reason else not found
