"""The TPU kernel, run in interpret mode, equals plain JAX, with the same dropout mask."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.model.attention import attention
from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.config import BertConfig
from bert_jax.model.dropout import Dropout, attention_dropout, random_bits
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.tpu_kernels import attention_kernel
from bert_jax.model.tpu_kernels.layer import interleave, kernel_attention
from bert_jax.objectives.masked_lm import PretrainingModel
from bert_jax.sharding.collectives import sum_over_data
from bert_jax.sharding.mesh import batch_sharding, make_mesh
from tests.helpers.models import random_params

BATCH = 3


def make_config(head_dim: int = 64, **fields) -> BertConfig:
    return BertConfig(hidden_size=256, num_heads=256 // head_dim, **fields)


def attend(kind, config, query, key, value, biases, ids, dropout):
    """Computes attention in the kernel ("tpu") or in plain JAX; no bias of keys has an effect."""
    query_bias, value_bias = biases
    if kind == "tpu":
        bias = interleave(query_bias, jnp.zeros_like(query_bias), value_bias)
        projections = interleave(query, key, value)
        return kernel_attention(projections, bias, ids, config, dropout)
    return attention(
        query + query_bias.astype(query.dtype),
        key,
        value + value_bias.astype(value.dtype),
        AttentionMask(ids, config.causal),
        num_heads=config.num_heads,
        dropout=dropout,
    )


def make_inputs(length: int, seed: int = 0, dtype="float32"):
    """Returns query, key, value, the gradient of the output, biases, and packed sequence ids."""
    rng = np.random.default_rng(seed)
    arrays = [jnp.asarray(rng.normal(size=(BATCH, length, 256)), dtype) for _ in range(4)]
    biases = tuple(jnp.asarray(0.1 * rng.normal(size=256), dtype) for _ in range(2))
    ids = np.ones((BATCH, length), np.int32)
    ids[1, length // 3 :] = 2
    ids[1, length // 2 :] = 0  # Padding.
    ids[2] = 0
    return *arrays, biases, jnp.array(ids)


def make_dropout(config, x, rows, rate, key=None):
    key = jax.random.key(3) if key is None else key
    return attention_dropout(Dropout(key, rows, rate), config.num_heads, x.shape[1])


@functools.partial(jax.jit, static_argnames=("kind", "config", "rate"))
def outputs_and_gradients(kind, config, query, key, value, dout, biases, ids, rate=0.0):
    dropout = make_dropout(config, query, jnp.array([5, 0, 1000]), rate) if rate else None

    def run(*arrays):
        return attend(kind, config, *arrays, ids, dropout)

    out, vjp = jax.vjp(run, query, key, value, biases)
    *gradients, dbiases = vjp(dout)
    return out, *gradients, *dbiases


@pytest.mark.parametrize(
    ("length", "head_dim", "rate", "causal"),
    [
        (100, 64, 0.0, False),
        pytest.param(130, 128, 0.1, False, marks=pytest.mark.slow),
        (200, 64, 0.5, True),
        pytest.param(8, 64, 0.1, False, marks=pytest.mark.slow),
        pytest.param(128, 32, 0.3, False, marks=pytest.mark.exhaustive),
        pytest.param(384, 64, 0.1, False, marks=pytest.mark.exhaustive),
        pytest.param(512, 64, 0.1, False, marks=pytest.mark.slow),
        pytest.param(512, 128, 0.1, True, marks=pytest.mark.slow),
    ],
)
def test_kernel_equals_plain_attention(length, head_dim, rate, causal):
    inputs = make_inputs(length)
    expected, actual = (
        outputs_and_gradients(kind, make_config(head_dim, causal=causal), *inputs, rate)
        for kind in ("plain", "tpu")
    )
    for index, (plain, kernel) in enumerate(zip(expected, actual, strict=True)):
        assert np.isfinite(kernel).all()
        if index >= 4:  # Of the biases: sums over all positions.
            plain, kernel = (x / np.abs(plain).max() for x in (plain, kernel))
        np.testing.assert_allclose(kernel, plain, rtol=1e-5, atol=1e-5)


def test_bfloat16_error_is_at_most_twice_that_of_plain_attention():
    exact = make_inputs(128)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact[:5])
    inputs = *jax.tree.map(lambda x: x.astype(jnp.float32), rounded), exact[5]
    expected = outputs_and_gradients("plain", make_config(), *inputs, 0.1)
    errors = {}
    for kind in ("plain", "tpu"):
        actual = outputs_and_gradients(kind, make_config(), *rounded, exact[5], 0.1)
        errors[kind] = [
            np.sqrt(np.mean(np.square(np.asarray(x, np.float32) - np.asarray(y))))
            for x, y in zip(actual, expected, strict=True)
        ]
    for plain, kernel in zip(errors["plain"], errors["tpu"], strict=True):
        assert kernel < 2 * plain


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("length", "head_dim"),
    [(128, 64), (256, 128)],
)
def test_float32_copies_of_bfloat16_blocks_equal_float32_inputs(length, head_dim):
    *arrays, biases, ids = make_inputs(length, dtype="bfloat16")
    query, key, value, dout, ids = (x[:2] for x in (*arrays, ids))  # Both in one program.
    dropout = make_dropout(make_config(head_dim), query, jnp.arange(2), 0.1)
    bias = interleave(biases[0], jnp.zeros_like(biases[0]), biases[1])
    projections = interleave(query, key, value)

    def run(dtype):
        def out(*arrays):
            options = {"head_dim": head_dim, "interpret": True, "float32_blocks": True}
            return attention_kernel.attention(*arrays, ids, dropout, **options)[0]

        out, vjp = jax.vjp(out, projections.astype(dtype), bias.astype("float32"))
        return out, *vjp(dout.astype(dtype))

    (out, *gradients), (expected, *expected_gradients) = run("bfloat16"), run("float32")
    assert out.dtype == gradients[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, expected.astype("bfloat16"))
    for actual, exact in zip(gradients, expected_gradients, strict=True):
        error, size = (jnp.linalg.norm(x.astype("float32")) for x in (actual - exact, exact))
        assert error < 2**-8 * size  # The backward pass also reads the rounded output.


def test_kernel_works_under_vmap_with_a_rate_for_each_trial():
    query, key, value, _, biases, ids = make_inputs(16)
    rates, keys = np.array([0.1, 0.4], np.float32), jax.random.split(jax.random.key(0), 2)

    def run(kind):
        def trial(key_of_trial, rate, query):
            config = make_config()
            dropout = make_dropout(config, query, jnp.arange(BATCH), rate, key_of_trial)
            return attend(kind, config, query, key, value, biases, ids, dropout)

        return jax.jit(jax.vmap(trial))(keys, rates, np.stack([query, 2 * query]))

    np.testing.assert_allclose(run("tpu"), run("plain"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "sizes", [(2, 2, 2), pytest.param((1, 4, 2), marks=pytest.mark.slow)], ids=str
)
def test_kernel_on_a_mesh_has_the_gradients_of_plain_attention_on_one_device(sizes):
    inputs = jax.device_get(make_inputs(16))
    arrays = [np.concatenate([x, x[:1]]) for x in inputs[:4]]  # Four rows.
    batch = dict(zip(("query", "key", "value", "dout"), arrays, strict=True))
    batch |= {"ids": np.array([[1] * 10 + [0] * 6] * 4), "rows": np.arange(4)}
    params = {"factors": np.array([1.1, 0.9, 1.2], np.float32), "biases": inputs[4]}

    def gradients(kind, params, batch):
        def loss(params):
            projections = [batch[name] for name in ("query", "key", "value")]
            projections = [x * params["factors"][i] for i, x in enumerate(projections)]
            config = make_config()
            dropout = make_dropout(config, projections[0], batch["rows"], 0.1)
            context = attend(kind, config, *projections, params["biases"], batch["ids"], dropout)
            return jnp.sum(context * batch["dout"])

        return jax.grad(loss)(params)

    expected = jax.jit(functools.partial(gradients, "plain"))(params, batch)
    mesh = make_mesh(*sizes, devices=jax.devices()[: math.prod(sizes)])
    replicated = NamedSharding(mesh, P())
    run = sum_over_data(functools.partial(gradients, "tpu"), mesh, replicated)
    batch = jax.device_put(batch, batch_sharding(mesh))
    actual = jax.jit(run)(jax.device_put(params, replicated), batch)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4), actual, expected
    )


@pytest.mark.slow
def test_model_has_the_same_loss_and_gradients_with_the_kernel():
    rng = np.random.default_rng(0)
    tokens = jnp.array(rng.integers(5, 50, (2, 24)))
    ids = jnp.array(np.repeat([[1, 2, 0], [1, 1, 1]], 8, axis=1))
    batch = {
        "tokens": tokens,
        "segment_ids": tokens % 2,
        "position_ids": jnp.arange(24) % 8 + jnp.zeros((2, 1), int),
        "sequence_ids": ids,
        "target_positions": jnp.array([[1, 2], [3, 4]]),
        "pooled_positions": jnp.array([[0, 8], [0, 0]]),
    }
    config = BertConfig.named("tiny", vocab_size=50)

    @functools.partial(jax.jit, static_argnums=1)
    def value_and_gradients(params, uses_kernels):
        return jax.value_and_grad(loss)(params, uses_kernels)

    def loss(params, uses_kernels):
        model = PretrainingModel(config, plan=ExecutionPlan(uses_kernels))
        dropout = Dropout(jax.random.key(1), jnp.arange(2), 0.1)
        mlm, nsp = model.apply({"params": params}, batch, dropout)
        return jnp.mean(jax.nn.logsumexp(mlm[..., :50], -1)) + jnp.mean(jnp.square(nsp))

    params = random_params(PretrainingModel(config), batch, std=0.02)
    (plain, dplain), (kernel, dkernel) = (
        value_and_gradients(params, uses_kernels) for uses_kernels in (False, True)
    )
    np.testing.assert_allclose(kernel, plain, rtol=1e-6)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), dkernel, dplain
    )


@pytest.fixture(scope="module")
def dropped() -> np.ndarray:
    """10.5 million draws, [rows, heads, query, key]: True where a probability is dropped."""

    @jax.jit
    def draw():
        mask = attention_dropout(Dropout(jax.random.key(0), np.arange(10), 0.1), 4, 512)
        query = mask.words[:, :, :, :, None]
        bits = random_bits((query[:, :, 0], query[:, :, 1]), mask.key_words)
        return jnp.stack([half < mask.threshold for half in bits], 2).reshape(10, 4, 512, 512)

    return np.asarray(draw())


def test_attention_keeps_the_rate_over_ten_million_draws(dropped):
    sigma = np.sqrt(0.1 * 0.9 / dropped.size)
    assert abs(dropped.mean() - 0.1) < 4 * sigma + 2**-17  # The rate is a multiple of 2^-16.
    for axis in range(4):
        shares = dropped.mean(axis=tuple({0, 1, 2, 3} - {axis}))
        deviations = (shares - 0.1) / (sigma * np.sqrt(dropped.shape[axis]))
        assert np.max(np.abs(deviations)) < 5


@pytest.mark.parametrize("axis", [0, 1, 2, 3], ids=["rows", "heads", "queries", "keys"])
def test_no_two_masks_of_attention_are_correlated(dropped, axis):
    draws = np.moveaxis(dropped, axis, 0).reshape(dropped.shape[axis], -1)[:256]
    correlations = np.corrcoef(draws, dtype=np.float32)[np.triu_indices(len(draws), 1)]
    scores = correlations * np.sqrt(draws.shape[1])
    assert np.max(np.abs(scores)) < 5.5
    assert np.mean(scores**2) < 1 + 5 * np.sqrt(2 / len(scores))


def test_four_draws_at_the_corners_of_a_rectangle_are_independent(dropped):
    draws = (dropped - 0.1) / 0.3
    for query in (1, 2, 64):
        for key in (1, 7, 256):
            corners = draws[:, :, query:, key:] * draws[:, :, :-query, :-key]
            corners *= draws[:, :, query:, :-key] * draws[:, :, :-query, key:]
            assert abs(corners.mean() * np.sqrt(corners.size)) < 5
