"""Converts BERT from the format of Hugging Face's transformers library.

Does not need transformers, and needs torch only for the old `pytorch_model.bin`.
"""

import math
import pathlib
import warnings
from collections.abc import Mapping

import numpy as np

from bert_jax.checkpoints import parameters
from bert_jax.checkpoints.sentence_transformers import MODULES_FILENAME, read_modules
from bert_jax.checkpoints.tensors import read_tensors
from bert_jax.model.config import BertConfig
from bert_jax.model.heads import HEADS
from bert_jax.tokenization import load_tokenizer
from bert_jax.transformers_tokenizer import read_json

HEAD_KEY = "bert_jax_head"
"""Key of `config.json` that holds the settings of a task's head. transformers preserves it."""

# Paths of parameters or of their modules -> names in transformers, without ".weight" or ".bias".
# `{layer}` stands for one tensor per layer.
_LAYER = "bert.encoder.layer.{layer}"
_NAMES = {
    "encoder/embeddings/token_embedding": "bert.embeddings.word_embeddings",
    "encoder/embeddings/position_embedding": "bert.embeddings.position_embeddings",
    "encoder/embeddings/segment_embedding": "bert.embeddings.token_type_embeddings",
    "encoder/embeddings/layer_norm": "bert.embeddings.LayerNorm",
    "encoder/layers/query": f"{_LAYER}.attention.self.query",
    "encoder/layers/key": f"{_LAYER}.attention.self.key",
    "encoder/layers/value": f"{_LAYER}.attention.self.value",
    "encoder/layers/attention_output": f"{_LAYER}.attention.output.dense",
    "encoder/layers/attention_layer_norm": f"{_LAYER}.attention.output.LayerNorm",
    "encoder/layers/intermediate": f"{_LAYER}.intermediate.dense",
    "encoder/layers/output": f"{_LAYER}.output.dense",
    "encoder/layers/output_layer_norm": f"{_LAYER}.output.LayerNorm",
    "encoder/pooler/dense": "bert.pooler.dense",
    "mlm": "cls.predictions",
    "mlm/transform": "cls.predictions.transform.dense",
    "mlm/layer_norm": "cls.predictions.transform.LayerNorm",
    "nsp/dense": "cls.seq_relationship",
}

# Parameters whose first axis is the vocabulary, which we pad to whole tiles.
_PADDED = ("encoder/embeddings/token_embedding/embedding", "mlm/bias")

_CLASSIFIER = "BertForSequenceClassification"
# Task -> transformers' class, the name of its head, the head's labels where they are fixed, and the
# `problem_type`, which selects the loss of the class and the function that a pipeline applies.
TASK_HEADS = {
    "classification": (_CLASSIFIER, "classifier", None, "single_label_classification"),
    "multi_label": (_CLASSIFIER, "classifier", None, "multi_label_classification"),
    "regression": (_CLASSIFIER, "classifier", None, "regression"),
    "tagging": ("BertForTokenClassification", "classifier", None, None),
    "span": ("BertForQuestionAnswering", "qa_outputs", ("start", "end"), None),
    "multiple_choice": ("BertForMultipleChoice", "classifier", ("score",), None),
}
# Fields of BertConfig -> keys of Hugging Face's and Google's configurations.
CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "initializer_range": "initializer_range",
    "layer_norm_epsilon": "layer_norm_eps",
    "dropout_rate": "hidden_dropout_prob",
    "causal": "is_decoder",
}

# Tied tensors may be stored in addition to the original, or instead of it.
_TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


def config_from_huggingface(values: Mapping) -> BertConfig:
    """Reads the architecture from a `config.json`. Raises ValueError if it is not supported."""
    # The defaults are BERT_BASE in all three libraries.
    values = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, **values}
    required = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "add_cross_attention": False,
        "quantization_config": None,
        "pruned_heads": {},
    }
    for name, expected in required.items():
        if values.get(name, expected) != expected:
            raise ValueError(f"config.json: {name} is {values[name]!r}, expected {expected!r}")
    fields = {field: values[key] for field, key in CONFIG_KEYS.items() if key in values}
    if values["attention_probs_dropout_prob"] != values["hidden_dropout_prob"]:
        fields["attention_dropout_rate"] = values["attention_probs_dropout_prob"]
    try:
        return BertConfig(**fields)
    except TypeError as error:
        raise ValueError(f"config.json: a value has the wrong type: {error}") from error


