"""Type-checks the public API: `make types`. Nothing here is executed.

An ignored error that does not occur is itself an error, so wrong uses are known to be found.
"""

import pathlib
from typing import assert_type

import numpy as np

import bert_jax
from bert_jax.inference import PretrainedModel
from bert_jax.tokenization import Tokenizer


def check_load(path: pathlib.Path) -> PretrainedModel:
    bert_jax.load(3)  # ty: ignore[invalid-argument-type]
    assert_type(bert_jax.load(path), PretrainedModel)
    return bert_jax.load("runs/base")


def check_methods(model: PretrainedModel) -> None:
    assert_type(model.encode(["a text", "another"], pooling="mean"), np.ndarray)
    assert_type(model.tokenizer, Tokenizer)
    assert_type(model.tokenizer.encode("a text"), list[int])
    model.encode(3)  # ty: ignore[invalid-argument-type]
    model.encode("a text", polling="mean")  # ty: ignore[unknown-argument]
    fills = model.fill_mask("a [MASK]", top_k=5)
    assert_type(len(fills), int)
    assert_type(model.config.num_layers, int)
    bert_jax.lode("runs/base")  # ty: ignore[missing-attribute]


def check_config() -> None:
    config = bert_jax.BertConfig.named("tiny", vocab_size=100)
    assert_type(config, bert_jax.BertConfig)
    assert_type(config.hidden_size, int)
    bert_jax.BertConfig(vocab_sise=100)  # ty: ignore[unknown-argument]
