"""Retrieval: a bi-encoder finds passages by their embeddings, a cross-encoder reranks them.

Both are trained on queries, each with a passage that answers it and, optionally, some that do not:
one `{"query": ..., "positive": ..., "negatives": [...]}` per line. Lines with equal queries are one
query with several positives.

Two queries or passages are equal if their token ids are equal: in training the ids that the model
sees, in rankings all ids, because truncation must not make a passage equal to a
relevant one.
"""

import collections
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from bert_jax.data.features import ModelInput
from bert_jax.model import heads
from bert_jax.model.pooling import POOLINGS
from bert_jax.runtime.config_fields import Bounds, check_bounds
from bert_jax.tasks import tables
from bert_jax.tasks.prompts import prompt_settings
from bert_jax.tasks.qrels import JudgedQuery, read_judged, training_queries
from bert_jax.tasks.queries import (
    Inputs,
    Query,
    TokenizedTexts,
    check_differs,
    choose_negatives,
    iterate_queries,
    read_classes,
    read_passages,
    read_queries,
)
from bert_jax.tasks.retrieval_losses import TrainingLoss, find_loss, head_with_loss
from bert_jax.tasks.retrieval_scores import (
    TOP,
    best_indices,
    find_ranks,
    query_scores,
    rank_scores,
    ranks_by_id,
    score_names,
    write_scores,
)
from bert_jax.tasks.similarity_scores import triplet_accuracy
from bert_jax.tasks.task import (
    Outputs,
    Split,
    Task,
    TrainedHead,
    files_with_suffix,
    limit_examples,
    write_json_blocks,
)
from bert_jax.tasks.text_pairs import (
    PAIR_METRICS,
    TextPair,
    check_metric_of_pairs,
    make_pair_split,
    read_pairs,
)
from bert_jax.tasks.vectors import SearchPredictor, VectorPredictor, write_run
from bert_jax.tokenizers.tokenizer import Tokenizer

