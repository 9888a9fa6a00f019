"""Text to token ids and back: BERT's WordPiece, and SentencePiece, behind one interface."""

import hashlib
import os
import re
from collections.abc import Iterable, Sequence

import numpy as np
import sentencepiece
import tokenizers

WORDPIECE_FILENAME = "vocab.txt"
SENTENCEPIECE_FILENAME = "spiece.model"
WORDPIECE_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_WORD_CHARACTERS = 100  # A longer word is [UNK] in WordPiece.
MARKER = re.compile(r"\[[^\]]+\]")  # "[unused7]", or one added such as "[ENT]".


class Tokenizer:
    """What the two kinds have in common. Special tokens are never added and never read from text:
    "[SEP]" in a text is tokenized as the five characters that it is, as in the released code.

    Attributes:
      filename, content: the vocabulary file, under the name by which its kind is known, and its
        bytes, so that a corpus or a checkpoint can carry it: `tokenizer_from_bytes(filename,
        content)` is this tokenizer again.
      sha256: of `content`, in hexadecimal.
      vocab_size: number of pieces.
      pad_id, unk_id, cls_id, sep_id, mask_id: ids of the special tokens.
      special_ids: those five.
      mask_token: the mask token's text.
      word_start: bool [vocab_size], whether a piece begins a word. True for special tokens.
      lower_case: whether text is lower-cased (and by WordPiece, not by SentencePiece, its accents
        stripped), which is read off the vocabulary: no piece but markers in brackets has an
        upper-case letter.
    """

    def __init__(self, filename: str, content: bytes, pieces: list[str], special: dict[str, int]):
        self.filename = filename
        self.content = content
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size = len(pieces)
        self.pad_id = special["[PAD]"]
        self.unk_id = special["[UNK]"]
        self.cls_id = special["[CLS]"]
        self.sep_id = special["[SEP]"]
        self.mask_id = special["[MASK]"]
        self.special_ids = (self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id)
        self.mask_token = pieces[self.mask_id]
        self._pieces = pieces
        self._ids = {piece: index for index, piece in enumerate(pieces)}
        self.word_start = np.array([self._begins_word(piece) for piece in pieces])
        self.word_start[list(self.special_ids)] = True
        ordinary = (p for i, p in enumerate(pieces) if i not in self.special_ids)
        self.lower_case = all(p == p.lower() or MARKER.fullmatch(p) for p in ordinary)

    def __reduce__(self):  # worker processes get the vocabulary, not the library's object
        return tokenizer_from_bytes, (self.filename, self.content)

    @staticmethod
    def _begins_word(piece: str) -> bool:
        raise NotImplementedError

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Returns the ids of `text`.

        `continues` is for text right after a mask. SentencePiece else begins a word at any start.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text; much faster than one by one."""
        raise NotImplementedError

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
        """Returns the ids of each text, and where in it they stand: int32 [tokens, 2].

        That is the first character of each piece and one past its last; neither ever falls. What
        tokenization drops (a combining accent, a control character) belongs to the piece before it,
        and white space to none.
        """
        encoded = []
        for text, (ids, found) in zip(texts, self._pieces_in(texts), strict=True):
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

    def _pieces_in(self, texts: Sequence[str]) -> Iterable[tuple[list[int], list]]:
        """Ids and offsets as the library gives them."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`, as far as tokenization kept it."""
        raise NotImplementedError

    def id_to_token(self, token_id: int) -> str:
        """Returns the piece of an id. Raises: IndexError."""
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(
                f"token id {token_id} is outside the {self.vocab_size:,} of the vocabulary"
            )
        return self._pieces[token_id]

    def token_to_id(self, token: str) -> int:
        """Returns the id of a piece. Raises: KeyError if the vocabulary lacks it."""
        return self._ids[token]


