"""Reads queries and passages for retrieval, and finds texts that are equal to the model."""

import itertools
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.data.features import ModelInput, make_sequence
from bert_jax.tasks import tables
from bert_jax.tasks.labels import check_labeled
from bert_jax.tasks.sequences import tokenize
from bert_jax.tasks.tables import field, text_field
from bert_jax.tasks.token_vectors import TokenRules
from bert_jax.tokenizers.tokenizer import Tokenizer

# The names under which each value may be given, of which the first in a line is read: those of the
# data sets of sentence-transformers, FlagEmbedding and MS MARCO.
QUERY_NAMES = ("query", "anchor", "question", "sentence1", "text1", "text")
PASSAGE_NAMES = ("positive", "passage", "answer", "document", "sentence2", "text2")
POSITIVES_NAMES = ("positives", "pos")
NEGATIVES_NAMES = ("negatives", "neg")
POSITIVE_SCORE_NAMES = ("positive_score", "positive_scores", "pos_scores")
NEGATIVE_SCORES_NAMES = ("scores", "negative_scores", "neg_scores")
LABEL_NAMES = ("label", "score")
ID_NAMES = ("id", "_id")
_NUMBERED = re.compile(r"negative(_?[0-9]+)?")  # The negatives of a table, one per column.
# Words in other keys that seem to say which passages are relevant.
_RELEVANCE = {"neg", "negative", "pos", "positive", "label", "score", "relevance"}


class Query(NamedTuple):
    """One query with a passage that answers it; those with equal texts are one query.

    Attributes:
      positive: a passage that answers the query; None if unknown.
      rank: rank of the positive in the results of a first stage, infinity if it is not among them;
        0 if no first stage is known.
      depth: number of results that the first stage returns; None: those in the file.
      grade: how relevant the positive is, above 0.
      scores: a teacher's scores of the `candidates`; None if unknown.
    """

    id: str
    text: str
    positive: str | None
    negatives: tuple[str, ...]
    location: str
    rank: float = 0
    depth: int | None = None
    grade: float = 1.0
    scores: tuple[float, ...] | None = None

    def candidates(self) -> tuple[str, ...]:
        """Returns the passages of the line, the positive first."""
        return (self.positive, *self.negatives) if self.positive else self.negatives


def read_queries(
    path: str | pathlib.Path,
    is_training: bool = False,
    empty_texts: bool = False,
    unused: dict[str, int] | None = None,
) -> list[Query]:
    """Reads queries from a table; all must have a positive, or (unless `is_training`) none.

    A line has a query, and one of:

    - a positive (none of those to predict), and any of a list of negatives, negatives in columns
      of their own, and a teacher's scores;
    - a list of positives, which become a `Query` each;
    - a passage and a label: above 0 for a passage that answers the query. The lines of a query
      become a `Query` for each of these passages, with the others as negatives.

    Args:
      empty_texts: whether a query or a negative may be empty; a positive never may.
      unused: receives, for each key that is not read, the number of lines that have it.

    Raises ValueError for a bad line, and for an unread key that says which passages are relevant,
    such as "relevance": ignoring it would change what is learned and scored.
    """
    unused = {} if unused is None else unused
    lines = list(_read_lines(tables.iterate_rows(path), unused, empty_texts))
    if lines and isinstance(lines[0], _Judgment):
        groups: dict[str, list[_Judgment]] = {}
        for line in lines:
            groups.setdefault(line.text, []).append(line)
        queries = [query for group in groups.values() for query in _join_judgments(group)]
        for query in queries:
            if query.positive is None:
                problem = f"the query {query.text!r:.60} has no passage with a label above 0"
                raise ValueError(f"{query.location}: {problem}: remove it, or add one")
        _check_ids_of_queries(lines)
        return queries
    queries = [query for line in lines for query in line]
    check_labeled(queries, [query.positive for query in queries], "positive", is_training)
    return tables.check_unique(queries)


def iterate_queries(path: str | pathlib.Path, unused: dict[str, int]) -> Iterator[Query]:
    """Yields the queries of a table, which may have a positive; texts may be empty.

    Only consecutive lines with labels are joined. `unused` counts the lines that have each key
    which nothing reads; see `read_queries`.
    """
    lines = _read_lines(tables.iterate_rows(path), unused, empty_texts=True)
    for text, group in itertools.groupby(lines, lambda line: getattr(line, "text", None)):
        if text is None:  # Lists of queries, all of the file.
            yield from itertools.chain.from_iterable(group)
        else:
            yield from _join_judgments(list(group))


