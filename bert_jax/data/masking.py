"""Selects and corrupts the tokens to predict: a pure function of key and rows, run on device.

As in Devlin et al. (2018), section 3.1, and the released `create_pretraining_data`, 15 %
of the tokens of a row are predicted; [CLS] and [SEP] count as tokens, but are never predicted. Of
the predicted ones, 80 % become [MASK], 10 % a random token.
Left to right (section 5.1), all tokens but the first of each sequence are predicted, none masked.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

UNITS = ("token", "whole_word", "span", "ngram")
# Relative frequencies of runs of 1, 2, ... words.
SPAN_LENGTHS = tuple(0.8**n for n in range(10))
NGRAM_LENGTHS = (1, 1 / 2, 1 / 3)
MAX_SCORES = 2**16  # Drawn at a time for the spans of a row; it decides which are masked.


@dataclasses.dataclass(frozen=True, eq=False)
class Masking:
    """How the rows of one training phase are masked.

    Attributes:
      special_ids: never masked, [UNK] included, which the released code does predict.
      mask_id: id of [MASK].
      vocab_size: random replacements are uniform over the vocabulary, as in the released code.
      word_start: bool `[vocab_size]`, True for pieces that begin a word; unused for "token".
      max_predictions: maximum number of masked positions per row, K below.
      rate: fraction of a row's tokens to predict.
      unit: "token"; "whole_word" (all pieces of a word or none, as in the released whole-word
        models); "span" (SpanBERT, Joshi et al., 2020, section 3.1: runs of words of geometric
        length, corrupted together); "ngram" (ALBERT, Lan et al., 2020, section 4.1: runs of n = 1
        to 3 words with probability proportional to 1 / n, each token corrupted on its own).
      repeat_after: number of epochs after which a row's masks repeat (static masking, the released
        `dupe_factor`); 0 draws new masks in every epoch.
      ngram_lengths: relative frequencies of n-grams of 1, 2, ... words, for "ngram".
      mask_fraction, keep_fraction, random_fraction: of the tokens to predict, those that become
        [MASK], stay the same, or become a random token; must sum to 1.
    """

    special_ids: tuple[int, ...]
    mask_id: int
    vocab_size: int
    word_start: np.ndarray
    max_predictions: int
    rate: float = 0.15
    unit: str = "token"
    repeat_after: int = 0
    mask_fraction: float = 0.8
    keep_fraction: float = 0.1
    random_fraction: float = 0.1
    ngram_lengths: tuple[float, ...] = NGRAM_LENGTHS

    def __post_init__(self):
        if self.unit not in UNITS:
            raise ValueError(f"masking.unit is {self.unit!r}: expected one of {', '.join(UNITS)}")
        fractions = self.mask_fraction, self.keep_fraction, self.random_fraction
        if not (min(fractions) >= 0 and abs(sum(fractions) - 1) <= 1e-6):  # Also if one is NaN.
            raise ValueError(
                "masking.mask_fraction, keep_fraction and random_fraction are "
                f"{', '.join(map(str, fractions))}: expected three numbers from 0 that sum to 1"
            )


def mask_tokens(
    keys: jax.Array, tokens: jax.Array, sequence_ids: jax.Array, masking: Masking
) -> dict[str, jax.Array]:
    """Selects and corrupts `round(rate * tokens in the row)` positions of each row (at least 1).

    `keys` come from `row_keys`; `tokens` and `sequence_ids` are int32 `[batch, length]`.

    Returns:
      Corrupted `tokens` int32 `[batch, length]`; `target_positions`, `targets` int32 `[batch, K]`;
      `target_weights` float32 `[batch, K]`, 1 for a prediction and 0 for an unused slot.
    """

    def mask_row(key, tokens, sequence_ids):
        choose_key, replace_key, random_key = jax.random.split(key, 3)
        maskable = (sequence_ids > 0) & ~jnp.isin(tokens, jnp.array(masking.special_ids))
        budget = jnp.round(masking.rate * jnp.sum(sequence_ids > 0)).astype(jnp.int32)
        budget = jnp.clip(budget, 1, masking.max_predictions)

        # Positions of one group are corrupted alike: all of a span, otherwise each on its own.
        group = jnp.arange(tokens.shape[0])
        if masking.unit == "token":
            # The first `budget` maskable positions in random order.
            order = jnp.where(maskable, jax.random.uniform(choose_key, maskable.shape), 2.0)
            chosen = maskable & (jnp.argsort(jnp.argsort(order)) < budget)
        else:
            starts = jnp.asarray(masking.word_start)[tokens] | ~maskable | jnp.roll(~maskable, 1)
            word = jnp.cumsum(starts) - 1
            if masking.unit == "whole_word":
                chosen = _choose_words(choose_key, maskable, word, budget)
            else:
                lengths = SPAN_LENGTHS if masking.unit == "span" else masking.ngram_lengths
                chosen, span = choose_spans(
                    choose_key, maskable, word, budget, masking.max_predictions, lengths
                )
                group = span if masking.unit == "span" else group

        is_prediction, positions = jax.lax.top_k(chosen.astype(jnp.int32), masking.max_predictions)
        draw = jax.random.uniform(replace_key, tokens.shape)[group]
        random_token = jax.random.randint(random_key, tokens.shape, 0, masking.vocab_size)
        is_corrupted = draw < masking.mask_fraction + masking.random_fraction
        corrupted = jnp.where(is_corrupted, random_token, tokens)
        corrupted = jnp.where(draw < masking.mask_fraction, masking.mask_id, corrupted)
        return {
            "tokens": jnp.where(chosen, corrupted, tokens),
            "target_positions": positions * is_prediction,
            "targets": tokens[positions] * is_prediction,
            "target_weights": is_prediction.astype(jnp.float32),
        }

    return jax.vmap(mask_row)(keys, tokens, sequence_ids)


def span_boundaries(
    target_positions: jax.Array, target_weights: jax.Array, length: int
) -> dict[str, jax.Array]:
    """Finds the tokens around the span of each target, a maximal run of masked positions.

    Takes what `mask_tokens` returns for rows of `length`. Returns int32 `[batch, K]`, with any
    values in unused slots: `left_positions` and `right_positions`, of the last token before the
    span and the first one after it; and `places`, 0 for the first token of the span.
    """

    def find(positions, weights):
        position = jnp.arange(length)
        is_masked = jnp.zeros(length).at[positions].max(weights) > 0
        left = jax.lax.cummax(jnp.where(is_masked, 0, position))
        right = jax.lax.cummin(jnp.where(is_masked, length - 1, position), reverse=True)
        left, right = left[positions], right[positions]
        return {
            "left_positions": left,
            "right_positions": right,
            "places": positions - left - 1,
        }

    return jax.vmap(find)(target_positions, target_weights)


def next_tokens(tokens: jax.Array, sequence_ids: jax.Array) -> dict[str, jax.Array]:
    """Returns the targets of left-to-right training: the next token within each sequence.

    `tokens` and `sequence_ids` are int32 `[batch, length]`; the result is like the result of
    `mask_tokens`, without `tokens`, for all positions but the last: K = length - 1.
    """
    ids, next_ids = sequence_ids[:, :-1], sequence_ids[:, 1:]
    return {
        "target_positions": jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape),
        "targets": tokens[:, 1:],
        "target_weights": ((ids == next_ids) & (ids > 0)).astype(jnp.float32),
    }


def row_keys(
    key: jax.Array, row_ids: jax.Array, epochs: jax.Array, repeat_after: int = 0
) -> jax.Array:
    """Returns PRNG keys `[batch]` that depend on the row and its epoch, not on its batch."""
    if repeat_after:
        epochs = epochs % repeat_after
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, epochs)
    return jax.vmap(jax.random.fold_in)(keys, row_ids)


def _choose_words(key, maskable, word, budget):
    """Selects words in random order, skipping those larger than the rest of the budget.

    Returns bool `[length]`.
    """
    length = maskable.shape[0]
    # The starts of all words, in order, each with whether it may be masked, as all of its word is.
    is_start = jnp.diff(word, prepend=-1) > 0
    starts = jnp.sort(jnp.where(is_start, 2 * jnp.arange(length) + maskable, 2 * length))
    word_sizes = jnp.diff(starts // 2, append=length) * (starts % 2)
    order = jax.random.permutation(key, length)

    def select(remaining, size):
        fits = (size > 0) & (size <= remaining)
        return remaining - size * fits, fits

    _, taken = jax.lax.scan(select, budget, word_sizes[order], unroll=8)
    taken = jnp.zeros(length, bool).at[order].set(taken)
    return maskable & taken[word]


def choose_spans(key, maskable, word, budget, max_spans, lengths):
    """Selects spans of words until the budget is spent, which may cut the last.

    `lengths` are the relative frequencies of spans of 1, 2, ... words. Anchors are uniform over
    free positions: until the budget is spent, each draw selects at least one. A span ends at a
    special token, so it is in one segment of one sequence. Returns bool `[length]`, and int32
    `[length]`, the span index of each selected position.
    """
    length, segment = maskable.shape[0], jnp.cumsum(~maskable)
    length_key, anchor_key = jax.random.split(key)
    num_words = 1 + jax.random.categorical(
        length_key, jnp.log(jnp.array(lengths)), shape=(max_spans,)
    )

    def add_span(carry, draw):
        group, remaining = carry
        number, words, scores = draw
        free = maskable & (group < 0)
        anchor = jnp.argmax(jnp.where(free, scores, -1.0))
        inside = (word >= word[anchor]) & (word < word[anchor] + words)
        new = free & inside & (segment == segment[anchor])
        new &= jnp.cumsum(new) <= remaining
        return (jnp.where(new, number, group), remaining - jnp.sum(new)), None

    # The scores of some spans at a time: those of all would grow with the square of the length.
    num_spans = min(max_spans, max(1, MAX_SCORES // length))
    num_draws = -(-max_spans // num_spans)
    keys = anchor_key[None] if num_draws == 1 else jax.random.split(anchor_key, num_draws)
    num_words = jnp.pad(num_words, (0, num_draws * num_spans - max_spans), constant_values=1)

    def add_spans(carry, draw):
        key, first, words = draw
        scores = jax.random.uniform(key, (num_spans, length))
        return jax.lax.scan(add_span, carry, (first + jnp.arange(num_spans), words, scores))

    firsts = num_spans * jnp.arange(num_draws)
    draws = keys, firsts, num_words.reshape(num_draws, num_spans)
    (group, _), _ = jax.lax.scan(add_spans, (jnp.full(length, -1), budget), draws)
    return group >= 0, jnp.maximum(group, 0)
