"""Type-checks the public API: `make types`. Nothing here is executed.

An ignored error that does not occur is itself an error, so wrong uses are known to be found.
"""

import pathlib
from typing import assert_type

import numpy as np
from ml_collections import ConfigDict

import bert_jax
from bert_jax import finetune, sweep
from bert_jax.inference.masked_text import Fill, Fills
from bert_jax.inference.pretrained_model import Attention, PretrainedModel, Replaced
from bert_jax.inference.text_inputs import Tokens
from bert_jax.tasks.multiple_choice import Ranked
from bert_jax.tasks.spans import Answer
from bert_jax.tasks.tagging import Tagging
from bert_jax.tasks.text_classification import Classification, Classified
from bert_jax.tokenizers.tokenizer import Tokenizer


def check_load(path: pathlib.Path) -> PretrainedModel:
    bert_jax.load(3)  # ty: ignore[invalid-argument-type]
    assert_type(bert_jax.load(path), PretrainedModel)
    return bert_jax.load("runs/base")


def check_any_model(model: PretrainedModel) -> None:
    assert_type(model.tokenizer, Tokenizer)
    assert_type(model.tokenizer.encode("a text"), list[int])
    assert_type(model.config.num_layers, int)
    assert_type(model.encode("a text"), np.ndarray)
    assert_type(model.encode(["a text", "another"], pooling="mean"), np.ndarray)
    assert_type(model.encode(("a question", "a passage"), normalize=True), np.ndarray)
    assert_type(model.batch(["a text"])["tokens"], np.ndarray)
    assert_type(model.tokens("a text").words, np.ndarray)
    assert_type(model.tokens(["a text"], max_length=8), list[Tokens])
    assert_type(model.hidden_states(("a question", "a passage"), layers=-1), np.ndarray)
    assert_type(model.hidden_states(["a text"]), list[np.ndarray])
    assert_type(model.features(["a text"]), list[np.ndarray])
    assert_type(model.attention("a text").tokens, list[str])
    assert_type(model.attention([("a question", "a passage")]), list[Attention])
    assert_type(model.generate("a [MASK]", 0, steps=2, on_step=print), str)
    assert_type(model.generate(["a", "the"], length=3, order="confidence"), list[str])
    assert_type(model.replaced_tokens("a text"), Replaced)
    assert_type(model.replaced_tokens(["a text"]), list[Replaced])
    assert_type(bert_jax.search(np.ones(3), np.ones((2, 3)), top_k=1).indices, np.ndarray)
    model.save(pathlib.Path("runs/own"), overwrite=True)
    model.encode(3)  # ty: ignore[invalid-argument-type]
    model.encode("a text", polling="mean")  # ty: ignore[unknown-argument]
    model.attention(3)  # ty: ignore[no-matching-overload]
    bert_jax.lode("runs/base")  # ty: ignore[missing-attribute]


def check_results_that_depend_on_the_text_or_the_head(model: PretrainedModel) -> None:
    """A type checker knows neither the number of masks nor the task: it asks which result it is."""
    assert_type(model.fill_mask("a [MASK]", top_k=5), Fills)
    assert_type(model.fill_mask(["a [MASK]"]), list[Fills])
    for fill in model.fill_mask("a [MASK]"):
        if isinstance(fill, Fill):  # Of several masks, it is a list.
            assert_type(fill.token, str)
    assert_type(model.classify("a text"), Classified)
    assert_type(model.classify([("a question", "a passage")]), list[Classified])
    best = model.classify("a text")
    if isinstance(best, Classification):
        assert_type(best.probability, float)
    assert_type(model.classify("a text", top_k=2), list[Classification])
    assert_type(model.classify("a text", top_k=2)[0].label, str)
    assert_type(model.classify(["a text"], top_k=2), list[list[Classification]])


def check_heads(model: PretrainedModel, column: np.ndarray) -> None:
    assert_type(model.tag("a text"), Tagging)
    assert_type(model.tag(("two", "words")).entities[0].type, str)
    assert_type(model.tag(["a text", ["two", "words"]], documents=["a", "a"]), list[Tagging])
    assert_type(model.answer("a question", "a context")[0].text, str)
    assert_type(model.answer(["a question"], "a context", top_k=2), list[list[Answer]])
    assert_type(model.rank("a query", ["a passage"]), list[Ranked])
    assert_type(model.rank(["a query"], column), list[list[Ranked]])
    rows, scores = model.predict("dev.csv", text="body")
    assert_type(rows, list[dict])
    assert_type(scores["accuracy"], float)
    model.predict([{"text": "a text"}])
    model.classify("a text", top_k="all")  # ty: ignore[no-matching-overload]
    model.rank("a query")  # ty: ignore[no-matching-overload]


def check_training(config: ConfigDict) -> None:
    assert_type(finetune.train_and_evaluate(config, "runs/own"), dict)
    assert_type(sweep.sweep(config, pathlib.Path("runs/sweep")), dict)


def check_config() -> None:
    config = bert_jax.BertConfig.named("tiny", vocab_size=100)
    assert_type(config, bert_jax.BertConfig)
    assert_type(config.hidden_size, int)
    bert_jax.BertConfig(vocab_sise=100)  # ty: ignore[unknown-argument]
