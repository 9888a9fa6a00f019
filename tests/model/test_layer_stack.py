"""Layers that differ run in loops over periods, with parameters that some of them lack."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model.config import BertConfig
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.layer_stack import group_layers, layers_with
from bert_jax.model.modernbert import ModernBertConfig
from tests.helpers.models import random_params

SIZES = {"hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "vocab_size": 50}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("", []),
        ("a", [("a", 1)]),
        ("aaaa", [("a", 4)]),
        ("Agll gll gll", None),  # As ModernBERT: a first layer, then periods.
        ("abcabca", [("abc", 2), ("a", 1)]),
        ("abcd", [("abcd", 1)]),
    ],
)
def test_groups_compile_the_fewest_layers(layers, expected):
    layers = tuple(layers.replace(" ", ""))
    groups = group_layers(layers, loops=True)
    assert sum((group.period * group.repeats for group in groups), ()) == layers
    if expected is None:
        assert sum(len(group.period) for group in groups) == 4
    else:
        assert [("".join(group.period), group.repeats) for group in groups] == expected
    assert len(group_layers(layers, loops=False)) == bool(layers)


def test_a_parameter_may_be_in_some_layers_only():
    config = ModernBertConfig(num_layers=4, **SIZES)
    numbers = layers_with(config)
    assert numbers["attention_norm", "scale"] == (1, 2, 3)
    assert numbers["query", "kernel"] == (0, 1, 2, 3)
    assert set(layers_with(BertConfig(num_layers=3, **SIZES)).values()) == {(0, 1, 2)}


def make_batch(length: int = 12) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(1, 50, (2, length)).astype(np.int32)
    ids = np.where(np.arange(length) < 7, 1, 2).astype(np.int32)[None].repeat(2, 0)
    positions = np.where(ids == 1, np.arange(length), np.arange(length) - 7).astype(np.int32)
    return {
        "tokens": tokens,
        "segment_ids": 0 * tokens,
        "position_ids": positions,
        "sequence_ids": ids,
    }


@pytest.mark.slow
@pytest.mark.parametrize(  # Without a loop, and one of two periods.
    "num_layers", [2, pytest.param(7, marks=pytest.mark.exhaustive)]
)
def test_loops_over_periods_equal_unrolled_layers(num_layers):
    config = ModernBertConfig(num_layers=num_layers, attention_window=4, **SIZES)
    batch = make_batch()
    plain, looped = (Encoder(config, ExecutionPlan(scans_layers=loops)) for loops in (False, True))
    params = random_params(plain, batch)
    positions = np.array([[0, 3], [5, 11]])

    def loss(encoder):
        def function(params):
            states = encoder.apply({"params": params}, batch, 0.1, rngs={"dropout": key})
            few = encoder.apply({"params": params}, batch, positions=positions)
            return jnp.sum(states**2) + jnp.sum(few**2), (states, few)

        return jax.jit(jax.value_and_grad(function, has_aux=True))

    key = jax.random.key(1)
    (expected, found) = (loss(encoder)(params) for encoder in (plain, looped))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4), expected, found
    )
    outputs = (
        encoder.apply({"params": params}, batch, method="all_hidden_states")
        for encoder in (plain, looped)
    )
    states, looped_states = outputs
    assert len(states) == 1 + num_layers
    np.testing.assert_allclose(states, looped_states, atol=1e-4)
    few = expected[0][1][1]
    rows = np.arange(2)[:, None]
    np.testing.assert_allclose(states[-1][rows, positions], few, atol=1e-4)


@pytest.mark.slow
def test_initial_parameters_differ_between_layers_that_are_alike():
    config = ModernBertConfig(num_layers=5, **SIZES)
    init = jax.jit(Encoder(config).init)
    params = init(jax.random.key(0), make_batch())["params"]["layers"]
    assert params["attention_norm"]["scale"].shape == (4, 16)
    kernels = params["query"]["kernel"]
    assert kernels.shape == (5, 16, 16)
    for first in range(5):
        for second in range(first):
            assert np.abs(kernels[first] - kernels[second]).max() > 0.01
    deviation = np.std(params["output"]["kernel"]) / np.std(params["intermediate"]["kernel"])
    assert 0.25 < deviation < 0.38  # 1 / sqrt(2 * num_layers)
