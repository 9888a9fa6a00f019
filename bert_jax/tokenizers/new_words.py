"""Adds whole words to the vocabulary of a tokenizer, for a new domain or language.

A new word is one piece wherever it follows a space. Texts without new words, or words that begin
with one, keep their ids. How a tokenizer finds a new word is decided by its kind:

- WordPiece: the word is one more piece, in the place of an `[unused]` piece while there are any. As
  the longest first piece wins, longer words that begin with a new word are split anew, too.
- Byte-level BPE: the piece is the word with its space. It has no merges: `ignore_merges` finds the
  whole word before anything is merged, so that the splits of all other words stay.
- Unigram: the piece has at least the lowest score of the vocabulary, which is usually far above the
  sum of its old pieces. A lower one would change how unknown characters are split off. Longer words
  that begin with a new word are split anew where the new piece scores higher.
- SentencePiece's own BPE: the piece is a user-defined symbol, found before anything is merged, also
  at the beginning of longer words.
"""

import re
import unicodedata
from collections.abc import Sequence

import numpy as np
import tokenizers

from bert_jax.tokenizers import unigram
from bert_jax.tokenizers.stored import (
    TOKENIZER_FILENAME,
    StoredTokenizer,
    ids_of_model,
    make_tokenizer,
)
from bert_jax.tokenizers.stored import tokenizer_json as complete_spec
from bert_jax.tokenizers.tokenizer import (
    SENTENCEPIECE_FILENAME,
    BytePairTokenizer,
    LibraryTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    WordPieceTokenizer,
    of_library,
)

UNUSED = re.compile(r"\[unused\d+\]")
FIRST = "x"  # Stands before a word that follows a space.
# By how much, per character, the score of a new unigram piece exceeds the sum of its old pieces,
# where these are so frequent that the sum is above the lowest score: rounding must not decide
# between the word and its pieces, or a shorter new word that it begins with.
SCORE_PER_CHARACTER = 1e-4


