"""ESM: its model config, `config.json`, token dropout, and a run from FASTA to a loaded classifier.

`tests/parity/test_families.py` and `test_esm.py` there compare its arithmetic with transformers.
"""

import importlib
import json
import random

import jax
import numpy as np
import pytest

import bert_jax
from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_jax import finetune, pretrain
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.huggingface import config_from_huggingface
from bert_jax.checkpoints.parameters import model_settings
from bert_jax.configs.finetune import text_classification
from bert_jax.configs.pretrain import esm2_8m
from bert_jax.model.encoder import Encoder
from bert_jax.model.esm import EsmConfig, share_of_others
from bert_jax.model.esm_names import config_from_json, config_to_json
from bert_jax.tokenizers.tokenizer import load_tokenizer
from bert_jax.training.pretrain_setup import make_model_config
from tests.helpers.corpora import write_esm_vocabulary
from tests.helpers.models import assert_trees_equal, batch_of_row, random_params, small_esm_config
from tests.helpers.runs import saved_params, stopped_after_save


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"hidden_size": 36, "num_heads": 12}, r"hidden_size \(36\) must be a multiple of 24"),
        ({"hidden_size": 36, "num_heads": 8, "positions": "learned"}, r"hidden_size \(36\)"),
        ({"positions": "absolute"}, "positions is 'absolute'"),
        ({"mask_id": 33}, "mask_id is 33"),
        ({"rope_base": 0.0}, "rope_base"),
        ({"dropout_rate": 1.0}, "dropout_rate"),
    ],
)
def test_invalid_model_config_is_an_error(fields, message):
    with pytest.raises(ValueError, match=f"EsmConfig.{message}"):
        EsmConfig(**fields)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_folding_model": True}, "is_folding_model is True, expected False"),
        ({"is_decoder": True}, "is_decoder is True, expected False"),
        ({"pad_token_id": 0}, "pad_token_id is 0, expected 1"),
        ({"token_dropout": True}, "token_dropout needs mask_token_id"),
        ({"token_dropout": 1}, "token_dropout is 1, expected true or false"),
        ({"head_dim": 8}, "head_dim is 8"),
        ({"hidden_size": "768"}, "hidden_size is '768'"),
        ({"num_attention_heads": 7}, r"hidden_size \(768\)"),
    ],
)
def test_config_json_with_an_unsupported_switch_is_an_error(values, message):
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
        config_from_json(values)


@pytest.mark.parametrize("size", ["8m", "esm-1b"])
def test_model_config_is_the_same_after_config_json(size):
    config = EsmConfig.named(size, num_layers=3)
    values = config_to_json(config)
    assert values["max_position_embeddings"] == 1026
    assert config_from_huggingface(values) == EsmConfig(
        **vars(config) | {"attention_dropout_rate": 0.0}
    )


def test_rate_that_transformers_does_not_have_is_logged(caplog):
    assert config_to_json(EsmConfig(classifier_dropout_rate=0.3)) == config_to_json(EsmConfig())
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("not exported: classifier_dropout_rate=0.3; transformers has")


@pytest.mark.slow
def test_share_of_masks_is_that_of_each_sequence_of_a_row():
    is_mask = np.array([[0, 1, 0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]], bool)
    position_ids = np.array([[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 0, 1, 2, 3, 4, 5]])
    expected = [[3 / 4] * 4 + [1 / 3] * 3 + [1], [1 / 2] * 2 + [1] * 6]  # At least one.
    np.testing.assert_allclose(share_of_others(is_mask, position_ids), expected, rtol=1e-6)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_packed_sequences_have_the_states_of_each_alone(positions):
    """Masks in one do not scale the other; positions and rotations begin anew."""
    config = small_esm_config(positions=positions, max_position_embeddings=8)
    encoder, tokens = Encoder(config), np.arange(7, 17, dtype=np.int32)[None]
    tokens[0, [2, 3, 8]] = config.mask_id
    packed = batch_of_row(tokens)
    packed["sequence_ids"] = np.array([[1] * 6 + [2] * 4])
    packed["position_ids"] = np.array([[*range(6), *range(4)]])
    params, apply = random_params(encoder, packed), jax.jit(encoder.apply)
    states = apply({"params": params}, packed)[0]
    for part in (slice(6), slice(6, 10)):
        alone = apply({"params": params}, batch_of_row(tokens[:, part]))[0]
        np.testing.assert_allclose(states[part], alone, atol=1e-5)
    params["embeddings"]["token_embedding"]["embedding"][config.mask_id] = 7.0  # It has no effect.
    np.testing.assert_array_equal(apply({"params": params}, packed)[0], states)


