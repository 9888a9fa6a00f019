"""Converts BERT from and to the format of Hugging Face's transformers library.

Needs neither transformers nor, except for the old `pytorch_model.bin`, torch.
"""

import json
import pathlib
import warnings
from collections.abc import Mapping

import flax
import numpy as np
import safetensors.numpy

from bert_jax.interop.files import read_json, read_tensors, read_tokenizer
from bert_jax.interop.parameters import (
    PADDED,
    LoadedModel,
    LoadReport,
    build_loaded_model,
    read_parameters,
)
from bert_jax.model.config import BertConfig
from bert_jax.tokenization import WORDPIECE_FILENAME, Tokenizer

HEAD_KEY = "bert_jax_head"
"""Key of `config.json` that holds the settings of a task's head. transformers preserves it."""

# Paths in the parameter tree -> names in transformers. A name with `{layer}` stands for one tensor
# per layer, stacked along axis 0 in the parameter tree.
_LAYER = "bert.encoder.layer.{layer}"
_PARAMETER_NAMES = {
    "bert/embeddings/token_embedding": "bert.embeddings.word_embeddings.weight",
    "bert/embeddings/position_embedding": "bert.embeddings.position_embeddings.weight",
    "bert/embeddings/segment_embedding": "bert.embeddings.token_type_embeddings.weight",
    "mlm/bias": "cls.predictions.bias",
}
_MODULE_NAMES = {
    "bert/embeddings/layer_norm": "bert.embeddings.LayerNorm",
    "bert/encoder/layers/query": f"{_LAYER}.attention.self.query",
    "bert/encoder/layers/key": f"{_LAYER}.attention.self.key",
    "bert/encoder/layers/value": f"{_LAYER}.attention.self.value",
    "bert/encoder/layers/attention_output": f"{_LAYER}.attention.output.dense",
    "bert/encoder/layers/attention_layer_norm": f"{_LAYER}.attention.output.LayerNorm",
    "bert/encoder/layers/intermediate": f"{_LAYER}.intermediate.dense",
    "bert/encoder/layers/output": f"{_LAYER}.output.dense",
    "bert/encoder/layers/output_layer_norm": f"{_LAYER}.output.LayerNorm",
    "bert/pooler": "bert.pooler.dense",
    "mlm/transform": "cls.predictions.transform.dense",
    "mlm/layer_norm": "cls.predictions.transform.LayerNorm",
    "nsp": "cls.seq_relationship",
}
_LEAF_NAMES = {"kernel": "weight", "scale": "weight", "bias": "bias"}

# Task -> transformers' class, the name of its head, and the head's labels where they are fixed.
_TASK_HEADS = {
    "classification": ("BertForSequenceClassification", "classifier", None),
    "regression": ("BertForSequenceClassification", "classifier", None),
    "tagging": ("BertForTokenClassification", "classifier", None),
    "span": ("BertForQuestionAnswering", "qa_outputs", ("start", "end")),
    "multiple_choice": ("BertForMultipleChoice", "classifier", ("score",)),
}
# (has "mlm", has "nsp") -> transformers' class of a model without a task's head.
_HEADLESS_CLASSES = {
    (True, True): "BertForPreTraining",
    (True, False): "BertForMaskedLM",
    (False, True): "BertForNextSentencePrediction",
    (False, False): "BertModel",
}

# Fields of BertConfig -> keys of Hugging Face's and Google's configurations.
_CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "initializer_range": "initializer_range",
    "layer_norm_epsilon": "layer_norm_eps",
}

