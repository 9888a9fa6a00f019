"""Writes a model as transformers and, for retrieval, sentence-transformers read it."""

import json
import pathlib
import warnings
from collections.abc import Mapping

import flax
import numpy as np
import safetensors.numpy
from absl import logging

from bert_jax.checkpoints.huggingface import (
    HEAD_KEY,
    check_pooling,
    head_in_transformers,
    tensor_table,
)
from bert_jax.checkpoints.model_card import model_card
from bert_jax.checkpoints.multi_vector import multi_vector_files, pylate_files
from bert_jax.checkpoints.parameters import parameter_shapes, trained_length
from bert_jax.checkpoints.sentence_transformers import embedding_files, sparse_embedding_files
from bert_jax.checkpoints.tensors import read_tensors, without_prefixes
from bert_jax.checkpoints.transformers_config import format_of
from bert_jax.checkpoints.transformers_names import PRETRAINING_HEADS, check_positions
from bert_jax.data.features import unpack_rows
from bert_jax.model.architecture import config_from_settings
from bert_jax.model.config import BertConfig, pools_last
from bert_jax.model.heads import HEADS, TARGET_SCALE, find_head, make_model
from bert_jax.tokenizers.export import transformers_files
from bert_jax.tokenizers.tokenizer import LibraryTokenizer, Tokenizer, load_tokenizer


def save_huggingface(
    directory: str | pathlib.Path,
    params: Mapping,
    settings: Mapping,
    tokenizer: Tokenizer,
    result: Mapping | None = None,
    for_pylate: bool = False,
) -> None:
    """Writes a new directory that transformers, and for retrieval sentence-transformers, can read.

    Its README.md is a model card, with the name of the directory and, of a `result` as in
    `result.json`, the scores. Leaves out, with a warning, heads that transformers has no class for.
    Of an ELECTRA run it writes the discriminator; `generator_of` is the other model. A multi-vector
    model is written `for_pylate`, or for sentence-transformers, which reads both. Reads back the
    tensors and the vocabulary. Raises OSError if the directory exists or that failed, ValueError if
    transformers does not support its vocabulary or head.
    """
    if not isinstance(tokenizer, LibraryTokenizer):
        raise ValueError("a SentencePiece model cannot be exported: use --to=native")
    config, head = config_from_settings(settings), settings.get("head") or {}
    directory = pathlib.Path(directory)
    if format_of(config) is None:
        raise ValueError(f"transformers has no format for the architecture {config.architecture}")
    params, head = with_target_scale(_without_own_heads(params, config, head), head)
    check_positions(config, tokenizer.pad_id)
    check_pooling(config, head)
    values = _config_json(config, head, params) | {"pad_token_id": tokenizer.pad_id}
    max_length = head.get("max_seq_length") or trained_length(settings)
    max_length = max_length or config.max_position_embeddings
    reads_vocabulary = format_of(config).reads_vocabulary
    files = transformers_files(tokenizer.stored, max_length, reads_vocabulary)
    files["config.json"] = values
    files["README.md"] = model_card(directory.name, params, settings, result or {})
    tensors = params_to_huggingface(params, config, head)
    _check_own_head(params, config, head)
    kind = find_head(head).predicts if head else ""
    if for_pylate and kind != "token_vectors":
        found = f"a head for {head['task']}" if head else "no head"
        fix = f"this one has {found}: use --to=huggingface"
        raise ValueError(f"--to=pylate writes multi-vector models, and {fix}")
    if for_pylate:
        prefixes = _one_token_prompts(head["prompts"], tokenizer)
        files |= pylate_files(config.hidden_size, head, prefixes)
    elif kind == "token_vectors":
        files |= multi_vector_files(config.hidden_size, head)
    elif kind == "sparse_vector":
        files |= sparse_embedding_files(head)
    elif kind == "vector":
        files |= embedding_files(config.hidden_size, head)
    directory.mkdir()
    if kind in ("vector", "token_vectors"):
        for index, path in enumerate(path for path in files if "_Dense/" in path):
            prefix = f"projection_{index}."
            names = [name for name in tensors if name.startswith(prefix)]
            dense = {f"linear.{name.removeprefix(prefix)}": tensors.pop(name) for name in names}
            folder = (directory / path).parent
            folder.mkdir()
            _save_tensors(dense, folder)
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
        (directory / name).write_text(text, encoding="utf-8")
    _save_tensors(tensors, directory)
    _check_vocabulary(directory, tokenizer)


