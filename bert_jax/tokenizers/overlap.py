"""Finds the tokens of one tokenizer in another: by role, by name and by their text."""

from typing import NamedTuple

import numpy as np

from bert_jax.tokenizers.new_words import ids_after_space
from bert_jax.tokenizers.tokenizer import (
    BytePairTokenizer,
    Tokenizer,
    WordPieceTokenizer,
)
from bert_jax.tokenizers.wordpiece import CONTINUATION

ROLES = ("pad_id", "unk_id", "cls_id", "sep_id", "mask_id")


class Overlap(NamedTuple):
    """What a new tokenizer has of an old one.

    Attributes:
      shared: int [new vocab_size], the old id of the same token; -1 for none. Special tokens are
        the same if they have the same role.
      pieces: for each new id, the old ids of its text; [] if the old tokenizer does not know it.
    """

    shared: np.ndarray
    pieces: list[list[int]]


def find_overlap(old: Tokenizer, new: Tokenizer) -> Overlap:
    """Finds the tokens that two tokenizers share.

    Tokens of the same kind of tokenizer are the same if they have the same name. Otherwise a new
    token is the old one that has its text, as the old tokenizer reads it where the new one has it:
    at the beginning of a word ("Ġthe", "▁the" and "the" of WordPiece) or inside ("##s", "s"). The
    old tokenizer's casing counts: to an uncased one, "The" is "the". Of punctuation marks it does
    not matter where they are.
    """
    shared = np.full(new.vocab_size, -1)
    pieces: list[list[int]] = [[] for _ in range(new.vocab_size)]
    same_kind = _kind(old) == _kind(new)
    texts = [new.piece_text(index) for index in range(new.vocab_size)]
    at_beginning = ids_after_space(old, texts)
    for index, text in enumerate(texts):
        if index in new.special_ids:
            continue
        same = _id_of(old, new.id_to_token(index)) if same_kind else None
        if same is not None:
            pieces[index] = [same]
        elif text.strip() and "\ufffd" not in text:  # Some bytes of a character are no text.
            is_mark = not any(character.isalnum() for character in text)
            options = []
            if is_mark or new.word_start[index]:
                options.append(at_beginning[index])
            if is_mark or not new.word_start[index]:
                options.append(_ids_inside(old, text))
            known = [ids for ids in options if ids and old.unk_id not in ids]
            pieces[index] = min(known, key=len, default=[])
        if len(pieces[index]) == 1:
            shared[index] = pieces[index][0]
    for role in ROLES:
        if None not in (found := (getattr(new, role), getattr(old, role))):
            shared[found[0]] = found[1]
    return Overlap(shared, pieces)


def _kind(tokenizer: Tokenizer) -> type:
    kinds = (WordPieceTokenizer, BytePairTokenizer)
    return next((kind for kind in kinds if isinstance(tokenizer, kind)), Tokenizer)


def _id_of(tokenizer: Tokenizer, name: str) -> int | None:
    """Returns the id of an ordinary token, None if there is none."""
    try:
        index = tokenizer.token_to_id(name)
    except KeyError:
        return None
    return None if index in tokenizer.special_ids else index


def _ids_inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the ids of a text inside of a word; [] if there are none."""
    if not isinstance(tokenizer, WordPieceTokenizer):
        return tokenizer.encode(text, continues=True)
    normalizer = tokenizer.stored.backend.normalizer
    text = normalizer.normalize_str(text) if normalizer else text
    ids = []
    while text:
        for end in range(len(text), 0, -1):
            if (index := _id_of(tokenizer, f"{CONTINUATION}{text[:end]}")) is not None:
                break
        else:
            return []
        ids.append(index)
        text = text[end:]
    return ids