def read_classes(path: str | pathlib.Path) -> list[tuple[str, str]]:
    """Reads (text, class) from a table with the columns "text" and "label". Raises ValueError."""
    classes = []
    for values, location in tables.iterate_rows(path):
        label = values.get("label")
        if not isinstance(label, str | int) or isinstance(label, bool):
            raise ValueError(f"{location}: 'label' must be a class, a text or a whole number")
        classes.append((text_field(values, "text", location), str(label)))
    return classes


class _Judgment(NamedTuple):
    """One line with a query, a passage, and how relevant it is."""

    id: str
    text: str
    passage: str
    label: float
    location: str


def _check_ids_of_queries(lines: Sequence[_Judgment]) -> None:
    """Raises ValueError if two queries have one id; lines of a query may share it."""
    first: dict[str, _Judgment] = {}
    for line in lines:
        if (other := first.setdefault(line.id, line)).text != line.text:
            problem = f"id {line.id!r} is already used for another query in {other.location}"
            raise ValueError(f"{line.location}: {problem}")


def _join_judgments(lines: Sequence[_Judgment]) -> list[Query]:
    """Returns a `Query` for each relevant passage of a query; one without a positive if none is.

    They have the id of the first line. Raises ValueError if a passage has two labels.
    """
    first, label_of = lines[0], {}
    for line in lines:
        if (label := label_of.setdefault(line.passage, line.label)) != line.label:
            problem = f"the label {line.label:g} of the passage {line.passage!r:.60}"
            raise ValueError(f"{line.location}: {problem}: a line before labels it {label:g}")
    negatives = tuple(dict.fromkeys(line.passage for line in lines if line.label <= 0))
    queries = [
        Query(first.id, line.text, line.passage, negatives, line.location, grade=line.label)
        for line in lines
        if line.label > 0
    ]
    return queries or [Query(first.id, first.text, None, negatives, first.location)]


def _read_lines(
    rows: Iterable[tuple[dict, str]], unused: dict[str, int], empty_texts: bool
) -> Iterator[_Judgment | list[Query]]:
    """Yields what each line is: a judgment, or the queries in it. Raises ValueError.

    All lines must be of one kind.
    """
    is_judged = None
    for number, (values, location) in enumerate(rows):
        for key, count in _find_unused(values, location).items():
            unused[key] = unused.get(key, 0) + count
        label = find_name(values, LABEL_NAMES)
        has_label = values.get(label) is not None
        if is_judged is None:
            is_judged = has_label
        if is_judged and not has_label:
            raise ValueError(f"{location}: no {label!r}: label all lines, or none")
        if has_label and not is_judged:
            raise ValueError(f"{location}: a {label!r}, which the lines before do not have")
        yield (_judgment if is_judged else _queries)(values, location, number, empty_texts)


def find_name(values: dict, names: Sequence[str]) -> str:
    """Returns the first of `names` that has a value, or that occurs, or the first."""
    known = (name for name in names if values.get(name) is not None)
    return next(known, next((name for name in names if name in values), names[0]))


def _negative_columns(values: dict) -> list[str]:
    """Returns the columns of the negatives, in the order of the file."""
    return [name for name in values if _NUMBERED.fullmatch(name)]


def _find_unused(values: dict, location: str) -> dict[str, int]:
    """Returns 1 for each key that is not read. Raises ValueError."""
    roles = (QUERY_NAMES, PASSAGE_NAMES, POSITIVES_NAMES, NEGATIVES_NAMES, LABEL_NAMES)
    used = {
        "id",
        "rank",
        "ranks",
        "depth",
        *_negative_columns(values),
        *(find_name(values, r) for r in roles),
    }
    positive_score = find_name(values, POSITIVE_SCORE_NAMES)
    used.add(positive_score)
    # Predictions have the scores of the negatives; alone, they teach nothing.
    scores = find_name(values, NEGATIVE_SCORES_NAMES)
    if values.get(positive_score) is not None:
        used.add(scores)
    found = tables.find_unused_keys([(values, location)], used)
    for key in found:
        words = {word.removesuffix("s") for word in re.split(r"[^a-z]+", key.lower())}
        if key != "scores" and words & _RELEVANCE:
            raise ValueError(
                f"{location}: {key!r} is not read: write passages that answer the query as "
                "'positive' or 'positives' (a list), others as 'negatives' (a list), a teacher's "
                "scores as 'positive_score' and 'negative_scores'; otherwise remove it"
            )
    return dict.fromkeys(found, 1)


