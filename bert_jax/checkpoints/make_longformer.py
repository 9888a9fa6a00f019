"""Makes a Longformer from the weights of a RoBERTa (Beltagy et al., 2020, section 5)."""

import pathlib

import numpy as np

from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.parameters import LoadedModel, model_settings
from bert_jax.checkpoints.read import read_model
from bert_jax.model.architecture import config_from_settings
from bert_jax.model.config import BertConfig
from bert_jax.model.longformer import LongformerConfig

PROJECTIONS = ("query", "key", "value")


def write_longformer(
    source: pathlib.Path, destination: pathlib.Path, max_seq_length: int, attention_window: int
) -> None:
    """Writes the Longformer that starts from a RoBERTa to a new directory.

    Of a Longformer, it copies the projections again, and changes nothing else. Raises
    FileExistsError, and what `read_model` and `make_longformer` raise.
    """
    if destination.exists():
        raise FileExistsError(f"{destination} exists already: choose another --output")
    model = read_model(source)
    if model.settings["architecture"]["name"] == LongformerConfig.architecture:
        encoder = model.params["encoder"]
        encoder = encoder | {"layers": copy_projections(encoder["layers"])}
        model = model._replace(params=model.params | {"encoder": encoder})
    else:
        model = make_longformer(model, max_seq_length, attention_window)
    write_checkpoint(destination, model.params, model.settings, model.tokenizer)


def make_longformer(model: LoadedModel, max_seq_length: int, attention_window: int) -> LoadedModel:
    """Returns a Longformer that starts from a RoBERTa, with its vocabulary and its LM head.

    Its table of positions repeats the RoBERTa's, as often as it takes; the projections of global
    tokens are copies of the others. In texts of up to half a window of tokens, without global
    tokens, it computes what the RoBERTa does, and with them, too.

    Raises ValueError for another model than a RoBERTa, or one with the head of a task.
    """
    config = config_from_settings(model.settings)
    expected = "expected a RoBERTa without the head of a task: its layers, positions and segment"
    for name, value in (
        ("architecture", "bert"),
        ("position_offset", LongformerConfig.position_offset),
        ("embedding_size", None),
        ("num_task_embeddings", 0),
        ("shares_layers", False),
        ("pooler_activation", LongformerConfig.pooler_activation),
        ("activation", "gelu"),  # Longformer's head for tokens always has it.
        ("causal", False),
    ):
        if (found := getattr(config, name, None)) != value:
            raise ValueError(f"the model's {name} is {found!r}, not {value!r}: {expected}")
    if "head" in model.params:
        raise ValueError(f"the model has a head for {model.settings['head']['task']}: {expected}")
    longformer = _longformer_config(config, max_seq_length, attention_window, model)
    encoder = dict(model.params["encoder"])
    embeddings = dict(encoder["embeddings"])
    table = np.asarray(embeddings["position_embedding"]["embedding"])
    before, positions = np.split(table, [config.position_offset])
    repeats = -(-max_seq_length // len(positions))
    longer = np.concatenate([before, np.tile(positions, (repeats, 1))[:max_seq_length]])
    embeddings["position_embedding"] = {"embedding": longer}
    encoder |= {"embeddings": embeddings, "layers": copy_projections(encoder["layers"])}
    params = {name: part for name, part in model.params.items() if name in ("mlm", "nsp")}
    params["encoder"] = encoder
    return model._replace(params=params, settings=model_settings(longformer, params))


def copy_projections(layers: dict) -> dict:
    """Returns the parameters of layers with global projections that are copies of the others."""
    return {**layers, **{f"{name}_global": layers[name] for name in PROJECTIONS}}


def _longformer_config(
    config: BertConfig, max_seq_length: int, attention_window: int, model: LoadedModel
) -> LongformerConfig:
    """Returns the model config of the Longformer. Raises ValueError if it is invalid."""
    same = (
        "vocab_size",
        "hidden_size",
        "num_layers",
        "num_heads",
        "intermediate_size",
        "type_vocab_size",
        "activation",
        "dropout_rate",
        "attention_dropout_rate",
        "classifier_dropout_rate",
        "initializer_range",
        "layer_norm_epsilon",
    )
    return LongformerConfig(
        **{name: getattr(config, name) for name in same},
        max_position_embeddings=max_seq_length,
        attention_window=attention_window,
        sep_id=model.tokenizer.sep_id,
    )
