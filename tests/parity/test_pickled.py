"""Files of torch.save, read without torch."""

import collections

import numpy as np
import pytest

from bert_jax.checkpoints.pickled import read_pickle
from bert_jax.checkpoints.tensors import read_tensors

torch = pytest.importorskip("torch")

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def as_numpy(tensor) -> np.ndarray:
    """Returns a tensor in a dtype that torch can convert."""
    is_narrow = tensor.is_floating_point() and tensor.element_size() < 4
    return (tensor.detach().float() if is_narrow else tensor.detach()).numpy()


def check(path, expected) -> None:
    read = read_pickle(path)
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        reference, actual = as_numpy(tensor), read[name]()
        if reference.dtype != actual.dtype:
            actual = actual.astype(reference.dtype)
        np.testing.assert_array_equal(actual, reference, err_msg=name)


def test_dtypes_shapes_and_views_equal_torch(tmp_path):
    torch.manual_seed(0)
    base = torch.randn(4, 6, 8)
    flat = torch.randn(100)
    tensors = {f"{dtype}": (torch.randn(3, 5) * 9).abs().to(dtype) for dtype in DTYPES}
    tensors |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "transposed": base.mT,
        "permuted": base.permute(2, 0, 1),
        "slice": base[1:3, ::2, 3:7:3],
        "diagonal": base[0].diagonal(),
        "expanded": torch.randn(1, 3).expand(5, 3),
        "first": flat[:40].view(5, 8),
        "second": flat[40:],
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "tied": base,
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    tensors["with_attribute"] = torch.nn.Parameter(torch.randn(2))
    tensors["with_attribute"].note = "kept by torch"
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    check(tmp_path / "pytorch_model.bin", tensors)
    for protocol in (2, 3, 4):
        torch.save(tensors, tmp_path / "pytorch_model.bin", pickle_protocol=protocol)
        check(tmp_path / "pytorch_model.bin", tensors)


@pytest.mark.parametrize("wrapper", ["state_dict", "model_state_dict", "model", None])
def test_state_of_a_training_loop_is_read(wrapper, tmp_path):
    model = torch.nn.TransformerEncoderLayer(8, 2, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 2, 8)).sum().backward()
    optimizer.step()
    state = {
        "optimizer": optimizer.state_dict(),
        "scheduler": {"last": 3, "counts": collections.Counter("aab")},
        "rng": torch.get_rng_state(),
        "shape": torch.Size([1, 2]),
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "names": {"a", "b"},
        "content": b"\x00\xff",
        "complex": 1 + 2j,
    }
    weights = model.state_dict()
    torch.save({wrapper: weights} | state if wrapper else weights, tmp_path / "m.bin")
    check(tmp_path / "m.bin", weights)


def test_module_and_refused_tensors_are_named(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save(torch.nn.Linear(2, 2), path)
    with pytest.raises(ValueError, match=r"it names torch\.nn\.modules\.linear\.Linear"):
        read_tensors(tmp_path)
    torch.save({"a": torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)}, path)
    with pytest.raises(ValueError, match=r"it names torch\._utils\._rebuild_qtensor"):
        read_tensors(tmp_path)
    torch.save({"a": torch.eye(3).to_sparse()}, path)
    with pytest.raises(ValueError, match=r"it names torch\._utils\._rebuild_sparse_tensor"):
        read_tensors(tmp_path)


def test_old_format_is_read_with_torch(tmp_path):
    tensors = {"a": torch.randn(3, 4).to(torch.bfloat16), "b": torch.randn(2)}
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    check(path, tensors)


def test_shards_that_transformers_writes_are_read(tmp_path):
    """Of safetensors: version 5 writes no other shards; those of a pickle have the same index."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.BertModel(config)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    tensors = read_tensors(tmp_path)
    assert tensors.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(tensors[name], value.numpy())
