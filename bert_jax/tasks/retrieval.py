"""Retrieval: a bi-encoder that finds passages by their vectors, a cross-encoder that reranks them.

Both are trained on queries, each with a passage that answers it and, optionally, some that do not:
one `{"query": ..., "positive": ..., "negatives": [...]}` per line.
"""

import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from bert_jax.data.features import Feature, make_sequence
from bert_jax.model import heads
from bert_jax.tasks.labels import check_labeled
from bert_jax.tasks.sequences import tokenize
from bert_jax.tasks.tables import (
    check_files_given,
    check_unique,
    read_json_lines,
    write_json_lines,
)
from bert_jax.tasks.task import Outputs, Split, Task
from bert_jax.tokenization import Tokenizer

ROLES = ("bi_encoder", "cross_encoder")
TOP = 10
"""Passages written per query, and the last rank at which a passage counts as found."""


class Query(NamedTuple):
    """A line of a file; `positive` is "" if unknown."""

    id: str
    text: str
    positive: str
    negatives: tuple[str, ...]
    place: str

    def candidates(self) -> tuple[str, ...]:
        """Returns its passages, the positive first."""
        return (self.positive, *self.negatives) if self.positive else self.negatives


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads the files named in `config.data`; see configs/finetune/retrieval.py."""
    data = config.data
    check_files_given(data)
    if data.role not in ROLES:
        raise ValueError(f"--config.data.role={data.role}: expected {' or '.join(ROLES)}")
    if not 3 <= data.max_query_length <= config.max_seq_length // 2:
        raise ValueError(
            f"--config.data.max_query_length={data.max_query_length}: expected at least 3 and at "
            f"most half of max_seq_length ({config.max_seq_length}), to leave room for passages"
        )
    is_bi_encoder = data.role == "bi_encoder"
    min_negatives = 1 if data.train and not is_bi_encoder else 0
    if data.num_negatives < min_negatives:
        raise ValueError(
            f"--config.data.num_negatives={data.num_negatives}: expected at least {min_negatives}"
            + (", since the cross-encoder learns to choose among passages" if min_negatives else "")
        )
    train = read_queries(data.train) if data.train else []  # Without: predictions only.
    check_labeled(train, [query.positive or None for query in train], "positive", required=True)
    for query in train:
        if len(query.negatives) < data.num_negatives:
            raise ValueError(
                f"{query.place}: {len(query.negatives)} negatives, but training takes "
                f"{data.num_negatives}: give more, or set --config.data.num_negatives"
            )
    train = [query._replace(negatives=query.negatives[: data.num_negatives]) for query in train]
    splits = {name: read_queries(data[name]) for name in ("dev", "test") if data[name]}
    collection = read_passages(data.passages) if data.passages else []
    everything = [*train, *(query for queries in splits.values() for query in queries)]
    texts = TokenizedTexts(
        tokenizer, everything, collection, data.max_query_length, config.max_seq_length
    )
    make_feature = texts.bi_encoder_feature if is_bi_encoder else texts.cross_encoder_feature
    make_split = bi_encoder_split if is_bi_encoder else cross_encoder_split
    return Task(
        head=heads.EMBEDDING if is_bi_encoder else heads.MULTIPLE_CHOICE,
        labels=() if is_bi_encoder else ("score",),
        train=[make_feature(query) for query in train],
        splits=tuple(make_split(name, queries, texts) for name, queries in splits.items()),
        metric=f"dev/mrr_at_{TOP}",
        notes=texts.notes,
        head_settings={
            "max_seq_length": config.max_seq_length,
            "max_query_length": data.max_query_length,
            **(config.similarity.to_dict() if is_bi_encoder else {}),
        },
    )


def read_queries(path: str | pathlib.Path) -> list[Query]:
    """Reads the queries of a JSONL file; all have a positive, or none. Raises like `get_task`."""
    queries = []
    for values, place in read_json_lines(path):
        for name in ("query", "positive") if "positive" in values else ("query",):
            if not _is_text(text := values.get(name, "")):
                raise ValueError(f"{place}: {name!r} is {text!r}, expected a text")
        positive, negatives = values.get("positive", ""), values.get("negatives", [])
        if not isinstance(negatives, list) or not all(map(_is_text, negatives)):
            raise ValueError(f"{place}: 'negatives' is {negatives!r}, expected a list of texts")
        if positive in negatives:
            raise ValueError(f"{place}: the positive is one of the negatives too: {positive!r}")
        name = str(values.get("id", len(queries)))
        queries.append(Query(name, values["query"], positive, tuple(negatives), place))
    check_unique(queries, [query.id for query in queries])
    positives = [query.positive or None for query in queries]
    check_labeled(queries, positives, "positive", required=False)
    return queries


def read_passages(path: str | pathlib.Path) -> list[str]:
    """Reads the passages of a JSONL file, one `{"text": ...}` per line. Raises like `get_task`."""
    passages = []
    for values, place in read_json_lines(path):
        if not _is_text(text := values.get("text")):
            raise ValueError(f"{place}: 'text' is {text!r}, expected a text")
        passages.append(text)
    return passages


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


class TokenizedTexts:
    """All queries and passages of a task, each tokenized and truncated once.

    Attributes:
      collection: passages to search in addition to those of the queries.
      notes: how many queries and passages were truncated.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        queries: Sequence[Query],
        collection: Sequence[str],
        max_query_length: int,
        max_seq_length: int,
    ):
        self.tokenizer, self.max_seq_length = tokenizer, max_seq_length
        self.collection, self.notes = collection, {}
        passages = (*collection, *(text for query in queries for text in query.candidates()))
        texts = [query.text for query in queries]
        self._queries = self._truncated("queries", texts, max_query_length - 2)
        self._passages = self._truncated("passages", passages, max_seq_length - 2)
        self._numbers = {text: number for number, text in enumerate(self._passages)}

    def _truncated(self, name: str, texts: Iterable[str], max_tokens: int) -> dict[str, list[int]]:
        ids_of = tokenize(self.tokenizer, texts)
        self.notes[f"{name} truncated"] = sum(len(ids) > max_tokens for ids in ids_of.values())
        return {text: ids[:max_tokens] for text, ids in ids_of.items()}

    def query(self, text: str) -> tuple[np.ndarray, int]:
        """Returns the sequence of a query, as `make_sequence` does."""
        return make_sequence(self.tokenizer, self._queries[text])

    def passage(self, text: str) -> tuple[np.ndarray, int]:
        """Returns the sequence of a passage, as `make_sequence` does."""
        return make_sequence(self.tokenizer, self._passages[text])

    def pair(self, query: str, passage: str) -> tuple[np.ndarray, int]:
        """Returns the sequence of a query and a passage, as `make_sequence` does."""
        first = self._queries[query]
        second = self._passages[passage][: self.max_seq_length - 3 - len(first)]
        return make_sequence(self.tokenizer, first, second)

    def bi_encoder_feature(self, query: Query) -> Feature:
        """Returns a query, its positive and its negatives; the labels number the passages."""
        passages = query.candidates()
        label = np.array([self._numbers[passage] for passage in passages], np.int32)
        return _feature([self.query(query.text), *map(self.passage, passages)], label)

    def cross_encoder_feature(self, query: Query) -> Feature:
        """Returns a query paired with its positive, which is to be chosen, and its negatives."""
        return _feature([self.pair(query.text, passage) for passage in query.candidates()], 0)


