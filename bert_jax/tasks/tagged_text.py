"""Words of a plain text, and the entities that their tags mark in it."""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from bert_jax.tasks.tagging_scores import find_entities

# Splits nearly as CoNLL files do: keeps "U.N", "3,000" and "O'Brien" whole, separates "'s".
WORD = re.compile(r"['\u2019]s\b|\w+(?:[-.,]\w+|['\u2019](?!s\b)\w+)*|[^\w\s]")


class TaggedWord(NamedTuple):
    """A word and its tag."""

    word: str
    tag: str


class TaggedEntity(NamedTuple):
    """An entity: its type, its text, and its characters, `start` to `end` (exclusive)."""

    type: str
    text: str
    start: int
    end: int


class Tagging(NamedTuple):
    """The result of `PretrainedModel.tag`."""

    words: list[TaggedWord]
    entities: list[TaggedEntity]


def split_words(text: str | Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """Returns the text, and the characters (begin, end) of its words and punctuation marks.

    The words of a list are joined by spaces. Raises TypeError for anything but strings.
    """
    if isinstance(text, str):
        return text, [match.span() for match in WORD.finditer(text)]
    if not all(isinstance(word, str) for word in text):
        raise TypeError(f"expected a string or a list of words, got {text!r:.60}")
    ends = itertools.accumulate(len(word) + 1 for word in text)
    spans = [(end - 1 - len(word), end - 1) for word, end in zip(text, ends, strict=True)]
    return " ".join(text), spans


def tagged_text(text: str, spans: Sequence[tuple[int, int]], tags: Sequence[str]) -> Tagging:
    """Combines the text and spans of `split_words` with a tag for each word."""
    words = [text[start:end] for start, end in spans]
    entities = []
    for entity in find_entities(tags):
        start, end = spans[entity.start][0], spans[entity.end - 1][1]
        entities.append(TaggedEntity(entity.type, text[start:end], start, end))
    return Tagging(list(map(TaggedWord, words, tags)), entities)
