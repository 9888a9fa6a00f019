"""Hugging Face state dicts, configurations and directories, read and written."""

import dataclasses
import json
import re
import sys
import warnings

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bert_corpus.vocabulary import train_sentencepiece
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.huggingface import (
    HEAD_KEY,
    config_from_huggingface,
    head_from_huggingface,
    huggingface_name,
    params_from_huggingface,
)
from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.parameters import (
    LoadReport,
    log_report,
    model_settings,
    parameter_shapes,
    unexpected_tensors,
)
from bert_jax.checkpoints.read import read_model
from bert_jax.checkpoints.transformers_config import FORMATS
from bert_jax.checkpoints.transformers_names import FAMILIES
from bert_jax.inference.pretrained_model import load
from bert_jax.model.config import BertConfig
from bert_jax.objectives.masked_lm import PretrainingModel
from bert_jax.runtime.errors import CheckpointError
from bert_jax.tokenizers.export import transformers_files
from bert_jax.tokenizers.tokenizer import tokenizer_from_bytes
from tests.helpers.commands import ROOT
from tests.helpers.corpora import random_text, texts
from tests.helpers.models import (
    CONFIG,
    CONFIG_JSON,
    PIECES,
    assert_trees_equal,
    example_batch,
    flat,
    linear,
    state_dict,
    write_head,
)

CLASSIFIER = "BertForSequenceClassification"
CHOICE = "BertForMultipleChoice"
QUERY = "bert.encoder.layer.1.attention.self.query.weight"


def test_every_tensor_becomes_the_parameter_that_it_names():
    tensors = state_dict()
    params, report = params_from_huggingface(tensors, CONFIG)
    assert sorted(report.loaded) == sorted(tensors)
    assert report.missing == report.unused == ()
    expected = {path: leaf.shape for path, leaf in parameter_shapes(CONFIG).items()}
    assert {path: value.shape for path, value in flat(params).items()} == expected
    # The inverse: unstack, transpose, remove the padding.
    back = {}
    for path, value in flat(params).items():
        assert value.dtype == np.float32
        name = huggingface_name(path)
        for layer, piece in enumerate(value if "{layer}" in name else [value]):
            piece = piece.T if path.endswith("kernel") else piece
            back[name.format(layer=layer)] = piece[:131] if piece.shape[0] == 256 else piece
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(back[name], value.astype(np.float32), err_msg=name)


def test_model_applies_the_parameters():
    params, _ = params_from_huggingface(state_dict(), CONFIG)
    batch = dict.fromkeys(example_batch(), np.zeros((2, 9), np.int32))
    mlm_logits, nsp_logits = jax.jit(PretrainingModel(CONFIG).apply)({"params": params}, batch)
    assert mlm_logits.shape == (2, 9, 256) and nsp_logits.shape == (2, 9, 2)
    assert np.isfinite(nsp_logits).all()


@pytest.mark.parametrize("name", FORMATS)
def test_documentation_names_the_class_of_every_export(name):
    family, text = FORMATS[name], (ROOT / "docs/python_api.md").read_text()
    _, _, section = text.partition("\n## In other libraries\n")
    named = set(re.findall(r"`(\w+)`", section.partition("\n### ")[0]))
    prefix = family.headless[()].removesuffix("Model")
    classes = {*family.headless.values(), *(family.class_prefix + end for end in family.heads)}
    assert prefix in named | {"Bert"}
    for each in classes:
        assert named & {each, each.replace(prefix, "Bert")}, each


def test_padding_of_the_vocabulary_is_zero():
    params, _ = params_from_huggingface(state_dict(), CONFIG)
    assert params["encoder"]["embeddings"]["token_embedding"]["embedding"].shape == (256, 12)
    assert not params["encoder"]["embeddings"]["token_embedding"]["embedding"][131:].any()
    assert not params["mlm"]["bias"][131:].any()


