"""Longformer: its model config, global tokens, and a run from a RoBERTa to answered questions.

`tests/parity/test_families.py` and `test_longformer.py` there compare it with transformers.
"""

import dataclasses
import json
import types

import flax
import jax
import numpy as np
import pytest

import bert_jax
from bert_jax import finetune, pretrain
from bert_jax.checkpoints import make_longformer as make_longformer_module
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.make_longformer import make_longformer, write_longformer
from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.parameters import LoadedModel, model_settings, parameter_shapes
from bert_jax.checkpoints.read import read_model
from bert_jax.configs.finetune import squad
from bert_jax.configs.pretrain import longformer_base
from bert_jax.data.features import LabelLayout, ModelInput, RowShape, check_layout, unpack_rows
from bert_jax.inference.pretrained_model import PretrainedModel
from bert_jax.model.architecture import config_to_settings
from bert_jax.model.encoder import Encoder
from bert_jax.model.longformer import LongformerConfig, find_global_tokens, flops_per_row
from bert_jax.model.longformer_names import config_from_json, config_to_json
from bert_jax.tokenizers.stored import Layout
from bert_jax.training.pretrain_setup import make_model_config
from tests.helpers.corpora import WORDS, build_small_corpus, random_text, train_bpe
from tests.helpers.models import (
    assert_trees_equal,
    random_params,
    small_longformer_config,
    small_model_config,
    small_mpnet_config,
)
from tests.helpers.runs import saved_params, small_config, stopped_after_save

SEP = 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"hidden_size": 36, "num_heads": 5}, r"hidden_size \(36\)"),
        ({"attention_window": 5}, "attention_window is 5: expected even"),
        ({"attention_window": 0}, "attention_window is 0: expected even"),
        ({"num_layers": 2, "attention_window": (4, 3)}, r"attention_window is \(4, 3\)"),
        ({"num_layers": 3, "attention_window": (4, 6)}, "attention_window has 2 entries for 3"),
        ({"sep_id": 50265}, "sep_id is 50265"),
        ({"global_tokens": "question"}, "global_tokens is 'question'"),
        ({"activation": "swish"}, "activation is 'swish'"),
        ({"classifier_dropout_rate": 1.0}, "classifier_dropout_rate"),
    ],
)
def test_invalid_model_config_is_an_error(fields, message):
    with pytest.raises(ValueError, match=f"LongformerConfig.{message}"):
        LongformerConfig(**fields)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'"),
        ({"attention_window": [512] * 11}, "attention_window has 11 entries for 12 layers"),
        ({"attention_window": 511}, "attention_window is 511: expected even"),
        ({"attention_window": "512"}, "attention_window is '512', expected a number"),
        ({"pad_token_id": 0}, "pad_token_id is 0, expected 1"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"sep_token_id": None}, "sep_token_id is None, expected a number"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_config_json_with_an_unsupported_switch_is_an_error(values, message):
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
        config_from_json(values)


def test_model_config_is_the_same_after_config_json():
    published = {"vocab_size": 50265, "max_position_embeddings": 4098, "type_vocab_size": 1}
    published |= {"attention_window": [512] * 12, "layer_norm_eps": 1e-5}
    assert config_from_json(published) == LongformerConfig(attention_dropout_rate=0.1)
    config = LongformerConfig(num_layers=2, attention_window=[4, 8], dropout_rate=0.2, sep_id=7)
    assert config.attention_window == config.windows == (4, 8)
    values = config_to_json(config)
    assert values["max_position_embeddings"] == 4098 and values["attention_window"] == [4, 8]
    assert config_from_json(values) == dataclasses.replace(config, attention_dropout_rate=0.2)


def test_global_tokens_of_each_sequence_in_a_row():
    """Of two pairs and padding; separators of the first do not count for the second."""
    pairs = [[0, 8, 9, SEP, SEP, 7, SEP], [0, 5, SEP, SEP, 4, 4, SEP]]
    features = [ModelInput((np.array(pair, np.int32),), (7,)) for pair in pairs]
    rows = RowShape(16, 2, LabelLayout(), pad_id=1).build([features], 1)
    found = {
        kind: np.flatnonzero(find_global_tokens(kind, SEP, unpack_rows(rows))[0]).tolist()
        for kind in ("first", "first_text", "second_text")
    }
    assert found == {
        "first": [0, 7],
        "first_text": [0, 1, 2, 7, 8],
        "second_text": [5, 6, 11, 12, 13],
    }


