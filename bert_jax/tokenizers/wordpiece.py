"""WordPiece tokenizers of the `tokenizers` library.

A vocabulary alone, `vocab.txt`, stands for BERT's tokenizer as released: its pieces say whether it
lower-cases text.
"""

import contextlib
import json
import pathlib
import re
from collections.abc import Sequence

from bert_jax.tokenizers.stored import (
    Layout,
    SpecialTokens,
    StoredTokenizer,
    check_special_tokens,
    describe_casing,
    make_tokenizer,
    template,
)

VOCABULARY_FILENAME = "vocab.txt"
MAX_WORD_CHARACTERS = 200  # A longer word becomes [UNK], as in the released WordpieceTokenizer.
CONTINUATION = "##"  # begins a piece that continues a word
# Of the single letters of a vocabulary of cased text, about a third are capitals, fewer if the text
# was short. Pieces that are added, such as URL in place of [unused1], say nothing about the text:
# they count only if there are too few single letters.
MIN_LETTERS, MIN_CAPITALS = 10, 0.1  # a number, and a share of the letters
MIN_CASED_PIECES = 0.5  # a share
MARKER = re.compile(r"\[[^\]]+\]|<[^>]+>")  # "[unused7]", or an added one such as "<URL>"


def lower_case_of(pieces: Sequence[str]) -> tuple[bool, str]:
    """Returns whether a vocabulary is of lower-cased text, judged by its pieces, and the reason."""
    words = [p for p in pieces if p.lower() != p.upper() and not MARKER.fullmatch(p)]
    letters = [piece for piece in words if len(piece) == 1]
    judged, name, min_cased = words, "pieces", MIN_CASED_PIECES
    if len(letters) >= MIN_LETTERS:
        judged, name, min_cased = letters, "single letters", MIN_CAPITALS
    num_cased = sum(piece != piece.lower() for piece in judged)
    is_cased = bool(judged) and num_cased >= min_cased * len(judged)
    return not is_cased, f"{num_cased:,} of {len(judged):,} {name} have upper case"


def read_vocabulary(content: bytes, source: str, lower_case: bool | None = None) -> StoredTokenizer:
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
    is_lower, reason = lower_case_of(pieces)
    if lower_case not in (None, is_lower):
        is_lower, reason = lower_case, "as asked"
    spec = bert_spec(ids, is_lower, MAX_WORD_CHARACTERS)
    spec["post_processor"] = template(Layout(), spec, SpecialTokens())
    casing = describe_casing(is_lower, reason)
    return make_tokenizer(spec, SpecialTokens(), Layout(), casing, source)


def vocabulary_alone(stored: StoredTokenizer) -> bytes | None:
    """Returns the `vocab.txt` that stands for a tokenizer; None if it would leave out something."""
    if stored.kind != "WordPiece":
        return None
    backend = stored.backend.to_str()
    pieces = json.loads(backend)["model"]["vocab"]
    content = "".join(f"{piece}\n" for piece in pieces).encode()
    with contextlib.suppress(ValueError):  # For pieces that no line can be, or without [MASK].
        alone = read_vocabulary(content, VOCABULARY_FILENAME)
        if (alone.backend.to_str(), alone.special_tokens) == (backend, stored.special_tokens):
            return content
    return None


def bert_spec(ids: dict[str, int], lower_case: bool | None, max_word_characters: int) -> dict:
    """Returns BERT's tokenizer in the format of `tokenizers`, without a post-processor."""
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
