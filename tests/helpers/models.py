"""Small models, their tensors in other formats, and comparisons of parameters."""

import copy
import functools
import json
import pathlib
import re

import flax
import jax
import numpy as np

from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.huggingface import HEAD_KEY
from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.parameters import model_settings, parameter_shapes
from bert_jax.data.features import unpack_rows
from bert_jax.model.config import BertConfig
from bert_jax.model.deberta import DebertaConfig
from bert_jax.model.esm import EsmConfig
from bert_jax.model.heads import find_head, make_model
from bert_jax.model.longformer import LongformerConfig
from bert_jax.model.modernbert import ModernBertConfig
from bert_jax.model.mpnet import MpnetConfig
from bert_jax.model.xlnet import XlnetConfig
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import write_vocabulary


def small_model_config(vocab_size: int = 100, **fields) -> BertConfig:
    """Returns the model config of a BERT that compiles fast; a mesh of eight divides it."""
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 64}
    return BertConfig(vocab_size, **sizes | {"max_position_embeddings": 64} | fields)


def small_modernbert_config(vocab_size: int = 100, **fields) -> ModernBertConfig:
    """Returns the model config of a ModernBERT that compiles fast; a mesh of eight divides it.

    The second layer is local, with a window smaller than the rows of tests.
    """
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
    sizes |= {"attention_pattern": "gl", "attention_window": 8, "max_position_embeddings": 64}
    return ModernBertConfig(vocab_size, **sizes | fields)


def small_mpnet_config(vocab_size: int = 100, **fields) -> MpnetConfig:
    """Returns the model config of an MPNet that compiles fast; a mesh of eight divides it."""
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
    return MpnetConfig(vocab_size, **sizes | {"max_position_embeddings": 64} | fields)


def small_esm_config(vocab_size: int = 33, **fields) -> EsmConfig:
    """Returns the model config of an ESM that compiles fast; a mesh of eight divides it."""
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
    return EsmConfig(vocab_size, **sizes | {"max_position_embeddings": 64} | fields)


def small_longformer_config(vocab_size: int = 100, **fields) -> LongformerConfig:
    """Returns the model config of a Longformer that compiles fast; a mesh of eight divides it.

    Its windows are smaller than the rows of tests.
    """
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
    sizes |= {"attention_window": (8, 4), "max_position_embeddings": 64}
    return LongformerConfig(vocab_size, **sizes | fields)


def small_deberta_config(vocab_size: int = 100, **fields) -> DebertaConfig:
    """Returns the model config of a DeBERTa that compiles fast; a mesh of eight divides it.

    In rows of more than five tokens, some distances share a vector.
    """
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
    sizes |= {"num_buckets": 8, "convolution_width": 3, "max_position_embeddings": 64}
    return DebertaConfig(vocab_size, **sizes | fields)


def small_xlnet_config(vocab_size: int = 100, **fields) -> XlnetConfig:
    """Returns the model config of an XLNet that compiles fast; a mesh of eight divides it."""
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
    return XlnetConfig(vocab_size, **sizes | {"max_position_embeddings": 64} | fields)


def random_params(model, batch, std: float = 0.2) -> dict:
    """Returns random parameters, biases and scales included, of a model that takes `batch`.

    They come from NumPy: to compile the initializers takes longer.
    """
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), batch)["params"]
    return flax.traverse_util.path_aware_map(
        lambda path, leaf: np.float32(rng.normal(path[-1] == "scale", std, leaf.shape)), shapes
    )


def write_random_encoder(directory: pathlib.Path, tokenizer) -> pathlib.Path:
    """Writes a checkpoint of a very small encoder with random weights, to fine-tune."""
    config = small_model_config(tokenizer.vocab_size, num_layers=1)
    rng = np.random.default_rng(0)
    params = {
        path: rng.normal(0, 0.1, leaf.shape).astype(np.float32) + path.endswith("scale")
        for path, leaf in parameter_shapes(config).items()
        if path.startswith("encoder")
    }
    params = flax.traverse_util.unflatten_dict(params, sep="/")
    write_checkpoint(directory, params, model_settings(config, params), tokenizer)
    return directory


def write_head(
    directory: pathlib.Path, imported: bool = False, positions: int = 64, **head
) -> pathlib.Path:
    """Writes a small random model with a head of these settings; returns its directory.

    If `imported`, it is transformers' directory, which has only the kind of head and its labels.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(write_vocabulary(directory / "vocab.txt"))
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32}
    config = small_model_config(tokenizer.vocab_size, **sizes, max_position_embeddings=positions)
    rng = np.random.default_rng(0)
    params = {  # Large, and without biases, so that labels vary.
        path: np.float32(rng.normal(0, 1, leaf.shape) * (not path.endswith(("bias", "scale"))))
        + np.float32(path.endswith("scale"))
        for path, leaf in parameter_shapes(config, head).items()
        if not path.startswith(tuple({"mlm", "nsp"} - {*find_head(head).pretrained_modules}))
    }
    params = flax.traverse_util.unflatten_dict(params, sep="/")
    settings = model_settings(config, params) | {"head": head}
    model = directory / "model"
    if not imported:
        write_checkpoint(model, params, settings, tokenizer)
        return model
    save_huggingface(model, params, settings, tokenizer)
    values = json.loads((model / "config.json").read_text())
    del values[HEAD_KEY]
    (model / "config.json").write_text(json.dumps(values))
    return model


def batch_of_row(tokens: np.ndarray, segment_ids: np.ndarray | None = None) -> dict:
    """Returns the model's inputs for int `[1, L]` tokens of one sequence, without padding."""
    return {
        "tokens": tokens,
        "segment_ids": tokens * 0 if segment_ids is None else segment_ids,
        "position_ids": np.arange(tokens.shape[1])[None],
        "sequence_ids": tokens * 0 + 1,
    }


