"""The enhanced mask decoder: the suite of objectives.

`tests/parity/test_deberta.py` compares it with transformers' layers in float64.
"""

import dataclasses

import jax
import numpy as np
import pytest

from bert_jax.model.execution import ExecutionPlan
from bert_jax.objectives.enhanced_masked_lm import EnhancedMaskedLm
from tests.suites import objectives as suites


def reference(model, params, batch):
    logits, _ = jax.jit(model.apply)({"params": params}, batch)
    return suites.cross_entropy("mlm", logits, batch["targets"], batch["target_weights"])


CASE = suites.ObjectiveCase(
    EnhancedMaskedLm(suites.make_masking()),
    suites.make_deberta_config(),
    {"mlm_loss": 1.0},
    reference,
)


@pytest.mark.slow
@pytest.mark.parametrize("holds", suites.OBJECTIVE)
def test_objective(holds, tmp_path):
    holds(CASE, tmp_path)


@pytest.mark.slow
def test_loss_of_a_packed_batch_equals_that_of_its_sequences():
    suites.packed_equals_unpacked(CASE, None)


@pytest.mark.slow
def test_it_knows_where_a_token_stands():
    """The encoder alone computes the same, wherever a sequence begins."""
    params, batch = suites.params_of(CASE), suites.prepared(CASE)
    model = suites.model_of(CASE)
    later = batch | {"position_ids": np.minimum(batch["position_ids"] + 1, suites.LENGTH - 1)}
    apply = jax.jit(model.apply)
    (one, _), (other, _) = (apply({"params": params}, each) for each in (batch, later))
    used = batch["target_weights"] > 0
    assert np.abs(one - other)[used][:, : suites.VOCAB].max() > 1e-3


@pytest.mark.exhaustive
def test_its_layers_run_as_defined_where_others_take_the_fast_path():
    config = suites.make_deberta_config(hidden_size=128, num_heads=2)
    suites.assert_fast_path_changes_nothing(dataclasses.replace(CASE, config=config), 1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (suites.make_config(), "needs model.architecture=deberta, and it is bert"),
        (suites.make_deberta_config(num_layers=1), "num_layers to at least 2"),
    ],
)
def test_a_model_that_it_does_not_fit_is_a_clear_error(config, message):
    with pytest.raises(ValueError, match=message):
        CASE.objective.make_model(config, ExecutionPlan())
