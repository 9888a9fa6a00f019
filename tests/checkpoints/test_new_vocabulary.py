"""More tokens, or others: every table has their rows, and old tokens keep their outputs."""

import functools

import flax
import jax
import numpy as np
import pytest

import bert_jax
from bert_jax.checkpoints.new_vocabulary import (
    extend_vocabulary,
    replace_vocabulary,
    sparsemax,
    token_tables,
)
from bert_jax.checkpoints.parameters import LoadedModel, LoadReport, model_settings
from bert_jax.checkpoints.read import generator_of, read_model
from bert_jax.checkpoints.save import save_model
from bert_jax.model.architecture import config_from_settings
from bert_jax.model.execution import ExecutionPlan
from bert_jax.objectives.masked_lm import PretrainingModel
from bert_jax.objectives.replaced_tokens import GeneratorSettings, ReplacedTokenModel
from bert_jax.tokenizers.suggest_words import given_words
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import with_layout, write_vocabulary
from tests.helpers.models import (
    batch_of_row,
    example_batch,
    random_params,
    small_deberta_config,
    small_longformer_config,
    small_model_config,
    small_modernbert_config,
    small_mpnet_config,
    small_xlnet_config,
)
from tests.helpers.tokenizers import training_texts, write_tokenizer

TABLE, BIAS = "encoder/embeddings/token_embedding/embedding", "mlm/bias"
WORDS = ("stent", "troponin", "dlrs", "edema", "covid", "Zürich", "ingress", "xing")
ROBERTA = {"position_offset": 2, "type_vocab_size": 1, "layer_norm_epsilon": 1e-5}
# Architecture -> model config, tokenizer, and the parameters with rows for tokens.
CASES = {
    "bert": (small_model_config, "wordpiece", {TABLE, BIAS}),
    "roberta": (functools.partial(small_model_config, **ROBERTA), "bpe", {TABLE, BIAS}),
    "albert": (
        functools.partial(small_model_config, embedding_size=16, shares_layers=True),
        "albert",
        {TABLE, BIAS},
    ),
    "modernbert, untied": (
        functools.partial(small_modernbert_config, ties_embeddings=False),
        "bpe with added tokens",
        {TABLE, BIAS, "mlm/decoder/embedding"},
    ),
    "deberta": (small_deberta_config, "deberta", {TABLE, BIAS}),
    "bert with a SentencePiece model": (
        small_model_config,
        "sentencepiece unigram",
        {TABLE, BIAS},
    ),
    "mpnet": (small_mpnet_config, "wordpiece", {TABLE, BIAS}),
    "longformer": (
        functools.partial(small_longformer_config, sep_id=2),
        "bpe",
        {TABLE, BIAS},
    ),
    "xlnet": (small_xlnet_config, "deberta", {TABLE, BIAS}),
}
FAST = ("bert", "roberta", "albert")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in FAST]


def make_model(config, tokenizer, model=None, **settings) -> LoadedModel:
    """Returns a model with random parameters, biases included."""
    params = random_params(model or PretrainingModel(config), example_batch())
    settings = model_settings(config, params) | settings
    return LoadedModel(params, settings, tokenizer, LoadReport((), (), ()))


def logits_of(model: LoadedModel, ids: list[int]) -> np.ndarray:
    """Returns the logits of all tokens of the tokenizer at each position of a sequence."""
    tokens = np.array([ids])
    batch = batch_of_row(tokens) | {"target_positions": np.arange(len(ids))[None]}
    module = PretrainingModel(config_from_settings(model.settings), next_sentence=False)
    logits, _ = jax.jit(module.apply)({"params": model.params}, batch)
    return np.asarray(logits)[0, :, : model.tokenizer.vocab_size]