def test_encoder_without_prefix_is_read_and_its_heads_are_reported_missing():
    whole = state_dict()
    bare = {
        name.removeprefix("bert."): value
        for name, value in whole.items()
        if name.startswith("bert.") and "pooler" not in name
    }
    bare["embeddings.position_ids"] = np.arange(9)[None]
    params, report = params_from_huggingface(bare, CONFIG)
    assert report.unused == ("embeddings.position_ids",)
    assert set(report.missing) == {n for n in whole if n.startswith(("cls.", "bert.pooler."))}
    expected, _ = params_from_huggingface(whole, CONFIG)
    assert params.keys() == {"encoder"}
    del expected["encoder"]["pooler"]
    assert_trees_equal(params["encoder"], expected["encoder"])


def test_old_names_and_copies_of_tied_tensors_are_read():
    tensors = state_dict()
    expected, _ = params_from_huggingface(tensors, CONFIG)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta"): value
        for name, value in tensors.items()
    }
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    old["cls.predictions.decoder.bias"] = old.pop("cls.predictions.bias")
    params, report = params_from_huggingface(old, CONFIG)
    assert report.missing == report.unused == ()
    assert_trees_equal(params, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({QUERY: None}, rf"{QUERY}: expected shape \(12, 12\), found no such tensor"),
        ({QUERY: np.zeros((12, 6))}, rf"{QUERY}: expected shape \(12, 12\), found \(12, 6\)"),
        (
            {"bert.encoder.layer.0.intermediate.dense.weight": np.zeros((12, 20))},
            r"intermediate.dense.weight: expected shape \(20, 12\), found \(12, 20\)",
        ),
        ({"bert.pooler.dense.bias": None}, "bert.pooler.dense.bias: .* found no such tensor"),
        (
            {"bert.embeddings.word_embeddings.weight": np.zeros((130, 12))},
            r"word_embeddings.weight: expected shape \(131, 12\), found \(130, 12\)",
        ),
        ({"embeddings.LayerNorm.bias": np.zeros(12)}, "bert.embeddings.LayerNorm.bias: .* twice"),
        ({"cls.predictions.decoder.weight": np.zeros((131, 12))}, "expected a copy of bert.emb"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_error_names_the_tensor_and_what_was_expected_and_found(change, message):
    tensors = {name: value for name, value in (state_dict() | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        params_from_huggingface(tensors, CONFIG)


def test_config_defaults_to_bert_base():
    assert config_from_huggingface(CONFIG_JSON) == CONFIG
    assert config_from_huggingface({"model_type": "bert"}) == BertConfig()


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_attention_may_have_another_dropout_rate_than_hidden_states(rate, tmp_path):
    plain = write_directory(tmp_path / "a", state_dict())
    other = write_directory(tmp_path / "b", state_dict(), attention_probs_dropout_prob=rate)
    assert load(plain).config.attention_dropout_rate is None
    model = load(other)
    assert (model.config.attention_dropout_rate, model.config.dropout_rate) == (rate, 0.1)
    np.testing.assert_array_equal(model.encode(["w1 w2"]), load(plain).encode(["w1 w2"]))


def test_vocabulary_of_the_weights_may_be_larger_than_the_tokenizer_s(tmp_path):
    whole = load(write_directory(tmp_path / "a", state_dict()))
    padded = load(write_directory(tmp_path / "b", state_dict(), PIECES[:100]))
    assert (padded.tokenizer.vocab_size, padded.config.vocab_size) == (100, 131)
    np.testing.assert_array_equal(padded.encode(["w1 w2"]), whole.encode(["w1 w2"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'"),
        ({"model_type": "roberta", "pad_token_id": 0}, "pad_token_id is 0"),
        ({"model_type": "albert", "inner_group_num": 2}, "inner_group_num is 2"),
        ({"position_embedding_type": "relative_key"}, "expected 'absolute'"),
        ({"is_decoder": True, "add_cross_attention": True}, "add_cross_attention is True"),
        ({"hidden_size": "32"}, r"config\.json: hidden_size is '32'"),
        ({"num_attention_heads": None}, "num_attention_heads is None"),
        ({"num_attention_heads": 5}, r"config\.json: .*hidden_size \(12\) must be a multiple of"),
        ({"layer_norm_eps": -1}, "layer_norm_epsilon must be positive, got -1"),
        (
            {"attention_probs_dropout_prob": 1.2},
            r"attention_dropout_rate must be in \[0, 1\), got 1",
        ),
        ({"pruned_heads": {"0": [1]}}, r"pruned_heads is {'0': \[1\]}"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
    ],
)
def test_another_architecture_is_an_error(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_huggingface(CONFIG_JSON | change)


def write_directory(directory, tensors, pieces=PIECES, **values):
    """Writes a directory like transformers' `save_pretrained`."""
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG_JSON | values))
    (directory / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    return directory


def task_tensors(module: str, outputs: int, pooler: bool) -> dict[str, np.ndarray]:
    encoder = {n: v for n, v in state_dict().items() if n.startswith("bert.")}
    kept = {n: v for n, v in encoder.items() if pooler or "pooler" not in n}
    return kept | linear(np.random.default_rng(1), module, 12, outputs)


@pytest.mark.parametrize(
    ("architecture", "tensors", "labels", "head"),
    [
        ("BertForPreTraining", state_dict(), {}, None),
        (
            CLASSIFIER,
            task_tensors("classifier", 3, True),
            {"0": "no", "1": "maybe", "2": "yes"},
            {"task": "classification", "labels": ["no", "maybe", "yes"]},
        ),
        (
            CLASSIFIER,
            task_tensors("classifier", 1, True),
            {"0": "similarity"},
            {"task": "regression", "labels": ["similarity"]},
        ),
        (
            "BertForTokenClassification",
            task_tensors("classifier", 2, False),
            {},
            {"task": "tagging", "labels": ["LABEL_0", "LABEL_1"]},
        ),
        (
            "BertForQuestionAnswering",
            task_tensors("qa_outputs", 2, False),
            {},
            {"task": "span", "labels": ["start", "end"]},
        ),
        (
            "BertForMultipleChoice",
            task_tensors("classifier", 1, True),
            {},
            {"task": "multiple_choice", "labels": ["score"]},
        ),
    ],
)
def test_round_trip_of_a_directory_changes_nothing(architecture, tensors, labels, head, tmp_path):
    tensors = {name: value.astype(np.float32) for name, value in tensors.items()}
    config_values = {"architectures": [architecture]} | ({"id2label": labels} if labels else {})
    model = read_model(write_directory(tmp_path / "source", tensors, **config_values))
    assert sorted(model.report.loaded) == sorted(tensors) and not model.report.unused
    assert model.settings.get("head") == head
    write_checkpoint(tmp_path / "native", *model[:3])
    native = read_model(tmp_path / "native")
    assert_trees_equal(native.params, model.params)
    save_huggingface(tmp_path / "back", *native[:3])
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)
    values = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {**values, **CONFIG_JSON, **config_values} == values
    again = read_model(tmp_path / "back")
    assert again.settings == model.settings
    assert again.tokenizer.sha256 == model.tokenizer.sha256


def test_stored_head_of_another_task_is_ignored_with_a_warning():
    plain, of_texts = ({"architectures": [name]} for name in ("BertModel", CLASSIFIER))
    classifier = {"task": "classification", "labels": ["LABEL_0", "LABEL_1"]}
    encoder = {"task": "embedding", "labels": [], "pooling": "cls"}
    ours = classifier | {"max_seq_length": 8}
    assert head_from_huggingface(of_texts | {HEAD_KEY: ours}) == ours
    assert head_from_huggingface(plain | {HEAD_KEY: encoder}) == encoder
    with pytest.warns(UserWarning, match=f"has no head: ignoring .* {HEAD_KEY}"):
        assert head_from_huggingface(plain | {HEAD_KEY: ours}) is None
    for stored in (encoder, ours | {"labels": ["no", "yes"]}, "text"):
        with pytest.warns(UserWarning, match=f"for classification: ignoring .* {HEAD_KEY}"):
            assert head_from_huggingface(of_texts | {HEAD_KEY: stored}) == classifier


@pytest.mark.parametrize(
    ("problem", "count", "task"),
    [
        ("single_label_classification", 3, "classification"),
        ("multi_label_classification", 3, "multi_label"),
        ("multi_label_classification", 1, "multi_label"),
        ("regression", 1, "regression"),
    ],
)
def test_problem_type_is_read_and_written(problem, count, task, tmp_path):
    labels = [f"LABEL_{index}" for index in range(count)]
    config_values = {"architectures": [CLASSIFIER], "problem_type": problem, "num_labels": count}
    assert head_from_huggingface(config_values) == {"task": task, "labels": labels}
    tensors = task_tensors("classifier", count, True)
    model = read_model(write_directory(tmp_path / "source", tensors, **config_values))
    save_huggingface(tmp_path / "back", *model[:3])
    values = json.loads((tmp_path / "back" / "config.json").read_text())
    assert values["problem_type"] == problem
    assert read_model(tmp_path / "back").settings["head"] == model.settings["head"]
    # Without it, as transformers does.
    assert head_from_huggingface(config_values | {"problem_type": None})["task"] == (
        "regression" if count == 1 else "classification"
    )


def test_written_weights_have_the_same_permissions_as_the_other_files(tmp_path):
    model = read_model(write_directory(tmp_path / "source", state_dict()))
    save_huggingface(tmp_path / "out", *model[:3])
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"] and len(set(modes.values())) == 1


def test_cross_encoder_is_written_as_a_regression_on_pairs(tmp_path):
    model = read_model(write_directory(tmp_path / "encoder", task_tensors("x", 1, True)))
    head = {"task": "multiple_choice", "labels": ["score"], "max_seq_length": 8}
    params = model.params | {"head": {"kernel": np.ones((12, 1)), "bias": np.zeros(1)}}
    for extra, architecture in (({"max_query_length": 4}, CLASSIFIER), ({}, CHOICE)):
        settings = model.settings | {"head": head | extra}
        save_huggingface(tmp_path / architecture, params, settings, model.tokenizer)
        values = json.loads((tmp_path / architecture / "config.json").read_text())
        assert values["architectures"] == [architecture]
        assert values.get("problem_type") == ("regression" if extra else None)
        with warnings.catch_warnings(action="error"):
            assert read_model(tmp_path / architecture).settings["head"] == head | extra


@pytest.mark.parametrize("family", ["roberta", "electra"])
def test_cross_encoder_has_the_tensors_of_its_class_in_transformers(family):
    head = {"task": "multiple_choice", "labels": ["score"], "max_query_length": 4}
    paths = ("head/kernel", "encoder/pooler/dense/bias")
    names = [huggingface_name(path, head, FORMATS[family]) for path in paths]
    assert names == ["classifier.out_proj.weight", "classifier.dense.bias"]


@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("cls", False)])
def test_bi_encoder_is_written_with_the_modules_of_sentence_transformers(
    pooling, normalize, tmp_path
):
    tensors = {n: v for n, v in state_dict().items() if n.startswith("bert.")}
    model = read_model(write_directory(tmp_path / "encoder", tensors))
    head = {"task": "embedding", "labels": [], "max_seq_length": 8}
    head |= {"pooling": pooling, "normalize": normalize}
    save_huggingface(tmp_path / "out", model.params, model.settings | {"head": head}, model[2])

    def read(name):
        return json.loads((tmp_path / "out" / name).read_text())

    modules = [(m["path"], m["type"].rpartition(".")[2]) for m in read("modules.json")]
    expected = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    assert modules == expected[: 3 if normalize else 2]
    assert read("1_Pooling/config.json") == {
        "word_embedding_dimension": 12,
        "pooling_mode_cls_token": pooling == "cls",
        "pooling_mode_mean_tokens": pooling == "mean",
    }
    assert read("sentence_bert_config.json")["max_seq_length"] == 8
    assert read_model(tmp_path / "out").settings["head"] == head


@pytest.mark.slow
def test_left_to_right_model_is_a_decoder_to_transformers(tmp_path):
    config = dataclasses.replace(CONFIG, causal=True)
    params, _ = params_from_huggingface(state_dict(), config)
    del params["nsp"], params["encoder"]["pooler"]
    settings = model_settings(config, params)
    tokenizer = tokenizer_from_bytes("vocab.txt", "\n".join(PIECES).encode())
    save_huggingface(tmp_path / "decoder", params, settings, tokenizer)
    written = json.loads((tmp_path / "decoder/config.json").read_text())
    assert written["is_decoder"] is True and written["architectures"] == ["BertLMHeadModel"]
    model = read_model(tmp_path / "decoder")
    assert model.settings["architecture"] == settings["architecture"]
    assert_trees_equal(model.params, params)

    settings["head"] = {"task": "classification", "labels": ["no", "yes"]}
    with pytest.raises(ValueError, match=r"transformers pools \[CLS\], which sees no other token"):
        save_huggingface(tmp_path / "classifier", params, settings, tokenizer)
    settings["head"] = {"task": "tagging", "labels": ["O", "B-X"], "lstm_size": 4}
    with pytest.raises(ValueError, match="transformers has no head for tagging with a BiLSTM"):
        save_huggingface(tmp_path / "tagger", params | {"lstm": {}}, settings, tokenizer)


@pytest.mark.parametrize(
    ("function", "damage", "message"),
    [
        ("save_file", lambda tensors: tensors["cls.predictions.bias"].put(3, 1), "bias is read as"),
        ("save_file", lambda tensors: tensors.pop("cls.predictions.bias"), "bias is read as anoth"),
        ("transformers_files", None, "its ids are others"),
    ],
)
def test_export_is_read_back(function, damage, message, tmp_path, monkeypatch):
    """As if a disk had lost something."""
    from bert_jax.checkpoints import export

    def save_other_tensors(tensors, path, metadata):
        changed = {name: tensor.copy() for name, tensor in tensors.items()}
        damage(changed)
        save_file(changed, path, metadata)

    def lose_a_line(*arguments):
        files = transformers_files(*arguments)
        return files | {"vocab.txt": files["vocab.txt"].replace("\nw3\n", "\nx3\n")}

    if function == "save_file":
        monkeypatch.setattr(export.safetensors.numpy, function, save_other_tensors)
    else:
        monkeypatch.setattr(export, function, lose_a_line)
    params, _ = params_from_huggingface(state_dict(), CONFIG)
    tokenizer = tokenizer_from_bytes("vocab.txt", "\n".join(PIECES).encode())
    with pytest.raises(OSError, match=message):
        save_huggingface(tmp_path / "out", params, model_settings(CONFIG, params), tokenizer)


@pytest.mark.parametrize("family", FAMILIES)
def test_left_to_right_models_are_exported_as_such_or_refused(family, tmp_path):
    fields = dict(FAMILIES[family].fields) | {"family": family, "causal": True}
    if family == "electra":
        fields["embedding_size"] = 4
    config = dataclasses.replace(CONFIG, **fields)
    shapes = flax.traverse_util.unflatten_dict(parameter_shapes(config), sep="/")
    params = {
        name: jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes[name])
        for name in ("encoder", "mlm")
    }
    params["encoder"].pop("pooler", None)
    settings = model_settings(config, params)
    pieces = ["[CLS]", "[PAD]", *(piece for piece in PIECES if piece not in ("[CLS]", "[PAD]"))]
    tokenizer = tokenizer_from_bytes("vocab.txt", "\n".join(pieces).encode())
    if family in ("albert", "distilbert"):
        with pytest.raises(ValueError, match=f"{family} has no class that reads left to right"):
            save_huggingface(tmp_path / "decoder", params, settings, tokenizer)
        return
    save_huggingface(tmp_path / "decoder", params, settings, tokenizer)
    assert read_model(tmp_path / "decoder").settings["architecture"] == settings["architecture"]


def test_head_of_an_objective_is_omitted_with_a_warning(tmp_path, caplog):
    params, _ = params_from_huggingface(state_dict(), CONFIG)
    tokenizer = tokenizer_from_bytes("vocab.txt", "\n".join(PIECES).encode())
    own = params | {"sbo": {"bias": np.zeros(256, np.float32)}}
    save_huggingface(tmp_path / "out", own, model_settings(CONFIG, own), tokenizer)
    assert "not exported: sbo; used in pre-training only" in caplog.text
    assert_trees_equal(read_model(tmp_path / "out").params, params)


def test_bfloat16_is_read_and_an_unsupported_dtype_is_named_with_its_tensor(tmp_path):
    rounded = {name: value.astype(jnp.bfloat16) for name, value in state_dict().items()}
    path = write_directory(tmp_path, rounded) / "model.safetensors"
    assert_trees_equal(read_model(tmp_path).params, params_from_huggingface(rounded, CONFIG)[0])
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header[QUERY] |= {"dtype": "F8_E4M3", "shape": [24, 12]}
    header = json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    with pytest.raises(ValueError, match=rf"tensor {QUERY}: unsupported dtype F8_E4M3"):
        read_model(tmp_path)


def test_encoder_is_written_without_prefix_and_cannot_fill_masks(tmp_path):
    tensors = {n: v for n, v in state_dict().items() if n.startswith("bert.")}
    model = read_model(write_directory(tmp_path / "source", tensors))
    assert not {"mlm", "nsp"} & set(model.settings["modules"])
    save_huggingface(tmp_path / "back", *model[:3])
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == {name.removeprefix("bert.") for name in tensors}
    with pytest.raises(ValueError, match="this model has no masked-LM head"):
        load(tmp_path / "back").fill_mask("w1 [MASK]")


def test_head_that_architectures_do_not_name_is_unused(tmp_path):
    model = read_model(write_directory(tmp_path, task_tensors("classifier", 3, True)))
    assert model.report.unused == ("classifier.bias", "classifier.weight")
    with pytest.warns(UserWarning, match="2 tensors are unused, such as classifier.bias"):
        load(tmp_path)


def test_load_warns_of_a_missing_head_but_not_of_training_state_or_pretraining_heads(tmp_path):
    encoder = {n: v for n, v in state_dict().items() if n.startswith("bert.")}
    encoder["bert.embeddings.position_ids"] = np.arange(9)[None]
    write_directory(tmp_path, encoder)
    with warnings.catch_warnings(action="error"):
        load(tmp_path)
    write_directory(tmp_path, encoder, architectures=[CLASSIFIER])
    message = "2 tensors are missing, such as classifier.bias; the file lacks the head"
    with pytest.warns(UserWarning, match=message):
        assert load(tmp_path).head is None
    slots = ("global_step", "bert/pooler/dense/kernel/adam_m", "cls/predictions/output_bias/adam_v")
    assert unexpected_tensors(LoadReport((), ("cls/predictions/output_bias",), slots)) == ""


@pytest.mark.parametrize(
    ("unused", "shown"),
    [
        ((), ""),
        (("training", "embeddings.position_ids", "bert/pooler/dense/bias/adam_v"), ""),
        (("training", "extra"), "; not used: extra"),
        (("a", "b", "c", "d", "e"), "; not used: a, b, c and 2 others"),
    ],
)
def test_log_names_only_tensors_that_are_unused_without_a_reason(unused, shown, caplog):
    caplog.set_level("INFO", "absl")
    log_report("weights", LoadReport(("encoder",), (), unused))
    assert caplog.messages == [f"Read 1 tensors from weights{shown}; --verbosity=1 lists them"]


def test_vocabulary_is_read_from_tokenizer_json(tmp_path):
    write_directory(tmp_path, state_dict())
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither vocab.txt nor tokenizer.json"):
        read_model(tmp_path)
    values = {
        "model": {"type": "WordPiece", "vocab": {p: i for i, p in enumerate(PIECES[:-1])}},
        "added_tokens": [{"content": PIECES[-1], "id": 130}, {"content": "[PAD]", "id": 0}],
        "normalizer": {"lowercase": True},
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(values))
    tokenizer = read_model(tmp_path).tokenizer
    assert [tokenizer.id_to_token(index) for index in range(131)] == PIECES
    values["added_tokens"][0]["id"] = 131
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="has 132 ids"):
        read_model(tmp_path)
    path.write_text(json.dumps({"model": {"type": "BPE"}}))
    with pytest.raises(ValueError, match="pre_tokenizer is None"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"pieces": [*PIECES, "new"]}, r"has 132 ids"),
        (
            {"tensors": state_dict(num_layers=1)},
            "layer.1.attention.output.LayerNorm.bias: expected .* found no such tensor",
        ),
        (
            {"tensors": task_tensors("classifier", 3, True), "architectures": [CLASSIFIER]},
            r"classifier.weight: expected shape \(2, 12\), found \(3, 12\)",
        ),
        (
            {"architectures": [CLASSIFIER], "problem_type": "regression"},
            "problem_type 'regression' with 2 labels.*remove `architectures`",
        ),
        (
            {"tensors": task_tensors("classifier", 2, False), "architectures": [CLASSIFIER]},
            "the head for classification needs a pooler",
        ),
    ],
)
def test_inconsistent_or_unsupported_directory_is_an_error(contents, message, tmp_path):
    write_directory(tmp_path, **({"tensors": state_dict()} | contents))
    with pytest.raises(ValueError, match=message):
        read_model(tmp_path)


