"""Words to windows of pieces, so that exactly one window predicts each word."""

from collections.abc import Iterable, Sequence

import numpy as np


def split_into_windows(
    sizes: Sequence[int], sentences: Iterable[tuple[int, int]], room: int
) -> list[tuple[int, int, int, int]]:
    """Splits a text, such as a document, into windows of at most `room` pieces.

    A window (start, begin, end, stop) shows words `start` to `stop` and predicts `begin` to `end`:
    one sentence, or up to `room // 2` pieces of a longer one. The rest are the surrounding words of
    any sentence, equally many pieces on both sides unless the text ends on one of them.

    Args:
      sizes: number of pieces of each word of the text, 1 to `room`.
      sentences: first word of each sentence, and one past its last, in order.
    """
    before = np.cumsum([0, *sizes])  # Pieces before each word.

    def words_within(pieces: int) -> int:
        return int(np.searchsorted(before, pieces, side="right")) - 1

    windows = []
    for begin, last in sentences:
        max_pieces = room if before[last] - before[begin] <= room else room // 2
        while begin < last:
            end = min(last, max(begin + 1, words_within(before[begin] + max_pieces)))
            spare = room - (before[end] - before[begin])
            left = max(spare // 2, spare - (before[-1] - before[end]))
            start = int(np.searchsorted(before, before[begin] - left))
            windows.append((start, begin, end, words_within(before[start] + room)))
            begin = end
    return windows
