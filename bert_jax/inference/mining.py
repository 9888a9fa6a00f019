"""Mines hard negatives: passages that a model ranks high for a query, but that do not answer it.

The rules are those of sentence-transformers' `mine_hard_negatives`; the margin is that of
NV-Retriever (Moreira et al., 2024, https://arxiv.org/abs/2407.15831, section 3).
"""

import collections
import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.inference.prediction_files import describe_model
from bert_jax.inference.pretrained_model import PretrainedModel
from bert_jax.model.heads import find_head
from bert_jax.tasks.queries import Query, TokenizedTexts
from bert_jax.tasks.retrieval import PREDICT_OPTIONS
from bert_jax.tasks.search import search
from bert_jax.tasks.task import TrainedHead
from bert_jax.tasks.vectors import VectorPredictor, check_model, open_vectors, read_texts

SAMPLINGS = ("top", "random")
QUERIES_AT_ONCE = 256
ROWS_AT_ONCE = 65536


@dataclasses.dataclass(frozen=True)
class MiningRules:
    """Which of the passages that are found for a query become its negatives.

    Scores are the cosine of query and passage or, with a cross-encoder, its logit. Of several
    positives, the one with the lowest score counts.

    Attributes:
      num_negatives: negatives of each query; a query with fewer is left out.
      range_min, range_max: ranks, from 0, of the passages to choose from; positives and passages
        that a threshold drops have no rank. `range_max` also bounds how many are looked at, besides
        as many as the query with the most positives has. None: ten for each negative, or one if no
        rule drops the best.
      absolute_margin: by how much a negative's score must be below the positive's.
      relative_margin: the same, as a fraction of the positive's absolute score.
      max_score, min_score: bounds of a negative's score.
      sampling: "top" takes those with the highest scores, "random" draws from the range.
      seed: of "random".
    """

    num_negatives: int = 3
    range_min: int = 0
    range_max: int | None = None
    absolute_margin: float | None = None
    relative_margin: float | None = None
    max_score: float | None = None
    min_score: float | None = None
    sampling: str = "top"
    seed: int = 0

    @property
    def has_threshold(self) -> bool:
        """Whether a passage can be dropped for its score."""
        bounds = self.absolute_margin, self.relative_margin, self.max_score, self.min_score
        return any(bound is not None for bound in bounds)

    def last_rank(self, max_positives: int, has_cross_encoder: bool) -> int:
        """Returns `range_max`, or what is chosen for None. Raises ValueError for a wrong range."""
        if self.num_negatives < 1 or self.range_min < 0:
            names = f"num_negatives={self.num_negatives}, range_min={self.range_min}"
            raise ValueError(f"{names}: expected at least 1 and 0")
        if self.sampling not in SAMPLINGS:
            raise ValueError(f"sampling={self.sampling}: expected {' or '.join(SAMPLINGS)}")
        last = self.range_max
        if last is None:
            bounds = self.absolute_margin, self.relative_margin, self.max_score
            drops_best = any(bound is not None for bound in bounds)
            drops_best |= has_cross_encoder and self.min_score is not None
            last = self.range_min + self.num_negatives * (10 if drops_best else 1) + max_positives
        if last - self.range_min < self.num_negatives:
            raise ValueError(
                f"range_max={last}, range_min={self.range_min}: expected a range of at least "
                f"num_negatives={self.num_negatives} ranks"
            )
        return last


