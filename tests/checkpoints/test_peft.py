"""Adapters in the format of `peft`: what is written is read back, and no field is ignored."""

import functools
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.parameters import model_settings
from bert_jax.checkpoints.peft import is_base_of_peft, peft_format
from bert_jax.checkpoints.read import read_model
from bert_jax.checkpoints.transformers_config import format_of
from bert_jax.data.features import unpack_rows
from bert_jax.model.heads import make_model
from bert_jax.model.lora import (
    Lora,
    choose_layers,
    dense_layers,
    init_adapters,
    merge,
    split_params,
)
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import write_vocabulary
from tests.helpers.models import (
    flat,
    random_params,
    small_model_config,
    small_modernbert_config,
    small_xlnet_config,
)

HEAD = {"task": "classification", "labels": ["a", "b", "c"], "max_seq_length": 16}
ALBERT = {"family": "albert", "shares_layers": True, "embedding_size": 8}
KINDS = {
    "bert": lambda size: small_model_config(size, num_layers=1),
    "albert": lambda size: small_model_config(size, **ALBERT),
    "roberta": lambda size: small_model_config(size, num_layers=1, family="roberta"),
    "modernbert": small_modernbert_config,
}


def write_adapter(directory, make_config, targets="", new_pooler=False) -> dict:
    """Writes a base model and a random adapter of it; returns the parameters of both, merged."""
    tokenizer = load_tokenizer(write_vocabulary(directory / "vocab.txt"))
    config = make_config(tokenizer.vocab_size)
    model = make_model(config, HEAD)
    rows = {"tokens": np.zeros((1, 8), np.int32), "sequence_bounds": np.zeros((1, 1, 3), np.int32)}
    batch = rows | unpack_rows(rows)
    params = random_params(model, batch)
    params["encoder"]["embeddings"]["token_embedding"]["embedding"][config.vocab_size :] = 0
    encoder = {k: v for k, v in params["encoder"].items() if k != "pooler" or not new_pooler}
    base = {"encoder": encoder}
    write_checkpoint(directory / "base", base, model_settings(config, base), tokenizer)
    trained, frozen = split_params(params, base)
    groups = choose_layers(
        encoder, dense_layers(model, batch), targets, format_of(config).fused_layers()
    )
    lora = Lora(2, 3.0, groups)
    shapes = jax.eval_shape(lambda: init_adapters(jax.random.key(0), lora, encoder))
    rng = np.random.default_rng(1)
    trained["lora"] = jax.tree.map(lambda leaf: np.float32(rng.normal(size=leaf.shape)), shapes)
    merged = jax.jit(functools.partial(merge, lora))(trained, frozen)
    stored = peft_format(lora, config, HEAD, trained, merged, base="../base")
    (directory / "adapter").mkdir()
    for name, content in stored.files(trained["lora"], merged, {}).items():
        (directory / "adapter" / name).write_bytes(content)
    return merged


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A directory with an adapter of the queries of a BERT, and the merged parameters."""
    directory = tmp_path_factory.mktemp("given")
    return directory, write_adapter(directory, KINDS["bert"], targets="query")


def read_changed(directory, tmp_path, **changes):
    """Reads a copy of the adapter with other fields of adapter_config.json."""
    adapter = shutil.copytree(directory / "adapter", tmp_path / "adapter")
    values = json.loads((adapter / "adapter_config.json").read_text())
    values |= {"base_model_name_or_path": str(directory / "base")} | changes
    (adapter / "adapter_config.json").write_text(json.dumps(values))
    return read_model(adapter)


@pytest.mark.parametrize(
    "kind",
    [
        "bert",
        pytest.param("albert", marks=pytest.mark.slow),
        pytest.param("modernbert", marks=pytest.mark.slow),
        pytest.param("roberta", marks=pytest.mark.exhaustive),
    ],
)
def test_an_adapter_is_read_as_its_merged_model(kind, tmp_path):
    expected = flat(write_adapter(tmp_path, KINDS[kind], new_pooler=kind == "bert"))
    read = read_model(tmp_path / "adapter")
    assert read.settings["head"] == HEAD
    actual = flat(read.params)
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(actual[path], value, atol=1e-5, err_msg=path)


@pytest.mark.slow
def test_a_pooler_that_is_part_of_the_head_in_transformers_is_stored_once(tmp_path):
    """It is adapted and, as the base model of transformers has none, stored whole."""
    expected = flat(write_adapter(tmp_path, KINDS["roberta"], targets="encoder/"))
    values = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert values["modules_to_save"] == ["classifier"]
    assert not [name for name in values["target_modules"] if name.startswith("classifier")]
    names = load_file(tmp_path / "adapter/adapter_model.safetensors")
    prefix = "base_model.model.classifier"
    layers = [name for name in names if name.startswith(prefix)]
    parts = ("weight", "bias")
    assert sorted(layers) == sorted(
        f"{prefix}.{layer}.{part}" for layer in ("dense", "out_proj") for part in parts
    )
    actual = flat(read_model(tmp_path / "adapter").params)
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(actual[path], value, atol=1e-5, err_msg=path)
    (tmp_path / "pooler").mkdir()
    with pytest.raises(ValueError, match="adapted layers in classifier"):
        write_adapter(tmp_path / "pooler", KINDS["roberta"], targets="pooler")


@pytest.mark.parametrize("name", ["query.base_layer.weight", "query.weight"])
def test_products_are_added_to_whole_tensors_in_any_order(name, given, tmp_path):
    adapter = shutil.copytree(given[0] / "adapter", tmp_path / "adapter")
    (tmp_path / "base").symlink_to(given[0] / "base")
    tensors = load_file(adapter / "adapter_model.safetensors")
    layer = "base_model.model.bert.encoder.layer.0.attention.self"
    a, b = (tensors[f"{layer}.query.lora_{letter}.weight"] for letter in "AB")
    whole = np.random.default_rng(2).normal(size=(len(b), a.shape[1])).astype(np.float32)
    save_file(tensors | {f"{layer}.{name}": whole}, adapter / "adapter_model.safetensors")
    query = read_model(adapter).params["encoder"]["layers"]["query"]["kernel"][0]
    np.testing.assert_allclose(query.reshape(whole.T.shape), (whole + 1.5 * b @ a).T, atol=1e-5)


def test_base_models_that_peft_loads(given, tmp_path):
    assert not is_base_of_peft(str(given[0] / "base")) and not is_base_of_peft("gs://a/base")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert is_base_of_peft(str(tmp_path))


def test_without_our_file_the_labels_have_numbers(given, tmp_path):
    adapter = shutil.copytree(given[0] / "adapter", tmp_path / "adapter")
    (adapter / "bert_jax_head.json").unlink()
    (tmp_path / "base").symlink_to(given[0] / "base")
    head = read_model(adapter).settings["head"]
    assert head == {"task": "classification", "labels": ["LABEL_0", "LABEL_1", "LABEL_2"]}


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"use_rslora": True}, 2**0.5),
        ({"alpha_pattern": {"attention.self.query": 6.0}}, 2),
        ({"r": 4, "rank_pattern": {"layer.0.attention.self.query": 2}}, 1),
        ({"lora_dropout": 0.1, "target_modules": r".*\.query"}, 1),
        ({"target_modules": ["query"], "layers_to_transform": [0]}, 1),
        ({"target_modules": "all-linear", "layers_to_transform": 0, "layers_pattern": "layer"}, 1),
    ],
)
def test_fields_that_change_the_products_are_honoured(changes, factor, given, tmp_path):
    directory, merged = given
    base, read = (
        model.params["encoder"]["layers"]["query"]["kernel"]
        for model in (read_model(directory / "base"), read_changed(directory, tmp_path, **changes))
    )
    expected = merged["encoder"]["layers"]["query"]["kernel"] - base
    np.testing.assert_allclose(read - base, factor * expected, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"target_parameters": ["x"]}, "target_parameters is"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is"),
        ({"a_new_field": 1}, "a_new_field is 1"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"r": None}, "r is None"),
        ({"r": 4}, "query.lora_A.weight: expected 4 rows, found 2"),
        ({"target_modules": ["key"]}, "query.lora_A.weight: target_modules"),
        ({"layers_to_transform": [1]}, "query.lora_A.weight: target_modules and layers"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is None"),
        ({"base_model_name_or_path": "/nowhere"}, "base_model_name_or_path is '/nowhere'"),
    ],
)
def test_other_fields_are_refused_by_name(changes, expected, given, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=expected):
        read_changed(given[0], tmp_path, **changes)


@pytest.mark.slow
def test_what_peft_cannot_adapt_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no layer that peft can adapt"):
        write_adapter(tmp_path, small_xlnet_config)
