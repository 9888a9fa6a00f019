"""Search: a bi-encoder that finds passages by their vectors, a cross-encoder that reranks them.

Both are trained on queries with a passage that answers each, and perhaps some that do not:
`{"query": ..., "positive": ..., "negatives": [...]}` a line.
"""

import json
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from bert_jax.data.features import Feature, make_sequence
from bert_jax.tasks.tables import read_json_lines
from bert_jax.tasks.task import Outputs, Split, Task
from bert_jax.tokenization import Tokenizer
from bert_jax.training.settings import check_bounds

ROLES = ("bi_encoder", "cross_encoder")
TOP = 10
"""Passages that are written for each query, and the rank beyond which a passage is not found."""


class Query(NamedTuple):
    """A line of a file; `positive` is "" where it is not known."""

    id: str
    text: str
    positive: str
    negatives: tuple[str, ...]
    place: str

    def candidates(self) -> tuple[str, ...]:
        """Its passages, the positive first."""
        return (self.positive, *self.negatives) if self.positive else self.negatives


class Ranking(NamedTuple):
    """A query's candidates and their scores; `own` is the positive's index, None if not known."""

    query: Query
    passages: Sequence[str]
    scores: np.ndarray
    own: int | None

    def rank(self) -> int:
        """Of the positive, from 1; of passages with one score it is the last."""
        return int(np.sum(self.scores >= self.scores[self.own]))


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads the files that `config.data` names; see configs/finetune/retrieval.py.

    Raises FileNotFoundError and ValueError, with file and line, for what cannot be read.
    """
    data = config.data
    if data.role not in ROLES:
        raise ValueError(f"--config.data.role={data.role}: expected {' or '.join(ROLES)}")
    if not 3 <= data.max_query_length <= config.max_seq_length // 2:
        raise ValueError(
            f"--config.data.max_query_length={data.max_query_length}: expected at least 3 and at "
            f"most half of max_seq_length ({config.max_seq_length}), so that passages have room"
        )
    if not data.train and not data.dev and not data.test:
        raise ValueError("give files of queries: --config.data.train=FILE, and dev or test")
    check_bounds(config, ("data.num_negatives", 0, math.inf))
    is_bi_encoder = data.role == "bi_encoder"
    if data.train and not is_bi_encoder and not data.num_negatives:
        raise ValueError(
            "--config.data.num_negatives=0: expected at least 1, since the cross-encoder learns to "
            "choose a query's passage among its negatives"
        )
    train = read_queries(data.train) if data.train else []  # None: predictions only.
    for query in train:
        if not query.positive:
            raise ValueError(f"{query.place}: no 'positive', and training needs one")
        if len(query.negatives) < data.num_negatives:
            raise ValueError(
                f"{query.place}: {len(query.negatives)} negatives, but training takes "
                f"{data.num_negatives}: give more, or set --config.data.num_negatives"
            )
    train = [query._replace(negatives=query.negatives[: data.num_negatives]) for query in train]
    splits = {name: read_queries(data[name]) for name in ("dev", "test") if data[name]}
    collection = read_passages(data.passages) if data.passages else []
    everything = [*train, *(query for queries in splits.values() for query in queries)]
    cut = _Cut(tokenizer, everything, collection, data.max_query_length, config.max_seq_length)
    make_split = bi_encoder_split if is_bi_encoder else cross_encoder_split
    return Task(
        kind="embedding" if is_bi_encoder else "multiple_choice",
        labels=() if is_bi_encoder else ("score",),
        train=bi_encoder_features(train, cut) if is_bi_encoder else cross_features(train, cut),
        splits=tuple(
            make_split(name, queries, collection, cut) for name, queries in splits.items()
        ),
        metric="dev/mrr_at_10",
        notes=cut.notes,
        settings={
            "max_seq_length": config.max_seq_length,
            "max_query_length": data.max_query_length,
            **(config.similarity.to_dict() if is_bi_encoder else {}),
        },
    )


def read_queries(path: str | pathlib.Path) -> list[Query]:
    """The queries of a JSONL file; either all have a positive, or none. Raises as `get_task`."""
    queries, places = [], {}
    for values, place in read_json_lines(path):
        for name in ("query", "positive"):
            text = values.get(name, "")
            if not isinstance(text, str) or (name in ("query", *values) and not text.strip()):
                raise ValueError(f"{place}: {name!r} is {text!r}, expected a text")
        positive, negatives = values.get("positive", ""), values.get("negatives", [])
        if not isinstance(negatives, list) or not all(
            isinstance(text, str) and text.strip() for text in negatives
        ):
            raise ValueError(f"{place}: 'negatives' is {negatives!r}, expected a list of texts")
        if positive in negatives:
            raise ValueError(f"{place}: the positive is one of the negatives too: {positive!r}")
        name = str(values.get("id", len(queries)))
        if name in places:
            raise ValueError(f"{place}: id {name!r} stands in {places[name]} already")
        places[name] = place
        queries.append(Query(name, values["query"], positive, tuple(negatives), place))
    for query in queries:
        if bool(query.positive) != bool(queries[0].positive):
            raise ValueError(
                f"{query.place} has {'a' if query.positive else 'no'} 'positive', unlike "
                f"{queries[0].place}: give all, or none for predictions without a score"
            )
    return queries


def read_passages(path: str | pathlib.Path) -> list[str]:
    """The passages of a JSONL file, `{"text": ...}` a line. Raises as `get_task`."""
    passages = []
    for values, place in read_json_lines(path):
        text = values.get("text")
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{place}: 'text' is {text!r}, expected a text")
        passages.append(text)
    return passages


class _Cut:
    """Sequences of queries and passages, each text tokenized once; counts what had to be cut."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        queries: Iterable[Query],
        collection: Iterable[str],
        max_query_length: int,
        max_length: int,
    ):
        self.tokenizer, self.max_length = tokenizer, max_length
        texts = dict.fromkeys(query.text for query in queries)
        passages = dict.fromkeys([*collection, *(p for q in queries for p in q.candidates())])
        room = max_query_length - 2, max_length - 2
        self.notes = {}
        self._queries, self._passages = ({}, {})
        for name, found, limit, kept in (
            ("queries", texts, room[0], self._queries),
            ("passages", passages, room[1], self._passages),
        ):
            pieces = tokenizer.encode_batch(list(found))
            self.notes[f"{name} truncated"] = sum(len(ids) > limit for ids in pieces)
            kept.update(zip(found, (ids[:limit] for ids in pieces), strict=True))
        self._numbers = {text: number for number, text in enumerate(passages)}

    def query(self, text: str):
        """Its tokens, and where segment 1 would begin; likewise of the others."""
        return make_sequence(self.tokenizer, self._queries[text])

    def passage(self, text: str):
        return make_sequence(self.tokenizer, self._passages[text])

    def pair(self, query: str, passage: str):
        first = self._queries[query]
        second = self._passages[passage][: self.max_length - 3 - len(first)]
        return make_sequence(self.tokenizer, first, second)

    def numbers(self, passages: Iterable[str]) -> np.ndarray:
        return np.array([self._numbers[passage] for passage in passages], np.int32)


