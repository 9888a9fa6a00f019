"""Generates families.npz with transformers' models (needs torch and transformers).

python tests/golden/make_families.py

The file holds the last hidden states and the logits of the heads of small random models of each
family. The tensors are regenerated from a seed, with transformers' names and shapes.
"""

import pathlib

import jax.numpy as jnp
import numpy as np

from bert_jax.checkpoints.huggingface import (
    config_from_huggingface,
    head_from_huggingface,
    params_from_huggingface,
    tensor_table,
)
from bert_jax.checkpoints.parameters import parameter_shapes
from bert_jax.data.features import unpack_rows
from bert_jax.model.encoder import Encoder
from bert_jax.model.heads import make_model
from bert_jax.objectives.masked_lm import PretrainingModel

PATH = pathlib.Path(__file__).with_name("families.npz")
LENGTHS, LENGTH = (11, 4, 9), 11
SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 20,
    "num_labels": 3,
}
DISTILBERT_SIZES = {
    "vocab_size": 61,
    "dim": 24,
    "n_layers": 2,
    "n_heads": 3,
    "hidden_dim": 40,
    "max_position_embeddings": 20,
    "num_labels": 3,
}
# Class -> `config.json`.
MODELS = {
    "RobertaForMaskedLM": SIZES | {"model_type": "roberta", "type_vocab_size": 1},
    "RobertaForSequenceClassification": SIZES | {"model_type": "roberta", "layer_norm_eps": 1e-5},
    "DistilBertForMaskedLM": DISTILBERT_SIZES | {"model_type": "distilbert"},
    "DistilBertForSequenceClassification": DISTILBERT_SIZES | {"model_type": "distilbert"},
    "AlbertForMaskedLM": SIZES | {"model_type": "albert", "embedding_size": 8},
    "AlbertForSequenceClassification": SIZES
    | {"model_type": "albert", "embedding_size": 8, "num_hidden_groups": 2},
    "ElectraForMaskedLM": SIZES | {"model_type": "electra", "embedding_size": 8},
    "ElectraForSequenceClassification": SIZES | {"model_type": "electra", "embedding_size": 24},
    "CamembertForMaskedLM": SIZES | {"model_type": "camembert", "type_vocab_size": 1},
    "Data2VecTextForSequenceClassification": SIZES | {"model_type": "data2vec-text"},
    "ErnieForMaskedLM": SIZES | {"model_type": "ernie", "use_task_id": True},
    "ErnieForSequenceClassification": SIZES | {"model_type": "ernie"},
}


def random_tensors(config, head: dict | None, seed: int, modules: tuple[str, ...]) -> dict:
    """Returns float32 tensors of `modules` in transformers' names; all biases and scales random."""
    rng, tensors = np.random.default_rng(seed), {}
    table = tensor_table(config, head)
    for path, parameter in parameter_shapes(config, head).items():
        if path not in table or not path.startswith(modules):
            continue
        name, is_transposed, num_rows, *_ = table[path]
        is_stacked = "{layer}" in name
        shape = parameter.shape[1:] if is_stacked else parameter.shape
        shape = (num_rows, *shape[1:]) if num_rows else shape
        for layer in range(parameter.shape[0] if is_stacked else 1):
            value = 0.3 * rng.standard_normal(shape) + path.endswith("scale")
            value = value.T if is_transposed else value
            tensors[name.format(layer=layer)] = value.astype(np.float32)
    return tensors


def make_case(name: str) -> tuple[object, dict | None, dict, dict]:
    """Returns the configuration, head, tensors and rows of one of `MODELS`."""
    values = MODELS[name] | {"architectures": [name]}
    config, head = config_from_huggingface(values), head_from_huggingface(values)
    seed = list(MODELS).index(name)
    modules = ("encoder/embeddings", "encoder/layers", "mlm")
    if head:
        modules = ("encoder", "head")
    tensors = random_tensors(config, head, seed, modules)
    rng = np.random.default_rng(100 + seed)
    tokens = rng.integers(2, config.vocab_size, (len(LENGTHS), LENGTH)).astype(np.int32)
    bounds = np.zeros((len(LENGTHS), 1, 3), np.int32)
    for row, length in enumerate(LENGTHS):
        second = length // 2 if config.type_vocab_size > 1 else length
        bounds[row, 0] = 0, second, length
        tokens[row, length:] = config.position_offset > 0  # The id of padding.
    return config, head, tensors, {"tokens": tokens, "sequence_bounds": bounds}


def transformers_outputs(name: str, config, tensors: dict, rows: dict) -> dict:
    """Returns transformers' last hidden states and logits."""
    import torch
    import transformers

    values = dict(MODELS[name])
    values.pop("model_type")
    family = name.partition("For")[0]
    model = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**values)).eval()
    missing, unexpected = model.load_state_dict(
        {key: torch.tensor(value) for key, value in tensors.items()}, strict=False
    )
    assert not unexpected
    assert all(
        key.endswith(("decoder.weight", "decoder.bias", "_head.weight", "projector.weight"))
        for key in missing
    ), missing
    model.tie_weights()
    batch = unpack_rows(rows)
    inputs = {"input_ids": rows["tokens"], "attention_mask": batch["sequence_ids"] > 0}
    if config.type_vocab_size:
        inputs["token_type_ids"] = batch["segment_ids"]
    inputs = {key: torch.tensor(np.asarray(value)).long() for key, value in inputs.items()}
    with torch.no_grad():
        hidden = model.base_model(**inputs).last_hidden_state
        return {"hidden": hidden.numpy(), "logits": model(**inputs).logits.numpy()}


def our_outputs(config, head: dict | None, tensors: dict, rows: dict) -> dict:
    """Returns the same outputs of our model, for the same tensors."""
    params, report = params_from_huggingface(tensors, config, head)
    assert not report.unused
    batch = unpack_rows(rows)
    hidden = Encoder(config).apply({"params": params["encoder"]}, batch)
    if head:
        logits = make_model(config, head).apply({"params": params}, rows | batch)[:, 0]
    else:
        positions = jnp.broadcast_to(jnp.arange(LENGTH), rows["tokens"].shape)
        model = PretrainingModel(config, next_sentence=False)
        logits = model.apply({"params": params}, batch, positions, method="predict_tokens")
        logits = logits[..., : config.vocab_size]
    return {"hidden": hidden, "logits": logits}


def main() -> None:
    outputs = {}
    for name in MODELS:
        config, _, tensors, rows = make_case(name)
        for key, value in transformers_outputs(name, config, tensors, rows).items():
            outputs[f"{name}/{key}"] = value
    np.savez_compressed(PATH, **outputs)


if __name__ == "__main__":
    main()
