"""Which tokens are selected and how they are corrupted, as a function of key and row alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.data.masking import (
    NGRAM_LENGTHS,
    SPAN_LENGTHS,
    UNITS,
    Masking,
    choose_spans,
    mask_tokens,
    row_keys,
)

SPECIAL = (0, 1, 2, 3, 4)
MASK = 4
VOCAB = 1000
LENGTH = 128
MASKING = Masking(
    special_ids=SPECIAL,
    mask_id=MASK,
    vocab_size=VOCAB,
    word_start=np.arange(VOCAB) % 3 != 0,  # Every third piece of the vocabulary continues a word.
    max_predictions=20,
)


def rows(batch: int, seed: int = 0, fill: int = LENGTH):
    """Rows of two sequences, [CLS] ... [SEP] ... [SEP] each, then padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(10, VOCAB, (batch, LENGTH)).astype(np.int32)
    half = fill // 2
    sequence_ids = np.zeros((batch, LENGTH), np.int32)
    for number, start in ((1, 0), (2, half)):
        sequence_ids[:, start : start + half] = number
        tokens[:, start] = 2
        tokens[:, start + half // 2] = tokens[:, start + half - 1] = 3
    tokens[:, fill:] = 0
    return tokens, sequence_ids


def masker(**changes):
    """Returns jitted (row ids, tokens, sequence ids) -> what `mask_tokens` returns."""
    masking = dataclasses.replace(MASKING, **changes)

    @jax.jit
    def run(row_ids, tokens, sequence_ids):
        keys = row_keys(jax.random.key(0), row_ids, jnp.zeros_like(row_ids))
        return mask_tokens(keys, tokens, sequence_ids, masking)

    return lambda *args: jax.device_get(run(*args))


MASKERS = {unit: masker(unit=unit) for unit in UNITS}
ROWS = 1000


@functools.cache
def masked(unit: str, fill: int = LENGTH):
    """Returns the tokens of `ROWS` rows before, and what masking makes of them."""
    tokens, sequence_ids = rows(ROWS, fill=fill)
    return tokens, MASKERS[unit](np.arange(ROWS), tokens, sequence_ids)


@pytest.mark.parametrize(
    ("unit", "fractions"),
    [*((unit, (0.8, 0.1, 0.1)) for unit in UNITS), ("token", (0.25, 0.0, 0.75))],
)
@pytest.mark.slow
def test_rates_are_15_percent_and_the_three_fractions_within_3_sigma(unit, fractions):
    if fractions == (0.8, 0.1, 0.1):
        _, out = masked(unit)
    else:
        names = ("mask_fraction", "keep_fraction", "random_fraction")
        run = masker(unit=unit, **dict(zip(names, fractions, strict=True)))
        out = run(np.arange(ROWS), *rows(ROWS))
    weights = out["target_weights"] > 0
    targets = out["targets"][weights]
    replaced = np.take_along_axis(out["tokens"], out["target_positions"], axis=1)[weights]

    # round(0.15 * 128) = 19 predictions in every row; slightly fewer with whole words, when none
    # may fit the rest of the budget.
    chosen = weights.sum(axis=1)
    if unit == "whole_word":
        assert chosen.max() == 19 and chosen.mean() > 18.8
    else:
        assert (chosen == 19).all()

    total = len(targets)
    is_mask = replaced == MASK
    kept = replaced == targets
    # A random token equals the original, or is [MASK], with probability 1 / VOCAB each.
    to_mask, keep, random = fractions
    expected = {
        "mask": (is_mask, to_mask + random / VOCAB),
        "keep": (kept, keep + random / VOCAB),
        "random": (~is_mask & ~kept, random * (1 - 2 / VOCAB)),
    }
    # A span is corrupted as a whole: the sample size is the number of spans.
    sample = total if unit != "span" else total / 4.5
    for name, (is_so_corrupted, rate) in expected.items():
        sigma = np.sqrt(rate * (1 - rate) / sample)
        assert abs(is_so_corrupted.mean() - rate) <= 3 * sigma, name


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("fill", [pytest.param(LENGTH, marks=pytest.mark.slow), 20])
def test_special_and_padding_tokens_are_never_selected(unit, fill):
    tokens, out = masked(unit, fill)
    weights = out["target_weights"] > 0
    assert weights.any(axis=1).all()
    assert not np.isin(out["targets"][weights], SPECIAL).any()
    untouchable = np.isin(tokens, SPECIAL)
    np.testing.assert_array_equal(out["tokens"][untouchable], tokens[untouchable])
    # 15 % of the real tokens of the row, at least one.
    assert weights.sum(axis=1).max() <= max(1, round(0.15 * fill))


@pytest.mark.parametrize("unit", UNITS)
def test_positions_are_distinct_and_targets_are_the_original_tokens(unit):
    tokens, out = masked(unit)
    for row in range(200):
        positions = out["target_positions"][row][out["target_weights"][row] > 0]
        assert len(set(positions.tolist())) == len(positions)
        np.testing.assert_array_equal(out["targets"][row][: len(positions)], tokens[row, positions])
        untouched = np.setdiff1d(np.arange(LENGTH), positions)
        np.testing.assert_array_equal(out["tokens"][row, untouched], tokens[row, untouched])


def test_every_position_is_selected_equally_often():
    tokens, out = masked("token")
    counts = np.bincount(out["target_positions"][out["target_weights"] > 0], minlength=LENGTH)
    maskable = ~np.isin(tokens[0], SPECIAL)
    rate = 19 / maskable.sum()
    sigma = np.sqrt(ROWS * rate * (1 - rate))
    assert (counts[~maskable] == 0).all()
    assert abs(counts[maskable] - ROWS * rate).max() < 4.5 * sigma  # Maximum over 122 positions.


def test_whole_words_are_selected_whole():
    tokens, out = masked("whole_word")
    maskable = ~np.isin(tokens, SPECIAL)
    continues = (tokens % 3 == 0) & maskable
    continues[:, 1:] &= maskable[:, :-1]  # A word does not reach across [CLS] or [SEP].
    for row in range(ROWS):
        chosen = np.zeros(LENGTH, bool)
        chosen[out["target_positions"][row][out["target_weights"][row] > 0]] = True
        follows = continues[row, 1:]
        np.testing.assert_array_equal(chosen[1:][follows], chosen[:-1][follows])


def mask_spans_of_one_token_words(tokens, **changes):
    run = masker(unit="span", word_start=np.ones(VOCAB, bool), **changes)
    return run(np.arange(ROWS), tokens, np.ones_like(tokens))


@pytest.mark.slow
def test_spans_have_the_lengths_of_a_clipped_geometric_distribution():
    # Spans stay within a sequence, so take rows of one sequence of one-token words.
    tokens = np.full((ROWS, LENGTH), 50, np.int32)
    # A budget of 10 never cuts the first span.
    out = mask_spans_of_one_token_words(tokens, rate=0.08)
    chosen = np.zeros((ROWS, LENGTH + 2), int)
    for row in range(ROWS):
        chosen[row, 1 + out["target_positions"][row][out["target_weights"][row] > 0]] = 1
    assert (chosen.sum(axis=1) == 10).all()
    edges = np.diff(chosen, axis=1)
    lengths = np.concatenate(
        [np.flatnonzero(row == -1) - np.flatnonzero(row == 1) for row in edges]
    )
    # Tokens selected one by one would nearly all be isolated.
    assert lengths.mean() > 2.2 and (lengths > 1).mean() > 0.5


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        (NGRAM_LENGTHS, np.array([6, 3, 2]) / 11),  # 1/n, up to 3.
        (SPAN_LENGTHS, 0.2 * 0.8 ** np.arange(10) / (1 - 0.8**10)),  # Geometric, up to 10.
    ],
)
def test_spans_have_the_lengths_of_the_paper(lengths, expected):
    word, draws = jnp.arange(LENGTH), 4000

    def one_span(key):
        return choose_spans(key, word >= 0, word, 20, 1, lengths)[0]

    chosen = np.array(jax.jit(jax.vmap(one_span))(jax.random.split(jax.random.key(0), draws)))
    is_whole = chosen.argmax(axis=1) <= LENGTH - len(lengths)  # Not cut by the end of the row.
    counts = np.bincount(chosen[is_whole].sum(axis=1), minlength=len(lengths) + 1)[1:]
    sigma = np.sqrt(expected * (1 - expected) / is_whole.sum())
    assert (abs(counts / is_whole.sum() - expected) < 4 * sigma).all()


