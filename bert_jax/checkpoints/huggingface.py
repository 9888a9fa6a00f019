"""Reads BERT and its descendants as transformers stores them; `export.py` writes that format.

Needs neither transformers nor torch; see `pickled.py` for files of old versions of torch.
"""

import collections
import math
import pathlib
import warnings
from collections.abc import Mapping

import numpy as np

from bert_jax.checkpoints import parameters
from bert_jax.checkpoints.multi_vector import (
    is_multi_vector,
    is_stanford,
    read_multi_vector,
    read_stanford,
)
from bert_jax.checkpoints.sentence_transformers import (
    MODULES_FILENAME,
    check_activation,
    read_modules,
)
from bert_jax.checkpoints.tensors import (
    check_no_adapter,
    describe_adapter,
    describe_other_heads,
    read_tensors,
)
from bert_jax.checkpoints.transformers_config import FORMATS, format_of
from bert_jax.checkpoints.transformers_names import UNSUPPORTED
from bert_jax.model.config import BertConfig
from bert_jax.model.heads import CLASSIFICATION, HEADS, InTransformers, find_head
from bert_jax.model.layer_stack import layers_with, num_stacked_layers
from bert_jax.model.transformers_format import TransformersFormat
from bert_jax.runtime.model_files import read_json, read_optional
from bert_jax.tokenizers.huggingface import CONFIG_FILENAME as TOKENIZER_CONFIG
from bert_jax.tokenizers.new_words import find_in_texts
from bert_jax.tokenizers.tokenizer import load_tokenizer

HEAD_KEY = "bert_jax_head"
"""Key of `config.json` that holds the settings of a task's head. transformers preserves it."""


def config_from_huggingface(values: Mapping):
    """Reads the model config from a `config.json`. Raises ValueError if it is not supported."""
    name = values.get("model_type", "bert")
    if name not in FORMATS:
        expected = f"expected one of {', '.join(FORMATS)}"
        reason = UNSUPPORTED.get(name, "")
        reason = f": {reason}" if reason else ""
        raise ValueError(f"config.json: model_type {name!r} is not supported, {expected}{reason}")
    return FORMATS[name].config_from_json(values)


def head_from_huggingface(values: Mapping) -> dict | None:
    """Reads the task's head from a `config.json`; None without a head.

    Returns its "task" and "labels", or all settings that `save_huggingface` wrote, unless the file
    now describes another head (with a warning). Raises ValueError for a `problem_type` that is not
    supported with this number of labels.
    """
    names, stored = values.get("id2label", {}), values.get(HEAD_KEY)
    count = len(names) or values.get("num_labels", 2)
    labels = [names.get(str(i), f"LABEL_{i}") for i in range(count)]
    # The same models are FlaxBertForMaskedLM and BertForMaskedLM.
    architectures = [str(name).removeprefix("Flax") for name in values.get("architectures") or ()]
    stored_form = FORMATS[values.get("model_type", "bert")]
    default = "regression" if count == 1 else "single_label_classification"  # In transformers.
    problem, head = values.get("problem_type") or default, None
    is_classifier = stored_form.class_of(CLASSIFICATION.transformers.class_suffix) in architectures
    if is_classifier and problem not in (default, "multi_label_classification"):
        reason = f"problem_type {problem!r} with {count} labels is not supported"
        raise ValueError(f"config.json: {reason}: remove `architectures` to read the encoder alone")
    for name, each in HEADS.items():
        form = each.transformers
        if (
            form
            and stored_form.class_of(form.class_suffix) in architectures
            and form.problem_type in ("", problem)
        ):
            head = {"task": name, "labels": list(form.labels or labels)}
    # To transformers, an embedding model is an encoder without a head.
    expected = head or {"task": "embedding", "labels": []}
    if isinstance(stored, Mapping):
        seen = stored | {"task": head_in_transformers(stored)}
        if expected.items() <= seen.items():
            return dict(stored)
    if stored is not None:
        current = f"a head for {head['task']}" if head else "no head"
        warnings.warn(f"config.json has {current}: ignoring another in {HEAD_KEY}", stacklevel=2)
    return head


def head_in_transformers(settings: Mapping) -> str | None:
    """Returns the entry of `HEADS` as which transformers reads a stored head; None without one.

    A cross-encoder is a regression on pairs; another head elsewhere may be the same class, too.
    """
    name = settings.get("task")
    if name not in HEADS and "." not in str(name):
        return None
    form = find_head(settings).transformers
    names = (name for name, head in HEADS.items() if head.transformers)
    return next((name for name in names if form and _is_same(form, HEADS[name].transformers)), None)


def _is_same(form: InTransformers, other: InTransformers) -> bool:
    """Returns whether two heads have the same `config.json`."""
    return form.class_suffix == other.class_suffix and form.problem_type == other.problem_type


