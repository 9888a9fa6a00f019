"""ModernBERT's layers on the fast path equal those that `model/modernbert.py` defines."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model.dropout import Dropout, layer_dropout
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.layer_stack import run_layers
from bert_jax.model.modernbert import LayerInputs, ModernBertConfig, encoder_layers
from tests.helpers.models import example_batch

# The first layer, two periods of local, local and global layers, of which one is in a loop.
CONFIG = ModernBertConfig(
    vocab_size=50,
    num_layers=7,
    hidden_size=128,
    num_heads=2,
    intermediate_size=128,
    attention_window=8,
)
FAST, PLAIN = ExecutionPlan(uses_kernels=True), ExecutionPlan(scans_layers=True)
BATCH, LENGTH = 2, 256


def make_inputs(config: ModernBertConfig):
    """Returns hidden states, their gradient, and what layers read beside them."""
    x, dy = np.random.default_rng(0).normal(size=(2, BATCH, LENGTH, config.hidden_size))
    position = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (BATCH, LENGTH))
    ends = np.array([[100, 200, 256], [30, 230, 240]])[:, :, None]
    number = np.sum(position[:, None] >= ends, axis=1)
    batch = {
        "sequence_ids": np.where(position < ends[:, -1], number + 1, 0).astype(np.int32),
        "position_ids": position,
    }
    inputs = LayerInputs(config).apply({}, batch)
    return x.astype(np.float32), dy.astype(np.float32), inputs


@functools.cache
def make_params(config: ModernBertConfig) -> dict:
    params = jax.jit(Encoder(config).init)(jax.random.key(0), example_batch())["params"]["layers"]
    rng = np.random.default_rng(1)  # Biases and scales are constant so far.
    return jax.tree.map(lambda x: np.float32(x + 0.1 * rng.normal(size=x.shape)), params)


def outputs_and_gradients(config, plan, rate, params, x, dy, inputs, positions):
    settings = Dropout(jax.random.key(1), np.arange(BATCH), rate)
    places = encoder_layers(config)[0].dropout_places
    dropout = layer_dropout(settings, places, config.num_layers, config.num_heads, LENGTH)

    def loss(params, x):
        y = run_layers(config, plan, params, x, inputs, dropout if rate else {}, positions)
        return jnp.sum(y.astype(jnp.float32) * dy[:, : y.shape[1]]), y

    (_, y), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
    return y, *gradients


def exhaustive(*values):
    return pytest.param(*values, marks=pytest.mark.exhaustive)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "plan", "rate", "num_positions"),
    [
        ({}, FAST, 0.0, 9),  # With the kernel for GeGLU.
        exhaustive(
            {"attention_bias": True, "feed_forward_bias": True, "norm_bias": True},
            FAST,
            0.1,
            None,
        ),
        exhaustive({"attention_pattern": "lg", "causal": True}, FAST, 0.1, None),
        exhaustive({}, dataclasses.replace(FAST, remat="full"), 0.1, 9),
    ],
    ids=str,
)
def test_fast_path_equals_layers_as_defined(fields, plan, rate, num_positions):
    config = dataclasses.replace(CONFIG, **fields)
    x, dy, inputs = make_inputs(config)
    positions = None
    if num_positions:
        positions = np.random.default_rng(1).integers(0, LENGTH, (BATCH, num_positions))
    results = [
        jax.jit(outputs_and_gradients, static_argnums=(0, 1, 2))(
            config, each, rate, make_params(config), x, dy, inputs, positions
        )
        for each in (plan, PLAIN)
    ]
    actual, expected = map(jax.tree.leaves, results)
    for a, b in zip(actual, expected, strict=True):
        scale = np.abs(b).max()
        np.testing.assert_allclose(a / scale, b / scale, rtol=1e-5, atol=1e-5)