def head_from_huggingface(values: Mapping) -> dict | None:
    """Reads the task's head from a `config.json`; None without a head.

    Returns its "task" and "labels", or all settings that `save_huggingface` wrote, unless the file
    now describes another head (with a warning). Raises ValueError for a `problem_type` that is not
    supported with this number of labels.
    """
    names, stored = values.get("id2label", {}), values.get(HEAD_KEY)
    count = len(names) or values.get("num_labels", 2)
    labels = [names.get(str(i), f"LABEL_{i}") for i in range(count)]
    architectures = values.get("architectures") or ()
    default = "regression" if count == 1 else "single_label_classification"  # In transformers.
    problem, head = values.get("problem_type") or default, None
    if _CLASSIFIER in architectures and problem not in (default, "multi_label_classification"):
        reason = f"problem_type {problem!r} with {count} labels is not supported"
        raise ValueError(f"config.json: {reason}: remove `architectures` to read the encoder alone")
    for task, (architecture, _, fixed_labels, problem_type) in TASK_HEADS.items():
        if architecture in architectures and problem_type in (None, problem):
            head = {"task": task, "labels": list(fixed_labels or labels)}
    # To transformers, an embedding model is an encoder without a head.
    expected = head or {"task": "embedding", "labels": []}
    if isinstance(stored, Mapping):
        seen = stored | {"task": task_in_transformers(stored)}
        if expected.items() <= seen.items():
            return dict(stored)
    if stored is not None:
        current = f"a head for {head['task']}" if head else "no head"
        warnings.warn(f"config.json has {current}: ignoring another in {HEAD_KEY}", stacklevel=2)
    return head


def task_in_transformers(head: Mapping) -> str | None:
    """Returns the task of a head in transformers: a cross-encoder is a regression on pairs."""
    is_cross_encoder = head.get("task") == "multiple_choice" and "max_query_length" in head
    return "regression" if is_cross_encoder else head.get("task")


def huggingface_name(path: str, head: Mapping | None = None) -> str:
    """Returns transformers' name of a parameter, with `{layer}` where it is stacked."""
    module, leaf = path.rsplit("/", 1)
    if module.startswith("projection_"):  # In a file of its own in sentence-transformers.
        name = module
    elif module == "head":
        name = TASK_HEADS[head["task"]][1]
    else:
        name = _NAMES[path if path in _NAMES else module]
    return f"{name}.{'bias' if leaf == 'bias' else 'weight'}"


def tensor_table(
    config: BertConfig, head: Mapping | None = None
) -> dict[str, parameters.StoredTensor]:
    """Returns how transformers stores each parameter, by its path."""
    return {
        path: parameters.StoredTensor(
            name=huggingface_name(path, head),
            is_transposed=path.endswith("/kernel"),
            num_rows=config.vocab_size if path in _PADDED else None,
        )
        for path in parameters.parameter_shapes(config, head)
    }


def params_from_huggingface(
    tensors: Mapping[str, np.ndarray], config: BertConfig, head: Mapping | None = None
) -> tuple[dict, parameters.LoadReport]:
    """Converts the state dict of any BERT model to a parameter tree, with a task's `head` if given.

    Returns and raises as `read_parameters`; also raises ValueError if the decoder is not tied.
    """
    stored_names = {}
    for stored in tensors:
        name = stored.replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        if name.startswith(("embeddings.", "encoder.", "pooler.")):
            name = f"bert.{name}"
        if stored_names.setdefault(name, stored) != stored:
            raise ValueError(f"tensor {name}: found twice, as {stored_names[name]} and {stored}")
    for copy, original in _TIED.items():
        stored = stored_names.pop(copy, None)
        if stored and not np.array_equal(
            tensors[stored], tensors[stored_names.setdefault(original, stored)]
        ):
            raise ValueError(f"tensor {copy}: expected a copy of {original}, values differ")
    params, report = parameters.read_parameters(
        config,
        head,
        stored_names,
        tensors.__getitem__,
        tensor_table(config, head),
    )
    # Copies of tied tensors count as loaded.
    loaded = tuple(name for name in tensors if name not in report.unused)
    return params, report._replace(loaded=loaded)


def load_huggingface(directory: pathlib.Path) -> parameters.LoadedModel:
    """Loads a directory that transformers or sentence-transformers wrote.

    Raises FileNotFoundError if a file is missing, ImportError if torch is, and ValueError if a file
    is damaged, unsupported, or inconsistent with another.
    """
    encoder, modules = directory, None
    if (directory / MODULES_FILENAME).exists():
        modules = read_modules(directory)
        encoder = modules.encoder
    path, legacy_path = encoder / "config.json", encoder / "bert_config.json"
    values = read_json(legacy_path if legacy_path.exists() and not path.exists() else path)
    config, head = config_from_huggingface(values), head_from_huggingface(values)
    if modules and modules.head:
        limit = min(modules.head.get("max_seq_length", math.inf), config.max_position_embeddings)
        # The files that sentence-transformers reads count more than what we wrote beside them.
        head = (head or {}) | modules.head | {"max_seq_length": limit}
    check_pooling(config, head)
    try:
        tensors = read_tensors(encoder) | (modules.tensors if modules else {})
        params, report = params_from_huggingface(tensors, config, head)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error
    tokenizer = load_tokenizer(encoder)
    if modules and modules.lower_cases and not tokenizer.lower_case:
        fix = "set it in tokenizer_config.json instead"
        raise ValueError(f"{directory}: do_lower_case of a cased tokenizer is not supported: {fix}")
    return parameters.build_loaded_model(directory, config, head, params, tokenizer, report)


def check_pooling(config: BertConfig, head: Mapping | None) -> None:
    """Raises ValueError for a pooled head on a causal model, where we pool the last token."""
    if config.causal and head and HEADS[head["task"]].input_kind == "pooled":
        reason = "transformers pools [CLS], which sees no other token in a left-to-right model"
        raise ValueError(f"a head for {head['task']} cannot be converted: {reason}")
