"""A pickle of torch is read without torch, and no function that it names is called."""

import io
import json
import pickle
import sys
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from bert_jax.checkpoints.pickled import read_pickle
from bert_jax.checkpoints.read import read_model
from bert_jax.checkpoints.tensors import read_tensors
from tests.helpers.models import CONFIG_JSON, PIECES, assert_trees_equal, state_dict

STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "bool": "BoolStorage",
}


def opcodes(value) -> bytes:
    """Returns the opcodes of protocol 2 that push a plain value."""
    return pickle.dumps(value, protocol=2)[2:-1]


def tensor_opcodes(storage, dtype, size, offset, shape, strides) -> bytes:
    """Returns the opcodes that push a tensor, as torch.save writes them."""
    pid = opcodes("storage") + f"ctorch\n{STORAGES[dtype]}\n".encode()
    pid = b"(" + pid + opcodes(storage) + opcodes("cpu") + opcodes(size) + b"tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    values = pid + opcodes(offset) + opcodes(shape) + opcodes(strides) + opcodes(False) + hooks
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + values + b"tR"


def dict_opcodes(items: dict[str, bytes]) -> bytes:
    """Returns the opcodes that push a torch module's state dict, of opcodes for each value."""
    pairs = b"".join(opcodes(name) + value for name, value in items.items())
    metadata = opcodes({"_metadata": {"": {"version": 1}}})
    return b"ccollections\nOrderedDict\n)R(" + pairs + b"u" + metadata + b"b"


def write_pickle(path, content: bytes, storages: dict[str, bytes], byte_order=b"little"):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("weights/data.pkl", b"\x80\x02" + content + b".")
        archive.writestr("weights/byteorder", byte_order)
        for name, storage in storages.items():
            archive.writestr(f"weights/data/{name}", storage)


def write_tensors(path, tensors: dict[str, np.ndarray]):
    """Writes a state dict with a storage for each tensor."""
    items, storages = {}, {}
    for index, (name, value) in enumerate(tensors.items()):
        value = np.asarray(value)
        strides = tuple(stride // value.itemsize for stride in value.strides)
        dtype = value.dtype.name
        items[name] = tensor_opcodes(f"{index}", dtype, value.size, 0, value.shape, strides)
        storages[f"{index}"] = value.tobytes(order="K")
    write_pickle(path, dict_opcodes(items), storages)


def write_files(directory):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG_JSON))
    (directory / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))
    return directory


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_pickle_without_torch_equals_safetensors(dtype, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    tensors = {name: value.astype(jnp.dtype(dtype)) for name, value in state_dict().items()}
    tensors["bert.embeddings.position_ids"] = np.arange(9)[None]
    write_tensors(write_files(tmp_path / "a") / "pytorch_model.bin", tensors)
    save_file(tensors, write_files(tmp_path / "b") / "model.safetensors")
    model = read_model(tmp_path / "a")
    assert_trees_equal(model.params, read_model(tmp_path / "b").params)
    assert model.report.unused == ("bert.embeddings.position_ids",)


def test_views_of_a_storage_are_read_with_offset_and_strides(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.standard_normal(400).astype(np.float32)
    items, expected = {}, {}
    for index in range(30):
        shape = tuple(map(int, rng.integers(0, 5, rng.integers(0, 4))))
        strides = tuple(map(int, rng.integers(0, 20, len(shape))))
        offset = int(rng.integers(0, 100))
        items[f"{index}"] = tensor_opcodes("0", "float32", 400, offset, shape, strides)
        indices = np.indices(shape)
        places = offset + sum(i * s for i, s in zip(indices, strides, strict=True))
        expected[f"{index}"] = values[np.broadcast_to(places, shape).astype(int)]
    write_pickle(tmp_path / "pytorch_model.bin", dict_opcodes(items), {"0": values.tobytes()})
    tensors = read_tensors(tmp_path)
    for name, value in expected.items():
        assert tensors[name].shape == value.shape
        np.testing.assert_array_equal(tensors[name], value)


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_weights_of_a_training_loop_are_found(key, tmp_path):
    weights = dict_opcodes({"a": tensor_opcodes("0", "float32", 2, 0, (2,), (1,))})
    items = {key: weights, "epoch": opcodes(3), "seen": opcodes({1, 2}), "rng": opcodes(b"\1\2")}
    content = dict_opcodes(items | {"dtype": b"ctorch\nfloat32\n"})
    write_pickle(tmp_path / "pytorch_model.bin", content, {"0": np.ones(2, np.float32).tobytes()})
    np.testing.assert_array_equal(read_tensors(tmp_path)["a"], [1, 1])


GOOD = tensor_opcodes("0", "float32", 2, 0, (2,), (1,))


def call(name: bytes, *arguments) -> bytes:
    return b"c" + name + b"\n(" + b"".join(map(opcodes, arguments)) + b"tR"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (call(b"os\nsystem", "touch ran"), "os.system"),
        (call(b"posix\nsystem", "touch ran"), "posix.system"),
        (call(b"builtins\neval", "open('ran', 'w')"), "builtins.eval"),
        (call(b"__builtin__\nexec", "open('ran', 'w')"), "builtins.exec"),
        (call(b"builtins\ngetattr", "a", "b"), "builtins.getattr"),
        (call(b"subprocess\nPopen", "touch ran"), "subprocess.Popen"),
        (call(b"torch.serialization\nload", "ran"), "torch.serialization.load"),
        (call(b"torch._utils\n_rebuild_qtensor"), "torch._utils._rebuild_qtensor"),
        (call(b"collections\nOrderedDict.fromkeys", "a"), "collections.OrderedDict.fromkeys"),
        (call(b"argparse\nNamespace"), "argparse.Namespace"),
        (b"(S'touch ran'\nios\nsystem\n", "os.system"),  # INST, an opcode of protocol 0.
        (b"\x8c\x02os\x8c\x06system\x93\x8c\x09touch ran\x85R", "os.system"),  # STACK_GLOBAL.
    ],
)
def test_any_other_name_is_refused_before_it_is_called(value, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pickle(tmp_path / "pytorch_model.bin", dict_opcodes({"a": GOOD, "b": value}), {})
    with pytest.raises(ValueError, match=f"it names {name}, which no state dict needs"):
        read_tensors(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]


ATTRIBUTES = opcodes((None, {"_call": 1, "__defaults__": (1,), "find_class": 1}))


@pytest.mark.parametrize(
    "target",
    [
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ccollections\nOrderedDict\n",
        b"ctorch\nFloatStorage\n",
        GOOD,
    ],
)
def test_a_pickle_cannot_change_what_it_names(target, tmp_path):
    content = dict_opcodes({"a": target + ATTRIBUTES + b"b"})
    write_pickle(tmp_path / "pytorch_model.bin", content, {"0": b"\0" * 8})
    with pytest.raises(ValueError, match=r"^pytorch_model\.bin is not a valid state dict"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (tensor_opcodes("0", "float32", 2, 1, (2,), (1,)), r"ends after its storage of 2"),
        (tensor_opcodes("0", "float32", 2, 0, (2, 2), (0, 2)), r"ends after its storage of 2"),
        (tensor_opcodes("0", "float32", 2, 1, (2,), (-1,)), r"the shape \(2,\) and the strides"),
        (tensor_opcodes("0", "float32", 2, -1, (1,), (1,)), r"the shape \(1,\) and the strides"),
        (tensor_opcodes("0", "float32", 2, 0, (2,), ()), r"the shape \(2,\) and the strides \(\)"),
        (tensor_opcodes("0", "float32", "2", 0, (2,), (1,)), "unknown storage"),
        (opcodes(3), "holds the keys a"),
        (b"}", "holds the keys a"),
        (b"", "is not a valid state dict"),
    ],
)
def test_tensor_outside_of_its_storage_is_refused(value, message, tmp_path):
    content = dict_opcodes({"a": value})
    write_pickle(tmp_path / "pytorch_model.bin", content, {"0": b"\0" * 8})
    with pytest.raises(ValueError, match=message):
        read_tensors(tmp_path)


