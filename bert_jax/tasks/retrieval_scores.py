"""Computes scores of rankings from graded judgments, as trec_eval defines them, with intervals.

In a tie, the passage with the lower grade comes first, one without a judgment before all that
answer the query: a score depends neither on the order of the passages nor on their ids, and a model
that gives all passages the same score gets the lowest. (trec_eval orders a tie by the ids.)
"""

import csv
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from scipy import sparse

from bert_jax.model.heads import Outputs
from bert_jax.tasks.resampling import NUM_SAMPLES, bootstrap_interval

TOP = 10
"""The last rank at which a passage counts as found."""
CUTOFFS = (1, TOP, 100)
"""Default numbers of passages, from the first, that scores look at."""


def scores_of_vectors(
    outputs: Outputs, num_queries: int, rows: Iterable[int]
) -> Iterator[np.ndarray]:
    """Yields the dot products of one query with all passages, float32 `[passages]`.

    Args:
      outputs: the vectors of all queries, then of all passages, `[1, size]` each.
      rows: the indices of the queries to compare.
    """
    vectors = join_vectors(outputs)
    passages = vectors[num_queries:]
    for row in rows:
        query = vectors[[row]]
        yield passages @ (query.toarray() if sparse.issparse(query) else query)[0]


def count_active_dims(outputs: Outputs, num_queries: int) -> dict[str, float]:
    """Returns the mean number of weights that are not 0, of queries and of passages; {} if dense.

    `outputs` are those of `scores_of_vectors`. They say how sparse vectors are, and so how fast a
    search is.
    """
    if not outputs or not sparse.issparse(outputs[0]):
        return {}
    counts = [output.nnz for output in outputs]
    parts = {"query": counts[:num_queries], "passage": counts[num_queries:]}
    return {f"{name}_active_dims": float(np.mean(each)) for name, each in parts.items()}


def join_vectors(outputs: Outputs) -> np.ndarray | sparse.csr_array:
    """Returns `[texts, size]`, of vectors `[1, size]` that are all dense, or all sparse."""
    is_sparse = sparse.issparse(outputs[0])
    return sparse.vstack(outputs, format="csr") if is_sparse else np.concatenate(outputs)


def find_ranks(
    scores: np.ndarray,
    relevant: Sequence[int],
    listed: Sequence[int] | None = None,
    grades: Sequence[float] | None = None,
) -> np.ndarray:
    """Returns the rank, from 1, of each relevant passage in the order of descending scores.

    In a tie, passages that are not relevant come first, then those with lower grades.

    Args:
      scores: `[passages]`, of one query.
      relevant: distinct indices of the passages that answer it.
      listed: distinct indices of the passages to rank; None: all. The others have rank infinity.
      grades: of the relevant passages; None: all are equal.

    Returns:
      float64 `[relevant]`, in the order of `relevant`.
    """
    relevant = np.asarray(relevant, int)
    if listed is None:
        is_listed, others = np.ones(len(relevant), bool), np.delete(scores, relevant)
    else:
        listed = np.asarray(listed, int)
        is_listed, others = np.isin(relevant, listed), scores[np.setdiff1d(listed, relevant)]
    own = scores[relevant]
    order = np.lexsort((np.zeros(len(own)) if grades is None else grades, -own))
    order = order[is_listed[order]]
    ranks = np.full(len(relevant), np.inf)
    num_others_above = [np.sum(others >= score) for score in own[order]]
    ranks[order] = np.arange(1, len(order) + 1) + num_others_above
    return ranks


def best_indices(scores: np.ndarray, count: int) -> np.ndarray:
    """Returns the indices of the `count` largest scores, best first; of equal ones, the first."""
    candidates = np.arange(len(scores))
    if count < len(scores):  # Sorts few of many.
        candidates = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    return candidates[np.argsort(-scores[candidates], kind="stable")][:count]


def ranks_by_id(
    scores: np.ndarray, places: Mapping[str, int], grades: Mapping[str, float]
) -> np.ndarray:
    """Returns `find_ranks` of the passages in `grades`: infinity for one that has no place.

    Args:
      scores: `[passages]`, of one query.
      places: id -> index in `scores`, of each passage that is ranked.
      grades: id -> grade, of each passage that answers the query.
    """
    found = [id_ for id_ in grades if id_ in places]
    own = [places[id_] for id_ in found]
    ranks = find_ranks(scores, own, grades=[grades[id_] for id_ in found])
    rank_of = dict(zip(found, ranks, strict=True))
    return np.array([rank_of.get(id_, np.inf) for id_ in grades])


