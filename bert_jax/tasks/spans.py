"""Questions and contexts to windows, and the outputs of the span head to answers.

The rules are those of the released code (section 4.2 of the paper). Only, each token knows its
characters in the context, so that an answer is a slice of the original text.
"""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.data.features import Feature, make_sequence
from bert_jax.tokenization import Tokenizer

LABELS = ("start", "end")
"""Names of the two outputs of the head."""

N_BEST = 20
"""Answers proposed for a question."""

NO_ANSWER = (0, 0)
"""Positions to predict for a window without the answer: [CLS]."""


@dataclasses.dataclass(frozen=True)
class SpanConfig:
    """How contexts are read and answers found; stored with a trained head. Lengths in tokens.

    Attributes:
      max_seq_length: of a window, including the question and special tokens.
      doc_stride: between the beginnings of consecutive windows.
      max_query_length: of a question; longer ones are truncated.
      max_answer_length: of an answer.
      null_answers: whether a question may have no answer, as in SQuAD 2.0.
      null_threshold: by how much the score of no answer must exceed that of the best answer.
    """

    max_seq_length: int = 384
    doc_stride: int = 128
    max_query_length: int = 64
    max_answer_length: int = 30
    null_answers: bool = False
    null_threshold: float = 0.0

    def __post_init__(self):
        limit = self.max_seq_length - 4
        if not 1 <= self.max_query_length <= limit:
            raise ValueError(
                f"max_query_length is {self.max_query_length}: expected 1 to {limit} with "
                f"max_seq_length={self.max_seq_length}"
            )
        for name in ("doc_stride", "max_answer_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def span_config(head: Mapping, max_position_embeddings: int) -> SpanConfig:
    """Returns the config stored with a trained head, with defaults that fit its positions."""
    length = min(SpanConfig.max_seq_length, max_position_embeddings)
    question = min(SpanConfig.max_query_length, length // 4)
    names = [field.name for field in dataclasses.fields(SpanConfig)]
    given = {name: head[name] for name in names if name in head}
    return SpanConfig(**{"max_seq_length": length, "max_query_length": question} | given)


class ContextWindow(NamedTuple):
    """Tokens `begin` to `end` of a context, which begin at position `offset` of the feature.

    `owned`, bool `[end - begin]`: the tokens that have their largest context in this window.
    """

    begin: int
    end: int
    offset: int
    owned: np.ndarray


@dataclasses.dataclass(frozen=True)
class Passage:
    """A question's context, in windows.

    Attributes:
      context: its text.
      offsets: int32 `[tokens, 2]`, the characters of each token; see `encode_with_offsets`.
      windows: together they cover all tokens.
      features: the unlabeled input of the model for each window.
    """

    context: str
    offsets: np.ndarray
    windows: tuple[ContextWindow, ...]
    features: tuple[Feature, ...]

    def text(self, span: "Span") -> str:
        return self.context[span.begin : span.end]


class Span(NamedTuple):
    """Characters `begin` to `end` of a context, proposed as the answer."""

    begin: int
    end: int
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


def make_passages(
    questions: Sequence[str], contexts: Sequence[str], tokenizer: Tokenizer, config: SpanConfig
) -> list[Passage]:
    """Returns a passage for each question and its context; warns of truncated questions."""
    distinct = list(dict.fromkeys(contexts))  # Several questions share one.
    encoded = dict(zip(distinct, tokenizer.encode_with_offsets(distinct), strict=True))
    asked, limit = tokenizer.encode_batch(questions), config.max_query_length
    if long := sum(len(ids) > limit for ids in asked):
        warnings.warn(
            f"{long} of {len(asked)} questions are truncated to {limit} tokens", stacklevel=2
        )
    passages = []
    for question, context in zip(asked, contexts, strict=True):
        question, (ids, offsets) = question[:limit], encoded[context]
        room = config.max_seq_length - len(question) - 3
        limits = cut_windows(len(ids), room, config.doc_stride)
        owners = largest_context(limits, len(ids))
        windows, features = [], []
        for number, (begin, end) in enumerate(limits):
            tokens, second_start = make_sequence(tokenizer, question, ids[begin:end])
            owned = owners[begin:end] == number
            windows.append(ContextWindow(begin, end, second_start, owned))
            features.append(Feature((tokens,), (second_start,)))
        passages.append(Passage(context, offsets, tuple(windows), tuple(features)))
    return passages


def cut_windows(num_tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Returns (begin, end) of windows of at most `room` tokens that together cover all tokens."""
    windows = [(0, min(room, num_tokens))]
    while windows[-1][1] < num_tokens:
        begin = windows[-1][0] + min(stride, room)
        windows.append((begin, min(begin + room, num_tokens)))
    return windows


def largest_context(windows: Sequence[tuple[int, int]], num_tokens: int) -> np.ndarray:
    """Returns the window in which each token has the largest context, int32 `[num_tokens]`.

    The context is the smaller of those to the left and right. A longer window wins ties, then an
    earlier one.
    """
    largest, owner = np.full(num_tokens, -np.inf), np.zeros(num_tokens, np.int32)
    for number, (begin, end) in enumerate(windows):
        left = np.arange(end - begin)
        context = np.minimum(left, left[::-1]) + 0.01 * (end - begin)
        larger = context > largest[begin:end]
        largest[begin:end][larger] = context[larger]
        owner[begin:end][larger] = number
    return owner


def find_tokens(offsets: np.ndarray, begin: int, end: int) -> tuple[int, int] | None:
    """Returns the first and last token of characters `begin` to `end`; None if they have none."""
    first = int(np.searchsorted(offsets[:, 1], begin, side="right"))
    last = int(np.searchsorted(offsets[:, 0], end, side="left")) - 1
    return (first, last) if first <= last else None


def label_windows(passage: Passage, tokens: tuple[int, int] | None) -> list[Feature]:
    """Labels each window with the answer's first and last token if it holds both."""
    features = []
    for window, feature in zip(passage.windows, passage.features, strict=True):
        label = NO_ANSWER
        if tokens and window.begin <= tokens[0] and tokens[1] < window.end:
            shift = window.offset - window.begin
            label = tokens[0] + shift, tokens[1] + shift
        features.append(dataclasses.replace(feature, label=label))
    return features


def best_spans(
    passage: Passage, outputs: Sequence[np.ndarray], max_answer_length: int, n_best: int
) -> list[Span]:
    """Returns the `n_best` spans of different text by score, best first; at least one.

    A span begins in the window that owns its first token and ends there too, within
    `max_answer_length` tokens. All of these are searched; the released code combines only the 20
    best starts and ends. A context without tokens gives the empty span, with score 0.

    Args:
      outputs: float32 `[length, 2]` of the head for each window.
    """
    found = []
    for window, output in zip(passage.windows, outputs, strict=True):
        count = window.end - window.begin
        if not count:
            continue
        start, end = output[window.offset : window.offset + count].T
        width = min(max_answer_length, count)
        ends = np.append(end, np.full(width - 1, -np.inf, np.float32))
        scores = start[:, None] + np.lib.stride_tricks.sliding_window_view(ends, width)
        scores[~window.owned] = -np.inf
        # More than n_best, since some texts occur several times.
        for index in _largest(scores.ravel(), 4 * n_best):
            first, more = divmod(int(index), width)
            characters = passage.offsets[
                [window.begin + first, window.begin + first + more], [0, 1]
            ]
            found.append(Span(*characters.tolist(), float(start[first]), float(end[first + more])))
    found.sort(key=lambda span: -span.score)
    different = {}
    for span in found:
        different.setdefault(passage.text(span), span)
    return list(different.values())[:n_best] or [Span(0, 0, 0.0, 0.0)]


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Returns the indices of the `count` largest values that are finite."""
    if count < len(values):
        chosen = np.argpartition(-values, count)[:count]
    else:
        chosen = np.arange(len(values))
    return chosen[np.isfinite(values[chosen])]


def null_span(outputs: Sequence[np.ndarray]) -> Span:
    """Returns the empty span for "no answer", with the lowest score of [CLS] over the windows."""
    start, end = min((output[0].tolist() for output in outputs), key=sum)
    return Span(0, 0, start, end)


def probabilities(ranked: Sequence[Span]) -> list[float]:
    """Returns the softmax over the scores of the spans."""
    scores = np.array([span.score for span in ranked])
    return np.exp(scores - np.logaddexp.reduce(scores)).tolist()
