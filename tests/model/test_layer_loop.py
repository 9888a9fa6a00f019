"""The loop over layers, whose layers write stacks of their own, equals unrolled layers."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model.bert import Encoder, gather_positions
from bert_jax.model.config import BertConfig
from bert_jax.model.dropout import Dropout
from bert_jax.model.kernels import attention_tpu
from bert_jax.model.layer_loop import LayerStacks, run_layers
from bert_jax.sharding.collectives import sum_over_data
from bert_jax.sharding.mesh import batch_sharding, make_mesh
from bert_jax.sharding.rules import RULES, infer_shardings

CONFIG = BertConfig(
    num_layers=2, hidden_size=256, num_heads=4, intermediate_size=512, attention="tpu"
)
BATCH, LENGTH = 4, 128


def make_batch(length: int = LENGTH) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, BATCH, length, CONFIG.hidden_size)).astype(np.float32)
    ids = np.where(np.arange(length) < 2 * length // 3, 1, np.arange(BATCH)[:, None] % 3)
    return {"x": x, "dy": dy, "ids": ids, "rows": np.arange(BATCH)}


def make_params():
    params = Encoder(CONFIG).init(jax.random.key(0), *(make_batch()[name] for name in ("x", "ids")))
    noise = iter(jax.random.split(jax.random.key(1), 16))  # Biases and scales are constant so far.
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(noise), x.shape), params)


def outputs_and_gradients(config, params, batch, rate=0.1):
    def loss(params, x):
        settings, rngs = Dropout(batch["rows"], rate), {"dropout": jax.random.key(1)}
        y = Encoder(config).apply(params, x, batch["ids"], settings, rngs=rngs)
        return jnp.sum(y * batch["dy"]), y

    (_, y), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, batch["x"])
    return y, *gradients


def assert_equal(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = np.abs(b).max()
        np.testing.assert_allclose(a / scale, b / scale, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"attention": "plain"},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"causal": True}, marks=pytest.mark.exhaustive),
        pytest.param({"remat": "full"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_loop_has_outputs_and_gradients_of_unrolled_layers(fields):
    config = dataclasses.replace(CONFIG, **fields)
    unrolled = dataclasses.replace(config, scan_layers=False)
    run = jax.jit(outputs_and_gradients, static_argnums=0)
    arguments = make_params(), make_batch()
    assert_equal(run(config, *arguments), run(unrolled, *arguments))


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"attention": "plain", "scan_layers": False},
        {"attention": "plain", "num_layers": 1},
        pytest.param({"attention": "plain", "remat": "full"}, marks=pytest.mark.slow),
        pytest.param({"remat": "dots", "scan_layers": False}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_last_layer_at_positions_equals_all_of_it_there(fields):
    config, batch = dataclasses.replace(CONFIG, **fields), make_batch()
    positions = np.random.default_rng(1).integers(0, LENGTH, (BATCH, 9))
    positions[:, -3:] = positions[:, :1]  # Unused slots repeat a position.
    params = jax.tree.map(lambda leaf: leaf[: config.num_layers], make_params())

    @functools.partial(jax.jit, static_argnums=0)
    def run(is_in_layer, params, x):
        def loss(params, x):
            settings, rngs = Dropout(batch["rows"], 0.1), {"dropout": jax.random.key(1)}
            chosen = jnp.asarray(positions) if is_in_layer else None
            y = Encoder(config).apply(params, x, batch["ids"], settings, chosen, rngs=rngs)
            y = y if is_in_layer else gather_positions(y, positions)
            return jnp.sum(y * batch["dy"][:, : positions.shape[1]]), y

        (_, y), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (y, *gradients))

    actual, expected = (run(is_in_layer, params, batch["x"]) for is_in_layer in (True, False))
    assert actual[0].shape == (BATCH, 9, config.hidden_size)
    assert_equal(actual, expected)


@pytest.mark.slow
def test_kernel_in_stacks_works_under_vmap_with_a_rate_for_each_trial():
    params, batch, rates = make_params(), make_batch(), jnp.array([0.1, 0.4])
    both = jax.tree.map(lambda x: jnp.stack([x, 1.1 * x]), params)

    @functools.partial(jax.jit, static_argnums=0)
    def run(config):
        def trial(params, rate):
            return outputs_and_gradients(config, params, batch, rate)

        return jax.vmap(trial)(both, rates)

    assert_equal(run(CONFIG), run(dataclasses.replace(CONFIG, scan_layers=False)))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 4, 2)], ids=str)
def test_kernel_in_stacks_on_a_mesh_has_the_gradients_of_plain_attention_on_one_device(sizes):
    def gradients(config, params, batch):
        return outputs_and_gradients(config, params, batch)[1]

    params, batch = make_params(), make_batch()
    expected = gradients(dataclasses.replace(CONFIG, attention="plain"), params, batch)
    mesh = make_mesh(*sizes, devices=jax.devices()[: math.prod(sizes)])
    rules = [rule for rule in RULES if rule[0].startswith(("layers", "(bias"))]
    shardings = infer_shardings(params, mesh, rules)
    run = sum_over_data(functools.partial(gradients, CONFIG), mesh, shardings)
    batch = jax.device_put(batch, batch_sharding(mesh))
    run = jax.jit(run, out_shardings=shardings)
    assert_equal(run(jax.device_put(params, shardings), batch), expected)


def test_gradient_saves_in_the_stacks_of_the_layer_only_there():
    params, batch = make_params(), make_batch()
    jaxpr = jax.make_jaxpr(functools.partial(outputs_and_gradients, CONFIG))(params, batch)
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("while", "scan")]
    shape = CONFIG.num_layers, BATCH, LENGTH
    stacks = [x.aval.shape for x in loops[0].outvars if x.aval.shape[:3] == shape]
    # Queries, keys and values together; context, both sums before LayerNorm, and the first output.
    assert stacks.count((*shape, 3 * CONFIG.hidden_size)) == 1
    assert stacks.count((*shape, CONFIG.hidden_size)) == 2
    sums = CONFIG.num_layers, BATCH * LENGTH, CONFIG.hidden_size  # The kernel's are of tokens.
    assert [x.aval.shape for x in loops[0].outvars].count(sums) == 2
    assert stacks.count((*shape, CONFIG.intermediate_size)) == 1
    # Forward, attention leaves the stacks of other layers as they are.
    rows = attention_tpu.interleave(*(batch["x"] + n for n in range(3)))
    bias = jnp.zeros(3 * CONFIG.hidden_size)
    given = [jnp.full((3, *x.shape), float(n)) for n, x in enumerate((rows, batch["x"]))]
    context, stacks = attention_tpu.attention(
        rows, bias, batch["ids"], None, given, 1, head_dim=64, interpret=True
    )
    for n, (stack, layer) in enumerate(zip(stacks, (rows, context), strict=True)):
        np.testing.assert_array_equal(stack[1], layer)
        np.testing.assert_array_equal(stack[::2], n)


def test_without_gradient_a_layer_gets_no_stacks():
    seen = []

    def layer(params, x, shared, stacked, stacks):
        seen.append(stacks)
        return jnp.sin(x * params) if stacks is None else stacks.save("y", jnp.sin(x * params))

    params, x = jnp.array([1.0, 2.0]), jnp.ones(3)
    y = run_layers(layer, True, params, x, None)
    np.testing.assert_allclose(y, np.sin(2 * np.sin(x)), rtol=1e-6)
    assert seen == [None] * len(seen)
    seen.clear()
    dparams = jax.grad(lambda params: run_layers(layer, True, params, x, None).sum())(params)
    assert all(isinstance(stacks, LayerStacks) for stacks in seen)
    expected = jax.grad(lambda p: jnp.sin(p[1] * jnp.sin(x * p[0])).sum())(params)
    np.testing.assert_allclose(dparams, expected, rtol=1e-6)