def test_spans_do_not_cross_special_tokens():
    # Segments of one word each, so that spans of several words would cross.
    tokens = np.tile(np.array([50, SPECIAL[3]], np.int32), (ROWS, LENGTH // 2))
    fractions = {"mask_fraction": 0.5, "keep_fraction": 0.5, "random_fraction": 0.0}
    out = mask_spans_of_one_token_words(tokens, **fractions)
    # All tokens of a span become [MASK] or stay: neighbors of different spans do so independently.
    rows_, slots = np.nonzero(out["target_weights"])
    positions = out["target_positions"][rows_, slots]
    assert (positions % 2 == 0).all()
    is_masked = out["tokens"][rows_, positions] != 50
    near = (np.diff(positions) == 2) & (np.diff(rows_) == 0)
    assert abs(np.mean(is_masked[1:][near] == is_masked[:-1][near]) - 0.5) < 1.5 / near.sum() ** 0.5


def test_spans_of_long_rows_are_drawn_some_at_a_time_until_the_budget_is_spent(monkeypatch):
    monkeypatch.setattr("bert_jax.data.masking.MAX_SCORES", 3 * LENGTH)
    tokens, sequence_ids = rows(50)
    out = masker(unit="span")(np.arange(50), tokens, sequence_ids)
    weights = out["target_weights"] > 0
    assert (weights.sum(axis=1) == 19).all()
    assert not np.isin(out["targets"][weights], SPECIAL).any()


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_memory_does_not_grow_with_the_square_of_the_length(unit):
    length = 8192
    many = dataclasses.replace(MASKING, unit=unit, rate=0.3, max_predictions=2458)
    row = jax.ShapeDtypeStruct((1, length), np.int32)
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    mask = jax.jit(lambda *args: mask_tokens(*args, many))
    memory = mask.lower(key, row, row).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 200 * length * 4


def test_masks_of_a_row_do_not_depend_on_its_index_in_the_batch():
    (tokens, in_order), (_, sequence_ids) = masked("token"), rows(ROWS)
    order = np.random.default_rng(1).permutation(ROWS)
    reordered = MASKERS["token"](order, tokens[order], sequence_ids[order])
    np.testing.assert_array_equal(in_order["tokens"][order], reordered["tokens"])


def test_masks_change_with_the_epoch_and_repeat_after_repeat_after():
    ids = jnp.arange(4)
    key = jax.random.key(0)

    def data(epoch, repeat_after):
        return np.asarray(jax.random.key_data(row_keys(key, ids, jnp.full(4, epoch), repeat_after)))

    assert (data(0, 0) != data(10, 0)).any(axis=1).all()
    np.testing.assert_array_equal(data(0, 10), data(10, 10))
    np.testing.assert_array_equal(data(3, 10), data(23, 10))
    assert (data(0, 10) != data(3, 10)).any(axis=1).all()


def test_unknown_unit_is_an_error():
    with pytest.raises(ValueError, match="'words': expected one of token"):
        dataclasses.replace(MASKING, unit="words")
