"""Reads the tensors of transformers' and sentence-transformers' weight files, one at a time."""

import json
import pathlib
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np
import safetensors

from bert_jax.checkpoints.flax_msgpack import read_flax, torch_name
from bert_jax.checkpoints.pickled import read_pickle
from bert_jax.runtime.model_files import check_not_pointer, read_json

# Weights that are not read, with what to do.
UNREADABLE = {
    "tf_model.h5": "save them with transformers 4 for PyTorch, "
    "AutoModel.from_pretrained(DIR, from_tf=True).save_pretrained(NEW_DIR)",
    "saved_model.pb": "a module of TensorFlow Hub; download the same model's checkpoint, with its "
    "*.index and *.data-00000-of-00001",
    "model.onnx": "download the model's model.safetensors, too",
}

# Files of adapters that peft, AdapterHub and others write; and tensors of adapters in a model's
# own files.
_ADAPTER_FILES = re.compile(
    r"(adapter|adapter_fusion|delta)_config\.json"
    r"|.*(adapter|lora).*\.(safetensors|bin|pt|pth|ckpt|npz|msgpack)(\.index\.json)?",
    re.IGNORECASE,
)
_ADAPTER_TENSORS = re.compile(
    r"(^|.*[._])(base_layer|lora_\w+|ia3_\w+|adapters?|adapter_\w+|prefix_encoder|prompt_\w+|"
    r"hada_\w+|lokr_\w+|oft_\w+|vera_\w+)([._].*|$)"
)
# What to do with an adapter that is not read.
MERGE = (
    "merge it into its model with peft, model.merge_and_unload().save_pretrained(NEW_DIR) (for "
    "AdapterHub with the library adapters, model.merge_adapter(NAME))"
)
# Heads that other libraries store in files of their own, which are not read.
_HEADS = {
    "model_head.pkl": "a classifier of SetFit, a pickle of scikit-learn",
    "pytorch_model_head.bin": "a head of AdapterHub",
}
_WEIGHTS_SUFFIXES = (".safetensors", ".bin", ".msgpack", ".pt", ".pth", ".ckpt", ".h5", ".gguf")

# Prefixes of the names that torch's DistributedDataParallel and compile, and Lightning add.
_PREFIXES = re.compile(r"^(module\.|_orig_mod\.|model\.)+")


class LazyTensors(Mapping[str, np.ndarray]):
    """A mapping of tensors by name that reads a tensor at each lookup and keeps none."""

    def __init__(self, readers: Mapping[str, Callable[[], np.ndarray]]):
        self._readers = readers

    def without(self, names: Container[str]) -> "LazyTensors":
        """Returns the tensors whose names are not in `names`."""
        return LazyTensors(
            {name: each for name, each in self._readers.items() if name not in names}
        )

    def __getitem__(self, name: str) -> np.ndarray:
        return self._readers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def without_prefixes(name: str) -> str:
    """Returns the name under which `read_tensors` returns a tensor."""
    return _PREFIXES.sub("", name)


def _read_safetensors(path: pathlib.Path) -> dict[str, Callable[[], np.ndarray]]:
    """Returns a function that reads each tensor, by name. Raises ValueError for a damaged file.

    Does not use safetensors' own readers: they map the file, whose pages would count as memory.
    """
    check_not_pointer(path)
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass  # Validates the header and that its offsets are within the file.
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)

    def read(name: str) -> np.ndarray:
        stored = header[name]["dtype"]
        if stored not in _SAFETENSORS_DTYPES:
            reason = f"tensor {name}: unsupported dtype {stored}"
            raise ValueError(f"{reason}; convert it to F32, F16 or BF16")
        start, end = header[name]["data_offsets"]
        content = np.fromfile(path, np.uint8, end - start, offset=8 + size + start)
        return content.view(_SAFETENSORS_DTYPES[stored]).reshape(header[name]["shape"])

    return {name: lambda name=name: read(name) for name in header}


_SAFETENSORS_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jax.numpy.bfloat16.dtype,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class _Format(NamedTuple):
    """A format of weight files.

    Attributes:
      read: takes the path of a file; returns a function that reads each tensor, by its name there.
      rename: takes the name of a tensor in the file; returns its name in PyTorch's state dict.
    """

    read: Callable[[pathlib.Path], Mapping[str, Callable[[], np.ndarray]]]
    rename: Callable[[str], str]


# In order of preference. Pickles are last, because some of them can only be read with torch.
_FORMATS = {
    "model.safetensors": _Format(_read_safetensors, without_prefixes),
    "flax_model.msgpack": _Format(read_flax, torch_name),
    "pytorch_model.bin": _Format(read_pickle, without_prefixes),
}
WEIGHTS_FILENAMES = tuple(
    filename for name in _FORMATS for filename in (name, f"{name}.index.json")
)
"""Names of weight files that can be read: a single file, or the index of several."""


