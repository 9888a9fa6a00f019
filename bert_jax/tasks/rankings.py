"""Dev and test of retrieval without ids: the passages of the lines, ranked for each query."""

import collections
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.tasks import tables
from bert_jax.tasks.queries import Inputs, Query, TokenizedTexts, check_differs, make_feature
from bert_jax.tasks.retrieval_scores import (
    TOP,
    best_indices,
    count_active_dims,
    find_ranks,
    query_scores,
    scores_of_vectors,
    write_scores,
)
from bert_jax.tasks.similarity_scores import triplet_accuracy
from bert_jax.tasks.task import Outputs, Split
from bert_jax.tasks.token_vectors import max_similarity_rows


class Ranking(NamedTuple):
    """The passages to rank for one query.

    Attributes:
      lines: indices of the lines of the query.
      passages: distinct passages.
      positives: for each line, the index in `passages` of its positive; empty if unknown.
      listed: indices of the passages that a first stage found; None: all.
      grades: of each of the distinct positives, `relevant`.
      negatives: for each line, the indices of its negatives that are no positives of the query.
    """

    lines: list[int]
    passages: Sequence[str]
    positives: list[int]
    listed: list[int] | None
    grades: list[float]
    negatives: list[list[int]]

    @property
    def relevant(self) -> list[int]:
        """The distinct `positives`."""
        return list(dict.fromkeys(self.positives))

    def ranks(self, scores: np.ndarray, all_are_found: bool = False) -> np.ndarray:
        """Returns the rank of each of `relevant`; see `find_ranks`."""
        listed = None if all_are_found else self.listed
        return find_ranks(scores, self.relevant, listed, self.grades)

    def triplet_accuracy(self, scores: np.ndarray) -> float:
        """Returns how often a line's positive has a higher score than one of its negatives.

        NaN if no line has negatives.
        """
        if not any(self.negatives):
            return np.nan
        triplets = [
            (positive, negative)
            for positive, negatives in zip(self.positives, self.negatives, strict=True)
            for negative in negatives
        ]
        return triplet_accuracy(*(scores[list(column)] for column in zip(*triplets, strict=True)))


def _find_negatives(
    lines: Sequence[Query],
    positives: Sequence[int],
    index_of: Mapping[bytes | str, int],
    passages: TokenizedTexts,
) -> list[list[int]]:
    """Returns the indices of the negatives of each line that are no positives."""
    found = [[index_of[passages.identity[text]] for text in line.negatives] for line in lines]
    return [[index for index in each if index not in positives] for each in found]


def _best_grades(positives: Sequence[int], lines: Sequence[Query]) -> list[float]:
    """Returns the grade of each distinct positive, the best one on any of the `lines`."""
    best: dict[int, float] = {}
    for index, line in zip(positives, lines, strict=True):
        best[index] = max(line.grade, best.get(index, 0))
    return list(best.values())


def group_lines(lines: Sequence[Query], queries: TokenizedTexts) -> list[list[int]]:
    """Returns the indices of the lines of each distinct query."""
    groups = collections.defaultdict(list)
    for index, line in enumerate(lines):
        groups[queries.identity[line.text]].append(index)
    return list(groups.values())


def rank_candidates(group: list[int], lines: Sequence[Query], passages: TokenizedTexts) -> Ranking:
    """Returns the ranking of a query's own candidates, the positives first.

    All candidates are ranked, but in a pipeline only those that the first stage found (`listed`):
    positives whose rank is at most its depth, and then the best other candidates up to that depth.
    """
    own = [lines[index] for index in group]
    is_labeled = own[0].positive is not None
    relevant = passages.distinct(line.positive for line in own if is_labeled)
    texts = passages.distinct([*relevant, *(text for line in own for text in line.negatives)])
    index_of = {passages.identity[text]: index for index, text in enumerate(texts)}
    positives = [index_of[passages.identity[line.positive]] for line in own if is_labeled]
    ranks = np.full(len(relevant), np.inf)
    for line, index in zip(own, positives, strict=False):
        ranks[index] = min(ranks[index], line.rank)
    depth = max((line.depth for line in own if line.depth), default=len(texts))
    found = np.flatnonzero(ranks <= depth).tolist()
    others = range(len(relevant), len(texts))[: max(depth - len(found), 0)]
    grades = _best_grades(positives, own) if is_labeled else []
    negatives = _find_negatives(own, positives, index_of, passages) if is_labeled else []
    return Ranking(group, texts, positives, [*found, *others], grades, negatives)


def _rank_collection(
    groups: list[list[int]],
    lines: Sequence[Query],
    collection: Sequence[str],
    passages: TokenizedTexts,
) -> list[Ranking]:
    """Returns the ranking of each query over the collection and all passages of the lines."""
    candidates = (text for line in lines for text in line.candidates())
    texts = passages.distinct([*collection, *candidates])
    index_of = {passages.identity[text]: index for index, text in enumerate(texts)}
    rankings = []
    for group in groups:
        own = [lines[index] for index in group if lines[index].positive]
        positives = [index_of[passages.identity[line.positive]] for line in own]
        grades = _best_grades(positives, own)
        negatives = _find_negatives(own, positives, index_of, passages)
        rankings.append(Ranking(group, texts, positives, None, grades, negatives))
    return rankings