@pytest.mark.slow
@pytest.mark.parametrize("length", [40, 1200])
def test_packed_sequences_with_chosen_global_tokens_equal_each_alone(length):
    """In rows of blocks, too. The table of positions has two more rows."""
    config = small_longformer_config(num_layers=1, attention_window=4, max_position_embeddings=1200)
    encoder, rng = Encoder(config), np.random.default_rng(0)
    sizes = length // 2, length // 2 - 7
    chosen = (0, sizes[0] - 1), (3,)
    features = [
        ModelInput(
            (rng.integers(3, 100, size).astype(np.int32),), (size,), global_positions=positions
        )
        for size, positions in zip(sizes, chosen, strict=True)
    ]
    shape = RowShape(length, 2, LabelLayout(), pad_id=1)
    params = random_params(encoder, unpack_rows(shape.build([features], 1)))
    assert params["embeddings"]["position_embedding"]["embedding"].shape == (1202, 32)
    apply = jax.jit(encoder.apply)
    packed = apply({"params": params}, unpack_rows(shape.build([features], 1)))[0]
    apart = apply({"params": params}, unpack_rows(shape.build([[each] for each in features], 2)))
    np.testing.assert_allclose(packed[: sizes[0]], apart[0][: sizes[0]], atol=1e-5)
    np.testing.assert_allclose(packed[sizes[0] : sum(sizes)], apart[1][: sizes[1]], atol=1e-5)
    others = [dataclasses.replace(each, global_positions=()) for each in features]
    without = apply({"params": params}, unpack_rows(shape.build([others], 1)))[0]
    assert np.max(np.abs(packed - without)) > 0.1


def write_roberta(directory, **fields):
    """Writes a random RoBERTa with a head for tokens, and returns it, read."""
    tokenizer = train_bpe(directory / "tokenizer", random_text(20))
    sizes = {"max_position_embeddings": 12, "dropout_rate": 0.0, "layer_norm_epsilon": 1e-5}
    sizes |= {"family": "roberta", "type_vocab_size": 1, "position_offset": 2}
    config = small_model_config(tokenizer.vocab_size, **sizes | fields)
    rng = np.random.default_rng(0)
    params = {
        path: np.float32(rng.normal(path.endswith("scale"), 0.2, leaf.shape))
        for path, leaf in parameter_shapes(config).items()
        if path.startswith(("encoder/", "mlm/")) and "pooler" not in path
    }
    params = flax.traverse_util.unflatten_dict(params, sep="/")
    write_checkpoint(directory / "roberta", params, model_settings(config, params), tokenizer)
    return read_model(directory / "roberta")


@pytest.mark.slow
def test_longformer_of_a_roberta_computes_the_same_in_short_texts(tmp_path, caplog):
    roberta = write_roberta(tmp_path)
    write_longformer(
        tmp_path / "roberta", tmp_path / "made", max_seq_length=40, attention_window=24
    )
    made, original = bert_jax.load(tmp_path / "made"), bert_jax.load(tmp_path / "roberta")
    text = "the river and old"
    for positions in ((), (0, 2)):
        found = made.hidden_states(text, layers=-1, global_positions=positions)
        np.testing.assert_allclose(found, original.hidden_states(text, layers=-1), atol=1e-5)
    table = made.params["encoder"]["embeddings"]["position_embedding"]["embedding"]
    old = roberta.params["encoder"]["embeddings"]["position_embedding"]["embedding"]
    expected = np.concatenate([old, old[2:], old[2:], old[2:6]])
    np.testing.assert_array_equal(table, expected)
    # After training, the projections of global tokens are copied again, and it says so.
    layers = made.params["encoder"]["layers"]
    layers["query"] = jax.tree.map(lambda leaf: leaf + 1, layers["query"])
    made.save(tmp_path / "trained")
    caplog.clear()
    write_longformer(tmp_path / "trained", tmp_path / "copied")
    assert "replaced the global projections" in caplog.text
    copied = bert_jax.load(tmp_path / "copied")
    assert copied.config == made.config
    again = copied.params["encoder"]["layers"]
    assert_trees_equal(again["query_global"], again["query"])
    with pytest.raises(FileExistsError, match="choose another --output"):
        write_longformer(tmp_path / "roberta", tmp_path / "made", 40, 24)


ENCODERS = "only RoBERTa-style encoders without the head of a task can be converted"
HEADS = {
    "classification": {"task": "classification", "labels": ["no", "yes"]},
    "embedding": {"task": "embedding", "labels": []},  # It has no parameters.
    "span": {"task": "span", "labels": []},
}


def settings_of(config, **settings):
    return {"architecture": config_to_settings(config), "modules": {}} | settings


