"""Converts text to token ids and back: WordPiece and SentencePiece behind one interface."""

import hashlib
import os
import re
from collections.abc import Iterable, Sequence

import numpy as np
import sentencepiece
import tokenizers

WORDPIECE_FILENAME = "vocab.txt"
SENTENCEPIECE_FILENAME = "spiece.model"
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_WORD_CHARACTERS = 100  # WordPiece maps a longer word to [UNK].
MARKER = re.compile(r"\[[^\]]+\]")  # "[unused7]", or an added one such as "[ENT]"


class Tokenizer:
    """The common interface of the tokenizers.

    Special tokens are neither added nor recognized: as in the released code, "[SEP]" in a text is
    tokenized as five characters.

    Attributes:
      filename, content: the standard name and the bytes of the vocabulary file, which a corpus or
        checkpoint stores; `tokenizer_from_bytes(filename, content)` restores the tokenizer.
      sha256: of `content`, in hexadecimal.
      vocab_size: number of pieces.
      pad_id, unk_id, cls_id, sep_id, mask_id: ids of the special tokens.
      special_ids: these five.
      mask_token: the text of the mask token.
      word_start: bool [vocab_size], whether a piece begins a word. True for special tokens.
      lower_case: whether text is lower-cased (and by WordPiece stripped of accents): true if no
        piece has an upper-case letter, except for markers in brackets.
    """

    def __init__(
        self,
        filename: str,
        content: bytes,
        pieces: list[str],
        ids: dict[str, int],
        begins_word: list[bool],
        source: str,
    ):
        missing = [token for token in SPECIAL_TOKENS if token not in ids]
        if missing:
            raise ValueError(
                f"{source} lacks {', '.join(missing)}; BERT needs {', '.join(SPECIAL_TOKENS)}. "
                "tools/train_vocab.py trains a vocabulary that has them"
            )
        self.filename = filename
        self.content = content
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size = len(pieces)
        self.special_ids = tuple(ids[token] for token in SPECIAL_TOKENS)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = self.special_ids
        self.mask_token = pieces[self.mask_id]
        self._pieces = pieces
        self._ids = {piece: index for index, piece in enumerate(pieces)}
        self.word_start = np.array(begins_word)
        self.word_start[list(self.special_ids)] = True
        ordinary = (p for i, p in enumerate(pieces) if i not in self.special_ids)
        self.lower_case = all(p == p.lower() or MARKER.fullmatch(p) for p in ordinary)

    def __reduce__(self):  # The libraries' objects are not sent to worker processes.
        return tokenizer_from_bytes, (self.filename, self.content)

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Returns the ids of `text`.

        `continues` marks text directly after a mask, which does not begin a word.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text; much faster than one by one."""
        raise NotImplementedError

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
        """Returns the ids and the offsets of each text.

        Offsets are int32 [tokens, 2]: the first character of each piece and one past its last; both
        never decrease. Characters that tokenization drops (combining accents, control characters)
        belong to the previous piece, and white space to none.
        """
        encoded = []
        for text, (ids, found) in zip(texts, self._encode_raw(texts), strict=True):
            offsets = []
            limits = [*(begin for begin, _ in found[1:]), len(text)]
            for (begin, end), limit in zip(found, limits, strict=False):
                while begin < end and text[begin].isspace():
                    begin += 1
                while end < limit and not text[end].isspace():
                    end += 1
                while begin < end and text[end - 1].isspace():
                    end -= 1
                offsets.append((begin, end))
            encoded.append((ids, np.array(offsets, np.int32).reshape(-1, 2)))
        return encoded

    def _encode_raw(self, texts: Sequence[str]) -> Iterable[tuple[list[int], list]]:
        """Yields the library's own ids and offsets of each text."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`, without what tokenization dropped."""
        raise NotImplementedError

    def id_to_token(self, token_id: int) -> str:
        """Returns the piece of an id. Raises IndexError if there is none."""
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(
                f"token id {token_id} is outside the vocabulary of {self.vocab_size:,}"
            )
        return self._pieces[token_id]

    def token_to_id(self, token: str) -> int:
        """Returns the id of a piece. Raises KeyError if there is none."""
        return self._ids[token]


class WordPieceTokenizer(Tokenizer):
    """BERT's tokenizer: cleans the text, splits it at white space, punctuation and CJK characters,
    then matches the longest piece first. A word that is too long or has no pieces is [UNK]."""

    def __init__(self, content: bytes, source: str):
        pieces = _read_vocabulary(content, source)
        ids = {piece: index for index, piece in enumerate(pieces)}
        begins_word = [not piece.startswith("##") for piece in pieces]
        super().__init__(WORDPIECE_FILENAME, content, pieces, ids, begins_word, source)
        model = tokenizers.models.WordPiece(
            ids, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARACTERS
        )
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.normalizer = bert_normalizer(self.lower_case)
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

    def __init__(self, content: bytes, source: str):
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise ValueError(f"{source} is not an intact SentencePiece model: {error}") from error
        size = self._processor.get_piece_size()
        pieces = [self._processor.id_to_piece(index) for index in range(size)]
        # A model defines padding and unknown by id, whatever their names.
        ids = {"[PAD]": self._processor.pad_id(), "[UNK]": self._processor.unk_id()}
        ids |= {token: pieces.index(token) for token in SPECIAL_TOKENS[2:] if token in pieces}
        ids = {token: index for token, index in ids.items() if index >= 0}
        begins_word = [piece.startswith("▁") for piece in pieces]
        super().__init__(SENTENCEPIECE_FILENAME, content, pieces, ids, begins_word, source)
        # Appends normalizer_spec.add_dummy_prefix=false: in a protocol buffer the last value wins.
        self._continuing = sentencepiece.SentencePieceProcessor(
            model_proto=content + b"\x1a\x02\x18\x00"
        )

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


def bert_normalizer(lower_case: bool) -> tokenizers.normalizers.Normalizer:
    """Returns BERT's text normalization, which strips accents if it lower-cases."""
    return tokenizers.normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=lower_case, lowercase=lower_case
    )


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """Loads a WordPiece vocabulary (one piece per line), or a SentencePiece model (*.model).

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is empty or not UTF-8, has a duplicate piece or an empty line, or lacks
        a special token.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no vocabulary at {path}; train one with tools/train_vocab.py")
    with open(path, "rb") as stream:
        return tokenizer_from_bytes(path, stream.read())


def tokenizer_from_bytes(filename: str, content: bytes) -> Tokenizer:
    """Builds a tokenizer from the name and the bytes of its file. Raises as `load_tokenizer`."""
    kind = SentencePieceTokenizer if filename.endswith(".model") else WordPieceTokenizer
    return kind(content, filename)


def _read_vocabulary(content: bytes, source: str) -> list[str]:
    if not content.strip():
        raise ValueError(f"{source} is empty; expected a vocabulary with one piece per line")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line_number = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{source}, line {line_number}, byte {error.start}: not UTF-8; expected one piece per "
            "line (a SentencePiece model must be named *.model)"
        ) from None
    # Not splitlines(): pieces may contain characters that only Unicode treats as line ends.
    pieces = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    first_line: dict[str, int] = {}
    for line_number, piece in enumerate(pieces, start=1):
        if not piece:
            raise ValueError(f"{source}, line {line_number} is empty; expected one piece per line")
        if piece in first_line:
            raise ValueError(
                f"{source}, line {line_number}: {piece!r} is already on line {first_line[piece]}; "
                "remove one of them"
            )
        first_line[piece] = line_number
    return pieces
