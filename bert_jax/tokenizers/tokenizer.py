"""Converts text to token ids and back: WordPiece, byte-level BPE and unigram models behind one
interface."""

import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Sequence

import numpy as np
import sentencepiece
import tokenizers

from bert_jax.runtime.model_files import (
    check_not_pointer,
    find_snapshot,
    hub_hint,
    parse_json,
)
from bert_jax.tokenizers import byte_pair, legacy, unigram
from bert_jax.tokenizers.characters import BLANK, LETTER_VARIANT, SYMBOL_VARIANT
from bert_jax.tokenizers.huggingface import (
    ADDED_TOKENS_FILENAME,
    CONFIG_FILENAME,
    GOOGLE_ALBERT_FILENAME,
    read_alone,
    read_directory,
    sentencepiece_class,
)
from bert_jax.tokenizers.stored import (
    LAYOUT_FILENAME,
    TOKENIZER_FILENAME,
    Layout,
    SpecialTokens,
    StoredTokenizer,
    build_backend,
    check_special_tokens,
    lower_cases,
    read_tokenizer_json,
    special_ids,
    stored_files,
    strips_accents,
    tokenizer_json,
)
from bert_jax.tokenizers.wordpiece import (
    CONTINUATION,
    VOCABULARY_FILENAME,
    lower_case_of,
    read_vocabulary,
)

SENTENCEPIECE_FILENAME = "spiece.model"
SHA256_SUFFIX = ".sha256"  # Suffix of the file beside a vocabulary with its SHA-256.
SPECIAL_TOKENS = tuple(SpecialTokens())
BLANK_CHARACTER = re.compile(rf"[\s{BLANK}]")
VARIANT = re.compile(rf"{LETTER_VARIANT}|{SYMBOL_VARIANT}")


