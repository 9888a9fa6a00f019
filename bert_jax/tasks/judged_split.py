"""Dev and test of retrieval with ids: judged queries over the passages of a corpus."""

import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from bert_jax.tasks import tables
from bert_jax.tasks.qrels import JudgedQuery
from bert_jax.tasks.queries import Inputs, make_feature
from bert_jax.tasks.retrieval_scores import (
    TOP,
    best_indices,
    count_active_dims,
    query_scores,
    ranks_by_id,
    scores_of_vectors,
    write_scores,
)
from bert_jax.tasks.task import Outputs, Split, limit_examples
from bert_jax.tasks.token_vectors import max_similarity_rows
from bert_jax.tasks.vectors import write_run

MAX_RESULTS = 100
"""Number of passages of a query in SPLIT.run."""


def make_judged_split(
    name: str,
    queries: Sequence[JudgedQuery],
    corpus: Mapping[str, str],
    inputs: Inputs,
    config: ConfigDict,
    notes: dict[str, int],
) -> Split:
    """Builds a split that ranks the passages of a corpus, by id, for judged queries.

    The bi-encoder ranks all of them; with `max_eval_examples`, that many, evenly spaced, and those
    that are judged. The cross-encoder ranks those that the first stage found. A passage that
    answers the query and is not ranked counts as not found.
    """
    if inputs.is_bi_encoder:
        judged = {id_ for query in queries for id_ in (*query.grades, *query.non_relevant)}
        kept = {*limit_examples(list(corpus), config, "corpus", notes)} | judged
        ranked = [[id_ for id_ in corpus if id_ in kept]] * len(queries)
        groups = ranked[:1]
        counts = {"queries": len(queries), "passages": len(ranked[0])}
    else:
        if config.data.run == "":
            fix = "set config.data.run=FILE, the results of a first stage"
            raise ValueError(f"{queries[0].location}: no passages to rank: {fix}")
        groups = ranked = [query.listed for query in queries]
        counts = {"queries": len(queries), "pairs": sum(map(len, ranked))}
    inputs.passages.add(corpus[id_] for ids in groups for id_ in ids)
    if inputs.is_bi_encoder:
        texts = [query.text for query in queries]
        sequences = inputs.singles(texts, (corpus[id_] for id_ in ranked[0]))
    else:
        sequences = [
            pair
            for query, ids in zip(queries, ranked, strict=True)
            for pair in inputs.pairs(query.text, [corpus[id_] for id_ in ids])
        ]
    features = [make_feature([each]) for each in sequences]
    # The place in `ranked` of each id; all queries of a bi-encoder share one.
    places = [{id_: place for place, id_ in enumerate(ids)} for ids in groups]
    places = places * len(queries) if inputs.is_bi_encoder else places

    def scores_of(outputs: Outputs) -> Iterable[np.ndarray]:
        if not inputs.is_bi_encoder:
            values = np.concatenate([np.zeros(0), *outputs])
            return np.split(values, np.cumsum([len(ids) for ids in ranked])[:-1])
        if inputs.rules:
            return max_similarity_rows(outputs[: len(queries)], outputs[len(queries) :])
        return scores_of_vectors(outputs, len(queries), range(len(queries)))

    def scores_by_query(ranks: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        grades = [list(query.grades.values()) for query in queries]
        return query_scores(ranks, grades, config.data.cutoffs)

    def score(outputs: Outputs) -> dict[str, float]:
        rows = zip(queries, places, scores_of(outputs), strict=True)
        ranks = [ranks_by_id(scores, place, query.grades) for query, place, scores in rows]
        values = scores_by_query(ranks)
        means = {name: float(each.mean()) for name, each in values.items()}
        return means | count_active_dims(outputs, len(queries))

    # An empty or unknown passage cannot be a positive of SPLIT.jsonl.
    known_ids = [[id_ for id_ in query.grades if corpus.get(id_, "").strip()] for query in queries]
    notes[f"{name} queries without a known relevant passage, not in {name}.jsonl"] = sum(
        not known for known in known_ids
    )
    identity = inputs.passages.identity

    def describe(outputs: Outputs) -> Iterator[tuple[dict | None, dict, np.ndarray]]:
        """Yields, for each query, its line in the input format, its results, and its ranks.

        The line is None without a positive.
        """
        num_copies = 0
        rows = zip(queries, places, ranked, known_ids, scores_of(outputs), strict=True)
        for query, place, ids, known, scores in rows:
            order = best_indices(scores, MAX_RESULTS + len(query.grades))
            results = [{"id": ids[i], "score": float(scores[i])} for i in order[:MAX_RESULTS]]
            found_ranks = ranks_by_id(scores, place, query.grades)
            if not known:
                yield None, {"id": query.id, "passages": results}, found_ranks
                continue
            inputs.passages.add(corpus[id_] for id_ in known)
            positives = {identity[corpus[id_]] for id_ in known}
            others = [i for i in order if ids[i] not in query.grades]
            negatives = [i for i in others if identity[corpus[ids[i]]] not in positives]
            num_copies += len(others) - len(negatives)
            negatives = negatives[:TOP]
            ranks = dict(zip(query.grades, found_ranks, strict=True))
            line = {
                "id": query.id,
                "query": query.text,
                "positives": [corpus[id_] for id_ in known],
                "positive_ids": known,
                "ranks": [int(ranks[id_]) if ranks[id_] < np.inf else None for id_ in known],
                "depth": TOP,
                "negatives": [corpus[ids[i]] for i in negatives],
                "negative_ids": [ids[i] for i in negatives],
                "scores": scores[negatives].tolist(),
            }
            if all(id_ in place for id_ in known):
                line["positive_scores"] = [float(scores[place[id_]]) for id_ in known]
            yield line, {"id": query.id, "passages": results}, found_ranks
        if num_copies:
            copies = f"of the best {MAX_RESULTS} passages, copies of a relevant one"
            logging.info("%s.jsonl: left out %d %s", name, num_copies, copies)

    def write(outputs: Outputs, directory: pathlib.Path) -> pathlib.Path:
        path = directory / f"{name}.jsonl"
        described, results, ranks = zip(*describe(outputs), strict=True)
        tables.write_json_lines(path, filter(None, described))
        write_run(directory / f"{name}.run", [results])
        write_scores(directory, name, [query.id for query in queries], scores_by_query(ranks))
        return path

    return Split(name, features, score, write, counts=counts)
