"""Masked LM with next-sentence prediction: the suite of objectives."""

import jax
import pytest

from bert_jax.objectives.masked_lm import MaskedLm
from tests.suites import objectives as suites


def reference(model, params, batch):
    token_logits, pair_logits = jax.jit(model.apply)({"params": params}, batch)
    return suites.cross_entropy(
        "mlm", token_logits, batch["targets"], batch["target_weights"]
    ) | suites.cross_entropy("nsp", pair_logits, batch["nsp_labels"], batch["nsp_weights"])


CASE = suites.ObjectiveCase(
    MaskedLm(suites.make_masking()),
    suites.make_config(),
    {"mlm_loss": 1.0, "nsp_loss": 1.0},
    reference,
)
MODERNBERT = suites.on_modernbert(CASE)
MPNET = suites.on_mpnet(CASE)
ESM = suites.on_esm(CASE)
DEBERTA = suites.on_deberta(CASE)


@pytest.mark.parametrize("holds", suites.OBJECTIVE)
def test_objective(holds, tmp_path):
    holds(CASE, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("holds", suites.OBJECTIVE)
def test_objective_on_modernbert(holds, tmp_path):
    holds(MODERNBERT, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("holds", suites.OBJECTIVE)
def test_objective_on_mpnet(holds, tmp_path):
    holds(MPNET, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("holds", suites.OBJECTIVE)
def test_objective_on_esm(holds, tmp_path):
    holds(ESM, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("holds", suites.OBJECTIVE)
def test_objective_on_deberta(holds, tmp_path):
    holds(DEBERTA, tmp_path)
