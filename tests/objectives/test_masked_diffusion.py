"""Masked diffusion: the suite of objectives, the rates, and the bound of a model that is exact."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bert_jax
from bert_jax import pretrain
from bert_jax.objectives.masked_diffusion import MaskedDiffusion, mask_rates
from tests.helpers import grammar
from tests.helpers.runs import small_config
from tests.suites import objectives as suites

MASK_ID, SPECIAL_IDS = 4, (0, 1, 2, 3, 4)


def reference(model, params, batch):
    """Computes the bound in float64, from the equation: a loop over sequences."""
    logits, _ = jax.jit(model.apply)({"params": params}, batch)
    logits = np.array(logits, np.float64)
    logits[..., MASK_ID] = -np.inf
    tokens, rates = suites.rows_of_a_batch()["tokens"], rates_of_the_batch()
    bound = num_tokens = num_masked = num_correct = 0
    for row, sequence in np.argwhere(suites.rows_of_a_batch()["sequence_bounds"][..., 2] > 0):
        is_inside = batch["sequence_ids"][row] == sequence + 1
        num_maskable = np.sum(is_inside & (tokens[row] > max(SPECIAL_IDS)))
        masked = np.flatnonzero(is_inside & (batch["tokens"][row] == MASK_ID))
        assert len(masked) == np.ceil(rates[row, sequence] * num_maskable)
        for place in masked:
            target, scores = tokens[row, place], logits[row, place]
            loss = np.logaddexp.reduce(scores) - scores[target]
            bound += loss * num_maskable / len(masked)
            num_correct += scores.argmax() == target
        num_masked += len(masked)
        num_tokens += num_maskable
    return {"diffusion_loss": (bound, num_tokens), "diffusion_accuracy": (num_correct, num_masked)}


def rates_of_the_batch() -> np.ndarray:
    """Returns the rates of the sequences of `suites.prepared`, in float64 `[B, S]`."""
    key, _ = jax.random.split(jax.random.key(0))
    rate_key, _ = jax.random.split(key)
    shift = int(jax.random.bits(rate_key, dtype=jnp.uint32)) / 2**32
    row = np.arange(suites.NUM_ROWS)[:, None] * (5**0.5 - 1) / 2
    return (shift + row + np.arange(1, suites.SEQUENCES + 1) * (2**0.5 - 1)) % 1


CASE = suites.ObjectiveCase(
    MaskedDiffusion(SPECIAL_IDS, MASK_ID), suites.make_config(), {"diffusion_loss": 1.0}, reference
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


def bound_of(model, params, words: np.ndarray, seed: int = 0) -> float:
    """Returns the bound of sentences of the grammar, in nats per token."""
    batch = CASE.objective.prepare(grammar.rows_of(words), jax.random.key(seed))
    total, count = CASE.objective.sums(model, params, batch)["diffusion_loss"]
    assert count == words.size
    return float(total / count)


@pytest.mark.slow
def test_bound_of_an_exact_model_is_the_entropy():
    """A mean over random masks, of 20,000 sentences: it is off by less than 1 %."""
    words = grammar.draw(20_000, seed=0)
    exact = grammar.entropy() / grammar.NUM_WORDS
    assert bound_of(grammar.ExactModel(), {}, words) == pytest.approx(exact, rel=0.01)


def test_rates_of_any_consecutive_rows_are_spread_evenly():
    """Random ones would leave larger gaps: of 64, one of about 5 / 64."""
    for first in (0, 1000, 2**32 - 10):
        positions = (np.arange(64) + first).astype(np.uint32)
        rates = mask_rates(jax.random.key(1), positions, np.ones((64, 1), np.int32))
        gaps = np.diff(np.sort(np.asarray(rates)[:, 0]), prepend=0, append=1)
        assert gaps.max() < 2 / 64
    # Those of a packed row differ, and 1 is reached, 0 is not.
    rates = mask_rates(jax.random.key(1), np.zeros(1, np.uint32), np.arange(1, 9)[None])
    assert len(set(np.asarray(rates)[0].tolist())) == 8
    every = mask_rates(jax.random.key(0), np.arange(1 << 20, dtype=np.uint32), np.ones((1, 1)))
    assert 0 < every.min() < 1e-5 and 1 - 1e-5 < every.max() <= 1


@pytest.mark.slow
def test_special_tokens_are_not_masked_and_each_number_of_others_as_often():
    rows = grammar.rows_of(grammar.draw(4096, seed=0))
    batch = jax.device_get(CASE.objective.prepare(rows, jax.random.key(0)))
    assert (batch["tokens"][:, [0, -1]] == rows["tokens"][:, [0, -1]]).all()
    np.testing.assert_array_equal(batch["targets"], rows["tokens"])
    is_masked = batch["tokens"] == MASK_ID
    np.testing.assert_array_equal(batch["target_weights"], is_masked)
    num_masked = is_masked.sum(axis=1)
    assert np.abs(np.bincount(num_masked, minlength=5) - [0, *[1024] * 4]).max() <= 2
    np.testing.assert_allclose(batch["target_factors"].max(axis=1), 4 / num_masked)
    # All sets of two places are as frequent, within five standard deviations.
    sets = np.unique(is_masked[num_masked == 2], axis=0, return_counts=True)[1]
    assert len(sets) == 6 and np.abs(sets - 1024 / 6).max() < 60


def test_masks_depend_on_row_epoch_and_place_in_the_stream_alone():
    rows = grammar.rows_of(grammar.draw(32, seed=0))
    prepare, key = jax.jit(CASE.objective.prepare), jax.random.key(0)
    tokens = np.asarray(prepare(rows, key)["tokens"])
    order = np.random.default_rng(0).permutation(32)
    shuffled = {name: values[order] for name, values in rows.items()}
    np.testing.assert_array_equal(prepare(shuffled, key)["tokens"], tokens[order])
    for name in ("epochs", "row_ids", "stream_positions"):
        assert (prepare(rows | {name: rows[name] + 1}, key)["tokens"] != tokens).any(), name


@pytest.mark.slow
def test_mask_is_never_predicted():
    class Constant(grammar.ExactModel):
        def predict_tokens(self, batch, positions):
            return jnp.zeros((*positions.shape, grammar.VOCAB)).at[..., MASK_ID].set(100.0)

    bound = bound_of(Constant(), {}, grammar.draw(64, seed=0))
    # All others are as probable, and so are all masks: there is no chance in it.
    assert bound == pytest.approx(np.log(grammar.VOCAB - 1), rel=1e-5)


@pytest.mark.parametrize(
    ("has_mask", "next_sentence", "message"),
    [(False, False, r"no \[MASK\]"), (True, True, "set config.next_sentence=False")],
)
def test_a_run_that_it_does_not_fit_is_a_clear_error(has_mask, next_sentence, message):
    tokenizer = types.SimpleNamespace(mask_id=4 if has_mask else None, special_ids=SPECIAL_IDS)
    config = types.SimpleNamespace(next_sentence=next_sentence)
    with pytest.raises(ValueError, match=message):
        MaskedDiffusion.from_config(config, tokenizer, 8)


@pytest.mark.exhaustive
def test_a_masked_lm_is_trained_further_and_generates(corpus, tmp_path):
    """Its held-out score depends neither on devices nor on the batches of an evaluation."""
    pretrain.train_and_evaluate(small_config(corpus, num_steps=2), tmp_path / "mlm")
    fields = {"objective": "masked_diffusion", "next_sentence": False, "num_steps": 2}
    fields |= {"init_from": str(tmp_path / "mlm"), "eval_every": 0, "checkpoint_every": 2}
    result = pretrain.train_and_evaluate(small_config(corpus, **fields), tmp_path / "run")
    assert result["perplexity"] == pytest.approx(np.exp(result["diffusion_loss"]))
    fields |= {"eval_batch_size": 24, "per_device_batch_size": 1, "mesh": {"fsdp": 2}}
    again = pretrain.train_and_evaluate(small_config(corpus, **fields), tmp_path / "again")
    assert again["diffusion_loss"] == pytest.approx(result["diffusion_loss"], rel=1e-4)
    model = bert_jax.load(tmp_path / "run")
    assert set(model.params) == {"encoder", "mlm"}
    text = model.generate("the king [MASK] the river", 2)
    assert text.startswith("the king") and " the river" in text