@pytest.mark.parametrize(
    ("settings", "part", "message"),
    [
        (
            {"head": HEADS["classification"]},
            "encoder",
            f"has a head for classification: {ENCODERS}",
        ),
        ({"head": HEADS["embedding"]}, "encoder", f"has a head for embedding: {ENCODERS}"),
        ({}, "discriminator", f"has the parameters of discriminator: {ENCODERS}"),
        (
            settings_of(small_model_config()),
            "encoder",
            rf"is a BERT, not a RoBERTa \(its positions start at 0, not 2\): {ENCODERS}",
        ),
        (
            settings_of(small_model_config(family="roberta", position_offset=2, activation="relu")),
            "encoder",
            f"its activation is 'relu', not 'gelu': {ENCODERS}",
        ),
        (settings_of(small_mpnet_config()), "encoder", f"is a mpnet, not a RoBERTa: {ENCODERS}"),
        (
            settings_of(small_longformer_config(), head=HEADS["span"]),
            "encoder",
            f"has a head for span: {ENCODERS}",
        ),
        (settings_of(small_longformer_config()), "encoder", "keeps its positions and windows"),
    ],
)
def test_other_models_are_not_converted(settings, part, message, tmp_path, monkeypatch):
    base = settings_of(small_model_config(family="roberta", position_offset=2))
    model = LoadedModel({part: {}}, base | settings, None, None)
    monkeypatch.setattr(make_longformer_module, "read_model", lambda source: model)
    with pytest.raises(ValueError, match=f"SOURCE.*{message}"):
        write_longformer("SOURCE", tmp_path / "made", 40, 8)


def test_global_projections_that_were_trained_are_not_replaced(tmp_path, monkeypatch):
    settings = settings_of(small_longformer_config(global_tokens="first"))
    model = LoadedModel({"encoder": {}}, settings, None, None)
    monkeypatch.setattr(make_longformer_module, "read_model", lambda source: model)
    with pytest.raises(ValueError, match="SOURCE was trained with global tokens"):
        write_longformer("SOURCE", tmp_path / "made")


def test_sizes_that_do_not_fit_are_refused_by_their_flag(tmp_path):
    model = write_roberta(tmp_path)
    for sizes, message in (
        ((11, 8), "--max_seq_length is 11, .* expected at least its 12"),
        ((40, 7), "--attention_window is 7: expected an even number"),
    ):
        with pytest.raises(ValueError, match=message):
            make_longformer(model, *sizes)


@pytest.mark.slow
def test_vectors_have_the_global_tokens_of_hidden_states(tmp_path):
    """Those of the head, or without one those of the model config."""
    write_roberta(tmp_path)
    write_longformer(tmp_path / "roberta", tmp_path / "made", max_seq_length=40, attention_window=2)
    model, text = bert_jax.load(tmp_path / "made"), "the river and old"
    without = model.encode(text, pooling="cls")
    np.testing.assert_allclose(without, model.hidden_states(text, layers=-1)[0, 0], atol=1e-5)
    kinds = [{"head": HEADS["classification"]}, {"head": HEADS["embedding"]}, {}]
    for settings, kind in zip(kinds, ("none", "first", "first"), strict=True):
        config = dataclasses.replace(model.config, global_tokens=kind)
        other = PretrainedModel(config, model.tokenizer, model.params, settings)
        vector = other.encode(text, pooling="cls")
        states = other.hidden_states(text, layers=-1)[0, 0]
        np.testing.assert_allclose(vector, states, atol=1e-5)
        is_global = settings.get("head") != HEADS["embedding"]
        assert (np.abs(vector - without).max() > 1e-3) == is_global


@pytest.mark.parametrize(
    ("layout", "sep_id", "message"),
    [
        (Layout(1, False), SEP, "expects 2 separators with the id 2 .* puts 1 with the id 2"),
        (Layout(2, False), 3, "expects 2 separators with the id 2 .* puts 2 with the id 3"),
    ],
)
def test_a_tokenizer_that_joins_pairs_otherwise_is_refused(layout, sep_id, message):
    fields = {"cls_id": 0, "id_to_token": lambda index: "<s>"}
    check_layout(LongformerConfig(), types.SimpleNamespace(layout=Layout(2, False), sep_id=SEP))
    with pytest.raises(ValueError, match=message):
        tokenizer = types.SimpleNamespace(layout=layout, sep_id=sep_id, **fields)
        check_layout(LongformerConfig(), tokenizer)