class Tokenizer:
    """The common interface of the tokenizers.

    Special tokens are neither added nor recognized in a text, as in the released code.

    Attributes:
      sha256: identifies the tokenizer, whatever files it was read from. If `vocab.txt` or a
        SentencePiece model says all of it, it is the SHA-256 of that file.
      vocab_size: the number of ids.
      special_ids: pad_id, unk_id, cls_id, sep_id and, unless it is None, mask_id.
      mask_token: the mask as written in a text; None if the vocabulary has none.
      word_start: bool [vocab_size], whether a piece begins a word. True for special tokens.
      lower_case: whether text is lower-cased.
      strips_accents: whether accents and other combining marks are removed from text.
      casing: the same in words, with the reason, for the log.
      splits_at_spaces: whether a text has the ids of its parts between spaces.
      layout: how one or two texts become one sequence with special tokens.
      word_prefix: what a word that follows another needs before it; a space in byte-level BPE.
      mask_lstrip: whether a mask in a text takes the white space before it.
    """

    sha256: str
    splits_at_spaces = False
    layout = Layout()
    word_prefix = ""
    mask_lstrip = False

    def __init__(self, pieces: list[str], special_ids: list[int | None]):
        self._pieces = pieces
        self.vocab_size = len(pieces)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = special_ids
        self.special_ids = tuple(index for index in special_ids if index is not None)
        self.mask_token = None if self.mask_id is None else pieces[self.mask_id]
        self.word_start = np.array([self._begins_word(piece) for piece in pieces])
        self.word_start[list(self.special_ids)] = True

    def files(self) -> dict[str, bytes]:
        """Returns the files, by name, that store it; `read_stored` reads them."""
        raise NotImplementedError

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
        that an answer ends before them; a piece of nothing else has an empty span. Variation
        selectors belong to the symbols and ideographs that they change. Raises TypeError for a
        single string.
        """
        _check_list("encode_with_offsets", texts)
        texts = list(texts)

        encoded = []
        # Subclasses yield the ids and offsets of their library.
        for text, (ids, raw_offsets) in zip(texts, self._encode_raw(texts), strict=True):
            offsets = []
            limits = [*(begin for begin, _ in raw_offsets[1:]), len(text)]
            for (begin, end), limit in zip(raw_offsets, limits, strict=False):
                end += len(re.match(r"\S*", text[end:limit])[0])
                while begin < end and _is_blank(text, begin):
                    begin += 1
                while begin < end and _is_blank(text, end - 1):
                    end -= 1
                offsets.append((begin, end))
            encoded.append((ids, np.array(offsets, np.int32).reshape(-1, 2)))
        return encoded

    def encode_with_words(self, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
        """Returns the ids of each text, and int32 [tokens], the number of each token's word.

        A word is what the tokenizer splits into pieces: in most, a punctuation mark is a word of
        its own; in a unigram model, all between two spaces is one. Raises TypeError for a single
        string.
        """
        _check_list("encode_with_words", texts)
        return list(self._encode_words(list(texts)))

    def _encode_words(self, texts: list[str]) -> Iterable[tuple[list[int], np.ndarray]]:
        for ids in self._encode_ids(texts):
            yield ids, np.cumsum(self.word_start[ids], dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`, without what tokenization dropped."""
        raise NotImplementedError

    def id_to_token(self, token_id: int) -> str:
        """Returns the piece of an id. Raises IndexError if there is none."""
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(f"token id {token_id} is outside the {self.vocab_size:,} pieces")
        return self._pieces[token_id]

    def piece_text(self, token_id: int) -> str:
        """Returns the text of a piece, without what says that it begins or continues a word."""
        raise NotImplementedError

    def token_to_id(self, token: str) -> int:
        """Returns the id of a piece. Raises KeyError if there is none."""
        return self._ids[token]

    def _encode_ids(self, texts: list[str]) -> list[list[int]]:
        raise NotImplementedError

    def _begins_word(self, piece: str) -> bool:
        raise NotImplementedError


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library.

    It may have tokens of its own, which it finds before all other rules.
    """

    def __init__(self, stored: StoredTokenizer):
        self.stored = stored
        self.layout, self.casing = stored.layout, stored.casing
        self.mask_lstrip = stored.mask_lstrip
        self._tokenizer = backend = stored.backend
        self._added = {token.content for token in backend.get_added_tokens_decoder().values()}
        ids = special_ids(backend, stored.special_tokens)
        self._ids = backend.get_vocab(with_added_tokens=True)
        # Ids between others may have no piece.
        pieces = [backend.id_to_token(i) or "" for i in range(max(self._ids.values()) + 1)]
        for name, index in zip(stored.special_tokens, ids, strict=True):
            if index is not None:  # A unigram model has it under another name.
                pieces[index] = name
                self._ids[name] = index
        super().__init__(pieces, ids)
        self.lower_case, self.strips_accents = lower_cases(backend), strips_accents(backend)

    def __reduce__(self):
        return type(self), (self.stored,)

    @functools.cached_property
    def sha256(self) -> str:
        # Hashes the form that earlier versions stored, so that their runs can be resumed.
        return hashlib.sha256(legacy.file_content(self.stored)).hexdigest()

    def files(self) -> dict[str, bytes]:
        spec = tokenizer_json(self.stored)
        content = json.dumps(spec, ensure_ascii=False, separators=(",", ":")).encode()
        return stored_files(TOKENIZER_FILENAME, content, self.stored.special_tokens, self.layout)

    def _encode_ids(self, texts: list[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def _encode_raw(self, texts: list[str]) -> Iterable[tuple[list[int], list]]:
        for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False):
            yield encoding.ids, encoding.offsets

    def _encode_words(self, texts: list[str]) -> Iterable[tuple[list[int], np.ndarray]]:
        for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False):
            yield encoding.ids, np.array(encoding.word_ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class WordPieceTokenizer(LibraryTokenizer):
    """BERT's tokenizer: cleans the text, splits it at white space, punctuation and CJK characters,
    then matches the longest piece first. Words that are too long or unmatched become [UNK].
    """

    def __init__(self, stored: StoredTokenizer):
        super().__init__(stored)
        backend = stored.backend
        self.splits_at_spaces = (
            isinstance(backend.normalizer, tokenizers.normalizers.BertNormalizer)
            and isinstance(backend.pre_tokenizer, tokenizers.pre_tokenizers.BertPreTokenizer)
            and not any(re.search(r"\s", content) for content in self._added)
        )

    def _begins_word(self, piece: str) -> bool:
        return not piece.startswith(CONTINUATION)

    def piece_text(self, token_id: int) -> str:
        return self._pieces[token_id].removeprefix(CONTINUATION)


class BytePairTokenizer(LibraryTokenizer):
    """RoBERTa's byte-level BPE. "Ġ", the space before a word, begins it."""

    word_prefix = " "

    @functools.cached_property
    def _continuing(self) -> tokenizers.Tokenizer:
        """The tokenizer of a text that does not begin a word."""
        spec = json.loads(self.stored.backend.to_str())
        byte_pair.byte_level_of(spec)["add_prefix_space"] = False
        return build_backend(spec, TOKENIZER_FILENAME)

    def _begins_word(self, piece: str) -> bool:
        return piece.startswith(byte_pair.SPACE) or piece in self._added

    def encode(self, text: str, continues: bool = False) -> list[int]:
        if continues:
            return self._continuing.encode(text, add_special_tokens=False).ids
        return super().encode(text)

    def piece_text(self, token_id: int) -> str:
        return self.decode([token_id]).removeprefix(self.word_prefix)


