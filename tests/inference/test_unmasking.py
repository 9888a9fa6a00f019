"""Text is generated step by step: samples of the model's distribution, and given text stays."""

import copy
import dataclasses
import types

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from scipy import stats

from bert_corpus.vocabulary import train_sentencepiece
from bert_jax.data.features import ModelInput
from bert_jax.inference import unmasking
from bert_jax.inference.masked_text import fill_masks, masked_features
from bert_jax.inference.pretrained_model import PretrainedModel
from bert_jax.model.execution import ExecutionPlan
from bert_jax.objectives.masked_diffusion import MaskedDiffusion
from bert_jax.objectives.masked_lm import PretrainingModel
from bert_jax.tokenizers.tokenizer import load_tokenizer, tokenizer_from_bytes
from tests.helpers import grammar
from tests.helpers.corpora import WORDS, train_bpe, write_esm_vocabulary, write_vocabulary
from tests.helpers.models import example_batch, random_params, small_model_config

IDS = types.SimpleNamespace(special_ids=grammar.SPECIAL_IDS, mask_id=grammar.MASK_ID)
EXACT, EMPTY = grammar.ExactModel(), {}


def samples(
    prompt: list[int],
    count: int,
    steps: int | None,
    order: str,
    monkeypatch,
    model: nn.Module = EXACT,
    params: dict = EMPTY,
):
    """Returns sentences of the model, int32 `[count, words]`, generated in one batch."""
    monkeypatch.setattr(unmasking, "ROWS_PER_BATCH", count)
    tokens = np.array([grammar.CLS_ID, *prompt, grammar.SEP_ID])
    features = [ModelInput((tokens,), (len(tokens),))] * count
    generated = unmasking.unmask(
        model, params, features, grammar.LENGTH, IDS, steps, temperature=1.0, order=order, seed=0
    )
    words = np.tile(prompt, (count, 1))
    words[words == grammar.MASK_ID] = np.concatenate(generated)
    return words


def p_value(words: np.ndarray, given: dict[int, int]) -> float:
    """Returns that of a chi-square test against the sentences with the `given` words; 0 if others.

    `given` maps places to words.
    """
    ids, probabilities = grammar.sentences()
    fits = np.ones(len(ids), bool)
    for place, word in given.items():
        fits &= ids[:, place] == word
    ids, probabilities = ids[fits], probabilities[fits]
    matches = (words[:, None] == ids).all(axis=-1)
    if not matches.any(axis=1).all():
        return 0.0
    expected = len(words) * probabilities / probabilities.sum()
    return stats.chisquare(matches.sum(axis=0), expected).pvalue


MASK = grammar.MASK_ID


@pytest.mark.parametrize(
    "prompt", [[MASK] * 4, [MASK, 9, MASK, MASK], [MASK, MASK, 12, 13]], ids=str
)
def test_one_token_at_a_time_samples_the_exact_distribution(prompt, monkeypatch):
    """Of whole sentences, and of those that agree with what is given."""
    given = {place: word for place, word in enumerate(prompt) if word != MASK}
    words = samples(prompt, 4096, None, "random", monkeypatch)
    assert p_value(words, given) > 0.01


def test_tokens_of_one_step_are_sampled_independently(monkeypatch):
    words = samples([MASK] * 4, 4096, 1, "random", monkeypatch)
    assert p_value(words, {}) < 1e-9
    for place in range(4):  # But each has its own distribution.
        ids, probabilities = grammar.sentences()
        expected = np.bincount(ids[:, place], probabilities, minlength=grammar.VOCAB)
        counts = np.bincount(words[:, place], minlength=grammar.VOCAB)
        used = expected > 0
        assert counts[~used].sum() == 0
        assert stats.chisquare(counts[used], 4096 * expected[used]).pvalue > 0.01


@pytest.mark.parametrize("order", unmasking.ORDERS)
def test_every_order_generates_sentences_of_the_grammar(order, monkeypatch):
    words = samples([MASK] * 4, 256, None, order, monkeypatch)
    possible = {tuple(ids) for ids in grammar.sentences()[0].tolist()}
    assert {tuple(each) for each in words.tolist()} <= possible


