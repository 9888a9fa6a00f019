"""Converts masked text to token ids, and predictions of the masks to filled-in text."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

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


Fills = list[Fill] | list[list[Fill]]
"""The fills of a text with one mask, best first; for several masks one such list for each."""


def tokenize_masked(text: str, tokenizer: Tokenizer) -> list[int]:
    """Returns the token ids `[CLS] ... [SEP]` of `text`, in which masks are special tokens."""
    return _sequence(text, tokenizer)[0].tolist()


def _sequence(text: str, tokenizer: Tokenizer) -> tuple[np.ndarray, int]:
    """Returns the ids of `tokenize_masked`, and what else `make_sequence` returns."""
    *parts, last = text.split(tokenizer.mask_token)
    if tokenizer.mask_lstrip:
        parts = [part.rstrip() for part in parts]
    first, *others = *parts, last
    tokens = tokenizer.encode(first)
    for part in others:
        tokens += [tokenizer.mask_id, *tokenizer.encode(part, continues=True)]
    return make_sequence(tokenizer, tokens)


def masked_features(
    texts: Sequence[str], tokenizer: Tokenizer, max_length: int
) -> list[ModelInput]:
    """Tokenizes texts with masks.

    Raises ValueError for a text without a mask, or of more than `max_length` tokens.
    """
    features = []
    for text in texts:
        if tokenizer.mask_token not in text:
            raise ValueError(f"text has no {tokenizer.mask_token} to fill in: {text!r}")
        tokens, second_start = _sequence(text, tokenizer)
        if len(tokens) > max_length:
            size = f"{len(tokens)} tokens, expected at most {max_length}"
            raise ValueError(f"text has {size}: shorten {text!r:.60}")
        features.append(ModelInput((tokens,), (second_start,)))
    return features


def prompt_features(
    prompts: Sequence[str], length: int, tokenizer: Tokenizer, max_length: int
) -> list[ModelInput]:
    """Tokenizes prompts, each with `length` masks at its end, to generate text at all masks.

    Raises ValueError for a prompt without any mask, or one of more than `max_length` tokens with
    its masks.
    """
    features = []
    for index, prompt in enumerate(prompts):
        where = f"the prompt at index {index} has"
        if not length and tokenizer.mask_token not in prompt:
            raise ValueError(
                f"{where} no {tokenizer.mask_token} and length is 0: there is nothing to generate"
            )
        tokens, second_start = _sequence(prompt + length * tokenizer.mask_token, tokenizer)
        if len(tokens) > max_length:
            raise ValueError(
                f"{where} {len(tokens) - length} tokens, special tokens included, and length="
                f"{length} adds {length}: the model has {max_length} positions: reduce `length` "
                "or shorten the prompt"
            )
        features.append(ModelInput((tokens,), (second_start,)))
    return features


def find_masks(tokens: np.ndarray, mask_id: int, count: int) -> np.ndarray:
    """Returns `count` positions of each row of tokens `[B, L]`, those of masks first, in order."""
    return np.argsort(tokens != mask_id, axis=1, kind="stable")[:, :count]


def count_positions(texts: Iterable[str], mask: str) -> int:
    """Returns the number of positions to predict in each row, for any of the texts.

    It is the same for all rows of a call, and one of few over all calls, so that few shapes are
    compiled.
    """
    largest = max((text.count(mask) for text in texts), default=1)
    return max(8, 1 << (largest - 1).bit_length())


def fill_text(text: str, logits: np.ndarray, top_k: int, tokenizer: Tokenizer) -> Fills:
    """Returns the fills of a text from logits `[positions, vocab]`, those of its masks first."""
    probabilities = softmax(logits[: text.count(tokenizer.mask_token)], axis=-1)
    fills = best_fills(text, probabilities, top_k, tokenizer)
    return fills[0] if len(fills) == 1 else fills


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


def fill_masks(
    text: str, feature: ModelInput, generated: Sequence[int], tokenizer: Tokenizer
) -> str:
    """Returns the text of a feature with the tokens `generated` in place of its masks, in order.

    What is not masked stays as it is, but for white space before a token that continues a word or
    is punctuation. Remaining masks are left in place.
    """
    (tokens,) = feature.sequences
    masks = np.flatnonzero(tokens == tokenizer.mask_id)
    filled = tokens.copy()
    filled[masks] = generated
    parts = text.split(tokenizer.mask_token)
    result, end = parts[0], 0
    while end < len(masks):
        start, end = end, end + 1
        # A run of masks, of which nothing is in between, is one text.
        while end < len(masks) and masks[end] == masks[end - 1] + 1 and not parts[end].strip():
            end += 1
        context = filled[max(masks[start] - 1, 0) : masks[start]]  # The token before, if any.
        run = text_after(context.tolist(), filled[masks[start:end]].tolist(), tokenizer)
        if run[:1].isspace() or not result.strip():
            needs_space = result and not result[-1].isspace()
            result += " " * bool(needs_space) + run.lstrip()
        else:
            result = result.rstrip() + run
        result += parts[end]
    return result


def text_after(context: list[int], ids: list[int], tokenizer: Tokenizer) -> str:
    """Returns the text of `ids` as it follows that of `context`: it may begin with a space.

    Letters that are tokens without spaces between them, as of proteins or Chinese, get none.
    """
    context = [token for token in context if token not in tokenizer.special_ids]
    before, both = tokenizer.decode(context), tokenizer.decode(context + ids)
    joined = "".join(both.split())
    if joined.isalpha() and tokenizer.encode(joined) == context + ids:
        return joined.removeprefix("".join(before.split()))
    return both.removeprefix(before)
