"""Weight files from training loops and downloads are read, or refused by name."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from bert_jax.checkpoints.pickled import find_state_dict
from bert_jax.checkpoints.read import read_model
from bert_jax.checkpoints.tensors import read_tensors
from bert_jax.downloads import find_snapshot
from bert_jax.tokenization import load_tokenizer
from tests.helpers import CONFIG_JSON, PIECES, assert_trees_equal, state_dict


def write_model(directory, tensors):
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "bert"} | CONFIG_JSON))
    (directory / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "model.", "model.module.", "module.model."]
)
def test_prefixes_of_wrappers_are_removed(prefix, tmp_path):
    tensors = state_dict()
    wrapped = {prefix + name: value for name, value in tensors.items()}
    model = read_model(write_model(tmp_path / "wrapped", wrapped))
    expected = read_model(write_model(tmp_path / "plain", tensors))
    assert_trees_equal(model.params, expected.params)
    assert not model.report.unused


def test_name_with_and_without_a_prefix_is_an_error(tmp_path):
    tensors = {"module.bert.a": np.zeros(1), "bert.a": np.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor bert\.a: found twice"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("wrapper", ["state_dict", "model_state_dict", "model", "module", None])
def test_weights_of_a_training_loop_are_found_by_their_key(wrapper):
    weights = {"module.bert.a": np.ones(2)}
    state = {"optimizer": {"state": {}, "lr": 0.1}, "epoch": 3}
    saved = {wrapper: weights} | state if wrapper else weights
    assert find_state_dict(saved, is_array, "pytorch_model.bin") is weights


@pytest.mark.parametrize(
    ("saved", "content"),
    [
        ({"epoch": 3, "optimizer": {}}, "the keys epoch, optimizer"),
        ({"model": {"a": np.ones(1)}, "module": {"b": np.ones(1)}, "epoch": 1}, "the keys model"),
        ({"model": {}, "epoch": 3}, "the keys model, epoch"),
        ([np.ones(1)], "list"),
    ],
)
def test_a_pickle_without_one_state_dict_is_named(saved, content):
    with pytest.raises(ValueError, match=rf"^pytorch_model\.bin holds {content}.*; expected a sta"):
        find_state_dict(saved, is_array, "pytorch_model.bin")


def is_array(value):
    return isinstance(value, np.ndarray)


def test_bfloat16_is_read_and_integers_are_refused(tmp_path):
    tensors = state_dict()
    name = "bert.pooler.dense.weight"
    write_model(tmp_path / "a", tensors | {name: tensors[name].astype(ml_dtypes.bfloat16)})
    assert (
        read_model(tmp_path / "a").params["encoder"]["pooler"]["dense"]["kernel"].dtype
        == np.float32
    )
    write_model(tmp_path / "b", tensors | {name: np.zeros(tensors[name].shape, np.int8)})
    with pytest.raises(ValueError, match=f"tensor {name}: expected floating point, found int8"):
        read_model(tmp_path / "b")


def test_git_lfs_pointer_is_named(tmp_path):
    model = write_model(tmp_path / "m", state_dict())
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    for name in ("model.safetensors", "config.json"):
        (model / name).write_text(pointer)
        with pytest.raises(ValueError, match=f"{name} is a Git LFS pointer, not the file: run"):
            read_model(model)


@pytest.mark.parametrize(
    ("filename", "fix"),
    [
        ("tf_model.h5", "from_tf=True"),
        ("adapter_model.safetensors", "merge it into its model with peft"),
        ("model.onnx", "download the model's model.safetensors"),
    ],
)
def test_other_weights_are_named_with_what_to_do(filename, fix, tmp_path):
    model = write_model(tmp_path / "m", state_dict())
    (model / "model.safetensors").rename(model / filename)
    with pytest.raises(FileNotFoundError, match=f"holds {filename}, .*{fix}"):
        read_model(model)


def test_snapshot_in_a_cache_of_the_hub_is_found(tmp_path):
    root = tmp_path / "hub" / "models--owner--name"
    write_model(root / "snapshots" / "0a1", state_dict())
    assert (
        read_model(root).settings["architecture"]["num_layers"] == CONFIG_JSON["num_hidden_layers"]
    )
    write_model(root / "snapshots" / "0b2", state_dict())
    with pytest.raises(ValueError, match=r"holds 2 snapshots: choose .*snapshots/0a1"):
        find_snapshot(root)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0b2\n")
    assert find_snapshot(root) == root / "snapshots" / "0b2"
    assert find_snapshot(root / "snapshots") == root / "snapshots" / "0b2"
    read_model(root / "snapshots")
    with pytest.raises(FileNotFoundError, match=r"a cache of several models: choose one .*--name"):
        read_model(tmp_path / "hub")


def test_vocabulary_in_a_cache_of_the_hub_is_found(tmp_path):
    root = tmp_path / "hub" / "models--owner--name"
    write_model(root / "snapshots" / "0a1", state_dict())
    for path in (root, root / "snapshots", root / "snapshots" / "0a1"):
        assert load_tokenizer(path).vocab_size == len(PIECES)
    with pytest.raises(FileNotFoundError, match=r"a cache of several models: choose one .*--name"):
        load_tokenizer(tmp_path / "hub")
    (tmp_path / "models--interrupted" / "refs").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="holds no snapshot: download the model again"):
        load_tokenizer(tmp_path / "models--interrupted")