def read_tensors(directory: pathlib.Path) -> LazyTensors:
    """Opens the first of `WEIGHTS_FILENAMES` in a directory.

    Returns the tensors by PyTorch's names and in its layout, each read when it is looked up. Raises
    FileNotFoundError, ImportError if only torch can read a pickle and is not installed, and
    ValueError for a file that is damaged or holds something else, also when a tensor is looked up.
    """
    for filename, (read, rename) in _FORMATS.items():
        index = directory / f"{filename}.index.json"
        if (directory / filename).exists():
            readers = read(directory / filename)
        elif index.exists():
            readers = _read_shards(index, read)
        else:
            continue
        renamed: dict[str, Callable[[], np.ndarray]] = {}
        for stored, reader in readers.items():
            name = rename(stored)
            if name in renamed:
                raise ValueError(f"tensor {name}: found twice, once as {stored}")
            renamed[name] = reader
        return LazyTensors(renamed)
    missing = f"{directory} has none of {', '.join(_FORMATS)}"
    raise FileNotFoundError(unreadable_weights(directory) or missing)


def read_adapter_tensors(directory: pathlib.Path) -> LazyTensors:
    """Opens the file of an adapter that `peft` wrote; raises as `read_tensors`."""
    readers = {"adapter_model.safetensors": _read_safetensors, "adapter_model.bin": read_pickle}
    for filename, read in readers.items():
        if (directory / filename).exists():
            return LazyTensors(read(directory / filename))
    raise FileNotFoundError(f"{directory} has none of {', '.join(readers)}")


def _read_shards(
    index: pathlib.Path, read: Callable[[pathlib.Path], Mapping[str, Callable[[], np.ndarray]]]
) -> dict[str, Callable[[], np.ndarray]]:
    """Returns a function that reads each tensor of the files that an index names, by its name.

    Raises FileNotFoundError for a missing file, and ValueError if index and files disagree.
    """
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{index.name}: expected a weight_map from names of tensors to files")
    readers: dict[str, Callable[[], np.ndarray]] = {}
    found_in: dict[str, str] = {}
    for filename in sorted(set(files.values())):
        path = index.parent / filename
        if path.parent != index.parent:
            raise ValueError(f"{index.name}: expected files beside it, found {filename}")
        if not path.exists():
            raise FileNotFoundError(f"{index} names {filename}, which is missing: download it, too")
        for name, reader in read(path).items():
            if name in readers:
                raise ValueError(f"tensor {name}: found twice, in {found_in[name]} and {filename}")
            readers[name], found_in[name] = reader, filename
    for name, filename in files.items():
        if found_in.get(name) != filename:
            other = f"it is in {found_in[name]}" if name in found_in else "it has no such tensor"
            raise ValueError(f"{index.name}: tensor {name} should be in {filename}, but {other}")
    return readers


def unreadable_weights(directory: pathlib.Path) -> str:
    """Describes weights that are not read, and what to do; "" if there are none."""
    if found := describe_adapter(directory):
        return found
    for filename, fix in UNREADABLE.items():
        if (directory / filename).exists():
            return f"{directory} holds {filename}, which is not read: {fix}"
    for path in sorted(directory.glob("*")):
        if re.search(r"model|weights", path.stem) and path.suffix in _WEIGHTS_SUFFIXES:
            names = [name for name in _FORMATS if name.endswith(path.suffix)]
            fix = f"rename it to {names[0]}" if names else f"convert it to {next(iter(_FORMATS))}"
            if shard := re.fullmatch(r"(.*)-\d+-of-\d+(\..*)", path.name):
                fix = f"it is one of several, add {''.join(shard.groups())}.index.json"
            return f"{path} does not have the name of a weight file that can be read: {fix}"
    return ""


def describe_adapter(directory: pathlib.Path) -> str:
    """Describes an adapter, which would change its model, and what to do; "" if there is none."""
    for path in sorted(directory.glob("*")):
        if _ADAPTER_FILES.fullmatch(path.name):
            return (
                f"{directory} holds {path.name}, and adapters are not read: {MERGE}, or remove "
                "the files of the adapter to read the model without it"
            )
    return ""


def check_no_adapter(names: Iterable[str]) -> None:
    """Raises ValueError if any of these tensors belongs to an adapter, which changes its model."""
    if found := [name for name in names if _ADAPTER_TENSORS.fullmatch(name)]:
        raise ValueError(
            f"{len(found)} tensors belong to an adapter, such as {found[0]}, and adapters are not "
            f"read: {MERGE}"
        )


def describe_other_heads(directory: pathlib.Path) -> str:
    """Describes a head in a file of its own, which is not read; "" if there is none."""
    for filename, kind in _HEADS.items():
        if (directory / filename).exists():
            return f"{directory / filename}, {kind}, is not read: the model is read without it"
    return ""
