"""Builds the parameter tree from named tensors, in any storage format."""

import collections
import difflib
import functools
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import flax
import jax
import numpy as np
from absl import logging

from bert_jax.checkpoints.transformers_config import FORMATS
from bert_jax.checkpoints.transformers_names import PRETRAINING_HEADS
from bert_jax.data.features import check_layout, unpack_rows
from bert_jax.model.architecture import config_to_settings
from bert_jax.model.heads import find_head, make_model
from bert_jax.objectives.masked_lm import PretrainingModel
from bert_jax.objectives.replaced_tokens import Discriminator
from bert_jax.tokenizers.tokenizer import Tokenizer

OPTIONAL_MODULES = ("encoder/pooler", *PRETRAINING_HEADS)
"""Parts that a model may lack, besides a task's head."""


class StoredTensor(NamedTuple):
    """How another library stores a parameter: an entry of its table.

    Attributes:
      name: of the tensor; with `{layer}` there is one for each layer of a stacked parameter.
      is_transposed: whether it is stored as `[outputs, inputs]`.
      num_rows: how many rows of the parameter it has; None: all. The vocabulary is padded here.
      part: (i, n) if the parameter is the i-th of n equal parts of the tensor, along the outputs.
      layers: the numbers of the layers that have the parameter, if it is stacked; else None.
      num_heads: into which the last axis is split, if it is stored as two, `[heads, head_dim]`.
    """

    name: str
    is_transposed: bool = False
    num_rows: int | None = None
    part: tuple[int, int] = (0, 1)
    layers: tuple[int, ...] | None = None
    num_heads: int | None = None

    @property
    def is_stacked(self) -> bool:
        return self.layers is not None

    def names(self) -> list[str]:
        """Returns the names of all tensors that make up the parameter."""
        if not self.is_stacked:
            return [self.name]
        return [self.name.format(layer=layer) for layer in self.layers]

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of each tensor that makes up a parameter of the given shape."""
        if self.is_stacked:
            shape = shape[1:]
        if self.num_rows is not None:
            shape = (self.num_rows, *shape[1:])
        first, *rest = shape[::-1] if self.is_transposed else shape
        if self.num_heads is not None:
            rest[-1:] = self.num_heads, rest[-1] // self.num_heads
        return (first * self.part[1], *rest)

    def value(self, tensor: np.ndarray) -> np.ndarray:
        """Returns the part of a tensor that the parameter has, as `[inputs, outputs]`."""
        index, count = self.part
        size = len(tensor) // count
        part = tensor[index * size : (index + 1) * size]
        if self.num_heads is not None:
            part = part.reshape(*part.shape[:-2], -1)
        return part.T if self.is_transposed else part

    def stored(self, value: np.ndarray) -> np.ndarray:
        """Returns the part of a tensor that stores a value of the parameter, of one layer."""
        part = value.T if self.is_transposed else value
        if self.num_heads is not None:
            part = part.reshape(*part.shape[:-1], self.num_heads, -1)
        return part


class LoadReport(NamedTuple):
    """Names of the tensors that were loaded, are missing with an absent part, or were not used."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]


class LoadedModel(NamedTuple):
    """The contents of a model directory; for `settings` see `native.write_checkpoint`."""

    params: dict
    settings: dict
    tokenizer: Tokenizer
    report: LoadReport


def log_report(source: str, report: LoadReport) -> None:
    """Logs the number of tensors read from `source`, and with --verbosity=1 their table.

    Tensors of absent parts, for which the run says what it initializes, and those that no model
    reads are only in the table.
    """
    names = _unexpectedly_unused(report)
    others = f" and {len(names) - 3} others" if len(names) > 3 else ""
    unused = f"; not used: {', '.join(names[:3])}{others}" if names else ""
    logging.info(
        "Read %d tensors from %s%s; --verbosity=1 lists them", len(report.loaded), source, unused
    )
    logging.debug("Tensors:\n%s", format_report(report))


def format_report(report: LoadReport) -> str:
    """Formats a table in which names that differ only in numbers are counted together."""
    lines = ["         tensors  name (* stands for numbers)"]
    for status, names in report._asdict().items():
        patterns = collections.Counter(re.sub(r"\d+", "*", name) for name in names) or {"": 0}
        lines += [f"{status:8} {count:7}  {pattern}" for pattern, count in patterns.items()]
    return "\n".join(lines)


def _unexpectedly_unused(report: LoadReport) -> list[str]:
    """Returns the unused tensors without those that no model reads, such as training state."""
    expected = (
        r"(.*[./])?position_ids|training|global_step|.*/(adam|lamb)_[mv]"
        # Of ELECTRA's two networks in a checkpoint of Google's, one is read.
        r"|(generator|discriminator)(_predictions)?/.*|electra/(encoder|embeddings_project)/.*"
        # ESM's head of contacts, and its table of positions, of which rotations take the place.
        r"|(esm\.)?contact_head\..*|(esm\.)?embeddings\.position_embeddings\.weight"
    )
    return [name for name in report.unused if not re.fullmatch(expected, name)]


