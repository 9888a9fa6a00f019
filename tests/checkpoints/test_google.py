"""Google's names, and its directories read with a stub of TensorFlow."""

import dataclasses
import json
import sys
import types

import numpy as np
import pytest
from safetensors.numpy import save_file

from bert_jax.checkpoints.google import tensor_table
from bert_jax.checkpoints.huggingface import huggingface_name, params_from_huggingface
from bert_jax.checkpoints.parameters import parameter_shapes, unexpected_tensors
from bert_jax.checkpoints.read import read_model
from tests.helpers.corpora import write_albert_vocabulary
from tests.helpers.models import CONFIG, CONFIG_JSON, PIECES, assert_trees_equal, flat, state_dict

# Names in uncased_L-12_H-768_A-12 as released, with {layer} for the layer's number.
RELEASED = """
bert/embeddings/LayerNorm/beta bert/embeddings/LayerNorm/gamma
bert/embeddings/position_embeddings bert/embeddings/token_type_embeddings
bert/embeddings/word_embeddings
bert/encoder/layer_{layer}/attention/output/LayerNorm/beta
bert/encoder/layer_{layer}/attention/output/LayerNorm/gamma
bert/encoder/layer_{layer}/attention/output/dense/bias
bert/encoder/layer_{layer}/attention/output/dense/kernel
bert/encoder/layer_{layer}/attention/self/key/bias
bert/encoder/layer_{layer}/attention/self/key/kernel
bert/encoder/layer_{layer}/attention/self/query/bias
bert/encoder/layer_{layer}/attention/self/query/kernel
bert/encoder/layer_{layer}/attention/self/value/bias
bert/encoder/layer_{layer}/attention/self/value/kernel
bert/encoder/layer_{layer}/intermediate/dense/bias
bert/encoder/layer_{layer}/intermediate/dense/kernel
bert/encoder/layer_{layer}/output/LayerNorm/beta bert/encoder/layer_{layer}/output/LayerNorm/gamma
bert/encoder/layer_{layer}/output/dense/bias bert/encoder/layer_{layer}/output/dense/kernel
bert/pooler/dense/bias bert/pooler/dense/kernel cls/predictions/output_bias
cls/predictions/transform/LayerNorm/beta cls/predictions/transform/LayerNorm/gamma
cls/predictions/transform/dense/bias cls/predictions/transform/dense/kernel
cls/seq_relationship/output_bias cls/seq_relationship/output_weights
"""
# In albert_base_v2, with {layer} for the number of the group.
ALBERT_LAYER = "bert/encoder/transformer/group_{layer}/inner_group_0"
RELEASED_ALBERT = f"""
bert/embeddings/LayerNorm/beta bert/embeddings/LayerNorm/gamma
bert/embeddings/position_embeddings bert/embeddings/token_type_embeddings
bert/embeddings/word_embeddings
bert/encoder/embedding_hidden_mapping_in/bias bert/encoder/embedding_hidden_mapping_in/kernel
{ALBERT_LAYER}/LayerNorm/beta {ALBERT_LAYER}/LayerNorm/gamma
{ALBERT_LAYER}/LayerNorm_1/beta {ALBERT_LAYER}/LayerNorm_1/gamma
{ALBERT_LAYER}/attention_1/output/dense/bias {ALBERT_LAYER}/attention_1/output/dense/kernel
{ALBERT_LAYER}/attention_1/self/key/bias {ALBERT_LAYER}/attention_1/self/key/kernel
{ALBERT_LAYER}/attention_1/self/query/bias {ALBERT_LAYER}/attention_1/self/query/kernel
{ALBERT_LAYER}/attention_1/self/value/bias {ALBERT_LAYER}/attention_1/self/value/kernel
{ALBERT_LAYER}/ffn_1/intermediate/dense/bias {ALBERT_LAYER}/ffn_1/intermediate/dense/kernel
{ALBERT_LAYER}/ffn_1/intermediate/output/dense/bias
{ALBERT_LAYER}/ffn_1/intermediate/output/dense/kernel
bert/pooler/dense/bias bert/pooler/dense/kernel cls/predictions/output_bias
cls/predictions/transform/LayerNorm/beta cls/predictions/transform/LayerNorm/gamma
cls/predictions/transform/dense/bias cls/predictions/transform/dense/kernel
cls/seq_relationship/output_bias cls/seq_relationship/output_weights
"""
# In electra_small: BERT's embeddings and layers, below other scopes; the generator's own parts.
EMBEDDINGS = [name for name in RELEASED.split() if name.startswith("bert/embeddings/")]
LAYERS = [name for name in RELEASED.split() if name.startswith("bert/encoder/")]
ELECTRA_EMBEDDINGS = [name.replace("bert/", "electra/") for name in EMBEDDINGS]
RELEASED_DISCRIMINATOR = [
    *ELECTRA_EMBEDDINGS,
    *(name.replace("bert/", "electra/") for name in LAYERS),
    "electra/embeddings_project/bias",
    "electra/embeddings_project/kernel",
    "discriminator_predictions/dense/bias",
    "discriminator_predictions/dense/kernel",
    "discriminator_predictions/dense_1/bias",
    "discriminator_predictions/dense_1/kernel",
]
RELEASED_GENERATOR = [
    *ELECTRA_EMBEDDINGS,
    *(name.replace("bert/", "generator/") for name in LAYERS),
    "generator/embeddings_project/bias",
    "generator/embeddings_project/kernel",
    "generator_predictions/LayerNorm/beta",
    "generator_predictions/LayerNorm/gamma",
    "generator_predictions/dense/bias",
    "generator_predictions/dense/kernel",
    "generator_predictions/output_bias",
]
ALBERT_CONFIG = dataclasses.replace(
    CONFIG,
    family="albert",
    embedding_size=6,
    shares_layers=True,
    activation="gelu_tanh",
    classifier_dropout_rate=0.1,
)
ELECTRA_CONFIG = dataclasses.replace(
    CONFIG, family="electra", embedding_size=6, pooler_activation="gelu"
)


