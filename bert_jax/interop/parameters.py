"""What the formats of other libraries have in common: named tensors to the parameter tree."""

import collections
import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.model.bert import BertForPreTraining
from bert_jax.model.config import BertConfig
from bert_jax.model.heads import POOLED
from bert_jax.tokenization import Tokenizer

PADDED = ("bert/embeddings/token_embedding", "mlm/bias")
"""Parameters with a row for each piece, and more that fill up the last tile."""

PARTS = ("bert/pooler", "mlm", "nsp", "head")
"""What a checkpoint may lack, in the parameter tree's names."""


class LoadReport(NamedTuple):
    """Names of tensors: read, wanted by an absent part, and given but of no use here."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]


class LoadedModel(NamedTuple):
    """What a directory of any format holds; `settings` as `checkpoint.write_checkpoint` takes."""

    params: dict
    settings: dict
    tokenizer: Tokenizer
    report: LoadReport


def table_of_tensors(report: LoadReport) -> str:
    """A line for each kind of tensor: names that differ in a number only are counted together."""
    lines = ["         tensors  name (* stands for numbers)"]
    for status, names in report._asdict().items():
        kinds = collections.Counter(re.sub(r"\d+", "*", name) for name in names)
        lines += [f"{status:8} {count:7}  {kind}" for kind, count in kinds.items()]
        lines += [f"{status:8}       0"] if not names else []
    return "\n".join(lines)


def surprising_tensors(report: LoadReport) -> str:
    """What a user of the model should know: "" if nothing is lost but what training has left, and
    nothing missing but the parts of pre-training, without which a model does well."""
    ordinary = r"(.*[./])?position_ids|training|global_step|.*/(adam|lamb)_[mv]"
    surprising = {
        "unused": [name for name in report.unused if not re.fullmatch(ordinary, name)],
        "missing": [name for name in report.missing if not re.match(r"(bert|cls)[./]", name)],
    }
    return "; ".join(
        f"{len(names)} tensors are {status}, such as {min(names)}"
        for status, names in surprising.items()
        if names
    )


def read_parameters(
    config: BertConfig,
    head: Mapping | None,
    given: Mapping[str, str],
    read_tensor: Callable[[str], np.ndarray],
    *,
    name_of: Callable[[str], str],
    transposed: Callable[[str], bool],
) -> tuple[dict, LoadReport]:
    """The parameter tree out of named tensors.

    Args:
      given: the names that `name_of` gives -> the names in the file.
      read_tensor: a name in the file -> its tensor.
      name_of: a path in the parameter tree -> its name, with `{layer}` where it is stacked.
      transposed: whether the tensor of a path is stored as `[outputs, inputs]`.

    Returns:
      The tree in float32 numpy arrays, rows that pad the vocabulary zero, and a report. Each of
      `PARTS` is left out of the tree where no tensor of it is given.

    Raises:
      ValueError: a tensor is missing or of another shape.
    """
    params, loaded, missing = {}, [], []

    def read(path, name, shape):
        expected = shape[::-1] if transposed(path) else shape
        if name not in given:
            raise ValueError(f"tensor {name}: expected shape {expected}, found no such tensor")
        tensor = np.asarray(read_tensor(given[name]))
        if tensor.shape != expected:
            raise ValueError(f"tensor {name}: expected shape {expected}, found {tensor.shape}")
        loaded.append(given[name])
        return (tensor.T if transposed(path) else tensor).astype(np.float32)

    shapes = parameter_shapes(config, num_outputs(head))
    present = {_part(path) for path in shapes if name_of(path) in given}
    for path, shape in shapes.items():
        name = name_of(path)
        if _part(path) and _part(path) not in present:
            missing.append(name)
        elif "{layer}" in name:
            names = [name.format(layer=layer) for layer in range(config.num_layers)]
            params[path] = np.stack([read(path, each, shape[1:]) for each in names])
        elif path in PADDED:
            rows = read(path, name, (config.vocab_size, *shape[1:]))
            params[path] = np.zeros(shape, np.float32)
            params[path][: config.vocab_size] = rows
        else:
            params[path] = read(path, name, shape)
    used = set(loaded)
    unused = tuple(name for name in given.values() if name not in used)
    tree = flax.traverse_util.unflatten_dict(params, sep="/")
    return tree, LoadReport(tuple(loaded), tuple(missing), tuple(dict.fromkeys(unused)))


def _part(path: str) -> str | None:
    return next((part for part in PARTS if path.startswith(f"{part}/")), None)


@functools.lru_cache(maxsize=8)
def parameter_shapes(config: BertConfig, outputs: int = 0) -> Mapping[str, tuple[int, ...]]:
    """Path -> shape, for each parameter of `BertForPreTraining(config)`, and of a task's head."""
    ids = jnp.zeros((1, 2), jnp.int32)
    init = BertForPreTraining(config).init
    params = jax.eval_shape(init, jax.random.key(0), *[ids] * 6)["params"]
    if outputs:
        kernel = jax.ShapeDtypeStruct((config.hidden_size, outputs), jnp.float32)
        params |= {"head": {"kernel": kernel, "bias": kernel.update(shape=(outputs,))}}
    return {
        path: leaf.shape for path, leaf in flax.traverse_util.flatten_dict(params, sep="/").items()
    }


def num_outputs(head: Mapping | None) -> int:
    """Of a task's head, which settings describe by its "task" and "labels"; 0 without one."""
    return len(head["labels"]) if head else 0


def loaded_model(
    directory: pathlib.Path,
    config: BertConfig,
    head: Mapping | None,
    params: dict,
    tokenizer: Tokenizer,
    report: LoadReport,
) -> LoadedModel:
    """Puts together what was read.

    Raises ValueError if pieces and token embedding are not as many, or a head lacks its pooler.
    """
    if tokenizer.vocab_size != config.vocab_size:
        raise ValueError(
            f"{directory}: the vocabulary has {tokenizer.vocab_size:,} pieces, expected "
            f"{config.vocab_size:,} (vocab_size): put the model's own vocabulary there, or, if the "
            "embedding has spare rows at its end, add a line [unusedN] to vocab.txt for each"
        )
    parts = {_part(path) for path in flax.traverse_util.flatten_dict(params, sep="/")}
    absent = [part for part in PARTS if part not in {*parts, "head"}]
    settings = {"bert": dataclasses.asdict(config), "absent": absent}
    if "head" in parts:
        if "bert/pooler" not in parts and head["task"] in POOLED:
            raise ValueError(
                f"{directory}: a head for {head['task']}, but no pooler, which it reads: remove "
                "`architectures` from config.json to read the encoder alone"
            )
        settings["head"] = dict(head)
    elif head and not num_outputs(head):  # A bi-encoder's has no parameters.
        settings["head"] = dict(head)
    return LoadedModel(params, settings, tokenizer, report)


def read_json(path: pathlib.Path) -> dict:
    """A file of one JSON object; FileNotFoundError and ValueError name it."""
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values