def test_confidence_reveals_the_most_certain_first_and_mask_predict_masks_the_least_certain_again():
    logits = np.array([[[0.6, 0.4], [0.1, 0.9], [0.3, 0.7]], [[0.5, 0.5]] * 3], np.float32)
    logits = np.pad(np.log(logits), ((0, 0), (0, 0), (0, 1)), constant_values=-1e9)
    slots = unmasking.first_slots(np.array([[2, 2, 2], [2, 1, 1]]), mask_id=2)
    keys = jax.random.split(jax.random.key(0), 2)

    def step(logits, slots, order, num_masked):
        return unmasking.unmask_step(keys, logits, slots, np.array(num_masked), order, 0.0, 2)

    for order in ("confidence", "mask_predict"):
        first = step(logits, slots, order, [2, 0])
        assert first.tokens.tolist() == [[2, 1, 2], [0, 1, 1]]
        second = step(logits[..., ::-1][..., [1, 2, 0]], first, order, [1, 0])
        # The same logits, of which the second slot's are no longer read.
        assert second.tokens[0, 1] == 1
    # Now the others are certain, and what was revealed first is the least certain.
    certain = np.tile(np.array([-0.01, -4.6, -1e9], np.float32), (2, 3, 1))
    assert step(certain, first, "mask_predict", [1, 0]).tokens[0].tolist() == [0, 2, 0]
    first = step(logits, slots, "confidence", [2, 0])
    assert step(certain, first, "confidence", [1, 0]).tokens[0].tolist() == [2, 1, 0]


def test_tokens_are_spread_over_the_steps():
    num_masks = np.array([0, 3, 10, 11])
    left = [unmasking.num_masked_after(step, 4, num_masks).tolist() for step in range(4)]
    assert left == [[0, 2, 7, 8], [0, 1, 5, 5], [0, 0, 2, 2], [0, 0, 0, 0]]
    assert unmasking.num_masked_after(0, None, num_masks).tolist() == [0, 2, 9, 10]


