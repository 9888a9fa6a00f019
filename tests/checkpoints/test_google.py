"""Google's names, and its directories read with a stub of TensorFlow."""

import json
import sys
import types

import numpy as np
import pytest
from safetensors.numpy import save_file

from bert_jax.checkpoints.google import tensor_table
from bert_jax.checkpoints.huggingface import huggingface_name, params_from_huggingface
from bert_jax.checkpoints.parameters import parameter_shapes
from bert_jax.checkpoints.read import read_model
from tests.helpers import CONFIG, CONFIG_JSON, PIECES, assert_trees_equal, state_dict

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


def test_names_equal_the_released_ones():
    assert sorted(tensor.name for tensor in tensor_table(CONFIG).values()) == sorted(
        RELEASED.split()
    )


def variables() -> dict[str, np.ndarray]:
    """Returns `state_dict()` as Google stores it: kernels are `[inputs, outputs]`."""
    tensors, stored, table = state_dict(), {}, tensor_table(CONFIG)
    for path in parameter_shapes(CONFIG):
        for layer in (0, 1):
            value = tensors[huggingface_name(path).format(layer=layer)]
            transpose = path.endswith("/kernel") and path != "nsp/dense/kernel"
            stored[table[path].name.format(layer=layer)] = value.T if transpose else value
    return stored


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A directory as released, with the checkpoint's variables in `directory.variables`."""
    stored = variables()
    reader = types.SimpleNamespace(
        get_variable_to_shape_map=lambda: {name: value.shape for name, value in stored.items()},
        get_tensor=stored.__getitem__,
    )
    tensorflow = types.SimpleNamespace(
        train=types.SimpleNamespace(load_checkpoint=lambda prefix: reader),
        errors=types.SimpleNamespace(OpError=OSError),
    )
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)
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
def test_missing_or_misshapen_variable_is_named(name, value, message, directory):
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
    with pytest.raises(ValueError, match=r"has 132 ids, expected 131 .*: new have no embedding"):
        read_model(directory.path)
    (directory.path / "bert_model.ckpt.index").unlink()
    with pytest.raises(FileNotFoundError, match=r"no such file: .*bert_model.ckpt.index"):
        read_model(directory.path)


def test_checkpoint_of_any_step_is_found_and_several_are_an_error(directory):
    index = directory.path / "bert_model.ckpt.index"
    later = index.rename(directory.path / "model.ckpt-1000000.index")
    assert read_model(directory.path).report.missing == ()
    directory.variables.clear()
    with pytest.raises(ValueError, match=r"/model\.ckpt-1000000: tensor"):
        read_model(directory.path)
    (directory.path / "model.ckpt-2000000.index").write_text("")
    with pytest.raises(
        ValueError, match=rf"found {later.name}, model\.ckpt-2000000\.index: remove"
    ):
        read_model(directory.path)


def test_weights_of_transformers_in_the_directory_need_no_tensorflow(directory, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    save_file(state_dict(), directory.path / "model.safetensors")
    model = read_model(directory.path)
    assert_trees_equal(model.params, params_from_huggingface(state_dict(), CONFIG)[0])