def test_named_token_without_an_embedding_is_an_error(tmp_path):
    directory = write_directory(tmp_path / "m", state_dict())
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<bos>"}')
    with pytest.raises(ValueError, match=r"<bos> have no embedding"):
        read_model(directory)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", "no", "model.safetensors is damaged"),
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", "[]", "expected a JSON object"),
    ],
)
def test_damaged_file_is_an_error(name, content, message, tmp_path):
    (write_directory(tmp_path, state_dict()) / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"classifier_dropout": 0.3}, 0.3),
        ({"classifier_dropout": None}, None),
        ({"model_type": "roberta", "classifier_dropout": 0.0}, 0.0),
        ({"model_type": "albert"}, 0.1),  # transformers' default.
        ({"model_type": "albert", "classifier_dropout_prob": 0.2}, 0.2),
    ],
)
def test_dropout_before_the_head_is_read(values, expected):
    assert config_from_huggingface(values).classifier_dropout_rate == expected


def test_dropout_before_the_head_must_be_a_rate():
    for value, message in (("a", "is 'a', expected a number"), (1.5, "must be in")):
        with pytest.raises(ValueError, match=message):
            config_from_huggingface({"classifier_dropout": value})


def test_missing_config_is_an_error(tmp_path):
    (write_directory(tmp_path, state_dict()) / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has weights, but no config\.json"):
        read_model(tmp_path)


def test_pickled_weights_without_torch_say_what_to_install(tmp_path, monkeypatch):
    write_directory(tmp_path, state_dict())
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"not a zip file.* needs torch: pip install torch, or"):
        read_model(tmp_path)