@pytest.mark.slow
def test_global_positions_outside_of_a_text_are_an_error(tmp_path):
    write_roberta(tmp_path)
    write_longformer(tmp_path / "roberta", tmp_path / "made", max_seq_length=40, attention_window=8)
    model, texts = bert_jax.load(tmp_path / "made"), ["the river", "a town"]
    vectors = model.encode(texts, global_positions=[[0], [1, 2]])
    np.testing.assert_allclose(
        model.encode(texts[1], global_positions=[1, 2]), vectors[1], atol=1e-5
    )
    assert model.batch(texts, global_positions=[[0], []])["is_global"].sum() == 1
    size = len(model.tokens(texts[1]).ids)
    for positions, message in (
        (
            [[0], [size]],
            rf"has {size} at index 1, but the text has {size} tokens: .* \[0, {size - 1}",
        ),
        ([[-1], []], "has -1 at index 0"),
        ([[0.5], []], "has 0.5 at index 0"),
        ([[True], []], "has True at index 0"),
        ([[0]], "1 lists and 2 texts"),
    ):
        with pytest.raises(ValueError, match=f"global_positions.*{message}"):
            model.hidden_states(texts, global_positions=positions)
    with pytest.raises(TypeError, match="lists of numbers, got 0 at index 0"):
        model.encode(texts, global_positions=[0, 1])
    with pytest.raises(TypeError, match="for a single text, pass a flat list"):
        model.encode(texts[0], global_positions=[[0]])
    with pytest.raises(ValueError, match="bert has no global tokens; a Longformer has them"):
        bert_jax.load(tmp_path / "roberta").encode(texts, global_positions=[[0], [0]])


def test_its_configuration_has_its_sizes():
    expected = LongformerConfig(vocab_size=50265)
    assert make_model_config(longformer_base.get_config(), 50265) == expected


def test_its_products_are_those_of_windows():
    sizes = {"length": 64, "num_outputs": 10, "num_targets": 10, "num_pairs": 2}
    config = small_longformer_config(attention_window=(8, 4))
    of_window = 2 * 2 * 64 * 32 * 2
    base = flops_per_row(config, **sizes)
    wider = dataclasses.replace(config, attention_window=(8, 10))
    assert flops_per_row(wider, **sizes) - base == of_window * 6 / 2
    with_global = dataclasses.replace(config, global_tokens="first")
    assert flops_per_row(with_global, **sizes) - base == 2 * 2 * 3 * 64 * 32**2


@pytest.mark.exhaustive
def test_it_is_converted_pretrained_and_finetuned_on_questions_loaded_and_exported(tmp_path):
    write_roberta(tmp_path, num_layers=1)
    write_longformer(tmp_path / "roberta", tmp_path / "made", max_seq_length=64, attention_window=8)
    vocabulary = bert_jax.load(tmp_path / "made").tokenizer
    corpus = build_small_corpus(
        tmp_path / "corpus", tmp_path / "tokenizer/bpe.json", rows="full_sentences"
    )
    assert vocabulary.sep_id == 2
    config, settings = longformer_base.get_config("runlocal"), small_config(corpus).to_dict()
    for name in ("corpus", "num_steps", "log_every", "eval_every", "checkpoint_every"):
        config[name] = settings[name]
    config.init_from = str(tmp_path / "made")
    config.model.size, config.model.max_position_embeddings = None, 64
    config.mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    config.lock()
    pretrain.train_and_evaluate(config, tmp_path / "pretrained")
    with stopped_after_save(pretrain):
        pretrain.train_and_evaluate(config, tmp_path / "resumed")
    pretrain.train_and_evaluate(config, tmp_path / "resumed")
    resumed, whole = (saved_params(tmp_path / name) for name in ("resumed", "pretrained"))
    assert_trees_equal(resumed, whole)

    rng = np.random.default_rng(0)
    paragraphs = []
    for number in range(16):
        context = " ".join(rng.choice(WORDS, 9))
        answer = {"text": context.split()[2], "answer_start": context.find(context.split()[2])}
        question = {"id": str(number), "question": "the old river", "answers": [answer]}
        paragraphs.append({"context": context, "qas": [question]})
    content = {"version": "1.1", "data": [{"title": "", "paragraphs": paragraphs}]}
    (tmp_path / "squad.json").write_text(json.dumps(content))
    config = squad.get_config("v1")
    config.init_from = str(tmp_path / "pretrained")
    config.data.train = config.data.dev = str(tmp_path / "squad.json")
    config.data.doc_stride, config.data.max_query_length = 20, 10
    config.max_seq_length, config.batch_size, config.num_epochs = 60, 8, 1.0
    finetune.train_and_evaluate(config.lock(), tmp_path / "run")
    model = bert_jax.load(tmp_path / "run")
    assert model.config.global_tokens == "first_text"
    layers = [saved_params(tmp_path / name)["encoder"]["layers"] for name in ("pretrained", "run")]
    moved = layers[1]["query_global"]["kernel"] - layers[0]["query_global"]["kernel"]
    assert np.abs(moved).max() > 0
    pair = "the old river", paragraphs[0]["context"]
    (answer,) = model.answer(*pair)
    save_huggingface(tmp_path / "exported", model.params, model.settings, model.tokenizer)
    again = bert_jax.load(tmp_path / "exported")
    assert abs(again.answer(*pair)[0].probability - answer.probability) < 1e-6
    np.testing.assert_allclose(again.hidden_states(pair), model.hidden_states(pair), atol=1e-6)
