"""WordPiece tokenizers of the `tokenizers` library, and the one file that stores each of them.

A vocabulary alone, `vocab.txt`, stands for BERT's tokenizer as released. One with other options or
with tokens of its own is stored as `wordpiece.json`, which has all of them.
"""

import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tokenizers

VOCABULARY_FILENAME = "vocab.txt"
WORDPIECE_FILENAME = "wordpiece.json"
MAX_WORD_CHARACTERS = 200  # A longer word becomes [UNK], as in the released WordpieceTokenizer.
CONTINUATION = "##"  # begins a piece that continues a word
# A vocabulary of cased text has capitals among its single letters, and upper case in a quarter to a
# half of its pieces; a few added pieces, such as URL in place of [unused1], do not make it cased.
MIN_CAPITALS, MIN_CASED_PIECES = 0.1, 0.25  # shares
MARKER = re.compile(r"\[[^\]]+\]|<[^>]+>")  # "[unused7]", or an added one such as "<URL>"


class SpecialTokens(NamedTuple):
    """The names of the special tokens; None for one that the vocabulary does not have."""

    pad: str | None = "[PAD]"
    unk: str | None = "[UNK]"
    cls: str | None = "[CLS]"
    sep: str | None = "[SEP]"
    mask: str | None = "[MASK]"


class WordPiece(NamedTuple):
    """A WordPiece tokenizer.

    Attributes:
      filename, content: the name and the bytes of the one file that stores it.
      backend: the tokenizer; it neither adds special tokens to a text nor recognizes them in it.
      special_tokens: their names.
      casing: whether it lower-cases text, and why, for the log.
    """

    filename: str
    content: bytes
    backend: tokenizers.Tokenizer
    special_tokens: SpecialTokens
    casing: str


def check_not_pointer(path: pathlib.Path) -> None:
    """Raises ValueError for a pointer of Git LFS, which a clone without LFS has instead of a file.

    Raises FileNotFoundError without a file.
    """
    with open(path, "rb") as file:
        if file.read(40).startswith(b"version https://git-lfs"):
            fix = "run `git lfs pull`, or download the file itself"
            raise ValueError(f"{path} is a Git LFS pointer, not the file: {fix}")


def lower_case_of(pieces: Sequence[str]) -> tuple[bool, str]:
    """Returns whether a vocabulary is of lower-cased text, judged by its pieces, and the reason."""
    words = [p for p in pieces if p.lower() != p.upper() and not MARKER.fullmatch(p)]
    letters = [piece for piece in words if len(piece) == 1]
    num_capitals, num_cased = (sum(p != p.lower() for p in each) for each in (letters, words))
    is_cased = num_cased > MIN_CASED_PIECES * len(words) or num_capitals > MIN_CAPITALS * len(
        letters
    )
    counts = (
        f"{num_capitals:,} of {len(letters):,} letters and {num_cased:,} of {len(words):,} pieces"
    )
    return not is_cased, f"{counts} have upper case"


def check_special_tokens(names: Sequence[str | None], ids: Mapping, source: str) -> None:
    """Raises ValueError if a name of a special token has no id."""
    if missing := [str(name) for name in names if name not in ids]:
        raise ValueError(f"{source} lacks {', '.join(missing)}; see tools/train_vocab.py")


def read_vocabulary(content: bytes, source: str, lower_case: bool | None = None) -> WordPiece:
    """Builds BERT's tokenizer from a vocabulary, one piece per line.

    `lower_case` overrides `lower_case_of`. Raises ValueError for a blank or repeated line, and
    without one of the special tokens.
    """
    pieces = read_lines(content, source)
    first_line: dict[str, int] = {}
    for line_number, piece in enumerate(pieces, start=1):
        if not piece:
            raise ValueError(f"{source}, line {line_number} is empty; expected one piece per line")
        if (first := first_line.setdefault(piece, line_number)) != line_number:
            raise ValueError(f"{source}, line {line_number}: {piece!r} is already on line {first}")
    ids = {piece: index for index, piece in enumerate(pieces)}
    check_special_tokens(SpecialTokens(), ids, source)
    of_pieces, reason = lower_case_of(pieces)
    if lower_case not in (None, of_pieces):
        spec = bert_spec(ids, lower_case, MAX_WORD_CHARACTERS)
        casing = describe_casing(lower_case, "as asked")
        return store_as_json(spec, SpecialTokens(), casing, source)
    spec = bert_spec(ids, of_pieces, MAX_WORD_CHARACTERS)
    return WordPiece(
        VOCABULARY_FILENAME,
        content,
        build_backend(spec, source),
        SpecialTokens(),
        describe_casing(of_pieces, reason),
    )