def huggingface_name(
    path: str, head: Mapping | None = None, stored: TransformersFormat = FORMATS["bert"]
) -> str:
    """Returns transformers' name of a parameter, with `{layer}` where it is stacked.

    Returns "" for a parameter that models of this format do not have.
    """
    if path in stored.whole_names:
        return stored.whole_names[path]
    module, leaf = path.rsplit("/", 1)
    names, form = stored.names, find_head(head).transformers if head else None
    head_names = stored.heads.get(form.class_suffix) if form else None
    if module.startswith("projection_"):  # In a file of its own in sentence-transformers.
        name = module
    elif module == "head" and head_names:
        name = head_names.head
    elif module == "encoder/pooler/dense" and head_names and head_names.pooler:
        name = head_names.pooler
    else:
        name = names.get(path) or names.get(module)
    if not name:
        return ""
    return f"{name}.{'bias' if leaf == 'bias' else 'weight'}"


def tensor_table(config, head: Mapping | None = None) -> dict[str, parameters.StoredTensor]:
    """Returns how transformers stores each parameter that it has, by its path."""
    table, stored = {}, format_of(config)
    for path, parameter in parameters.parameter_shapes(config, head).items():
        if name := huggingface_name(path, head, stored):
            table[path] = parameters.StoredTensor(
                name=name,
                is_transposed=path.endswith("/kernel") and stored.by_head.get(path) != "inputs",
                num_rows=config.vocab_size if path in stored.padded else None,
                part=stored.parts.get(path.rpartition("/")[0], (0, 1)),
                layers=_layers(config, path, parameter.shape),
                num_heads=config.num_heads if path in stored.by_head else None,
            )
    return table


