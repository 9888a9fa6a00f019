"""Choosing and corrupting the tokens to predict: a pure function of key and rows, on device.

Rates and replacement follow Devlin et al. (2018), section 3.1 and the released
`create_pretraining_data`: of the tokens of a row, [CLS] and [SEP] counted, 15 % are predicted; of
these 80 % become [MASK], 10 % a random word, 10 % stay.
"""

import jax
import jax.numpy as jnp

UNITS = ("token", "whole_word", "span")
MAX_SPAN_WORDS = 10
SPAN_CONTINUE = 0.8


def mask_tokens(
    keys: jax.Array,
    tokens: jax.Array,
    sequence_ids: jax.Array,
    *,
    special_ids: tuple[int, ...],
    mask_id: int,
    vocab_size: int,
    max_predictions: int,
    rate: float = 0.15,
    unit: str = "token",
    word_start: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Chooses `round(rate * tokens of the row)` positions of each row, at least 1, and corrupts.

    Args:
      keys: PRNG keys `[batch]`, one a row (see `row_keys`).
      tokens: int32 `[batch, length]`.
      sequence_ids: int32 `[batch, length]`, 0 where there is padding.
      special_ids: never chosen. With the tokenizer's five, [UNK] is never a target either, which
        the released code does predict.
      mask_id: id of [MASK].
      vocab_size: random replacements are uniform over the whole vocabulary, as released.
      max_predictions: K, the most positions of one row that are predicted.
      rate: share of the row's tokens to predict.
      unit: "token"; "whole_word" (all pieces of a word or none, as in the released whole-word
        models); "span" (SpanBERT, Joshi et al., 2020, section 3.1: runs of words of geometric
        length, corrupted together).
      word_start: bool `[vocab_size]`, True for pieces that begin a word; for the last two units.

    Returns:
      `tokens` int32 `[batch, length]`, corrupted; `mlm_positions` and `mlm_targets` int32
      `[batch, K]`; `mlm_weights` float32 `[batch, K]`, 1 for a prediction and 0 for a free slot.
    """
    if unit not in UNITS:
        raise ValueError(f"masking unit {unit!r} is unknown: expected one of {', '.join(UNITS)}")
    if unit != "token" and word_start is None:
        raise ValueError(f"masking unit {unit!r} needs `word_start` from the tokenizer")

    def mask_row(key, tokens, sequence_ids):
        choose_key, replace_key, random_key = jax.random.split(key, 3)
        maskable = (sequence_ids > 0) & ~jnp.isin(tokens, jnp.array(special_ids))
        num_tokens = jnp.sum(sequence_ids > 0)
        budget = jnp.clip(jnp.round(rate * num_tokens), 1, max_predictions).astype(jnp.int32)

        # `group` says which positions are corrupted in the same way: each its own, but for spans.
        group = jnp.arange(tokens.shape[0])
        if unit == "token":
            chosen = _choose_tokens(choose_key, maskable, budget)
        else:
            starts = jnp.asarray(word_start)[tokens] | ~maskable | jnp.roll(~maskable, 1)
            word = jnp.cumsum(starts) - 1
            if unit == "whole_word":
                chosen = _choose_words(choose_key, maskable, word, budget)
            else:
                chosen, group = _choose_spans(
                    choose_key, maskable, word, sequence_ids, budget, max_predictions
                )

        found, positions = jax.lax.top_k(chosen.astype(jnp.int32), max_predictions)
        weights = (found > 0).astype(jnp.float32)
        positions = jnp.where(found > 0, positions, 0)
        targets = jnp.where(found > 0, tokens[positions], 0)

        draw = jax.random.uniform(replace_key, tokens.shape)[group]
        word_of_chance = jax.random.randint(random_key, tokens.shape, 0, vocab_size)
        corrupted = jnp.where(draw < 0.8, mask_id, jnp.where(draw < 0.9, word_of_chance, tokens))
        return {
            "tokens": jnp.where(chosen, corrupted, tokens),
            "mlm_positions": positions,
            "mlm_targets": targets,
            "mlm_weights": weights,
        }

    return jax.vmap(mask_row)(keys, tokens, sequence_ids)


def row_keys(
    key: jax.Array, row_ids: jax.Array, epochs: jax.Array, repeat_after: int = 0
) -> jax.Array:
    """PRNG keys `[batch]` that depend on the row and its epoch, not on its place in a batch.

    With `repeat_after` (the released `dupe_factor`) > 0, the masks of a row repeat after so many
    epochs: static masking. With 0 every epoch masks anew.
    """
    if repeat_after:
        epochs = epochs % repeat_after

    def row_key(row_id, epoch):
        return jax.random.fold_in(jax.random.fold_in(key, epoch), row_id)

    return jax.vmap(row_key)(row_ids, epochs)


def _choose_tokens(key, maskable, budget):
    """`budget` maskable positions, uniformly without replacement: bool `[length]`."""
    scores = jnp.where(maskable, jax.random.uniform(key, maskable.shape), 2.0)
    rank = jnp.argsort(jnp.argsort(scores))
    return maskable & (rank < budget)


def _choose_words(key, maskable, word, budget):
    """Words in random order, each taken if it still fits the budget, as released."""
    length = maskable.shape[0]
    words = jnp.arange(length)
    pieces = jnp.sum((word[None, :] == words[:, None]) & maskable, axis=1)
    order = jax.random.permutation(key, length)

    def take(left, size):
        fits = (size > 0) & (size <= left)
        return left - size * fits, fits

    _, taken = jax.lax.scan(take, budget, pieces[order], unroll=8)
    taken = jnp.zeros(length, bool).at[order].set(taken)
    return maskable & taken[word]


def _choose_spans(key, maskable, word, sequence_ids, budget, max_spans):
    """Spans of whole words of one sequence until the budget is spent; also each one's number.

    The anchor is uniform over the positions still free, so that every step takes at least one.
    """
    length = maskable.shape[0]
    length_key, anchor_key = jax.random.split(key)
    weights = SPAN_CONTINUE ** jnp.arange(MAX_SPAN_WORDS)
    num_words = 1 + jax.random.categorical(length_key, jnp.log(weights), shape=(max_spans,))
    scores = jax.random.uniform(anchor_key, (max_spans, length))

    def add_span(carry, draw):
        group, left = carry
        number, words, scores = draw
        free = maskable & (group < 0)
        anchor = jnp.argmax(jnp.where(free, scores, -1.0))
        inside = (word >= word[anchor]) & (word < word[anchor] + words)
        new = free & inside & (sequence_ids == sequence_ids[anchor])
        new &= jnp.cumsum(new) <= left
        return (jnp.where(new, number, group), left - jnp.sum(new)), None

    draws = (jnp.arange(max_spans), num_words, scores)
    (group, _), _ = jax.lax.scan(add_span, (jnp.full(length, -1), budget), draws)
    return group >= 0, jnp.maximum(group, 0)