def _feature(sequences: Iterable, label=None) -> Feature:
    tokens, second_starts = zip(*sequences, strict=True)
    return Feature(tokens, second_starts, label)


def bi_encoder_features(queries: Sequence[Query], cut: _Cut) -> list[Feature]:
    """For each query: itself, its positive, its negatives."""
    return [
        _feature(
            [cut.query(query.text), *map(cut.passage, query.candidates())],
            cut.numbers(query.candidates()),
        )
        for query in queries
    ]


def cross_features(queries: Sequence[Query], cut: _Cut) -> list[Feature]:
    """For each query its pairs with its passages, of which the first is to be chosen."""
    return [
        _feature([cut.pair(query.text, passage) for passage in query.candidates()], 0)
        for query in queries
    ]


def bi_encoder_split(
    name: str, queries: list[Query], collection: Sequence[str], cut: _Cut
) -> Split:
    """Every query against all passages of the collection and of the file."""
    own = (passage for query in queries for passage in query.candidates())
    passages = list(dict.fromkeys([*collection, *own]))
    if not passages:
        raise ValueError(f"{queries[0].place}: no passages; name some in --config.data.passages")
    place = {passage: index for index, passage in enumerate(passages)}
    sequences = [cut.query(query.text) for query in queries] + [*map(cut.passage, passages)]

    def rankings(outputs: Outputs) -> Iterator[Ranking]:
        vectors = np.concatenate(outputs)
        for query, vector in zip(queries, vectors, strict=False):
            scores = vectors[len(queries) :] @ vector
            yield Ranking(query, passages, scores, place.get(query.positive))

    return _split(name, queries, [_feature([each]) for each in sequences], rankings)


def cross_encoder_split(
    name: str, queries: list[Query], collection: Sequence[str], cut: _Cut
) -> Split:
    """Every query against its own passages: what a first stage has found."""
    del collection
    features = []
    for query in queries:
        if not query.candidates():
            raise ValueError(f"{query.place}: no 'negatives': expected passages to rank")
        features += [_feature([cut.pair(query.text, each)]) for each in query.candidates()]

    def rankings(outputs: Outputs) -> Iterator[Ranking]:
        scores, start = np.concatenate(outputs), 0
        for query in queries:
            passages = query.candidates()
            own, start = scores[start : start + len(passages)], start + len(passages)
            yield Ranking(query, passages, own, 0 if query.positive else None)

    return _split(name, queries, features, rankings)


def _split(
    name: str,
    queries: list[Query],
    features: list[Feature],
    rankings: Callable[[Outputs], Iterator[Ranking]],
) -> Split:
    def score(outputs: Outputs) -> dict[str, float]:
        return rank_scores([ranking.rank() for ranking in rankings(outputs)])

    def write(outputs: Outputs, directory: pathlib.Path) -> None:
        """In the form that is read: the best others are the negatives that are hard."""
        with open(directory / f"{name}.jsonl", "w") as stream:
            for ranking in rankings(outputs):
                best = np.argsort(-ranking.scores, kind="stable")[: TOP + 1]
                best = [index for index in best if index != ranking.own][:TOP]
                values = {"id": ranking.query.id, "query": ranking.query.text}
                if ranking.own is not None:
                    values |= {"positive": ranking.query.positive, "rank": ranking.rank()}
                values["negatives"] = [ranking.passages[index] for index in best]
                values["scores"] = [float(ranking.scores[index]) for index in best]
                stream.write(json.dumps(values) + "\n")

    return Split(name, features, score if queries[0].positive else None, write)


def rank_scores(ranks: Sequence[int]) -> dict[str, float]:
    """Mean reciprocal rank, 0 beyond ten, and the share of queries whose passage is found."""
    ranks = np.asarray(ranks)
    return {
        f"mrr_at_{TOP}": float(np.mean(np.where(ranks <= TOP, 1 / ranks, 0))),
        "recall_at_1": float(np.mean(ranks <= 1)),
        f"recall_at_{TOP}": float(np.mean(ranks <= TOP)),
    }
