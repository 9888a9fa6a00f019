"""Reads `pytorch_model.bin`, a pickle of tensors, without torch, and without running its code.

`torch.save` writes a zip file: `data.pkl` describes the tensors, and beside it are the bytes of
their storages. A pickle may call any function by name; the unpickler here knows only the names that
state dicts need, all of which merely build plain values. Files of torch before 1.6, or written on a
big-endian machine, are read by torch if it is installed.
"""

import functools
import io
import pathlib
import pickle
import zipfile
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from bert_jax.runtime.model_files import check_not_pointer

# Keys under which training loops store the weights in a checkpoint of their own.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")


class _Storage(NamedTuple):
    """A file in the zip archive that holds `size` contiguous elements."""

    key: str
    dtype: str
    size: int


class _Tensor(NamedTuple):
    """A view of a storage; offset and strides count elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Dict(dict):
    def __setstate__(self, state: object) -> None:
        """Ignores attributes of the dictionary, such as the versions of torch's modules."""


class _Function:
    """A function that a pickle may call but not modify; it could set a Python function's state."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable):
        self._call = call

    def __call__(self, *arguments: object) -> object:
        return self._call(*arguments)

    def __setstate__(self, state: object) -> None:
        raise ValueError("it sets attributes of a function")


def _rebuild_tensor(
    storage: _Storage,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool = False,
    hooks: object = None,
    metadata: object = None,
) -> _Tensor:
    """Returns a view of a storage. Raises ValueError if it is not within the storage."""
    if not isinstance(storage, _Storage) or metadata:
        raise ValueError("a tensor is not a plain view of a storage")
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise ValueError(f"a tensor has the shape {shape} and the strides {strides}")
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if all(shape) and last >= storage.size:
        raise ValueError(f"a tensor of shape {shape} ends after its storage of {storage.size}")
    return _Tensor(storage, offset, shape, strides)


def _rebuild_tensor_v3(
    storage: _Storage,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool,
    hooks: object,
    dtype: str,
    metadata: object = None,
) -> _Tensor:
    """Returns a view of a storage of bytes as another dtype."""
    storage = _Storage(storage.key, dtype, storage.size // jnp.dtype(dtype).itemsize)
    return _rebuild_tensor(storage, offset, shape, strides, metadata=metadata)


def _encode(text: str, encoding: str) -> bytes:
    return text.encode("latin1" if encoding == "latin1" else "utf-8")


_STORAGE_DTYPES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}
_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_DTYPES = (*_STORAGE_DTYPES.values(), "uint16", "uint32", "uint64", *_FLOAT8)
# The names that a pickle may use. Dtypes and storage classes are given as names of NumPy's dtypes.
_KNOWN = {
    "collections.OrderedDict": _Function(_Dict),
    "torch._utils._rebuild_tensor": _Function(_rebuild_tensor),
    "torch._utils._rebuild_tensor_v2": _Function(_rebuild_tensor),
    "torch._utils._rebuild_tensor_v3": _Function(_rebuild_tensor_v3),
    "torch._utils._rebuild_parameter": _Function(lambda tensor, *_: tensor),
    "torch._utils._rebuild_parameter_with_state": _Function(lambda tensor, *_: tensor),
    "torch._tensor._rebuild_from_type_v2": _Function(lambda build, kind, values, _: build(*values)),
    "torch.Tensor": "Tensor",
    "torch.nn.parameter.Parameter": "Parameter",
    "torch.storage.UntypedStorage": "uint8",
    **{f"torch.{name}Storage": dtype for name, dtype in _STORAGE_DTYPES.items()},
    **{f"torch.cuda.{name}Storage": dtype for name, dtype in _STORAGE_DTYPES.items()},
    **{f"torch.{dtype}": dtype for dtype in _DTYPES},
    # Needed for other values that training loops save beside the weights.
    "collections.Counter": _Function(_Dict),
    "torch.Size": _Function(tuple),
    "torch.device": _Function(lambda *names: names),
    "builtins.set": _Function(set),
    "builtins.bytearray": _Function(bytearray),
    "builtins.complex": _Function(complex),
    "_codecs.encode": _Function(_encode),
}


class _Unpickler(pickle.Unpickler):
    """Builds plain values, and `_Tensor`s. Raises ValueError for any name but those in `_KNOWN`."""

    def find_class(self, module: str, name: str) -> object:
        # Pickles of protocol 2 use Python 2's name of the module builtins.
        full_name = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full_name not in _KNOWN:
            raise ValueError(
                f"it names {full_name}, which no state dict needs; code in a pickle is never run: "
                "save only the weights, with torch.save(model.state_dict(), FILE)"
            )
        return _KNOWN[full_name]

    def persistent_load(self, pid: object) -> _Storage:
        kind, dtype, key, _, size = pid
        if kind != "storage" or dtype not in _DTYPES or not isinstance(size, int):
            raise ValueError(f"unknown storage {pid!r:.100}")
        return _Storage(str(key), dtype, size)


def read_pickle(path: pathlib.Path) -> dict[str, Callable[[], np.ndarray]]:
    """Returns a function that reads each tensor of a state dict saved by `torch.save`, by name.

    Raises ValueError, naming the file, if it is damaged, holds no state dict or names an unknown
    class or function, and ImportError if only torch can read it and is not installed.
    """
    check_not_pointer(path)
    with open(path, "rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    if not is_zip:
        return _read_with_torch(path, "is not a zip file, as torch.save writes since torch 1.6")
    try:
        archive = zipfile.ZipFile(path)
        names = archive.namelist()
        pickles = [name for name in names if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"expected a zip file with one data.pkl, found {len(pickles)}")
        folder = pickles[0].removesuffix("data.pkl")
        byte_order = archive.read(f"{folder}byteorder") if f"{folder}byteorder" in names else b""
        if byte_order == b"big":
            return _read_with_torch(path, "was written on a big-endian machine")
        values = _Unpickler(io.BytesIO(archive.read(f"{folder}data.pkl"))).load()
    except ImportError:
        raise
    except Exception as error:  # pickle and zipfile raise errors of many types.
        raise ValueError(f"{path.name} is not a valid state dict: {error}") from error

    @functools.lru_cache(maxsize=1)  # Tensors that share a storage often follow each other.
    def read_storage(key: str) -> bytes:
        try:
            return archive.read(f"{folder}data/{key}")
        except Exception as error:  # zipfile raises errors of many types.
            raise ValueError(f"{path.name} is damaged: {folder}data/{key}: {error}") from error

    def read(tensor: _Tensor) -> np.ndarray:
        key, dtype, size = tensor.storage.key, jnp.dtype(tensor.storage.dtype), tensor.storage.size
        if not all(tensor.shape):
            return np.zeros(tensor.shape, dtype)
        content = read_storage(key)
        if len(content) < size * dtype.itemsize:
            found = f"{len(content):,} bytes, expected {size * dtype.itemsize:,}"
            raise ValueError(f"{path.name} is damaged: {folder}data/{key} has {found}")
        strides = [stride * dtype.itemsize for stride in tensor.strides]
        return np.ndarray(tensor.shape, dtype, content, tensor.offset * dtype.itemsize, strides)

    tensors = find_state_dict(values, lambda value: isinstance(value, _Tensor), path.name)
    return {name: lambda tensor=tensor: read(tensor) for name, tensor in tensors.items()}


def _read_with_torch(path: pathlib.Path, reason: str) -> dict[str, Callable[[], np.ndarray]]:
    """Reads a file with torch, all of it at once. Raises as `read_pickle`."""
    try:
        import torch
    except ImportError as error:
        fix = "pip install torch, or save the weights again as model.safetensors"
        raise ImportError(f"{path} {reason}, so reading it needs torch: {fix}") from error
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zipfile and torch raise errors of many types.
        raise ValueError(f"{path.name} is not a valid state dict: {error}") from error

    def read(tensor) -> np.ndarray:  # torch cannot convert bfloat16 to NumPy.
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()

    tensors = find_state_dict(values, torch.is_tensor, path.name)
    return {name: lambda tensor=tensor: read(tensor) for name, tensor in tensors.items()}


def find_state_dict(
    values: object, is_tensor: Callable[[object], bool], filename: str
) -> Mapping[str, object]:
    """Returns the state dict that a training loop saved, as the file's value or under one key.

    Raises ValueError, naming the file, if there is none, or more than one.
    """

    def is_state_dict(values: object) -> bool:
        is_named = isinstance(values, Mapping) and all(isinstance(name, str) for name in values)
        return is_named and all(map(is_tensor, values.values()))

    if is_state_dict(values):
        return values
    wrapped = values if isinstance(values, Mapping) else {}
    found = [name for name in _WRAPPERS if wrapped.get(name) and is_state_dict(wrapped[name])]
    if len(found) != 1:
        content = f"the keys {', '.join(map(str, wrapped))}" if wrapped else type(values).__name__
        raise ValueError(
            f"{filename} holds {content:.200}; expected a state dict of tensors, or one under "
            f"{' or '.join(_WRAPPERS)}: save that with torch.save(model.state_dict(), FILE)"
        )
    return values[found[0]]
