"""Sentence pairs for next-sentence prediction, as in the released `create_pretraining_data.py`.

Devlin et al. (2018), appendix A.2: half of the pairs are two consecutive spans of a document; in
the other half the second span comes from another document. One document in ten is cut into shorter
pairs, to reduce the mismatch between pre-training and fine-tuning.
"""

import itertools
import random
from typing import NamedTuple

IS_NEXT = 0
NOT_NEXT = 1
SPECIAL_TOKENS_PER_PAIR = 3  # [CLS] first [SEP] second [SEP]


class Pair(NamedTuple):
    """Two spans of token ids, without special tokens, and the next-sentence label."""

    first: list[int]
    second: list[int]
    nsp_label: int


def make_pairs(
    documents: list[list[list[int]]],
    index: int,
    max_seq_length: int,
    short_seq_prob: float,
    rng: random.Random,
    own_parts: range | None = None,
) -> list[Pair]:
    """Returns the sentence pairs of `documents[index]`.

    Both labels are equally likely, except that a one-sentence document always gives NotNext, and
    that all pairs are IsNext if there is no other document to draw from.
    The released code labels every lone sentence NotNext: 61 % of the pairs on Wikipedia. Here a
    sentence that alone reaches the target length is joined by the next one, and a sentence left
    over at the end may also follow the sentences before it, which are then used twice.

    Args:
      max_seq_length: maximum length of a pair with its special tokens; at least 5.
      short_seq_prob: probability that the document is cut into shorter pairs.
      own_parts: indices of all parts of the long document that `index` is a part of, from which no
        random span is drawn; None if `index` is a whole document.
    """
    document = documents[index]
    own_parts = own_parts or range(index, index + 1)
    num_others = len(documents) - len(own_parts)
    if not num_others and len(document) == 1:
        return []
    max_tokens = max_seq_length - SPECIAL_TOKENS_PER_PAIR
    # Drawn once per document, as in the released code.
    target = rng.randint(2, max_tokens) if rng.random() < short_seq_prob else max_tokens
    pairs, chunk = [], []
    chunk_tokens = position = 0
    while position < len(document):
        chunk.append(document[position])
        chunk_tokens += len(document[position])
        position += 1
        if position < len(document) and (chunk_tokens < target or len(chunk) == 1):
            continue
        is_next = not num_others or (len(document) > 1 and rng.random() < 0.5)
        if is_next and len(chunk) == 1:
            while len(chunk) == 1 or (chunk_tokens < target and len(chunk) < len(document)):
                chunk.insert(0, document[-len(chunk) - 1])
                chunk_tokens += len(chunk[0])
        split = rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
        first = list(itertools.chain(*chunk[:split]))
        if is_next:
            second = list(itertools.chain(*chunk[split:]))
        else:
            # The released code may draw the document itself, and with it the true next span.
            other = rng.randrange(num_others)
            other += len(own_parts) if other >= own_parts.start else 0
            second = _random_span(documents[other], target - len(first), rng)
            # The next pair uses the sentences that the random span replaced.
            position -= len(chunk) - split
        first, second = truncate_pair(first, second, max_tokens, rng)
        pairs.append(Pair(first, second, IS_NEXT if is_next else NOT_NEXT))
        chunk, chunk_tokens = [], 0
    return pairs


def _random_span(document: list[list[int]], num_tokens: int, rng: random.Random) -> list[int]:
    """Returns sentences from a random one to the end, or until they have `num_tokens` tokens."""
    span: list[int] = []
    for sentence in document[rng.randrange(len(document)) :]:
        span += sentence
        if len(span) >= num_tokens:
            break
    return span


def truncate_pair(
    first: list[int], second: list[int], max_tokens: int, rng: random.Random
) -> tuple[list[int], list[int]]:
    """Truncates the longer span token by token, each time at its front or back at random.

    Computed in one step: the final lengths are determined, and the number of tokens removed from
    the front of a span is Binomial(num_removed, 1/2). On a tie the second span loses one.
    """
    if len(first) + len(second) <= max_tokens:
        return first, second
    first_half = max_tokens - max_tokens // 2
    first_length = min(len(first), max(first_half, max_tokens - len(second)))
    spans = []
    for span, length in ((first, first_length), (second, max_tokens - first_length)):
        num_removed = len(span) - length
        front = rng.getrandbits(num_removed).bit_count()
        spans.append(span[front : front + length])
    return spans[0], spans[1]
