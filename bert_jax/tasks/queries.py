"""Reads queries and passages for retrieval, and finds texts that are equal to the model."""

import math
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from bert_jax.tasks import tables
from bert_jax.tasks.labels import check_labeled
from bert_jax.tasks.sequences import tokenize
from bert_jax.tasks.tables import field, text_field
from bert_jax.tokenizers.tokenizer import Tokenizer

QUERY_KEYS = ("id", "query", "positive", "negatives", "rank", "depth")
# Words in keys of other libraries' formats that say which passages are relevant.
_RELEVANCE = {"neg", "negative", "pos", "positive", "label", "score", "relevance"}


class Query(NamedTuple):
    """One line of a query file; lines with equal queries are one query with several positives.

    Attributes:
      positive: a passage that answers the query; None if unknown.
      rank: rank of the positive in the results of a first stage, infinity if it is not among them;
        0 if no first stage is known.
      depth: number of results that the first stage returns; None: those in the file.
    """

    id: str
    text: str
    positive: str | None
    negatives: tuple[str, ...]
    location: str
    rank: float = 0
    depth: int | None = None

    def candidates(self) -> tuple[str, ...]:
        """Returns the passages of the line, the positive first."""
        return (self.positive, *self.negatives) if self.positive else self.negatives


def read_queries(
    path: str | pathlib.Path,
    is_training: bool = False,
    empty_texts: bool = False,
    unused: dict[str, int] | None = None,
) -> list[Query]:
    """Reads queries from JSONL; all must have a positive, or (unless `is_training`) none.

    Args:
      empty_texts: whether a query or a negative may be empty; a positive never may.
      unused: receives, for each key that is not read, the number of lines that have it.

    Raises ValueError for a bad line, and for an unread key that says which passages are relevant,
    such as "negative" or "score": ignoring it would change what is learned and scored.
    """
    objects = tables.read_objects(path)
    for key, count in _find_unused(objects).items():
        if unused is not None:
            unused[key] = count
    queries = [
        _query(values, location, number, empty_texts)
        for number, (values, location) in enumerate(objects)
    ]
    check_labeled(queries, [query.positive for query in queries], "positive", is_training)
    return tables.check_unique(queries)


def iterate_queries(path: str | pathlib.Path, unused: dict[str, int]) -> Iterator[Query]:
    """Yields the queries of a JSONL file, which may have a positive; texts may be empty.

    `unused` counts the lines that have each key which nothing reads; see `read_queries`.
    """
    for number, (values, location) in enumerate(tables.iterate_objects(path)):
        for key, count in _find_unused([(values, location)]).items():
            unused[key] = unused.get(key, 0) + count
        yield _query(values, location, number, empty_texts=True)


def _find_unused(objects: Iterable[tuple[dict, str]]) -> dict[str, int]:
    """Returns how many objects have each key that is not read. Raises ValueError."""
    found = tables.find_unused_keys(objects, QUERY_KEYS)
    for key, (_, location) in found.items():
        words = {word.removesuffix("s") for word in re.split(r"[^a-z]+", key.lower())}
        if key != "scores" and words & _RELEVANCE:  # Predictions are written with "scores".
            raise ValueError(
                f"{location}: {key!r} is not read: write passages that answer the query as "
                "'positive' (a line for each), others as 'negatives' (a list); otherwise remove it"
            )
    return {key: count for key, (count, _) in found.items()}


def _query(values: dict, location: str, number: int, empty_texts: bool) -> Query:
    text = text_field(values, "query", location, empty_texts)
    is_known = values.get("positive") is not None
    positive = text_field(values, "positive", location) if is_known else None
    negatives = field({"negatives": []} | values, "negatives", list, location)
    for each in negatives:
        text_field({"negative": each}, "negative", location, empty_texts and each is not None)
    if positive in negatives:
        raise ValueError(f"{location}: the positive is also one of the negatives: {positive!r}")
    rank, depth = (_place(values, name, location) for name in ("rank", "depth"))
    if rank is None:
        rank = math.inf if "rank" in values else 0
    name = tables.id_field(values, location, number)
    return Query(name, text, positive, tuple(negatives), location, rank, depth)


