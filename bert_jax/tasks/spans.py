"""Converts questions and contexts to windows, and outputs of the span head to answers.

Follows the rules of the released code (section 4.2 of the paper), except that each token keeps its
character offsets in the context, so that an answer is a slice of the original text.
"""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import softmax

from bert_jax.data.features import ModelInput, make_sequence
from bert_jax.tokenizers.tokenizer import Tokenizer

LABELS = ("start", "end")
N_BEST = 20  # Number of answers proposed per question.


class SpanConfig(NamedTuple):
    """How to read contexts and find answers; stored with a trained head. Lengths in tokens."""

    max_seq_length: int = 384  # Window length, including the question and special tokens.
    doc_stride: int = 128  # Between the beginnings of consecutive windows.
    max_query_length: int = 64  # Longer questions are truncated.
    max_answer_length: int = 30
    null_answers: bool = False  # Whether a question may have no answer, as in SQuAD 2.0.
    null_threshold: float = 0.0  # How far the no-answer score must exceed the best answer's.


def span_config(head: Mapping, max_position_embeddings: int) -> SpanConfig:
    """Returns the config stored with a trained head, with defaults that fit its positions."""
    length = min(SpanConfig().max_seq_length, max_position_embeddings)
    question = min(SpanConfig().max_query_length, length // 4)
    saved = {name: value for name, value in head.items() if name in SpanConfig._fields}
    return SpanConfig(**{"max_seq_length": length, "max_query_length": question} | saved)


class ContextWindow(NamedTuple):
    """Tokens `[start, end)` of a context; `is_max_context` as in the released code."""

    start: int
    end: int
    is_max_context: np.ndarray  # bool `[end - start]`


class Span(NamedTuple):
    """Characters `[start, end)` of a context, proposed as the answer."""

    start: int
    end: int
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


class Answer(NamedTuple):
    """An answer, its probability, and its characters `[start, end)`; "" means no answer."""

    text: str
    probability: float
    start: int
    end: int


class RankedAnswers(NamedTuple):
    """The answers to a question.

    Attributes:
      answers: best first, with probabilities normalized over them; with `SpanConfig.null_answers`,
        one of them is "no answer".
      null_odds: the score of "no answer" minus that of the best answer, in nats.
    """

    answers: list[Answer]
    null_odds: float

    @property
    def best_text(self) -> str:
        """The text of the best answer besides "no answer"."""
        return next((answer.text for answer in self.answers if answer.text), "")


class Passage(NamedTuple):
    """A question's context, in windows that together cover all its tokens."""

    context: str
    offsets: np.ndarray  # int32 `[tokens, 2]`: characters of each token.
    windows: Sequence[ContextWindow]
    features: Sequence[ModelInput]  # Input of the model for each window, unlabeled.
    num_after: int = 1  # Special tokens after the context.
    cls_last: bool = False  # Whether [CLS] is the last token of a window, not the first.

    def text(self, span: Span) -> str:
        return self.context[span.start : span.end]

    def context_start(self, feature: ModelInput, window: ContextWindow) -> int:
        """Returns the position of a window's first token in its feature."""
        return len(feature) - self.num_after - (window.end - window.start)

    def no_answer(self, feature: ModelInput) -> tuple[int, int]:
        """Returns the target positions for a window without the answer: [CLS]."""
        position = len(feature) - 1 if self.cls_last else 0
        return position, position


def make_passages(
    pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer, config: SpanConfig
) -> list[Passage]:
    """Builds the passage of each (question, context) pair; warns about truncated questions."""
    contexts = list(dict.fromkeys(context for _, context in pairs))  # Several questions share one.
    encoded = dict(zip(contexts, tokenizer.encode_with_offsets(contexts), strict=True))
    questions = tokenizer.encode_batch([question for question, _ in pairs])
    limit = config.max_query_length
    if long := sum(len(ids) > limit for ids in questions):
        message = f"{long} of {len(pairs)} questions are truncated to {limit} tokens"
        warnings.warn(message, stacklevel=2)
    passages = []
    for question, (_, context) in zip(questions, pairs, strict=True):
        question, (ids, offsets) = question[:limit], encoded[context]
        room = config.max_seq_length - len(question) - tokenizer.layout.num_special_tokens(2)
        windows = cut_windows(len(ids), room, config.doc_stride)
        features = []
        for window in windows:
            tokens, start = make_sequence(tokenizer, question, ids[window.start : window.end])
            features.append(ModelInput((tokens,), (start,)))
        layout = tokenizer.layout
        passages.append(
            Passage(context, offsets, windows, features, layout.num_after, layout.cls_last)
        )
    return passages


def cut_windows(num_tokens: int, room: int, stride: int) -> list[ContextWindow]:
    """Returns windows of at most `room` tokens, every `stride` tokens, until all are covered.

    A token's context is the smaller of those to its left and right. Ties go to the longer
    window, then to the earlier one.
    """
    step = min(stride, room)
    starts = range(0, max(num_tokens - room, 0) + step, step)
    limits = [(start, min(start + room, num_tokens)) for start in starts]
    largest, owner = np.full(num_tokens, -np.inf), np.zeros(num_tokens, np.int32)
    for number, (start, end) in enumerate(limits):
        left = np.arange(end - start)
        context = np.minimum(left, left[::-1]) + 0.01 * (end - start)
        larger = context > largest[start:end]
        largest[start:end][larger] = context[larger]
        owner[start:end][larger] = number
    return [
        ContextWindow(start, end, owner[start:end] == number)
        for number, (start, end) in enumerate(limits)
    ]


def locate(answer: tuple[str, int], passage: Passage) -> tuple[int, int] | None:
    """Returns the first and last token of an answer; None if it is not at its answer_start."""
    text, start = answer
    if not text.strip() or start < 0 or not passage.context.startswith(text, start):
        return None
    starts, ends = passage.offsets.T
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(starts, start + len(text), side="left")) - 1
    return (first, last) if first <= last else None