def make_ranking_split(
    name: str,
    lines: list[Query],
    inputs: Inputs,
    collection: list[str],
    cutoffs: Sequence[int],
    notes: dict[str, int],
) -> Split:
    """Builds a split that ranks passages for each query.

    The bi-encoder ranks all passages of the collection and of the file; the cross-encoder ranks
    only the query's own, for example those that a first stage found.
    """
    is_bi_encoder, is_labeled = inputs.is_bi_encoder, lines[0].positive is not None
    passages = inputs.passages
    passages.add(text for line in lines for text in line.candidates())
    for line in lines:
        for negative in line.negatives:
            check_differs(line, negative, passages)
    groups = group_lines(lines, inputs.queries)
    if is_bi_encoder:
        rankings = _rank_collection(groups, lines, collection, passages)
        sequences = inputs.singles((line.text for line in lines), rankings[0].passages)
        counts = {"queries": len(groups), "passages": len(rankings[0].passages)}
    else:
        if not is_labeled:  # Each line is answered with its own candidates.
            groups = [[index] for index in range(len(lines))]
        rankings = [rank_candidates(group, lines, passages) for group in groups]
        texts = [(lines[each.lines[0]].text, each.passages) for each in rankings]
        sequences = [pair for each in texts for pair in inputs.pairs(*each)]
        counts = {"queries": len(groups), "pairs": len(sequences)}
        missed = sum(len(set(each.relevant) - set(each.listed)) for each in rankings)
        notes[f"{name} positives that the first stage missed"] = missed
    for ranking in rankings:
        if not ranking.passages:
            fix = "'negatives', or for a bi_encoder set config.data.passages"
            location = lines[ranking.lines[0]].location
            raise ValueError(f"{location}: no passages to rank: add {fix}")
    features = [make_feature([each]) for each in sequences]

    def scores_of(outputs: Outputs) -> Iterable[tuple[Ranking, np.ndarray]]:
        """Yields each ranking with the scores of its passages."""
        if inputs.rules:
            queries = [outputs[ranking.lines[0]] for ranking in rankings]
            return zip(rankings, max_similarity_rows(queries, outputs[len(lines) :]), strict=True)
        if is_bi_encoder:
            rows = [ranking.lines[0] for ranking in rankings]
            scores = scores_of_vectors(outputs, len(lines), rows)
        else:
            values = np.concatenate(outputs)
            scores = np.split(values, np.cumsum([len(each.passages) for each in rankings])[:-1])
        return zip(rankings, scores, strict=True)

    def scores_by_query(outputs: Outputs) -> dict[str, np.ndarray]:
        ranks, ranks_of_all, accuracies = [], [], []
        for ranking, scores in scores_of(outputs):
            ranks.append(ranking.ranks(scores))
            ranks_of_all.append(ranking.ranks(scores, all_are_found=True))
            accuracies.append(ranking.triplet_accuracy(scores))
        grades, mrr = [each.grades for each in rankings], f"mrr_at_{TOP}"
        result = query_scores(ranks, grades, cutoffs)
        if not np.isnan(accuracies).all():
            result["triplet_accuracy"] = np.array(accuracies)
        if not is_bi_encoder:
            result[f"{mrr}_if_all_found"] = query_scores(ranks_of_all, cutoffs=(TOP,))[mrr]
        return result

    def score(outputs: Outputs) -> dict[str, float]:
        means = {name: float(np.nanmean(each)) for name, each in scores_by_query(outputs).items()}
        return means | count_active_dims(outputs, len(lines))

    def write(outputs: Outputs, directory: pathlib.Path) -> pathlib.Path:
        path = directory / f"{name}.jsonl"
        tables.write_json_lines(path, describe_rankings(lines, scores_of(outputs)))
        if is_labeled:
            ids = [lines[each.lines[0]].id for each in rankings]
            values = scores_by_query(outputs).items()
            # Queries without negatives have no triplet accuracy, and thus no interval.
            complete = {key: each for key, each in values if not np.isnan(each).any()}
            write_scores(directory, name, ids, complete)
        return path

    return Split(name, features, score if is_labeled else None, write, counts=counts)


def describe_rankings(
    lines: Sequence[Query], scored: Iterable[tuple[Ranking, np.ndarray]]
) -> list[dict]:
    """Returns each line in the input format, with the best non-relevant passages as hard negatives.

    Args:
      scored: the ranking of each query, with the scores of its passages.
    """
    described = {}
    for ranking, scores in scored:
        rank_of = dict(zip(ranking.relevant, ranking.ranks(scores).tolist(), strict=True))
        listed = np.arange(len(scores)) if ranking.listed is None else np.array(ranking.listed, int)
        best = listed[~np.isin(listed, ranking.relevant)]
        best = best[best_indices(scores[best], TOP)]
        for number, index in enumerate(ranking.lines):
            values = {"id": lines[index].id, "query": lines[index].text}
            if ranking.positives:
                rank = rank_of[ranking.positives[number]]
                values["positive"] = lines[index].positive
                values["rank"] = int(rank) if rank < np.inf else None
                values["depth"] = TOP
                values["positive_score"] = float(scores[ranking.positives[number]])
            values["negatives"] = [ranking.passages[each] for each in best]
            described[index] = values | {"scores": scores[best].tolist()}
    return [described[index] for index in range(len(lines))]
