"""Converts texts and pairs of texts to token sequences of limited length."""

from collections.abc import Iterable, Sequence

import numpy as np

from bert_jax.data.features import make_sequence
from bert_jax.tokenizers.tokenizer import Tokenizer


def tokenize(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, list[int]]:
    """Returns the token ids of each distinct text, by text."""
    distinct = list(dict.fromkeys(texts))
    return dict(zip(distinct, tokenizer.encode_batch(distinct), strict=True))


def make_sequences(
    texts: Sequence[Sequence[str]],
    tokenizer: Tokenizer,
    max_seq_length: int,
    max_first: int | None = None,
) -> tuple[list[tuple[np.ndarray, int]], list[bool]]:
    """Returns the `make_sequence` of each text or pair, and whether it was truncated.

    `max_seq_length` counts special tokens; the first text is first cut to `max_first` tokens.
    """
    ids_of = tokenize(tokenizer, (text for pair in texts for text in pair))
    sequences, truncated = [], []
    for pair in texts:
        ids = [ids_of[text] for text in pair]
        max_tokens = max_seq_length - tokenizer.layout.num_special_tokens(len(ids))
        num_tokens = sum(map(len, ids))
        ids[0] = ids[0][:max_first]
        ids = truncate_longest_first(*ids, max_tokens) if len(ids) == 2 else [ids[0][:max_tokens]]
        truncated.append(sum(map(len, ids)) < num_tokens)
        sequences.append(make_sequence(tokenizer, *ids))
    return sequences, truncated


def truncate_longest_first(
    first: Sequence[int], second: Sequence[int], max_tokens: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Truncates a pair to `max_tokens`, token by token from the end of the longer (ties: second).

    This is the released rule for fine-tuning; the corpus builder truncates either end at random.
    """
    second = second[: max(max_tokens // 2, max_tokens - len(first))]
    return first[: max_tokens - len(second)], second
