"""LoRA adapters in the format of `peft`: adapter_config.json and adapter_model.safetensors.

Both name the layers of transformers' model. What is read is merged into its base model.
"""

import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import safetensors.numpy
from flax.traverse_util import flatten_dict

from bert_jax.checkpoints.export import params_to_huggingface, with_target_scale
from bert_jax.checkpoints.huggingface import (
    head_from_huggingface,
    params_from_huggingface,
    tensor_table,
)
from bert_jax.checkpoints.parameters import LoadedModel, StoredTensor, build_loaded_model
from bert_jax.checkpoints.tensors import MERGE, WEIGHTS_FILENAMES, read_adapter_tensors
from bert_jax.checkpoints.transformers_config import format_of
from bert_jax.checkpoints.transformers_names import PRETRAINING_HEADS
from bert_jax.model.architecture import config_from_settings
from bert_jax.model.heads import find_head
from bert_jax.model.lora import Lora
from bert_jax.model.transformers_format import TransformersFormat
from bert_jax.runtime.buckets import is_bucket
from bert_jax.runtime.model_files import find_snapshot, read_json, read_optional

CONFIG_FILENAME = "adapter_config.json"
HEAD_FILENAME = "bert_jax_head.json"  # The head's settings; peft has none, and reads no such file.
_PREFIX = "base_model.model."
_TASKS = {  # End of a class of transformers -> `task_type`, which selects the class.
    "": "FEATURE_EXTRACTION",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
# Fields of adapter_config.json that are read.
_READ = (
    "peft_type",
    "task_type",
    "base_model_name_or_path",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "layers_to_transform",
    "layers_pattern",
    "init_lora_weights",
)
# Those that say how an adapter was trained or stored. Of `bias` and `modules_to_save`, what there
# is of them is among the tensors; `exclude_modules` have none.
_WITHOUT_EFFECT = (
    "auto_mapping",
    "bias",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "modules_to_save",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
)
# Other initializations also change the base model's matrices.
_INITIALIZATIONS = (None, True, False, "gaussian", "orthogonal", "eva")


class PeftFormat(NamedTuple):
    """How the adapters and the head of a run are stored, which `peft_format` finds.

    Attributes:
      config: the contents of adapter_config.json.
      modules: path of the first layer of each group -> names of its modules in transformers, one
        for each layer of the encoder, or a single one; without those of `saved`.
      saved: path of a parameter that is stored as a whole -> how transformers stores it.
      prefix: what the names of the encoder's tensors begin with, and those in the file do not.
      head: the settings of the head.
    """

    config: dict
    modules: dict[str, list[str]]
    saved: dict[str, StoredTensor]
    prefix: str
    head: dict

    def files(self, adapters: Mapping, params: Mapping, tuned: Mapping) -> dict[str, bytes]:
        """Returns the files of an adapter, by name.

        `adapters` are as `init_adapters` returns them, `params` those of the merged model, and
        `tuned` the settings of the head that were found on a split.
        """
        tensors, flat = {}, flatten_dict(adapters, sep="/")
        for path, names in self.modules.items():
            for kind, letter in (("a", "A"), ("b", "B")):
                value = np.asarray(flat[f"{path}/{kind}"], np.float32)
                layers = value if value.ndim == 3 else [value]
                for name, matrix in zip(names, layers, strict=True):
                    tensors[f"{_PREFIX}{name}.lora_{letter}.weight"] = matrix.T
        params, head = with_target_scale(params, {**self.head, **tuned})
        flat = flatten_dict(params, sep="/")
        for path, stored in self.saved.items():
            tensors[_PREFIX + stored.name.removeprefix(self.prefix)] = stored.stored(
                np.asarray(flat[path], np.float32)
            )
        tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        return {
            CONFIG_FILENAME: json.dumps(self.config, indent=2).encode() + b"\n",
            HEAD_FILENAME: json.dumps(head, indent=2).encode() + b"\n",
            "adapter_model.safetensors": safetensors.numpy.save(tensors, {"format": "pt"}),
        }


def peft_format(
    lora: Lora, config, head: Mapping, trained: Mapping, params: Mapping, base: str
) -> PeftFormat:
    """Returns how `peft` stores the adapters of a model, and the other parameters that are trained.

    `trained` are the parameters of a run, or their shapes, and `params` those of the merged model;
    `base` names the base model. Raises ValueError if transformers has other layers.
    """
    stored, form = format_of(config), find_head(head).transformers
    if stored is None:
        raise ValueError(f"transformers has no format for the architecture {config.architecture}")
    has_layers = bool(head["labels"])  # Otherwise transformers' class is that of the encoder.
    if form is None or (has_layers and form.class_suffix not in stored.heads):
        raise ValueError(f"transformers has no head for {head['task']}")
    if find_head(head).pretrained_modules:
        raise ValueError(f"a head for {head['task']} shares parameters with the encoder")
    table, modules = tensor_table(config, head), {}
    prefix = "" if has_layers else stored.prefix
    for group in lora.groups:
        if f"{group[0]}/kernel" not in table:
            raise ValueError(f"transformers' {stored.class_prefix} has no tensor for {group[0]}")
        tensor = table[f"{group[0]}/kernel"]
        if tensor.num_heads is not None:
            raise ValueError(f"in transformers, {tensor.name} is no layer that peft can adapt")
        names = [name.removeprefix(prefix).rpartition(".")[0] for name in tensor.names()]
        modules[group[0]] = names
    others = [path for path in flatten_dict(trained, sep="/") if not path.startswith("lora/")]
    # A pooler that is not the encoder's own there: a base model that is exported has none.
    others += [
        path
        for path in flatten_dict(params, sep="/")
        if path.startswith("encoder/pooler/") and not table[path].name.startswith(stored.prefix)
    ]
    if own := [path for path in others if path not in table or path.startswith("projection_")]:
        raise ValueError(f"transformers' {stored.class_prefix} has no tensor for {own[0]}")
    to_save = []  # A pooler of the encoder alone; of a head, all.
    for path in others:
        name = table[path].name.removeprefix(prefix)
        module = name.rpartition(".")[0]
        is_of_encoder = table[path].name.startswith(stored.prefix)
        to_save.append(module if is_of_encoder else module.partition(".")[0])
    to_save = list(dict.fromkeys(to_save))
    in_saved = tuple(f"{module}." for module in to_save)
    saved = {
        path: table[path]
        for path in flatten_dict(params, sep="/")
        if path in table and table[path].name.removeprefix(prefix).startswith(in_saved)
    }
    # Such as an adapted pooler that is part of the head there: it is stored merged.
    modules = {
        path: names for path, names in modules.items() if not f"{names[0]}.".startswith(in_saved)
    }
    if not modules:
        raise ValueError(
            f"transformers has the adapted layers in {', '.join(to_save)}, saved whole"
        )
    suffix = form.class_suffix if has_layers else ""
    values = {
        "peft_type": "LORA",
        "task_type": _TASKS.get(suffix),
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": [name for names in modules.values() for name in names],
        "modules_to_save": to_save or None,
        "fan_in_fan_out": False,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "layers_pattern": None,
    }
    return PeftFormat(values, modules, saved, prefix, dict(head))


def is_base_of_peft(base: str) -> bool:
    """Returns whether `peft` can load a base model: the weights of transformers, in a directory."""
    if is_bucket(base):
        return False
    directory = find_snapshot(pathlib.Path(base).expanduser())
    return any((directory / filename).exists() for filename in WEIGHTS_FILENAMES)


def load_adapter(directory: pathlib.Path, read_base: Callable[[str], LoadedModel]) -> LoadedModel:
    """Reads an adapter of `peft`, merged into its base model, which `read_base` reads.

    Raises ValueError for another kind of adapter, a field of its configuration that is not
    supported, or tensors that do not fit the base model; FileNotFoundError if one is missing.
    """
    values = read_json(directory / CONFIG_FILENAME)
    try:
        _check_config(values)
    except ValueError as error:
        raise ValueError(f"{directory}: {CONFIG_FILENAME}: {error}") from None
    base_path = values.get("base_model_name_or_path")
    where = f"{directory}: {CONFIG_FILENAME}: base_model_name_or_path is {base_path!r}"
    if not base_path:
        raise ValueError(f"{where}: set it to the directory of the model that the adapter is of")
    try:
        base = read_base(base_path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{where}: {error}") from None
    try:
        return _merge(directory, values, base)
    except ValueError as error:
        raise ValueError(f"{directory}, an adapter of {base_path}: {error}") from error


def _check_config(values: Mapping) -> None:
    """Raises ValueError for what an adapter_config.json says and is not read."""
    if values.get("peft_type") != "LORA":
        raise ValueError(f"peft_type is {values.get('peft_type')!r}, expected 'LORA': {MERGE}")
    for name, value in values.items():
        if name not in _READ and name not in _WITHOUT_EFFECT and value:
            raise ValueError(f"{name} is {value!r}, which is not supported: {MERGE}")
    if (kind := values.get("init_lora_weights")) not in _INITIALIZATIONS:
        reason = "it has changed the matrices of the base model"
        raise ValueError(f"init_lora_weights is {kind!r}: {reason}: {MERGE}")
    for name in ("r", "lora_alpha"):
        if not isinstance(values.get(name), int | float) or values[name] < 0:
            raise ValueError(f"{name} is {values.get(name)!r}, expected a number of at least 0")


def _merge(directory: pathlib.Path, values: Mapping, base: LoadedModel) -> LoadedModel:
    """Returns the base model with the adapter in `directory`, and with its head, if it has one."""
    config, head = config_from_settings(base.settings), base.settings.get("head")
    stored, adapter = format_of(config), dict(read_adapter_tensors(directory))
    if stored is None:
        raise ValueError(f"transformers has no format for the architecture {config.architecture}")
    params, scaled_head = with_target_scale(base.params, head or {})
    # With bias="all", the names of some biases have the modules of peft.
    adapter = {
        re.sub(r"\.(base_layer|modules_to_save)\.", ".", name.removeprefix(_PREFIX)): tensor
        for name, tensor in adapter.items()
        if ".original_module." not in name
    }
    own = read_optional(directory / HEAD_FILENAME)
    suffixes = {task: suffix for suffix, task in _TASKS.items()}
    suffix = (
        find_head(own).transformers.class_suffix if own else suffixes.get(values.get("task_type"))
    )
    names = stored.heads.get(suffix)
    if names and f"{names.head}.weight" in adapter:
        num_labels = len(adapter[f"{names.head}.weight"])
        new_head = own or _head_of_class(stored, config, suffix, num_labels, scaled_head)
        # The class for a task has no head for tokens.
        params = {name: each for name, each in params.items() if name not in PRETRAINING_HEADS}
        class_head = new_head
    else:
        new_head, class_head = scaled_head or own, head
    tensors = params_to_huggingface(params, config, class_head)
    known = {name for each in tensor_table(config, class_head).values() for name in each.names()}
    tensors = {
        name if name in known else stored.prefix + name: tensor for name, tensor in tensors.items()
    }

    def find(name: str) -> str:
        return name if name in tensors else stored.prefix + name

    # First the whole tensors, to which the products of adapted layers among them are added.
    for name, tensor in sorted(adapter.items(), key=lambda item: ".lora_" in item[0]):
        module, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind == "lora_B" and f"{module}.lora_A.weight" in adapter:
            continue
        if kind == "lora_A" and f"{module}.lora_B.weight" in adapter:
            weight = find(f"{module}.weight")
            b = adapter[f"{module}.lora_B.weight"]
            _check_layer(values, module, tensor, b, tensors.get(weight))
            product = np.float64(b) @ np.float64(tensor) * _scale(values, module, len(tensor))
            tensors[weight] = np.float32(tensors[weight] + product)
        elif "lora_" in name:
            raise ValueError(f"tensor {name}: expected lora_A.weight and lora_B.weight of a layer")
        else:
            tensors[find(name) if find(name) in tensors else name] = np.float32(tensor)
    params, report = params_from_huggingface(tensors, config, new_head or None)
    if unused := sorted(name for name in report.unused if name in adapter):
        raise ValueError(f"tensor {unused[0]}: the base model has no such layer")
    model = build_loaded_model(directory, config, new_head or None, params, base.tokenizer, report)
    if "trained_length" in base.settings:
        model.settings["trained_length"] = base.settings["trained_length"]
    return model


def _head_of_class(
    stored: TransformersFormat, config, suffix: str, num_labels: int, head: Mapping
) -> dict:
    """Returns the settings of the head of one of transformers' classes: those of `head` if it fits.

    peft does not store the names of labels.
    """
    if head and len(head["labels"]) == num_labels:
        form = find_head(head).transformers
        if form and form.class_suffix == suffix:
            return dict(head)
    values = {"model_type": stored.config_to_json(config)["model_type"], "num_labels": num_labels}
    return head_from_huggingface(values | {"architectures": [stored.class_of(suffix)]})


def _check_layer(
    values: Mapping, module: str, a: np.ndarray, b: np.ndarray, weight: np.ndarray | None
) -> None:
    """Raises ValueError if the adapter of a module does not fit its layer, or the configuration."""
    if weight is None:
        raise ValueError(f"tensor {module}.lora_A.weight: the base model has no layer {module}")
    expected = (b.shape[0], a.shape[-1])
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or weight.shape != expected:
        raise ValueError(
            f"tensor {module}.lora_A.weight: {a.shape} and lora_B.weight {b.shape} do not fit "
            f"the base model's {weight.shape}"
        )
    if len(a) != (rank := _pattern(values, "rank_pattern", module, values["r"])):
        raise ValueError(f"tensor {module}.lora_A.weight: expected {rank} rows, found {len(a)}")
    if not _is_targeted(values, module):
        name = "target_modules and layers_to_transform"
        raise ValueError(f"tensor {module}.lora_A.weight: {name} do not name this layer")


def _is_targeted(values: Mapping, module: str) -> bool:
    """Returns whether peft would adapt this module."""
    targets = values.get("target_modules")
    if isinstance(targets, str) and targets != "all-linear":
        if not re.fullmatch(targets, module):
            return False
    elif isinstance(targets, list) and not any(f".{module}".endswith(f".{t}") for t in targets):
        return False
    layers, patterns = values.get("layers_to_transform"), values.get("layers_pattern") or [r"[^.]*"]
    if layers is None or layers == []:
        return True
    layers = [layers] if isinstance(layers, int) else layers
    patterns = [patterns] if isinstance(patterns, str) else patterns
    found = (re.match(rf".*\.{pattern}\.(\d+)\.", f".{module}") for pattern in patterns)
    number = next((int(each[1]) for each in found if each), None)
    return number in layers


def _scale(values: Mapping, module: str, rank: int) -> float:
    alpha = _pattern(values, "alpha_pattern", module, values["lora_alpha"])
    return alpha / (math.sqrt(rank) if values.get("use_rslora") else rank)


def _pattern(values: Mapping, field: str, module: str, default: float) -> float:
    """Returns the value of the first pattern of a field that the end of a module's name matches."""
    patterns = values.get(field) or {}
    return next((v for p, v in patterns.items() if re.match(rf"(.*\.)?({p})$", module)), default)
