"""Reads texts whose entities are spans of characters, as Prodigy and doccano write them.

Prodigy: `{"text": ..., "spans": [{"start": 0, "end": 4, "label": "LOC"}], "answer": "accept"}`,
optionally with `"tokens": [{"start": 0, "end": 4}]` (https://prodi.gy/docs/api-interfaces).
doccano: `{"text": ..., "label": [[0, 4, "LOC"]]}`, in some versions "labels". Characters are
Unicode code points, and `end` is exclusive, as in Python.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bert_jax.tasks.tables import field, text_field
from bert_jax.tasks.words import SplitText, split_words

_SPAN_KEYS = ("spans", "label", "labels")


def other_keys(values: Mapping) -> set[str]:
    """Returns the keys of an annotated text besides its spans; Prodigy's own begin with "_"."""
    own = {name for name in values if name.startswith("_")}
    return {"text", "tokens", "answer", "document", "meta"} | own


class CharacterSpan(NamedTuple):
    """Characters `[start, end)` of a text, and the type of the entity there."""

    start: int
    end: int
    label: str


class AnnotatedText(NamedTuple):
    """A text, the characters of its words, their IOB2 tags, and the key of its spans."""

    text: SplitText
    tags: list[str] | None  # None if unknown.
    key: str


def is_annotated_text(values: Mapping) -> bool:
    """Returns whether an object is a text, with spans or to be tagged, rather than a list of words.

    Prodigy's tokens are objects.
    """
    tokens = values.get("tokens")
    if "text" not in values or not isinstance(tokens, list | None):
        return False
    if not tokens:
        return tokens is None or any(key in values for key in _SPAN_KEYS)
    return all(isinstance(token, dict) for token in tokens)


def read_annotated_text(
    values: dict, location: str, spans_key: str, counts: dict[str, int]
) -> AnnotatedText | None:
    """Returns the words and tags of an object, or None if its answer is "reject" or "ignore".

    `spans_key` is the key of the spans; "": the one of "spans", "label" and "labels" that the
    object has. Without it the tags are unknown, but of an accepted example all are O. The words are
    Prodigy's tokens, or else those of `split_words`. A span that cuts words is extended to the
    whole words. `counts` receives the number of these spans, and of the examples left out. Raises
    ValueError for spans that are malformed, not within the text, or without a word, and if two
    share a word.
    """
    answer = values.get("answer")
    if answer not in (None, "accept", "reject", "ignore"):
        found = f"'answer' is {answer!r:.60}"
        raise ValueError(f"{location}: {found}, expected accept, reject or ignore")
    if answer in ("reject", "ignore"):
        what = f"examples with the answer {answer}, left out"
        counts[what] = counts.get(what, 0) + 1
        return None
    text = text_field(values, "text", location, may_be_empty=True)
    words = split_words(text)[1]
    if values.get("tokens") is not None:
        words = _read_tokens(values["tokens"], text, location)
    present = [key for key in _SPAN_KEYS if values.get(key) is not None]
    if not spans_key and len(present) > 1:
        fix = f"choose one, such as config.data.tags={present[0]}"
        raise ValueError(f"{location}: there are several kinds of spans, {present}: {fix}")
    key = spans_key or (present[0] if present else "spans")
    if values.get(key) is None:
        tags = ["O"] * len(words) if answer == "accept" else None
        return AnnotatedText((text, words), tags, key)
    spans = _read_spans(values[key], text, f"{location}: {key!r}")
    tags, num_extended = tags_of_spans(text, words, spans, f"{location}: {key!r}")
    if num_extended:
        what = "spans extended to whole words, which they cut"
        counts[what] = counts.get(what, 0) + num_extended
    return AnnotatedText((text, words), tags, key)


def tags_of_spans(
    text: str, words: Sequence[tuple[int, int]], spans: Sequence[CharacterSpan], location: str
) -> tuple[list[str], int]:
    """Returns the IOB2 tag of each word, and the number of spans that cut a word.

    A span covers the words of which it has at least one character; `words` are the characters of
    the words of `text`, in order. Raises ValueError, with `location`, if a span has no word or if
    two share one.
    """
    starts, ends = [start for start, _ in words], [end for _, end in words]
    tags, owners, num_extended = ["O"] * len(words), {}, 0
    for span in sorted(spans):
        first, stop = bisect_right(ends, span.start), bisect_left(starts, span.end)
        if first >= stop:
            found = f"{_describe(span, text)} has no word"
            raise ValueError(f"{location}: {found}: remove the span")
        if first in owners:
            word = text[starts[first] : ends[first]]
            both = f"{_describe(owners[first], text)} and {_describe(span, text)}"
            fix = "a word has one tag: remove one of the spans, or give each its own words"
            raise ValueError(f"{location}: {both} overlap in the word {word!r}: {fix}")
        owners |= dict.fromkeys(range(first, stop), span)
        tags[first:stop] = [f"B-{span.label}"] + [f"I-{span.label}"] * (stop - first - 1)
        num_extended += starts[first] < span.start or span.end < ends[stop - 1]
    return tags, num_extended


def _describe(span: CharacterSpan, text: str) -> str:
    return f"[{span.start}, {span.end}, {span.label!r}] ({text[span.start : span.end]!r:.40})"


def _read_tokens(tokens: Sequence[dict], text: str, location: str) -> list[tuple[int, int]]:
    """Returns the characters of Prodigy's tokens, without those that are only white space."""
    words, before = [], 0
    for number, token in enumerate(tokens):
        start, end = (field(token, name, int, f"{location}: 'tokens'") for name in ("start", "end"))
        if not before <= start < end <= len(text):
            expected = f"characters from {before} to {len(text)}, in order"
            raise ValueError(
                f"{location}: 'tokens' {number} is [{start}, {end}]: expected {expected}"
            )
        if not text[start:end].isspace():
            words.append((start, end))
        before = end
    return words


def _read_spans(items: object, text: str, location: str) -> list[CharacterSpan]:
    """Returns the spans of a list of objects or of [start, end, label]. Raises ValueError."""
    if not isinstance(items, list):
        expected = 'expected a list of {"start", "end", "label"} or of [start, end, label]'
        raise ValueError(f"{location} is of type {type(items).__name__}: {expected}")
    spans = []
    for item in items:
        if isinstance(item, dict):
            item = [item.get(name) for name in CharacterSpan._fields]
        is_span = isinstance(item, list) and list(map(type, item)) == [int, int, str]
        # As in the files of predictions, a tag has no tabs, line breaks or spaces around it.
        if not is_span or not item[2].strip() or item[2] != " ".join(item[2].split()):
            expected = 'characters and a label: {"start": 0, "end": 4, "label": "LOC"}'
            raise ValueError(f"{location} holds {item!r:.80}: expected {expected} or [0, 4, 'LOC']")
        start, end, _ = item
        if not 0 <= start < end <= len(text):
            expected = f"0 <= start < end <= {len(text)}, the length of the text"
            raise ValueError(f"{location} holds {item!r:.80}: expected {expected}")
        spans.append(CharacterSpan(*item))
    return spans