def _judgment(values: dict, location: str, number: int, empty_texts: bool) -> _Judgment:
    text = text_field(values, find_name(values, QUERY_NAMES), location, empty_texts)
    passage = text_field(values, find_name(values, PASSAGE_NAMES), location, empty_texts)
    for names in (POSITIVES_NAMES, NEGATIVES_NAMES):
        name = find_name(values, names)
        if values.get(name) is not None:
            problem = f"it has both {name!r} and {find_name(values, LABEL_NAMES)!r}"
            raise ValueError(f"{location}: {problem}: a label is of one passage")
    name = find_name(values, LABEL_NAMES)
    label = read_number(values, name, location)
    if label % 1:
        raise ValueError(
            f"{location}: {name!r} is {label:g}: a label of a ranking is a whole number, above 0 "
            "for a passage that answers the query. If it says how similar two texts are, train "
            "with a loss of pairs, such as config.loss.name=cosent, and score with "
            "config.data.evaluation=similarity"
        )
    return _Judgment(read_id(values, location, number), text, passage, label, location)


def _queries(values: dict, location: str, number: int, empty_texts: bool) -> list[Query]:
    """Returns a `Query` for each positive of a line; one if it has none."""
    text = text_field(values, find_name(values, QUERY_NAMES), location, empty_texts)
    positives, name = [], find_name(values, POSITIVES_NAMES)
    if values.get(name) is not None:
        positives = [
            text_field({name: each}, name, location) for each in field(values, name, list, location)
        ]
        if not positives:
            raise ValueError(f"{location}: the list {name!r} is empty: the query needs a positive")
    elif values.get(name := find_name(values, PASSAGE_NAMES)) is not None:
        positives = [text_field(values, name, location)]
    negatives = _read_negatives(values, location, empty_texts)
    if both := next((text for text in positives if text in negatives), None):
        raise ValueError(f"{location}: the positive is also one of the negatives: {both!r}")
    scores = _read_scores(values, len(positives), len(negatives), location)
    if values.get("ranks") is not None:
        ranks = [_rank(each, location) for each in field(values, "ranks", list, location)]
    else:  # 0: no first stage is known.
        rank = _rank(values["rank"], location) if "rank" in values else 0
        ranks = [rank] * max(len(positives), 1)
    if len(ranks) != max(len(positives), 1):
        problem = f"'ranks' has {len(ranks)} ranks for {len(positives)} positives"
        raise ValueError(f"{location}: {problem}: expected one for each")
    id_ = read_id(values, location, number)
    common = {"location": location, "depth": _place(values, "depth", location)}
    return [
        Query(id_, text, positive, tuple(negatives), rank=rank, scores=own, **common)
        for positive, rank, own in zip(
            positives or [None], ranks, scores if positives else [None], strict=True
        )
    ]


def _rank(value: object, location: str) -> float:
    """Returns the rank of a positive: infinity if it is null."""
    rank = _place({"rank": value}, "rank", location)
    return math.inf if rank is None else rank


def _read_negatives(values: dict, location: str, empty_texts: bool) -> list[str]:
    """Returns the negatives of a line: a list, or the columns that have one."""
    name = find_name(values, NEGATIVES_NAMES)
    columns = [each for each in _negative_columns(values) if values[each] is not None]
    if values.get(name) is None and columns:
        return [text_field(values, column, location, empty_texts) for column in columns]
    if columns:
        raise ValueError(f"{location}: it has both {name!r} and {columns[0]!r}: keep one of them")
    return [
        text_field({"negative": each}, "negative", location, empty_texts and each is not None)
        for each in field({name: []} | values, name, list, location)
    ]


def _read_scores(
    values: dict, num_positives: int, num_negatives: int, location: str
) -> list[tuple[float, ...] | None]:
    """Returns, for each positive, a teacher's scores of it and of the negatives; None without."""
    name, others = find_name(values, POSITIVE_SCORE_NAMES), find_name(values, NEGATIVE_SCORES_NAMES)
    if values.get(name) is None:
        return [None] * num_positives
    own = values[name] if isinstance(values[name], list) else [values[name]]
    own = [read_number({name: each}, name, location) for each in own]
    scores = field({others: []} | values, others, list, location)
    scores = [read_number({others: each}, others, location) for each in scores]
    for key, found, expected, texts in (
        (name, len(own), num_positives, "positives"),
        (others, len(scores), num_negatives, "negatives"),
    ):
        if found != expected:
            problem = f"{key!r} has {found} scores for {expected} {texts}"
            raise ValueError(f"{location}: {problem}: expected one for each")
    return [(each, *scores) for each in own]


def read_id(values: dict, location: str, number: int) -> str:
    """Returns the id of a line, "id" or BEIR's "_id"; without any, its `number`."""
    named = {"id": values[find_name(values, ID_NAMES)]} if {*ID_NAMES} & values.keys() else {}
    return tables.id_field(named, location, number)