def apply_rules(
    scores: np.ndarray,
    is_left_out: np.ndarray,
    positive_scores: np.ndarray,
    rules: MiningRules,
    last_rank: int,
    number: int,
    counts: dict[str, int],
) -> np.ndarray:
    """Returns the indices of up to `num_negatives` of the passages found for a query, best first.

    Args:
      scores: float32 `[passages]`, of those that were found; of equal ones the first is better.
      is_left_out: bool `[passages]`, of positives and copies.
      positive_scores: float32, of the query's positives.
      last_rank: of `MiningRules.last_rank`.
      number: of the query, from 0; with the seed, it decides what "random" draws.
      counts: receives the number of passages that each rule drops.
    """
    remain = ~is_left_out
    lowest = positive_scores.min()
    dropped: dict[str, np.ndarray] = {}
    if rules.absolute_margin is not None:
        dropped["absolute_margin"] = scores + np.float32(rules.absolute_margin) > lowest
    if rules.relative_margin is not None:
        # Not (1 - margin) times the score, which is larger if the score is negative.
        limit = lowest - np.abs(lowest) * np.float32(rules.relative_margin)
        dropped["relative_margin"] = scores > limit
    if rules.max_score is not None:
        dropped["max_score"] = scores > np.float32(rules.max_score)
    if rules.min_score is not None:
        dropped["min_score"] = scores < np.float32(rules.min_score)
    for name, of_rule in dropped.items():
        counts[f"dropped by {name}"] += int((of_rule & remain).sum())
        remain &= ~of_rule
    (ranked,) = np.nonzero(remain)
    ranked = ranked[np.argsort(-scores[ranked], kind="stable")]
    in_range = ranked[rules.range_min : last_rank]
    counts["ranked before range_min"] += min(rules.range_min, len(ranked))
    counts["ranked after range_max"] += max(len(ranked) - last_rank, 0)
    chosen = in_range[: rules.num_negatives]
    if rules.sampling == "random" and len(in_range) > rules.num_negatives:
        rng = np.random.default_rng([rules.seed, number])
        places = rng.choice(len(in_range), rules.num_negatives, replace=False)
        chosen = in_range[np.sort(places)]
    counts["in the range, but not chosen"] += len(in_range) - len(chosen)
    return chosen


class Corpus(NamedTuple):
    """Passages and their vectors.

    Attributes:
      vectors: arrays `[passages, size]` of vectors of length 1, whose rows are numbered in order.
      texts: returns an iterator over the text of each of them.
    """

    vectors: Sequence[np.ndarray]
    texts: Callable[[], Iterable[str]]


def load_corpus(
    path: str | pathlib.Path, model: PretrainedModel, title: str, notes: dict[str, int]
) -> Corpus:
    """Returns the vectors that `bert_jax.predict` wrote, or computes those of a table of texts.

    Args:
      title: column of a title, as for `bert_jax.predict`; "" as there.
      notes: receives counts of what is unusual in a table.

    Raises ValueError or OSError for a file that is neither, and for vectors of another model.
    """
    path = pathlib.Path(path)
    if path.is_dir() or path.suffix == ".npy":
        if title:
            raise ValueError(f"title={title}: the texts of passages={path} have their titles")
        shards = open_vectors(path)
        check_model(path, describe_model(model))
        return Corpus(
            [_unit_rows(shard.vectors) for shard in shards],
            lambda: itertools.chain.from_iterable(map(read_texts, shards)),
        )
    data, limit = model.settings.get("data", {}), model.config.max_position_embeddings
    trained = TrainedHead(model.head or {}, data, model.tokenizer, limit)
    reader = VectorPredictor(trained, PREDICT_OPTIONS | {"title": title})
    texts = [record.columns[reader.options["text"]] for record in reader.read(path)]
    notes |= reader.notes | {"passages that are empty": sum(not text.strip() for text in texts)}
    texts = list(dict.fromkeys(texts))
    return Corpus([_encode(model, "document", texts)], lambda: texts)


def _encode(model: PretrainedModel, prompt_name: str, texts: Sequence[str]) -> np.ndarray:
    """Returns vectors of length 1. A model without a head for embeddings has no prompts.

    Raises ValueError for a model of sparse vectors or of several vectors per text.
    """
    kind = find_head(model.head).predicts if model.head else ""
    if kind in ("sparse_vector", "token_vectors"):
        expected = "expected a bi-encoder with similarity.vectors=dense, or an encoder"
        raise ValueError(
            f"mining compares dense vectors, and the model has a head for {kind}: {expected}"
        )
    has_prompts = kind == "vector"
    name = prompt_name if has_prompts else None
    return model.encode(texts, normalize=True, prompt_name=name)


