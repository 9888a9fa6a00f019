"""An objective in a user's own file trains, without an edit in the package."""

import dataclasses
import functools
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import bert_jax
from bert_jax import pretrain
from bert_jax.data.features import unpack_rows
from bert_jax.data.masking import row_keys
from bert_jax.model.architecture import architecture_of
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.layers import cross_entropy
from bert_jax.training.phases import open_phases
from bert_jax.training.pretrain_setup import setup_pretraining
from tests.helpers.corpora import build_small_corpus, write_vocabulary
from tests.helpers.runs import small_config
from tests.suites import objectives as suites

pytestmark = pytest.mark.usefixtures("two_devices")


class ShuffleModel(nn.Module):
    """An encoder with one binary output for each position."""

    config: object
    plan: ExecutionPlan = ExecutionPlan()

    def setup(self):
        self.encoder = Encoder(self.config, self.plan)
        self.shuffled = nn.Dense(2, dtype=jnp.float32)

    def __call__(self, batch, dropout=None):
        return self.shuffled(self.encoder(batch, dropout))


@dataclasses.dataclass(frozen=True)
class WasShuffled:
    """Predicts which tokens were replaced by their left neighbor."""

    causal: ClassVar[bool] = False
    main_loss: ClassVar[str] = "shuffled_loss"
    main_accuracy: ClassVar[str] = "shuffled_accuracy"
    rules: ClassVar[tuple] = ((r"shuffled/kernel$", P()), (r"shuffled/bias$", P("tensor")))

    @staticmethod
    def max_predictions(config, given, length):
        return length

    @classmethod
    def from_config(cls, config, tokenizer, max_predictions):
        return cls()

    def make_model(self, model_config, plan):
        return ShuffleModel(model_config, plan)

    def prepare(self, rows, key):
        batch = unpack_rows(rows)
        # By row: each device prepares its own rows.
        keys = row_keys(key, rows["row_ids"], rows["epochs"])
        draw = functools.partial(jax.random.bernoulli, p=0.3, shape=batch["tokens"].shape[1:])
        is_replaced = jax.vmap(draw)(keys)
        tokens = jnp.where(is_replaced, jnp.roll(batch["tokens"], 1, axis=1), batch["tokens"])
        weights = (batch["sequence_ids"] > 0).astype(jnp.float32)
        return batch | {"tokens": tokens, "replaced": is_replaced, "weights": weights}

    def counts(self, batch):
        return {"shuffled_loss": jnp.maximum(jnp.sum(batch["weights"]), 1)}

    def total_loss(self, losses):
        return losses["shuffled_loss"]

    def sums(self, model, params, batch, dropout=None):
        logits = model.apply({"params": params}, batch, dropout)
        losses, correct = cross_entropy(logits, batch["replaced"].astype(jnp.int32))
        count = jnp.sum(batch["weights"])
        return {
            "shuffled_loss": (jnp.sum(losses * batch["weights"]), count),
            "shuffled_accuracy": (jnp.sum(correct * batch["weights"]), count),
        }

    def flops_per_row(self, model_config, length, max_sequences):
        forward = architecture_of(model_config).flops_per_row(
            model_config, length, num_outputs=length, num_targets=0, num_pairs=0
        )
        return 3 * (forward + 4 * length * model_config.hidden_size)


Objective = WasShuffled


def reference(model, params, batch):
    logits = jax.jit(model.apply)({"params": params}, batch)
    return suites.cross_entropy("shuffled", logits, batch["replaced"] * 1, batch["weights"])


CASE = suites.ObjectiveCase(WasShuffled(), suites.make_config(), {"shuffled_loss": 1.0}, reference)


@pytest.mark.parametrize("holds", suites.OBJECTIVE)
def test_objective(holds, tmp_path):
    holds(CASE, tmp_path)


@pytest.mark.slow
def test_a_run_trains_and_evaluates_it(tmp_path):
    corpus = build_small_corpus(tmp_path / "corpus", write_vocabulary(tmp_path / "vocab.txt"))
    config = small_config(corpus, objective=__name__)
    phases = open_phases(config)
    setup = setup_pretraining(config, phases, phases[0].train.tokenizer)
    # BERT's rules have one for every bias, but the objective's come first.
    assert setup.shardings.params["shuffled"]["bias"].spec == P("tensor")
    result = pretrain.train_and_evaluate(config, tmp_path / "run")
    model = bert_jax.load(tmp_path / "run")  # Its own head is there, too.
    assert set(model.params) == {"encoder", "shuffled"} and model.encode("the river").ndim == 1
    batch = model.batch("the river")
    logits = ShuffleModel(model.config, model.plan).apply({"params": model.params}, batch)
    assert logits.shape == (*batch["tokens"].shape, 2)
    assert 0 < result["shuffled_accuracy"] <= 1
    assert result["perplexity"] == pytest.approx(np.exp(result["shuffled_loss"]))