def test_sentencepiece_is_not_exported_and_nothing_is_overwritten(tmp_path):
    model = read_model(write_directory(tmp_path, state_dict()))
    (tmp_path / "text.txt").write_text(random_text(20))
    content = train_sentencepiece(str(tmp_path / "text.txt"), 60, lower_case=True)
    tokenizer = tokenizer_from_bytes("spiece.model", content)
    with pytest.raises(ValueError, match="a SentencePiece model cannot be exported"):
        save_huggingface(tmp_path / "out", model.params, model.settings, tokenizer)
    assert not (tmp_path / "out").exists()
    for write in (save_huggingface, write_checkpoint):
        with pytest.raises((FileExistsError, CheckpointError), match="exist"):
            write(tmp_path, *model[:3])


def test_an_exported_regression_has_the_scale_of_the_labels_in_its_last_layer(tmp_path):
    """So that transformers, which knows no scale, and a new load give the values of the labels."""
    scale = {"target_mean": 1000.0, "target_std": 7.0}
    head = {"task": "regression", "labels": ["value"]}
    plain = load(write_head(tmp_path / "plain", **head))
    model = write_head(tmp_path / "scaled", **head, **scale)
    exported = write_head(tmp_path / "exported", imported=True, **head, **scale)
    inputs = texts(5)
    expected = [1000 + 7 * value for value in plain.classify(inputs)]
    assert len(set(expected)) > 1
    assert load(model).classify(inputs) == pytest.approx(expected, rel=1e-6)
    assert load(exported).classify(inputs) == pytest.approx(expected, rel=1e-6)
    load(model).save(tmp_path / "again")
    assert load(tmp_path / "again").classify(inputs) == pytest.approx(expected, rel=1e-6)
    found = load_file(exported / "model.safetensors")
    kernel, bias = (plain.params["head"][name] for name in ("kernel", "bias"))
    np.testing.assert_allclose(found["classifier.weight"], 7 * np.transpose(kernel), rtol=1e-6)
    np.testing.assert_allclose(found["classifier.bias"], 1000 + 7 * bias, rtol=1e-6)
