"""A question and its context to windows, and what the span head says of them to answers.

The rules are those of the code released with the paper (section 4.2). Only, each token knows which
characters of the context it stands for: an answer is cut out of the context as it is, where the
released code has to find the words again after tokenization.
"""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.data.features import Feature, make_sequence
from bert_jax.tokenization import Tokenizer

LABELS = ("start", "end")
"""What the two outputs of the head stand for."""

N_BEST = 20
"""Answers proposed for a question."""

NO_ANSWER = (0, 0)
"""Positions to predict where a window lacks the answer: [CLS]."""


@dataclasses.dataclass(frozen=True)
class SpanSettings:
    """How contexts are read and answers found; kept with a trained head. Lengths in tokens.

    Attributes:
      max_seq_length: of a window, with its question and special tokens.
      doc_stride: from the beginning of a window to that of the next.
      max_query_length: of a question; the rest is cut off.
      max_answer_length: of an answer.
      null_answers: whether a question may have no answer, as in SQuAD 2.0.
      null_threshold: by how much the logits for that must exceed an answer's.
    """

    max_seq_length: int = 384
    doc_stride: int = 128
    max_query_length: int = 64
    max_answer_length: int = 30
    null_answers: bool = False
    null_threshold: float = 0.0

    def __post_init__(self):
        most = self.max_seq_length - 4
        if not 1 <= self.max_query_length <= most:
            raise ValueError(
                f"max_query_length is {self.max_query_length}: expected 1 to {most}, which leaves "
                f"room for a context in max_seq_length={self.max_seq_length}"
            )
        for name in ("doc_stride", "max_answer_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def settings_of(head: Mapping, max_position_embeddings: int) -> SpanSettings:
    """What a trained head says; where it says nothing the defaults, as far as positions go."""
    names = [field.name for field in dataclasses.fields(SpanSettings)]
    given = {name: head[name] for name in names if name in head}
    length = min(SpanSettings.max_seq_length, max_position_embeddings)
    question = min(SpanSettings.max_query_length, length // 4)
    return SpanSettings(**({"max_seq_length": length, "max_query_length": question} | given))


class Window(NamedTuple):
    """Tokens `begin` to `end` of a context, which stand from `offset` on in the feature.

    `owned`, bool `[end - begin]`: those that see more context here than in any other window.
    """

    begin: int
    end: int
    offset: int
    owned: np.ndarray


@dataclasses.dataclass(frozen=True)
class Passage:
    """A context behind a question.

    Attributes:
      context: its text.
      offsets: int32 `[tokens, 2]`, the characters of each token, as `encode_with_offsets` has them.
      windows: that cover its tokens.
      features: what the model is given, without a label, for each window.
    """

    context: str
    offsets: np.ndarray
    windows: tuple[Window, ...]
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
    questions: Sequence[str],
    contexts: Sequence[str],
    tokenizer: Tokenizer,
    settings: SpanSettings,
) -> list[Passage]:
    """A passage for each question and its context; warns of questions that are cut, as released."""
    distinct = list(dict.fromkeys(contexts))  # Several questions share one.
    encoded = dict(zip(distinct, tokenizer.encode_with_offsets(distinct), strict=True))
    asked, most = tokenizer.encode_batch(questions), settings.max_query_length
    if long := sum(len(ids) > most for ids in asked):
        warnings.warn(f"{long} of {len(asked)} questions are cut to {most} tokens", stacklevel=2)
    return [
        _make_passage(ids[:most], context, *encoded[context], tokenizer, settings)
        for ids, context in zip(asked, contexts, strict=True)
    ]


def _make_passage(question, context, ids, offsets, tokenizer, settings) -> Passage:
    spans = cut_windows(len(ids), settings.max_seq_length - len(question) - 3, settings.doc_stride)
    owners = most_context(spans, len(ids))
    windows, features = [], []
    for number, (begin, end) in enumerate(spans):
        tokens, second = make_sequence(tokenizer, question, ids[begin:end])
        windows.append(Window(begin, end, second, owners[begin:end] == number))
        features.append(Feature((tokens,), (second,)))
    return Passage(context, offsets, tuple(windows), tuple(features))


def cut_windows(num_tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """(begin, end) of windows of at most `room` tokens that together cover all of them."""
    windows = [(0, min(room, num_tokens))]
    while windows[-1][1] < num_tokens:
        begin = windows[-1][0] + min(stride, room)
        windows.append((begin, min(begin + room, num_tokens)))
    return windows


def most_context(windows: Sequence[tuple[int, int]], num_tokens: int) -> np.ndarray:
    """Of each token the window where it has most context, int32 `[num_tokens]`.

    That is the lesser of what is left and right of it; a longer window wins ties, then an earlier.
    """
    most, owner = np.full(num_tokens, -np.inf), np.zeros(num_tokens, np.int32)
    for number, (begin, end) in enumerate(windows):
        left = np.arange(end - begin)
        context = np.minimum(left, left[::-1]) + 0.01 * (end - begin)
        better = context > most[begin:end]
        most[begin:end][better] = context[better]
        owner[begin:end][better] = number
    return owner


def find_tokens(offsets: np.ndarray, begin: int, end: int) -> tuple[int, int] | None:
    """First and last of the tokens that hold characters `begin` to `end`; None if none does."""
    first = int(np.searchsorted(offsets[:, 1], begin, side="right"))
    last = int(np.searchsorted(offsets[:, 0], end, side="left")) - 1
    return (first, last) if first <= last else None


def label_windows(passage: Passage, tokens: tuple[int, int] | None) -> list[Feature]:
    """The features, labeled with the answer's first and last token, where a window has both."""
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
    """The `n_best` spans by score that differ in their text, best first; at least one.

    A span begins where its first token has most context and ends within `max_answer_length` tokens
    of the same window. All of these are searched; the released code takes those between the 20 best
    beginnings and ends. A context without tokens has the empty span, of score 0.

    Args:
      outputs: float32 `[length, 2]` for each window, of the head.
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
        # Some texts occur several times, so more than n_best are looked at.
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
    """Indices of the `count` largest that are finite."""
    if count < len(values):
        chosen = np.argpartition(-values, count)[:count]
    else:
        chosen = np.arange(len(values))
    return chosen[np.isfinite(values[chosen])]


def null_span(outputs: Sequence[np.ndarray]) -> Span:
    """The empty span for "no answer", scored by the window where that fits least: both at [CLS]."""
    start, end = min((output[0].tolist() for output in outputs), key=sum)
    return Span(0, 0, start, end)


def probabilities(ranked: Sequence[Span]) -> list[float]:
    """Softmax over the scores of the spans proposed."""
    scores = np.array([span.score for span in ranked])
    return np.exp(scores - np.logaddexp.reduce(scores)).tolist()