def _layers(config, path: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the numbers of the layers that have a stacked parameter; None: it is not stacked."""
    if not path.startswith("encoder/layers/"):
        return None
    if shape[0] == num_stacked_layers(config):
        return tuple(range(shape[0]))
    return layers_with(config)[tuple(path.removeprefix("encoder/layers/").split("/"))]


def params_from_huggingface(
    tensors: Mapping[str, np.ndarray], config, head: Mapping | None = None
) -> tuple[dict, parameters.LoadReport]:
    """Converts the state dict of a model to a parameter tree, with a task's `head` if given.

    Looks up one tensor at a time, because `tensors` may read them lazily. Returns and raises as
    `read_parameters`; also raises ValueError if the decoder is not tied.
    """
    stored_form, stored_names = format_of(config), {}
    prefix = stored_form.prefix
    names = (*stored_form.names.values(), *stored_form.whole_names.values())
    of_encoder = [name for name in names if name.startswith(prefix)]
    parts = {name.removeprefix(prefix).partition(".")[0] for name in of_encoder}
    for stored in tensors:
        name = stored.replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        if name.partition(".")[0] in parts:
            name = prefix + name
        if stored_names.setdefault(name, stored) != stored:
            raise ValueError(f"tensor {name}: found twice, as {stored_names[name]} and {stored}")
    for name, reason in stored_form.refused.items():
        if name in stored_names:
            raise ValueError(f"tensor {stored_names[name]}: {reason}")
    ties = getattr(config, "ties_embeddings", True)
    for copy, original in stored_form.tied.items() if ties else ():
        stored = stored_names.pop(copy, None)
        if stored and not np.array_equal(
            tensors[stored], tensors[stored_names.setdefault(original, stored)]
        ):
            raise ValueError(
                f"tensor {copy}: expected a copy of {original}, values differ: the output layer of "
                "the masked-LM head is not tied to the embeddings (tie_word_embeddings in "
                "config.json), which is not supported. To read the encoder alone, save it with "
                "transformers: AutoModel.from_pretrained(DIR).save_pretrained(NEW_DIR)"
            )
    params, report = parameters.read_parameters(
        config,
        head,
        stored_names,
        tensors.__getitem__,
        _present(tensor_table(config, head), stored_names, head),
    )
    # Copies of tied tensors count as loaded.
    loaded = tuple(name for name in tensors if name not in report.unused)
    return params, report._replace(loaded=loaded)


def _present(
    table: dict[str, parameters.StoredTensor], stored_names: Mapping[str, str], head: Mapping | None
) -> dict[str, parameters.StoredTensor]:
    """Returns the table without a head for tokens whose tensors belong to another head.

    Where the classes of transformers give a head of their own the same names, only the rest of its
    tensors tells the head for tokens.
    """
    others = {each.name for path, each in table.items() if not path.startswith("mlm/")}
    own = [
        each.name
        for path, each in table.items()
        if path.startswith("mlm/") and each.name not in others
    ]
    shares = any(each.name in others for path, each in table.items() if path.startswith("mlm/"))
    has_own = not own or any(name in stored_names for name in own)
    if shares and ((head and head["labels"]) or not has_own):
        return {path: each for path, each in table.items() if not path.startswith("mlm/")}
    return table


def load_huggingface(directory: pathlib.Path) -> parameters.LoadedModel:
    """Loads a directory that transformers or sentence-transformers wrote.

    Raises FileNotFoundError if a file is missing, ImportError if torch is, and ValueError if a file
    is damaged, unsupported, or inconsistent with another.
    """
    encoder, modules = directory, None
    if (directory / MODULES_FILENAME).exists():
        modules = read_multi_vector(directory) if is_multi_vector(directory) else None
        modules = modules or read_modules(directory)
        encoder = modules.encoder
    elif is_stanford(directory):
        modules = read_stanford(directory)
    path, legacy_path = encoder / "config.json", encoder / "bert_config.json"
    if not path.exists() and not legacy_path.exists():
        fix = "copy it from the place that the weights come from"
        raise FileNotFoundError(f"{encoder} has weights, but no config.json: {fix}")
    limit = read_optional(encoder / TOKENIZER_CONFIG).get("model_max_length")
    values = {"model_max_length": limit} | read_json(path if path.exists() else legacy_path)
    if found := describe_adapter(encoder):
        raise ValueError(found)
    try:
        _check_code_and_adapters(values)
        config, head = config_from_huggingface(values), head_from_huggingface(values)
        is_cross_encoder = modules is not None and modules.is_cross_encoder
        # Where its former versions store it. An exported regression of ours has no version.
        former = values.get("sentence_transformers", {})
        if "version" in former:
            check_activation(former.get("activation_fn"), path)
            is_cross_encoder = True
        if (
            is_cross_encoder
            and head
            and head["task"] == "regression"
            and values.get(HEAD_KEY) is None
        ):
            limit = (modules and modules.max_seq_length) or values.get("model_max_length")
            limit = int(min(limit or math.inf, config.max_position_embeddings))
            head = {"task": "multiple_choice", "labels": ["score"]}
            head |= {"max_seq_length": limit, "max_query_length": limit}
        if modules and modules.head:
            limit = modules.head.get("max_seq_length", config.max_position_embeddings)
            limit = min(limit, config.max_position_embeddings)
            # The files that sentence-transformers reads count more than what we wrote beside them.
            options = find_head(modules.head).options
            kept = {name: value for name, value in (head or {}).items() if name not in options}
            head = kept | modules.head | {"max_seq_length": limit}
        check_pooling(config, head)
        tensors = read_tensors(encoder)
        check_no_adapter(tensors)
        if modules:
            tensors = collections.ChainMap(modules.tensors, tensors.without(modules.taken))
        params, report = params_from_huggingface(tensors, config, head)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error
    if found := describe_other_heads(directory):
        warnings.warn(found, stacklevel=2)
    tokenizer = load_tokenizer(encoder)
    if modules and modules.markers:
        tokenizer = find_in_texts(tokenizer, modules.markers)
    if modules and modules.lower_cases and not tokenizer.lower_case:
        fix = "set it in tokenizer_config.json instead"
        raise ValueError(f"{directory}: do_lower_case of a cased tokenizer is not supported: {fix}")
    model = parameters.build_loaded_model(directory, config, head, params, tokenizer, report)
    if isinstance(limit, int) and 2 < limit < config.max_position_embeddings:
        model.settings["trained_length"] = limit  # The length that the model's authors state.
    return model


def _check_code_and_adapters(values: Mapping) -> None:
    """Raises ValueError for adapters or custom code, which change what a model computes."""
    if names := (values.get("adapters") or {}).get("adapters"):
        raise ValueError(
            f"config.json: the model has the adapters {', '.join(names)}, which are not read: "
            "merge them with the library adapters, model.merge_adapter(NAME), or remove them, "
            "model.delete_adapter(NAME)"
        )
    for name, target in (values.get("auto_map") or {}).items():
        raise ValueError(
            f"config.json: auto_map says that {name} is {target}, code of the model's repository, "
            "which may compute something else and is not run here. If transformers computes the "
            "same without it (trust_remote_code=False), remove auto_map from config.json"
        )


def check_pooling(config: BertConfig, head: Mapping | None) -> None:
    """Raises ValueError for a pooled head on a causal model, where we pool the last token."""
    cls_last = getattr(config, "cls_last", False)
    if config.causal and not cls_last and head and find_head(head).input_kind == "pooled":
        reason = "transformers pools [CLS], which sees no other token in a left-to-right model"
        raise ValueError(f"a head for {head['task']} cannot be converted: {reason}")
