"""Converts text to token ids and back: WordPiece and SentencePiece behind one interface."""

import hashlib
import os
import pathlib
import re
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np
import sentencepiece
import tokenizers

from bert_jax.transformers_tokenizer import (
    ADDED_TOKENS_FILENAME,
    CONFIG_FILENAME,
    TRANSFORMERS_FILENAME,
    read_directory,
)
from bert_jax.wordpiece import (
    CONTINUATION,
    VOCABULARY_FILENAME,
    WORDPIECE_FILENAME,
    SpecialTokens,
    WordPiece,
    check_special_tokens,
    lower_case_of,
    read_vocabulary,
    read_wordpiece_json,
)

SENTENCEPIECE_FILENAME = "spiece.model"
SPECIAL_TOKENS = tuple(SpecialTokens())


class Tokenizer:
    """The common interface of the tokenizers.

    Special tokens are neither added nor recognized in a text, as in the released code.

    Attributes:
      filename, content: the standard name and the bytes of the file that stores the tokenizer in a
        corpus or checkpoint; `tokenizer_from_bytes(filename, content)` restores it.
      vocab_size: the number of ids.
      special_ids: pad_id, unk_id, cls_id, sep_id and, unless it is None, mask_id.
      mask_token: the mask as written in a text; None if the vocabulary has none.
      word_start: bool [vocab_size], whether a piece begins a word. True for special tokens.
      lower_case: whether text is lower-cased.
      casing: the same in words, with the reason, for the log.
      splits_at_spaces: whether a text has the ids of its parts between spaces.
    """

    filename: str
    splits_at_spaces = False

    def __init__(self, content: bytes, pieces: list[str], special_ids: list[int | None]):
        self._pieces = pieces
        self.content = content
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size = len(pieces)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = special_ids
        self.special_ids = tuple(index for index in special_ids if index is not None)
        self.mask_token = None if self.mask_id is None else pieces[self.mask_id]
        self.word_start = np.array([self._begins_word(piece) for piece in pieces])
        self.word_start[list(self.special_ids)] = True

    def __reduce__(self):  # Library objects are not sent to worker processes.
        return tokenizer_from_bytes, (self.filename, self.content)

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Returns the ids of `text`, which does not begin a word if it `continues` after a mask."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text. Raises TypeError for a single string."""
        _check_list("encode_batch", texts)
        return self._encode_ids(list(texts))

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
        """Returns the ids and the character offsets of each text.

        Offsets are int32 [tokens, 2], (start, end), ascending. Combining accents that tokenization
        drops belong to the previous piece. White space and format characters (zero-width spaces,
        soft hyphens, control and private-use characters, U+FFFD) around a piece belong to none, so
        that an answer ends before them; a piece of nothing else has an empty span. Raises TypeError
        for a single string.
        """
        _check_list("encode_with_offsets", texts)
        texts = list(texts)

        def is_blank(character: str) -> bool:
            is_format = unicodedata.category(character) in ("Cc", "Cf", "Co")
            return is_format or character == "\ufffd" or character.isspace()

        encoded = []
        # Subclasses yield the ids and offsets of their library.
        for text, (ids, raw_offsets) in zip(texts, self._encode_raw(texts), strict=True):
            offsets = []
            limits = [*(begin for begin, _ in raw_offsets[1:]), len(text)]
            for (begin, end), limit in zip(raw_offsets, limits, strict=False):
                end += len(re.match(r"\S*", text[end:limit])[0])
                while begin < end and is_blank(text[begin]):
                    begin += 1
                while begin < end and is_blank(text[end - 1]):
                    end -= 1
                offsets.append((begin, end))
            encoded.append((ids, np.array(offsets, np.int32).reshape(-1, 2)))
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`, without what tokenization dropped."""
        raise NotImplementedError

    def id_to_token(self, token_id: int) -> str:
        """Returns the piece of an id. Raises IndexError if there is none."""
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(f"token id {token_id} is outside the {self.vocab_size:,} pieces")
        return self._pieces[token_id]

    def token_to_id(self, token: str) -> int:
        """Returns the id of a piece. Raises KeyError if there is none."""
        return self._ids[token]

    def _encode_ids(self, texts: list[str]) -> list[list[int]]:
        raise NotImplementedError

    def _begins_word(self, piece: str) -> bool:
        raise NotImplementedError


class WordPieceTokenizer(Tokenizer):
    """BERT's tokenizer: cleans the text, splits it at white space, punctuation and CJK characters,
    then matches the longest piece first. Words that are too long or unmatched become [UNK].

    A tokenizer of transformers may also have tokens of its own, which it finds before all this.
    """

    def __init__(self, wordpiece: WordPiece):
        self.wordpiece = wordpiece
        self.filename, self.casing = wordpiece.filename, wordpiece.casing
        self._tokenizer = backend = wordpiece.backend
        self._ids = backend.get_vocab(with_added_tokens=True)
        special_ids = [self._ids.get(name) for name in wordpiece.special_tokens]
        # Ids between others may have no piece.
        pieces = [backend.id_to_token(i) or "" for i in range(max(self._ids.values()) + 1)]
        super().__init__(wordpiece.content, pieces, special_ids)
        normalizer, added = backend.normalizer, backend.get_added_tokens_decoder().values()
        self.lower_case = normalizer is not None and normalizer.normalize_str("A") == "a"
        self.splits_at_spaces = (
            isinstance(normalizer, tokenizers.normalizers.BertNormalizer)
            and isinstance(backend.pre_tokenizer, tokenizers.pre_tokenizers.BertPreTokenizer)
            and not any(re.search(r"\s", token.content) for token in added)
        )

    def _begins_word(self, piece: str) -> bool:
        return not piece.startswith(CONTINUATION)

    def _encode_ids(self, texts: list[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def _encode_raw(self, texts: list[str]) -> Iterable[tuple[list[int], list]]:
        for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False):
            yield encoding.ids, encoding.offsets

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, which contains its own normalization. "▁" begins a word."""

    filename = SENTENCEPIECE_FILENAME

    def __init__(self, content: bytes, source: str):
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise ValueError(f"{source} is not an intact SentencePiece model: {error}") from error
        pieces = self._processor.id_to_piece(list(range(len(self._processor))))
        # A model defines padding and unknown by id, whatever their names; -1 means none.
        pad_and_unk = {"[PAD]": self._processor.pad_id(), "[UNK]": self._processor.unk_id()}
        ids = {piece: index for index, piece in enumerate(pieces)} | pad_and_unk
        self._ids = {piece: index for piece, index in ids.items() if index >= 0}
        check_special_tokens(SPECIAL_TOKENS, self._ids, source)
        super().__init__(content, pieces, [self._ids[name] for name in SPECIAL_TOKENS])
        self.lower_case, reason = lower_case_of(pieces)
        self.casing = f"normalized by its SentencePiece model ({reason})"
        # Appends normalizer_spec.add_dummy_prefix=false: in a protocol buffer the last value wins.
        content += b"\x1a\x02\x18\x00"
        self._continuing = sentencepiece.SentencePieceProcessor(model_proto=content)

    def _begins_word(self, piece: str) -> bool:
        return piece.startswith("▁")

    def encode(self, text: str, continues: bool = False) -> list[int]:
        if continues and not text[:1].isspace():
            return self._continuing.encode(text)
        return super().encode(text)

    def _encode_ids(self, texts: list[str]) -> list[list[int]]:
        # One thread: the corpus builder already runs one process per core.
        return self._processor.encode(texts, num_threads=1)

    def _encode_raw(self, texts: list[str]) -> Iterable[tuple[list[int], list]]:
        encoded = self._processor.encode(texts, return_type="offset_mapping", num_threads=1)
        for encoding in encoded:
            yield encoding["ids"], encoding["offsets"]

    def decode(self, ids: Iterable[int]) -> str:
        # SentencePiece would drop control symbols; show them, as WordPiece does.
        return "".join(self._pieces[token_id] for token_id in ids).replace("▁", " ").strip()


def _check_list(method: str, texts: Sequence[str]) -> None:
    """Raises TypeError for a string, whose characters would be taken for texts."""
    if isinstance(texts, str):
        raise TypeError(f"{method} takes a list of texts, got {texts!r:.60}: give [text] for one")


def load_tokenizer(path: str | os.PathLike, lower_case: bool | None = None) -> Tokenizer:
    """Loads a WordPiece vocabulary (one piece per line), or a SentencePiece model (`*.model`).

    `path` may also be the directory of a corpus, or of a model of transformers. The files beside a
    vocabulary of such a model count, too. `lower_case` overrides what files or pieces say.

    Raises FileNotFoundError, and ValueError for a file that is none of these or lacks a special
    token.
    """
    path = pathlib.Path(path)
    directory = path if path.is_dir() else path.parent
    beside = ("config.json", TRANSFORMERS_FILENAME, CONFIG_FILENAME, ADDED_TOKENS_FILENAME)
    is_of_model = any((directory / name).exists() for name in beside)
    if is_of_model and path.name in (directory.name, VOCABULARY_FILENAME, TRANSFORMERS_FILENAME):
        return WordPieceTokenizer(read_directory(directory, lower_case))
    if path.is_dir():  # Of a corpus, for example.
        names = (VOCABULARY_FILENAME, WORDPIECE_FILENAME, SENTENCEPIECE_FILENAME)
        path = next((path / name for name in names if (path / name).exists()), path)
    if not path.is_file():
        raise FileNotFoundError(f"no vocabulary at {path}; train one with tools/train_vocab.py")
    return tokenizer_from_bytes(str(path), path.read_bytes(), lower_case)


def tokenizer_from_bytes(
    filename: str, content: bytes, lower_case: bool | None = None
) -> Tokenizer:
    """Builds a tokenizer from a file's name and bytes. Raises ValueError like `load_tokenizer`."""
    if filename.endswith(".model"):
        if lower_case is not None:
            raise ValueError(f"{filename}: the casing of a SentencePiece model is fixed")
        return SentencePieceTokenizer(content, filename)
    if filename.endswith(".json"):
        return WordPieceTokenizer(read_wordpiece_json(content, filename))
    return WordPieceTokenizer(read_vocabulary(content, filename, lower_case))
