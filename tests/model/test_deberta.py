"""DeBERTa: its model config, `config.json`, scores, and a run from pre-training to an export.

`tests/parity/test_families.py` compares its arithmetic with transformers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bert_jax
from bert_jax import finetune, pretrain
from bert_jax.checkpoints.export import params_to_huggingface, save_huggingface
from bert_jax.checkpoints.huggingface import params_from_huggingface
from bert_jax.configs.finetune import text_classification
from bert_jax.data.features import unpack_rows
from bert_jax.model.deberta import DebertaConfig, distance_rows, encoder_layers, flops_per_row
from bert_jax.model.deberta_names import config_from_json, config_to_json
from bert_jax.model.dropout import Dropout, layer_dropout
from bert_jax.model.encoder import Encoder
from bert_jax.training.pretrain_step import step_dropout
from tests.helpers.corpora import build_small_corpus, write_vocabulary
from tests.helpers.models import assert_trees_equal, random_params, small_deberta_config
from tests.helpers.runs import saved_params, small_config, stopped_after_save

RELATIVE = {"relative_attention": True, "pos_att_type": "p2c|c2p"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"hidden_size": 36, "num_heads": 8}, r"hidden_size \(36\)"),
        ({"embedding_size": 0}, "embedding_size"),
        ({"max_distance": 0}, "max_distance"),
        ({"num_buckets": 1}, "num_buckets is 1"),
        ({"num_buckets": 64, "max_distance": 33}, "num_buckets is 64"),
        ({"position_scores": "p2p"}, "position_scores is 'p2p'"),
        ({"convolution_width": 4}, "convolution_width is 4"),
        ({"convolution_width": 3, "causal": True}, "convolution_width must be 0"),
        ({"pooler_activation": "swish"}, "pooler_activation is 'swish'"),
        ({"attention_dropout_rate": 1.0}, "attention_dropout_rate"),
    ],
)
def test_invalid_model_config_is_an_error(fields, message):
    with pytest.raises(ValueError, match=f"DebertaConfig.{message}"):
        DebertaConfig(**fields)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"relative_attention": True}, "relative_attention is True and pos_att_type is"),
        ({"pos_att_type": ["c2p"]}, "relative_attention is False and pos_att_type is"),
        (RELATIVE | {"pos_att_type": "c2p|p2p"}, "pos_att_type has p2p"),
        ({"norm_rel_ebd": "batch_norm"}, "norm_rel_ebd is 'batch_norm'"),
        ({"attention_head_size": 32}, "attention_head_size is 32, expected 64"),
        ({"talking_head": True}, "talking_head is True"),
        ({"conv_kernel_size": 2}, "convolution_width is 2.* is conv_kernel_size"),
        ({"conv_groups": 2}, "conv_groups is 2"),
        ({"conv_act": "quick_gelu"}, "conv_act is 'quick_gelu'"),
        ({"pooler_hidden_size": 8}, "pooler_hidden_size is 8"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"legacy": False, "embedding_size": 8}, "embedding_size is 8"),
        ({"share_att_key": "yes"}, "share_att_key is 'yes'"),
        ({"hidden_size": True}, "hidden_size is True"),
    ],
)
def test_config_json_with_an_unsupported_switch_is_an_error(values, message):
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
        config_from_json(values)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_buckets": 0, "max_distance": 20, "has_positions": True, "type_vocab_size": 2},
        {"position_scores": "", "num_buckets": 0, "normalizes_distances": False},
        {"position_scores": "p2c", "shares_projections": False, "embedding_size": 8},
        {"convolution_width": 3, "convolution_activation": "gelu", "legacy_head": False},
        {"classifier_dropout_rate": 0.2, "activation": "gelu_tanh", "dropout_rate": 0.0},
    ],
    ids=str,
)
def test_model_config_is_the_same_after_config_json(fields):
    config = DebertaConfig(**fields)
    again = config_from_json(config_to_json(config))
    assert again.attention_dropout_rate == config.dropout_rate
    assert vars(again) == vars(config) | {"attention_dropout_rate": config.dropout_rate}


def test_keys_that_config_json_lacks_have_the_defaults_of_transformers():
    config = config_from_json({})
    assert [getattr(config, name) for name in config.size_fields] == [24, 1536, 24, 6144]
    assert config.has_positions and config.position_scores == "" and config.num_buckets == 0


def test_published_sizes():
    config = DebertaConfig.named("xsmall", vocab_size=50)
    assert [getattr(config, name) for name in config.size_fields] == [12, 384, 6, 1536]
    assert config.convolution_width == 0
    config = DebertaConfig.named("v2-xlarge")
    assert (config.convolution_width, config.convolution_activation) == (3, "gelu")
    with pytest.raises(ValueError, match="unknown model size 'huge': expected one of xsmall"):
        DebertaConfig.named("huge")


def test_far_distances_share_buckets():
    """The values of the released code."""
    buckets = {1: 1, 127: 127, 128: 128, 140: 137, 200: 169, 256: 192, 300: 207, 400: 233, 511: 255}
    distances = np.array(list(buckets))
    rows = distance_rows(DebertaConfig(), distances) - 256
    assert rows.tolist() == list(buckets.values())
    assert (distance_rows(DebertaConfig(), -distances) - 256).tolist() == (-rows).tolist()
    config = DebertaConfig(num_buckets=0, max_distance=3)
    assert distance_rows(config, np.arange(-5, 6)).tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 5, 5, 5]


def heads_of(x: np.ndarray, dense: dict, num_heads: int) -> np.ndarray:
    """Returns the float64 projection of `[length, hidden]` as `[heads, length, head_dim]`."""
    y = x @ np.float64(dense["kernel"]) + dense["bias"]
    return y.reshape(len(x), num_heads, -1).swapaxes(0, 1)


@pytest.mark.parametrize(
    "fields",
    [{}, {"shares_projections": False}, {"position_scores": "p2c", "num_buckets": 0}],
    ids=str,
)
def test_scores_equal_the_formula_in_float64(fields):
    config = small_deberta_config(**fields)
    layer, length = encoder_layers(config)[1], 19
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, length, 32)).astype(np.float32)
    batch = {"sequence_ids": np.ones((1, length), np.int32)}
    tokens = {name: np.ones((1, length), np.int32) for name in ("tokens", "segment_ids")}
    inputs_of = Encoder(config)
    params = random_params(inputs_of, batch | tokens | {"position_ids": tokens["tokens"]})
    own = jax.tree.map(lambda leaf: leaf[-1], params["layers"])
    own = {name: module for name, module in own.items() if "convolution" not in name}

    @jax.jit
    def scores(params, own):
        inputs = inputs_of.bind({"params": params}).layer_inputs(batch)
        found, _ = layer.apply({"params": own}, x, inputs, method="scores")
        return found, inputs.distances

    found, distances = scores(params, own)

    table = np.float64(distances)
    query, key = (heads_of(np.float64(x[0]), own[name], 4) for name in ("query", "key"))
    names = ("query", "key") if config.shares_projections else ("distance_query", "distance_key")
    table_query, table_key = (
        heads_of(table, own[name], 4) if name in own else None for name in names
    )
    expected = np.zeros((4, length, length))
    for i in range(length):
        for j in range(length):
            row = distance_rows(config, np.array(i - j))
            score = np.sum(query[:, i] * key[:, j], -1)
            score += np.sum(key[:, j] * table_query[:, row], -1)
            if "c2p" in config.score_terms:
                score += np.sum(query[:, i] * table_key[:, row], -1)
            expected[:, i, j] = score / np.sqrt(8 * (1 + len(config.score_terms)))
    np.testing.assert_allclose(found[0], expected, atol=1e-4)


@pytest.mark.slow
def test_rows_beyond_512_tokens_are_read_by_blocks():
    """Their result is that of the scores of all pairs, which are held only here."""
    config = small_deberta_config(
        num_layers=1, num_buckets=64, max_position_embeddings=640, convolution_width=0
    )
    (layer,), length = encoder_layers(config), 520
    ids = np.where(np.arange(length) < 300, 1, 2).astype(np.int32)[None]
    names = ("tokens", "segment_ids", "position_ids", "sequence_ids")
    encoder, batch = Encoder(config), dict.fromkeys(names, ids)
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
        return bound.attend(x, inputs, {})[0], expected

    found, expected = both(params)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def unpacked(tokens, *bounds) -> dict:
    """Returns the batch of rows with sequences at these [start, end)."""
    bounds = np.array([[[start, end, end] for start, end in row] for row in bounds], np.int32)
    return unpack_rows({"tokens": np.asarray(tokens, np.int32), "sequence_bounds": bounds})


def test_convolution_reads_its_own_sequence():
    config = small_deberta_config(position_scores="", dropout_rate=0.0, num_layers=1)
    tokens = np.random.default_rng(0).integers(5, 100, 12)
    encoder, packed = Encoder(config), unpacked([tokens] * 2, *[[(0, 5), (5, 12)]] * 2)
    params = random_params(encoder, packed)
    assert params["layers"]["convolution"]["kernel"].shape == (1, 3, 32, 32)
    apart = np.zeros((2, 12))
    apart[0, :5], apart[1, :7] = tokens[:5], tokens[5:]
    batches = packed, unpacked(apart, [(0, 5), (0, 0)], [(0, 7), (0, 0)])
    apply = jax.jit(encoder.apply)
    together, alone = (apply({"params": params}, batch) for batch in batches)
    np.testing.assert_allclose(together[0, :5], alone[0, :5], atol=1e-5)
    np.testing.assert_allclose(together[0, 5:], alone[1, :7], atol=1e-5)


@pytest.mark.slow
def test_what_is_dropped_of_distances_is_the_same_for_all_rows():
    """transformers drops elements of the table in each layer, before it projects them."""
    config = small_deberta_config(num_layers=1, convolution_width=0)
    (layer,) = encoder_layers(config)
    assert {*layer.dropout_places} == {"attention", "attention_output", "distances", "output"}
    batch = unpacked([np.arange(5, 17)] * 3, *[[(0, 12)]] * 3)
    encoder = Encoder(config)
    params = random_params(encoder, batch)

    @jax.jit
    def states_with_and_without(params):
        settings = Dropout(jax.random.key(0), np.arange(3), 0.3)
        dropouts = layer_dropout(settings, layer.dropout_places, 1, num_heads=4, length=12)
        assert dropouts["distances"].words[0].shape == (1, 1, 16)
        own = {"distances": jax.tree.map(lambda leaf: leaf[0], dropouts["distances"])}
        variables = {"params": params}
        x = encoder.apply(variables, batch, method="all_hidden_states")[0]
        inputs = encoder.bind(variables).layer_inputs(batch)
        layer_params = {"params": jax.tree.map(lambda leaf: leaf[0], params["layers"])}
        return [layer.apply(layer_params, x, inputs, each) for each in (own, {})]

    dropped, whole = states_with_and_without(params)
    assert np.abs(dropped - whole).max() > 1e-3
    np.testing.assert_array_equal(dropped[0], dropped[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropout_rate", "attention_dropout_rate"])
def test_each_rate_of_dropout_has_an_effect_in_training(name):
    rates = {"dropout_rate": 0.0, "attention_dropout_rate": 0.0} | {name: 0.5}
    config = small_deberta_config(**rates, num_layers=1, convolution_width=0)
    batch = unpacked(np.arange(12).reshape(2, 6), [(0, 6)], [(0, 6)])
    encoder = Encoder(config)
    params = random_params(encoder, batch)

    @jax.jit
    def both(params):
        dropout = step_dropout(config, {"dropout_rows": np.arange(2)}, jax.random.key(0))
        return [encoder.apply({"params": params}, batch, each) for each in (None, dropout)]

    states, dropped = both(params)
    assert np.abs(states - dropped).max() > 1e-4


def test_head_of_an_enhanced_mask_decoder_is_not_taken_for_a_plain_one():
    config = small_deberta_config(100, legacy_head=False, convolution_width=0)
    batch = unpacked([[5, 6]], [(0, 2)])
    tensors = params_to_huggingface({"encoder": random_params(Encoder(config), batch)}, config)
    tensors = {f"deberta.{name}": value for name, value in tensors.items()}
    params_from_huggingface(tensors, config)
    name = "deberta.embeddings.position_embeddings.weight"
    tensors[name] = np.zeros((64, 32), np.float32)
    with pytest.raises(ValueError, match=f"tensor {name}: .* an enhanced mask decoder.*legacy"):
        params_from_huggingface(tensors, config)


@pytest.mark.parametrize(
    ("fields", "length", "num_embeddings"),
    [({}, 512, 512), ({}, 2048, 512), ({}, 128, 256), ({"num_buckets": 0}, 512, 1024)],
    ids=str,
)
def test_terms_of_distances_count_each_relative_embedding_once(fields, length, num_embeddings):
    counts = {"num_outputs": length, "num_targets": 0, "num_pairs": 0}
    flops = {
        terms: flops_per_row(DebertaConfig(position_scores=terms, **fields), length, **counts)
        for terms in ("c2p|p2c", "c2p", "")
    }
    assert flops["c2p"] - flops[""] == 2 * 12 * length * num_embeddings * 768
    assert flops["c2p|p2c"] - flops["c2p"] == flops["c2p"] - flops[""]


@pytest.mark.exhaustive
def test_it_is_pretrained_finetuned_loaded_and_exported(tmp_path):
    corpus = build_small_corpus(tmp_path, write_vocabulary(tmp_path / "vocab.txt"))
    config = small_config(corpus)
    with config.unlocked():
        sizes = {"hidden_size": 32, "num_layers": 3, "num_heads": 2, "intermediate_size": 48}
        sizes |= {"num_buckets": 8, "convolution_width": 3}
        config.model = {"architecture": "deberta"} | sizes
        config.mesh = {"data": 2, "fsdp": 2, "tensor": 2}
        config.next_sentence = False
    pretrain.train_and_evaluate(config, tmp_path / "pretrained")
    with stopped_after_save(pretrain):
        pretrain.train_and_evaluate(config, tmp_path / "resumed")
    pretrain.train_and_evaluate(config, tmp_path / "resumed")
    resumed, whole = (saved_params(tmp_path / name) for name in ("resumed", "pretrained"))
    assert_trees_equal(resumed, whole)
    model = bert_jax.load(tmp_path / "pretrained")
    save_huggingface(str(tmp_path / "mlm"), model.params, model.settings, model.tokenizer)
    assert bert_jax.load(tmp_path / "mlm").fill_mask("the [MASK]") == model.fill_mask("the [MASK]")
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
