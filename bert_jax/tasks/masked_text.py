"""Converts masked text to token ids, and masked-LM probabilities to filled-in text."""

from typing import NamedTuple

import numpy as np

from bert_jax.tokenization import Tokenizer


class Fill(NamedTuple):
    """A token predicted for a mask, its probability, and the text with the mask replaced."""

    token: str
    probability: float
    text: str


def tokenize_masked(text: str, tokenizer: Tokenizer) -> list[int]:
    """Returns the token ids `[CLS] ... [SEP]` of `text`, in which masks are special tokens."""
    first, *others = text.split(tokenizer.mask_token)
    tokens = [tokenizer.cls_id, *tokenizer.encode(first)]
    for part in others:
        tokens += [tokenizer.mask_id, *tokenizer.encode(part, continues=True)]
    return [*tokens, tokenizer.sep_id]


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
            token = tokenizer.id_to_token(int(token_id))
            # A token that does not begin a word continues the previous one.
            start = before if tokenizer.word_start[token_id] else before.rstrip()
            filled = start + token.removeprefix("##").removeprefix("▁") + after
            fills[-1].append(Fill(token, float(row[token_id]), filled))
    return fills