def read_number(values: dict, name: str, location: str) -> float:
    """Returns a finite number, of a CSV or TSV from its text. Raises ValueError."""
    value = values.get(name)
    try:
        number = math.nan if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{location}: {name!r} must be a finite number, found {value!r:.60}")
    return number


def _place(values: dict, name: str, location: str) -> int | None:
    """Returns `values[name]`, None if missing. Raises ValueError for all but positive integers."""
    value = values.get(name)
    if isinstance(value, str) and value.isdecimal():  # Of a CSV or TSV.
        value = int(value)
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{location}: {name!r} must be a whole number from 1, found {value!r:.60}")
    return value


def read_passages(
    path: str | pathlib.Path, empty_texts: bool = False, unused: dict[str, int] | None = None
) -> list[str]:
    """Reads the passages of a table, from the column `text`.

    Without `empty_texts`, an empty passage raises ValueError. `unused` receives, for each other
    key, the number of lines that have it.
    """
    objects = list(tables.iterate_rows(path))
    found = tables.find_unused_keys(objects, {"text"})
    if unused is not None:
        unused |= {key: count for key, (count, _) in found.items()}
    return [text_field(values, "text", location, empty_texts) for values, location in objects]


class TokenizedTexts:
    """The token ids of texts. To a model, texts with the same ids are the same text.

    A `prompt` precedes each text. Raises ValueError if it leaves no room for any.

    Attributes:
      ids: text -> the ids that the model sees, the first ones of a long text.
      identity: text -> a value that only equal texts share: all of its ids, or its words if it has
        unknown tokens, which may hide a difference.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int, prompt: str = ""):
        self.ids: dict[str, list[int]] = {}
        self.identity: dict[str, bytes | str] = {}
        self._tokenizer = tokenizer
        self._room = max_length - tokenizer.layout.num_special_tokens(1)
        self._truncated: set[str] = set()
        self._prompt = prompt
        size = len(tokenizer.encode(prompt)) if prompt else 0
        if size >= self._room:
            raise ValueError(
                f"the prompt {prompt!r} has {size} tokens, which leaves no room for a text in "
                f"{max_length}: shorten it, or raise max_seq_length or max_query_length"
            )

    def add(self, texts: Iterable[str]) -> None:
        """Tokenizes the texts that are not known yet."""
        new = [text for text in texts if text not in self.ids]
        ids_of = tokenize(self._tokenizer, (self._prompt + text for text in new))
        for text in new:
            ids = ids_of[self._prompt + text]
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


class Inputs(NamedTuple):
    """Builds the sequences of queries and passages for a role; a multi-vector one has `rules`."""

    tokenizer: Tokenizer
    is_bi_encoder: bool
    max_seq_length: int
    queries: TokenizedTexts
    passages: TokenizedTexts
    rules: TokenRules | None = None

    def room(self, query: str) -> int | None:
        """Returns how many tokens of a passage a cross-encoder sees beside a query."""
        num_special = self.tokenizer.layout.num_special_tokens(2)
        length = self.max_seq_length - num_special - len(self.queries.ids[query])
        return None if self.is_bi_encoder else length

    def singles(self, queries: Iterable[str], passages: Iterable[str]) -> list[tuple]:
        """Returns a sequence for each query, then for each passage."""
        query_ids = (self.queries.ids[text] for text in queries)
        passage_ids = (self.passages.ids[text] for text in passages)
        if self.rules:
            sequences = [self.rules.query(each) for each in query_ids]
            return sequences + [self.rules.passage(each) for each in passage_ids]
        ids = itertools.chain(query_ids, passage_ids)
        return [make_sequence(self.tokenizer, each) for each in ids]

    def pairs(self, query: str, passages: Iterable[str]) -> list[tuple]:
        """Returns a sequence of the query with each passage."""
        first, room = self.queries.ids[query], self.room(query)
        return [
            make_sequence(self.tokenizer, first, self.passages.ids[text][:room])
            for text in passages
        ]


def make_feature(sequences: Sequence[tuple], label: object = None) -> ModelInput:
    """Returns the feature of an example from what `Inputs` returns for its texts."""
    tokens, second_starts, *kinds = zip(*sequences, strict=True)
    return ModelInput(tokens, second_starts, label, token_kinds=kinds[0] if kinds else None)


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
    relevant = {passages.seen(text, room) for text in positives}
    chosen: list[str] = []
    num_left_out = 0
    for negative in line.negatives:
        if len(chosen) == count:
            break
        passages.add([negative])  # Already there, unless an earlier negative was left out.
        if passages.seen(negative, room) not in relevant:
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
