"""Sentence pairs for next-sentence prediction, as in the released `create_pretraining_data.py`.

Devlin et al. (2018), appendix A.2: half of the pairs are two consecutive spans of a document; in
the other half the second span comes from another document. One document in ten, or about an article
in ten of a long one, is cut into shorter pairs, to reduce the mismatch between pre-training and
fine-tuning.
"""

import math
import random
from array import array
from typing import NamedTuple

IS_NEXT = 0
NOT_NEXT = 1
SPECIAL_TOKENS_PER_PAIR = 3  # [CLS] first [SEP] second [SEP]
# Tokens after which the target length is drawn again. The released code draws it once, but many
# pairs of one length above half a row, such as from a book, would leave rows half empty.
TOKENS_PER_LENGTH = 1024


class Pair(NamedTuple):
    """Two spans of token ids and the next-sentence label; in full sentences `second` is empty."""

    first: array
    second: array
    nsp_label: int
    num_truncated: int = 0  # truncated tokens, except in a random span
    num_copied: int = 0  # tokens that are in another pair too: of a random span, or used twice


def make_pairs(
    documents: list[list[array]],
    index: int,
    max_seq_length: int,
    short_seq_prob: float,
    rng: random.Random,
    document_parts: range,
    as_released: bool = False,
    swaps_half: bool = False,
) -> list[Pair]:
    """Returns the sentence pairs of `documents[index]`, a document or a part of a long one.

    Both labels are equally likely, but a one-sentence document always gives NotNext, and without
    another document all pairs are IsNext. The released code labels every span of a single sentence
    NotNext: most pairs, if sentences are long. Here, unless `as_released`, a sentence that alone
    reaches the target is joined by the next, and one left over at the end may follow those before
    it, which are then used twice; and the target is drawn again every 1,024 tokens.

    Args:
      max_seq_length: maximum length of a pair with its special tokens; at least 5.
      short_seq_prob: probability of a target below the maximum.
      document_parts: indices of all parts of the document, from which no random span is drawn.
      swaps_half: swaps the spans of half of the IsNext pairs, with label 1: ALBERT's sentence
        order, for which `document_parts` covers all documents. Spans are swapped before they are
        truncated, as in the released code of ALBERT: truncation keeps an odd token in the first
        span, so its length would reveal the order.
    """
    document = documents[index]
    num_others = len(documents) - len(document_parts)
    if not num_others and len(document) == 1:
        return []
    max_tokens = max_seq_length - SPECIAL_TOKENS_PER_PAIR
    pairs, sentences = [], []
    num_tokens = position = num_copied = tokens_of_length = 0
    while position < len(document):
        if not sentences and tokens_of_length <= 0:
            is_short = rng.random() < short_seq_prob
            target_length = rng.randint(2, max_tokens) if is_short else max_tokens
            tokens_of_length = math.inf if as_released else TOKENS_PER_LENGTH
        sentences.append(document[position])
        num_tokens += len(document[position])
        position += 1
        is_full = num_tokens >= target_length and (as_released or len(sentences) > 1)
        if position < len(document) and not is_full:
            continue
        can_be_next = len(sentences if as_released else document) > 1
        is_next = not num_others or (can_be_next and rng.random() < 0.5)
        if is_next and len(sentences) == 1:
            while len(sentences) == 1 or (
                num_tokens < target_length and len(sentences) < len(document)
            ):
                sentences.insert(0, document[-len(sentences) - 1])
                num_tokens += len(sentences[0])
                num_copied += len(sentences[0])
        split = rng.randint(1, len(sentences) - 1) if len(sentences) > 1 else 1
        first = _joined(sentences[:split])
        if is_next:
            second = _joined(sentences[split:])
        else:
            second = _random_span(documents, document_parts, target_length - len(first), rng)
            # The next pair uses the sentences that the random span replaced.
            position -= len(sentences) - split
        is_swapped = is_next and swaps_half and rng.random() < 0.5
        if is_swapped:
            first, second = second, first
        spans = truncate_pair(first, second, max_tokens, rng)
        num_truncated = len(first) - len(spans[0]) + is_next * (len(second) - len(spans[1]))
        num_copied += 0 if is_next else len(spans[1])
        label = IS_NEXT if is_next and not is_swapped else NOT_NEXT
        pairs.append(Pair(*spans, label, num_truncated, num_copied))
        tokens_of_length -= len(first) + is_next * len(second)
        sentences, num_tokens, num_copied = [], 0, 0
    return pairs


def _random_span(
    documents: list[list[array]], document_parts: range, num_tokens: int, rng: random.Random
) -> array:
    """Returns sentences of another document than `document_parts`, of `num_tokens` if it has them.

    The released code may draw the document itself, and with it the true next span.
    """
    index = rng.randrange(len(documents) - len(document_parts))
    index += len(document_parts) if index >= document_parts.start else 0
    document = documents[index]
    tokens = document[0][:0]
    for sentence in document[rng.randrange(len(document)) :]:
        tokens += sentence
        if len(tokens) >= num_tokens:
            break
    return tokens


def _joined(sentences: list[array]) -> array:
    tokens = sentences[0][:0]
    for sentence in sentences:
        tokens += sentence
    return tokens


def truncate_pair(
    first: array, second: array, max_tokens: int, rng: random.Random
) -> tuple[array, array]:
    """Truncates the longer span token by token, each time at its front or back at random.

    On a tie the second span loses one. Computed in one step: the final lengths are determined, and
    the number of tokens removed from the front of a span is Binomial(num_removed, 1/2).
    """
    if len(first) + len(second) <= max_tokens:
        return first, second
    first_length = min(len(first), max((max_tokens + 1) // 2, max_tokens - len(second)))
    spans = []
    for span, length in ((first, first_length), (second, max_tokens - first_length)):
        num_removed = len(span) - length
        front = rng.getrandbits(num_removed).bit_count()
        spans.append(span[front : front + length])
    return spans[0], spans[1]
