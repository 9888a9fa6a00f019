"""Splits plain text into words, and finds the entities that their tags mark in it."""

import itertools
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bert_jax.tasks.tagging_scores import find_entities

# Splits almost as CoNLL files do: keeps "U.N", "3,000" and "O'Brien" whole, separates "'s".
WORD = re.compile(r"['\u2019]s\b|\w+(?:[-.,]\w+|['\u2019](?!s\b)\w+)*|[^\w\s]")


class TaggedWord(NamedTuple):
    """A word, its tag, and the tag's probability."""

    word: str
    tag: str
    probability: float


class TaggedEntity(NamedTuple):
    """An entity: type, text, characters `[start, end)`, and the mean probability of its tags."""

    type: str
    text: str
    start: int
    end: int
    probability: float


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
    if not isinstance(text, Iterable) or not all(isinstance(word, str) for word in text):
        raise TypeError(f"expected a string or a list of words, got {text!r:.60}")
    ends = itertools.accumulate(len(word) + 1 for word in text)
    spans = [(end - 1 - len(word), end - 1) for word, end in zip(text, ends, strict=True)]
    return " ".join(text), spans


def tagged_text(
    text: str, spans: Sequence[tuple[int, int]], tagged: Iterable[tuple[str, float]]
) -> Tagging:
    """Combines the text and spans of `split_words` with each word's tag and its probability."""
    words = [TaggedWord(text[i:j], *tag) for (i, j), tag in zip(spans, tagged, strict=True)]
    entities = []
    for entity in find_entities([word.tag for word in words]):
        start, end = spans[entity.start][0], spans[entity.end - 1][1]
        tags = words[entity.start : entity.end]
        probability = statistics.fmean(tag.probability for tag in tags)
        entities.append(TaggedEntity(entity.type, text[start:end], start, end, probability))
    return Tagging(words, entities)