@pytest.mark.parametrize(
    ("config", "is_generator", "released"),
    [
        (CONFIG, False, RELEASED.split()),
        (ALBERT_CONFIG, False, RELEASED_ALBERT.split()),
        (ELECTRA_CONFIG, False, RELEASED_DISCRIMINATOR),
        (ELECTRA_CONFIG, True, RELEASED_GENERATOR),
    ],
    ids=["bert", "albert", "discriminator", "generator"],
)
def test_names_equal_the_released_ones(config, is_generator, released):
    table = tensor_table(config, is_generator)
    assert sorted(tensor.name for tensor in table.values()) == sorted(released)


def variables() -> dict[str, np.ndarray]:
    """Returns `state_dict()` as Google stores it: kernels are `[inputs, outputs]`."""
    tensors, stored, table = state_dict(), {}, tensor_table(CONFIG)
    for path in table:
        for layer in (0, 1):
            value = tensors[huggingface_name(path).format(layer=layer)]
            transpose = path.endswith("/kernel") and path != "nsp/dense/kernel"
            stored[table[path].name.format(layer=layer)] = value.T if transpose else value
    return stored


def random_variables(config, is_generator: bool = False) -> tuple[dict, dict]:
    """Returns random variables for `config`, and the corresponding parameters."""
    rng, stored, params = np.random.default_rng(0), {}, {}
    table, shapes = tensor_table(config, is_generator), parameter_shapes(config)
    for path, (name, is_transposed, num_rows, *_) in table.items():
        params[path] = np.zeros(shapes[path].shape, np.float32)
        values = params[path][:num_rows]
        values[...] = rng.standard_normal(values.shape)
        for layer, value in enumerate(values if "{layer}" in name else [values]):
            stored[name.format(layer=layer)] = value.T if is_transposed else value
    return stored, params