@pytest.mark.slow
def test_frequencies_of_rotations_are_constant():
    config = small_esm_config()
    encoder, batch = Encoder(config), batch_of_row(np.arange(4, 12, dtype=np.int32)[None])
    params = jax.jit(encoder.init)(jax.random.key(0), batch)["params"]
    found = params["layer_inputs"]["frequencies"]["scale"]
    np.testing.assert_allclose(found, [1, 0.1, 0.01, 0.001], rtol=1e-6)

    def loss(params):
        return encoder.apply({"params": params}, batch)[0, :, 0].sum()

    gradients = jax.jit(jax.grad(loss))(params)
    assert not np.any(gradients["layer_inputs"]["frequencies"]["scale"])


def test_its_configuration_has_its_sizes():
    config = esm2_8m.get_config()
    assert make_model_config(config, 33) == EsmConfig()
    config.model.size = "esm-1b"
    assert make_model_config(config, 33) == EsmConfig.named("esm-1b")


def write_proteins(path) -> None:
    """Writes random proteins, one in a line."""
    rng = random.Random(0)
    lines = ("".join(rng.choices("LAGVSERTIDPKQNFYMHWC", k=rng.randint(5, 90))) for _ in range(200))
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.exhaustive
def test_proteins_are_trained_on_finetuned_loaded_and_exported(tmp_path):
    """A random model in transformers' format is trained on, as one that was downloaded is."""
    write_esm_vocabulary(tmp_path / "tokenizer")
    tokenizer, config = load_tokenizer(tmp_path / "tokenizer"), small_esm_config()
    batch = batch_of_row(np.zeros((1, 2), np.int32))
    params = {"encoder": random_params(Encoder(config), batch, std=0.1)}
    save_huggingface(tmp_path / "esm", params, model_settings(config, params), tokenizer)
    write_proteins(tmp_path / "proteins.txt")
    settings = CorpusConfig(
        rows="single_segments",
        documents="lines",
        sentences="lines",
        max_seq_length=64,
        heldout_fraction=0.2,
        block_rows=16,
    )
    proteins = str(tmp_path / "proteins.txt")
    build_corpus(proteins, tokenizer, tmp_path / "corpus", settings, num_processes=1)

    config = importlib.import_module("bert_jax.configs.pretrain.continue").get_config("runlocal")
    config.init_from, config.corpus = str(tmp_path / "esm"), str(tmp_path / "corpus")
    config.next_sentence, config.model.dropout_rate, config.num_steps = False, 0.0, 6
    config.checkpoint_every = 2
    pretrain.train_and_evaluate(config.lock(), tmp_path / "pretrained")
    with stopped_after_save(pretrain):
        pretrain.train_and_evaluate(config, tmp_path / "resumed")
    pretrain.train_and_evaluate(config, tmp_path / "resumed")
    resumed, whole = (saved_params(tmp_path / name) for name in ("resumed", "pretrained"))
    assert_trees_equal(resumed, whole)
    model = bert_jax.load(tmp_path / "pretrained")
    before, after = params["encoder"], whole["encoder"]
    unchanged = before["layer_inputs"]["frequencies"]["scale"]
    np.testing.assert_array_equal(after["layer_inputs"]["frequencies"]["scale"], unchanged)
    fills = model.fill_mask("MKT<mask>LLV", top_k=3)
    assert all(fill.text == f"MKT{fill.token}LLV" for fill in fills)
    save_huggingface(tmp_path / "mlm", model.params, model.settings, model.tokenizer)
    assert bert_jax.load(tmp_path / "mlm").fill_mask("MKT<mask>LLV", top_k=3) == fills
    values = json.loads((tmp_path / "mlm/config.json").read_text())
    assert values["architectures"] == ["EsmForMaskedLM"] and values["mask_token_id"] == 32

    (tmp_path / "train.csv").write_text("text,label\n" + "MKTLLV,a\nGGSAP,b\n" * 8)
    config = text_classification.get_config()
    config.init_from = str(tmp_path / "pretrained")
    config.data.train = config.data.dev = str(tmp_path / "train.csv")
    config.max_seq_length, config.batch_size, config.num_epochs = 16, 8, 1.0
    finetune.train_and_evaluate(config.lock(), tmp_path / "run")
    classifier = bert_jax.load(tmp_path / "run")
    probability = classifier.classify("MKTLLV").probability
    save_huggingface(
        tmp_path / "exported", classifier.params, classifier.settings, classifier.tokenizer
    )
    again = bert_jax.load(tmp_path / "exported").classify("MKTLLV").probability
    assert abs(again - probability) < 1e-6
