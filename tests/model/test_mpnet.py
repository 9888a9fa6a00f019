"""MPNet: its model config, `config.json`, and a run from pre-training to a loaded classifier.

`tests/parity/test_families.py` and `test_mpnet.py` there compare its arithmetic with transformers.
"""

import jax
import numpy as np
import pytest

import bert_jax
from bert_jax import finetune, pretrain
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.huggingface import config_from_huggingface
from bert_jax.configs.finetune import text_classification
from bert_jax.configs.pretrain import mpnet_base
from bert_jax.model import bert
from bert_jax.model.encoder import Encoder
from bert_jax.model.mpnet import MpnetConfig, bucket_of, flops_per_row
from bert_jax.model.mpnet_names import config_from_json, config_to_json
from bert_jax.training.pretrain_setup import make_model_config
from tests.helpers.corpora import build_small_corpus, write_vocabulary
from tests.helpers.models import (
    assert_trees_equal,
    batch_of_row,
    random_params,
    small_model_config,
    small_mpnet_config,
)
from tests.helpers.runs import saved_params, small_config, stopped_after_save


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"hidden_size": 36, "num_heads": 5}, r"hidden_size \(36\)"),
        ({"activation": "swish"}, "activation is 'swish'"),
        ({"layer_norm_epsilon": 0.0}, "layer_norm_epsilon"),
        ({"classifier_dropout_rate": 1.0}, "classifier_dropout_rate"),
    ],
)
def test_invalid_model_config_is_an_error(fields, message):
    with pytest.raises(ValueError, match=f"MpnetConfig.{message}"):
        MpnetConfig(**fields)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'"),
        ({"relative_attention_num_buckets": 64}, "relative_attention_num_buckets is 64"),
        ({"pad_token_id": 0}, "pad_token_id is 0, expected 1"),
        ({"hidden_size": "768"}, "hidden_size is '768'"),
        ({"num_attention_heads": 7}, r"hidden_size \(768\)"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_config_json_with_an_unsupported_switch_is_an_error(values, message):
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
        config_from_json(values)


def test_model_config_is_the_same_after_config_json():
    config = MpnetConfig(num_layers=3, activation="relu", dropout_rate=0.2)
    values = config_to_json(config)
    assert values["max_position_embeddings"] == 514
    again = config_from_huggingface(values)
    assert again == MpnetConfig(**vars(config) | {"attention_dropout_rate": 0.2})
    # That of all-mpnet-base-v2 differs from the defaults only in this.
    assert config_from_json({"max_position_embeddings": 514, "layer_norm_eps": 1e-5}) == (
        MpnetConfig(attention_dropout_rate=0.1, layer_norm_epsilon=1e-5)
    )


def test_rate_that_transformers_does_not_have_is_logged(caplog):
    values = config_to_json(MpnetConfig(classifier_dropout_rate=0.3))
    assert values == config_to_json(MpnetConfig())
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("not exported: classifier_dropout_rate=0.3; transformers has")


def test_buckets_of_distances():
    """Of keys before the query, and 16 more for those after it."""
    distances = [0, 1, 7, 8, 11, 12, 15, 16, 22, 23, 31, 32, 45, 46, 63, 64, 90, 91, 127, 128, 999]
    before = [0, 1, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15, 15, 15]
    assert bucket_of(-np.array(distances)).tolist() == before
    assert bucket_of(np.array(distances[1:])).tolist() == [16 + each for each in before[1:]]


def test_token_positions_begin_at_two_in_each_sequence_of_a_row():
    """Two packed sequences have the hidden states of each alone; the table has two more rows."""
    config = small_mpnet_config(max_position_embeddings=20)
    encoder, tokens = Encoder(config), np.arange(7, 17, dtype=np.int32)[None]
    packed = batch_of_row(tokens)
    packed["sequence_ids"] = np.array([[1] * 6 + [2] * 4])
    packed["position_ids"] = np.array([[*range(6), *range(4)]])
    params = random_params(encoder, packed)
    assert params["embeddings"]["position_embedding"]["embedding"].shape == (22, 32)
    apply = jax.jit(encoder.apply)
    states = apply({"params": params}, packed)[0]
    for part in (slice(6), slice(6, 10)):
        alone = apply({"params": params}, batch_of_row(tokens[:, part]))[0]
        np.testing.assert_allclose(states[part], alone, atol=1e-5)
    params["embeddings"]["position_embedding"]["embedding"][:2] = np.nan
    assert np.isfinite(apply({"params": params}, packed)).all()


def test_its_products_are_those_of_bert():
    sizes = {"length": 64, "num_outputs": 10, "num_targets": 10, "num_pairs": 2}
    expected = bert.flops_per_row(small_model_config(intermediate_size=48), **sizes)
    assert flops_per_row(small_mpnet_config(), **sizes) == expected


def test_its_configuration_has_its_sizes():
    config = mpnet_base.get_config()
    expected = MpnetConfig(vocab_size=30527, layer_norm_epsilon=1e-5)
    assert make_model_config(config, 30527) == expected


@pytest.mark.exhaustive
def test_it_is_pretrained_finetuned_loaded_and_exported(tmp_path):
    vocabulary = write_vocabulary(tmp_path / "vocab.txt", pad_id=1)
    config = small_config(build_small_corpus(tmp_path, vocabulary))
    with config.unlocked():
        sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
        config.model = {"architecture": "mpnet", "dropout_rate": 0.1, **sizes}
        config.mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    pretrain.train_and_evaluate(config, tmp_path / "pretrained")
    with stopped_after_save(pretrain):
        pretrain.train_and_evaluate(config, tmp_path / "resumed")
    pretrain.train_and_evaluate(config, tmp_path / "resumed")
    resumed, whole = (saved_params(tmp_path / name) for name in ("resumed", "pretrained"))
    assert_trees_equal(resumed, whole)
    model = bert_jax.load(tmp_path / "pretrained")
    assert isinstance(model.config, MpnetConfig) and len(model.fill_mask("the [MASK]")) == 5
    save_huggingface(tmp_path / "mlm", model.params, model.settings, model.tokenizer)
    assert bert_jax.load(tmp_path / "mlm").fill_mask("the [MASK]") == model.fill_mask("the [MASK]")

    (tmp_path / "train.csv").write_text("text,label\n" + "the river,a\na town,b\n" * 8)
    config = text_classification.get_config()
    config.init_from = str(tmp_path / "pretrained")
    config.data.train = config.data.dev = str(tmp_path / "train.csv")
    config.max_seq_length, config.batch_size, config.num_epochs = 16, 8, 1.0
    config.layer_decay = 0.9
    finetune.train_and_evaluate(config.lock(), tmp_path / "run")
    classifier = bert_jax.load(tmp_path / "run")
    before, after = (
        each.params["encoder"]["layer_inputs"]["distance_bias"] for each in (model, classifier)
    )
    assert np.abs(before - after).max() > 0
    probability = classifier.classify("the river").probability
    save_huggingface(
        tmp_path / "exported", classifier.params, classifier.settings, classifier.tokenizer
    )
    again = bert_jax.load(tmp_path / "exported").classify("the river").probability
    assert abs(again - probability) < 1e-6
