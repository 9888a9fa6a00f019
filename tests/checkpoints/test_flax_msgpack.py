"""The weights of transformers' old Flax models are read like the same model's for PyTorch."""

import json
import re

import flax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest

from bert_jax.checkpoints.flax_msgpack import torch_name
from bert_jax.checkpoints.read import read_model
from bert_jax.checkpoints.tensors import read_tensors
from tests.helpers.models import CONFIG_JSON, PIECES, assert_trees_equal, state_dict


def flax_tree(tensors, dtype=np.float32):
    """Returns a state dict of BERT as the tree of arrays of transformers' Flax classes."""
    flat = {}
    for name, value in tensors.items():
        *modules, leaf = name.split(".")
        if leaf == "weight" and modules[-1].endswith("embeddings"):
            leaf = "embedding"
        elif leaf == "weight" and modules[-1] == "LayerNorm":
            leaf = "scale"
        elif leaf == "weight":
            leaf, value = "kernel", value.T
        flat[(*modules, leaf)] = np.ascontiguousarray(value, dtype)
    return flax.traverse_util.unflatten_dict(flat)


def write_files(directory, **config):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG_JSON | config))
    (directory / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))
    return directory


def write_flax(directory, tree, **config):
    content = flax.serialization.to_bytes(tree)
    (write_files(directory, **config) / "flax_model.msgpack").write_bytes(content)
    return directory


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_flax_weights_equal_those_of_pytorch(dtype, tmp_path):
    tensors = {name: value.astype(jnp.dtype(dtype)) for name, value in state_dict().items()}
    model = read_model(write_flax(tmp_path, flax_tree(tensors, jnp.dtype(dtype))))
    assert not model.report.unused and not model.report.missing
    np.testing.assert_array_equal(
        model.params["encoder"]["layers"]["intermediate"]["kernel"][1],
        tensors["bert.encoder.layer.1.intermediate.dense.weight"].T.astype(np.float32),
    )
    for name, tensor in read_tensors(tmp_path).items():
        np.testing.assert_array_equal(tensor, tensors[name])


def test_class_of_flax_selects_the_head(tmp_path):
    tensors = state_dict() | {"classifier.weight": np.ones((3, 12)), "classifier.bias": np.ones(3)}
    config = {
        "architectures": ["FlaxBertForSequenceClassification"],
        "id2label": {0: 0, 1: 1, 2: 2},
    }
    model = read_model(write_flax(tmp_path, flax_tree(tensors), **config))
    assert model.settings["head"]["task"] == "classification"
    np.testing.assert_array_equal(model.params["head"]["kernel"], np.ones((12, 3)))


def test_variables_of_a_model_are_read_as_its_parameters(tmp_path):
    write_flax(tmp_path / "a", {"params": flax_tree(state_dict())})
    write_flax(tmp_path / "b", flax_tree(state_dict()))
    assert_trees_equal(read_model(tmp_path / "a").params, read_model(tmp_path / "b").params)


def test_array_in_chunks_is_read(tmp_path, monkeypatch):
    tree = flax_tree(state_dict())
    write_flax(tmp_path / "a", tree)
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 100)
    write_flax(tmp_path / "b", tree)
    assert b"chunked" in (tmp_path / "b" / "flax_model.msgpack").read_bytes()
    assert_trees_equal(read_model(tmp_path / "a").params, read_model(tmp_path / "b").params)


CONTENT = flax.serialization.to_bytes(flax_tree(state_dict()))
NO_TREE = "is not a tree of arrays, as save_pretrained of a Flax model writes"
ARRAY = flax.serialization.to_bytes(np.ones(2, np.float32))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged: it is truncated"),
        (CONTENT[:-1], "is damaged: it is truncated"),
        (CONTENT[: len(CONTENT) // 2], "is damaged: it is truncated"),
        (CONTENT + b"\0\0", "is damaged: 2 bytes follow its tree of arrays"),
        (b"PK\3\4 a zip file", "is damaged: its content is not a tree of arrays"),
        (b"\x81\xc1", "is damaged: "),
        (b"\x81" * 10_000, "is damaged: "),
        (msgpack.packb({"bert": {"a": "text"}}), f"{NO_TREE}: bert/a is no array"),
        (msgpack.packb({"bert": {"a": [1.0]}}), f"{NO_TREE}: bert/a is no array"),
        (msgpack.packb({"bert": {"a": None}}), f"{NO_TREE}: bert/a is no array"),
        (msgpack.packb({3: {}}), "is damaged: its tree has the key 3, expected a name"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    ],
)
def test_msgpack_without_a_tree_of_arrays_is_refused(content, message, tmp_path):
    (write_files(tmp_path) / "flax_model.msgpack").write_bytes(content)
    with pytest.raises(ValueError, match=rf"flax_model\.msgpack {re.escape(message)}"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (msgpack.ExtType(9, b"x"), "is of type ExtType, not an array"),
        (np.float32(1), "is of type float32, not an array"),
        (msgpack.ExtType(1, msgpack.packb(((2,), "float32", b"1234"))), "cannot reshape"),
        (msgpack.ExtType(1, msgpack.packb(((1,), "no_dtype", b"1234"))), "no_dtype"),
        (msgpack.ExtType(1, b"?"), "flax_model.msgpack is damaged: "),
    ],
)
def test_leaf_that_is_no_array_is_named(value, message, tmp_path):
    tree = flax_tree(state_dict())
    tree["bert"]["pooler"]["dense"]["bias"] = value
    content = msgpack.packb(tree, default=flax.serialization._msgpack_ext_pack)
    (write_files(tmp_path) / "flax_model.msgpack").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_model(tmp_path)
    assert "bert/pooler/dense/bias" in str(error.value)


def test_names_follow_pytorch():
    assert torch_name("bert/encoder/layer/0/output/LayerNorm/scale") == (
        "bert.encoder.layer.0.output.LayerNorm.weight"
    )
    assert torch_name("params/lm_head/bias") == "lm_head.bias"
    assert torch_name("albert/embeddings/word_embeddings/embedding") == (
        "albert.embeddings.word_embeddings.weight"
    )