DEFAULT_METRICS = {"ranking": f"mrr_at_{TOP}", "similarity": "spearman"}
"""What dev and test are scored by, and the score that selects the best checkpoint."""
MAX_RESULTS = 100
"""Number of passages of a query in SPLIT.run."""
ROLES = ("bi_encoder", "cross_encoder")


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads the files named in `config.data`; see configs/finetune/retrieval.py."""
    data = config.data
    files = tables.files_from_config(data)
    loss = _check_config(config)
    is_bi_encoder = data.role == "bi_encoder"
    notes: dict[str, int] = {}
    is_ranking = dict.fromkeys(files, data.evaluation == "ranking")
    is_ranking["train"] = loss.labels not in ("pair", "class")
    rankings = {name: path for name, path in files.items() if is_ranking[name]}
    judged = read_judged(config, rankings, notes) if data.queries else None
    lines = {} if judged else _read_splits(config, rankings, notes)
    queries = TokenizedTexts(tokenizer, data.max_query_length, data.query_prompt)
    passages = TokenizedTexts(tokenizer, config.max_seq_length, data.passage_prompt)
    inputs = Inputs(tokenizer, is_bi_encoder, config.max_seq_length, queries, passages)
    queries.add(line.text for each in lines.values() for line in each)
    # Predictions take as long as there are passages, so these are limited too.
    collection = [] if judged else _read_collection(data, notes)
    collection = limit_examples(collection, config, "collection", notes)
    passages.add(collection)
    if judged and "train" in judged.splits:
        train = training_queries(judged.splits.pop("train"), judged.corpus, passages, notes)
        _check_num_negatives(train, data.num_negatives)
        queries.add(line.text for line in train)
        lines["train"] = train

    all_train = lines.pop("train", [])
    if loss.labels != "teacher_scores":
        notes["train lines with a teacher's scores, which this loss does not use"] = sum(
            line.scores is not None for line in all_train
        )
    used = limit_examples(all_train, config, "train", notes)
    features = []
    if used:
        num_negatives = data.num_negatives or 0
        features = _train_features(used, all_train, num_negatives, loss.labels, inputs, notes)
    elif "train" in files and loss.labels == "pair":
        features = _pair_features(config, loss, inputs, notes)
    elif "train" in files and loss.labels == "class":
        features = _class_features(config, inputs, notes)
    head, labels = (heads.EMBEDDING, ()) if is_bi_encoder else (heads.CROSS_ENCODER, ("score",))
    longest = max((np.size(feature.label) for feature in features), default=0)
    head = head_with_loss(head, loss, config, longest)
    splits = []
    for name, each in lines.items():
        # Keeps either all lines of a query or none.
        distinct = list(dict.fromkeys(queries.identity[line.text] for line in each))
        kept = set(limit_examples(distinct, config, name, notes))
        each = [line for line in each if queries.identity[line.text] in kept]
        splits.append(make_split(name, each, inputs, collection, data.cutoffs, notes))
        used = [*used, *each]
    for name, each in (judged.splits if judged else {}).items():
        each = limit_examples(each, config, name, notes)
        queries.add(query.text for query in each)
        splits.append(make_judged_split(name, each, judged.corpus, inputs, config, notes))
        used = [*used, *each]
    for name in (each for each in files if each != "train" and not is_ranking[each]):
        pairs = limit_examples(_read_pairs(config, name, files[name], notes), config, name, notes)
        if name == "dev":
            check_metric_of_pairs(data.metric, pairs, files[name])
        queries.add(pair.first for pair in pairs)
        passages.add(pair.second for pair in pairs)
        splits.append(make_pair_split(name, pairs, inputs))
    notes["queries truncated"] = queries.num_truncated(line.text for line in used)
    notes["passages truncated"] = passages.num_truncated(passages.ids)
    settings = {"max_query_length": data.max_query_length}
    settings |= prompt_settings(data.query_prompt, data.passage_prompt)
    if is_bi_encoder:
        settings |= {name: config.similarity[name] for name in ("pooling", "normalize")}
    return Task(
        head=head,
        labels=labels,
        train=features,
        splits=tuple(splits),
        metric=f"dev/{data.metric or DEFAULT_METRICS[data.evaluation]}",
        notes=notes,
        head_settings=settings,
        files=files | {name: data[name] for name in ("passages", "queries", "run") if data[name]},
    )


def _check_config(config: ConfigDict) -> TrainingLoss:
    """Returns the loss. Raises ValueError if a field of the task is invalid."""
    data, pooling = config.data, config.similarity.pooling
    if data.role not in ROLES:
        raise ValueError(f"config.data.role={data.role}: expected {' or '.join(ROLES)}")
    if pooling not in POOLINGS:
        raise ValueError(f"config.similarity.pooling={pooling}: expected {' or '.join(POOLINGS)}")
    is_bi_encoder = data.role == "bi_encoder"
    for name in ("query_prompt", "passage_prompt"):
        if data[name] and not is_bi_encoder:
            raise ValueError(f"config.data.{name}={data[name]!r}: only a bi_encoder takes prompts")
    if data.run and not data.queries:
        raise ValueError(f"config.data.run={data.run} has ids: set config.data.queries, too")
    cutoffs = data.cutoffs
    if (
        not cutoffs
        or not all(type(k) is int and k > 0 for k in cutoffs)
        or len({*cutoffs}) < len(cutoffs)
    ):
        expected = "different whole numbers from 1, such as (1, 10, 100)"
        raise ValueError(f"config.data.cutoffs={cutoffs}: expected {expected}")
    if data.evaluation not in DEFAULT_METRICS:
        expected = " or ".join(DEFAULT_METRICS)
        raise ValueError(f"config.data.evaluation={data.evaluation}: expected {expected}")
    is_ranking = data.evaluation == "ranking"
    if data.queries and not is_ranking:
        raise ValueError("config.data.evaluation=similarity: with data.queries, set it to ranking")
    names = score_names(cutoffs) if is_ranking else PAIR_METRICS
    metric = data.metric or DEFAULT_METRICS[data.evaluation]
    if metric not in names:
        default = "" if data.metric else ", the default"
        raise ValueError(
            f"config.data.metric={metric}{default}: expected one of {', '.join(names)}"
        )
    loss = find_loss(config)
    min_negatives = loss.min_negatives if data.train else 0
    # The cross-encoder needs room for a passage beside the query.
    bounds = Bounds(3, config.max_seq_length // (1 if is_bi_encoder else 2))
    limit = "max_seq_length" if is_bi_encoder else "half of max_seq_length"
    check_bounds(config, bounds, "data.max_query_length", limited_by=limit)
    check_bounds(config, Bounds(min_negatives), "data.num_negatives")
    if min_negatives and data.num_negatives is None:
        raise ValueError(
            "config.data.num_negatives is not set: this loss compares the passages of a query: "
            f"expected at least {min_negatives}"
        )
    return loss


def _read_splits(
    config: ConfigDict, files: dict[str, str], notes: dict[str, int]
) -> dict[str, list[Query]]:
    """Returns the lines of each split; counts what is unusual in `notes`."""
    lines = {}
    for name, path in files.items():
        unused: dict[str, int] = {}
        lines[name] = read_queries(path, name == "train", True, unused)
        tables.note_unused_keys(unused, f"{name} lines", notes)
        empty = [
            (line.location, f"the {name_of_text}")
            for line in lines[name]
            for name_of_text, texts in (("query", (line.text,)), ("negative", line.negatives))
            if not all(map(str.strip, texts))
        ]
        is_labeled = lines[name][0].positive is not None
        tables.check_empty_texts(name, empty, is_labeled, bool(config.data.train), notes)
    _check_num_negatives(lines.get("train", []), config.data.num_negatives)
    return lines


def _read_pairs(config: ConfigDict, name: str, path: str, notes: dict[str, int]) -> list[TextPair]:
    """Returns the text pairs of a split; counts what is unusual in `notes`."""
    unused: dict[str, int] = {}
    pairs = read_pairs(path, name == "train", True, unused)
    tables.note_unused_keys(unused, f"{name} lines", notes)
    empty = [
        (pair.location, name_of_text)
        for pair in pairs
        for name_of_text, text in (("the first text", pair.first), ("the second text", pair.second))
        if not text.strip()
    ]
    is_labeled = pairs[0].label is not None
    tables.check_empty_texts(name, empty, is_labeled, bool(config.data.train), notes)
    return pairs


def _check_num_negatives(train: Sequence[Query], num_negatives: int | None) -> None:
    """Raises ValueError for negatives if it is not set how many to train with."""
    with_negatives = [line for line in train if line.negatives]
    if num_negatives is None and with_negatives:
        fewest = min(len(line.negatives) for line in train)
        raise ValueError(
            f"{with_negatives[0].location}: it has 'negatives', but config.data.num_negatives is "
            "not set: set it to 0 to train without them, or to the number to train with per line "
            f"(each has at least {fewest})"
        )


def _read_collection(data: ConfigDict, notes: dict[str, int]) -> list[str]:
    """Returns the passages of `data.passages`, if any; counts what is unusual in `notes`."""
    if not data.passages:
        return []
    unused: dict[str, int] = {}
    collection = read_passages(data.passages, not data.train, unused)
    tables.note_unused_keys(unused, "passages", notes)
    notes["passages that are empty"] = sum(not text.strip() for text in collection)
    if data.role == "cross_encoder":
        notes["passages that a cross_encoder does not rank"] = len(collection)
        return []
    return collection


def _train_features(
    train: Sequence[Query],
    all_lines: Sequence[Query],
    num_negatives: int,
    labels: str,
    inputs: Inputs,
    notes: dict[str, int],
) -> list[ModelInput]:
    """Returns a feature for each line in `train`, a part of `all_lines`.

    A positive of a query, on any of `all_lines`, is never a negative for this query. `labels` is
    that of a `TrainingLoss`.
    """
    queries, passages = inputs.queries, inputs.passages
    positives: dict[bytes, dict[str, None]] = {queries.seen(line.text): {} for line in train}
    for line in all_lines:
        if (query := queries.seen(line.text)) in positives:
            positives[query][line.positive] = None
    passages.add(text for texts in positives.values() for text in texts)
    passages.add(text for line in train for text in line.negatives[:num_negatives])
    numbers: dict[bytes, int] = {}

    def number(text: str) -> int:
        return numbers.setdefault(passages.seen(text), len(numbers))

    features, num_left_out, num_unused = [], 0, 0
    for line in train:
        relevant = positives[queries.seen(line.text)]
        room = inputs.room(line.text)
        negatives, left_out = choose_negatives(line, relevant, passages, num_negatives, room)
        if len(negatives) < num_negatives:
            flag = f"config.data.num_negatives={num_negatives}"
            why = f", without {left_out} that answer the query" if left_out else ""
            found = f"fewer negatives ({len(negatives)}{why}) than {flag}"
            raise ValueError(f"{line.location}: {found}: set it lower, or add negatives")
        num_left_out += left_out
        num_unused += len(line.negatives) - len(negatives) - left_out
        candidates = (line.positive, *negatives)
        if inputs.is_bi_encoder:
            sequences = inputs.singles([line.text], candidates)
        else:
            sequences = inputs.pairs(line.text, candidates)
        label = 0  # The positive is first.
        if labels == "passages":
            own = [number(text) for text in candidates]
            others = {number(text) for text in relevant} - {own[0]}
            label = np.array([*own, *sorted(others)], np.int32)
        elif labels == "relevance":
            label = np.zeros(len(candidates), np.float32)
            label[0] = line.grade
        elif labels == "teacher_scores":
            label = _teacher_scores(line, candidates)
        features.append(ModelInput(*zip(*sequences, strict=True), label))
    notes["train negatives left out because they answer the query"] = num_left_out
    notes[f"train negatives not used, after the first {num_negatives} of a line"] = num_unused
    return features


def _pair_features(
    config: ConfigDict, loss: TrainingLoss, inputs: Inputs, notes: dict[str, int]
) -> list[ModelInput]:
    """Returns a feature for each pair of texts in `data.train`."""
    pairs = _read_pairs(config, "train", config.data.train, notes)
    pairs = limit_examples(pairs, config, "train", notes)
    inputs.queries.add(pair.first for pair in pairs)
    inputs.passages.add(pair.second for pair in pairs)
    features = []
    for pair in pairs:
        loss.check_label(pair.label, pair.location)
        if inputs.is_bi_encoder:
            sequences = inputs.singles([pair.first], [pair.second])
        else:
            sequences = inputs.pairs(pair.first, [pair.second])
        features.append(ModelInput(*zip(*sequences, strict=True), pair.label))
    return features


def _class_features(config: ConfigDict, inputs: Inputs, notes: dict[str, int]) -> list[ModelInput]:
    """Returns a feature for each text with a class in `data.train`."""
    texts = limit_examples(read_classes(config.data.train), config, "train", notes)
    inputs.passages.add(text for text, _ in texts)
    indices = {name: index for index, name in enumerate(sorted({name for _, name in texts}))}
    if len(indices) < 2:
        raise ValueError(f"config.data.train={config.data.train}: expected at least two classes")
    return [
        ModelInput(*zip(*inputs.singles([], [text]), strict=True), indices[name])
        for text, name in texts
    ]


def _teacher_scores(line: Query, candidates: Sequence[str]) -> np.ndarray:
    """Returns the teacher's score of each of some candidates of a line. Raises ValueError."""
    if line.scores is None:
        raise ValueError(
            f"{line.location}: it has no scores of a teacher, which this loss needs: add "
            "'positive_score' and 'negative_scores'"
        )
    score_of = dict(zip(line.candidates(), line.scores, strict=True))
    return np.array([score_of[text] for text in candidates], np.float32)


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


