"""BERT as the transformers library stores it: configuration and weights.

Nothing of that library is needed, nor torch but for the old `pytorch_model.bin`: a state dict is a
mapping of names to numpy arrays, as `safetensors.numpy.load_file` reads it.
"""

import json
import pathlib
import warnings
from collections.abc import Mapping

import flax
import numpy as np
import safetensors.numpy

from bert_jax.interop.parameters import (
    PADDED,
    LoadedModel,
    LoadReport,
    loaded_model,
    read_json,
    read_parameters,
)
from bert_jax.model.config import BertConfig
from bert_jax.tokenization import (
    WORDPIECE_FILENAME,
    Tokenizer,
    load_tokenizer,
    tokenizer_from_bytes,
)

WEIGHTS_FILENAMES = ("model.safetensors", "pytorch_model.bin")

HEAD_KEY = "bert_jax_head"
"""Where `config.json` has what transformers knows nothing of: all that settings say of the head.
transformers keeps it, as it does every key that it does not know."""

# Paths in this project's parameter tree, and what transformers calls the same. A name with
# `{layer}` is one tensor a layer there, and one slice of axis 0 here.
_LAYER = "bert.encoder.layer.{layer}"
_PARAMETERS = {
    "bert/embeddings/token_embedding": "bert.embeddings.word_embeddings.weight",
    "bert/embeddings/position_embedding": "bert.embeddings.position_embeddings.weight",
    "bert/embeddings/segment_embedding": "bert.embeddings.token_type_embeddings.weight",
    "mlm/bias": "cls.predictions.bias",
}
_MODULES = {
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
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}

# The head of a task: transformers' class, its module, and the labels that are always the same.
_TASKS = {
    "classification": ("BertForSequenceClassification", "classifier", None),
    "regression": ("BertForSequenceClassification", "classifier", None),  # If of one label.
    "tagging": ("BertForTokenClassification", "classifier", None),
    "span": ("BertForQuestionAnswering", "qa_outputs", ("start", "end")),
    "multiple_choice": ("BertForMultipleChoice", "classifier", ("score",)),
}
# The class of a model without such a head, by which of "mlm" and "nsp" it has.
_PLAIN = {
    (True, True): "BertForPreTraining",
    (True, False): "BertForMaskedLM",
    (False, True): "BertForNextSentencePrediction",
    (False, False): "BertModel",
}

# Fields of BertConfig, and what both other libraries call the same.
_CONFIG = {
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

# Stored beside the tensor that they are tied to, or instead of it.
_COPIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_OLD_LEAVES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def config_from_huggingface(values: Mapping) -> BertConfig:
    """The architecture in a `config.json`; raises ValueError for one that this model is not."""
    required = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
    }
    for name, expected in required.items():
        if values.get(name, expected) != expected:
            raise ValueError(
                f"config.json: {name} is {values[name]!r}, and only {expected!r} is supported"
            )
    rates = {values.get(f"{part}_dropout_prob", 0.1) for part in ("hidden", "attention_probs")}
    if len(rates) > 1:
        raise ValueError(
            f"config.json: hidden_dropout_prob and attention_probs_dropout_prob differ "
            f"({sorted(rates)}), and there is one dropout_rate here: set both to the same value"
        )
    # Both libraries' defaults are BERT_BASE, so what is not given is the same in both.
    given = {ours: values[theirs] for ours, theirs in _CONFIG.items() if theirs in values}
    try:
        return BertConfig(**given, dropout_rate=rates.pop())
    except TypeError as error:  # Text for a number, say.
        raise ValueError(f"config.json: a value of another type than BERT's: {error}") from error


def params_from_huggingface(
    tensors: Mapping[str, np.ndarray], config: BertConfig, head: Mapping | None = None
) -> tuple[dict, LoadReport]:
    """The parameter tree out of a state dict.

    Args:
      tensors: of BertModel, BertForPreTraining, or a model between, or of one for a task; names
        with or without the prefix `bert.`, any float dtype.
      config: see `config_from_huggingface`.
      head: see `head_from_huggingface`; None: a task's head is not read.

    Returns:
      As `read_parameters`.

    Raises:
      ValueError: a tensor is missing or of another shape, or the decoder is not tied.
    """
    given = _names_as_given(tensors)
    for copy, original in _COPIES.items():
        if copy in given and not np.array_equal(tensors[given[copy]], tensors[given[original]]):
            raise ValueError(f"tensor {copy}: expected a copy of {original}, found other values")
    params, report = read_parameters(
        config,
        head,
        given,
        tensors.__getitem__,
        name_of=lambda path: huggingface_name(path, head),
        transposed=lambda path: path.endswith("/kernel"),
    )
    copies = {given.get(copy) for copy in _COPIES}
    return params, LoadReport(
        loaded=report.loaded + tuple(name for name in report.unused if name in copies),
        missing=report.missing,
        unused=tuple(name for name in report.unused if name not in copies),
    )