def unexpected_tensors(report: LoadReport) -> str:
    """Describes tensors that are missing or unused without a reason; "" if there are none."""
    unused = _unexpectedly_unused(report)
    # Poolers and heads of pre-training.
    optional = {name for each in FORMATS.values() for name in each.names.values()}
    missing = [
        name
        for name in report.missing
        if name.rpartition(".")[0] not in optional and not name.startswith(("bert/", "cls/"))
    ]
    return "; ".join(
        f"{len(names)} tensors are {status}, such as {min(names)}"
        for status, names in (("unused", unused), ("missing", missing))
        if names
    )


def hint_for_unexpected(report: LoadReport) -> str:
    """Returns the likely reason for unused or missing tensors, and how to fix it."""
    unused = _unexpectedly_unused(report)
    if not unused:
        return "the file lacks the head that `architectures` in config.json names: correct either"
    unused_layers, loaded_layers = (
        [int(found[1]) for name in names if (found := re.search(r"\.layer\.(\d+)\.", name))]
        for names in (unused, report.loaded)
    )
    if unused_layers and loaded_layers and min(unused_layers) > max(loaded_layers):
        return (
            f"the file has {max(unused_layers) + 1} layers, but config.json says "
            f"{max(loaded_layers) + 1} (num_hidden_layers): correct it, unless the last layers "
            "were dropped on purpose"
        )
    if any(re.search(r"(^|\.)(layer|embeddings|albert_layers)\.", name) for name in unused):
        return "the encoder may have parts that are not read, with which its vectors would differ"
    return "a head is loaded if `architectures` in config.json names its class"


def modules_of(params: Mapping) -> list[str]:
    """Returns the modules of a parameter tree: the encoder's own, and the heads."""
    encoder = [f"encoder/{name}" for name in params["encoder"]]
    return sorted([*encoder, *(name for name in params if name != "encoder")])


def model_settings(config, params: Mapping) -> dict:
    """Returns what a checkpoint stores of a model config and parameters."""
    return {"architecture": config_to_settings(config), "modules": modules_of(params)}


def trained_length(settings: Mapping) -> int | None:
    """Returns the number of tokens up to which positions were trained; None if unknown.

    Older checkpoints do not store it: it follows from the sizes of their corpora, unless they
    started from other weights, of which they store no length.
    """
    if "trained_length" in settings:
        return settings["trained_length"]
    starts_from_teacher = settings.get("distillation", {}).get("init_layers")
    if settings.get("init_from") or starts_from_teacher or not settings.get("corpora"):
        return None
    return max(row_length(corpus["splits"]["train"]) for corpus in settings["corpora"])


def row_length(split: Mapping) -> int:
    """Returns the length of the rows of a split of a corpus, from its counts in the manifest."""
    return round(split["tokens"] / (split["rows"] * split["fill"]))


def parameter_shapes(config, head: Mapping | None = None) -> dict:
    """Returns path -> shape and dtype of the parameters of `PretrainingModel`, and of other heads.

    `config` is the model config. The heads are a task's, if given, and in the
    family of ELECTRA the discriminator's.
    """
    return dict(_traced_shapes(config, json.dumps(head)))


@functools.lru_cache  # Tracing a model takes longer than reading a small one.
def _traced_shapes(config, head_json: str) -> dict:
    head, tokens = json.loads(head_json), np.zeros((1, 2), np.int32)
    rows = {"tokens": tokens, "sequence_bounds": np.zeros((1, 1, 3), np.int32)}

    def init(key, model):
        batch = rows | unpack_rows(rows) | {"target_positions": tokens}
        return model.init(key, batch)["params"]

    def shapes(model):
        return jax.eval_shape(functools.partial(init, model=model), jax.random.key(0))

    params = shapes(PretrainingModel(config))
    if getattr(config, "family", "") == "electra":
        params = shapes(Discriminator(config)) | params
    if head and (head["labels"] or head.get("projections")):  # Others have no parameters.
        params = shapes(make_model(config, head)) | params
    return flax.traverse_util.flatten_dict(params, sep="/")


