"""The sides of the benchmarks compute the same: KerasHub on our weights (`make keras-parity`)."""

import dataclasses
import importlib
import importlib.util

import jax
import numpy as np
import pytest

from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.parameters import model_settings
from bert_jax.checkpoints.read import read_model
from bert_jax.model.architecture import config_from_settings
from bert_jax.model.config import BertConfig
from bert_jax.model.encoder import Encoder
from bert_jax.tokenizers.tokenizer import load_tokenizer
from bert_jax.training.optimizer import make_optimizer
from tests.helpers.corpora import write_vocabulary
from tests.helpers.models import write_random_encoder

if importlib.util.find_spec("keras_hub") is None:
    pytest.skip("needs the environment .venv-keras", allow_module_level=True)

keras_side = importlib.import_module("benchmarks.keras_side")  # First sets Keras's backend.


def test_hidden_states_of_the_backbone_equal_ours(tmp_path):
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    model = read_model(write_random_encoder(tmp_path / "native", tokenizer))
    config = config_from_settings(model.settings)
    config = dataclasses.replace(config, activation="gelu_tanh")  # As in KerasHub.
    settings = model_settings(config, model.params)
    save_huggingface(tmp_path / "exported", model.params, settings, tokenizer)
    backbone = keras_side.keras_hub.models.BertBackbone.from_preset(str(tmp_path / "exported"))

    rng = np.random.default_rng(1)
    lengths, length = np.array([[40], [13]]), 40
    tokens = rng.integers(5, tokenizer.vocab_size, (2, length))
    segment_ids = (np.arange(length) >= lengths // 2).astype(int)
    mask = (np.arange(length) < lengths).astype(int)
    theirs = backbone(
        {"token_ids": tokens, "segment_ids": segment_ids, "padding_mask": mask}, training=False
    )
    batch = {
        "tokens": tokens,
        "segment_ids": segment_ids,
        "position_ids": np.tile(np.arange(length), (2, 1)),
        "sequence_ids": mask,
    }
    ours = np.array(Encoder(config).apply({"params": model.params["encoder"]}, batch))
    real = mask == 1
    assert np.std(ours[real]) > 0.1
    np.testing.assert_allclose(np.array(theirs["sequence_output"])[real], ours[real], atol=1e-5)


def test_update_of_adamw_equals_ours():
    rng = np.random.default_rng(2)
    names = {"layers/query/kernel": "query/kernel", "layers/layer_norm/scale": "layer_norm/gamma"}
    values = {name: rng.normal(size=(4, 3)).astype(np.float32) for name in names}
    variables = [
        keras_side.keras.Variable(values[ours], name=theirs.replace("/", "_"))
        for ours, theirs in names.items()
    ]
    theirs = keras_side.make_optimizer(1e-2)
    theirs.build(variables)
    ours = make_optimizer("adamw", lambda step: 1e-2)
    params = {"layers": {"query": {"kernel": values["layers/query/kernel"]}}}
    params["layers"]["layer_norm"] = {"scale": values["layers/layer_norm/scale"]}
    state = ours.init(params)
    for _ in range(5):
        gradients = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)
        kernel = gradients["layers"]["query"]["kernel"]
        theirs.apply([kernel, gradients["layers"]["layer_norm"]["scale"]], variables)
        updates, state = ours.update(gradients, state, params)
        params = jax.tree.map(np.add, params, updates)
    # Keras adds epsilon before it corrects the bias: 1e-5. Decay is 5e-4, the update 5e-2.
    kernel, scale = params["layers"]["query"]["kernel"], params["layers"]["layer_norm"]["scale"]
    np.testing.assert_allclose(variables[0].numpy(), kernel, atol=5e-5)
    np.testing.assert_allclose(variables[1].numpy(), scale, atol=5e-5)


def test_pretraining_step_of_keras_hub_learns_its_batch():
    config = BertConfig.named("tiny", vocab_size=64, num_layers=1)
    tokens = np.random.default_rng(3).integers(5, 64, (2, 8), np.int32)
    rows = {
        "tokens": tokens,
        "segment_ids": np.zeros_like(tokens),
        "mlm_positions": np.tile(np.int32([1, 4]), (2, 1)),
        "mlm_targets": tokens[:, [1, 4]],
    }
    keras_side.keras.utils.set_random_seed(0)
    step = keras_side.pretrain_step(config, rows, "float32")
    losses = [step() for _ in range(30)]
    assert losses[-1] < losses[0]