def read_wordpiece_json(content: bytes, source: str) -> WordPiece:
    """Builds the tokenizer that a `wordpiece.json` stores. Raises ValueError if it is none."""
    try:
        values = json.loads(content)
        special_tokens = SpecialTokens(**values["special_tokens"])
        backend = tokenizers.Tokenizer.from_str(json.dumps(values["tokenizer"]))
    except Exception as error:  # `tokenizers` raises Exception itself.
        raise ValueError(
            f"{source} is not an intact {WORDPIECE_FILENAME} ({error}); for a tokenizer of "
            "transformers give its directory"
        ) from error
    lower_case = bool(backend.normalizer) and backend.normalizer.normalize_str("A") == "a"
    casing = describe_casing(lower_case, f"as stored in {WORDPIECE_FILENAME}")
    return WordPiece(WORDPIECE_FILENAME, content, backend, special_tokens, casing)


def store_as_json(spec: dict, special_tokens: SpecialTokens, casing: str, source: str) -> WordPiece:
    """Returns the tokenizer of a `spec`, with every id as it says. Raises ValueError."""
    # `tokenizers` numbers new tokens from the count of pieces: unused ids need one, too.
    ids, added = spec["model"]["vocab"], spec["added_tokens"]
    new = [token["id"] for token in added if token["content"] not in ids]
    gaps = {*range(min(new, default=0))}.difference(ids.values())
    spec["model"]["vocab"] = ids | {f"[no piece {index}]": index for index in gaps}
    backend = build_backend(spec, source)
    found = {token.content: index for index, token in backend.get_added_tokens_decoder().items()}
    if wrong := [each for each in added if found.get(each["content"]) != each["id"]]:
        name, index = wrong[0]["content"], wrong[0]["id"]
        raise ValueError(
            f"{source}: the added token {name!r} has id {index}, expected {found.get(name)}: the "
            "ids of added tokens must be consecutive"
        )
    values = {
        "special_tokens": special_tokens._asdict(),
        "tokenizer": json.loads(backend.to_str()),
    }
    content = json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()
    return WordPiece(WORDPIECE_FILENAME, content, backend, special_tokens, casing)


def build_backend(spec: Mapping, source: str | pathlib.Path) -> tokenizers.Tokenizer:
    """Builds a tokenizer from the format of `tokenizers`. Raises ValueError, naming the source."""
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # `tokenizers` raises Exception itself.
        raise ValueError(f"{source}: {error}") from error


def bert_spec(ids: dict[str, int], lower_case: bool | None, max_word_characters: int) -> dict:
    """Returns BERT's tokenizer in the format of `tokenizers`."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,  # as `lowercase`
            "lowercase": lower_case,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": CONTINUATION, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": SpecialTokens().unk,
            "continuing_subword_prefix": CONTINUATION,
            "max_input_chars_per_word": max_word_characters,
            "vocab": ids,
        },
    }


def read_lines(content: bytes, source: str | pathlib.Path) -> list[str]:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        hint = "a SentencePiece model has the suffix .model"
        raise ValueError(f"{source}, line {line}, byte {error.start}: not UTF-8; {hint}") from None
    # Not splitlines(): pieces may contain characters that only Unicode treats as line ends.
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def describe_casing(lower_case: bool, reason: str) -> str:
    return f"{'lower-cased' if lower_case else 'cased'} ({reason})"
