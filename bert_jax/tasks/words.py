"""Splits texts into words and punctuation marks, which get tags."""

import itertools
import re
from collections.abc import Iterable, Sequence

from bert_jax.tokenizers.characters import BLANK, FORMAT, LETTER_VARIANT, MARKS, SYMBOL_VARIANT

# Combining marks are letters, too. A word has format characters only inside, such as soft hyphens,
# zero-width joiners and non-joiners; a zero-width space separates words.
LETTER = rf"(?:{LETTER_VARIANT}|(?![{BLANK}])[\w{MARKS}])"
JOINER = rf"(?!\u200b)[{FORMAT}]"
LETTERS = rf"{LETTER}(?:(?:{JOINER})*{LETTER})*"
OWNER = rf"['\u2019]s(?!(?:{JOINER})*{LETTER})"
# Splits almost as CoNLL files do: keeps "U.N", "3,000" and "O'Brien" whole, separates "'s".
WORD = re.compile(
    rf"{OWNER}|{LETTERS}(?:[-.,]{LETTERS}|(?!{OWNER})['\u2019]{LETTERS})*"
    rf"|(?:{SYMBOL_VARIANT}|(?![{BLANK}])[^\w\s])(?:(?![{BLANK}])[{MARKS}])*"
)

SplitText = tuple[str, list[tuple[int, int]]]
"""A text, and the characters `[start, end)` of its words."""


def split_words(text: str | Sequence[str]) -> SplitText:
    """Returns the text, and the characters (start, end) of its words and punctuation marks.

    Neither begins or ends with a format character, such as a zero-width space. The words of a list
    stay as they are, and are joined by spaces. Raises TypeError for anything but strings.
    """
    if isinstance(text, str):
        return text, [match.span() for match in WORD.finditer(text)]
    if not isinstance(text, Iterable) or not all(isinstance(word, str) for word in text):
        raise TypeError(f"expected a string or a list of words, got {text!r:.60}")
    ends = itertools.accumulate(len(word) + 1 for word in text)
    spans = [(end - 1 - len(word), end - 1) for word, end in zip(text, ends, strict=True)]
    return " ".join(text), spans