# Tied tensors may be stored in addition to the original, or instead of it.
_TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_OLD_LEAF_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def config_from_huggingface(values: Mapping) -> BertConfig:
    """Reads the architecture from a `config.json`. Raises ValueError if it is not supported."""
    required = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "is_decoder": False,
    }
    for name, expected in required.items():
        if values.get(name, expected) != expected:
            raise ValueError(f"config.json: {name} is {values[name]!r}, expected {expected!r}")
    rates = {values.get(f"{part}_dropout_prob", 0.1) for part in ("hidden", "attention_probs")}
    if len(rates) > 1:
        raise ValueError(
            "config.json: hidden_dropout_prob and attention_probs_dropout_prob differ "
            f"({sorted(rates)}): set both to the same value"
        )
    # The defaults are BERT_BASE in all three libraries.
    fields = {field: values[key] for field, key in _CONFIG_KEYS.items() if key in values}
    try:
        return BertConfig(**fields, dropout_rate=rates.pop())
    except TypeError as error:
        raise ValueError(f"config.json: a value has the wrong type: {error}") from error


def head_from_huggingface(values: Mapping) -> dict | None:
    """Reads the task's head from a `config.json`; None without a head.

    Returns its "task" and "labels", or all of its settings if `save_huggingface` wrote them; warns
    if the file has become another task's since. Raises ValueError for a head with several labels or
    values per text.
    """
    head, stored = _head_of_architecture(values), values.get(HEAD_KEY)
    if stored is None:
        return head
    # To transformers, an embedding model is an encoder without a head.
    expected = head or {"task": "embedding", "labels": []}
    if isinstance(stored, Mapping) and expected.items() <= stored.items():
        return dict(stored)
    found = f"a head for {head['task']}" if head else "no head"
    warnings.warn(f"config.json has {found}: ignoring another head in {HEAD_KEY}", stacklevel=2)
    return head


def _head_of_architecture(values: Mapping) -> dict | None:
    architectures = values.get("architectures") or ()
    task = next((task for task, head in _TASK_HEADS.items() if head[0] in architectures), None)
    if task is None:
        return None
    names = values.get("id2label", {})
    count = len(names) or values.get("num_labels", 2)
    labels = _TASK_HEADS[task][2] or [names.get(str(i), f"LABEL_{i}") for i in range(count)]
    if task == "classification" and count == 1:
        task = "regression"
    problem = values.get("problem_type")
    if task == "classification" and problem not in (None, "single_label_classification"):
        raise ValueError(
            f"config.json: problem_type {problem!r} with {count} labels is not supported: remove "
            "`architectures` to read the encoder alone"
        )
    return {"task": task, "labels": list(labels)}


def huggingface_name(path: str, head: Mapping | None = None) -> str:
    """Returns transformers' name of a parameter, with `{layer}` where it is stacked."""
    if path in _PARAMETER_NAMES:
        return _PARAMETER_NAMES[path]
    module, leaf = path.rsplit("/", 1)
    name = _TASK_HEADS[head["task"]][1] if module == "head" else _MODULE_NAMES[module]
    return f"{name}.{_LEAF_NAMES[leaf]}"


def _current_name(name: str) -> str:
    """Returns transformers' current name, with the prefix `bert.`, of a tensor in a state dict."""
    for old, new in _OLD_LEAF_NAMES.items():
        name = name.replace(old, new)
    return f"bert.{name}" if name.startswith(("embeddings.", "encoder.", "pooler.")) else name


def params_from_huggingface(
    tensors: Mapping[str, np.ndarray], config: BertConfig, head: Mapping | None = None
) -> tuple[dict, LoadReport]:
    """Converts the state dict of any BERT model, of any float dtype, to a parameter tree.

    Names may lack the prefix `bert.`. Without `head`, a task's head is not read.

    Returns and raises as `read_parameters`; raises ValueError, too, if the decoder is not tied.
    """
    stored_names, copies = {}, []
    for stored in tensors:
        name = _current_name(stored)
        if stored_names.setdefault(name, stored) != stored:
            raise ValueError(f"tensor {name}: found twice, as {stored_names[name]} and {stored}")
    for copy, original in _TIED.items():
        stored = stored_names.pop(copy, None)
        if stored and stored_names.setdefault(original, stored) != stored:
            if not np.array_equal(tensors[stored], tensors[stored_names[original]]):
                raise ValueError(f"tensor {copy}: expected a copy of {original}, values differ")
            copies.append(stored)
    params, report = read_parameters(
        config,
        head,
        stored_names,
        tensors.__getitem__,
        name_of=lambda path: huggingface_name(path, head),
        is_transposed=lambda path: path.endswith("/kernel"),
    )
    return params, report._replace(loaded=(*report.loaded, *copies))