def ids_after_space(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text where it follows a space."""
    first, *encoded = tokenizer.encode_batch([FIRST, *(f"{FIRST} {text}" for text in texts)])
    return [ids[len(first) :] for ids in encoded]


def words_of(tokenizer: Tokenizer, text: str) -> list[str]:
    """Returns the pieces that the words of a text without spaces would be, after a space.

    They are the words of the tokenizer, normalized, with its mark of a space: "stent" (WordPiece),
    "Ġstent" (BPE), "▁stent" (unigram, where a word ends before a punctuation mark). Where there is
    a mark, words that do not follow the space are left out.
    """
    words = _split(tokenizer, text)
    if isinstance(tokenizer, WordPieceTokenizer):
        return words
    words = words[:1]
    if isinstance(tokenizer, BytePairTokenizer):
        return words
    return [unigram.SPACE + part for word in words if (part := _before_mark(word[1:]))]


def piece_of_word(tokenizer: Tokenizer, word: str) -> str:
    """Returns the piece that a word would be. Raises ValueError if it is not one word."""
    words = _split(tokenizer, word)
    if len(words) != 1:
        found = ", ".join(text_of_piece(tokenizer, each) for each in words) or "no word"
        raise ValueError(f"{word!r} is not one word to the tokenizer, which reads {found}")
    return words[0]


def text_of_piece(tokenizer: Tokenizer, piece: str) -> str:
    """Returns the word that a piece of `words_of` stands for."""
    if isinstance(tokenizer, BytePairTokenizer):
        return tokenizers.decoders.ByteLevel().decode([piece]).strip()
    return piece if isinstance(tokenizer, WordPieceTokenizer) else piece.lstrip(unigram.SPACE)


def is_piece(tokenizer: Tokenizer, piece: str) -> bool:
    """Returns whether the tokenizer has a piece, whatever it makes of the word."""
    try:
        tokenizer.token_to_id(piece)
    except KeyError:
        return False
    return True


def add_words(tokenizer: Tokenizer, pieces: Sequence[str]) -> tuple[Tokenizer, list[int]]:
    """Returns the tokenizer with more pieces, of `piece_of_word`, and their ids.

    Ids that no text has, `[unused...]` in WordPiece, are taken first; the others follow the last
    id. Raises ValueError if the tokenizer could not read the new words, or would read others
    otherwise than before.
    """
    if unused := [piece for piece in pieces if is_piece(tokenizer, piece)]:
        raise ValueError(f"{unused[0]!r} is a piece already, though its word has a better split")
    if isinstance(tokenizer, SentencePieceTokenizer):
        extended = _add_to_sentencepiece(tokenizer, pieces)
        ids = list(range(tokenizer.vocab_size, extended.vocab_size))
    else:
        extended, ids = _add_to_library(tokenizer, pieces)
    words = [text_of_piece(tokenizer, piece) for piece in pieces]
    read = ids_after_space(extended, words)
    wrong = [(w, found) for w, i, found in zip(words, ids, read, strict=True) if found != [i]]
    if wrong:
        word, found = wrong[0]
        split = " ".join(map(extended.id_to_token, found))
        raise ValueError(
            f"{len(wrong):,} words would not be one piece: {word!r} would be read as {split} (ids "
            f"{found}). One cause is a token of added_tokens inside a word. Leave these words out"
        )
    return extended, ids


def find_in_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> Tokenizer:
    """Returns the tokenizer that reads these texts, or their first words, as one token.

    Those that are no token of its vocabulary stay text. So sentence-transformers reads the markers
    before queries and passages of earlier ColBERT models, "[unused0]" or "[Q] ", whose libraries
    insert their ids. A SentencePiece model is returned as it is.
    """
    if not isinstance(tokenizer, LibraryTokenizer):
        return tokenizer
    spec = complete_spec(tokenizer.stored)
    tokens = {token["content"]: token for token in spec["added_tokens"]}
    ids = tokenizer.stored.backend.get_vocab(with_added_tokens=True)
    options = {"single_word": False, "lstrip": False, "rstrip": False}
    options |= {"normalized": False, "special": True}
    for text in texts:
        known = (each for each in (text, *text.split()[:1]) if each in ids)
        # A piece of the vocabulary that is found already may be one of words, which stay whole.
        token = next(known, None)
        if token in tokens or (token and tokenizer.encode(token) != [ids[token]]):
            tokens[token] = {"id": ids[token], "content": token} | options
    spec["added_tokens"] = sorted(tokens.values(), key=lambda token: token["id"])
    return _make(tokenizer.stored, spec)


def _make(stored: StoredTokenizer, spec: dict) -> Tokenizer:
    """Returns the tokenizer of another specification, with all else as stored."""
    made = make_tokenizer(
        spec,
        stored.special_tokens,
        stored.layout,
        stored.casing,
        TOKENIZER_FILENAME,
        stored.mask_lstrip,
    )
    return of_library(made)


def _split(tokenizer: Tokenizer, text: str) -> list[str]:
    """Returns the words of a text that follows a space, as the model of the tokenizer gets them."""
    text = f"{FIRST} {text}"
    if isinstance(tokenizer, SentencePieceTokenizer):
        _, *words = tokenizer.normalize(text).removeprefix(unigram.SPACE).split(unigram.SPACE)
        return [f"{unigram.SPACE}{word}" for word in words if word]
    backend = tokenizer.stored.backend
    if backend.normalizer:
        text = backend.normalizer.normalize_str(text)
    if not backend.pre_tokenizer:
        return []
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)][1:]


def _before_mark(word: str) -> str:
    """Returns the beginning of a word up to its first punctuation mark or symbol."""
    marks = (i for i, each in enumerate(word) if unicodedata.category(each)[0] in "PS")
    return word[: next(marks, len(word))]


def _add_to_library(
    tokenizer: LibraryTokenizer, pieces: Sequence[str]
) -> tuple[Tokenizer, list[int]]:
    stored = tokenizer.stored
    spec = complete_spec(stored)
    model, old = spec["model"], ids_of_model(spec)
    # The library numbers added tokens after all pieces: theirs become pieces, too, with their ids.
    added = {each["content"]: each for each in spec["added_tokens"] if each["content"] not in old}
    if alone := [name for name, each in added.items() if each["single_word"]]:
        raise ValueError(
            f"the tokenizer has the added token {alone[0]!r} (single_word), which would be read in "
            "other places if pieces followed it: remove single_word"
        )
    by_id = {index: piece for piece, index in old.items()}
    by_id |= {each["id"]: name for name, each in added.items()}
    # Those that texts cannot have: ModernBERT's, for one, are found in texts.
    in_texts = {each["content"] for each in spec["added_tokens"]}
    slots = [i for i in sorted(by_id) if UNUSED.fullmatch(by_id[i]) and by_id[i] not in in_texts]
    slots = slots[: len(pieces)] if stored.kind == "WordPiece" else []
    end = tokenizer.vocab_size
    ids = [*slots, *range(end, end + len(pieces) - len(slots))]
    by_id |= dict(zip(ids, pieces, strict=True))
    if stored.kind == "Unigram":
        scores = dict(model["vocab"])
        minimum = min(scores.values())
        new = [_score(tokenizer, scores, minimum, piece) for piece in pieces]
        scores |= dict.fromkeys(added, minimum) | dict(zip(pieces, new, strict=True))
        names = [by_id.get(index, f"[no piece {index}]") for index in range(max(by_id) + 1)]
        model["vocab"] = [[name, scores.get(name, 0.0)] for name in names]
    else:
        model["vocab"] = {by_id[index]: index for index in sorted(by_id)}
    if stored.kind == "BPE":
        if not model.get("ignore_merges"):
            _check_merges(tokenizer)
        model["ignore_merges"] = True
    return _make(stored, spec), ids


def _check_merges(tokenizer: LibraryTokenizer) -> None:
    """Raises ValueError for pieces that are whole words, but are not what their word is merged to.

    `ignore_merges` would make them so, and change the ids of texts with them.
    """
    backend = tokenizer.stored.backend
    decoder = tokenizers.decoders.ByteLevel()
    unmerged = [
        piece
        for piece, index in backend.get_vocab(with_added_tokens=False).items()
        if [token.id for token in backend.model.tokenize(piece)] != [index]
        and [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(decoder.decode([piece]))]
        == [piece]
    ]
    if unmerged:
        raise ValueError(
            f"{len(unmerged):,} pieces of the BPE, such as {unmerged[0]!r}, are words that its "
            "merges do not make: with new words (ignore_merges) texts with them would have other "
            "ids than before. Use tools/replace_vocab.py"
        )


def _score(
    tokenizer: LibraryTokenizer, scores: dict[str, float], minimum: float, piece: str
) -> float:
    """Returns the score of a new piece of a unigram model.

    It is just above the sum of its old pieces where that exceeds `minimum`, which is rare.
    """
    old = sum(scores[token.value] for token in tokenizer.stored.backend.model.tokenize(piece))
    return max(old + SCORE_PER_CHARACTER * len(piece), minimum)


def _add_to_sentencepiece(
    tokenizer: SentencePieceTokenizer, pieces: Sequence[str]
) -> SentencePieceTokenizer:
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.content)
    kinds, types = model.trainer_spec, model.SentencePiece
    if model.trainer_spec.model_type not in (kinds.UNIGRAM, kinds.BPE):
        raise ValueError("a SentencePiece model of words or characters has no room for new words")
    is_unigram = model.trainer_spec.model_type == kinds.UNIGRAM
    minimum = min(each.score for each in model.pieces if each.type == types.NORMAL)
    words = [text_of_piece(tokenizer, piece) for piece in pieces]
    for piece, ids in zip(pieces, ids_after_space(tokenizer, words), strict=True):
        old = sum(np.float64(model.pieces[index].score) for index in ids)
        score = max(old + SCORE_PER_CHARACTER * len(piece), minimum) if is_unigram else 0.0
        kind = types.NORMAL if is_unigram else types.USER_DEFINED
        model.pieces.add(piece=piece, score=score, type=kind)
    return SentencePieceTokenizer(model.SerializeToString(), SENTENCEPIECE_FILENAME)
