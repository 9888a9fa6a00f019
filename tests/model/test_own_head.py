"""A head in a user's own file is trained, saved and loaded, predicts, and is exported.

It needs no edit in the package. The file also has the task that reads examples for the head.
"""

import dataclasses
import sys

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest

import bert_jax
from bert_jax import finetune, predict
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.read import read_model
from bert_jax.configs.finetune import text_classification as config_file
from bert_jax.model import heads
from bert_jax.model.dropout import as_dropout, dropout_at
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.layers import cross_entropy
from bert_jax.model.task_models import dense_head
from bert_jax.tasks import text_classification
from tests.helpers.corpora import WORDS, write_vocabulary
from tests.helpers.json_lines import read_lines
from tests.helpers.models import write_weights
from tests.suites import heads as suite

pytestmark = pytest.mark.usefixtures("two_devices")


class ManyDropoutsModel(nn.Module):
    """A classifier that trains on the mean over several dropout masks (Inoue, 2019)."""

    config: object
    num_outputs: int
    plan: ExecutionPlan = ExecutionPlan()

    def setup(self):
        self.encoder = Encoder(self.config, self.plan)
        self.head = dense_head(self.config, self.num_outputs)

    def __call__(self, batch, dropout=None):
        dropout = as_dropout(self, dropout, len(batch["tokens"]))
        x = self.encoder(batch, dropout, positions=batch["pooled_positions"])
        x = self.encoder.pool(x)
        places = ("first", "second", "third", "fourth")
        return sum(self.head(dropout_at(dropout, place, x)) for place in places) / 4


class Scaled(ManyDropoutsModel):
    """Has the same parameters, and other outputs."""

    def __call__(self, batch, dropout=None):
        return 5 * super().__call__(batch, dropout)


def focal_loss(outputs, rows):
    """Lin et al. (2017) with gamma = 2: the cross-entropy, less of what is known well."""
    losses, _ = cross_entropy(outputs, rows["labels"])
    return jnp.square(1 - jnp.exp(-losses)) * losses


HEAD = dataclasses.replace(
    heads.CLASSIFICATION,
    name=__name__,
    loss=focal_loss,
    module=ManyDropoutsModel,
    lstm_module=None,
)


def get_task(config, tokenizer):
    return dataclasses.replace(text_classification.get_task(config, tokenizer), head=HEAD)


PREDICT_OPTIONS = text_classification.PREDICT_OPTIONS
get_predictor = text_classification.get_predictor


def mean_focal_loss(outputs, labels) -> float:
    losses = suite.nats(np.stack(outputs), labels)
    return np.mean((1 - np.exp(-losses)) ** 2 * losses)


CASE = suite.HeadCase(
    {"task": __name__, "labels": ["no", "maybe", "yes"]},
    suite.CASES["classification"].features,
    mean_focal_loss,
)


@pytest.mark.parametrize("holds", suite.HEAD)
def test_head(holds, tmp_path):
    holds(CASE, tmp_path)


@pytest.mark.slow
def test_a_run_trains_it_and_all_that_loads_it_predicts_the_same(tmp_path, monkeypatch):
    texts = [" ".join(WORDS[n : n + 3 + n % 4]) for n in range(16)]
    labels = [("north", "south")[n % 2] for n in range(16)]
    lines = [f"{text},{label}\n" for text, label in zip(texts, labels, strict=True)]
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(lines))
    config = config_file.get_config()
    config.task, config.class_weights = __name__, ("balanced",)
    config.init_from = str(
        write_weights(tmp_path / "weights", write_vocabulary(tmp_path / "v.txt"))
    )
    config.data.train = config.data.dev = str(tmp_path / "train.csv")
    config.update({"max_seq_length": 16, "batch_size": 8, "num_epochs": 1.0})
    result = finetune.train_and_evaluate(config.lock(), tmp_path / "run")
    assert set(result["dev"]) >= {"accuracy", "macro_f1", "matthews", "loss"}
    model = bert_jax.load(tmp_path / "run")
    assert model.head["task"] == __name__
    assert isinstance(model.module, ManyDropoutsModel)

    expected = [dict(best) for best in model.classify(texts, top_k=2)]
    scores = predict.predict(tmp_path / "run", tmp_path / "train.csv", tmp_path / "found.jsonl")
    assert scores["found.jsonl"]["accuracy"] == result["dev"]["accuracy"]
    found = [line["probabilities"] for line in read_lines(tmp_path / "found.jsonl")]
    assert found == [pytest.approx(each, abs=1e-5) for each in expected]

    saved = read_model(tmp_path / "run")
    save_huggingface(tmp_path / "exported", saved.params, saved.settings, saved.tokenizer)
    exported = bert_jax.load(tmp_path / "exported")
    assert isinstance(exported.module, ManyDropoutsModel)
    found = [dict(best) for best in exported.classify(texts, top_k=2)]
    assert found == [pytest.approx(each, abs=1e-5) for each in expected]

    # The parameters of a class of transformers do not make a module compute the same.
    monkeypatch.setattr(sys.modules[__name__], "HEAD", dataclasses.replace(HEAD, module=Scaled))
    with pytest.raises(ValueError, match=r"computes other outputs"):
        save_huggingface(tmp_path / "other", saved.params, saved.settings, saved.tokenizer)
    assert not (tmp_path / "other").exists()
    copied = dataclasses.replace(HEAD, name="classification")
    monkeypatch.setattr(sys.modules[__name__], "HEAD", copied)
    with pytest.raises(ValueError, match=r"than classification, .* give it a name of its own"):
        finetune.train_and_evaluate(config, tmp_path / "copied")


def test_a_loss_of_its_own_is_not_replaced_by_that_of_standardized_labels():
    own = dataclasses.replace(heads.REGRESSION, name=__name__, loss=focal_loss)
    with pytest.raises(ValueError, match=r"loss of its own"):
        heads.with_target_std(own, 2.0)


def test_a_head_that_is_not_found_is_an_error():
    with pytest.raises(ValueError, match=r"no head for 'tags'"):
        heads.find_head({"task": "tags", "labels": []})
    with pytest.raises(ValueError, match=r"needs the module 'this\.is_not_imported'"):
        heads.find_head({"task": "this.is_not_imported", "labels": []})
