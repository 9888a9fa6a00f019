"""BERT as the transformers library stores it: configuration and weights.

Nothing of that library is needed, nor torch: a state dict is a mapping of names to numpy arrays,
as `safetensors.numpy.load_file` reads it.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import BertConfig
from bert_jax.model import BertForPreTraining

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
_PADDED = ("bert/embeddings/token_embedding", "mlm/bias")
_HEADS = {
    "bert/pooler/": "bert.pooler.",
    "mlm/": "cls.predictions.",
    "nsp/": "cls.seq_relationship.",
}

# Stored beside the tensor that they are tied to, or instead of it.
_COPIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_OLD_LEAVES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


class LoadReport(NamedTuple):
    """Names of tensors: read, wanted by an absent head, and given but of no use here."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]


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
    names = {
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
    # Both libraries' defaults are BERT_BASE, so what is not given is the same in both.
    given = {ours: values[theirs] for ours, theirs in names.items() if theirs in values}
    return BertConfig(**given, dropout_rate=rates.pop())


def params_from_huggingface(
    tensors: Mapping[str, np.ndarray], config: BertConfig
) -> tuple[dict, LoadReport]:
    """Parameters of `BertForPreTraining(config)` out of a state dict.

    Args:
      tensors: of BertModel, BertForPreTraining, or a model between; names with or without the
        prefix `bert.`, any float dtype.
      config: see `config_from_huggingface`.

    Returns:
      The parameter tree in float32 numpy arrays, rows that pad the vocabulary zero, and a report.
      Pooler, MLM head and NSP head are each left out of the tree where the state dict has none.

    Raises:
      ValueError: a tensor is missing or of another shape, or the decoder is not tied.
    """
    given = _names_as_given(tensors)
    params, loaded, missing = {}, [], []

    def read(name, shape, transposed):
        expected = shape[::-1] if transposed else shape
        if name not in given:
            raise ValueError(f"tensor {name}: expected shape {expected}, found no such tensor")
        tensor = np.asarray(tensors[given[name]])
        if tensor.shape != expected:
            raise ValueError(f"tensor {name}: expected shape {expected}, found {tensor.shape}")
        loaded.append(given[name])
        return (tensor.T if transposed else tensor).astype(np.float32)

    for path, shape in parameter_shapes(config).items():
        name, transposed = huggingface_name(path), path.endswith("/kernel")
        head = next((theirs for ours, theirs in _HEADS.items() if path.startswith(ours)), None)
        if head and not any(other.startswith(head) for other in given):
            missing.append(name)
        elif "{layer}" in name:
            names = [name.format(layer=layer) for layer in range(config.num_layers)]
            params[path] = np.stack([read(each, shape[1:], transposed) for each in names])
        elif path in _PADDED:
            rows = read(name, (config.vocab_size, *shape[1:]), transposed)
            padding = (
                (0, config.padded_vocab_size - config.vocab_size),
                *[(0, 0)] * len(shape[1:]),
            )
            params[path] = np.pad(rows, padding)
        else:
            params[path] = read(name, shape, transposed)

    for copy, original in _COPIES.items():
        if copy in given and given[copy] not in loaded:
            if not np.array_equal(tensors[given[copy]], tensors[given[original]]):
                raise ValueError(
                    f"tensor {copy}: expected a copy of {original}, found other values"
                )
            loaded.append(given[copy])
    unused = tuple(name for name in tensors if name not in set(loaded))
    tree = flax.traverse_util.unflatten_dict(params, sep="/")
    return tree, LoadReport(tuple(loaded), tuple(missing), unused)


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


def huggingface_name(path: str) -> str:
    """A path in the parameter tree -> transformers' name, with `{layer}` where it is stacked."""
    if path in _PARAMETERS:
        return _PARAMETERS[path]
    module, leaf = path.rsplit("/", 1)
    return f"{_MODULES[module]}.{_LEAVES[leaf]}"


@functools.lru_cache(maxsize=8)
def parameter_shapes(config: BertConfig) -> Mapping[str, tuple[int, ...]]:
    """Path -> shape, for each parameter of `BertForPreTraining(config)`."""
    ids = jnp.zeros((1, 2), jnp.int32)
    init = BertForPreTraining(config).init
    params = jax.eval_shape(init, jax.random.key(0), *[ids] * 6)["params"]
    return {
        path: leaf.shape for path, leaf in flax.traverse_util.flatten_dict(params, sep="/").items()
    }