def _place(values: dict, name: str, location: str) -> int | None:
    """Returns `values[name]`, None if missing. Raises ValueError for all but positive integers."""
    value = values.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{location}: {name!r} must be a whole number from 1, found {value!r:.60}")
    return value


def read_passages(
    path: str | pathlib.Path, empty_texts: bool = False, unused: dict[str, int] | None = None
) -> list[str]:
    """Reads the passages of a JSONL file, one `{"text": ...}` per line.

    Without `empty_texts`, an empty passage raises ValueError. `unused` receives, for each other
    key, the number of lines that have it.
    """
    objects = tables.read_objects(path)
    found = tables.find_unused_keys(objects, {"text"})
    if unused is not None:
        unused |= {key: count for key, (count, _) in found.items()}
    return [text_field(values, "text", location, empty_texts) for values, location in objects]


class TokenizedTexts:
    """The token ids of texts. To a model, texts with the same ids are the same text.

    Attributes:
      ids: text -> the ids that the model sees, the first ones of a long text.
      identity: text -> a value that only equal texts share: all of its ids, or its words if it has
        unknown tokens, which may hide a difference.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int):
        self.ids: dict[str, list[int]] = {}
        self.identity: dict[str, bytes | str] = {}
        self._tokenizer = tokenizer
        self._room = max_length - tokenizer.layout.num_special_tokens(1)
        self._truncated: set[str] = set()

    def add(self, texts: Iterable[str]) -> None:
        """Tokenizes the texts that are not known yet."""
        ids_of = tokenize(self._tokenizer, (text for text in texts if text not in self.ids))
        for text, ids in ids_of.items():
            is_known = self._tokenizer.unk_id not in ids
            self.identity[text] = _as_bytes(ids) if is_known else " ".join(text.split())
            self.ids[text] = ids[: self._room]
            if len(ids) > self._room:
                self._truncated.add(text)

    def seen(self, text: str, room: int | None = None) -> bytes:
        """Returns what the model sees of a text, in at most `room` tokens."""
        return _as_bytes(self.ids[text][:room])

    def distinct(self, texts: Iterable[str]) -> list[str]:
        """Returns the first of each group of equal texts."""
        first: dict[bytes | str, str] = {}
        for text in texts:
            first.setdefault(self.identity[text], text)
        return list(first.values())

    def num_truncated(self, texts: Iterable[str]) -> int:
        """Returns the number of distinct texts that the model sees only in part."""
        return len(self._truncated.intersection(texts))


def _as_bytes(ids: list[int]) -> bytes:
    return np.array(ids, np.int32).tobytes()


def choose_negatives(
    line: Query,
    positives: Iterable[str],
    passages: TokenizedTexts,
    count: int,
    room: int | None = None,
) -> tuple[tuple[str, ...], int]:
    """Returns the first `count` negatives of a line that the model can tell from its positives.

    Args:
      positives: all passages that answer the query of `line`, also on other lines.
      passages: has the positives and the first `count` negatives.
      room: number of tokens that the model sees of a passage; None: those in `passages`.

    Returns the negatives, and how many were left out before the last of them. Raises ValueError for
    a negative that equals the positive of its own line.
    """
    right = {passages.seen(text, room) for text in positives}
    chosen: list[str] = []
    num_left_out = 0
    for negative in line.negatives:
        if len(chosen) == count:
            break
        passages.add([negative])  # Already there, unless an earlier negative was left out.
        if passages.seen(negative, room) not in right:
            chosen.append(negative)
            continue
        check_differs(line, negative, passages)
        num_left_out += 1
    return tuple(chosen), num_left_out


def check_differs(line: Query, negative: str, passages: TokenizedTexts) -> None:
    """Raises ValueError if the negative of a line equals its positive."""
    if line.positive and passages.identity[negative] == passages.identity[line.positive]:
        raise ValueError(
            f"{line.location}: the positive is also one of the negatives, except for what the "
            f"tokenizer ignores: {line.positive!r:.60} and {negative!r:.60}"
        )
