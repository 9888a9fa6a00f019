"""Reads `flax_model.msgpack`, the weights of the Flax models that transformers 4 had.

The file is a tree of named arrays, as `flax.serialization.to_bytes` writes it. A name differs from
PyTorch's only in its last part: "bert/encoder/layer/0/output/dense/kernel".
"""

import os
import pathlib
from collections.abc import Callable, Iterator

import flax
import msgpack
import numpy as np

from bert_jax.runtime.model_files import check_not_pointer

_KERNEL, _CHUNKED = "kernel", "__msgpack_chunked_array__"
_AGAIN = "copy or download it again"
# Last parts of Flax's names that are "weight" in PyTorch. A kernel is the transpose of the weight.
_WEIGHTS = (_KERNEL, "scale", "embedding")
# First bytes of msgpack's maps and of its extension types, one of which is an array.
_MAP_BYTES = (*range(0x80, 0x90), 0xDE, 0xDF)
_EXTENSION_BYTES = (0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9))


def torch_name(path: str) -> str:
    """Returns PyTorch's name of an array: "bert/pooler/dense/kernel" -> "bert.pooler.dense.weight".

    Removes the prefix `params/`, which all names have if all variables of a model were saved.
    """
    *modules, leaf = path.removeprefix("params/").split("/")
    return ".".join([*modules, "weight" if leaf in _WEIGHTS else leaf])


def read_flax(path: pathlib.Path) -> dict[str, Callable[[], np.ndarray]]:
    """Returns a function that reads each array, by its path in the tree; kernels are transposed.

    Locates the arrays without keeping them in memory. Raises ValueError, naming the file, if it is
    damaged or holds anything but arrays.
    """
    check_not_pointer(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        unpacker = msgpack.Unpacker(file, max_buffer_size=0, strict_map_key=False)
        try:
            spans = dict(_find_arrays(unpacker, file.fileno(), ""))
        except (msgpack.UnpackException, ValueError, RecursionError) as error:
            is_short = isinstance(error, msgpack.OutOfData)
            reason = "it is truncated" if is_short else str(error) or "it is not msgpack"
            raise ValueError(f"{path.name} is damaged: {reason}; {_AGAIN}") from error
        except TypeError as error:
            raise ValueError(
                f"{path.name} is not a tree of arrays, as save_pretrained of a Flax model writes: "
                f"{error}; save only the parameters of a training state, "
                "flax.serialization.to_bytes(state.params)"
            ) from error
        if unpacker.tell() != size:
            reason = f"{size - unpacker.tell():,} bytes follow its tree of arrays"
            raise ValueError(f"{path.name} is damaged: {reason}; {_AGAIN}")
    return {name: lambda name=name: _read_array(path, name, *spans[name]) for name in spans}


def _find_arrays(
    unpacker: msgpack.Unpacker, file: int, path: str
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields the path of each array of a tree, and the offsets of its start and end in the file."""
    start = unpacker.tell()
    first = os.pread(file, 1, start)
    if not first:
        raise msgpack.OutOfData
    if first[0] not in _MAP_BYTES:
        if first[0] not in _EXTENSION_BYTES:
            if not path:
                raise ValueError("its content is not a tree of arrays")
            raise TypeError(f"{path} is no array")
        unpacker.skip()
        yield path, (start, unpacker.tell())
        return
    count = unpacker.read_map_header()
    for index in range(count):
        key = unpacker.unpack()
        if key == _CHUNKED:  # Flax stores an array of over a GiB as a map of its parts.
            for _ in range(2 * (count - index) - 1):
                unpacker.skip()
            yield path, (start, unpacker.tell())
            return
        if not isinstance(key, str):
            raise ValueError(f"{path or 'its tree'} has the key {key!r:.50}, expected a name")
        yield from _find_arrays(unpacker, file, f"{path}/{key}" if path else key)


def _read_array(path: pathlib.Path, name: str, start: int, end: int) -> np.ndarray:
    """Reads one array from the bytes `start` to `end`. Raises ValueError if they are damaged."""
    with open(path, "rb") as file:
        file.seek(start)
        content = file.read(end - start)
    try:
        array = flax.serialization.msgpack_restore(content)
    except Exception as error:  # A wrong size or dtype raises errors of many types.
        raise ValueError(f"{path.name} is damaged: {name}: {error}") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path.name}: {name} is of type {type(array).__name__}, not an array")
    return array.T if name.endswith(f"/{_KERNEL}") else array
