"""Converts a RoBERTa to a Longformer (Beltagy et al., 2020, section 5)."""

import pathlib

import numpy as np
from absl import logging

from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.parameters import LoadedModel, model_settings
from bert_jax.checkpoints.read import read_model
from bert_jax.data.features import check_layout
from bert_jax.model.architecture import config_from_settings
from bert_jax.model.config import BertConfig
from bert_jax.model.longformer import LongformerConfig

PROJECTIONS = ("query", "key", "value")
MAX_SEQ_LENGTH, ATTENTION_WINDOW = 4096, 512  # Of longformer-base-4096.
EXPECTED = "only RoBERTa-style encoders without the head of a task can be converted"


def write_longformer(
    source: pathlib.Path,
    destination: pathlib.Path,
    max_seq_length: int | None = None,
    attention_window: int | None = None,
) -> None:
    """Converts a RoBERTa to a Longformer, and writes it to a new directory.

    `max_seq_length` None: 4,096 tokens; `attention_window` None: 512. Of a Longformer, which keeps
    its own, it only replaces the projections of global tokens by copies of the others, and logs it.

    Raises FileExistsError, what `read_model` raises, and ValueError for a model that cannot be
    converted.
    """
    if destination.exists():
        raise FileExistsError(f"{destination} exists already: choose another --output")
    model = read_model(source)
    if head := model.settings.get("head"):
        raise ValueError(f"{source} has a head for {head['task']}: {EXPECTED}")
    if model.settings["architecture"]["name"] == LongformerConfig.architecture:
        if (max_seq_length, attention_window) != (None, None):
            raise ValueError(
                f"{source} is a Longformer, which keeps its positions and windows: remove "
                "--max_seq_length and --attention_window"
            )
        if (kind := config_from_settings(model.settings).global_tokens) != "none":
            raise ValueError(
                f"{source} was trained with global tokens (model.global_tokens is {kind!r}), so "
                "its global projections are trained: there is nothing to copy"
            )
        encoder = model.params["encoder"]
        encoder = encoder | {"layers": copy_projections(encoder["layers"])}
        model = model._replace(params=model.params | {"encoder": encoder})
        logging.warning(
            "replaced the global projections of %s (%s) by copies of its %s",
            source,
            ", ".join(f"{name}_global" for name in PROJECTIONS),
            ", ".join(PROJECTIONS),
        )
    else:
        _check_is_roberta(source, model)
        model = make_longformer(
            model,
            MAX_SEQ_LENGTH if max_seq_length is None else max_seq_length,
            ATTENTION_WINDOW if attention_window is None else attention_window,
        )
    write_checkpoint(destination, model.params, model.settings, model.tokenizer)


def _check_is_roberta(source: pathlib.Path, model: LoadedModel) -> None:
    """Raises ValueError for what a Longformer does not compute, or has no parameters for."""
    config = config_from_settings(model.settings)
    if config.architecture != BertConfig.architecture:
        raise ValueError(f"{source} is a {config.architecture}, not a RoBERTa: {EXPECTED}")
    if (offset := config.position_offset) != LongformerConfig.position_offset:
        positions = f"its positions start at {offset}, not {LongformerConfig.position_offset}"
        raise ValueError(
            f"{source} is a {config.family.upper()}, not a RoBERTa ({positions}): {EXPECTED}"
        )
    for name, value in (
        ("embedding_size", None),
        ("num_task_embeddings", 0),
        ("shares_layers", False),
        ("pooler_activation", LongformerConfig.pooler_activation),
        ("activation", "gelu"),  # Longformer's head for tokens always has it.
        ("causal", False),
    ):
        if (found := getattr(config, name)) != value:
            raise ValueError(f"{source}: its {name} is {found!r}, not {value!r}: {EXPECTED}")
    if others := sorted(model.params.keys() - {"encoder", "mlm", "nsp"}):
        raise ValueError(f"{source} has the parameters of {', '.join(others)}: {EXPECTED}")


def make_longformer(model: LoadedModel, max_seq_length: int, attention_window: int) -> LoadedModel:
    """Returns a Longformer that starts from a RoBERTa, with its vocabulary and its LM head.

    The position embeddings are tiled; the projections of global tokens are copies of the others.
    With or without global tokens, texts of up to half a window give the RoBERTa's outputs.

    Raises ValueError for fewer positions than the RoBERTa has, an odd window, or a tokenizer that
    does not join pairs of texts as RoBERTa's does.
    """
    config = config_from_settings(model.settings)
    if max_seq_length < config.max_position_embeddings:
        raise ValueError(
            f"--max_seq_length is {max_seq_length}, so positions of the RoBERTa would be lost: "
            f"expected at least its {config.max_position_embeddings}"
        )
    if attention_window % 2:
        raise ValueError(
            f"--attention_window is {attention_window}: expected an even number, half of which is "
            "on each side"
        )
    longformer = _longformer_config(config, max_seq_length, attention_window, model)
    check_layout(longformer, model.tokenizer)
    encoder = dict(model.params["encoder"])
    embeddings = dict(encoder["embeddings"])
    table = np.asarray(embeddings["position_embedding"]["embedding"])
    before, positions = np.split(table, [config.position_offset])
    repeats = -(-max_seq_length // len(positions))
    longer = np.concatenate([before, np.tile(positions, (repeats, 1))[:max_seq_length]])
    embeddings["position_embedding"] = {"embedding": longer}
    encoder |= {"embeddings": embeddings, "layers": copy_projections(encoder["layers"])}
    params = model.params | {"encoder": encoder}
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