def _feature(sequences: Iterable[tuple[np.ndarray, int]], label=None) -> Feature:
    return Feature(*zip(*sequences, strict=True), label)


Rankings = Iterator[tuple[Query, Sequence[str], np.ndarray, int | None]]
"""Queries, the passages ranked, their scores, and the index of the positive (None if unknown)."""


def bi_encoder_split(name: str, queries: list[Query], texts: TokenizedTexts) -> Split:
    """Builds a split that ranks all passages of the collection and of the file for each query."""
    own = (passage for query in queries for passage in query.candidates())
    passages = list(dict.fromkeys([*texts.collection, *own]))
    if not passages:
        raise ValueError(f"{queries[0].place}: no passages; give some in --config.data.passages")
    index_of = {passage: index for index, passage in enumerate(passages)}
    sequences = [texts.query(query.text) for query in queries] + [*map(texts.passage, passages)]

    def rankings(outputs: Outputs) -> Rankings:
        vectors = np.concatenate(outputs)
        for query, vector in zip(queries, vectors, strict=False):
            yield query, passages, vectors[len(queries) :] @ vector, index_of.get(query.positive)

    return _make_split(name, queries, [_feature([each]) for each in sequences], rankings)


def cross_encoder_split(name: str, queries: list[Query], texts: TokenizedTexts) -> Split:
    """Builds a split that ranks each query's own passages, e.g. those a first stage has found."""
    features = []
    for query in queries:
        if not query.candidates():
            raise ValueError(f"{query.place}: no 'negatives': expected passages to rank")
        features += [_feature([texts.pair(query.text, each)]) for each in query.candidates()]

    def rankings(outputs: Outputs) -> Rankings:
        scores, start = np.concatenate(outputs), 0
        for query in queries:
            passages = query.candidates()
            own, start = scores[start : start + len(passages)], start + len(passages)
            yield query, passages, own, 0 if query.positive else None

    return _make_split(name, queries, features, rankings)


def _make_split(
    name: str,
    queries: list[Query],
    features: list[Feature],
    rankings: Callable[[Outputs], Rankings],
) -> Split:
    def score(outputs: Outputs) -> dict[str, float]:
        return rank_scores([rank(found, index) for _, _, found, index in rankings(outputs)])

    def write(outputs: Outputs, directory: pathlib.Path) -> None:
        """Writes the input format; the best passages except the positive are hard negatives."""
        lines = []
        for query, passages, found, positive in rankings(outputs):
            best = np.argsort(-found, kind="stable")[: TOP + 1]
            best = [index for index in best if index != positive][:TOP]
            values = {"id": query.id, "query": query.text}
            if positive is not None:
                values |= {"positive": query.positive, "rank": rank(found, positive)}
            values["negatives"] = [passages[index] for index in best]
            lines.append(values | {"scores": [float(found[index]) for index in best]})
        write_json_lines(directory / f"{name}.jsonl", lines)

    return Split(name, features, score if queries[0].positive else None, write)


def rank(scores: np.ndarray, index: int) -> int:
    """Returns the rank of a passage, from 1, after the others with the same score."""
    return int(np.sum(scores >= scores[index]))


def rank_scores(ranks: Sequence[int]) -> dict[str, float]:
    """Computes the mean reciprocal rank, 0 beyond `TOP`, and the recall at 1 and at `TOP`."""
    ranks = np.asarray(ranks)
    return {
        f"mrr_at_{TOP}": float(np.mean(np.where(ranks <= TOP, 1 / ranks, 0))),
        "recall_at_1": float(np.mean(ranks <= 1)),
        f"recall_at_{TOP}": float(np.mean(ranks <= TOP)),
    }