@pytest.mark.parametrize("storages", [{}, {"0": b"\0" * 7}])
def test_missing_bytes_are_named_when_the_tensor_is_read(storages, tmp_path):
    write_pickle(tmp_path / "pytorch_model.bin", dict_opcodes({"a": GOOD}), storages)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged: weights/data/0"):
        read_tensors(tmp_path)["a"]


def test_flipped_bit_is_found(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    write_tensors(path, {"a": np.arange(100, dtype=np.float32)})
    content = bytearray(path.read_bytes())
    content[content.index(np.float32(42).tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged: .*CRC"):
        read_tensors(tmp_path)["a"]


@pytest.mark.slow
def test_no_changed_bit_is_silent(tmp_path, monkeypatch):
    """Of the numbers, and of the zip file's own fields, such as the type of compression."""
    monkeypatch.setitem(sys.modules, "torch", None)
    path = tmp_path / "pytorch_model.bin"
    tensors = {name: np.full(3, index, np.float32) for index, name in enumerate("abc")}
    write_tensors(path, tensors)
    content, errors = path.read_bytes(), 0
    for position in range(8 * len(content)):
        changed = bytearray(content)
        changed[position // 8] ^= 1 << position % 8
        path.write_bytes(changed)
        try:
            found = {name: tensor.tolist() for name, tensor in read_tensors(tmp_path).items()}
        except (ImportError, ValueError) as error:
            assert "pytorch_model.bin" in str(error)
            errors += 1
        else:
            assert found == {name: tensor.tolist() for name, tensor in tensors.items()}
    assert errors > 4 * len(content)


def test_file_that_only_torch_reads_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    path = tmp_path / "pytorch_model.bin"
    write_pickle(path, dict_opcodes({"a": GOOD}), {"0": b"\0" * 8}, byte_order=b"big")
    with pytest.raises(ImportError, match=r"was written on a big-endian .*pip install torch"):
        read_pickle(path)
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(
        ImportError, match=r"is not a zip file.*since torch 1\.6.*pip install torch"
    ):
        read_pickle(path)


def test_truncated_file_and_other_zip_files_are_damaged(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    write_tensors(path, {"a": np.arange(100, dtype=np.float32)})
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"^pytorch_model\.bin is not a valid state dict"):
        read_pickle(path)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("other", b"")
    path.write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match=r"^pytorch_model\.bin is not a valid state dict"):
        read_pickle(path)