def query_scores(
    ranks: Sequence[np.ndarray],
    grades: Sequence[np.ndarray] | None = None,
    cutoffs: Sequence[int] = CUTOFFS,
) -> dict[str, np.ndarray]:
    """Computes the scores of each query at each of `cutoffs`, k.

    `mrr_at_k` is the reciprocal rank of the first relevant passage, 0 beyond k. `accuracy_at_k` is
    1 if any of them is among the first k, `recall_at_k` the share of them that are,
    `precision_at_k` their number divided by k. `map_at_k` sums the precision at the rank of each of
    them up to k, and divides by the number of all (not by k, where there are more, as
    sentence-transformers does). `ndcg_at_k` is the sum of grade / log2(rank + 1) up to k, divided
    by the largest possible (Järvelin and Kekäläinen, 2002). They equal trec_eval's recip_rank,
    success_k, recall_k, P_k, map_cut_k and ndcg_cut_k.

    Args:
      ranks: of each query the ranks of all its relevant passages, at least one; infinity for one
        that is not found.
      grades: of the same passages, above 0; None: 1.

    Returns:
      float64 `[queries]` by name.
    """
    size = (len(ranks), max(map(len, ranks)))
    table, gains = np.full(size, np.inf), np.zeros(size)
    for row, own in enumerate(ranks):
        order = np.argsort(own, kind="stable")
        table[row, : len(own)] = np.asarray(own, float)[order]
        gains[row, : len(own)] = 1 if grades is None else np.asarray(grades[row])[order]
    counts = np.array([len(own) for own in ranks])
    places = np.arange(1, size[1] + 1)
    first, precisions = table[:, 0], places / table
    ideal_gains = -np.sort(-gains) / np.log2(places + 1)
    found_gains = gains / np.log2(table + 1)
    result = {}
    for k in cutoffs:
        found = table <= k
        num_found = found.sum(axis=1)
        result[f"mrr_at_{k}"] = np.where(first <= k, 1 / first, 0)
        result[f"ndcg_at_{k}"] = (found_gains * found).sum(1) / ideal_gains[:, :k].sum(1)
        result[f"map_at_{k}"] = (precisions * found).sum(axis=1) / counts
        result[f"accuracy_at_{k}"] = (num_found > 0).astype(float)
        result[f"recall_at_{k}"] = num_found / counts
        result[f"precision_at_{k}"] = num_found / k
    return result


def score_names(cutoffs: Sequence[int] = CUTOFFS) -> list[str]:
    """Returns the names of `query_scores`."""
    return list(query_scores([np.ones(1)], cutoffs=cutoffs))


def rank_scores(
    ranks: Sequence[np.ndarray],
    grades: Sequence[np.ndarray] | None = None,
    cutoffs: Sequence[int] = CUTOFFS,
) -> dict[str, float]:
    """Returns the means of `query_scores` over queries."""
    values = query_scores(ranks, grades, cutoffs)
    return {name: float(np.mean(each)) for name, each in values.items()}


def bootstrap_intervals(
    values: Mapping[str, np.ndarray], num_samples: int = NUM_SAMPLES, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Returns the bounds of each score's mean over queries, by the bootstrap over the same queries.

    Args:
      values: float `[queries]` by name, such as `query_scores`.
    """
    table = np.stack(list(values.values()), axis=1)
    bounds = bootstrap_interval(
        lambda queries: table[queries].mean(axis=0), len(table), num_samples=num_samples, seed=seed
    )
    return {
        name: (float(low), float(high)) for name, low, high in zip(values, *bounds, strict=True)
    }


def describe_scores(values: Mapping[str, np.ndarray]) -> list[str]:
    """Returns the lines of a table: each score's mean, and the bounds of its 95 % interval."""
    intervals = bootstrap_intervals(values)
    rows = (
        [score, *(f"{number:.4f}" for number in (each.mean(), *intervals[score]))]
        for score, each in values.items()
    )
    return ["\t".join(row) for row in (["score", "mean", "low", "high"], *rows)]


def write_scores(
    directory: pathlib.Path, name: str, ids: Sequence[str], values: Mapping[str, np.ndarray]
) -> None:
    """Writes NAME_scores.tsv, as `describe_scores` has them, and NAME_queries.tsv, of each id."""
    lines = describe_scores(values)
    (directory / f"{name}_scores.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_query_scores(directory / f"{name}_queries.tsv", ids, values)


def write_query_scores(
    path: pathlib.Path, ids: Sequence[str], values: Mapping[str, np.ndarray]
) -> None:
    """Writes the scores of each query by id, separated by tabs."""
    with open(path, "w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, delimiter="\t", lineterminator="\n")
        writer.writerow(["id", *values])
        columns = (each.round(6).tolist() for each in values.values())
        writer.writerows(zip(ids, *columns, strict=True))