def example_batch() -> dict:
    """Returns a batch of a `PretrainingModel` or an encoder, to initialize its parameters."""
    tokens = np.zeros((1, 2), np.int32)
    return batch_of_row(tokens) | {"target_positions": tokens, "pooled_positions": tokens}


@functools.cache
def random_classifier(config: BertConfig, num_labels: int) -> dict:
    """Returns NumPy arrays of the initial parameters of a classifier."""
    rows = {"tokens": np.zeros((1, 4), np.int32), "sequence_bounds": np.zeros((1, 1, 3), np.int32)}
    model = make_model(config, {"task": "classification", "labels": ["label"] * num_labels})
    params = jax.jit(model.init)(jax.random.key(1), rows | unpack_rows(rows))["params"]
    return jax.device_get(params)


def write_weights(
    directory,
    vocabulary,
    head=None,
    bias=0.0,
    labels=("north", "south"),
    causal=False,
    num_layers=1,  # Compiles faster; tests of models and steps have two.
):
    """Writes a checkpoint of a small untrained encoder; with `head` (labels), also of a head."""
    tokenizer = load_tokenizer(vocabulary)
    config = small_model_config(
        tokenizer.vocab_size,
        num_layers=num_layers,
        num_heads=2,
        max_position_embeddings=32,
        initializer_range=0.2,  # With less, [CLS] takes many steps to learn about other tokens.
        causal=causal,
    )
    params = copy.deepcopy(random_classifier(config, len(head or labels)))
    if not head:
        del params["head"]
    settings = model_settings(config, params)
    if head:
        settings["head"] = {"task": "classification", "labels": list(head)}
        params["head"]["bias"] += bias * np.arange(len(head))
    write_checkpoint(directory, params, settings, tokenizer)
    return directory


CONFIG = BertConfig(
    vocab_size=131,
    hidden_size=12,
    num_layers=2,
    num_heads=3,
    intermediate_size=20,
    max_position_embeddings=9,
)


CONFIG_JSON = {
    "model_type": "bert",
    "vocab_size": 131,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 9,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}


PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(126))]


def linear(rng, name: str, inputs: int, outputs: int) -> dict[str, np.ndarray]:
    return {
        f"{name}.weight": rng.standard_normal((outputs, inputs)),
        f"{name}.bias": rng.standard_normal(outputs),
    }


def norm(rng, name: str, size: int = 12) -> dict[str, np.ndarray]:
    return {f"{name}.weight": rng.standard_normal(size), f"{name}.bias": rng.standard_normal(size)}


def state_dict(num_layers: int = 2) -> dict[str, np.ndarray]:
    """Returns random tensors in float64 under the names of transformers' BertForPreTraining."""
    rng = np.random.default_rng(0)
    tensors = {
        "bert.embeddings.word_embeddings.weight": rng.standard_normal((131, 12)),
        "bert.embeddings.position_embeddings.weight": rng.standard_normal((9, 12)),
        "bert.embeddings.token_type_embeddings.weight": rng.standard_normal((2, 12)),
        **norm(rng, "bert.embeddings.LayerNorm"),
        **linear(rng, "bert.pooler.dense", 12, 12),
        "cls.predictions.bias": rng.standard_normal(131),
        **linear(rng, "cls.predictions.transform.dense", 12, 12),
        **norm(rng, "cls.predictions.transform.LayerNorm"),
        **linear(rng, "cls.seq_relationship", 12, 2),
    }
    for layer in range(num_layers):
        prefix = f"bert.encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            tensors |= linear(rng, f"{prefix}.attention.self.{part}", 12, 12)
        tensors |= linear(rng, f"{prefix}.attention.output.dense", 12, 12)
        tensors |= norm(rng, f"{prefix}.attention.output.LayerNorm")
        tensors |= linear(rng, f"{prefix}.intermediate.dense", 12, 20)
        tensors |= linear(rng, f"{prefix}.output.dense", 20, 12)
        tensors |= norm(rng, f"{prefix}.output.LayerNorm")
    return tensors


def flat(params: dict) -> dict[str, np.ndarray]:
    return flax.traverse_util.flatten_dict(params, sep="/")


def assert_trees_equal(params: dict, expected: dict) -> None:
    assert flat(params).keys() == flat(expected).keys()
    for path, value in flat(params).items():
        np.testing.assert_array_equal(value, flat(expected)[path], err_msg=path)


TORCH_SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 16,
}


TORCH_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(35))]


def write_torch_model(directory: pathlib.Path, class_name: str, std: float = 0.3, **settings):
    """Writes and returns a transformers model with all parameters random, biases included.

    `class_name` is transformers', of BERT or of a descendant with its vocabulary.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    family = re.match("(.+?)(Model|For)", class_name)[1]
    config = getattr(transformers, f"{family}Config")(**TORCH_SIZES | settings)
    model = getattr(transformers, class_name)(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(directory)
    (directory / "vocab.txt").write_text("\n".join(TORCH_PIECES) + "\n")
    return model
