"""Pseudo-log-likelihoods of texts, against the model applied to one masked copy at a time."""

import json

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

import bert_jax
from bert_jax.checkpoints.parameters import model_settings
from bert_jax.inference import pretrained_model
from bert_jax.inference.pretrained_model import PretrainedModel
from bert_jax.objectives.masked_lm import PretrainingModel
from bert_jax.predict import predict
from bert_jax.tasks.pseudo_likelihood import masked_copies, tokenize
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import train_bpe
from tests.helpers.models import batch_of_row, example_batch, small_model_config

TEXTS = ("the river", "zyx the riversing of villages", "a", "stone " * 20)
PAIRS = [("the king", "king the the"), ("of the villagesing zyx", "zyx"), ("a river", "the river")]


@pytest.fixture(scope="module")
def model(corpus):
    tokenizer = load_tokenizer(corpus)
    config = small_model_config(tokenizer.vocab_size, max_position_embeddings=40)
    module = PretrainingModel(config)
    params = jax.jit(module.init)(jax.random.key(0), example_batch())["params"]
    return PretrainedModel(config, tokenizer, params, model_settings(config, params))


def score_by_hand(model, text, mask_rest_of_word):
    """Returns the pieces of a text, and their log probabilities in float64."""
    tokenizer, module = model.tokenizer, PretrainingModel(model.config)
    ids = [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]
    pieces = [tokenizer.id_to_token(token) for token in ids]
    apply, values = jax.jit(module.apply), []
    for position in range(1, len(ids) - 1):
        masked = list(ids)
        masked[position] = tokenizer.mask_id
        if mask_rest_of_word:
            for after in range(position + 1, len(ids) - 1):
                if not pieces[after].startswith("##"):
                    break
                masked[after] = tokenizer.mask_id
        batch = batch_of_row(np.array([masked])) | {
            "target_positions": np.array([[position]]),
            "pooled_positions": np.array([[0]]),
        }
        logits, _ = apply({"params": model.params}, batch)
        logits = np.asarray(logits[0, 0], np.float64)
        values.append(log_softmax(logits)[ids[position]])
    return pieces[1:-1], values


@pytest.mark.parametrize("mask_rest_of_word", [False, True])
@pytest.mark.slow
def test_scores_equal_the_model_applied_to_each_copy(mask_rest_of_word, model):
    scores = model.score(TEXTS, mask_rest_of_word)
    assert scores[1].tokens[2:5] == ["river", "##s", "##ing"]  # A word of several pieces.
    for text, score in zip(TEXTS, scores, strict=True):
        pieces, expected = score_by_hand(model, text, mask_rest_of_word)
        assert score.tokens == pieces
        np.testing.assert_allclose(score.log_probabilities, expected, atol=1e-5)
        assert score.log_likelihood == pytest.approx(np.sum(expected), abs=1e-4)
        assert score.perplexity == pytest.approx(np.exp(-np.mean(expected)), rel=1e-5)


@pytest.mark.slow
def test_a_single_text_has_one_score(model):
    single, (in_list,) = model.score("the river"), model.score(["the river"])
    assert single.log_likelihood == in_list.log_likelihood
    assert model.score([]) == []


def test_texts_with_unknown_words_are_counted(model):
    with pytest.warns(UserWarning, match="1 of 2 texts have unknown words, scored as \\[UNK\\]"):
        _, unknown = model.score(["the river", "zyx"])
    assert unknown.tokens == ["[UNK]"]


@pytest.mark.slow
def test_long_texts_are_masked_a_few_copies_at_a_time(model, monkeypatch):
    expected = model.score(TEXTS)
    monkeypatch.setattr(pretrained_model, "TOKENS_PER_BLOCK", 50)
    for found, score in zip(model.score(TEXTS), expected, strict=True):
        np.testing.assert_allclose(found.log_probabilities, score.log_probabilities, atol=1e-5)


