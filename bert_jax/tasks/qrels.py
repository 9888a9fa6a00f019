"""Reads judged passages by id: corpus, queries and qrels of BEIR and TREC, and runs to rerank.

BEIR (Thakur et al., 2021): `corpus.jsonl` with `_id`, `title` and `text`, `queries.jsonl` with
`_id` and `text`, and `qrels/SPLIT.tsv` with `query-id`, `corpus-id` and `score`. The judgments and
the ranked results (runs) of TREC are text without a header (see trec_eval's README), as are the
passages and queries of its deep learning track (MS MARCO).
"""

import collections
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from bert_jax.tasks import tables
from bert_jax.tasks.queries import (
    ID_NAMES,
    Query,
    TokenizedTexts,
    find_name,
    read_id,
    read_number,
)
from bert_jax.tasks.retrieval_scores import CUTOFFS, query_scores, ranks_by_id

_QRELS_COLUMNS = ("query-id", "corpus-id", "score")
_TEXT_NAMES = ("text", "query")


class JudgedQuery(NamedTuple):
    """A query with the ids of the passages that are judged for it.

    Attributes:
      grades: id -> grade, above 0, of each passage that answers the query; some may be in no
        corpus, and are then never found.
      non_relevant: ids of the passages that are judged not to answer it.
      listed: ids of the passages that a first stage found, best first; None: none is given.
    """

    id: str
    text: str
    grades: Mapping[str, float]
    non_relevant: Sequence[str]
    listed: Sequence[str] | None
    location: str


class Judged(NamedTuple):
    """Passages by id, title included, and the judged queries of each split."""

    corpus: dict[str, str]
    splits: dict[str, list[JudgedQuery]]


def read_judged(config: ConfigDict, files: Mapping[str, str], notes: dict[str, int]) -> Judged:
    """Reads `data.passages`, `data.queries`, `data.run` and the qrels of each split.

    Counts in `notes` the ids that no file has, and the queries without a passage that answers them,
    which are left out. Raises ValueError for bad input.
    """
    data = config.data
    if not data.passages:
        problem = "the files of train, dev and test have ids of passages: expected their texts"
        raise ValueError(
            f"config.data.queries={data.queries}, without config.data.passages: {problem}"
        )
    corpus = read_corpus(data.passages, notes)
    texts = read_query_texts(data.queries, notes)
    run = read_run(data.run) if data.run else {}
    splits = {}
    for name, path in files.items():
        qrels = read_qrels(path)
        notes[f"{name} queries of the qrels that {data.queries} does not have"] = len(
            qrels.keys() - texts.keys()
        )
        judged = {id_ for query in qrels.values() for id_ in query}
        notes[f"{name} passages of the qrels that {data.passages} does not have"] = len(
            judged - corpus.keys()
        )
        queries, num_left_out, num_without_run = [], 0, 0
        for id_, all_grades in qrels.items():
            if id_ not in texts:
                continue
            grades = {passage: grade for passage, grade in all_grades.items() if grade > 0}
            if not grades or (name == "train" and not grades.keys() & corpus.keys()):
                num_left_out += 1
                continue
            listed = [each for each in run.get(id_, ()) if each in corpus] if run else None
            num_without_run += listed == []
            others = [each for each in all_grades if each not in grades and each in corpus]
            location = f"{path}, query {id_!r}"
            queries.append(JudgedQuery(id_, texts[id_], grades, others, listed, location))
        notes[f"{name} queries without a passage that answers them, left out"] = num_left_out
        if run:
            notes[f"{name} queries without results in {data.run}"] = num_without_run
        if not queries:
            expected = f"expected ids of {data.queries} and {data.passages}"
            raise ValueError(f"{path} judges no passage as relevant for a known query: {expected}")
        splits[name] = queries
    if run:
        missing = {each for passages in run.values() for each in passages} - corpus.keys()
        notes[f"passages of the run that {data.passages} does not have"] = len(missing)
    return Judged(corpus, splits)