@pytest.mark.exhaustive
def test_a_trained_model_generates_the_grammar(monkeypatch):
    """Its bound is within 0.05 nats per token of the entropy; its samples pass a chi-square test.

    It takes a minute of CPU time.
    """
    config = small_model_config(
        grammar.VOCAB, max_position_embeddings=grammar.LENGTH, dropout_rate=0.0
    )
    objective = MaskedDiffusion(grammar.SPECIAL_IDS, MASK)
    model = objective.make_model(config, ExecutionPlan())
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, 1000))

    def loss(params, batch):
        total, count = objective.sums(model, params, batch)["diffusion_loss"]
        return total / count

    @jax.jit
    def update(params, state, rows):
        batch = objective.prepare(rows, jax.random.key(0))
        updates, state = optimizer.update(jax.grad(loss)(params, batch), state)
        return optax.apply_updates(params, updates), state

    batch = objective.prepare(grammar.rows_of(grammar.draw(8, seed=0)), jax.random.key(0))
    params = random_params(model, batch, std=0.1)
    state = optimizer.init(params)
    for step in range(1000):
        positions = np.arange(256, dtype=np.uint32) + 256 * step
        rows = grammar.rows_of(grammar.draw(256, seed=step))
        params, state = update(
            params, state, rows | {"row_ids": positions, "stream_positions": positions}
        )
    rows = grammar.rows_of(grammar.draw(20_000, seed=0))
    bound = loss(params, objective.prepare(rows, jax.random.key(1)))
    assert -0.01 < bound - grammar.entropy() / grammar.NUM_WORDS < 0.05
    words = samples([MASK] * 4, 1024, None, "random", monkeypatch, model, params)
    is_sentence = (words[:, None] == grammar.sentences()[0]).all(axis=-1).any(axis=1)
    assert is_sentence.mean() > 0.99
    assert p_value(words[is_sentence], {}) > 0.01


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns a model with random weights, for which texts of any words are as good."""
    path = write_vocabulary(tmp_path_factory.mktemp("model") / "vocab.txt")
    tokenizer = load_tokenizer(path)
    config = small_model_config(tokenizer.vocab_size, max_position_embeddings=40)
    params = random_params(PretrainingModel(config, False), example_batch())
    return PretrainedModel(config, tokenizer, jax.device_put(params))


PROMPTS = ["the [MASK] of", "[MASK] the River,  and [MASK][MASK] people.", "a  small"]


@pytest.mark.parametrize("order", unmasking.ORDERS)
def test_given_text_stays(model, order):
    for prompt, text in zip(PROMPTS, model.generate(PROMPTS, 3, order=order), strict=True):
        assert "[MASK]" not in text
        at = 0
        for part in prompt.split("[MASK]"):
            at = text.index(part.strip(), at) + len(part.strip())


def test_result_depends_on_the_seed_and_the_index_alone(model):
    first = model.generate(PROMPTS, 3, steps=2, seed=1)
    assert model.generate(PROMPTS, 3, steps=2, seed=1) == first
    others = [PROMPTS[0], "[MASK]" * 9, PROMPTS[0]]  # More masks than eight.
    same = model.generate(others, 3, steps=2, seed=1)
    assert same[0] == first[0] and same[2] != first[0]
    assert model.generate(PROMPTS, 3, steps=2, seed=2) != first
    assert model.generate([], 3) == []


def test_one_mask_is_filled_as_by_fill_mask(model):
    texts = ["the river of [MASK] people", "[MASK]", "a [MASK]"]
    special = {model.tokenizer.id_to_token(index) for index in model.tokenizer.special_ids}
    for order in unmasking.ORDERS:
        generated = model.generate(texts, 0, temperature=0, order=order)
        for text, fills in zip(generated, model.fill_mask(texts, top_k=20), strict=True):
            assert text == next(fill.text for fill in fills if fill.token not in special)


@pytest.mark.slow
def test_steps_are_seen_and_compiled_once(model):
    seen = []
    texts = model.generate(["the [MASK]", "a", "of"], 7, steps=3, on_step=seen.append)
    assert [text.count("[MASK]") for texts in seen for text in texts] == [5, 4, 4, 2, 2, 2, 0, 0, 0]
    assert seen[-1] == texts
    compiled = unmasking.unmask_rows._cache_size()
    for number in range(1, 4):
        texts = ["the [MASK] " + "river " * number] * 3
        model.generate(texts, 7 - number, steps=number, temperature=number, seed=number)
    assert unmasking.unmask_rows._cache_size() == compiled
    assert isinstance(model.generate("a", 1, on_step=seen.append), str)
    assert seen[-1] == model.generate("a", 1)
    assert model.generate("a", 3, steps=1000) == model.generate("a", 3)


def write_tokenizers(directory):
    """Returns a tokenizer of each kind, and a text that it writes back as it is."""
    text = "the river, and the rivers. a boat"
    (directory / "text.txt").write_text((text + "\n") * 9)
    words = [*WORDS, "boat", ",", "北", "京"]
    word_piece = load_tokenizer(write_vocabulary(directory / "vocab.txt", words))
    content = train_sentencepiece(str(directory / "text.txt"), 40, True)
    write_esm_vocabulary(directory / "esm")
    return [
        (word_piece, text),
        (word_piece, "北京北北京"),
        (train_bpe(directory, f"{text}, é.\n" * 9), "the river, é. and the rivers"),
        (tokenizer_from_bytes("spiece.model", content), text),
        (load_tokenizer(directory / "esm"), "MKTAYIAKQR"),
    ]


def test_generated_tokens_are_joined_as_the_text_would_be(tmp_path):
    """Any run of words of a text, as masks, is restored."""
    for tokenizer, text in write_tokenizers(tmp_path):
        ids, offsets = tokenizer.encode_with_offsets([text])[0]
        for start in range(len(ids)):
            for end in range(start + 1, len(ids) + 1):
                first, last = offsets[start][0], offsets[end - 1][1]
                prompt = text[:first] + tokenizer.mask_token * (end - start) + text[last:]
                (feature,) = masked_features([prompt], tokenizer, 64)
                # Otherwise it was split within a word, or the last token is only a space.
                if len(feature) == len(ids) + 2 and not text[last - 1].isspace():
                    result = fill_masks(prompt, feature, ids[start:end], tokenizer)
                    assert result == text, (prompt, type(tokenizer))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda m: m.generate("the", 0),
            r"the prompt at index 0 has no \[MASK\] and length is 0: there is nothing to generate",
        ),
        (
            lambda m: m.generate(["the", "the river"], 37),
            "the prompt at index 1 has 4 tokens, special tokens included, and length=37 adds 37: "
            "the model has 40 positions: reduce `length` or shorten the prompt",
        ),
        (lambda m: m.generate("the", 41), r"length must be a whole number in \[0, 40\], got 41"),
        (lambda m: m.generate("the", 4, steps=0), "steps must be a whole number .* got 0"),
        (lambda m: m.generate("the", 4, seed=-1), "seed must be a whole number .* got -1"),
        (lambda m: m.generate("the", 4, temperature=-0.5), "temperature must be .* got -0.5"),
        (lambda m: m.generate("the", 4, order="left"), "order must be one of .* got 'left'"),
        (
            lambda m: without(m, "mlm").generate("the", 4),
            "no masked-LM head, so it cannot generate",
        ),
        (
            lambda m: without_mask_token(m).generate("the", 4),
            "no mask token, so it cannot generate",
        ),
        (lambda m: causal(m).generate("the", 4), "`generate` fills in masks, which needs a bidi"),
    ],
)
def test_invalid_request_is_a_clear_error(model, ask, message):
    with pytest.raises(ValueError, match=message):
        ask(model)


def without(model, part):
    params = {name: value for name, value in model.params.items() if name != part}
    return dataclasses.replace(model, params=params)


def without_mask_token(model):
    tokenizer = copy.copy(model.tokenizer)
    tokenizer.mask_id = tokenizer.mask_token = None
    return dataclasses.replace(model, tokenizer=tokenizer)


def causal(model):
    return dataclasses.replace(model, config=dataclasses.replace(model.config, causal=True))
