"""Reads the tensors of transformers' and sentence-transformers' weight files."""

import pathlib
import re
from collections.abc import Callable, Mapping

import numpy as np
import safetensors

from bert_jax.downloads import check_not_pointer

WEIGHTS_FILENAMES = ("model.safetensors", "pytorch_model.bin")

MERGE = "merge its shards with transformers' save_pretrained(NEW_DIR, max_shard_size='1TB')"
# Weights that are not read, with what to do.
UNREADABLE = {
    "flax_model.msgpack": "save them with transformers 4 for PyTorch, "
    "AutoModel.from_pretrained(DIR, from_flax=True).save_pretrained(NEW_DIR)",
    "tf_model.h5": "save them with transformers 4 for PyTorch, "
    "AutoModel.from_pretrained(DIR, from_tf=True).save_pretrained(NEW_DIR)",
    "saved_model.pb": "a module of TensorFlow Hub; download the same model's checkpoint, with its "
    "*.index and *.data-00000-of-00001",
    "adapter_model.safetensors": "an adapter needs its model: merge both with peft, "
    "model.merge_and_unload().save_pretrained(NEW_DIR)",
    "model.safetensors.index.json": MERGE,
    "pytorch_model.bin.index.json": MERGE,
    "model.onnx": "download the model's model.safetensors, too",
}

# Keys under which training loops store the weights in a checkpoint of their own.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
# Prefixes of the names that torch's DistributedDataParallel and compile, and Lightning add.
_PREFIXES = re.compile(r"^(module\.|_orig_mod\.|model\.)+")


def read_tensors(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads `model.safetensors`, or else `pytorch_model.bin`, which needs torch.

    Raises FileNotFoundError, ImportError without torch, and ValueError for a file that is damaged
    or holds something else.
    """
    path, pickled = (directory / name for name in WEIGHTS_FILENAMES)
    if not path.exists() and not pickled.exists():
        missing = f"{directory} has neither {path.name} nor {pickled.name}"
        found = unreadable_weights(directory)
        raise FileNotFoundError(f"{missing}; {found}" if found else missing)
    tensors = _read_safetensors(path) if path.exists() else _read_pickle(pickled)
    renamed: dict[str, np.ndarray] = {}
    for stored, tensor in tensors.items():
        name = _PREFIXES.sub("", stored)
        if name in renamed:
            raise ValueError(f"tensor {name}: found twice, once as {stored}")
        renamed[name] = tensor
    return renamed


def unreadable_weights(directory: pathlib.Path) -> str:
    """Describes weights that are not read, and what to do; "" if there are none."""
    for filename, fix in UNREADABLE.items():
        if (directory / filename).exists():
            return f"it holds {filename}: {fix}"
    return ""


def _read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    check_not_pointer(path)
    tensors = {}
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118
                dtype = file.get_slice(name).get_dtype()
                tensors[name] = file.get_tensor(name)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error
    except (AttributeError, TypeError) as error:
        reason = f"tensor {name}: unsupported dtype {dtype}"
        raise ValueError(f"{reason}; convert it to F32, F16 or BF16") from error
    return tensors


def _read_pickle(path: pathlib.Path) -> dict[str, np.ndarray]:
    check_not_pointer(path)
    try:
        import torch
    except ImportError as error:
        fix = f"pip install torch, or add {WEIGHTS_FILENAMES[0]}"
        raise ImportError(f"{path} needs torch: {fix}") from error
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zipfile and torch raise errors of many types.
        raise ValueError(f"{path.name} is not a valid state dict: {error}") from error

    # torch cannot convert bfloat16 to numpy.
    return {
        name: (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        for name, tensor in find_state_dict(values, torch.is_tensor, path.name).items()
    }


def find_state_dict(
    values: object, is_tensor: Callable[[object], bool], filename: str
) -> Mapping[str, object]:
    """Returns the state dict in what a training loop saved: all of it, or the value of one key.

    Raises ValueError, naming the file, if there is none or several.
    """

    def is_state_dict(values: object) -> bool:
        return isinstance(values, Mapping) and all(map(is_tensor, values.values()))

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
