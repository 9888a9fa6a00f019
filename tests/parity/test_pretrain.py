"""Continued pre-training of released weights against transformers in torch (`make parity`)."""

import importlib
import json
import os
import pathlib

import jax
import numpy as np
import pytest

from bert_jax import pretrain
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.parameters import model_settings
from bert_jax.checkpoints.read import read_model
from bert_jax.data.batches import pretrain_batches
from bert_jax.sharding.mesh import batch_sharding
from bert_jax.training.phases import open_phases
from bert_jax.training.pretrain_setup import setup_pretraining
from tests.helpers.corpora import build_small_corpus


def test_two_steps_from_released_weights_start_from_the_loss_of_transformers(tmp_path):
    import torch
    import transformers

    if not (directory := os.environ.get("BERT_JAX_MINILM")):
        pytest.skip("BERT_JAX_MINILM is not set: `make parity` fetches the weights")
    vocabulary = pathlib.Path(directory) / "vocab.txt"
    corpus = build_small_corpus(tmp_path / "input", vocabulary, max_sequences=1)
    config = importlib.import_module("bert_jax.configs.pretrain.continue").get_config("runlocal")
    config.init_from, config.corpus = directory, str(corpus)
    config.num_steps, config.log_every, config.model.dropout_rate = 2, 1, 0.0
    pretrain.train_and_evaluate(config, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    actual = [json.loads(line) for line in lines]

    # The encoder of the weights under the run's own fresh heads, and the run's first batch.
    source, (phase,) = read_model(directory), open_phases(config)
    assert set(source.params) == {"encoder"}
    setup = setup_pretraining(config, [phase], source.tokenizer, source_settings=source.settings)
    key = jax.random.key(config.seed)
    params = jax.device_get(setup.init(key, pretrained=source.params).params)
    settings = model_settings(setup.model.config, params)
    save_huggingface(tmp_path / "start", params, settings, source.tokenizer)
    reference = transformers.BertForPreTraining.from_pretrained(tmp_path / "start").eval()
    (rows,) = pretrain_batches(phase.train, batch_sharding(setup.mesh), 8, 0, 1)
    batch = setup.phases[0].objective.prepare(rows, jax.random.split(key)[0])
    batch = {name: torch.tensor(np.asarray(values)).long() for name, values in batch.items()}
    with torch.no_grad():
        outputs = reference(
            input_ids=batch["tokens"],
            token_type_ids=batch["segment_ids"],
            attention_mask=batch["sequence_ids"] > 0,
        )
    logits = torch.take_along_dim(
        outputs.prediction_logits, batch["target_positions"][:, :, None], 1
    )
    used = batch["target_weights"] > 0
    expected = {
        "mlm_loss": torch.nn.functional.cross_entropy(logits[used], batch["targets"][used]),
        "nsp_loss": torch.nn.functional.cross_entropy(
            outputs.seq_relationship_logits, batch["nsp_labels"][:, 0]
        ),
    }
    for name, value in expected.items():
        print(f"{name}: {actual[0][f'train/{name}']:.6f}, in transformers {float(value):.6f}")
        assert actual[0][f"train/{name}"] == pytest.approx(float(value), abs=1e-5)
    assert actual[1]["train/loss"] != actual[0]["train/loss"]
