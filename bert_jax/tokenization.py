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

WORDPIECE_FILENAME = "vocab.txt"
SENTENCEPIECE_FILENAME = "spiece.model"
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_WORD_CHARACTERS = 200  # A longer word becomes [UNK], as in the released WordpieceTokenizer.
MARKER = re.compile(r"\[[^\]]+\]")  # "[unused7]", or an added one such as "[ENT]"


class Tokenizer:
    """The common interface of the tokenizers.

    Special tokens are neither added nor recognized in a text, as in the released code.

    Attributes:
      filename, content: the standard name and the bytes of the vocabulary file, which a corpus or
        checkpoint stores; `tokenizer_from_bytes(filename, content)` restores the tokenizer.
      special_ids: pad_id, unk_id, cls_id, sep_id and mask_id.
      word_start: bool [vocab_size], whether a piece begins a word. True for special tokens.
      lower_case: whether text is lower-cased (and, by WordPiece, stripped of accents): true if no
        piece has an upper-case letter, except for markers in brackets.
    """

    def __init__(
        self, content: bytes, source: str, pieces: list[str], begins_word: list[bool], ids: dict
    ):
        self._pieces = pieces
        self._ids = {piece: index for index, piece in enumerate(pieces)} | ids
        missing = [token for token in SPECIAL_TOKENS if self._ids.get(token, -1) < 0]
        if missing:
            raise ValueError(f"{source} lacks {', '.join(missing)}; see tools/train_vocab.py")
        self.content = content
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size = len(pieces)
        self.special_ids = tuple(self._ids[token] for token in SPECIAL_TOKENS)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = self.special_ids
        self.mask_token = pieces[self.mask_id]
        self.word_start = np.array(begins_word)
        self.word_start[list(self.special_ids)] = True
        ordinary = (p for i, p in enumerate(pieces) if i not in self.special_ids)
        self.lower_case = all(p == p.lower() or MARKER.fullmatch(p) for p in ordinary)

    def __reduce__(self):  # Library objects are not sent to worker processes.
        return tokenizer_from_bytes, (self.filename, self.content)

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Returns the ids of `text`, which does not begin a word if it `continues` after a mask."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text."""
        raise NotImplementedError

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
        """Returns the ids and the character offsets of each text.

        Offsets are int32 [tokens, 2], (start, end), ascending. Combining accents that tokenization
        drops belong to the previous piece. White space and format characters (zero-width spaces,
        soft hyphens, control and private-use characters, U+FFFD) around a piece belong to none, so
        that an answer ends before them; a piece of nothing else has an empty span.
        """

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


class WordPieceTokenizer(Tokenizer):
    """BERT's tokenizer: cleans the text, splits it at white space, punctuation and CJK characters,
    then matches the longest piece first. Words that are too long or unmatched become [UNK]."""

    filename = WORDPIECE_FILENAME

    def __init__(self, content: bytes, source: str):
        pieces = _read_vocabulary(content, source)
        super().__init__(content, source, pieces, [not p.startswith("##") for p in pieces], {})
        options = {"unk_token": "[UNK]", "max_input_chars_per_word": MAX_WORD_CHARACTERS}
        self._tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(self._ids, **options))
        normalizer = tokenizers.normalizers.BertNormalizer(lowercase=self.lower_case)
        self._tokenizer.normalizer = normalizer
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        self._tokenizer.decoder = tokenizers.decoders.WordPiece(prefix="##")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def _encode_raw(self, texts: Sequence[str]) -> Iterable[tuple[list[int], list]]:
        for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False):
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
        ids = {"[PAD]": self._processor.pad_id(), "[UNK]": self._processor.unk_id()}
        super().__init__(content, source, pieces, [p.startswith("▁") for p in pieces], ids)
        # Appends normalizer_spec.add_dummy_prefix=false: in a protocol buffer the last value wins.
        content += b"\x1a\x02\x18\x00"
        self._continuing = sentencepiece.SentencePieceProcessor(model_proto=content)

    def encode(self, text: str, continues: bool = False) -> list[int]:
        if continues and not text[:1].isspace():
            return self._continuing.encode(text)
        return super().encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # One thread: the corpus builder already runs one process per core.
        return self._processor.encode(list(texts), num_threads=1)

    def _encode_raw(self, texts: Sequence[str]) -> Iterable[tuple[list[int], list]]:
        encoded = self._processor.encode(list(texts), return_type="offset_mapping", num_threads=1)
        for encoding in encoded:
            yield encoding["ids"], encoding["offsets"]

    def decode(self, ids: Iterable[int]) -> str:
        # SentencePiece would drop control symbols; show them, as WordPiece does.
        return "".join(self._pieces[token_id] for token_id in ids).replace("▁", " ").strip()


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """Loads a WordPiece vocabulary (one piece per line), or a SentencePiece model (*.model).

    Raises FileNotFoundError, and ValueError for a file that is neither or lacks a special token.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no vocabulary at {path}; train one with tools/train_vocab.py")
    return tokenizer_from_bytes(str(path), path.read_bytes())


def tokenizer_from_bytes(filename: str, content: bytes) -> Tokenizer:
    """Builds a tokenizer from a file's name and bytes. Raises ValueError like `load_tokenizer`."""
    tokenizer_class = SentencePieceTokenizer if filename.endswith(".model") else WordPieceTokenizer
    return tokenizer_class(content, filename)


def _read_vocabulary(content: bytes, source: str) -> list[str]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        hint = "a SentencePiece model has the suffix .model"
        raise ValueError(f"{source}, line {line}, byte {error.start}: not UTF-8; {hint}") from None
    # Not splitlines(): pieces may contain characters that only Unicode treats as line ends.
    pieces = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    first_line: dict[str, int] = {}
    for line_number, piece in enumerate(pieces, start=1):
        if not piece:
            raise ValueError(f"{source}, line {line_number} is empty; expected one piece per line")
        if (first := first_line.setdefault(piece, line_number)) != line_number:
            raise ValueError(f"{source}, line {line_number}: {piece!r} is already on line {first}")
    return pieces
