"""Sentence pairs for next-sentence prediction, as the released `create_pretraining_data` has them.

Devlin et al. (2018), appendix A.2: half of the pairs are two consecutive spans of a document, half
have their second span from another document; together a pair is at most as long as a sequence may
be. One document in ten is cut into shorter pairs, to lessen the mismatch between pre-training and
fine-tuning.
"""

import random
from typing import NamedTuple

IS_NEXT = 0
NOT_NEXT = 1
SPECIAL_TOKENS_PER_PAIR = 3  # [CLS] first [SEP] second [SEP]
TRIES_FOR_ANOTHER_DOCUMENT = 10


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
    sources: list[int] | None = None,
) -> list[Pair]:
    """Makes the pairs of one document.

    Either label has probability one half, but a document of one sentence can only be followed by a
    random span, and without another document to draw from all pairs are consecutive.

    The released code makes every single sentence NOT_NEXT: one that reaches the length wanted (61 %
    of all pairs on Wikipedia are then NOT_NEXT), and one left over at a document's end. Here the
    first waits for a second sentence, and the other may also end a pair with what stands before it,
    which is used once more.

    Args:
      documents: the documents of a group, each a non-empty list of sentences, each a non-empty list
        of token ids.
      index: which of them.
      max_seq_length: of a pair with its special tokens; at least 5.
      short_seq_prob: probability that this document is cut into shorter pairs.
      rng: the only source of chance.
      sources: for each of `documents` the number of the whole that it is a part of, where long ones
        came in parts; None if each is whole. A random span never comes from the same whole.
    """
    document = documents[index]
    sources = sources or list(range(len(documents)))
    alone = len(set(sources)) == 1
    if alone and len(document) == 1:
        return []
    max_tokens = max_seq_length - SPECIAL_TOKENS_PER_PAIR
    # Drawn once a document, as in the released code.
    target = rng.randint(2, max_tokens) if rng.random() < short_seq_prob else max_tokens
    pairs = []
    chunk: list[list[int]] = []
    chunk_tokens = 0
    position = 0
    while position < len(document):
        chunk.append(document[position])
        chunk_tokens += len(document[position])
        position += 1
        if position < len(document) and (chunk_tokens < target or len(chunk) == 1):
            continue
        is_next = alone or (len(document) > 1 and rng.random() < 0.5)
        if is_next and len(chunk) == 1:
            while len(chunk) == 1 or (chunk_tokens < target and len(chunk) < len(document)):
                chunk.insert(0, document[-len(chunk) - 1])
                chunk_tokens += len(chunk[0])
        split = rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
        first = _join(chunk[:split])
        if is_next:
            second = _join(chunk[split:])
        else:
            other = _another_document(sources, index, rng)
            second = _random_span(documents[other], target - len(first), rng)
            # The sentences that the random span displaced are used by the next pair.
            position -= len(chunk) - split
        label = IS_NEXT if is_next else NOT_NEXT
        pairs.append(Pair(*truncate_pair(first, second, max_tokens, rng), label))
        chunk, chunk_tokens = [], 0
    return pairs


def _join(sentences: list[list[int]]) -> list[int]:
    return [token for sentence in sentences for token in sentence]


def _another_document(sources: list[int], index: int, rng: random.Random) -> int:
    for _ in range(TRIES_FOR_ANOTHER_DOCUMENT):
        other = rng.randrange(len(sources))
        if sources[other] != sources[index]:
            return other
    # The released code falls back on the document itself, whose span could be the true next one.
    return next(other for other, source in enumerate(sources) if source != sources[index])


def _random_span(document: list[list[int]], num_tokens: int, rng: random.Random) -> list[int]:
    """Returns sentences from a random one on, until they have at least `num_tokens` tokens."""
    span: list[int] = []
    for sentence in document[rng.randrange(len(document)) :]:
        span += sentence
        if len(span) >= num_tokens:
            break
    return span


def truncate_pair(
    first: list[int], second: list[int], max_tokens: int, rng: random.Random
) -> tuple[list[int], list[int]]:
    """Takes tokens off the longer span, one by one, each from its front or back at random.

    Computed at once rather than one by one: the lengths that this ends with are determined, and of
    `k` tokens taken off a span the number from the front is Binomial(k, 1/2). If both are equally
    long, the second loses a token.
    """
    excess = len(first) + len(second) - max_tokens
    if excess <= 0:
        return first, second
    shorter = min(len(first), len(second))
    if shorter <= max_tokens // 2:
        lengths = [max_tokens - shorter] * 2
        lengths[len(first) > len(second)] = shorter
    else:
        lengths = [max_tokens - max_tokens // 2, max_tokens // 2]
    spans = []
    for span, length in zip((first, second), lengths, strict=True):
        surplus = len(span) - length
        front = rng.getrandbits(surplus).bit_count() if surplus else 0
        spans.append(span[front : front + length])
    return spans[0], spans[1]