@pytest.mark.parametrize("name", [*FAST, *SLOW])
@pytest.mark.slow
def test_old_tokens_keep_their_logits_and_new_ones_begin_as_means(name, tmp_path):
    make_config, kind, tables = CASES[name]
    tokenizer = write_tokenizer(kind, tmp_path / "tokenizer")
    if name == "xlnet":
        tokenizer = with_layout(tokenizer, tokenizer.layout._replace(cls_last=True))
    spare = 3  # rows without a token, as in padded vocabularies
    model = make_model(make_config(tokenizer.vocab_size + spare), tokenizer)
    config = config_from_settings(model.settings)
    flat = flax.traverse_util.flatten_dict(model.params, sep="/")
    assert {*token_tables(config, model.settings, flat)} == tables

    words, _ = given_words(tokenizer, WORDS, {})
    extension = extend_vocabulary(model, words)
    extended, ids = extension.model, extension.ids
    unused = 3 * (kind == "wordpiece")
    places = extension.num_unused, extension.num_spare, extension.num_new
    assert places == (unused, spare, len(WORDS) - unused - spare)
    new_config = config_from_settings(extended.settings)
    assert new_config.vocab_size == config.vocab_size + extension.num_new
    assert extended.tokenizer.vocab_size == new_config.vocab_size

    new_flat = flax.traverse_util.flatten_dict(extended.params, sep="/")
    kept = np.setdiff1d(np.arange(tokenizer.vocab_size), ids)
    for path, old in flat.items():
        if path not in tables:
            np.testing.assert_array_equal(new_flat[path], old)
            continue
        np.testing.assert_array_equal(new_flat[path][kept], old[kept])
        means = [np.mean(old[word.ids], axis=0, dtype=np.float64) for word in words]
        np.testing.assert_allclose(new_flat[path][ids], means, rtol=1e-6, atol=1e-7)
        assert len(new_flat[path]) == new_config.padded_vocab_size

    text = next(text for text in training_texts() if 20 < len(text) < 40)
    row = [tokenizer.cls_id, *tokenizer.encode(text)[:28], tokenizer.mask_id, tokenizer.sep_id]
    assert extended.tokenizer.encode(text) == tokenizer.encode(text)
    before, after = logits_of(model, row), logits_of(extended, row)
    np.testing.assert_array_equal(after[:, kept], before[:, kept])
    means = [before[:, word.ids].mean(axis=1) for word in words]
    np.testing.assert_allclose(after[:, ids], np.transpose(means), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("disentangled", [False, True])
def test_a_generator_gets_the_rows_too(disentangled, tmp_path):
    pieces = ["boat", *"abcdef", *(f"##{each}" for each in "abcdef")]
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt", pieces))
    config = small_model_config(tokenizer.vocab_size, family="electra", embedding_size=24)
    generator = GeneratorSettings(disentangles_embeddings=disentangled, hidden_fraction=0.5)
    model = make_model(
        config,
        tokenizer,
        ReplacedTokenModel(config, ExecutionPlan(), generator),
        generator=vars(generator),
    )
    save_model(tmp_path / "old", config, tokenizer, model.params, model.settings)
    old = read_model(tmp_path / "old")  # With the tables that each model reads.
    words, _ = given_words(tokenizer, ["abba", "face"], {})
    extended = extend_vocabulary(old, words).model
    new_config = config_from_settings(extended.settings)
    save_model(tmp_path / "new", new_config, extended.tokenizer, extended.params, extended.settings)
    new = read_model(tmp_path / "new")
    ids = [extended.tokenizer.token_to_id(word.piece) for word in words]
    for before, after in ((old, new), (generator_of(old), generator_of(new))):
        tables = [
            tree.params["encoder"]["embeddings"]["token_embedding"] for tree in (before, after)
        ]
        table, new_table = (np.asarray(each["embedding"]) for each in tables)
        means = [table[word.ids].mean(axis=0) for word in words]
        np.testing.assert_allclose(new_table[ids], means, rtol=1e-5, atol=1e-6)
    before, after = (np.asarray(each.params["generator"]["mlm"]["bias"]) for each in (old, new))
    means = [before[word.ids].mean() for word in words]
    np.testing.assert_allclose(after[ids], means, rtol=1e-5, atol=1e-6)
    row = [tokenizer.cls_id, *tokenizer.encode("the boat"), tokenizer.mask_id, tokenizer.sep_id]
    size = tokenizer.vocab_size
    expected = logits_of(generator_of(old), row)
    np.testing.assert_array_equal(logits_of(generator_of(new), row)[:, :size], expected)
    probabilities = [
        bert_jax.load(tmp_path / name).replaced_tokens("the boat")[1] for name in ("old", "new")
    ]
    np.testing.assert_array_equal(*probabilities)


def test_a_module_whose_rows_may_be_tokens_or_not_is_an_error():
    config = small_model_config(100, hidden_size=128)
    with pytest.raises(ValueError, match="128 may be the padded vocabulary or a width"):
        token_tables(config, {}, {"own_head/kernel": np.zeros((128, 2))})
    assert token_tables(small_model_config(100), {}, {"own/bias": np.zeros(128)}) == ["own/bias"]


def test_weights_are_the_closest_point_of_the_simplex():
    rng = np.random.default_rng(0)
    scores = np.concatenate([rng.normal(0, 1, (20, 9)), [[3.0, 1.0, *[0.0] * 7]], np.ones((1, 9))])
    weights = sparsemax(scores)
    np.testing.assert_allclose(weights.sum(axis=1), 1)
    assert (weights >= 0).all() and (weights == 0).any()
    np.testing.assert_allclose(weights[-2:], [[1, *[0] * 8], [1 / 9] * 9])
    for row, found in zip(scores, weights, strict=True):  # The optimum by its conditions:
        thresholds = (row - found)[found > 0]  # all weights above 0 are a constant below scores,
        np.testing.assert_allclose(thresholds, thresholds[0])
        assert (row[found == 0] <= thresholds[0] + 1e-12).all()  # and no other score exceeds it.


def test_a_vocabulary_in_another_order_gives_the_same_outputs(tmp_path):
    pieces = ["boat", *"abcdef", *(f"##{each}" for each in "abcdef")]
    old = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt", pieces))
    new = load_tokenizer(write_vocabulary(tmp_path / "other.txt", pieces[::-1], pad_id=3))
    model = make_model(small_model_config(old.vocab_size), old)
    vectors = np.ones((new.vocab_size, 1))
    replacement = replace_vocabulary(model, new, vectors)
    assert replacement.num_shared == new.vocab_size
    order = [old.token_to_id(new.id_to_token(index)) for index in range(new.vocab_size)]
    rows = [
        [each.cls_id, *each.encode("boat badc."), each.mask_id, each.sep_id] for each in (old, new)
    ]
    assert rows[0] != rows[1]
    expected = logits_of(model, rows[0])[:, order]
    np.testing.assert_allclose(
        logits_of(replacement.model, rows[1]), expected, rtol=1e-5, atol=1e-5
    )


def test_rows_of_other_tokens_are_means_of_shared_ones(tmp_path):
    old = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt", [*"abcd", *"xy", "##y", "##z"]))
    new = load_tokenizer(write_vocabulary(tmp_path / "other.txt", ["new", *"dcb", "xyz", "q", "e"]))
    model = make_model(small_model_config(old.vocab_size + 4), old)
    vectors = np.zeros((new.vocab_size, 2))
    angles = {"b": 0.0, "c": 0.4, "d": 2.0, "new": 0.1, "e": 2.0}
    for token, angle in angles.items():
        vectors[new.token_to_id(token)] = np.cos(angle), np.sin(angle)
    replacement = replace_vocabulary(model, new, vectors)
    assert replacement.num_shared == 5 + 3 + 3  # Special tokens, ".", "##s" and "##ing", and "dcb".
    counts = replacement.num_similar, replacement.num_pieces, replacement.num_mean
    assert counts == (2, 1, 1)
    config = config_from_settings(replacement.model.settings)
    assert config.vocab_size == new.vocab_size
    before, after = (
        flax.traverse_util.flatten_dict(each.params, sep="/") for each in (model, replacement.model)
    )
    for path in (TABLE, BIAS):
        table, found = before[path], after[path]
        b, c, d = (table[old.token_to_id(token)] for token in "bcd")
        # Two scores s and t have the weights (1 + s - t) / 2 and (1 + t - s) / 2.
        weight = (1 + np.cos(0.1) - np.cos(0.3)) / 2
        expected = weight * b + (1 - weight) * c
        np.testing.assert_allclose(found[new.token_to_id("new")], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[new.token_to_id("e")], d, rtol=1e-5, atol=1e-6)
        pieces = table[[old.token_to_id(token) for token in ("x", "##y", "##z")]]
        np.testing.assert_allclose(
            found[new.token_to_id("xyz")], pieces.mean(axis=0), rtol=1e-5, atol=1e-6
        )
        names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "##s", "##ing", *"dcb"]
        shared = table[[old.token_to_id(name) for name in names]]
        np.testing.assert_allclose(
            found[new.token_to_id("q")], shared.mean(axis=0), rtol=1e-5, atol=1e-6
        )
        for name in names:
            np.testing.assert_array_equal(
                found[new.token_to_id(name)], table[old.token_to_id(name)]
            )


