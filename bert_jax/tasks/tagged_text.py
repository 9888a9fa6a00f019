"""Words of a plain text, and the entities that their tags mark in it."""

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


def split_words(text: str | Sequence[str]) -> tuple[list[str], list[tuple[int, int]]]:
    """Returns the words and punctuation marks of a text, and the characters of each.

    A list of words is used unchanged; its characters count as if the words were joined by spaces.
    Raises TypeError for anything else.
    """
    if isinstance(text, str):
        matches = list(WORD.finditer(text))
        return [match.group() for match in matches], [match.span() for match in matches]
    words, start, spans = list(text), 0, []
    for word in words:
        if not isinstance(word, str):
            raise TypeError(f"expected a string or a list of words, found {type(word).__name__}")
        spans.append((start, start + len(word)))
        start += len(word) + 1
    return words, spans


def tagged_text(
    text: str | Sequence[str],
    words: Sequence[str],
    places: Sequence[tuple[int, int]],
    tags: Sequence[str],
) -> Tagging:
    """Combines `text`, its `words` and `places` by `split_words`, and a tag for each word."""
    text = text if isinstance(text, str) else " ".join(words)
    entities = []
    for entity in find_entities(tags):
        start, end = places[entity.start][0], places[entity.end - 1][1]
        entities.append(TaggedEntity(entity.type, text[start:end], start, end))
    return Tagging(list(map(TaggedWord, words, tags)), entities)
