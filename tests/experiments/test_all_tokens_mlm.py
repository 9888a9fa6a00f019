"""All-tokens MLM of experiments/electra.py: its loss, its parameters, its place in a step."""

import dataclasses

import all_tokens_mlm
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.data.masking import Masking
from bert_jax.model.execution import ExecutionPlan
from bert_jax.objectives import mean_metrics
from bert_jax.objectives.replaced_tokens import GeneratorSettings
from tests.helpers.models import example_batch, small_model_config

CONFIG = small_model_config(60, num_layers=1, dropout_rate=0.0)
MASKING = Masking((0, 2, 3, 4), 4, 60, np.ones(60, bool), max_predictions=2)
OBJECTIVE = all_tokens_mlm.AllTokensMlm(MASKING, GeneratorSettings(0.5, discriminator_weight=1.0))


def test_loss_equals_the_mixture_in_float64():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (3, 5, 7)).astype(np.float32)
    copy = rng.normal(0, 3, (3, 5)).astype(np.float32)
    original, is_replaced = rng.integers(0, 7, (3, 5)), rng.random((3, 5)) < 0.4
    losses = all_tokens_mlm.copying_loss(*map(jnp.asarray, (logits, copy, original, is_replaced)))
    exact = np.exp(logits.astype(np.float64))
    softmax = exact / exact.sum(-1, keepdims=True)
    share = 1 / (1 + np.exp(-copy.astype(np.float64)))
    target = np.take_along_axis(softmax, original[..., None], -1)[..., 0]
    expected = -np.log(share * ~is_replaced + (1 - share) * target)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.exhaustive
def test_all_tokens_have_a_loss_and_the_generator_its_own():
    model = OBJECTIVE.make_model(CONFIG, ExecutionPlan())
    params = jax.jit(model.init)(jax.random.key(0), example_batch())["params"]
    assert set(params) == {"encoder", "mlm", "discriminator", "generator"}
    tokens = np.random.default_rng(0).integers(5, 60, (3, 12))
    bounds = np.broadcast_to(np.array([[[0, 10, 10]]]), (3, 1, 3))
    ids = np.arange(3, dtype=np.uint32)
    rows = {"tokens": tokens, "sequence_bounds": bounds, "row_ids": ids, "epochs": 0 * ids}

    @jax.jit
    def sums(params):
        return OBJECTIVE.sums(model, params, OBJECTIVE.prepare(rows, jax.random.key(0)))

    scores = mean_metrics(totals := sums(params))
    assert totals["replaced_loss"][1] == 30 and totals["mlm_loss"][1] == 6
    # Before training, the probability of copying is one half.
    assert scores["mlm_loss"] == pytest.approx(np.log(60), rel=0.05)
    copied = 1 - float(mean_metrics(totals)["replaced_loss"]) / np.log(60)
    assert 0.6 < copied < 1
    wider = dataclasses.replace(OBJECTIVE, generator=GeneratorSettings(2.0))
    with pytest.raises(ValueError, match=r"hidden_fraction=2\.0"):
        wider.make_model(CONFIG, ExecutionPlan())