def params_to_huggingface(
    params: Mapping, config: BertConfig, head: Mapping | None = None
) -> dict[str, np.ndarray]:
    """The state dict in float32 that `params_from_huggingface` reads as `params`.

    Tied tensors are written once, and no prefix `bert.` without a head, as transformers does.
    """
    tensors = {}
    for path, value in flax.traverse_util.flatten_dict(params, sep="/").items():
        name, value = huggingface_name(path, head), np.asarray(value, np.float32)
        if path in PADDED:
            value = value[: config.vocab_size]
        for layer, piece in enumerate(value if "{layer}" in name else [value]):
            piece = piece.T if path.endswith("/kernel") else piece
            # safetensors writes memory as it lies.
            tensors[name.format(layer=layer)] = np.ascontiguousarray(piece)
    if params.keys() == {"bert"}:
        return {name.removeprefix("bert."): value for name, value in tensors.items()}
    return tensors


def load_huggingface(directory: pathlib.Path) -> LoadedModel:
    """Config, weights and vocabulary of a directory that transformers' `save_pretrained` wrote.

    The configuration is `config.json`, or as in the first conversions `bert_config.json`, weights
    are `model.safetensors` or `pytorch_model.bin` (which needs torch), the vocabulary `vocab.txt`
    or `tokenizer.json`.

    Raises:
      FileNotFoundError: a file is missing.
      ImportError: torch is needed.
      ValueError: a file is damaged, is of another architecture, or does not fit the others.
    """
    names = ("config.json", "bert_config.json")
    path = next((directory / name for name in names if (directory / name).exists()), None)
    values = read_json(path or directory / names[0])
    config, head = config_from_huggingface(values), head_from_huggingface(values)
    try:
        params, report = params_from_huggingface(_read_tensors(directory), config, head)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error
    return loaded_model(directory, config, head, params, _read_tokenizer(directory), report)


def save_huggingface(
    directory: pathlib.Path, params: Mapping, settings: Mapping, tokenizer: Tokenizer
) -> None:
    """Writes a new directory that transformers' `from_pretrained` takes.

    Raises:
      OSError: it cannot be written, or exists.
      ValueError: the vocabulary is a SentencePiece model, or the head is not one of theirs.
    """
    if tokenizer.filename != WORDPIECE_FILENAME:
        raise ValueError(
            f"the vocabulary is a SentencePiece model ({tokenizer.filename}), and transformers' "
            "BERT takes WordPiece only: a model of this vocabulary stays in the native format"
        )
    config, described = BertConfig(**settings["bert"]), settings.get("head")
    head = described if described and described["labels"] else None  # A bi-encoder has no tensors.
    if head and head["task"] not in _TASKS:
        raise ValueError(
            f"transformers has no model with a head for {head['task']}: expected one for "
            f"{', '.join(_TASKS)}"
        )
    tensors = params_to_huggingface(params, config, head)
    values = {
        "model_type": "bert",
        "architectures": [
            _TASKS[head["task"]][0] if head else _PLAIN["mlm" in params, "nsp" in params]
        ],
        **{theirs: getattr(config, ours) for ours, theirs in _CONFIG.items()},
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.dropout_rate,
        "pad_token_id": tokenizer.pad_id,
        "dtype": "float32",
    }
    if head and not _TASKS[head["task"]][2]:
        values["id2label"] = dict(enumerate(head["labels"]))
        values["label2id"] = {label: index for index, label in enumerate(head["labels"])}
    if described:
        values[HEAD_KEY] = dict(described)
    of_tokenizer = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": tokenizer.lower_case,
        "model_max_length": config.max_position_embeddings,
    }
    directory.mkdir()
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    (directory / "tokenizer_config.json").write_text(json.dumps(of_tokenizer, indent=2) + "\n")
    (directory / WORDPIECE_FILENAME).write_bytes(tokenizer.content)


def head_from_huggingface(values: Mapping) -> dict | None:
    """The task's head in a `config.json`: its "task" and "labels"; None without one.

    Tasks are "classification" (of one label: "regression"), "tagging", "span" and
    "multiple_choice". Of a head that `save_huggingface` wrote, a bi-encoder's too, it is all that
    the settings said, unless the file has become another task's since, of which it warns.
    Raises ValueError for one of several labels, or several values, a text.
    """
    head, ours = _their_head(values), values.get(HEAD_KEY)
    if ours is None:
        return head
    # A bi-encoder is a plain encoder to transformers.
    expected = head or {"task": "embedding", "labels": []}
    if isinstance(ours, Mapping) and expected.items() <= ours.items():
        return dict(ours)
    there = f"the head for {head['task']} that is there" if head else "an encoder without a head"
    warnings.warn(
        f"config.json: {HEAD_KEY} is left out, for it is not of {there}: remove it", stacklevel=2
    )
    return head