def _unit_rows(vectors: np.ndarray) -> np.ndarray:
    """Returns the vectors divided by their lengths; the same array if these are 1."""
    parts = (vectors[i : i + ROWS_AT_ONCE] for i in range(0, len(vectors), ROWS_AT_ONCE))
    lengths = np.concatenate([np.linalg.norm(part.astype(np.float32), axis=1) for part in parts])
    if (abs(lengths - 1) < 2e-3).all():  # Half precision rounds to 1e-3.
        return vectors
    return vectors / np.maximum(lengths, 1e-12)[:, None].astype(vectors.dtype)


class Candidates(NamedTuple):
    """What is found for one query.

    Attributes:
      lines: those of the query, each with a positive.
      passages: texts, best first.
      scores: float32 `[passages]`.
      positive_scores: of each distinct positive.
    """

    lines: Sequence[Query]
    passages: Sequence[str]
    scores: np.ndarray
    positive_scores: Mapping[str, np.float32]

    @property
    def query(self) -> str:
        return self.lines[0].text


def find_candidates(
    groups: Sequence[Sequence[Query]], corpus: Corpus, model: PretrainedModel, depth: int
) -> list[Candidates]:
    """Returns the `depth` passages nearest to each query, given by its lines.

    All positives are among the passages, whether or not they are in the corpus.
    """
    positives = dict.fromkeys(line.positive for group in groups for line in group)
    vectors = _encode(model, "document", [*positives])
    vector_of = dict(zip(positives, vectors, strict=True))
    known = {text for text in corpus.texts() if text in positives}
    added = [text for text in positives if text not in known]
    own_vectors = np.array([vector_of[text] for text in added]).reshape(-1, vectors.shape[1])
    queries = _encode(model, "query", [group[0].text for group in groups])
    found = search(queries, [*corpus.vectors, own_vectors], depth)
    wanted = set(np.unique(found.indices).tolist())
    numbered = enumerate(itertools.chain(corpus.texts(), added))
    text_of = {index: text for index, text in numbered if index in wanted}
    return [
        Candidates(
            group,
            [text_of[index] for index in indices.tolist()],
            scores,
            {line.positive: np.dot(query, vector_of[line.positive]) for line in group},
        )
        for group, query, scores, indices in zip(groups, queries, *found, strict=True)
    ]


def find_copies(candidates: Candidates, passages: TokenizedTexts) -> tuple[np.ndarray, np.ndarray]:
    """Returns which passages equal a positive of the query, and which equal an earlier passage."""
    positives = {passages.identity[text] for text in candidates.positive_scores}
    names = [passages.identity[text] for text in candidates.passages]
    is_positive = np.array([name in positives for name in names], bool)
    place_of: dict[bytes | str, int] = {}
    first_places = [place_of.setdefault(name, place) for place, name in enumerate(names)]
    is_copy = np.array(first_places, int) != np.arange(len(names))
    return is_positive, is_copy & ~is_positive


def rescore(
    found: Sequence[Candidates], left_out: Sequence[np.ndarray], cross_encoder: PretrainedModel
) -> list[Candidates]:
    """Returns the candidates with the scores of a cross-encoder, but for those that are left out.

    `left_out` are bool `[passages]`, of each query.
    """
    pairs, counts = [], []
    for each, is_left_out in zip(found, left_out, strict=True):
        texts = [each.passages[index] for index in np.flatnonzero(~is_left_out)]
        texts += each.positive_scores
        pairs += [(each.query, text) for text in texts]
        counts.append(len(texts))
    rescored = []
    parts = np.split(cross_encoder.score_pairs(pairs), np.cumsum(counts)[:-1])
    for each, is_left_out, values in zip(found, left_out, parts, strict=True):
        num_passages = len(values) - len(each.positive_scores)
        scores = np.full(len(each.passages), -np.inf, np.float32)
        scores[~is_left_out] = values[:num_passages]
        positive_scores = dict(zip(each.positive_scores, values[num_passages:], strict=True))
        rescored.append(each._replace(scores=scores, positive_scores=positive_scores))
    return rescored


