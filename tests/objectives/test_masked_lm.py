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


@pytest.mark.parametrize("holds", suites.OBJECTIVE)
def test_objective(holds, tmp_path):
    holds(CASE, tmp_path)


@pytest.mark.slow
def test_every_mesh_agrees_with_one_device(tmp_path):
    suites.every_mesh_agrees_with_one_device(CASE, tmp_path)


# The others are in the exhaustive tier.
ON_OTHERS = [
    pytest.param(name, marks=pytest.mark.slow if name == "modernbert" else pytest.mark.exhaustive)
    for name in suites.ARCHITECTURES
]


@pytest.mark.parametrize("holds", suites.OBJECTIVE)
@pytest.mark.parametrize("architecture", ON_OTHERS)
def test_objective_on_other_architectures(architecture, holds, tmp_path):
    holds(suites.on_architecture(CASE, architecture), tmp_path)
