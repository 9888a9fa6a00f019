"""Tokenizers of the `tokenizers` library, and the one file that stores each of them.

The file is JSON with two keys: `special_tokens`, and `tokenizer` in the format of the library. Its
name says the algorithm: `wordpiece.json`, `bpe.json` or `unigram.json`.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tokenizers

# The type of model in the library's format -> the name of the file.
FILENAMES = {"WordPiece": "wordpiece.json", "BPE": "bpe.json", "Unigram": "unigram.json"}


class SpecialTokens(NamedTuple):
    """The names of the special tokens; None for one that the vocabulary does not have."""

    pad: str | None = "[PAD]"
    unk: str | None = "[UNK]"
    cls: str | None = "[CLS]"
    sep: str | None = "[SEP]"
    mask: str | None = "[MASK]"


class Layout(NamedTuple):
    """How one or two texts become one sequence: `[CLS] a [SEP]`, or `[CLS] a [SEP] b [SEP]`.

    Attributes:
      num_separators: the number of [SEP] between two texts, 2 in RoBERTa.
      has_segments: whether the second text and its [SEP] are segment 1, otherwise all are 0.
      is_bare: there are no special tokens: a sequence is `a`, or `a b`, and `num_separators` is 0.
    """

    num_separators: int = 1
    has_segments: bool = True
    is_bare: bool = False

    @property
    def num_around(self) -> int:
        """The number of special tokens before the first text, and after the last."""
        return 0 if self.is_bare else 1

    def num_special_tokens(self, num_texts: int) -> int:
        """Returns the number of special tokens in a sequence of one or two texts."""
        return 2 * self.num_around + self.num_separators * (num_texts - 1)


LAYOUTS = (
    Layout(0, False, is_bare=True),
    Layout(0, True, is_bare=True),
    Layout(2, False),
    Layout(1, False),
    Layout(),
)


class StoredTokenizer(NamedTuple):
    """A tokenizer of the library.

    Attributes:
      filename, content: the name and the bytes of the one file that stores it.
      backend: the tokenizer; it neither adds special tokens to a text nor recognizes them in it.
      special_tokens: their names.
      casing: whether it lower-cases text, and why, for the log.
      layout: how texts become one sequence.
      mask_lstrip: whether a mask in a text takes the white space before it.
    """

    filename: str
    content: bytes
    backend: tokenizers.Tokenizer
    special_tokens: SpecialTokens
    casing: str
    layout: Layout = Layout()
    mask_lstrip: bool = False


def check_special_tokens(names: Sequence[str | None], ids: Mapping, source: str) -> None:
    """Raises ValueError if a name of a special token has no id."""
    if missing := [str(name) for name in names if name not in ids]:
        raise ValueError(f"{source} lacks {', '.join(missing)}; see tools/train_vocab.py")


def read_stored_json(content: bytes, source: str) -> StoredTokenizer:
    """Builds the tokenizer that `store_as_json` stored. Raises ValueError if it is none."""
    try:
        values = json.loads(content)
        special_tokens = SpecialTokens(**values["special_tokens"])
        backend = tokenizers.Tokenizer.from_str(json.dumps(values["tokenizer"]))
        filename = FILENAMES[values["tokenizer"]["model"]["type"]]
        layout = read_layout(backend, special_tokens, source)
        mask_lstrip = values.get("mask_lstrip", False)
    except Exception as error:  # `tokenizers` raises Exception itself.
        *names, last = FILENAMES.values()
        raise ValueError(
            f"{source} is not an intact {', '.join(names)} or {last} ({error}); for a tokenizer of "
            "transformers give its directory"
        ) from error
    casing = describe_casing(lower_cases(backend), f"as stored in {filename}")
    return StoredTokenizer(
        filename, content, backend, special_tokens, casing, layout, bool(mask_lstrip)
    )


def store_as_json(
    spec: dict,
    special_tokens: SpecialTokens,
    casing: str,
    source: str | pathlib.Path,
    mask_lstrip: bool = False,
) -> StoredTokenizer:
    """Returns the tokenizer of a `spec`, with every id as it says. Raises ValueError."""
    ids, added = ids_of_model(spec), spec["added_tokens"]
    if isinstance(spec["model"]["vocab"], dict):
        # `tokenizers` numbers new tokens from the count of pieces: unused ids need one, too.
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
    layout = read_layout(backend, special_tokens, source)
    values = {
        "special_tokens": special_tokens._asdict(),
        "tokenizer": json.loads(backend.to_str()),
    }
    values |= {"mask_lstrip": True} if mask_lstrip else {}
    content = json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()
    filename = FILENAMES[spec["model"]["type"]]
    return StoredTokenizer(filename, content, backend, special_tokens, casing, layout, mask_lstrip)


def read_layout(
    backend: tokenizers.Tokenizer, special_tokens: SpecialTokens, source: str | pathlib.Path
) -> Layout:
    """Returns how the post-processor of a tokenizer joins texts; BERT's layout if it has none.

    (Where transformers would add nothing, `huggingface.read_directory` sets a post-processor.)

    Raises ValueError for a post-processor that is not supported, naming the source.
    """
    if backend.post_processor is None:
        return Layout()
    # Texts of different lengths show their order, even if both are unknown.
    texts = ("a", "b a")
    ids, other_ids = (backend.encode(text, add_special_tokens=False).ids for text in texts)
    _, _, cls, sep, _ = special_ids(backend, special_tokens)
    single, pair = backend.encode(texts[0]), backend.encode(*texts)
    for layout in LAYOUTS:
        first, last = [cls] * layout.num_around, [sep] * layout.num_around
        expected = [*first, *ids, *[sep] * layout.num_separators, *other_ids, *last]
        second = len([*other_ids, *last]) * layout.has_segments
        segments = [0] * (len(expected) - second) + [1] * second
        is_layout = (pair.ids, pair.type_ids) == (expected, segments)
        if is_layout and single.ids == [*first, *ids, *last]:
            return layout
    found = f"gives the ids {pair.ids} and segments {pair.type_ids} for the pair 'a', 'b a'"
    raise ValueError(f"{source}: post_processor {found}, expected {expected} and {segments}")


def bert_processing(spec: Mapping, special_tokens: SpecialTokens) -> dict:
    """Returns the post-processor of BERT: `[CLS] a [SEP]`, or `[CLS] a [SEP] b [SEP]`."""
    return template(Layout(), spec, special_tokens)


def template(layout: Layout, spec: Mapping, special_tokens: SpecialTokens) -> dict:
    """Returns the post-processor that joins texts as `layout` says."""
    ids, segment = ids_of_model(spec), int(layout.has_segments)
    cls, sep = ({"SpecialToken": {"id": name, "type_id": 0}} for name in special_tokens[2:4])
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": segment}}
    last = {"SpecialToken": {"id": special_tokens.sep, "type_id": segment}}
    before, between = [cls] * layout.num_around, [sep] * layout.num_separators
    return {
        "type": "TemplateProcessing",
        "single": [*before, first, *[sep] * layout.num_around],
        "pair": [*before, first, *between, second, *[last] * layout.num_around],
        "special_tokens": {
            name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in special_tokens[2:4]
        },
    }


def hidden(name: str) -> str:
    """Returns the piece that is a special token in a unigram model.

    Such a model finds any piece in a text; but no text has a space where it is split into words.
    """
    return f"{name} "


def special_ids(backend: tokenizers.Tokenizer, special_tokens: SpecialTokens) -> list[int | None]:
    """Returns the ids of the special tokens; None for one that the vocabulary does not have."""
    ids = backend.get_vocab(with_added_tokens=True)
    return [name and ids.get(name, ids.get(hidden(name))) for name in special_tokens]


def ids_of_model(spec: Mapping) -> dict[str, int]:
    """Returns the id of each piece of a model in the library's format."""
    pieces = spec["model"]["vocab"]
    if isinstance(pieces, dict):
        return pieces
    return {piece: index for index, (piece, _) in enumerate(pieces)}


def build_backend(spec: Mapping, source: str | pathlib.Path) -> tokenizers.Tokenizer:
    """Builds a tokenizer from the format of `tokenizers`. Raises ValueError, naming the source."""
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # `tokenizers` raises Exception itself.
        raise ValueError(f"{source}: {error}") from error


def lower_cases(backend: tokenizers.Tokenizer) -> bool:
    return bool(backend.normalizer) and backend.normalizer.normalize_str("A") == "a"


def strips_accents(backend: tokenizers.Tokenizer) -> bool:
    """Returns whether a tokenizer removes accents, as its normalizer does from "é"."""
    return bool(backend.normalizer) and backend.normalizer.normalize_str("\u00e9") == "e"


def describe_casing(lower_case: bool, reason: str) -> str:
    return f"{'lower-cased' if lower_case else 'cased'} ({reason})"
