"""Converts masked text to token ids, and masked-LM probabilities to filled-in text."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from scipy.special import softmax

from bert_jax.data.features import ModelInput, make_sequence
from bert_jax.tokenizers.tokenizer import Tokenizer


class Fill(NamedTuple):
    """A token predicted for a mask, its probability, and the text with the mask replaced.

    `token` is the text of one id, `tokenizer.decode([id])`, as transformers' pipeline gives it:
    "river" or "##s" (WordPiece), " river" or "s" (byte-level BPE), "river" or "s" (unigram).
    `tokenizer.encode(token)` gives the id again if the token begins a word.
    """

    token: str
    probability: float
    text: str


def tokenize_masked(text: str, tokenizer: Tokenizer) -> list[int]:
    """Returns the token ids `[CLS] ... [SEP]` of `text`, in which masks are special tokens."""
    *parts, last = text.split(tokenizer.mask_token)
    if tokenizer.mask_lstrip:
        parts = [part.rstrip() for part in parts]
    first, *others = *parts, last
    tokens = tokenizer.encode(first)
    for part in others:
        tokens += [tokenizer.mask_id, *tokenizer.encode(part, continues=True)]
    return make_sequence(tokenizer, tokens)[0].tolist()


def best_fills(
    text: str, probabilities: np.ndarray, top_k: int, tokenizer: Tokenizer
) -> list[list[Fill]]:
    """Returns the `top_k` fills of each mask, best first, from `[masks, vocab]` probabilities.

    Ids beyond the tokenizer's, which pad the vocabulary of some models, are left out.
    """
    mask = tokenizer.mask_token
    parts, fills = text.split(mask), []
    for number, row in enumerate(probabilities, start=1):
        before, after = mask.join(parts[:number]), mask.join(parts[number:])
        fills.append([])
        for token_id in np.argsort(-row[: tokenizer.vocab_size], kind="stable")[:top_k]:
            token_id = int(token_id)
            if tokenizer.word_start[token_id]:
                is_apart = not before or before[-1].isspace()
                start = before if is_apart else before + tokenizer.word_prefix
            else:  # It continues the previous word.
                start = before.rstrip()
            filled = start + tokenizer.piece_text(token_id) + after
            fills[-1].append(Fill(tokenizer.decode([token_id]), float(row[token_id]), filled))
    return fills


def fill_texts(
    texts: Sequence[str],
    top_k: int,
    tokenizer: Tokenizer,
    limit: int,
    token_logits: Callable[[dict, np.ndarray], jax.Array],
    apply: Callable[..., list],
) -> list[list[Fill] | list[list[Fill]]]:
    """Returns the fills of each text, or for several masks of each mask, from `forward`'s logits.

    `apply` is `forward.apply_by_length` with the model's limit on positions already given.

    Raises ValueError for a text without a mask, or of more than `limit` tokens.
    """
    mask, features = tokenizer.mask_token, []
    for text in texts:
        if mask not in text:
            raise ValueError(f"text has no {mask} to fill in: {text!r}")
        tokens = tokenize_masked(text, tokenizer)
        if len(tokens) > limit:
            size = f"{len(tokens)} tokens, expected at most {limit}"
            raise ValueError(f"text has {size}: shorten {text!r:.60}")
        features.append(ModelInput((np.array(tokens),), (len(tokens),)))

    # One width for all rows of a call, and few over all calls, so that few shapes are compiled.
    largest = max((text.count(mask) for text in texts), default=1)
    count = max(8, 1 << (largest - 1).bit_length())

    def masked_logits(rows: dict) -> jax.Array:
        is_mask = rows["tokens"] == tokenizer.mask_id
        return token_logits(rows, np.argsort(~is_mask, axis=1, kind="stable")[:, :count])

    def fill(index: int, logits: np.ndarray) -> list[Fill] | list[list[Fill]]:
        probabilities = softmax(logits[: texts[index].count(mask)], axis=-1)
        fills = best_fills(texts[index], probabilities, top_k, tokenizer)
        return fills[0] if len(fills) == 1 else fills

    return apply(masked_logits, features, 8, max_sequences=1, finish=fill)