def _rank_candidates(group: list[int], lines: Sequence[Query], passages: TokenizedTexts) -> Ranking:
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


def make_split(
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
        rankings = [_rank_candidates(group, lines, passages) for group in groups]
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
    features = [ModelInput((tokens,), (second_start,)) for tokens, second_start in sequences]

    def scores_of(outputs: Outputs) -> Iterable[tuple[Ranking, np.ndarray]]:
        """Yields each ranking with the scores of its passages."""
        values = np.concatenate(outputs)
        if is_bi_encoder:
            vectors = values[len(lines) :]
            scores = (vectors @ values[ranking.lines[0]] for ranking in rankings)
        else:
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
        return {name: float(np.nanmean(each)) for name, each in scores_by_query(outputs).items()}

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


def make_judged_split(
    name: str,
    queries: Sequence[JudgedQuery],
    corpus: Mapping[str, str],
    inputs: Inputs,
    config: ConfigDict,
    notes: dict[str, int],
) -> Split:
    """Builds a split that ranks the passages of a corpus, by id, for judged queries.

    The bi-encoder ranks all of them, or of `max_eval_examples` queries as many, evenly spaced, and
    those that are judged; the cross-encoder those that the first stage found. A passage that
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
    features = [ModelInput((tokens,), (second_start,)) for tokens, second_start in sequences]
    # The place in `ranked` of each id; all queries of a bi-encoder share one.
    places = [{id_: place for place, id_ in enumerate(ids)} for ids in groups]
    places = places * len(queries) if inputs.is_bi_encoder else places

    def scores_of(outputs: Outputs) -> Iterable[np.ndarray]:
        if not inputs.is_bi_encoder:
            values = np.concatenate([np.zeros(0), *outputs])
            return np.split(values, np.cumsum([len(ids) for ids in ranked])[:-1])
        vectors = np.concatenate(outputs)
        return (vectors[len(queries) :] @ vectors[row] for row in range(len(queries)))

    def scores_by_query(ranks: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        grades = [list(query.grades.values()) for query in queries]
        return query_scores(ranks, grades, config.data.cutoffs)

    def score(outputs: Outputs) -> dict[str, float]:
        rows = zip(queries, places, scores_of(outputs), strict=True)
        ranks = [ranks_by_id(scores, place, query.grades) for query, place, scores in rows]
        values = scores_by_query(ranks)
        return {name: float(each.mean()) for name, each in values.items()}

    # An empty or unknown passage cannot be a positive of SPLIT.jsonl.
    known_ids = [[id_ for id_ in query.grades if corpus.get(id_, "").strip()] for query in queries]
    notes[f"{name} queries without a known relevant passage, not in {name}.jsonl"] = sum(
        not known for known in known_ids
    )
    identity = inputs.passages.identity

    def describe(outputs: Outputs) -> Iterator[tuple[dict | None, dict, np.ndarray]]:
        """Yields of each query its line in the input format, its results with ids, and its ranks.

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


PREDICT_OPTIONS = {
    "text": "text",
    "title": "",
    "id": "",
    "header_lines": 1,
    "shard_size": 0,
    "dtype": "float32",
    "passages": "",
    "top_k": 100,
}


def get_predictor(trained: TrainedHead, options: Mapping, given: Set[str]):
    """Returns the predictor of a bi-encoder, for passages or queries, or of a cross-encoder."""
    if heads.find_head(trained.settings).predicts != "vector":
        if given:
            raise ValueError(f"--{min(given)}: a cross-encoder ranks the passages of each query")
        return RerankPredictor(trained)
    # Those of the run are texts; here, passages are vectors.
    if "passages" not in given:
        return VectorPredictor(trained, options)
    if unused := {"shard_size", "dtype"} & given:
        raise ValueError(f"--{min(unused)}: with --passages, no vectors are written")
    return SearchPredictor(trained, options)


class RerankPredictor:
    """Ranks the passages of each query; see `bert_jax.tasks.task.Predictor`.

    An example is a list of lines: one, or consecutive ones with positives of the same query.
    """

    def __init__(self, trained: TrainedHead):
        self.writers = {".jsonl": write_json_blocks}
        self.notes: dict[str, int] = collections.Counter()
        self._trained = trained
        self._rankings: list[Ranking] = []  # In the block whose features were built last.
        self._ranks: list[np.ndarray] = []
        self._ranks_of_all: list[np.ndarray] = []
        self._grades: list[list[float]] = []

    def find_inputs(self, directory: pathlib.Path) -> list[tuple[pathlib.Path, str]]:
        return [(path, path.name) for path in files_with_suffix(directory, (".jsonl",))]

    def read(self, path: str | pathlib.Path) -> Iterator[list[Query]]:
        unused: dict[str, int] = {}
        lines = iterate_queries(path, unused)
        group: list[Query] = []
        for line in lines:
            if group and not (line.positive and group[0].positive and line.text == group[0].text):
                yield group
                group = []
            group.append(line)
        yield group
        tables.note_unused_keys(unused, "lines", self.notes)

    def features(self, examples: Sequence[list[Query]]) -> list[ModelInput]:
        tokenizer, length = self._trained.tokenizer, self._trained.max_seq_length
        max_query_length = self._trained.settings.get("max_query_length", length)
        queries = TokenizedTexts(tokenizer, max_query_length)
        passages = TokenizedTexts(tokenizer, length)
        inputs = Inputs(tokenizer, False, length, queries, passages)
        queries.add(line.text for group in examples for line in group)
        passages.add(text for group in examples for line in group for text in line.candidates())
        self._rankings, features = [], []
        for group in examples:
            for line in group:
                for negative in line.negatives:
                    check_differs(line, negative, passages)
            ranking = _rank_candidates(list(range(len(group))), group, passages)
            if not ranking.passages:
                raise ValueError(f"{group[0].location}: no passages to rank: add 'negatives'")
            self._rankings.append(ranking)
            pairs = inputs.pairs(group[0].text, ranking.passages)
            features += [ModelInput((tokens,), (second,)) for tokens, second in pairs]
        return features

    def describe(self, examples: Sequence[list[Query]], outputs: Outputs) -> list[dict]:
        lines, end = [], 0
        for group, ranking in zip(examples, self._rankings, strict=True):
            start, end = end, end + len(ranking.passages)
            scores = np.concatenate(outputs[start:end])
            lines += describe_rankings(group, [(ranking, scores)])
            if ranking.positives:
                self._ranks.append(ranking.ranks(scores))
                self._ranks_of_all.append(ranking.ranks(scores, all_are_found=True))
                self._grades.append(ranking.grades)
        return lines

    def scores(self) -> dict[str, float]:
        if not self._ranks:
            return {}
        result, mrr = rank_scores(self._ranks, self._grades), f"mrr_at_{TOP}"
        result[f"{mrr}_if_all_found"] = rank_scores(self._ranks_of_all)[mrr]
        return result | {"queries": len(self._ranks)}