def distinct_ids(ids: Sequence[str]) -> list[str]:
    """Returns the ids; of equal ones, those after the first get a suffix that none has, as "-2"."""
    taken, seen, names = {*ids}, set(), []
    for name in ids:
        if name in seen:
            numbered = (f"{name}-{number}" for number in itertools.count(2))
            name = next(each for each in numbered if each not in taken)
        taken.add(name)
        seen.add(name)
        names.append(name)
    return names


def mine(
    lines: Sequence[Query],
    corpus: Corpus | None,
    model: PretrainedModel,
    rules: MiningRules,
    cross_encoder: PretrainedModel | None = None,
) -> tuple[list[dict], dict[str, int]]:
    """Returns the lines with negatives, in the form to train on, and what was counted.

    All positives are among the passages to choose from; without a corpus, they alone. A positive of
    a query, on any of its lines, and its copies are never its negatives; texts are equal if their
    token ids are. Each line has the scores that the rules compare, "positive_score", and "scores"
    of its "negatives". A line with too few negatives is left out.

    Raises ValueError for rules that contradict each other, and for a cross-encoder without a rule
    about scores, which are all that it changes.
    """
    if cross_encoder and not rules.has_threshold:
        fix = "set absolute_margin, relative_margin, max_score or min_score"
        raise ValueError(f"cross_encoder: no rule uses its scores: {fix}")
    queries = TokenizedTexts(model.tokenizer, model.config.max_position_embeddings)
    queries.add(line.text for line in lines)
    places: dict[bytes | str, list[int]] = {}  # Of the lines of each query.
    for place, line in enumerate(lines):
        places.setdefault(queries.identity[line.text], []).append(place)
    groups = [[lines[place] for place in own] for own in places.values()]
    max_positives = max(len({line.positive for line in group}) for group in groups)
    last_rank = rules.last_rank(max_positives, cross_encoder is not None)
    found = find_candidates(groups, corpus or Corpus([], list), model, last_rank + max_positives)
    counts: dict[str, int] = collections.Counter()
    mined: dict[int, dict] = {}  # By the place of the line.
    left_out = []
    for candidates in found:
        passages = TokenizedTexts(model.tokenizer, model.config.max_position_embeddings)
        passages.add([*candidates.passages, *candidates.positive_scores])
        is_positive, is_copy = find_copies(candidates, passages)
        left_out.append(is_positive | is_copy)
        counts["found"] += len(is_positive)
        counts["positives and their copies"] += int(is_positive.sum())
        counts["copies of another passage"] += int(is_copy.sum())
    if cross_encoder:
        blocks = (slice(i, i + QUERIES_AT_ONCE) for i in range(0, len(found), QUERIES_AT_ONCE))
        rescored = (rescore(found[block], left_out[block], cross_encoder) for block in blocks)
        found = list(itertools.chain.from_iterable(rescored))
    rows = zip(places.values(), found, left_out, strict=True)
    for number, (own_places, candidates, is_left_out) in enumerate(rows):
        positive_scores = np.array([*candidates.positive_scores.values()], np.float32)
        chosen = apply_rules(
            candidates.scores, is_left_out, positive_scores, rules, last_rank, number, counts
        )
        counts["chosen"] += len(chosen)
        if len(chosen) < rules.num_negatives:
            counts["queries with too few negatives"] += 1
            counts["lines with too few negatives, left out"] += len(candidates.lines)
            continue
        for place, line in zip(own_places, candidates.lines, strict=True):
            mined[place] = {
                "query": line.text,
                "positive": line.positive,
                "positive_score": float(candidates.positive_scores[line.positive]),
                "negatives": [candidates.passages[index] for index in chosen],
                "scores": candidates.scores[chosen].tolist(),
            }
    counts |= {"queries": len(groups), "lines": len(lines), "lines written": len(mined)}
    # Several positives of one input line have one id.
    names = distinct_ids([lines[place].id for place in sorted(mined)])
    written = [
        {"id": name} | mined[place] for name, place in zip(names, sorted(mined), strict=True)
    ]
    return written, dict(counts)
