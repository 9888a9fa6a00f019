"""Reads BERT, ALBERT and ELECTRA as Google released them: TensorFlow 1 checkpoints.

An archive has the checkpoint, a vocabulary (vocab.txt, or ALBERT's 30k-clean.model), and
bert_config.json or albert_config.json. ELECTRA's archives have no configuration: the config.json of
the same model for transformers says its sizes, and which of its two networks is meant.
"""

import pathlib
from collections.abc import Mapping

from bert_jax.checkpoints import huggingface
from bert_jax.checkpoints.parameters import (
    LoadedModel,
    StoredTensor,
    build_loaded_model,
    read_parameters,
)
from bert_jax.model.config import BertConfig
from bert_jax.runtime.model_files import read_json
from bert_jax.tokenizers.huggingface import GOOGLE_ALBERT_FILENAME
from bert_jax.tokenizers.tokenizer import load_tokenizer

CONFIG_FAMILIES = {"bert_config.json": "bert", GOOGLE_ALBERT_FILENAME: "albert"}
"""Files of configuration in Google's archives -> the family that they are of."""
GENERATOR_ARCHITECTURE = "ElectraForMaskedLM"
"""With it among the `architectures` of config.json, ELECTRA's generator is read."""

_BERT_LAYER = {
    "query": "attention/self/query",
    "key": "attention/self/key",
    "value": "attention/self/value",
    "attention_output": "attention/output/dense",
    "attention_layer_norm": "attention/output/LayerNorm",
    "intermediate": "intermediate/dense",
    "output": "output/dense",
    "output_layer_norm": "output/LayerNorm",
}
_ALBERT_LAYER = {
    "query": "attention_1/self/query",
    "key": "attention_1/self/key",
    "value": "attention_1/self/value",
    "attention_output": "attention_1/output/dense",
    "attention_layer_norm": "LayerNorm",
    "intermediate": "ffn_1/intermediate/dense",
    "output": "ffn_1/intermediate/output/dense",
    "output_layer_norm": "LayerNorm_1",
}
_HEADS = {
    "encoder/pooler/dense": "bert/pooler/dense",
    "mlm": "cls/predictions",
    "mlm/transform": "cls/predictions/transform/dense",
    "mlm/layer_norm": "cls/predictions/transform/LayerNorm",
    "nsp/dense": "cls/seq_relationship",
}


def _names(
    embeddings: str, layer: str, parts: Mapping[str, str], others: Mapping[str, str]
) -> dict[str, str]:
    """Returns the scope of variables by our module, from the scopes of embeddings and layer."""
    return {
        "encoder/embeddings/token_embedding": f"{embeddings}/word_embeddings",
        "encoder/embeddings/position_embedding": f"{embeddings}/position_embeddings",
        "encoder/embeddings/segment_embedding": f"{embeddings}/token_type_embeddings",
        "encoder/embeddings/layer_norm": f"{embeddings}/LayerNorm",
        **{f"encoder/layers/{module}": f"{layer}/{scope}" for module, scope in parts.items()},
        **others,
    }


BERT = _names("bert/embeddings", "bert/encoder/layer_{layer}", _BERT_LAYER, _HEADS)
ALBERT = _names(
    "bert/embeddings",
    "bert/encoder/transformer/group_{layer}/inner_group_0",
    _ALBERT_LAYER,
    {"encoder/embeddings/projection": "bert/encoder/embedding_hidden_mapping_in"} | _HEADS,
)
DISCRIMINATOR = _names(
    "electra/embeddings",
    "electra/encoder/layer_{layer}",
    _BERT_LAYER,
    {
        "encoder/embeddings/projection": "electra/embeddings_project",
        "discriminator/dense": "discriminator_predictions/dense",
        "discriminator/output": "discriminator_predictions/dense_1",
    },
)
# It shares the discriminator's embeddings.
GENERATOR = _names(
    "electra/embeddings",
    "generator/encoder/layer_{layer}",
    _BERT_LAYER,
    {
        "encoder/embeddings/projection": "generator/embeddings_project",
        "mlm": "generator_predictions",
        "mlm/transform": "generator_predictions/dense",
        "mlm/layer_norm": "generator_predictions/LayerNorm",
    },
)


def tensor_table(config: BertConfig, is_generator: bool = False) -> dict[str, StoredTensor]:
    """Returns how Google's checkpoints store each parameter that they have, by its path.

    Of ELECTRA's two networks: the discriminator, or the generator.
    """
    electra = GENERATOR if is_generator else DISCRIMINATOR
    names = {"bert": BERT, "albert": ALBERT, "electra": electra}[config.family]
    table = {}
    for path, tensor in huggingface.tensor_table(config).items():
        module, leaf = path.rsplit("/", 1)
        if module in names:
            table[path] = tensor._replace(
                name=names[module] + _suffix(module, leaf),
                is_transposed=path == "nsp/dense/kernel",
            )
    return table


def _suffix(module: str, leaf: str) -> str:
    """Returns what follows the scope of a module in the name of its variable."""
    if leaf == "embedding":
        return ""
    if module.endswith("layer_norm"):
        return {"scale": "/gamma", "bias": "/beta"}[leaf]
    if module in ("mlm", "nsp/dense"):
        return {"kernel": "/output_weights", "bias": "/output_bias"}[leaf]
    return f"/{leaf}"


def is_google(directory: pathlib.Path) -> bool:
    """Returns whether a directory looks like one of Google's archives."""
    has_config = any((directory / filename).exists() for filename in CONFIG_FAMILIES)
    return has_config or any(directory.glob("*.data-00000-of-*"))


def load_google(directory: pathlib.Path) -> LoadedModel:
    """Loads a directory as Google released it, with TensorFlow. Raises like `load_huggingface`."""
    values = _read_config(directory)
    is_generator = GENERATOR_ARCHITECTURE in values.get("architectures", ())
    config = huggingface.config_from_huggingface(values)
    tokenizer = load_tokenizer(directory / "vocab.txt" if config.family == "bert" else directory)
    indices = sorted(directory.glob("*.index"))
    if not indices:
        files = "NAME.index and NAME.data-00000-of-00001"
        raise FileNotFoundError(f"{directory} holds no TensorFlow checkpoint: expected {files}")
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
            tensor_table(config, is_generator),
        )
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        raise ValueError(f"{checkpoint}: {error}") from error
    return build_loaded_model(directory, config, None, params, tokenizer, report)


def _read_config(directory: pathlib.Path) -> dict:
    """Returns the configuration of an archive with the keys and values of transformers.

    transformers kept Google's keys; the keys that it added have defaults. Raises FileNotFoundError
    without a configuration, and ValueError for one of another family.
    """
    for filename, family in CONFIG_FAMILIES.items():
        if (directory / filename).exists():
            values = read_json(directory / filename) | {"model_type": family}
            if family == "albert" and values.get("hidden_act") == "gelu":
                values["hidden_act"] = "gelu_new"  # ALBERT's code computes the tanh form.
            return values
    path = directory / "config.json"
    if not path.exists():
        names = ", ".join(CONFIG_FAMILIES)
        raise FileNotFoundError(
            f"{directory} has a TensorFlow checkpoint, but no {names} or config.json. ELECTRA's "
            "archives have none: add the config.json of the same model for transformers, or for "
            'electra_small one with {"model_type": "electra"}'
        )
    values = read_json(path)
    if values.get("model_type") not in ("bert", "albert", "electra"):
        raise ValueError(
            f"{path}: model_type is {values.get('model_type')!r}, and only TensorFlow "
            "checkpoints of bert, albert and electra can be read"
        )
    return values
