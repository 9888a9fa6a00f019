"""Builds the parameter tree from named tensors, in whatever format they are stored."""

import collections
import dataclasses
import functools
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
from bert_jax.model.heads import HEADS
from bert_jax.tokenization import Tokenizer

PADDED = ("bert/embeddings/token_embedding", "mlm/bias")
"""Parameters whose first axis is the vocabulary, padded to whole tiles."""

OPTIONAL_PARTS = ("bert/pooler", "mlm", "nsp", "head")


class LoadReport(NamedTuple):
    """Names of the tensors that were loaded, missing for an absent part, and not used."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]


class LoadedModel(NamedTuple):
    """The contents of a model directory; `settings` are those of `checkpoint.write_checkpoint`."""

    params: dict
    settings: dict
    tokenizer: Tokenizer
    report: LoadReport


def format_report(report: LoadReport) -> str:
    """Formats a table that counts names together if they differ in a number only."""
    lines = ["         tensors  name (* stands for numbers)"]
    for status, names in report._asdict().items():
        patterns = collections.Counter(re.sub(r"\d+", "*", name) for name in names)
        lines += [f"{status:8} {count:7}  {pattern}" for pattern, count in patterns.items()]
        lines += [f"{status:8}       0"] if not names else []
    return "\n".join(lines)


def unexpected_tensors(report: LoadReport) -> str:
    """Describes what a user should know of; "" if only training state and pre-training heads."""
    training = r"(.*[./])?position_ids|training|global_step|.*/(adam|lamb)_[mv]"
    unused = [name for name in report.unused if not re.fullmatch(training, name)]
    missing = [name for name in report.missing if not re.match(r"(bert|cls)[./]", name)]
    return "; ".join(
        f"{len(names)} tensors are {status}, such as {min(names)}"
        for status, names in (("unused", unused), ("missing", missing))
        if names
    )


def read_parameters(
    config: BertConfig,
    head: Mapping | None,
    stored_names: Mapping[str, str],
    read_tensor: Callable[[str], np.ndarray],
    *,
    name_of: Callable[[str], str],
    is_transposed: Callable[[str], bool],
) -> tuple[dict, LoadReport]:
    """Builds the parameter tree from named tensors.

    Args:
      stored_names: name of a tensor -> its name in the file.
      read_tensor: name in the file -> tensor.
      name_of: path of a parameter -> name of its tensor, with `{layer}` where it is stacked.
      is_transposed: path of a parameter -> whether it is stored as `[outputs, inputs]`.

    Returns:
      The tree of float32 numpy arrays without the optional parts that the file lacks, the padding
      of the vocabulary zero; and a report.

    Raises:
      ValueError: a tensor is missing or has the wrong shape.
    """
    params, loaded, missing = {}, [], []

    def read(path, name, shape):
        expected = shape[::-1] if is_transposed(path) else shape
        if name not in stored_names:
            raise ValueError(f"tensor {name}: expected shape {expected}, found no such tensor")
        tensor = np.asarray(read_tensor(stored_names[name]))
        if tensor.shape != expected:
            raise ValueError(f"tensor {name}: expected shape {expected}, found {tensor.shape}")
        loaded.append(stored_names[name])
        return (tensor.T if is_transposed(path) else tensor).astype(np.float32)

    shapes = parameter_shapes(config, len(head["labels"]) if head else 0)
    present = {_optional_part(path) for path in shapes if name_of(path) in stored_names}
    for path, shape in shapes.items():
        name = name_of(path)
        if _optional_part(path) and _optional_part(path) not in present:
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
    unused = tuple(name for name in stored_names.values() if name not in used)
    tree = flax.traverse_util.unflatten_dict(params, sep="/")
    return tree, LoadReport(tuple(loaded), tuple(missing), unused)


def _optional_part(path: str) -> str | None:
    return next((part for part in OPTIONAL_PARTS if path.startswith(f"{part}/")), None)


@functools.lru_cache(maxsize=8)
def parameter_shapes(config: BertConfig, num_outputs: int = 0) -> Mapping[str, tuple[int, ...]]:
    """Returns path -> shape of `BertForPreTraining(config)`, and of a head with `num_outputs`."""
    ids = jnp.zeros((1, 2), jnp.int32)
    init = BertForPreTraining(config).init
    params = jax.eval_shape(init, jax.random.key(0), *[ids] * 6)["params"]
    paths = flax.traverse_util.flatten_dict(params, sep="/")
    shapes = {path: leaf.shape for path, leaf in paths.items()}
    if num_outputs:
        shapes |= {"head/kernel": (config.hidden_size, num_outputs), "head/bias": (num_outputs,)}
    return shapes


def build_loaded_model(
    directory: pathlib.Path,
    config: BertConfig,
    head: Mapping | None,
    params: dict,
    tokenizer: Tokenizer,
    report: LoadReport,
) -> LoadedModel:
    """Combines what was read from `directory`. Raises ValueError if it is inconsistent."""
    if tokenizer.vocab_size != config.vocab_size:
        raise ValueError(
            f"{directory}: the vocabulary has {tokenizer.vocab_size:,} pieces, expected "
            f"{config.vocab_size:,} (vocab_size): use the model's own vocabulary, or add a line "
            "[unusedN] to vocab.txt for each spare row at the end of the embedding"
        )
    parts = {_optional_part(path) for path in flax.traverse_util.flatten_dict(params, sep="/")}
    absent = [part for part in OPTIONAL_PARTS if part not in {*parts, "head"}]
    settings = {"bert": dataclasses.asdict(config), "absent": absent}
    if "head" in parts and "bert/pooler" not in parts and HEADS[head["task"]].pooled:
        raise ValueError(
            f"{directory}: the head for {head['task']} needs a pooler, which is missing: remove "
            "`architectures` from config.json to read the encoder alone"
        )
    if head and ("head" in parts or not head["labels"]):  # An embedding head has no parameters.
        settings["head"] = dict(head)
    return LoadedModel(params, settings, tokenizer, report)