def stub_tensorflow(monkeypatch, stored: dict[str, np.ndarray]) -> None:
    """Makes `import tensorflow` return a stub that reads `stored` from any checkpoint."""
    reader = types.SimpleNamespace(
        get_variable_to_shape_map=lambda: {name: value.shape for name, value in stored.items()},
        get_tensor=stored.__getitem__,
    )
    tensorflow = types.SimpleNamespace(
        train=types.SimpleNamespace(load_checkpoint=lambda prefix: reader),
        errors=types.SimpleNamespace(OpError=OSError),
    )
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A directory as released, with the checkpoint's variables in `directory.variables`."""
    stored = variables()
    stub_tensorflow(monkeypatch, stored)
    (tmp_path / "bert_config.json").write_text(
        json.dumps(
            {n: v for n, v in CONFIG_JSON.items() if n not in ("model_type", "layer_norm_eps")}
        )
    )
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))
    (tmp_path / "bert_model.ckpt.index").write_text("")
    return types.SimpleNamespace(path=tmp_path, variables=stored)


def test_parameters_equal_those_from_transformers_and_optimizer_slots_are_unused(directory):
    names = set(directory.variables)
    slots = {f"{name}/adam_{moment}" for name in names for moment in "mv"} | {"global_step"}
    directory.variables.update(dict.fromkeys(slots, np.zeros(1)))
    model = read_model(directory.path)
    assert_trees_equal(model.params, params_from_huggingface(state_dict(), CONFIG)[0])
    assert set(model.report.loaded) == names and set(model.report.unused) == slots
    assert model.report.missing == () and {"encoder/pooler", "mlm", "nsp"} <= set(
        model.settings["modules"]
    )
    assert model.tokenizer.vocab_size == 131


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("bert/encoder/layer_1/attention/self/query/kernel", None, "found no such tensor"),
        (
            "bert/encoder/layer_0/intermediate/dense/kernel",
            np.zeros((20, 12)),
            r"\(12, 20\), found",
        ),
        ("cls/seq_relationship/output_weights", np.zeros((12, 2)), r"\(2, 12\), found \(12, 2\)"),
    ],
)
def test_missing_variable_or_wrong_shape_is_named(name, value, message, directory):
    directory.variables[name] = value
    if value is None:
        del directory.variables[name]
    with pytest.raises(ValueError, match=f"bert_model.ckpt: tensor {name}: expected .*{message}"):
        read_model(directory.path)


def test_without_tensorflow_the_error_says_what_to_install(directory, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match="needs TensorFlow: pip install tensorflow-cpu"):
        read_model(directory.path)


def test_missing_index_and_vocabulary_of_another_size_are_errors(directory):
    (directory.path / "vocab.txt").write_text("".join(f"{p}\n" for p in (*PIECES, "new")))
    with pytest.raises(ValueError, match=r"has 132 ids"):
        read_model(directory.path)
    (directory.path / "bert_model.ckpt.index").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no TensorFlow checkpoint"):
        read_model(directory.path)


def test_checkpoint_of_any_step_is_found_and_several_are_an_error(directory):
    index = directory.path / "bert_model.ckpt.index"
    later = index.rename(directory.path / "model.ckpt-1000000.index")
    assert read_model(directory.path).report.missing == ()
    directory.variables.clear()
    with pytest.raises(ValueError, match=r"/model\.ckpt-1000000: tensor"):
        read_model(directory.path)
    (directory.path / "model.ckpt-2000000.index").write_text("")
    with pytest.raises(ValueError, match=rf"found {later.name}, model\.ckpt-2000000\.index"):
        read_model(directory.path)