def read_corpus(path: str | pathlib.Path, notes: dict[str, int]) -> dict[str, str]:
    """Reads a corpus: id -> text, after its title and a space if it has one, as BEIR does."""
    texts = {}
    for id_, values, location in _iterate_with_ids(path):
        title = tables.text_field({"title": ""} | values, "title", location, may_be_empty=True)
        text = tables.text_field(values, "text", location, may_be_empty=True)
        texts[id_] = join_title(title, text)
    notes["passages that are empty"] = sum(not text for text in texts.values())
    return texts


def join_title(title: str, text: str) -> str:
    """Returns the title, if there is one, a space and the text."""
    return f"{title} {text}".strip() if title else text


def read_query_texts(path: str | pathlib.Path, notes: dict[str, int]) -> dict[str, str]:
    """Reads queries: id -> text, in the column `text` or `query`."""
    texts = {}
    for id_, values, location in _iterate_with_ids(path):
        name = next((name for name in _TEXT_NAMES if name in values), "query")
        texts[id_] = tables.text_field(values, name, location, may_be_empty=True)
    notes["queries that are empty"] = sum(not text.strip() for text in texts.values())
    return texts


def _iterate_with_ids(path: str | pathlib.Path) -> Iterator[tuple[str, dict, str]]:
    """Yields (id, values, location) of each row of a table. Raises ValueError for an id twice."""
    locations: dict[str, str] = {}
    for values, location in _iterate_named(pathlib.Path(path)):
        if values.get(find_name(values, ID_NAMES)) is None:
            names = " or ".join(map(repr, ID_NAMES))
            found = ", ".join(values) or "none"
            raise ValueError(f"{location}: no {names}, which qrels refer to; found {found}")
        id_ = read_id(values, location, 0)
        if id_.split() != [id_]:
            problem = "is empty or has white space, which separates the columns of qrels and runs"
            raise ValueError(f"{location}: the id {id_!r} {problem}: change it")
        tables.check_new_id(id_, location, locations)
        yield id_, values, location


def _iterate_named(path: pathlib.Path) -> Iterator[tuple[dict, str]]:
    """Yields the values of each row by name, and its location.

    A TSV of two columns whose first line has none of their names is one of TREC's deep learning
    track, as MS MARCO has them: ids and texts, without a header and quotes.
    """
    lines = tables.iterate_lines(path, "texts with ids") if path.suffix == ".tsv" else iter(())
    first = next(lines, "").rstrip("\n").split("\t")
    if len(first) != 2 or {*first} & {*ID_NAMES, *_TEXT_NAMES}:
        yield from tables.iterate_rows(path)
        return
    logging.warning(
        "%s has no header with id and text: its first line has the id %r", path, first[0]
    )
    for number, line in enumerate(itertools.chain(["\t".join(first)], lines), start=1):
        location, values = f"{path}, line {number}", line.rstrip("\n").split("\t")
        if len(values) != 2:
            expected = "expected two, an id and a text, as in the first line"
            raise ValueError(f"{location}: found {len(values)} columns: {expected}")
        yield dict(zip(("id", "text"), values, strict=True)), location


def read_qrels(path: str | pathlib.Path) -> dict[str, dict[str, float]]:
    """Reads judgments: query id -> passage id -> grade.

    From a table with the columns `query-id`, `corpus-id` and `score`, as BEIR has them (also from
    JSONL and Parquet), or from lines of `query iteration passage grade` of TREC. Raises ValueError
    for a grade that is not a number, or for two grades of one passage.
    """
    qrels: dict[str, dict[str, float]] = {}
    for query, passage, grade, location in _iterate_judgments(path):
        number = read_number({"score": grade}, "score", location)
        own = qrels.setdefault(query, {})
        if own.setdefault(passage, number) != number:
            problem = (
                f"the passage {passage!r} of query {query!r} has another grade in a line before"
            )
            raise ValueError(f"{location}: {problem}")
    if not qrels:
        raise ValueError(f"{path} holds no judgments")
    return qrels


