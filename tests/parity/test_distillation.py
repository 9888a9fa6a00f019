"""Distillation against torch: its losses, and the students of both recipes in transformers."""

import importlib
import types

import jax
import numpy as np
import pytest

import bert_jax
from bert_jax import pretrain
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.parameters import model_settings
from bert_jax.checkpoints.read import read_model
from bert_jax.model.encoder import Encoder
from bert_jax.objectives import mean_metrics
from bert_jax.objectives.distillation import Distillation
from bert_jax.objectives.masked_lm import PretrainingModel
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import build_small_corpus
from tests.helpers.models import batch_of_row, example_batch, small_model_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def test_losses_of_distilbert_equal_torch():
    """With torch's losses, as in the authors' `distiller.py`."""
    rng, weights = np.random.default_rng(0), {"soft": 5.0, "mlm": 2.0, "cosine": 1.0}
    objective = Distillation(types.SimpleNamespace(), weights, temperature=2.0)
    student, teacher = (
        {
            "mlm": rng.normal(0, 3, (3, 5, 40)).astype(np.float32),
            "cosine": rng.normal(0, 3, (3, 9, 7)).astype(np.float32),
        }
        for _ in range(2)
    )
    student["soft"], teacher["soft"] = student["mlm"], teacher["mlm"]
    lengths = np.array([9, 4, 6])
    batch = {
        "sequence_ids": (np.arange(9) < lengths[:, None]).astype(np.int32),
        "targets": rng.integers(0, 40, (3, 5)),
        "target_weights": (np.arange(5) < np.array([[5], [2], [3]])).astype(np.float32),
    }
    sums = objective.compare(student, teacher, batch)
    losses = {name: float(mean_metrics(sums)[f"{name}_loss"]) for name in weights}

    masked, real = batch["target_weights"] > 0, batch["sequence_ids"] > 0
    x, y = (torch.tensor(each["soft"][masked]) / 2 for each in (student, teacher))
    kl = torch.nn.KLDivLoss(reduction="batchmean")
    expected = {
        "soft": kl(x.log_softmax(-1), y.softmax(-1)) * 4,
        "mlm": torch.nn.CrossEntropyLoss()(2 * x, torch.tensor(batch["targets"][masked])),
        "cosine": torch.nn.CosineEmbeddingLoss()(
            *(torch.tensor(each["cosine"][real]) for each in (student, teacher)),
            torch.ones(int(real.sum())),
        ),
    }
    for name, loss in expected.items():
        assert losses[name] == pytest.approx(float(loss), rel=1e-5), name


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Returns the directories of a corpus and of a random teacher with 12 layers."""
    directory = tmp_path_factory.mktemp("teacher")
    corpus = build_small_corpus(directory, rows="full_sentences")
    tokenizer = load_tokenizer(corpus)
    sizes = {"hidden_size": 24, "num_layers": 12, "num_heads": 2, "intermediate_size": 32}
    config = small_model_config(tokenizer.vocab_size, **sizes)
    init = jax.jit(PretrainingModel(config).init)
    params = jax.device_get(init(jax.random.key(1), example_batch())["params"])
    write_checkpoint(directory / "model", params, model_settings(config, params), tokenizer)
    return corpus, directory / "model"


@pytest.mark.parametrize(
    ("name", "architecture"), [("distilbert", "DistilBertForMaskedLM"), ("tinybert", "BertModel")]
)
def test_student_loads_in_transformers(name, architecture, teacher, tmp_path):
    corpus, directory = teacher
    config = importlib.import_module(f"configs.pretrain.{name}").get_config("runlocal")
    config.corpus = config.long_phase.corpus = str(corpus)
    config.distillation.teacher = str(directory)
    config.model.update({"hidden_size": 24, "num_heads": 2, "intermediate_size": 32})
    config.model.max_position_embeddings = 64
    config.warmup_steps = config.num_steps and 2
    result = pretrain.train_and_evaluate(config.lock(), tmp_path / "run")
    losses = {"distilbert": "soft mlm cosine", "tinybert": "attention hidden embeddings"}[name]
    found = {each.removesuffix("_loss") for each in result if each.endswith("_loss")}
    assert found == set(losses.split())

    model = read_model(tmp_path / "run")
    save_huggingface(tmp_path / "exported", model.params, model.settings, model.tokenizer)
    load = getattr(transformers, architecture).from_pretrained
    torch_model, info = load(tmp_path / "exported", output_loading_info=True)
    # transformers adds a pooler to a BertModel, and the student has none.
    missing = {each for each in info["missing_keys"] if not each.startswith("pooler.")}
    assert not missing and not info["unexpected_keys"] and not info["mismatched_keys"]
    ids = np.array([[2, 9, 4, 11, 12, 3]])
    with torch.no_grad():
        outputs = torch_model.eval()(torch.tensor(ids), output_hidden_states=True)
    encoder = Encoder(bert_jax.load(tmp_path / "exported").config)
    states = encoder.apply({"params": model.params["encoder"]}, batch_of_row(ids))
    np.testing.assert_allclose(states, outputs.hidden_states[-1].numpy(), atol=1e-5)
