"""Retrieval: a bi-encoder finds passages by their embeddings, a cross-encoder reranks them.

Both are trained on queries, each with a passage that answers it and, optionally, some that do not:
one `{"query": ..., "positive": ..., "negatives": [...]}` per line.
"""

import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from bert_jax.data.features import ModelInput, make_sequence
from bert_jax.model import heads
from bert_jax.model.pooling import POOLINGS
from bert_jax.tasks import tables
from bert_jax.tasks.labels import check_labeled
from bert_jax.tasks.sequences import tokenize
from bert_jax.tasks.tables import field, text_field
from bert_jax.tasks.task import Outputs, Split, Task, limit_examples
from bert_jax.tokenization import Tokenizer
from bert_jax.training.bounds import POSITIVE, Bounds, check_bounds

ROLES = ("bi_encoder", "cross_encoder")
TOP = 10
"""Number of passages written per query, and the last rank that counts as found."""


class Query(NamedTuple):
    """One line of a query file; `positive` is None if unknown."""

    id: str
    text: str
    positive: str | None
    negatives: tuple[str, ...]
    location: str

    def candidates(self) -> tuple[str, ...]:
        """Returns the query's passages, the positive first."""
        return (self.positive, *self.negatives) if self.positive else self.negatives


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads the files named in `config.data`; see configs/finetune/retrieval.py."""
    data = config.data
    files = tables.files_from_config(data)
    role, pooling = data.role, config.similarity.pooling
    if role not in ROLES:
        raise ValueError(f"--config.data.role={role}: expected {' or '.join(ROLES)}")
    if pooling not in POOLINGS:
        raise ValueError(f"--config.similarity.pooling={pooling}: expected {' or '.join(POOLINGS)}")
    is_bi_encoder = role == "bi_encoder"
    # The cross-encoder learns to choose among passages.
    min_negatives = 1 if data.train and not is_bi_encoder else 0
    # The cross-encoder needs room for a passage beside the query.
    max_query_length = config.max_seq_length // (1 if is_bi_encoder else 2)
    check_bounds(config, Bounds(3, max_query_length), "data.max_query_length")
    check_bounds(config, Bounds(min_negatives), "data.num_negatives")
    check_bounds(config, POSITIVE, "similarity.temperature")
    notes: dict[str, int] = {}
    queries = _read_splits(config, files, notes)
    train = queries.pop("train", [])  # If empty, only predicts.
    for query in train:
        if (count := len(query.negatives)) < data.num_negatives:
            flag = f"--config.data.num_negatives={data.num_negatives}"
            raise ValueError(f"{query.location}: fewer negatives ({count}) than {flag}")
    train = [query._replace(negatives=query.negatives[: data.num_negatives]) for query in train]
    collection = []
    if data.passages:
        collection = read_passages(data.passages, empty_texts=not data.train)
        notes["passages that are empty"] = sum(not text.strip() for text in collection)
    # Predictions take as long as there are passages, so these are limited too.
    collection = limit_examples(collection, config, "collection", notes)
    every = sum(queries.values(), train)
    passages = [*collection, *(text for query in every for text in query.candidates())]

    def encode(name: str, texts: Iterable[str], max_length: int) -> dict[str, list[int]]:
        """Returns the first token ids of each text; counts the truncated texts in `notes`."""
        ids_of = tokenize(tokenizer, texts)
        room = max_length - tokenizer.layout.num_special_tokens(1)
        notes[f"{name} truncated"] = sum(len(ids) > room for ids in ids_of.values())
        return {text: ids[:room] for text, ids in ids_of.items()}

    query_ids = encode("queries", (query.text for query in every), data.max_query_length)
    passage_ids = encode("passages", passages, config.max_seq_length)

    def sequences(queries: Iterable[Query], passages: Iterable[str]) -> list[tuple]:
        """Returns a sequence per text; for a cross-encoder, for one query with each passage."""
        first = [query_ids[query.text] for query in queries]
        second = [passage_ids[text] for text in passages]
        if is_bi_encoder:
            return [make_sequence(tokenizer, ids) for ids in first + second]
        room = config.max_seq_length - tokenizer.layout.num_special_tokens(2) - len(*first)
        return [make_sequence(tokenizer, *first, ids[:room]) for ids in second]

    numbers = {text: number for number, text in enumerate(passage_ids)}
    features = []
    for query in train:
        label = 0  # For the cross-encoder: the positive is first.
        if is_bi_encoder:
            label = np.array([numbers[text] for text in query.candidates()], np.int32)
        features.append(
            ModelInput(*zip(*sequences([query], query.candidates()), strict=True), label)
        )
    splits = [make_split(*pair, sequences, collection, is_bi_encoder) for pair in queries.items()]
    settings = {"max_query_length": data.max_query_length}
    return Task(
        head=heads.EMBEDDING if is_bi_encoder else heads.MULTIPLE_CHOICE,
        labels=() if is_bi_encoder else ("score",),
        train=features,
        splits=tuple(splits),
        metric=f"dev/mrr_at_{TOP}",
        notes=notes,
        head_settings=settings | (config.similarity.to_dict() if is_bi_encoder else {}),
        files=files | ({"passages": data.passages} if data.passages else {}),
    )


def _read_splits(
    config: ConfigDict, files: dict[str, str], notes: dict[str, int]
) -> dict[str, list[Query]]:
    """Returns the queries of each split; counts what is unusual in `notes`."""
    queries = {}
    for name, path in files.items():
        read = read_queries(path, name == "train", empty_texts=True)
        empty = [
            (query.location, f"the {name_of_text}")
            for query in read
            for name_of_text, texts in (("query", (query.text,)), ("negative", query.negatives))
            if not all(map(str.strip, texts))
        ]
        is_labeled = read[0].positive is not None
        tables.check_empty_texts(name, empty, is_labeled, bool(config.data.train), notes)
        queries[name] = limit_examples(read, config, name, notes)
    return queries


def read_queries(
    path: str | pathlib.Path, is_training: bool = False, empty_texts: bool = False
) -> list[Query]:
    """Reads queries from JSONL; all must have a positive, or (unless `is_training`) none.

    Without `empty_texts`, an empty query or negative raises ValueError, as a positive always does.
    """
    queries = []
    for values, location in tables.read_objects(path):
        text = text_field(values, "query", location, empty_texts)
        is_known = values.get("positive") is not None
        positive = text_field(values, "positive", location) if is_known else None
        negatives = field({"negatives": []} | values, "negatives", list, location)
        for each in negatives:
            text_field({"negative": each}, "negative", location, empty_texts and each is not None)
        if positive in negatives:
            raise ValueError(f"{location}: the positive is also one of the negatives: {positive!r}")
        name = tables.id_field(values, location, len(queries))
        queries.append(Query(name, text, positive, tuple(negatives), location))
    check_labeled(queries, [query.positive for query in queries], "positive", is_training)
    return tables.check_unique(queries)


def read_passages(path: str | pathlib.Path, empty_texts: bool = False) -> list[str]:
    """Reads the passages of a JSONL file, one `{"text": ...}` per line.

    Without `empty_texts`, an empty one raises ValueError.
    """
    return [
        text_field(values, "text", location, empty_texts)
        for values, location in tables.read_objects(path)
    ]


def make_split(
    name: str,
    queries: list[Query],
    sequences: Callable[[Iterable[Query], Iterable[str]], list[tuple]],
    collection: list[str],
    is_bi_encoder: bool,
) -> Split:
    """Builds a split that ranks passages for each query.

    The bi-encoder ranks all passages of the collection and of the file; the cross-encoder ranks
    only the query's own, e.g. those that a first stage retrieved.
    """
    if is_bi_encoder:
        candidates = (passage for query in queries for passage in query.candidates())
        passages = list(dict.fromkeys([*collection, *candidates]))
        index_of = {passage: index for index, passage in enumerate(passages)}
        ranked = [(query, passages, index_of.get(query.positive)) for query in queries]
        inputs = sequences(queries, passages)
    else:
        ranked = [(query, query.candidates(), 0 if query.positive else None) for query in queries]
        inputs = [pair for query, each, _ in ranked for pair in sequences([query], each)]
    for query, passages, _ in ranked:
        if not passages:
            fix = "'negatives', or for a bi_encoder set --config.data.passages"
            raise ValueError(f"{query.location}: no passages to rank: add {fix}")

    def rankings(outputs: Outputs) -> Iterable[tuple[tuple, np.ndarray]]:
        """Returns each entry of `ranked` with the scores of its passages."""
        values = np.concatenate(outputs)
        if is_bi_encoder:
            scores = (values[len(queries) :] @ vector for vector in values[: len(queries)])
        else:
            scores = np.split(values, np.cumsum([len(passages) for _, passages, _ in ranked])[:-1])
        return zip(ranked, scores, strict=True)

    def score(outputs: Outputs) -> dict[str, float]:
        return rank_scores([rank(scores, positive) for (*_, positive), scores in rankings(outputs)])

    def write(outputs: Outputs, directory: pathlib.Path) -> pathlib.Path:
        """Writes the input format, with the best passages except the positive as hard negatives."""
        lines = []
        for (query, passages, positive), scores in rankings(outputs):
            best = np.argsort(-scores, kind="stable")[: TOP + 1]
            best = [index for index in best if index != positive][:TOP]
            line = {"id": query.id, "query": query.text}
            if positive is not None:
                line |= {"positive": query.positive, "rank": rank(scores, positive)}
            line["negatives"] = [passages[index] for index in best]
            lines.append(line | {"scores": scores[best].tolist()})
        path = directory / f"{name}.jsonl"
        tables.write_json_lines(path, lines)
        return path

    features = [ModelInput((tokens,), (second_start,)) for tokens, second_start in inputs]
    return Split(name, features, score if queries[0].positive else None, write)


def rank(scores: np.ndarray, index: int) -> int:
    """Returns the rank of a passage, from 1; passages with the same score rank before it."""
    return int(np.sum(scores >= scores[index]))


def rank_scores(ranks: Sequence[int]) -> dict[str, float]:
    """Computes the mean reciprocal rank (0 beyond `TOP`), and the recall at 1 and at `TOP`."""
    ranks = np.asarray(ranks)
    return {
        f"mrr_at_{TOP}": float(np.mean(np.where(ranks <= TOP, 1 / ranks, 0))),
        "recall_at_1": float(np.mean(ranks <= 1)),
        f"recall_at_{TOP}": float(np.mean(ranks <= TOP)),
    }