def _iterate_judgments(path: str | pathlib.Path) -> Iterator[tuple[str, str, object, str]]:
    """Yields (query, passage, grade, location) of each judgment."""
    if pathlib.Path(path).suffix in (".jsonl", ".parquet"):
        for values, location in tables.iterate_rows(path):
            for name in _QRELS_COLUMNS:
                tables.field(values, name, str | int | float, location)
            query, passage = (
                tables.id_field(values, location, 0, _QRELS_COLUMNS[i]) for i in (0, 1)
            )
            yield query, passage, values["score"], location
        return
    expected = f"the columns {', '.join(_QRELS_COLUMNS)}, or TREC's query, 0, passage, grade"
    for number, line in enumerate(tables.iterate_lines(pathlib.Path(path), "qrels"), start=1):
        location, values = f"{path}, line {number}", line.split()
        if not values or (number == 1 and tuple(values) == _QRELS_COLUMNS):
            continue
        if len(values) == 4:
            del values[1]
        if len(values) != 3:
            raise ValueError(f"{location}: found {len(values)} columns: expected {expected}")
        query, passage, grade = values
        yield query, passage, grade, location


def read_run(path: str | pathlib.Path) -> dict[str, dict[str, float]]:
    """Reads a run of TREC: query id -> id of each passage that was found -> score, best first.

    As in trec_eval, their order is that of the scores; of equal ones, that of the file. Raises
    ValueError for a bad line, or for a passage twice.
    """
    found: dict[str, dict[str, float]] = collections.defaultdict(dict)
    expected = "query, Q0, passage, rank, score, name of the run"
    for number, line in enumerate(tables.iterate_lines(pathlib.Path(path), "a run"), start=1):
        location, values = f"{path}, line {number}", line.split()
        if not values:
            continue
        if len(values) != 6:
            raise ValueError(f"{location}: found {len(values)} columns: expected {expected}")
        query, _, passage, _, score, _ = values
        value = read_number({"score": score}, "score", location)
        if passage in found[query]:
            raise ValueError(f"{location}: passage {passage!r} of query {query!r} occurs twice")
        found[query][passage] = value
    if not found:
        raise ValueError(f"{path} holds no results")
    return {
        query: {id_: own[id_] for id_ in sorted(own, key=own.get, reverse=True)}
        for query, own in found.items()
    }


def score_run(
    qrels: Mapping[str, Mapping[str, float]],
    run: Mapping[str, Mapping[str, float]],
    cutoffs: Sequence[int] = CUTOFFS,
) -> tuple[list[str], dict[str, np.ndarray]]:
    """Returns the ids of the queries that are scored, and their `query_scores`.

    These are the queries of `qrels` with a grade above 0; those without results score 0.
    """
    ids, ranks, grades = [], [], []
    for query, own in qrels.items():
        relevant = {id_: grade for id_, grade in own.items() if grade > 0}
        if not relevant:
            continue
        results = run.get(query, {})
        places = {id_: place for place, id_ in enumerate(results)}
        ids.append(query)
        ranks.append(ranks_by_id(np.array(list(results.values())), places, relevant))
        grades.append(np.array(list(relevant.values())))
    if not ids:
        raise ValueError("no query of the qrels has a passage with a grade above 0")
    return ids, query_scores(ranks, grades, cutoffs)


def training_queries(
    judged: Sequence[JudgedQuery],
    corpus: Mapping[str, str],
    passages: TokenizedTexts,
    notes: dict[str, int],
) -> list[Query]:
    """Returns a `Query` for each passage that answers a query.

    Its negatives are the passages that are judged as non-relevant, then those of the first stage
    that are not judged. Negatives that are copies of a positive are left out, and counted in
    `notes`.
    """
    queries, num_copies = [], 0
    for query in judged:
        positives = {id_: corpus[id_] for id_ in query.grades if id_ in corpus}
        others = (id_ for id_ in query.listed or () if id_ not in query.grades)
        negatives = [corpus[id_] for id_ in dict.fromkeys([*query.non_relevant, *others])]
        passages.add([*positives.values(), *negatives])
        relevant = {passages.identity[text] for text in positives.values()}
        kept = tuple(text for text in negatives if passages.identity[text] not in relevant)
        num_copies += len(negatives) - len(kept)
        queries += [
            Query(query.id, query.text, text, kept, query.location, grade=query.grades[id_])
            for id_, text in positives.items()
        ]
    notes["train negatives left out because they are copies of a positive"] = num_copies
    return queries
