"""Words to windows of pieces, so that each word is predicted in exactly one of them."""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.data.features import make_sequence
from bert_jax.tokenization import Tokenizer


class Window(NamedTuple):
    """Words `start` to `stop` of a text are shown, of which `begin` to `end` are predicted."""

    start: int
    begin: int
    end: int
    stop: int


def word_pieces(tokenizer: Tokenizer, words: Iterable[str]) -> dict[str, list[int]]:
    """Each word's pieces; [UNK] for one that has none, such as a control character."""
    words = list(dict.fromkeys(words))
    pieces = tokenizer.encode_batch(words)
    return {word: each or [tokenizer.unk_id] for word, each in zip(words, pieces, strict=True)}


def split_into_windows(
    sizes: Sequence[int], sentences: Iterable[tuple[int, int]], room: int
) -> list[Window]:
    """Windows of at most `room` pieces over a text, such as a document, each of maximal context.

    A window predicts a sentence, or of one that is longer a part of half of `room`. What is left
    goes to the words around, wherever they belong, to both sides alike, but for a side that ends.

    Args:
      sizes: the number of pieces of each word of the text, 1 to `room`.
      sentences: first word and one past the last word of each, in order.
    """
    before = np.concatenate([[0], np.cumsum(sizes)])  # Pieces before each word.

    def words_within(pieces):
        """How many words end in the first so many pieces."""
        return int(np.searchsorted(before, pieces, side="right")) - 1

    windows = []
    for first, last in sentences:
        most = room if before[last] - before[first] <= room else room // 2
        begin = first
        while begin < last:
            end = min(last, max(begin + 1, words_within(before[begin] + most)))
            spare = room - (before[end] - before[begin])
            left = max(spare // 2, spare - (before[-1] - before[end]))
            start = int(np.searchsorted(before, before[begin] - left))
            windows.append(Window(start, begin, end, words_within(before[start] + room)))
            begin = end
    return windows


def window_tokens(
    tokenizer: Tokenizer, pieces: Sequence[Sequence[int]], window: Window
) -> tuple[np.ndarray, np.ndarray]:
    """int32 `[CLS] pieces [SEP]` of a window, and where the words that it predicts begin in it."""
    shown = pieces[window.start : window.stop]
    tokens, _ = make_sequence(tokenizer, list(itertools.chain.from_iterable(shown)))
    begins = 1 + np.cumsum([0, *map(len, shown)])
    return tokens, begins[window.begin - window.start : window.end - window.start]
