"""Weight files from training loops and downloads are read, or refused by name."""

import json

import flax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from bert_jax.checkpoints.pickled import find_state_dict
from bert_jax.checkpoints.read import read_model
from bert_jax.checkpoints.tensors import read_tensors
from bert_jax.runtime.model_files import find_snapshot
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.models import CONFIG_JSON, PIECES, assert_trees_equal, state_dict


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
    with pytest.raises(ValueError, match=rf"^pytorch_model\.bin holds {content}"):
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
        with pytest.raises(ValueError, match=f"{name} is a Git LFS pointer, not the file"):
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
    with pytest.raises(ValueError, match=r"holds 2 snapshots"):
        find_snapshot(root)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0b2\n")
    assert find_snapshot(root) == root / "snapshots" / "0b2"
    assert find_snapshot(root / "snapshots") == root / "snapshots" / "0b2"
    read_model(root / "snapshots")
    with pytest.raises(FileNotFoundError, match=r"a cache of several models"):
        read_model(tmp_path / "hub")


def test_vocabulary_in_a_cache_of_the_hub_is_found(tmp_path):
    root = tmp_path / "hub" / "models--owner--name"
    write_model(root / "snapshots" / "0a1", state_dict())
    for path in (root, root / "snapshots", root / "snapshots" / "0a1"):
        assert load_tokenizer(path).vocab_size == len(PIECES)
    with pytest.raises(FileNotFoundError, match=r"a cache of several models"):
        load_tokenizer(tmp_path / "hub")
    (tmp_path / "models--interrupted" / "refs").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="holds no snapshot"):
        load_tokenizer(tmp_path / "models--interrupted")


def write_shards(directory, filename, write, tensors, num_shards=3):
    """Writes tensors in several files, and their index."""
    names, files = sorted(tensors), {}
    for index in range(num_shards):
        shard = {name: tensors[name] for name in names[index::num_shards]}
        stem, _, suffix = filename.partition(".")
        path = directory / f"{stem}-{index + 1:05}-of-{num_shards:05}.{suffix}"
        write(path, shard)
        files |= dict.fromkeys(shard, path.name)
    (directory / f"{filename}.index.json").write_text(json.dumps({"weight_map": files}))
    return files


def write_flax(path, tensors):
    tree = flax.traverse_util.unflatten_dict(tensors, sep="/")
    path.write_bytes(flax.serialization.to_bytes(tree))


def write_safetensors(path, tensors):
    save_file(tensors, path)


SHARDED = [("model.safetensors", write_safetensors), ("flax_model.msgpack", write_flax)]


@pytest.mark.parametrize(("filename", "write"), SHARDED)
def test_shards_are_read_as_one_file(filename, write, tmp_path):
    rng = np.random.default_rng(0)
    tensors = {f"a/{i}/bias": rng.standard_normal(3) for i in range(7)}
    write_shards(tmp_path, filename, write, tensors)
    read = read_tensors(tmp_path)
    names = {name: name.replace("/", ".") if "flax" in filename else name for name in tensors}
    assert read.keys() == set(names.values())
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read[names[name]], tensor)


def test_sharded_model_equals_one_file(tmp_path):
    tensors = state_dict()
    write_model(tmp_path / "a", tensors)
    write_model(tmp_path / "b", {})
    (tmp_path / "b" / "model.safetensors").unlink()
    write_shards(tmp_path / "b", "model.safetensors", write_safetensors, tensors)
    assert_trees_equal(read_model(tmp_path / "b").params, read_model(tmp_path / "a").params)


@pytest.mark.parametrize(("filename", "write"), SHARDED)
def test_shards_that_disagree_with_their_index_are_named(filename, write, tmp_path):
    tensors = {f"a/{i}/bias": np.ones(3) for i in range(7)}
    files = write_shards(tmp_path, filename, write, tensors)
    path, name = tmp_path / files["a/0/bias"], "a/0/bias"
    shard = {name: value for name, value in tensors.items() if files[name] == path.name}
    index = tmp_path / f"{filename}.index.json"

    def check(error, message):
        with pytest.raises(error, match=message):
            read_tensors(tmp_path)

    write(path, {other: value for other, value in shard.items() if other != name})
    check(ValueError, f"{index.name}: tensor {name} should be in {path.name}, but it has no such")
    write(path, shard | {"a/1/bias": np.ones(3)})
    check(ValueError, f"tensor a/1/bias: found twice, in {path.name} and {files['a/1/bias']}")
    write(path, shard)
    index.write_text(json.dumps({"weight_map": files | {name: files["a/1/bias"]}}))
    check(ValueError, f"tensor {name} should be in .*, but it is in {path.name}")
    for other in ("../" + path.name, "/" + path.name, "sub/" + path.name):
        index.write_text(json.dumps({"weight_map": {name: other}}))
        check(ValueError, f"expected files beside it, found {other}")
    index.write_text(json.dumps({"weight_map": files}))
    path.unlink()
    check(FileNotFoundError, f"{index.name} names {path.name}, which is missing: download it")
    for content in ({}, {"weight_map": [1]}, {"weight_map": {"a": 1}}):
        index.write_text(json.dumps(content))
        check(ValueError, "expected a weight_map from names of tensors to files")


def test_weights_are_read_where_there_are_several_formats_in_a_fixed_order(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle of an old torch")
    write_flax(tmp_path / "flax_model.msgpack", {"a/bias": np.full(1, 2)})
    assert read_tensors(tmp_path)["a.bias"] == 2
    save_file({"a.bias": np.full(1, 3)}, tmp_path / "model.safetensors")
    assert read_tensors(tmp_path)["a.bias"] == 3


def test_tensors_are_read_when_they_are_looked_up(tmp_path):
    save_file({"a": np.ones(2), "b": np.ones(2)}, tmp_path / "model.safetensors")
    tensors = read_tensors(tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-16] + np.full(2, 5.0).tobytes())
    assert tensors["b"].tolist() == [5, 5] and tensors["a"].tolist() == [1, 1]
    assert "c" not in tensors and len(tensors) == 2


def test_unsupported_dtype_is_named(tmp_path):
    save_file({"a": np.ones(2, ml_dtypes.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor a: unsupported dtype F8_E4M3"):
        read_tensors(tmp_path)["a"]