def test_punctuation_is_a_word_of_its_own_in_byte_level_bpe(tmp_path):
    tokenizer = train_bpe(tmp_path, "the river. the river, and the river " * 20)
    (tokens,) = tokenize(["the rivers."], tokenizer, max_length=16)
    pieces = [tokenizer.id_to_token(token) for token in tokens.ids]
    assert pieces == ["the", "Ġriver", "s", "."] and tokens.words.tolist() == [0, 1, 1, 2]
    masked = [
        np.flatnonzero(copy.sequences[0] == tokenizer.mask_id).tolist()
        for copy in masked_copies(tokens, tokenizer, mask_rest_of_word=True)
    ]
    assert masked == [[1], [2, 3], [3], [4]]


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        ("", ValueError, "the text '' has no tokens"),
        (["the", "  "], ValueError, "the text '  ' has no tokens"),
        ("stone " * 39, ValueError, "text has 41 tokens, expected at most 40"),
        (["the", 3], TypeError, "texts must be a string or a list of strings, got 3 at index 1"),
    ],
)
def test_bad_texts_are_errors(texts, error, message, model):
    with pytest.raises(error, match=message):
        model.score(texts)


def test_model_without_a_masked_lm_head_scores_nothing(model):
    params = {"encoder": model.params["encoder"]}
    bare = PretrainedModel(model.config, model.tokenizer, params)
    with pytest.raises(ValueError, match="no masked-LM head, so it cannot score texts"):
        bare.score("the")


@pytest.mark.parametrize("options", [{}, {"mask_rest_of_word": True}])
def test_minimal_pairs_from_a_file_have_the_scores_of_python(options, model, tmp_path):
    model.save(tmp_path / "model")
    path = tmp_path / "pairs.jsonl"
    with open(path, "w") as stream:
        for number, (good, bad) in enumerate(PAIRS):
            pair = {"sentence_good": good, "sentence_bad": bad, "UID": "order", "pairID": number}
            print(json.dumps(pair), file=stream)
    scores = predict(tmp_path / "model", path, tmp_path / "out.jsonl", options)["out.jsonl"]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    loaded = bert_jax.load(tmp_path / "model")
    num_correct = 0
    for number, (line, pair) in enumerate(zip(lines, PAIRS, strict=True)):
        good, bad = loaded.score(pair, **options)
        np.testing.assert_allclose(
            line["log_likelihoods"], [good.log_likelihood, bad.log_likelihood], atol=1e-4
        )
        np.testing.assert_allclose(
            line["perplexities"], [good.perplexity, bad.perplexity], rtol=1e-4
        )
        is_correct = good.log_likelihood > bad.log_likelihood
        assert line["prediction"] == ("sentence_good" if is_correct else "sentence_bad")
        assert (line["id"], line["UID"], line["pairID"]) == (str(number), "order", str(number))
        num_correct += is_correct
    assert scores == {"accuracy": num_correct / 3, "examples": 3}


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ({"sentence_good": "the"}, {}, "line 1: no column 'sentence_bad'"),
        ({"sentence_good": "the", "sentence_bad": " "}, {}, "line 1: sentence_bad is empty"),
        (
            {"sentence_good": "the", "sentence_bad": "stone " * 39},
            {},
            "line 1: text has 41 tokens, expected at most 40",
        ),
        ({"sentence_good": "the", "sentence_bad": "a"}, {"top_k": 3}, "a head for masked_lm"),
        ({"good": "the", "bad": "a"}, {"text": "good"}, "line 1: no column 'sentence_bad'"),
    ],
)
def test_bad_pairs_are_errors(line, options, message, model, tmp_path):
    model.save(tmp_path / "model")
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=message):
        predict(tmp_path / "model", tmp_path / "in.jsonl", tmp_path / "out.jsonl", options)


@pytest.mark.slow
def test_scores_of_several_devices_equal_those_of_one(model, tmp_path):
    model.save(tmp_path / "model")
    rows = [{"good": good, "bad": bad} for good, bad in PAIRS]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, options = [], {"text": "good", "text_pair": "bad"}
    for count in (1, 2):
        target = tmp_path / f"{count}.jsonl"
        predict(tmp_path / "model", tmp_path / "in.jsonl", target, options, num_devices=count)
        lines = map(json.loads, target.read_text().splitlines())
        found.append([line["log_likelihoods"] for line in lines])
    np.testing.assert_allclose(*found, atol=1e-4)