class WordPieceTokenizer(Tokenizer):
    """BERT's own: clean, split at white space, punctuation and CJK characters, then the longest
    piece first; a word of over 100 characters, or with no pieces for it, is [UNK]."""

    def __init__(self, content: bytes, source: str = WORDPIECE_FILENAME):
        pieces = _read_vocabulary(content, source)
        ids = {piece: index for index, piece in enumerate(pieces)}
        missing = [token for token in WORDPIECE_SPECIAL_TOKENS if token not in ids]
        if missing:
            raise ValueError(_missing_special_tokens(source, missing))
        super().__init__(WORDPIECE_FILENAME, content, pieces, ids)
        model = tokenizers.models.WordPiece(
            ids, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARACTERS
        )
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.normalizer = bert_normalizer(self.lower_case)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        self._tokenizer.decoder = tokenizers.decoders.WordPiece(prefix="##")

    @staticmethod
    def _begins_word(piece: str) -> bool:
        return not piece.startswith("##")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def _pieces_in(self, texts: Sequence[str]) -> Iterable[tuple[list[int], list]]:
        for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False):
            yield encoding.ids, encoding.offsets

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, which holds its own normalization; "▁" begins a word."""

    def __init__(self, content: bytes, source: str = SENTENCEPIECE_FILENAME):
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise ValueError(f"{source} is not an intact SentencePiece model: {error}") from error
        size = self._processor.get_piece_size()
        pieces = [self._processor.id_to_piece(index) for index in range(size)]
        # Padding and unknown have ids of their own in a model, whatever their names are.
        special = {"[PAD]": self._processor.pad_id(), "[UNK]": self._processor.unk_id()}
        for token in ("[CLS]", "[SEP]", "[MASK]"):
            special[token] = pieces.index(token) if token in pieces else -1
        missing = [token for token, index in special.items() if index < 0]
        if missing:
            raise ValueError(_missing_special_tokens(source, missing))
        super().__init__(SENTENCEPIECE_FILENAME, content, pieces, special)
        # A protocol buffer takes the last value of a field: normalizer_spec.add_dummy_prefix=false.
        self._continuing = sentencepiece.SentencePieceProcessor(
            model_proto=content + b"\x1a\x02\x18\x00"
        )

    @staticmethod
    def _begins_word(piece: str) -> bool:
        return piece.startswith("▁")

    def encode(self, text: str, continues: bool = False) -> list[int]:
        if continues and not text[:1].isspace():
            return self._continuing.encode(text)
        return super().encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # One thread: the corpus builder already runs a process on each core.
        return self._processor.encode(list(texts), num_threads=1)

    def _pieces_in(self, texts: Sequence[str]) -> Iterable[tuple[list[int], list]]:
        encoded = self._processor.encode(list(texts), return_type="offset_mapping", num_threads=1)
        for encoding in encoded:
            yield encoding["ids"], encoding["offsets"]

    def decode(self, ids: Iterable[int]) -> str:
        # Control symbols decode to nothing; here they are shown, as a WordPiece vocabulary does.
        pieces = (self._pieces[token_id] for token_id in ids)
        return "".join(pieces).replace("▁", " ").strip()


def bert_normalizer(lower_case: bool) -> tokenizers.normalizers.Normalizer:
    """Returns BERT's text normalization: lower-casing implies stripping accents."""
    return tokenizers.normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=lower_case, lowercase=lower_case
    )


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """Loads a WordPiece vocabulary (one piece a line) or a SentencePiece model.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file is empty, not UTF-8, has a piece twice or an empty line, or lacks one of
        [PAD], [UNK], [CLS], [SEP] and [MASK].
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"no vocabulary at {path}; tools/train_vocab.py makes one from text"
        )
    with open(path, "rb") as stream:
        content = stream.read()
    if path.endswith(".model"):
        return SentencePieceTokenizer(content, path)
    return WordPieceTokenizer(content, path)


def tokenizer_from_bytes(filename: str, content: bytes) -> Tokenizer:
    """Returns the tokenizer that had this `filename` and `content`. Raises: as `load_tokenizer`."""
    if filename.endswith(".model"):
        return SentencePieceTokenizer(content, filename)
    return WordPieceTokenizer(content, filename)


def _read_vocabulary(content: bytes, source: str) -> list[str]:
    if not content.strip():
        raise ValueError(f"{source} is empty; expected a vocabulary, one piece a line")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line_number = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{source}, line {line_number}, byte {error.start}: not "
            "UTF-8; expected a vocabulary, one piece a line (a SentencePiece model must be named "
            "*.model)"
        ) from None
    # Not splitlines(): pieces may hold characters that Unicode, but not BERT, takes for line ends.
    pieces = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    first_line: dict[str, int] = {}
    for line_number, piece in enumerate(pieces, start=1):
        if not piece:
            raise ValueError(
                f"{source}, line {line_number} is empty; expected a piece on every line"
            )
        if piece in first_line:
            raise ValueError(
                f"{source}, line {line_number}: {piece!r} stands on line {first_line[piece]} "
                "already; ids would be ambiguous, remove one of the two"
            )
        first_line[piece] = line_number
    return pieces


def _missing_special_tokens(source: str, missing: list[str]) -> str:
    return (
        f"{source} lacks {', '.join(missing)}; BERT needs {', '.join(WORDPIECE_SPECIAL_TOKENS)}. "
        "tools/train_vocab.py makes a vocabulary that has them"
    )