class UnigramTokenizer(LibraryTokenizer):
    """A unigram model with ALBERT's normalization, or another. "▁" begins a word."""

    @functools.cached_property
    def _continuing(self) -> tokenizers.Tokenizer:
        """The tokenizer of a text that does not begin a word."""
        spec = json.loads(self.stored.backend.to_str())
        unigram.metaspace_of(spec)["prepend_scheme"] = "never"
        return build_backend(spec, TOKENIZER_FILENAME)

    def _begins_word(self, piece: str) -> bool:
        return piece.startswith(unigram.SPACE) or piece in self._added

    def encode(self, text: str, continues: bool = False) -> list[int]:
        if not continues:
            return super().encode(text)
        part = re.match(r"\S*", text)[0]  # of a word
        ids = self._continuing.encode(part, add_special_tokens=False).ids
        return ids + super().encode(text[len(part) :])

    def decode(self, ids: Iterable[int]) -> str:
        return _joined(self._pieces[token_id] for token_id in ids)

    def piece_text(self, token_id: int) -> str:
        return self._pieces[token_id].removeprefix(unigram.SPACE)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model alone, which contains its normalization. "▁" begins a word."""

    def __init__(self, content: bytes, source: str):
        self.content, self.sha256 = content, hashlib.sha256(content).hexdigest()
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
        super().__init__(pieces, [self._ids[name] for name in SPECIAL_TOKENS])
        self.lower_case, reason = lower_case_of(pieces)
        self.strips_accents = False
        self.casing = f"normalized by its SentencePiece model ({reason})"
        # Appends normalizer_spec.add_dummy_prefix=false: in a protocol buffer the last value wins.
        content += b"\x1a\x02\x18\x00"
        self._continuing = sentencepiece.SentencePieceProcessor(model_proto=content)

    def __reduce__(self):  # Library objects are not sent to worker processes.
        return type(self), (self.content, SENTENCEPIECE_FILENAME)

    def files(self) -> dict[str, bytes]:
        return stored_files(SENTENCEPIECE_FILENAME, self.content, SpecialTokens(), self.layout)

    def _begins_word(self, piece: str) -> bool:
        return piece.startswith(unigram.SPACE)

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
        return _joined(self._pieces[token_id] for token_id in ids)

    def piece_text(self, token_id: int) -> str:
        return self._pieces[token_id].removeprefix(unigram.SPACE)

    def normalize(self, text: str) -> str:
        """Returns the text of which the model finds pieces, with "▁" for its spaces."""
        return self._processor.normalize(text)


def _is_blank(text: str, index: int) -> bool:
    """Returns whether a character is white space or format that belongs to no other."""
    if not BLANK_CHARACTER.match(text, index):
        return False
    return not VARIANT.fullmatch(text, max(0, index - 1), index + 1)


def _joined(pieces: Iterable[str]) -> str:
    return "".join(pieces).replace(unigram.SPACE, " ").strip()


def _check_list(method: str, texts: Sequence[str]) -> None:
    """Raises TypeError for a string, whose characters would be taken for texts."""
    if isinstance(texts, str):
        raise TypeError(f"{method} takes a list of texts, got {texts!r:.60}: give [text] for one")


def load_tokenizer(path: str | os.PathLike, lower_case: bool | None = None) -> Tokenizer:
    """Loads a vocabulary as in `tokenizer_from_bytes`, or the tokenizer of a directory.

    The directory is of a corpus, of a run (its workdir, or a checkpoint), or of a model of
    transformers, such as a folder of the hub's cache. The files beside a vocabulary of such a model
    are read, too. `lower_case` overrides what files or pieces say.

    Raises FileNotFoundError, and ValueError for a file that is none of these or lacks a special
    token.
    """
    name, path = str(path), find_snapshot(pathlib.Path(path))
    if stored := _find_stored(path):
        tokenizer = read_stored(stored)
        if lower_case not in (None, tokenizer.lower_case):
            raise ValueError(f"{stored}: the casing of a stored tokenizer is fixed")
        return tokenizer
    directory = path if path.is_dir() else path.parent
    if _is_of_model(path, directory):
        named = "" if path.is_dir() else path.name
        if named and not path.exists():
            raise FileNotFoundError(f"no vocabulary at {path}: there is no such file")
        return of_library(read_directory(directory, lower_case, named))
    names = (VOCABULARY_FILENAME, *legacy.JSON_FILENAMES, SENTENCEPIECE_FILENAME)
    if path.is_dir():
        path = next((path / name for name in names if (path / name).exists()), path)
    if not path.is_file():
        fix = "train one with tools/train_vocab.py"
        if path.is_dir():
            fix = f"expected {', '.join(names)}, a model's files, or a run with a checkpoint"
        elif hint := hub_hint(name):
            fix = f"{hint}, and give DIR; or {fix}"
        raise FileNotFoundError(f"no vocabulary at {path}; {fix}")
    check_not_pointer(path)
    content = path.read_bytes()
    _check_sha256(path, content)
    return tokenizer_from_bytes(str(path), content, lower_case)


def write_sha256(path: str | os.PathLike) -> None:
    """Writes the SHA-256 of a vocabulary beside it, as `sha256sum` does: `vocab.txt.sha256`."""
    path = pathlib.Path(path)
    value = hashlib.sha256(path.read_bytes()).hexdigest()
    checksum = path.with_name(path.name + SHA256_SUFFIX)
    checksum.write_text(f"{value}  {path.name}\n", encoding="utf-8")


def _check_sha256(path: pathlib.Path, content: bytes) -> None:
    """Raises ValueError if there is a checksum beside a vocabulary, and it is of another."""
    checksum = path.with_name(path.name + SHA256_SUFFIX)
    if checksum.exists() and checksum.read_bytes()[:64] != (
        hashlib.sha256(content).hexdigest().encode()
    ):
        raise ValueError(
            f"{path} is damaged, or was changed: its SHA-256 is not the one in {checksum.name}, "
            f"beside it. Copy it again; if you changed it on purpose, remove {checksum.name}"
        )


def _find_stored(path: pathlib.Path) -> pathlib.Path | None:
    """Returns the directory that stores a tokenizer as `read_stored` reads it, if there is one.

    It is `path`, or the directory of a file that is `path`, or `vocabulary` in a checkpoint or, as
    all have the same, in any of a run.
    """
    stored_names = (LAYOUT_FILENAME, TOKENIZER_FILENAME, SENTENCEPIECE_FILENAME)
    if not path.is_dir():
        is_stored = path.name in stored_names and (path.parent / LAYOUT_FILENAME).exists()
        return path.parent if is_stored else None
    if (path / LAYOUT_FILENAME).exists():
        return path
    for pattern in ("", "*/", "checkpoints/*/", "best/*/"):
        for name in (LAYOUT_FILENAME, legacy.CHECKPOINT_FILENAME):
            if found := sorted(path.glob(f"{pattern}vocabulary/{name}")):
                return found[-1].parent
    return None


def _is_of_model(path: pathlib.Path, directory: pathlib.Path) -> bool:
    """Returns whether a vocabulary belongs to a transformers model, whose files it needs."""
    if path.name in (byte_pair.VOCABULARY_JSON_FILENAME, byte_pair.MERGES_FILENAME):
        return True
    if path.suffix == ".model":
        return bool(sentencepiece_class(directory))
    beside = ("config.json", TOKENIZER_FILENAME, CONFIG_FILENAME, ADDED_TOKENS_FILENAME)
    beside += (byte_pair.VOCABULARY_JSON_FILENAME, GOOGLE_ALBERT_FILENAME)
    is_stored = (directory / LAYOUT_FILENAME).exists()  # Whose files are others.
    is_of_model = not is_stored and any((directory / name).exists() for name in beside)
    return is_of_model and path.name in (directory.name, VOCABULARY_FILENAME, TOKENIZER_FILENAME)


def tokenizer_from_bytes(
    filename: str, content: bytes, lower_case: bool | None = None
) -> Tokenizer:
    """Builds a tokenizer from the name and the bytes of a vocabulary.

    It is WordPiece's (`vocab.txt`: one piece per line), a SentencePiece model (`*.model`), or a
    `tokenizer.json` of any name (`*.json`). Raises ValueError like `load_tokenizer`.
    """
    if filename.endswith(".model"):
        if lower_case is not None:
            raise ValueError(f"{filename}: the casing of a SentencePiece model is fixed")
        return SentencePieceTokenizer(content, filename)
    if filename.endswith(".json"):
        values = parse_json(content, filename)
        read = legacy.read_json_file if "special_tokens" in values else read_alone
        return of_library(read(values, filename, lower_case))
    return of_library(read_vocabulary(content, filename, lower_case))


def read_stored(directory: pathlib.Path) -> Tokenizer:
    """Reads the files of `Tokenizer.files` from a directory. Raises ValueError for damaged ones."""
    if (directory / legacy.CHECKPOINT_FILENAME).exists():
        return tokenizer_from_bytes(
            *legacy.read_checkpoint_file(directory / legacy.CHECKPOINT_FILENAME)
        )
    path = directory / LAYOUT_FILENAME
    values = parse_json(path.read_bytes(), path)
    try:
        special_tokens = SpecialTokens(**values["special_tokens"])
        layout = Layout(**values["sequence"])
        path, digest = directory / values["file"], values["sha256"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(
            f"{path} is damaged, or was changed: its SHA-256 is not the one in {LAYOUT_FILENAME}, "
            "beside it. Copy both again"
        )
    if path.name == SENTENCEPIECE_FILENAME:
        return SentencePieceTokenizer(content, str(path))
    return of_library(read_tokenizer_json(content, special_tokens, layout, path))


def of_library(stored: StoredTokenizer) -> LibraryTokenizer:
    """Returns the tokenizer of the library's model."""
    classes = {"WordPiece": WordPieceTokenizer, "BPE": BytePairTokenizer}
    return classes.get(stored.kind, UnigramTokenizer)(stored)
