"""Words to windows of pieces, so that exactly one window predicts each word."""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.data.features import make_sequence
from bert_jax.tokenization import Tokenizer


class WordWindow(NamedTuple):
    """A window that shows words `start` to `stop` of a text and predicts `begin` to `end`."""

    start: int
    begin: int
    end: int
    stop: int


def split_into_windows(
    sizes: Sequence[int], sentences: Iterable[tuple[int, int]], room: int
) -> list[WordWindow]:
    """Splits a text, such as a document, into windows of at most `room` pieces.

    A window predicts one sentence, or up to `room // 2` pieces of a longer one. The rest of the
    window shows the surrounding words of any sentence, equally many pieces on both sides unless the
    text ends on one of them.

    Args:
      sizes: number of pieces of each word of the text, 1 to `room`.
      sentences: first word of each sentence, and one past its last, in order.
    """
    before = np.concatenate([[0], np.cumsum(sizes)])  # Pieces before each word.

    def words_within(pieces: int) -> int:
        return int(np.searchsorted(before, pieces, side="right")) - 1

    windows = []
    for first, last in sentences:
        max_pieces = room if before[last] - before[first] <= room else room // 2
        begin = first
        while begin < last:
            end = min(last, max(begin + 1, words_within(before[begin] + max_pieces)))
            spare = room - (before[end] - before[begin])
            left = max(spare // 2, spare - (before[-1] - before[end]))
            start = int(np.searchsorted(before, before[begin] - left))
            windows.append(WordWindow(start, begin, end, words_within(before[start] + room)))
            begin = end
    return windows


def window_tokens(
    tokenizer: Tokenizer, pieces: Sequence[Sequence[int]], window: WordWindow
) -> tuple[np.ndarray, np.ndarray]:
    """Returns int32 `[CLS] pieces [SEP]`, and the first position of each word to predict."""
    shown = pieces[window.start : window.stop]
    tokens, _ = make_sequence(tokenizer, list(itertools.chain.from_iterable(shown)))
    begins = 1 + np.cumsum([0, *map(len, shown)])
    return tokens, begins[window.begin - window.start : window.end - window.start]