def params_to_huggingface(
    params: Mapping, config: BertConfig, head: Mapping | None = None
) -> dict[str, np.ndarray]:
    """Converts a parameter tree to a float32 state dict; the inverse of `params_from_huggingface`.

    As in transformers, tied tensors are stored once, and a model without heads has no `bert.`.
    """
    tensors = {}
    for path, value in flax.traverse_util.flatten_dict(params, sep="/").items():
        name, value = huggingface_name(path, head), np.asarray(value, np.float32)
        if path in PADDED:
            value = value[: config.vocab_size]
        for layer, tensor in enumerate(value if "{layer}" in name else [value]):
            tensor = tensor.T if path.endswith("/kernel") else tensor
            # safetensors ignores strides.
            tensors[name.format(layer=layer)] = np.ascontiguousarray(tensor)
    if params.keys() == {"bert"}:
        return {name.removeprefix("bert."): value for name, value in tensors.items()}
    return tensors


def load_huggingface(directory: pathlib.Path) -> LoadedModel:
    """Loads a directory that transformers' `save_pretrained` wrote.

    The earliest conversions have a `bert_config.json`. Raises FileNotFoundError if a file is
    missing, ImportError if torch is, and ValueError if a file is damaged, unsupported, or
    inconsistent with others.
    """
    paths = (directory / "config.json", directory / "bert_config.json")
    values = read_json(next((path for path in paths if path.exists()), paths[0]))
    config, head = config_from_huggingface(values), head_from_huggingface(values)
    try:
        params, report = params_from_huggingface(read_tensors(directory), config, head)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error
    return build_loaded_model(directory, config, head, params, read_tokenizer(directory), report)


def save_huggingface(
    directory: pathlib.Path, params: Mapping, settings: Mapping, tokenizer: Tokenizer
) -> None:
    """Writes a new directory that transformers' `from_pretrained` reads.

    Raises OSError if it exists, ValueError if transformers lacks such a vocabulary or head.
    """
    if tokenizer.filename != WORDPIECE_FILENAME:
        raise ValueError(
            f"transformers' BERT supports WordPiece only, and the vocabulary is a SentencePiece "
            f"model ({tokenizer.filename})"
        )
    config, head = BertConfig(**settings["bert"]), settings.get("head")
    values = {
        "model_type": "bert",
        "architectures": [_HEADLESS_CLASSES["mlm" in params, "nsp" in params]],
        **{key: getattr(config, field) for field, key in _CONFIG_KEYS.items()},
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.dropout_rate,
        "pad_token_id": tokenizer.pad_id,
        "dtype": "float32",
    }
    if head:
        values[HEAD_KEY] = dict(head)
    if head and head["labels"]:  # The head of an embedding model has no parameters.
        if head["task"] not in _TASK_HEADS:
            raise ValueError(
                f"transformers has no head for {head['task']}: expected {', '.join(_TASK_HEADS)}"
            )
        architecture, _, fixed_labels = _TASK_HEADS[head["task"]]
        values["architectures"] = [architecture]
        if not fixed_labels:
            values["id2label"] = dict(enumerate(head["labels"]))
            values["label2id"] = {label: index for index, label in enumerate(head["labels"])}
    tokenizer_config = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": tokenizer.lower_case,
        "model_max_length": config.max_position_embeddings,
    }
    tensors = params_to_huggingface(params, config, head)
    directory.mkdir()
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    (directory / WORDPIECE_FILENAME).write_bytes(tokenizer.content)
