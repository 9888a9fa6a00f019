"""Reads BERT as Google released it: bert_config.json, vocab.txt and a TensorFlow 1 checkpoint."""

import pathlib

from bert_jax.checkpoints import huggingface
from bert_jax.checkpoints.parameters import (
    LoadedModel,
    StoredTensor,
    build_loaded_model,
    read_parameters,
)
from bert_jax.model.config import BertConfig
from bert_jax.tokenization import load_tokenizer
from bert_jax.transformers_tokenizer import read_json

# transformers kept Google's names except for these, replaced in this order.
_REPLACEMENTS = (
    ("layer.{layer}", "layer_{layer}"),
    ("embeddings.weight", "embeddings"),
    ("LayerNorm.weight", "LayerNorm.gamma"),
    ("LayerNorm.bias", "LayerNorm.beta"),
    ("predictions.bias", "predictions.output_bias"),
    ("seq_relationship.weight", "seq_relationship.output_weights"),
    ("seq_relationship.bias", "seq_relationship.output_bias"),
    (".weight", ".kernel"),
    (".", "/"),
)


def tensor_table(config: BertConfig) -> dict[str, StoredTensor]:
    """Returns how Google's checkpoints store each parameter, by its path."""
    return {
        path: tensor._replace(
            name=google_name(tensor.name), is_transposed=path == "nsp/dense/kernel"
        )
        for path, tensor in huggingface.tensor_table(config).items()
    }


def google_name(name: str) -> str:
    """Returns Google's name of a tensor of transformers."""
    for old, new in _REPLACEMENTS:
        name = name.replace(old, new)
    return name


def load_google(directory: pathlib.Path) -> LoadedModel:
    """Loads a directory as Google released it, with TensorFlow. Raises like `load_huggingface`."""
    # transformers kept Google's keys; the keys that it added have defaults.
    config = huggingface.config_from_huggingface(read_json(directory / "bert_config.json"))
    tokenizer = load_tokenizer(directory / "vocab.txt")
    indices = sorted(directory.glob("*.ckpt*.index"))
    if not indices:
        raise FileNotFoundError(f"no such file: {directory / 'bert_model.ckpt.index'}")
    if len(indices) > 1:
        names = ", ".join(path.name for path in indices)
        raise ValueError(f"{directory}: expected one checkpoint, found {names}: remove the others")
    checkpoint = indices[0].with_suffix("")
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ImportError(f"{checkpoint} needs TensorFlow: pip install tensorflow-cpu") from error
    try:
        reader = tf.train.load_checkpoint(str(checkpoint))
        params, report = read_parameters(
            config,
            None,
            {name: name for name in sorted(reader.get_variable_to_shape_map())},
            reader.get_tensor,
            tensor_table(config),
        )
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        raise ValueError(f"{checkpoint}: {error}") from error
    return build_loaded_model(directory, config, None, params, tokenizer, report)