def test_ids_in_the_model_config_follow_the_vocabulary(tmp_path):
    old = write_tokenizer("bpe", tmp_path / "old")
    model = make_model(small_longformer_config(old.vocab_size, sep_id=old.sep_id), old)
    new = with_layout(load_tokenizer(write_vocabulary(tmp_path / "v.txt")), old.layout)
    replaced = replace_vocabulary(model, new, np.ones((new.vocab_size, 1))).model
    assert config_from_settings(replaced.settings).sep_id == new.sep_id != old.sep_id


def test_a_vocabulary_that_joins_texts_in_another_way_than_the_model_is_an_error(tmp_path):
    old = write_tokenizer("bpe", tmp_path / "old")
    model = make_model(small_longformer_config(old.vocab_size, sep_id=old.sep_id), old)
    new = load_tokenizer(write_vocabulary(tmp_path / "v.txt"))
    with pytest.raises(ValueError, match="longformer expects 2 separators"):
        replace_vocabulary(model, new, np.ones((new.vocab_size, 1)))


def test_vocabularies_that_share_no_frequent_token_are_an_error(tmp_path):
    old = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt", [*"abcd"]))
    new = load_tokenizer(write_vocabulary(tmp_path / "other.txt", [*"xyz"]))
    vectors = np.zeros((new.vocab_size, 1))
    vectors[-3:] = 1
    with pytest.raises(ValueError, match="share no token that is frequent in the text"):
        replace_vocabulary(make_model(small_model_config(old.vocab_size), old), new, vectors)
