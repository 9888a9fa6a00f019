"""Suggests words of a text for `new_words`, and counts what they save."""

import collections
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.tokenizers.new_words import (
    ids_after_space,
    is_piece,
    piece_of_word,
    text_of_piece,
    words_of,
)
from bert_jax.tokenizers.tokenizer import Tokenizer


class NewWord(NamedTuple):
    """A word that is to be one piece.

    Attributes:
      piece: as the tokenizer is to have it, normalized.
      text: the word.
      count: how often it occurs in the text.
      ids: of the pieces into which it is split now.
    """

    piece: str
    text: str
    count: int
    ids: list[int]

    @property
    def saved(self) -> int:
        """The number of tokens that the text has fewer, if the word is one piece."""
        return self.count * (len(self.ids) - 1)


def words_of_text(tokenizer: Tokenizer, counts: Mapping[str, int]) -> dict[str, NewWord]:
    """Returns by piece the words of more than one piece, of a text with these words."""
    pieces: collections.Counter = collections.Counter()
    for text, count in counts.items():
        for piece in words_of(tokenizer, text):
            pieces[piece] += count
    texts = [text_of_piece(tokenizer, piece) for piece in pieces]
    encoded = ids_after_space(tokenizer, texts)
    return {
        piece: NewWord(piece, text, count, ids)
        for (piece, count), text, ids in zip(pieces.items(), texts, encoded, strict=True)
        if len(ids) > 1 or ids == [tokenizer.unk_id]
    }


def suggest_words(
    tokenizer: Tokenizer, words: Collection[NewWord], number: int, min_count: int
) -> tuple[list[NewWord], dict[str, int]]:
    """Returns the words that save the most tokens, and why others are none, with their number."""
    reasons: collections.Counter = collections.Counter()
    candidates = []
    for word in words:
        if not any(character.isalpha() for character in word.text):
            reasons["no letters"] += 1
        elif tokenizer.unk_id in word.ids:
            unknown = tokenizer.id_to_token(tokenizer.unk_id)
            reasons[f"{unknown} among their pieces, so no vector to start from"] += 1
        elif is_piece(tokenizer, word.piece):
            reasons["already in the vocabulary, but split differently"] += 1
        elif word.count < min_count:
            reasons[f"fewer than {min_count} occurrences"] += 1
        else:
            candidates.append(word)
    candidates.sort(key=lambda word: (-word.saved, word.piece))
    return candidates[:number], dict(reasons)


def given_words(
    tokenizer: Tokenizer, lines: Sequence[str], counted: Mapping[str, NewWord]
) -> tuple[list[NewWord], int]:
    """Returns the words of a list, and how many lines were blank or the same word again.

    `counted` are the words of a text, by piece. Raises ValueError for what cannot be a new word.
    """
    words: dict[str, NewWord] = {}
    repeated = 0
    for number, line in enumerate(lines, start=1):
        if not (text := line.strip()):
            repeated += 1
            continue
        try:
            piece = piece_of_word(tokenizer, text)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}: list single words") from None
        (ids,) = ids_after_space(tokenizer, [text])
        if tokenizer.unk_id in ids:
            unknown = tokenizer.id_to_token(tokenizer.unk_id)
            raise ValueError(
                f"line {number}: {text!r} has {unknown} among its pieces, whose vectors a new one "
                "starts from: leave it out, or give the model another vocabulary "
                "(tools/replace_vocab.py)"
            )
        if len(ids) == 1:
            found = tokenizer.id_to_token(ids[0])
            raise ValueError(f"line {number}: {text!r} is already the piece {found!r}: remove it")
        if is_piece(tokenizer, piece):
            found = " ".join(map(tokenizer.id_to_token, ids))
            raise ValueError(
                f"line {number}: {text!r} is already the piece {piece!r}, but to this tokenizer "
                f"{found} is more probable: remove it"
            )
        repeated += piece in words
        count = counted[piece].count if piece in counted else 0
        words[piece] = NewWord(piece, text_of_piece(tokenizer, piece), count, ids)
    if not words:
        raise ValueError("it has no words: list one on each line")
    return [*words.values()], repeated


class Savings(NamedTuple):
    """How a text is tokenized with new words.

    Attributes:
      tokens_before, tokens_after: tokens per word between spaces.
      changed: words between spaces without a new word whose ids differ -> how often they occur.
    """

    tokens_before: float
    tokens_after: float
    changed: dict[str, int]


def count_savings(
    tokenizer: Tokenizer, extended: Tokenizer, pieces: Collection[str], counts: Mapping[str, int]
) -> Savings:
    """Compares two tokenizers on the words of a text, `pieces` being those that are new."""
    before, after = (ids_after_space(each, [*counts]) for each in (tokenizer, extended))
    total = sum(counts.values())
    sizes = (np.array([*map(len, encoded)]) for encoded in (before, after))
    tokens = (float(np.dot(size, [*counts.values()])) / total for size in sizes)
    pieces = set(pieces)
    changed = {
        text: count
        for (text, count), old, new in zip(counts.items(), before, after, strict=True)
        if old != new and not pieces.intersection(words_of(tokenizer, text))
    }
    return Savings(*tokens, changed)
