"""Left-to-right pre-training: attention, targets, and the suite of objectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.data.features import unpack_rows
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan
from bert_jax.objectives.left_to_right import LeftToRight
from tests.suites import objectives as suites


def reference(model, params, batch):
    token_logits, pair_logits = jax.jit(model.apply)({"params": params}, batch)
    return suites.cross_entropy(
        "next_token", token_logits, batch["targets"], batch["target_weights"]
    ) | suites.cross_entropy("nsp", pair_logits, batch["nsp_labels"], batch["nsp_weights"])


CONFIG = suites.make_config(causal=True)
CASE = suites.ObjectiveCase(
    LeftToRight(), CONFIG, {"next_token_loss": 1.0, "nsp_loss": 1.0}, reference
)


@pytest.mark.slow
@pytest.mark.parametrize("holds", suites.OBJECTIVE)
def test_objective(holds, tmp_path):
    holds(CASE, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("holds", suites.OBJECTIVE)
@pytest.mark.parametrize("architecture", suites.ARCHITECTURES)
def test_objective_on_other_architectures(architecture, holds, tmp_path):
    holds(suites.on_architecture(CASE, architecture), tmp_path)


def reference_of_tokens(model, params, batch):
    token_logits, _ = jax.jit(model.apply)({"params": params}, batch)
    targets = batch["targets"], batch["target_weights"]
    return suites.cross_entropy("next_token", token_logits, *targets)


# Its sequences end in [CLS], which next-sentence prediction refuses.
XLNET = suites.ObjectiveCase(
    LeftToRight(next_sentence=False),
    suites.make_xlnet_config(causal=True),
    {"next_token_loss": 1.0},
    reference_of_tokens,
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("holds", suites.OBJECTIVE)
def test_objective_on_xlnet(holds, tmp_path):
    holds(XLNET, tmp_path)


LENGTHS = (11, 2, 13)


@pytest.mark.slow
def test_no_position_sees_a_later_one_or_another_sequence():
    batch = unpack_rows(suites.make_rows([LENGTHS]), pools_last=True)
    params = jax.tree.map(np.copy, suites.params_of(CASE)["encoder"])

    def hidden_states(tables):
        """Returns hidden states, with a token embedding per position for separate gradients."""
        embeddings = params["embeddings"] | {"token_embedding": {"embedding": tables}}
        inputs = batch | {"tokens": jnp.arange(suites.LENGTH)[None]}
        variables = {"params": params | {"embeddings": embeddings}}
        return Encoder(CONFIG).apply(variables, inputs)[0].sum(-1)

    # The sum over the hidden units is constant after LayerNorm, unless its scale varies.
    params["layers"]["output_layer_norm"]["scale"] *= np.float32(range(1, 1 + CONFIG.hidden_size))
    tables = params["embeddings"]["token_embedding"]["embedding"]
    jacobian = np.asarray(jax.jit(jax.jacrev(hidden_states))(tables))  # [to, from, hidden]
    depends = np.abs(jacobian[:, : suites.LENGTH]).max(axis=-1) > 0
    position, ids = np.arange(suites.LENGTH), np.asarray(batch["sequence_ids"][0])
    expected = (ids[:, None] == ids) & (position[:, None] >= position)
    np.testing.assert_array_equal(depends, expected)


def test_every_token_but_the_first_of_its_sequence_is_predicted_and_none_is_corrupted():
    rows = suites.make_rows([LENGTHS])
    batch = jax.device_get(CASE.objective.prepare(rows, jax.random.key(0)))
    tokens = rows["tokens"][0]
    np.testing.assert_array_equal(batch["tokens"][0], tokens)
    used = batch["target_weights"][0] > 0
    # The positions before the next tokens of 11, 2 and 13 tokens.
    expected = [*range(10), 11, *range(13, 25)]
    assert batch["target_positions"][0, used].tolist() == expected
    np.testing.assert_array_equal(batch["targets"][0, used], tokens[np.array(expected) + 1])
    # Pooled is the last token, which has seen the whole sequence.
    assert batch["pooled_positions"].tolist() == [[10, 12, 25]]


def test_without_pairs_there_is_neither_head_nor_pooler():
    model = LeftToRight(next_sentence=False).make_model(CONFIG, ExecutionPlan())
    params = jax.eval_shape(model.init, jax.random.key(0), suites.prepared(CASE))["params"]
    assert set(params) == {"encoder", "mlm"} and "pooler" not in params["encoder"]