def _one_token_prompts(prompts: Mapping[str, str], tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the prompts of queries and passages that are one token, as the vocabulary has it.

    It must be one whatever follows: an added token. Warns of other prompts.
    """
    found = {}
    for name in ("query", "document"):
        ids = tokenizer.encode(prompts[name])
        token = tokenizer.id_to_token(ids[0]) if len(ids) == 1 else ""
        same = (tokenizer.encode(f"{start}a") for start in (token, prompts[name]))
        if token and all(each == ids + tokenizer.encode("a") for each in same):
            found[name] = token
        elif prompts[name]:
            fix = f"there, pass prompt_name={name!r} to encode"
            logging.warning("PyLate does not write %r before each text: %s", prompts[name], fix)
    return found


def _without_own_heads(params: Mapping, config: BertConfig, head: Mapping) -> dict:
    """Returns the parameters of the encoder, of its heads for tokens and pairs, and of the task."""
    named = format_of(config).names
    known = {path.partition("/")[0] for path in parameter_shapes(config, head)}
    for name in PRETRAINING_HEADS:
        if not any(f"{path}/".startswith(f"{name}/") for path in named):
            known.discard(name)
    if own := sorted(params.keys() - known - {"generator"}):
        reason = "used in pre-training only, and transformers has no such head"
        logging.warning("not exported: %s; %s", ", ".join(own), reason)
    return {name: module for name, module in params.items() if name in known}


def _without_other_poolers(params: Mapping, config, head: Mapping | None) -> Mapping:
    """Returns the parameters of the class that is exported, if its pooler is a part of its head.

    Then the class for a task has no head for tokens, the one for tokens no pooler, and that of the
    encoder alone neither.
    """
    stored = format_of(config)
    pooler = stored.names.get("encoder/pooler/dense", stored.prefix)
    if pooler.startswith(stored.prefix):
        return params
    if head and head["labels"]:
        return {name: module for name, module in params.items() if name not in PRETRAINING_HEADS}
    encoder = {name: module for name, module in params["encoder"].items() if name != "pooler"}
    return {**params, "encoder": encoder}


def with_target_scale(params: Mapping, head: Mapping) -> tuple[Mapping, dict]:
    """Folds the target scale of a regression into its last dense layer.

    transformers has no such scale. Returns the parameters, and the settings of the head without it.
    """
    if "target_std" not in head:
        return params, dict(head)
    kernel, bias = (np.asarray(params["head"][name], np.float64) for name in ("kernel", "bias"))
    scaled = {
        "kernel": (kernel * head["target_std"]).astype(np.float32),
        "bias": (bias * head["target_std"] + head["target_mean"]).astype(np.float32),
    }
    rest = {name: value for name, value in head.items() if name not in TARGET_SCALE}
    return {**params, "head": scaled}, rest


def _check_own_head(params: Mapping, config: BertConfig, head: Mapping) -> None:
    """Raises ValueError if a head elsewhere computes something else than its class in transformers.

    It may have the same parameters, and yet another module; the two are compared on one text.
    """
    if not head or head["task"] in HEADS:
        return
    tokens = np.arange(8, dtype=np.int32)[None] % config.vocab_size
    rows = {"tokens": tokens, "sequence_bounds": np.array([[[0, 8, 8]]], np.int32)}
    batch = rows | unpack_rows(rows, pools_last(config))
    outputs, expected = (
        make_model(config, {**head, "task": name}).apply({"params": params}, batch)
        for name in (head["task"], head_in_transformers(head))
    )
    if not np.allclose(outputs, expected, rtol=1e-4, atol=1e-4):
        raise ValueError(
            f"the head {head['task']} computes other outputs than its class in transformers from "
            "the same parameters: give its HEAD transformers=None"
        )


def _save_tensors(tensors: dict[str, np.ndarray], directory: pathlib.Path) -> None:
    """Writes model.safetensors, which others may read as they may any new file.

    `save_file` writes a temporary file for its owner alone, and renames it.
    """
    path = directory / "model.safetensors"
    path.touch()
    mode = path.stat().st_mode
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})
    path.chmod(mode)
    stored = read_tensors(directory)  # Read back one at a time: what is complete can be read.
    tensors = {without_prefixes(name): tensor for name, tensor in tensors.items()}
    for name in tensors.keys() | stored.keys():
        same = name in tensors and name in stored and stored[name].shape == tensors[name].shape
        if not same or stored[name].tobytes() != tensors[name].tobytes():
            raise OSError(f"{path} was not written completely: tensor {name} is read as another")


def _check_vocabulary(directory: pathlib.Path, tokenizer: Tokenizer) -> None:
    """Raises OSError unless each id of the tokenizer that was written is read as the same token."""
    with warnings.catch_warnings(action="ignore"):  # Reading the tokenizer has already warned.
        written = load_tokenizer(directory)
    tokens, others = (
        [each.id_to_token(index) for index in range(each.vocab_size)]
        for each in (tokenizer, written)
    )
    if tokens != others:
        raise OSError(f"{directory}: the tokenizer was not written completely: its ids are others")


def _config_json(config, head: Mapping, params: Mapping) -> dict:
    """Returns the contents of `config.json`. Raises ValueError for what transformers lacks."""
    stored = format_of(config)
    modules = tuple(name for name in PRETRAINING_HEADS if name in params)
    values = stored.config_to_json(config)
    name = values["model_type"]
    if modules in stored.headless:
        values["architectures"] = [stored.headless[modules]]
    elif not head or find_head(head).pretrained_modules:
        raise ValueError(f"transformers' {name} has no class with the heads {', '.join(modules)}")
    if config.causal and not stored.causal_class:
        raise ValueError(f"transformers' {name} has no class that reads left to right")
    if config.causal and "mlm" in params:
        values["architectures"] = [stored.causal_class]
    if not head and (kind := getattr(config, "global_tokens", "none")) != "none":
        logging.warning(
            "not exported: global_tokens=%s; in transformers, pass a global_attention_mask", kind
        )
    if head:
        values[HEAD_KEY] = dict(head)
    if head and head["labels"]:  # The head of an embedding model has no parameters.
        form = find_head(head).transformers
        if not form:
            lstm = " with a BiLSTM" * ("lstm" in params)
            own = ": its HEAD has transformers=None" * (head["task"] not in HEADS)
            raise ValueError(f"transformers has no head for {head['task']}{lstm}{own}")
        if form.class_suffix not in stored.heads:
            raise ValueError(f"transformers' {name} has no head for {head['task']}")
        values["architectures"] = [stored.class_of(form.class_suffix)]
        if not form.labels:
            values["id2label"] = dict(enumerate(head["labels"]))
            values["label2id"] = {label: index for index, label in enumerate(head["labels"])}
        if form.problem_type:
            values["problem_type"] = form.problem_type
        if form.problem_type == "regression":  # CrossEncoder defaults to a sigmoid.
            values["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
    return values


def params_to_huggingface(
    params: Mapping, config: BertConfig, head: Mapping | None = None
) -> dict[str, np.ndarray]:
    """Converts a parameter tree to a float32 state dict; the inverse of `params_from_huggingface`.

    As in transformers, tied tensors are stored once, and a model without heads has no `bert.`.
    """
    tensors, stored = {}, format_of(config)
    params, table = _without_other_poolers(params, config, head), tensor_table(config, head)
    for path, value in flax.traverse_util.flatten_dict(params, sep="/").items():
        if path not in table:
            raise ValueError(f"transformers' {stored.class_prefix} has no tensor for {path}")
        value = np.asarray(value, np.float32)[: table[path].num_rows]
        names = table[path].names()
        for name, own in zip(names, value if table[path].is_stacked else [value], strict=True):
            own = table[path].stored(own)
            index, count = table[path].part
            tensor = tensors.setdefault(
                name, np.empty((count * len(own), *own.shape[1:]), np.float32)
            )
            tensor[index * len(own) : (index + 1) * len(own)] = own
    if not params.keys() & {*PRETRAINING_HEADS, "head"}:
        return {name.removeprefix(stored.prefix): value for name, value in tensors.items()}
    return tensors
