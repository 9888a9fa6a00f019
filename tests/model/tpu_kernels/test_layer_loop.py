"""The fast path over layers, which save what their gradient needs, equals layers as defined."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.bert import RULES, EncoderLayer
from bert_jax.model.config import BertConfig
from bert_jax.model.dropout import Dropout, layer_dropout
from bert_jax.model.encoder import Encoder, EncoderModel
from bert_jax.model.execution import ExecutionPlan, StepParameters
from bert_jax.model.layer_stack import run_layers
from bert_jax.model.layers import gather_positions
from bert_jax.model.tpu_kernels import attention_kernel, layer_loop
from bert_jax.model.tpu_kernels.layer import interleave
from bert_jax.sharding.collectives import sum_over_data
from bert_jax.sharding.mesh import batch_sharding, make_mesh
from bert_jax.sharding.rules import infer_shardings
from tests.helpers.models import example_batch

CONFIG = BertConfig(num_layers=2, hidden_size=256, num_heads=4, intermediate_size=512)
FAST, PLAIN = ExecutionPlan(uses_kernels=True), ExecutionPlan(scans_layers=True)
UNROLLED = ExecutionPlan()
BATCH, LENGTH = 4, 128


def make_batch(length: int = LENGTH) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, BATCH, length, CONFIG.hidden_size)).astype(np.float32)
    ids = np.where(np.arange(length) < 2 * length // 3, 1, np.arange(BATCH)[:, None] % 3)
    return {"x": x, "dy": dy, "ids": ids, "rows": np.arange(BATCH)}


@functools.cache
def make_params():
    params = jax.jit(Encoder(CONFIG).init)(jax.random.key(0), example_batch())["params"]["layers"]
    rng = np.random.default_rng(1)  # Biases and scales are constant so far.
    params = jax.tree.map(
        lambda x: x + np.float32(0.1 * rng.normal(size=x.shape)), jax.device_get(params)
    )
    return {"layers": params}


def run(config, plan, params, x, batch, rate=0.1, positions=None):
    settings = Dropout(jax.random.key(1), batch["rows"], rate)
    places, length = EncoderLayer.dropout_places, x.shape[1]
    dropout = layer_dropout(settings, places, config.num_layers, config.num_heads, length)
    mask = AttentionMask(batch["ids"], config.causal)
    return run_layers(config, plan, params["layers"], x, mask, dropout, positions)


def outputs_and_gradients(config, plan, params, batch, rate=0.1):
    def loss(params, x):
        y = run(config, plan, params, x, batch, rate)
        return jnp.sum(y * batch["dy"]), y

    (_, y), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, batch["x"])
    return y, *gradients


def assert_equal(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = max(np.abs(b).max(), 1e-9)  # The gradients of biases of keys are 0.
        np.testing.assert_allclose(a / scale, b / scale, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "plan"),
    [
        # In the fast tier, test_bert.py has scanned and unrolled layers of a whole model.
        pytest.param({}, PLAIN, marks=pytest.mark.exhaustive),
        pytest.param({}, FAST, marks=pytest.mark.slow),
        pytest.param({"causal": True}, FAST, marks=pytest.mark.exhaustive),
        pytest.param(
            {}, ExecutionPlan(uses_kernels=True, remat="full"), marks=pytest.mark.exhaustive
        ),
    ],
    ids=str,
)
def test_loop_equals_unrolled_layers_in_outputs_and_gradients(fields, plan):
    assert_runs_as_unrolled(dataclasses.replace(CONFIG, **fields), plan, make_batch())


def assert_runs_as_unrolled(config, plan, batch):
    run = jax.jit(outputs_and_gradients, static_argnums=(0, 1))
    assert_equal(*(run(config, each, make_params(), batch) for each in (plan, UNROLLED)))


@pytest.mark.slow
@pytest.mark.parametrize("length", [640, pytest.param(700, marks=pytest.mark.exhaustive)])
def test_loop_over_long_rows_equals_unrolled_layers(length):
    batch = {name: x[:1] for name, x in make_batch(length).items()}
    assert_runs_as_unrolled(CONFIG, FAST, batch)


@pytest.mark.parametrize(
    ("num_layers", "plan"),
    [
        pytest.param(2, FAST, marks=pytest.mark.exhaustive),
        pytest.param(2, UNROLLED, marks=pytest.mark.exhaustive),
        (1, PLAIN),
        pytest.param(2, ExecutionPlan(remat="full"), marks=pytest.mark.exhaustive),
        pytest.param(2, ExecutionPlan(remat="dots"), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
@pytest.mark.slow
def test_last_layer_at_positions_equals_the_whole_layer_there(num_layers, plan):
    config, batch = dataclasses.replace(CONFIG, num_layers=num_layers), make_batch()
    positions = np.random.default_rng(1).integers(0, LENGTH, (BATCH, 9))
    positions[:, -3:] = positions[:, :1]  # Unused slots repeat a position.
    params = jax.tree.map(lambda leaf: leaf[:num_layers], make_params())

    @functools.partial(jax.jit, static_argnums=0)
    def compute(is_in_layer, params, x):
        def loss(params, x):
            chosen = jnp.asarray(positions) if is_in_layer else None
            y = run(config, plan, params, x, batch, positions=chosen)
            y = y if is_in_layer else gather_positions(y, positions)
            return jnp.sum(y * batch["dy"][:, : positions.shape[1]]), y

        (_, y), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (y, *gradients))

    actual, expected = (compute(is_in_layer, params, batch["x"]) for is_in_layer in (True, False))
    assert actual[0].shape == (BATCH, 9, config.hidden_size)
    assert_equal(actual, expected)


@pytest.mark.slow
def test_fast_path_works_under_vmap_with_a_rate_for_each_trial():
    params, batch, rates = make_params(), make_batch(), jnp.array([0.1, 0.4])
    both = jax.tree.map(lambda x: jnp.stack([x, 1.1 * x]), params)

    @functools.partial(jax.jit, static_argnums=0)
    def compute(plan):
        def trial(params, rate):
            return outputs_and_gradients(CONFIG, plan, params, batch, rate)

        return jax.vmap(trial)(both, rates)

    assert_equal(compute(FAST), compute(UNROLLED))


@pytest.mark.parametrize(
    ("sizes", "length"),
    [
        pytest.param((2, 2, 2), LENGTH, marks=pytest.mark.slow),
        pytest.param((1, 4, 2), LENGTH, marks=pytest.mark.exhaustive),
        pytest.param((2, 2, 2), 640, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_fast_path_on_a_mesh_has_the_gradients_of_plain_layers_on_one_device(sizes, length):
    def gradients(plan, params, batch):
        return outputs_and_gradients(CONFIG, plan, params, batch)[1]

    params, batch = make_params(), make_batch(length)
    expected = gradients(PLAIN, params, batch)
    mesh = make_mesh(*sizes, devices=jax.devices()[: math.prod(sizes)])
    shardings = infer_shardings(params, mesh, RULES)
    compute = sum_over_data(functools.partial(gradients, FAST), mesh, shardings)
    batch = jax.device_put(batch, batch_sharding(mesh))
    compute = jax.jit(compute, out_shardings=shardings)
    assert_equal(compute(jax.device_put(params, shardings), batch), expected)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_shared_layers_have_the_sum_of_the_gradients_of_unshared_layers(groups):
    # As ALBERT: narrow embeddings, the tanh form of GELU, and parameters prepared once per step.
    config = dataclasses.replace(
        CONFIG,
        vocab_size=100,
        hidden_size=128,
        num_heads=2,
        num_layers=4,
        embedding_size=32,
        activation="gelu_tanh",
        shares_layers=True,
        num_layer_groups=groups,
    )
    model = EncoderModel(config, FAST)
    params = jax.jit(model.init)(jax.random.key(0), example_batch())["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype("float32"), params)
    assert {len(leaf) for leaf in jax.tree.leaves(params["encoder"]["layers"])} == {groups}
    shardings = infer_shardings(params, make_mesh(devices=jax.devices()[:1]), RULES)
    layout = StepParameters(FAST, {"encoder": config}, shardings, LENGTH)
    dy = rng.normal(size=(BATCH, LENGTH, 128)).astype(np.float32)
    batch = {"tokens": rng.integers(0, 100, (BATCH, LENGTH)), "sequence_ids": make_batch()["ids"]}
    batch["segment_ids"] = np.zeros_like(batch["tokens"])
    batch["position_ids"] = np.tile(np.arange(LENGTH), (BATCH, 1))

    def loss(model, params):
        return jnp.sum(model.apply({"params": params}, batch) * dy)

    @jax.jit
    def gradients(params):
        prepared = jax.grad(functools.partial(loss, model))(layout.prepare(params))
        return layout.transpose(prepared, params)

    own = EncoderModel(dataclasses.replace(config, shares_layers=False, num_layer_groups=1), PLAIN)
    layers = jax.tree.map(lambda leaf: leaf.repeat(4 // groups, 0), params["encoder"]["layers"])
    copies = {"encoder": params["encoder"] | {"layers": layers}}
    expected = jax.device_get(jax.jit(jax.grad(functools.partial(loss, own)))(copies))["encoder"]
    expected["layers"] = jax.tree.map(
        lambda leaf: leaf.reshape(groups, 4 // groups, *leaf.shape[1:]).sum(1), expected["layers"]
    )
    assert_equal(gradients(params)["encoder"], expected)


@pytest.mark.slow
def test_arrays_saved_by_the_layer_are_not_saved_twice():
    params, batch = make_params(), make_batch()
    jaxpr = jax.make_jaxpr(functools.partial(outputs_and_gradients, CONFIG, FAST))(params, batch)
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("while", "scan")]
    shape = CONFIG.num_layers, BATCH, LENGTH
    saved = [x.aval.shape for x in loops[0].outvars if x.aval.shape[:3] == shape]
    # Queries, keys and values together; context, both sums before LayerNorm, and the first output.
    assert saved.count((*shape, 3 * CONFIG.hidden_size)) == 1
    assert saved.count((*shape, CONFIG.hidden_size)) == 2
    carried = [x.aval.shape for x in loops[0].outvars]
    sums = CONFIG.num_layers, BATCH * LENGTH, CONFIG.hidden_size  # The kernel's are of tokens.
    assert carried.count(sums) == 2
    assert saved.count((*shape, CONFIG.intermediate_size)) == 1
    # The hidden states between layers are only in the array of all layers.
    hidden = BATCH, LENGTH, CONFIG.hidden_size
    assert carried.count((CONFIG.num_layers + 1, *hidden)) == 1
    assert hidden not in carried and sums[1:] not in carried

    # Forward, attention leaves what other layers saved as they are.
    @jax.jit
    def attend(x):
        rows = interleave(*(x + n for n in range(3)))
        bias = jnp.zeros(3 * CONFIG.hidden_size)
        given = [jnp.full((3, *each.shape), float(n)) for n, each in enumerate((rows, x))]
        return rows, *attention_kernel.attention(
            rows, bias, batch["ids"], None, given, 1, head_dim=64, interpret=True
        )

    rows, context, stacks = jax.device_get(attend(batch["x"]))
    for n, (stack, layer) in enumerate(zip(stacks, (rows, context), strict=True)):
        np.testing.assert_array_equal(stack[1], layer)
        np.testing.assert_array_equal(stack[::2], n)


def test_without_gradient_a_layer_saves_nothing():
    seen = []

    def layer(params, x, shared, stacked, saved):
        seen.append(saved)
        return jnp.sin(x * params) if saved is None else saved.save("y", jnp.sin(x * params))

    params, x = np.array([1.0, 2.0], np.float32), np.ones(3, np.float32)
    y = jax.jit(lambda params: layer_loop.loop_over_layers(layer, True, params, x, None))(params)
    np.testing.assert_allclose(y, np.sin(2 * np.sin(x)), rtol=1e-6)
    assert seen == [None] * len(seen)
    seen.clear()
    run = functools.partial(layer_loop.loop_over_layers, layer, True)
    dparams = jax.jit(jax.grad(lambda params: run(params, x, None).sum()))(params)
    assert all(isinstance(saved, layer_loop.SavedActivations) for saved in seen)
    expected = jax.jit(jax.grad(lambda p: jnp.sin(p[1] * jnp.sin(x * p[0])).sum()))(params)
    np.testing.assert_allclose(dparams, expected, rtol=1e-6)