def test_weights_of_transformers_in_the_directory_need_no_tensorflow(directory, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    save_file(state_dict(), directory.path / "model.safetensors")
    model = read_model(directory.path)
    assert_trees_equal(model.params, params_from_huggingface(state_dict(), CONFIG)[0])


def without(values: dict, *names: str) -> dict:
    return {name: value for name, value in values.items() if name not in names}


def test_albert_is_read_with_its_tokenizer_and_the_tanh_form_of_gelu(tmp_path, monkeypatch):
    stored, params = random_variables(ALBERT_CONFIG)
    slots = {f"{name}/{slot}": stored[name] for name in stored for slot in ("lamb_m", "lamb_v")}
    stub_tensorflow(monkeypatch, stored | slots | {"global_step": np.zeros(())})
    write_albert_vocabulary(tmp_path / "30k-clean.model")
    (tmp_path / "model.ckpt-best.index").write_text("")
    # Google's keys, some of which transformers does not know; its "gelu" is the tanh form.
    values = without(CONFIG_JSON, "model_type", "layer_norm_eps") | {
        "embedding_size": 6,
        "num_hidden_groups": 1,
        "inner_group_num": 1,
        "down_scale_factor": 1,
        "net_structure_type": 0,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    }
    (tmp_path / "albert_config.json").write_text(json.dumps(values))
    read = read_model(tmp_path)
    assert read.settings["architecture"] == {"name": "bert"} | vars(ALBERT_CONFIG)
    assert flat(read.params).keys() == params.keys()
    for path, value in flat(read.params).items():
        np.testing.assert_array_equal(value, params[path], err_msg=path)
    assert set(read.report.unused) == {*slots, "global_step"} and not read.report.missing
    assert unexpected_tensors(read.report) == ""
    assert read.tokenizer.encode("The RIVER") == read.tokenizer.encode("the river")

    values["hidden_groups"], values["inner_group_num"] = 1, 2
    (tmp_path / "albert_config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="inner_group_num is 2"):
        read_model(tmp_path)


def electra_directory(tmp_path, monkeypatch, **settings):
    """Returns a directory of ELECTRA as released, with a `config.json`, and both networks."""
    discriminator, generator = (
        random_variables(ELECTRA_CONFIG, is_generator) for is_generator in (False, True)
    )
    stored = generator[0] | discriminator[0]
    slots = {f"{name}/adam_{moment}": stored[name] for name in stored for moment in "mv"}
    stub_tensorflow(monkeypatch, stored | slots | {"global_step": np.zeros(())})
    values = CONFIG_JSON | {"model_type": "electra", "embedding_size": 6} | settings
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))
    for suffix in ("index", "data-00000-of-00001"):
        (tmp_path / f"electra_small.{suffix}").write_text("")
    return tmp_path, discriminator, generator


@pytest.mark.parametrize("name", ["ElectraForPreTraining", "ElectraForMaskedLM"])
def test_architectures_choose_one_of_electras_networks(name, tmp_path, monkeypatch):
    directory, *networks = electra_directory(tmp_path, monkeypatch, architectures=[name])
    is_generator = name == "ElectraForMaskedLM"
    read, (stored, params) = read_model(directory), networks[is_generator]
    for path, value in flat(read.params).items():
        if not path.startswith("encoder/embeddings/") or "projection" in path:  # They are shared.
            np.testing.assert_array_equal(value, params[path], err_msg=path)
    assert flat(read.params).keys() == params.keys()
    assert ("mlm" in read.params) == is_generator
    assert ("discriminator" in read.params) != is_generator
    assert set(read.report.loaded) == stored.keys() and not read.report.missing
    other = "generator/" if not is_generator else "electra/encoder/"
    assert any(name.startswith(other) for name in read.report.unused)
    assert {"global_step", "electra/embeddings/word_embeddings/adam_v"} <= set(read.report.unused)
    assert unexpected_tensors(read.report) == ""  # `load` does not warn of the other network.


def test_electra_without_a_configuration_says_where_to_find_one(tmp_path, monkeypatch):
    directory, *_ = electra_directory(tmp_path, monkeypatch)
    (directory / "config.json").unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"no bert_config.json, albert_config.json or config.json. ELECTRA's archives have "
        r'none: add .* for electra_small one with \{"model_type": "electra"\}',
    ):
        read_model(directory)
    (directory / "config.json").write_text('{"model_type": "roberta"}')
    with pytest.raises(
        ValueError, match="model_type is 'roberta', and only TensorFlow checkpoints of"
    ):
        read_model(directory)


def test_module_of_tensorflow_hub_is_refused_by_name(tmp_path):
    (tmp_path / "saved_model.pb").write_bytes(b"")
    with pytest.raises(
        FileNotFoundError, match=r"holds saved_model\.pb, which is not read: a module of"
    ):
        read_model(tmp_path)