def label_windows(passage: Passage, tokens: tuple[int, int] | None) -> list[ModelInput]:
    """Labels each window with the answer's first and last token if it contains both."""
    features = []
    for window, feature in zip(passage.windows, passage.features, strict=True):
        label = passage.no_answer(feature)
        if tokens and window.start <= tokens[0] and tokens[1] < window.end:
            shift = passage.context_start(feature, window) - window.start
            label = tokens[0] + shift, tokens[1] + shift
        features.append(dataclasses.replace(feature, label=label))
    return features


def text_limits(passage: Passage) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the text of a span starts, by its first token, and ends, by its last.

    If that token is empty (only white space or format characters), the text begins with the next
    token that is not, or ends with the previous one. Both arrays are int `[tokens]`.
    """
    starts, ends = passage.offsets.T
    has_text = starts < ends
    next_starts = np.where(has_text, starts, len(passage.context))[::-1]
    return np.minimum.accumulate(next_starts)[::-1], np.maximum.accumulate(has_text * ends)


def best_spans(
    passage: Passage, outputs: Sequence[np.ndarray], max_answer_length: int, n_best: int
) -> list[Span]:
    """Returns the `n_best` highest-scoring spans with distinct texts, best first; at least one.

    A span begins in the window that owns its first token and ends there too, within
    `max_answer_length` tokens. All of these are searched; the released code combines only the 20
    best starts and ends. Spans without text, of tokens that are only white space or format
    characters, are left out; a context without others gives the empty span, with score 0. `outputs`
    are the outputs of the head for each window.
    """
    text_starts, text_ends = text_limits(passage)
    spans, beyond = [], np.full(max_answer_length, -np.inf, np.float32)
    for window, feature, output in zip(passage.windows, passage.features, outputs, strict=True):
        first = passage.context_start(feature, window)
        start, end = output[first : first + window.end - window.start].T
        ends = np.lib.stride_tricks.sliding_window_view(np.append(end, beyond), max_answer_length)
        scores = start[:, None] + ends[: len(end)]
        scores[~window.is_max_context] = -np.inf
        values = scores.ravel()
        chosen = np.flatnonzero(np.isfinite(values))
        count = 4 * n_best  # More than n_best, since some texts occur several times.
        if len(chosen) > count:
            chosen = chosen[np.argpartition(-values[chosen], count)[:count]]
        for first, offset in np.stack(np.divmod(chosen, max_answer_length), axis=1).tolist():
            last = first + offset
            limits = int(text_starts[window.start + first]), int(text_ends[window.start + last])
            spans.append(Span(*limits, float(start[first]), float(end[last])))
    by_text = {}
    for span in sorted(spans, key=lambda span: -span.score):
        if span.start < span.end:
            by_text.setdefault(passage.text(span), span)
    return list(by_text.values())[:n_best] or [Span(0, 0, 0.0, 0.0)]


def null_span(passage: Passage, outputs: Sequence[np.ndarray]) -> Span:
    """Returns the empty span for "no answer", with the lowest score of [CLS] over the windows."""
    place = -1 if passage.cls_last else 0
    start, end = min((output[place].tolist() for output in outputs), key=sum)
    return Span(0, 0, start, end)


def rank_answers(
    passage: Passage, outputs: Sequence[np.ndarray], config: SpanConfig
) -> RankedAnswers:
    """Returns the `N_BEST` answers by score, with their probabilities.

    With `config.null_answers`, "no answer" is another candidate, ranked by `config.null_threshold`.
    """
    ranked = best_spans(passage, outputs, config.max_answer_length, N_BEST)
    null = null_span(passage, outputs)
    null_odds = null.score - ranked[0].score
    if config.null_answers:
        rank = sum(null.score - span.score <= config.null_threshold for span in ranked)
        ranked.insert(rank, null)
    pairs = zip(ranked, softmax([span.score for span in ranked]).tolist(), strict=True)
    answers = [Answer(passage.text(span), p, span.start, span.end) for span, p in pairs]
    return RankedAnswers(answers, null_odds)