def _their_head(values: Mapping) -> dict | None:
    """By transformers' own keys."""
    for task, (architecture, _, labels) in _TASKS.items():
        if architecture in (values.get("architectures") or ()):
            names = values.get("id2label", {})
            count = len(names) or values.get("num_labels", 2)
            labels = labels or [names.get(str(index), f"LABEL_{index}") for index in range(count)]
            if task == "classification" and count == 1:
                task = "regression"
            problem = values.get("problem_type")
            if task == "classification" and problem not in (None, "single_label_classification"):
                raise ValueError(
                    f"config.json: problem_type is {problem!r} with {count} labels, and only one "
                    "label or one value a text is supported: remove `architectures` to read the "
                    "encoder alone"
                )
            return {"task": task, "labels": list(labels)}
    return None


def _read_tensors(directory: pathlib.Path) -> dict[str, np.ndarray]:
    path, pickled = (directory / name for name in WEIGHTS_FILENAMES)
    if path.exists():
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                return {name: _read_tensor(file, name) for name in file.keys()}  # noqa: SIM118
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path.name} is not intact: {error}") from error
    if not pickled.exists():
        raise FileNotFoundError(f"{directory} has neither {path.name} nor {pickled.name}")
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"{pickled} can be read by torch only: pip install torch, or put a {path.name} there"
        ) from error
    try:
        tensors = torch.load(pickled, map_location="cpu", weights_only=True)
    except Exception as error:  # Of pickle, zipfile, torch: all mean the same.
        raise ValueError(f"{pickled.name} is not an intact state dict: {error}") from error
    # numpy has no bfloat16 for torch to give.
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}


def _read_tensor(file: safetensors.safe_open, name: str) -> np.ndarray:
    """Of any dtype that numpy knows, and of bfloat16, which JAX adds to those."""
    try:
        return file.get_tensor(name)
    except (AttributeError, TypeError, safetensors.SafetensorError) as error:
        dtype = file.get_slice(name).get_dtype()
        raise ValueError(
            f"tensor {name}: its dtype {dtype} cannot be read: expected F32, F16 or BF16; convert "
            "it, as with torch"
        ) from error


def _read_tokenizer(directory: pathlib.Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    names = said = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
    if (directory / WORDPIECE_FILENAME).exists():
        tokenizer = load_tokenizer(directory / WORDPIECE_FILENAME)
        path = directory / "tokenizer_config.json"
        settings = read_json(path) if path.exists() else {}
    elif path.exists():
        values = read_json(path)
        model = values.get("model", {})
        if model.get("type") != "WordPiece":
            raise ValueError(
                f"{path}: model.type is {model.get('type')!r}, and only 'WordPiece' is supported"
            )
        ids = model["vocab"] | {
            token["content"]: token["id"] for token in values.get("added_tokens", ())
        }
        pieces = sorted(ids, key=ids.get)
        if [ids[piece] for piece in pieces] != list(range(len(pieces))):
            raise ValueError(f"{path}: expected each id from 0 to {len(pieces) - 1:,} once")
        content = "".join(f"{piece}\n" for piece in pieces).encode()
        tokenizer = tokenizer_from_bytes(WORDPIECE_FILENAME, content)
        settings = values.get("normalizer") or {}
        said = ("lowercase", "strip_accents", "handle_chinese_chars")
    else:
        raise FileNotFoundError(f"{directory} has neither {WORDPIECE_FILENAME} nor {path.name}")
    lower_case = tokenizer.lower_case
    others = [
        f"{name}={settings[each]}"
        for name, each, ours in zip(names, said, (lower_case, lower_case, True), strict=True)
        if settings.get(each) not in (None, ours)
    ]
    if others:
        warnings.warn(
            f"{directory}: its settings say {', '.join(others)}, but text will be "
            f"{'lower-cased, without accents' if lower_case else 'left as it is'}, since the "
            f"vocabulary has {'no' if lower_case else 'some'} piece with an upper-case letter, and "
            "a Chinese character is a word",
            stacklevel=2,
        )
    return tokenizer


def _names_as_given(tensors: Mapping[str, np.ndarray]) -> dict[str, str]:
    """transformers' name of today, with the prefix `bert.` -> the name in this state dict."""
    given = {}
    for name in tensors:
        current = name
        if name.startswith(("embeddings.", "encoder.", "pooler.")):
            current = f"bert.{name}"
        for old, new in _OLD_LEAVES.items():
            current = current.replace(old, new)
        if current in given:
            raise ValueError(f"tensor {current}: found twice, as {given[current]} and as {name}")
        given[current] = name
    for copy, original in _COPIES.items():
        if copy in given:
            given.setdefault(original, given[copy])
    return given


def huggingface_name(path: str, head: Mapping | None = None) -> str:
    """A path in the parameter tree -> transformers' name, with `{layer}` where it is stacked."""
    if path in _PARAMETERS:
        return _PARAMETERS[path]
    module, leaf = path.rsplit("/", 1)
    if module == "head":
        return f"{_TASKS[head['task']][1]}.{_LEAVES[leaf]}"
    return f"{_MODULES[module]}.{_LEAVES[leaf]}"
