"""The update step: accumulation, dropout, meshes, what devices exchange, and that it learns."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bert_jax.data.features import unpack_rows
from bert_jax.data.masking import Masking
from bert_jax.data.packing import row_dtype
from bert_jax.model.bert import RULES
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.layers import cross_entropy
from bert_jax.objectives import mean_metrics
from bert_jax.objectives.masked_lm import MaskedLm
from bert_jax.pods.estimate.hlo_cost import COLLECTIVES
from bert_jax.pods.estimate.hlo_text import array_bytes, parse_hlo
from bert_jax.sharding.mesh import batch_sharding, make_mesh
from bert_jax.sharding.rules import infer_shardings, shard_over_data
from bert_jax.training import pretrain_step
from bert_jax.training.optimizer import make_optimizer, make_schedule
from bert_jax.training.state import TrainState, init_state
from tests.helpers.models import example_batch, small_model_config

LENGTH, PAIRS, VOCAB = 64, 4, 300
MASKING = Masking(
    special_ids=(0, 1, 2, 3, 4),
    mask_id=4,
    vocab_size=VOCAB,
    word_start=np.ones(VOCAB, bool),
    max_predictions=10,
)
OBJECTIVE = MaskedLm(MASKING)


def small_model(plan=ExecutionPlan(), **changes):
    defaults = {"num_heads": 2, "dropout_rate": 0.0, "initializer_range": 0.2}
    return OBJECTIVE.make_model(small_model_config(VOCAB, **defaults | changes), plan)


def random_rows(num_rows: int, pair_lengths=(30, 20), seed: int = 0) -> dict[str, np.ndarray]:
    """Returns rows with pairs of the given lengths, then padding."""
    rng = np.random.default_rng(seed)
    rows = np.zeros(num_rows, row_dtype(LENGTH, PAIRS))
    for row in rows:
        start = 0
        for number, length in enumerate(pair_lengths):
            end, second = start + length, start + length // 2
            row["tokens"][start:end] = rng.integers(5, VOCAB, length)
            row["tokens"][start] = 2
            row["tokens"][[second - 1, end - 1]] = 3
            row["sequence_bounds"][number] = (start, second, end)
            row["nsp_labels"][number] = rng.integers(2)
            start = end
    return {name: rows[name] for name in rows.dtype.names} | {
        "row_ids": np.arange(num_rows, dtype=np.uint32),
        "epochs": np.zeros(num_rows, np.uint32),
    }


def largest_difference(tree, expected) -> float:
    return max(
        float(np.max(np.abs(np.asarray(a) - np.asarray(b))))
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True)
    )


prepare = jax.jit(OBJECTIVE.prepare)


def filled_up(rows: dict, num_rows: int) -> dict:
    """Returns the rows, then empty ones."""
    return {
        name: np.concatenate([x, np.zeros((num_rows - len(x), *x.shape[1:]), x.dtype)])
        for name, x in rows.items()
    }


@functools.cache
def initial_params(model):
    init = jax.jit(model.init)
    return jax.device_get(init(jax.random.key(0), example_batch())["params"])


@functools.cache
def named_optimizer(name: str):
    if name == "sgd":
        return optax.sgd(1.0)
    return make_optimizer(name, make_schedule(1e-3, 100, 0))


def fresh(model, optimizer, **mesh):
    """Returns a state on a mesh (without axes: on one device), and its shardings."""
    params = initial_params(model)
    state = TrainState(np.zeros([], np.int32), params, jax.jit(optimizer.init)(params))
    mesh = make_mesh(**mesh, devices=jax.devices()[: math.prod(mesh.values())])
    shardings = infer_shardings(state, mesh, RULES)
    return jax.device_put(state, shardings), shardings


@functools.cache
def jitted_update(model, optimizer, num_microbatches, **mesh):
    _, shardings = fresh(model, optimizer, **mesh)
    return pretrain_step.make_pretrain_step(
        model, optimizer, shardings, OBJECTIVE, seed=0, num_microbatches=num_microbatches
    )


def test_unpacked_rows_restart_positions_and_number_sequences():
    out = unpack_rows(random_rows(1, pair_lengths=(10, 6)))
    expected_positions = [*range(10), *range(6)] + [0] * (LENGTH - 16)
    assert out["position_ids"][0].tolist() == expected_positions
    assert out["sequence_ids"][0].tolist() == [1] * 10 + [2] * 6 + [0] * (LENGTH - 16)
    assert out["segment_ids"][0].tolist() == [0] * 5 + [1] * 5 + [0] * 3 + [1] * 3 + [0] * 48
    assert out["pooled_positions"][0].tolist() == [0, 10, 0, 0]
    assert out["nsp_weights"][0].tolist() == [1, 1, 0, 0]


def test_cross_entropy_equals_float64():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(7, 50)).astype(np.float32) * 20
    targets = rng.integers(0, 50, 7)
    loss, right = cross_entropy(jnp.array(logits), jnp.array(targets))
    exact = logits.astype(np.float64)
    log_sum = np.log(np.exp(exact - exact.max(-1, keepdims=True)).sum(-1)) + exact.max(-1)
    np.testing.assert_allclose(loss, log_sum - exact[np.arange(7), targets], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(right, exact.argmax(-1) == targets)


def test_gradient_of_cross_entropy_equals_float64():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(3, 5, 50)).astype(np.float32) * 20
    targets, weights = rng.integers(0, 50, (3, 5)), rng.normal(size=(3, 5)).astype(np.float32)
    gradient = jax.grad(lambda x: jnp.sum(weights * cross_entropy(x, targets)[0]))(logits)
    exact = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    expected = exact / exact.sum(-1, keepdims=True) - (targets[..., None] == np.arange(50))
    np.testing.assert_allclose(gradient, expected * weights[..., None], rtol=1e-5, atol=1e-7)


def one_step(model, optimizer, rows, num_microbatches=1, num_steps=1, **mesh):
    """State and metrics after `num_steps` updates with `rows`, on the host."""
    state, shardings = fresh(model, optimizer, **mesh)
    update = jitted_update(model, optimizer, num_microbatches, **mesh)
    rows = jax.device_put(rows, batch_sharding(shardings.step.mesh))
    for _ in range(num_steps):
        state, metrics = update(state, rows)
    metrics |= mean_metrics(metrics.pop("sums"))
    return jax.device_get((state.params, metrics))


@pytest.mark.parametrize(
    ("num_microbatches", "mesh"),
    [
        (2, {"data": 8}),
        pytest.param(2, {"data": 2, "fsdp": 2}, marks=pytest.mark.exhaustive),
        pytest.param(2, {}, marks=pytest.mark.exhaustive),
        pytest.param(4, {}, marks=pytest.mark.exhaustive),
        pytest.param(2, {"data": 4}, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.slow
def test_accumulated_gradients_equal_one_big_batch(num_microbatches, mesh):
    # With rows of different lengths, a mean of the microbatches' means would differ. Dropout is on:
    # it depends on the index of a row in the batch.
    rows = random_rows(16)
    short = random_rows(16, pair_lengths=(12,), seed=1)
    for name in ("tokens", "sequence_bounds", "nsp_labels"):
        rows[name][1::3] = short[name][1::3]
    model = small_model(dropout_rate=0.1)
    optimizer = named_optimizer("sgd")  # Adam's ratio would hide a wrong scale.
    big_batch = one_step(model, optimizer, rows)
    accumulated = one_step(model, optimizer, rows, num_microbatches, **mesh)
    assert largest_difference(big_batch, accumulated) < 1e-5


@pytest.mark.exhaustive
def test_attention_has_its_own_dropout_rate():
    rates = ((0.0, None), (0.0, 0.4), (0.4, None), (0.4, 0.4), (0.4, 0.0))
    none, attention, both, same, hidden = (
        one_step(
            small_model(dropout_rate=rate, attention_dropout_rate=attention_rate),
            optax.sgd(1.0),
            random_rows(4),
        )
        for rate, attention_rate in rates
    )
    assert largest_difference(both, same) == 0
    for one, two in itertools.combinations((none, attention, both, hidden), 2):
        assert largest_difference(one, two) > 1e-5


MESHES = [
    {"data": 8},
    {"data": 2, "fsdp": 4},
    {"data": 1, "fsdp": 8},
    {"data": 2, "tensor": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
]


def trained(name: str, **mesh):
    """Trains three steps; with "sgd" one, whose update is the gradient."""
    model, rows = small_model(num_heads=4, dropout_rate=0.1), random_rows(16)
    return one_step(model, named_optimizer(name), rows, num_steps=1 if name == "sgd" else 3, **mesh)


trained_on_one_device = functools.cache(trained)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("sgd", marks=pytest.mark.exhaustive),
        pytest.param("adamw", marks=pytest.mark.exhaustive),
        "lamb",
    ],
)
@pytest.mark.parametrize(
    "mesh",
    [*(pytest.param(mesh, marks=pytest.mark.exhaustive) for mesh in MESHES[:-1]), MESHES[-1]],
    ids=str,
)
def test_training_on_every_mesh_equals_training_on_one_device(mesh, name):
    assert largest_difference(trained_on_one_device(name), trained(name, **mesh)) < 1e-5


def sharded_over_data(state, shardings):
    """Returns both, with the state sharded over `data`."""
    shardings = shard_over_data(shardings, state)
    return jax.device_put(state, shardings), shardings


@pytest.mark.parametrize(
    ("name", "mesh", "num_microbatches"),
    [
        # With gradient accumulation, as in `lamb_64k.py`.
        pytest.param("lamb", MESHES[-1], 2, marks=pytest.mark.slow),
        pytest.param("stable_adamw", MESHES[-1], 1, marks=pytest.mark.exhaustive),
        *(pytest.param("adamw", mesh, 1, marks=pytest.mark.exhaustive) for mesh in MESHES),
        *(
            pytest.param("lamb", mesh, 2 if mesh["data"] == 8 else 1, marks=pytest.mark.exhaustive)
            for mesh in MESHES[:-1]
        ),
    ],
    ids=str,
)
def test_sharded_weight_update_equals_the_replicated_one(name, mesh, num_microbatches):
    model = small_model(num_heads=4, dropout_rate=0.1)
    rows = random_rows(16)
    optimizer = named_optimizer(name)
    state, shardings = sharded_over_data(*fresh(model, optimizer, **mesh))
    update = pretrain_step.make_pretrain_step(
        model, optimizer, shardings, OBJECTIVE, seed=0, num_microbatches=num_microbatches
    )
    rows = jax.device_put(rows, batch_sharding(shardings.step.mesh))
    for _ in range(3):
        state, metrics = update(state, rows)
    metrics |= mean_metrics(metrics.pop("sums"))
    trained_sharded = jax.device_get((state.params, metrics))
    assert largest_difference(trained_on_one_device(name), trained_sharded) < 1e-5


def collectives(
    sharded: bool, num_microbatches: int, name: str
) -> tuple[list[tuple[str, str, int]], int]:
    """Returns (computation, kind, bytes) of the collectives over 8 data shards, without scalars.

    Also returns the bytes of all parameters.
    """
    model, optimizer = small_model(dropout_rate=0.1), named_optimizer(name)
    state, shardings = fresh(model, optimizer, data=8)
    update = jitted_update(model, optimizer, num_microbatches, data=8)
    if sharded:
        state, shardings = sharded_over_data(state, shardings)
        update = pretrain_step.make_pretrain_step(
            model, optimizer, shardings, OBJECTIVE, seed=0, num_microbatches=num_microbatches
        )
    rows = jax.device_put(random_rows(16), batch_sharding(shardings.step.mesh))
    computations, entry = parse_hlo(update.lower(state, rows).compile().as_text())
    exchanged = [
        ("entry" if name == entry else name, instruction.opcode, array_bytes(instruction.shape))
        for name, body in computations.items()
        for instruction in body
        if instruction.opcode.removesuffix("-start") in COLLECTIVES
        and array_bytes(instruction.shape) >= 512
    ]
    return exchanged, sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize(
    ("mesh", "fields", "message"),
    [
        (
            {"data": 4, "fsdp": 2},
            {},
            "the mesh {.*'fsdp': 2.*} is sharded over other axes than data",
        ),
        ({"data": 8}, {}, "no parameters are sharded over data"),
        ({"data": 8}, {"shares_layers": True}, "layers share parameters"),
    ],
    ids=str,
)
def test_overlap_collectives_that_cannot_overlap_are_logged_with_the_reason(
    caplog, mesh, fields, message
):
    caplog.set_level("INFO", "absl")
    model, optimizer = small_model(hidden_size=128, **fields), optax.sgd(1.0)
    init = functools.partial(init_state, model=model, optimizer=optimizer)
    state = jax.eval_shape(init, jax.random.key(0), batch=example_batch())
    shardings = infer_shardings(state, make_mesh(**mesh), RULES)
    pretrain_step.make_pretrain_step(
        model, optimizer, shardings, OBJECTIVE, seed=0, overlap_collectives=True
    )
    assert re.search(f"overlap_collectives has no effect: {message}", caplog.text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(ExecutionPlan(uses_kernels=True), marks=pytest.mark.exhaustive),
        ExecutionPlan(scans_layers=True),
        pytest.param(ExecutionPlan(), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_overlap_collectives_has_the_gradients_of_one_exchange(plan):
    fields = {"hidden_size": 128, "dropout_rate": 0.1, "initializer_range": 0.05}
    rows = random_rows(16)
    expected, metrics = one_step(small_model(**fields), optax.sgd(1.0), rows)
    model = small_model(plan, **fields)
    state, shardings = sharded_over_data(*fresh(model, optax.sgd(1.0), data=8))
    update = pretrain_step.make_pretrain_step(
        model, optax.sgd(1.0), shardings, OBJECTIVE, seed=0, overlap_collectives=True
    )
    rows = jax.device_put(rows, batch_sharding(shardings.step.mesh))
    kinds = set(
        re.findall(r"stablehlo\.(all_\w+|reduce_scatter)", update.lower(state, rows).as_text())
    )
    assert kinds == {"all_gather", "all_to_all", "all_reduce", "reduce_scatter"}
    state, actual = update(state, rows)
    actual |= mean_metrics(actual.pop("sums"))
    for a, b in zip(
        *map(jax.tree.leaves, ((expected, metrics), (state.params, actual))), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.max(np.abs(a)))


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_gradients_are_exchanged_once_and_never_inside_a_loop(num_microbatches):
    ((computation, kind, num_bytes),), size = collectives(
        sharded=False, num_microbatches=num_microbatches, name="sgd"
    )
    assert (computation, kind) == ("entry", "all-reduce")
    # The metrics are summed in the same exchange. Biases of keys have no gradient to exchange.
    num_key_biases = 2 * 32
    assert size - 4 * num_key_biases <= num_bytes < size + 256


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_microbatches"),
    [pytest.param("adamw", 1, marks=pytest.mark.exhaustive), ("lamb", 2)],
)
def test_sharded_weight_update_gathers_parameters_and_no_moments(name, num_microbatches):
    exchanged, size = collectives(sharded=True, num_microbatches=num_microbatches, name=name)
    assert {(computation, kind) for computation, kind, _ in exchanged} == {
        ("entry", "reduce-scatter"),
        ("entry", "all-gather"),
    }
    scattered, gathered = (
        sum(num_bytes for _, kind, num_bytes in exchanged if kind == name)
        for name in ("reduce-scatter", "all-gather")
    )
    assert 0.9 * size < 8 * scattered <= size  # Each device keeps an eighth of the gradients.
    assert 0.9 * size < gathered <= size


@pytest.mark.exhaustive
def test_overfits_64_rows_to_95_percent_masked_accuracy():
    model = small_model(hidden_size=64, intermediate_size=256, initializer_range=0.02)
    optimizer = make_optimizer("adamw", make_schedule(4e-3, 300, 30))
    state, shardings = fresh(model, optimizer)
    repeating = dataclasses.replace(MASKING, repeat_after=1)  # The same masks in every epoch.
    update = pretrain_step.make_pretrain_step(
        model, optimizer, shardings, MaskedLm(repeating), seed=0
    )
    rows = random_rows(64)
    for _ in range(300):
        state, step_metrics = update(state, rows)
    scores = mean_metrics(step_metrics["sums"])
    assert scores["mlm_accuracy"] > 0.95 and scores["nsp_accuracy"] > 0.95


def test_masks_differ_between_epochs():
    rows = random_rows(18)
    later = rows | {"epochs": rows["epochs"] + 1}
    first, again, second = (
        jax.device_get(prepare(epoch_rows, jax.random.key(0)))["tokens"]
        for epoch_rows in (rows, rows, later)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != second).any(axis=1).all()


@pytest.mark.slow
def test_dropout_differs_between_steps():
    model, optimizer = small_model(dropout_rate=0.1), named_optimizer("sgd")
    (state, shardings), (later, _) = fresh(model, optimizer), fresh(model, optimizer)
    # The same parameters at the next step: only dropout differs.
    later = later.replace(step=jax.device_put(np.ones([], np.int32), shardings.step))
    update = jitted_update(model, optimizer, 1)
    rows = jax.device_put(random_rows(16), batch_sharding(shardings.step.mesh))
    state, first = update(state, rows)
    _, second = update(later, rows)
    assert int(state.step) == 1
    assert float(first["loss"]) != float(second["loss"])


def test_rows_that_fill_up_a_batch_do_not_count():
    model = small_model()
    state, shardings = fresh(model, named_optimizer("sgd"))
    eval_step = pretrain_step.make_eval_step(model, shardings.step.mesh, OBJECTIVE, seed=0)
    rows = random_rows(5)
    twice = {name: np.concatenate([values, values]) for name, values in rows.items()}
    sums_of_twice, sums = (
        jax.device_get(eval_step(state.params, each)) for each in (twice, filled_up(rows, 10))
    )
    assert sums["mlm_loss"][1] > 0 and sums["nsp_loss"][1] == 5 * 2
    for name, values in sums.items():
        assert 2 * np.array(values) == pytest.approx(np.array(sums_of_twice[name]), rel=1e-6), name