def read_parameters(
    config,
    head: Mapping | None,
    stored_names: Mapping[str, str],
    read_tensor: Callable[[str], np.ndarray],
    table: Mapping[str, StoredTensor],
) -> tuple[dict, LoadReport]:
    """Builds the parameter tree, without the optional parts that the file lacks, and a report.

    The tree has float32 arrays on the default device, with zeros as vocabulary padding. Reads one
    tensor at a time, largest parameter first, so that a CPU needs little more memory than the
    parameters take. Raises ValueError if a tensor is missing or has the wrong shape.

    Args:
      stored_names: name of a tensor -> its name in the file.
      read_tensor: name in the file -> tensor.
      table: path of a parameter -> how the file stores it.
    """
    # A family without a part has no names for it.
    shapes = {path: x.shape for path, x in parameter_shapes(config, head).items() if path in table}
    present = [path for path in shapes if table[path].name in stored_names]
    parts = [f"{part}/" for part in ("head", *OPTIONAL_MODULES)]
    absent = tuple(part for part in parts if not any(path.startswith(part) for path in present))
    missing = tuple(dict.fromkeys(table[path].name for path in shapes if path.startswith(absent)))
    # Path of a parameter -> its tensors: one, or one for each layer.
    names = {path: table[path].names() for path in shapes if not path.startswith(absent)}
    for path in names:
        for name in names[path]:
            if name not in stored_names:
                expected = f"expected shape {table[path].stored_shape(shapes[path])}"
                found = f"found no such tensor{_similar_name(name, stored_names.values())}"
                raise ValueError(f"tensor {name}: {expected}, {found}")
    params = dict.fromkeys(names)
    for path in sorted(names, key=lambda path: -math.prod(shapes[path])):
        parameter = aligned_zeros(shapes[path], np.float32)
        values = parameter[: table[path].num_rows]
        parts = values if table[path].is_stacked else [values]
        for name, value in zip(names[path], parts, strict=True):
            tensor = np.asarray(read_tensor(stored_names[name]))
            if tensor.shape != (expected := table[path].stored_shape(shapes[path])):
                raise ValueError(f"tensor {name}: expected shape {expected}, found {tensor.shape}")
            if not np.issubdtype(tensor.dtype, np.floating) and tensor.dtype.kind != "V":
                raise ValueError(f"tensor {name}: expected floating point, found {tensor.dtype}")
            value[...] = table[path].value(tensor)
        params[path] = jax.block_until_ready(jax.device_put(parameter))
    # Once each, also those of which several parameters are parts.
    loaded = tuple(dict.fromkeys(stored_names[name] for path in names for name in names[path]))
    unused = tuple(sorted({*stored_names.values()} - {*loaded}))
    tree = flax.traverse_util.unflatten_dict(params, sep="/")
    return tree, LoadReport(loaded, missing, unused)


def _similar_name(name: str, stored: Iterable[str]) -> str:
    """Describes the stored tensor whose name is most similar to a missing one, and a fix.

    The fix is given if the stored name only has a prefix that the missing one has not.
    """
    # If the encoder is part of a larger model, only the beginning of its names differs.
    tails = [name.split(separator, 1)[-1] for separator in "./"]
    ends = [each for each in stored for tail in tails if tail != name and each.endswith(tail)]
    similar = min(ends, key=len) if ends else "".join(difflib.get_close_matches(name, stored, 1, 0))
    if not similar:
        return "; the file holds no tensors"
    for each in (name, *tails):
        if (prefix := similar.removesuffix(each)) != similar and prefix.endswith((".", "/")):
            fix = f"save only the submodule {prefix[:-1]}, or remove this prefix from the names"
            if each != name and prefix in {family.prefix for family in FORMATS.values()}:
                fix = "another kind of model: correct model_type in config.json"
            return f", the file has {similar}: {fix}"
    return f", the file has {similar}"


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns zeros in memory aligned to 64 bytes, which `jax.device_put` does not copy on a CPU.

    The array must not be changed after `device_put`, which shares its memory.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def build_loaded_model(
    directory: pathlib.Path,
    config,
    head: Mapping | None,
    params: dict,
    tokenizer: Tokenizer,
    report: LoadReport,
) -> LoadedModel:
    """Combines what was read from `directory`. Raises ValueError if it is inconsistent."""
    if tokenizer.vocab_size > config.vocab_size:  # Fewer are padding.
        names = [tokenizer.id_to_token(i) for i in range(config.vocab_size, tokenizer.vocab_size)]
        sizes = f"{tokenizer.vocab_size:,} ids, expected {config.vocab_size:,} (vocab_size)"
        raise ValueError(
            f"{directory}: the tokenizer has {sizes}: {', '.join(names[:5])} have no embedding; "
            "use the model's own tokenizer, or remove the names of tokens that texts do not contain"
        )
    try:
        check_layout(config, tokenizer)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from None
    needs_pooler = "head" in params and find_head(head).input_kind == "pooled"
    if needs_pooler and "pooler" not in params["encoder"]:
        fix = "remove `architectures` from config.json to read the encoder alone"
        raise ValueError(f"{directory}: the head for {head['task']} needs a pooler: {fix}")
    if head and (lacking := {*find_head(head).pretrained_modules} - params.keys()):
        raise ValueError(
            f"{directory}: a head for {head['task']} needs the tensors of {min(lacking)!r}, the "
            "masked-LM head, which the file lacks: save the model with its class for masked LM"
        )
    settings = model_settings(config, params)
    if head and ("head" in params or not head["labels"]):  # An embedding head has no labels.
        settings["head"] = dict(head)
    return LoadedModel(params, settings, tokenizer, report)
