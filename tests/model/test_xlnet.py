"""XLNet: its model config, `config.json`, segments, long rows, and a run from start to export.

`tests/parity/test_xlnet.py` compares its arithmetic with transformers, and
`tests/objectives/test_permutation.py` its two streams with the formulas of the paper.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bert_jax
from bert_corpus.vocabulary import train_vocabulary
from bert_jax import finetune, pretrain
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.configs.finetune import text_classification
from bert_jax.configs.pretrain import xlnet_base
from bert_jax.data.features import check_layout, unpack_rows
from bert_jax.inference.pretrained_model import PretrainedModel
from bert_jax.model.dropout import Dropout
from bert_jax.model.encoder import Encoder
from bert_jax.model.task_models import VectorModel
from bert_jax.model.xlnet import LayerInputs, XlnetConfig, encoder_layers, flops_per_row
from bert_jax.model.xlnet_names import config_from_json, config_to_json
from bert_jax.objectives.distillation import Distillation
from bert_jax.objectives.masked_diffusion import MaskedDiffusion
from bert_jax.objectives.masked_lm import MaskedLm
from bert_jax.objectives.replaced_tokens import ReplacedTokens
from bert_jax.objectives.span_boundary import SpanBoundary
from bert_jax.tokenizers.stored import Layout
from bert_jax.tokenizers.tokenizer import load_tokenizer
from bert_jax.training.pretrain_setup import check_stream
from tests.helpers.corpora import (
    build_small_corpus,
    random_text,
    with_layout,
    write_vocabulary,
)
from tests.helpers.models import assert_trees_equal, random_params, small_xlnet_config
from tests.helpers.runs import saved_params, stopped_after_save


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"hidden_size": 36, "num_heads": 8}, r"hidden_size \(36\)"),
        ({"hidden_size": 9, "num_heads": 3}, r"hidden_size \(9\)"),
        ({"max_distance": -1}, "max_distance"),
        ({"activation": "swish"}, "activation is 'swish'"),
        ({"dropout_rate": 1.0}, "dropout_rate"),
    ],
)
def test_invalid_model_config_is_an_error(fields, message):
    with pytest.raises(ValueError, match=f"XlnetConfig.{message}"):
        XlnetConfig(**fields)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bi_data": True}, "bi_data is True, expected False"),
        ({"same_length": True}, "same_length is True"),
        ({"attn_type": "tri"}, "attn_type is 'tri'"),
        ({"summary_type": "first"}, "summary_type is 'first'"),
        ({"summary_use_proj": False}, "summary_use_proj is False"),
        ({"summary_first_dropout": 0.1}, "summary_first_dropout is 0.1, expected 0"),
        ({"summary_activation": None}, "summary_activation is None"),
        ({"d_head": 32}, "d_head is 32, expected 64"),
        ({"ff_activation": "quick_gelu"}, "ff_activation is 'quick_gelu'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"clamp_len": "4"}, "clamp_len is '4'"),
        ({"architectures": ["XLNetForQuestionAnswering"]}, "XLNetForQuestionAnswering, whose head"),
    ],
)
def test_config_json_with_an_unsupported_switch_is_an_error(values, message):
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
        config_from_json(values)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_distance": 20, "causal": True},
        {"activation": "gelu_tanh", "pooler_activation": "relu", "dropout_rate": 0.0},
    ],
    ids=str,
)
def test_model_config_is_the_same_after_config_json(fields):
    config = XlnetConfig(**fields)
    again = config_from_json(config_to_json(config))
    assert vars(again) == vars(config) | {"classifier_dropout_rate": config.dropout_rate}


def test_keys_that_config_json_lacks_have_the_defaults_of_transformers():
    config = config_from_json({"mem_len": 384, "untie_r": False, "reuse_len": 256})
    assert [getattr(config, name) for name in config.size_fields] == [24, 1024, 16, 4096]
    assert config_from_json({"hidden_size": 64, "num_attention_heads": 2}).hidden_size == 64
    assert XlnetConfig.named("large", vocab_size=9).hidden_size == 1024
    with pytest.raises(ValueError, match="unknown model size 'huge'"):
        XlnetConfig.named("huge")


@pytest.mark.parametrize(
    ("stated", "length"), [(None, 512), (384, 512), (2048, 2048), (int(1e30), 512)]
)
def test_the_tokenizer_may_state_more_than_512_tokens(stated, length):
    assert config_from_json({"model_max_length": stated}).max_position_embeddings == length


def test_a_tokenizer_with_another_place_for_cls_is_refused():
    names = {"cls_id": 3, "id_to_token": lambda index: "<cls>"}
    tokenizers = [
        types.SimpleNamespace(layout=layout, **names)
        for layout in (Layout(), Layout(cls_last=True))
    ]
    check_layout(XlnetConfig(), tokenizers[1])
    with pytest.raises(ValueError, match="xlnet expects <cls> last in a sequence, where the"):
        check_layout(XlnetConfig(), tokenizers[0])
    with pytest.raises(ValueError, match="own expects <cls> first in a sequence"):
        check_layout(types.SimpleNamespace(architecture="own"), tokenizers[1])


@pytest.mark.parametrize(
    "objective", [MaskedLm, SpanBoundary, MaskedDiffusion, ReplacedTokens, Distillation]
)
def test_an_objective_that_would_train_the_head_on_the_content_stream_is_refused(objective):
    with pytest.raises(ValueError, match=r"config\.objective=permutation"):
        check_stream("of_masks", objective, XlnetConfig())


def test_pooling_the_first_token_as_cls_is_refused():
    config, rows = small_xlnet_config(), unpacked(np.arange(5, 9)[None], [0, 4, 4])
    with pytest.raises(ValueError, match="pooling is 'cls', but the first token of this model is"):
        VectorModel(config, ("cls",)).init(jax.random.key(0), rows)


def unpacked(tokens, *bounds) -> dict:
    bounds = np.array([bounds], np.int32)
    return unpack_rows({"tokens": np.asarray(tokens, np.int32), "sequence_bounds": bounds})


def test_cls_and_the_second_text_are_segments_of_their_own():
    """What a position knows of another segment is only that it is another."""
    config = small_xlnet_config(num_layers=1)
    encoder, tokens = Encoder(config), np.arange(5, 17)[None]
    pair, single = unpacked(tokens, [0, 5, 12]), unpacked(tokens, [0, 11, 12])
    plain = unpacked(tokens, [0, 12, 12])
    params = random_params(encoder, pair)
    read = jax.jit(lambda batch: encoder.bind({"params": params}).layer_inputs(batch).segments)
    assert np.argmax(read(pair), -1)[0].tolist() == [0] * 5 + [1] * 6 + [2]
    assert np.argmax(read(single), -1)[0].tolist() == [0] * 11 + [2]
    assert np.argmax(read(plain), -1)[0].tolist() == [0] * 12


def test_a_batch_has_the_segments_of_the_tokens(tmp_path):
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    tokenizer = with_layout(tokenizer, Layout(cls_last=True))
    config = small_xlnet_config(tokenizer.vocab_size)
    model = PretrainedModel(config, tokenizer, {})
    for texts in (["the river", "a"], [("the river", "a town")]):
        batch = model.batch(texts)
        for row, tokens in zip(batch["segment_ids"], model.tokens(texts), strict=True):
            assert np.trim_zeros(row, "b").tolist() == tokens.segment_ids.tolist()
            assert tokens.segment_ids[-1] == 2
    segments = np.argmax(LayerInputs(config).apply({}, batch).segments, -1)
    np.testing.assert_array_equal(segments, batch["segment_ids"])


def test_rows_beyond_512_tokens_are_read_by_blocks():
    """Their result is that of the scores of all pairs, which are held only here."""
    config = small_xlnet_config(num_layers=1, max_position_embeddings=640)
    (layer,), length = encoder_layers(config), 520
    ids = np.where(np.arange(length) < 300, 1, 2).astype(np.int32)[None]
    segments = (np.arange(length) % 300 > 100).astype(np.int32)[None]
    batch = {name: ids for name in ("tokens", "position_ids", "sequence_ids")}
    batch["segment_ids"] = segments
    encoder = Encoder(config)
    params = random_params(encoder, batch)
    x = np.random.default_rng(0).normal(size=(1, length, 32)).astype(np.float32)

    @jax.jit
    def both(params):
        inputs = encoder.bind({"params": params}).layer_inputs(batch)
        bound = layer.bind({"params": jax.tree.map(lambda leaf: leaf[0], params["layers"])})
        scores, mask = bound.scores(x, inputs)
        probabilities = jax.nn.softmax(jnp.where(mask.pairs(), scores, -jnp.inf))
        value = bound.value(x).reshape(1, length, 4, 8)
        expected = jnp.einsum("bhqk,bkhd->bqhd", probabilities, value).reshape(x.shape)
        return bound.attend(x, inputs, {}), expected

    found, expected = both(params)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.exhaustive
def test_queries_at_some_positions_of_long_rows_are_those_at_all():
    """Those at all are read by blocks, as the content is; those at some are not."""
    config = small_xlnet_config(max_position_embeddings=640)
    tokens = np.random.default_rng(0).integers(5, 99, (1, 600))
    batch = unpacked(tokens, [0, 200, 520]) | {"ranks": np.arange(600, dtype=np.int32)[None] % 7}
    positions = np.array([[3, 519, 200, 130, 7]], np.int32)
    encoder = Encoder(config)
    variables = {"params": random_params(encoder, batch)}
    apply = jax.jit(lambda *args: encoder.apply(variables, batch, *args))
    found = apply(None, positions).query
    np.testing.assert_allclose(found, apply().query[:, positions[0]], atol=2e-5)


@pytest.mark.exhaustive
def test_both_streams_drop_the_same_places():
    """Each place is dropped in training; what is dropped of sinusoids is the same for all rows."""
    config = small_xlnet_config(num_layers=1)
    (layer,) = encoder_layers(config)
    places = {"attention", "attention_output", "intermediate", "output", "sinusoids"}
    assert {*layer.dropout_places} == places
    batch = unpacked(np.arange(5, 17)[None], [0, 12, 12])
    batch["ranks"] = np.zeros((1, 12), np.int32)
    encoder = Encoder(config)
    params = random_params(encoder, batch)
    dropout = Dropout(jax.random.key(0), np.arange(1), 0.3)
    apply = jax.jit(lambda *args: encoder.apply({"params": params}, batch, *args))
    dropped, whole = apply(dropout), apply()
    for one, other in zip(dropped, whole, strict=True):
        assert np.abs(one - other).max() > 1e-3


def test_two_streams_count_keys_and_values_once():
    counts = {"num_outputs": 512, "num_targets": 0, "num_pairs": 0}
    one, two = (
        flops_per_row(XlnetConfig(num_layers=3), 512, **counts, num_streams=n) for n in (1, 2)
    )
    of_stream = 512 * 768**2 + 4 * 512**2 * 768 + 512 * (768**2 + 2 * 768 * 3072)
    assert two - one == 2 * 2 * of_stream  # The last layer computes one stream.


@pytest.mark.exhaustive
def test_it_is_pretrained_finetuned_loaded_and_exported(tmp_path):
    """From text, as the commands in `configs/pretrain/xlnet_base.py` do."""
    (tmp_path / "text.txt").write_text(random_text(20))
    vocabulary = tmp_path / "xlnet.json"
    vocabulary.write_bytes(train_vocabulary([str(tmp_path / "text.txt")], "xlnet", 60, False, 1))
    corpus = build_small_corpus(tmp_path, vocabulary, rows="full_sentences")
    config = xlnet_base.get_config("runlocal")
    sizes = {"hidden_size": 32, "num_layers": 3, "num_heads": 2, "intermediate_size": 48}
    config.model.update(sizes)
    config.mesh.update({"data": 2, "fsdp": 2, "tensor": 2})
    config.update({"corpus": str(corpus), "num_steps": 6, "checkpoint_every": 2})
    config.lock()
    pretrain.train_and_evaluate(config, tmp_path / "pretrained")
    with stopped_after_save(pretrain):
        pretrain.train_and_evaluate(config, tmp_path / "resumed")
    pretrain.train_and_evaluate(config, tmp_path / "resumed")
    resumed, whole = (saved_params(tmp_path / name) for name in ("resumed", "pretrained"))
    assert_trees_equal(resumed, whole)
    model = bert_jax.load(tmp_path / "pretrained")
    save_huggingface(str(tmp_path / "lm"), model.params, model.settings, model.tokenizer)
    exported = bert_jax.load(tmp_path / "lm")
    assert exported.fill_mask("the <mask>") == model.fill_mask("the <mask>")
    text = "a <mask> river <eop> of thé town"
    assert exported.tokens(text).tokens == model.tokens(text).tokens
    assert exported.tokens(text).tokens[-2:] == ["<sep>", "<cls>"]
    assert np.isfinite(model.score("the river a town").log_likelihood)
    maps = model.attention("the river a town the river a town the river").probabilities
    assert maps.shape[0] == 3 and np.abs(maps.sum(-1) - 1).max() < 1e-5

    (tmp_path / "train.csv").write_text("text,label\n" + "the river,a\na town,b\n" * 8)
    config = text_classification.get_config()
    config.init_from = str(tmp_path / "pretrained")
    config.data.train = config.data.dev = str(tmp_path / "train.csv")
    config.max_seq_length, config.batch_size, config.num_epochs = 16, 8, 1.0
    config.layer_decay = 0.9
    finetune.train_and_evaluate(config.lock(), tmp_path / "run")
    classifier = bert_jax.load(tmp_path / "run")
    probability = classifier.classify("the river").probability
    save_huggingface(
        tmp_path / "exported", classifier.params, classifier.settings, classifier.tokenizer
    )
    again = bert_jax.load(tmp_path / "exported").classify("the river").probability
    assert abs(again - probability) < 1e-6
