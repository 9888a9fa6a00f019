"""Tokenizers of the `tokenizers` library, and the two files that store each of them.

`tokenizer.json` is the library's own file: `tokenizers.Tokenizer.from_file`, and with it
transformers, makes the same tokenizer of it. `layout.json` says what the library's object does not:
which tokens are the special ones, and how texts become one sequence. (A SentencePiece model, which
its own library runs, is stored as it is, in place of `tokenizer.json`.)
"""

import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import tokenizers

T = TypeVar("T")
TOKENIZER_FILENAME = "tokenizer.json"
LAYOUT_FILENAME = "layout.json"


class SpecialTokens(NamedTuple):
    """The names of the special tokens; None for one that the vocabulary does not have."""

    pad: str | None = "[PAD]"
    unk: str | None = "[UNK]"
    cls: str | None = "[CLS]"
    sep: str | None = "[SEP]"
    mask: str | None = "[MASK]"


class Layout(NamedTuple):
    """How one or two texts become one sequence: `[CLS] a [SEP]`, or `[CLS] a [SEP] b [SEP]`.

    If `cls_last`, as in XLNet: `a [SEP] [CLS]`, or `a [SEP] b [SEP] [CLS]`.

    Attributes:
      num_separators: the number of [SEP] between two texts, 2 in RoBERTa.
      has_segments: whether the second text and its [SEP] are segment 1, otherwise all are 0.
      is_bare: there are no special tokens: a sequence is `a`, or `a b`, and `num_separators` is 0.
      cls_last: [CLS] is the last token, in segment 2 if there are segments.
    """

    num_separators: int = 1
    has_segments: bool = True
    is_bare: bool = False
    cls_last: bool = False

    @property
    def num_before(self) -> int:
        """The number of special tokens before the first text."""
        return 0 if self.is_bare or self.cls_last else 1

    @property
    def num_after(self) -> int:
        """The number of special tokens after the last text."""
        return 0 if self.is_bare else 1 + self.cls_last

    def num_special_tokens(self, num_texts: int) -> int:
        """Returns the number of special tokens in a sequence of one or two texts."""
        return self.num_before + self.num_after + self.num_separators * (num_texts - 1)

    def around(self, cls: T, sep: T) -> tuple[list[T], list[T]]:
        """Returns the special tokens before the first text, and after the last."""
        after = [sep, cls] if self.cls_last else [sep]
        return [cls] * self.num_before, after[: self.num_after]


LAYOUTS = (
    Layout(cls_last=True),
    Layout(1, False, cls_last=True),
    Layout(0, False, is_bare=True),
    Layout(0, True, is_bare=True),
    Layout(2, False),
    Layout(1, False),
    Layout(),  # The last one, BERT's, is what an error names.
)


class StoredTokenizer(NamedTuple):
    """A tokenizer of the library, with what the library does not say.

    Attributes:
      backend: the tokenizer; it neither adds special tokens to a text nor recognizes them in it.
      special_tokens: their names.
      layout: how texts become one sequence.
      mask_lstrip: whether a mask in a text takes the white space before it.
      casing: whether it lower-cases text, and why, for the log.
    """

    backend: tokenizers.Tokenizer
    special_tokens: SpecialTokens
    layout: Layout
    mask_lstrip: bool
    casing: str

    @property
    def kind(self) -> str:
        """The type of its model: "WordPiece", "BPE" or "Unigram"."""
        return type(self.backend.model).__name__


def make_tokenizer(
    spec: dict,
    special_tokens: SpecialTokens,
    layout: Layout,
    casing: str,
    source: str | pathlib.Path,
    mask_lstrip: bool = False,
) -> StoredTokenizer:
    """Returns the tokenizer of a `spec` in the library's format, with every id as it says.

    Raises ValueError, naming the source, if the library cannot do that.
    """
    # As in the released code, a special token that is written in a text is text.
    added = [token for token in spec["added_tokens"] if token["content"] not in special_tokens]
    spec = spec | {"added_tokens": added, "model": dict(spec["model"])}
    ids = ids_of_model(spec)
    if spec["model"]["type"] == "Unigram":
        _rename(spec, {name: _hidden(name) for name in filter(None, special_tokens)})
    else:
        # `tokenizers` numbers new tokens from the count of pieces: unused ids need one, too, and so
        # do new tokens that special ones follow, as in ModernBERT's.
        new = {token["content"]: token["id"] for token in added if token["content"] not in ids}
        first = min(new.values(), default=0)
        last_special = max((ids[name] for name in special_tokens if name in ids), default=0)
        if new and last_special > first:
            ids, first = ids | new, last_special
        gaps = {*range(first)}.difference(ids.values())
        spec["model"]["vocab"] = ids | {f"[no piece {index}]": index for index in gaps}
    backend = build_backend(spec, source)
    found = {token.content: index for index, token in backend.get_added_tokens_decoder().items()}
    if wrong := [each for each in added if found.get(each["content"]) != each["id"]]:
        name, index = wrong[0]["content"], wrong[0]["id"]
        raise ValueError(
            f"{source}: the added token {name!r} has id {index}, expected {found.get(name)}: the "
            "ids of added tokens must be consecutive"
        )
    return StoredTokenizer(backend, special_tokens, layout, mask_lstrip, casing)


def tokenizer_json(stored: StoredTokenizer) -> dict:
    """Returns `tokenizer.json`, with the special tokens, which other programs read in a text.

    `make_tokenizer` makes the same tokenizer of it.
    """
    spec = json.loads(stored.backend.to_str())
    if stored.kind == "Unigram":
        names = filter(None, stored.special_tokens)
        _rename(spec, {_hidden(name): name for name in names})
    special = special_added_tokens(ids_of_model(spec), stored.special_tokens, stored.mask_lstrip)
    added = [*special, *spec["added_tokens"]]
    return spec | {"added_tokens": sorted(added, key=lambda token: token["id"])}


def special_added_tokens(
    ids: Mapping[str, int], special_tokens: SpecialTokens, mask_lstrip: bool
) -> list[dict]:
    """Returns the special tokens as `added_tokens` of the library's format."""
    options = {"single_word": False, "rstrip": False, "normalized": False, "special": True}
    return [
        {"id": ids[name], "content": name, **options}
        | {"lstrip": mask_lstrip and name == special_tokens.mask}
        for name in dict.fromkeys(special_tokens)
        if name is not None
    ]


def stored_files(
    filename: str, content: bytes, special_tokens: SpecialTokens, layout: Layout
) -> dict[str, bytes]:
    """Returns the files that store a tokenizer: `layout.json`, and the one that it names."""
    values = {
        "file": filename,
        "sha256": hashlib.sha256(content).hexdigest(),
        "special_tokens": special_tokens._asdict(),
        "sequence": layout._asdict(),
    }
    text = json.dumps(values, ensure_ascii=False, indent=1)
    return {LAYOUT_FILENAME: f"{text}\n".encode(), filename: content}


def read_tokenizer_json(
    content: bytes, special_tokens: SpecialTokens, layout: Layout, source: str | pathlib.Path
) -> StoredTokenizer:
    """Builds the tokenizer of a stored `tokenizer.json`. Raises ValueError if it is none."""
    spec = json.loads(content)
    check_special_tokens([*filter(None, special_tokens)], ids_of_model(spec), str(source))
    masks = [each for each in spec["added_tokens"] if each["content"] == special_tokens.mask]
    mask_lstrip = any(mask["lstrip"] for mask in masks)
    stored = make_tokenizer(spec, special_tokens, layout, "", source, mask_lstrip)
    casing = describe_casing(lower_cases(stored.backend), f"as stored in {TOKENIZER_FILENAME}")
    return stored._replace(casing=casing)


def check_special_tokens(names: Sequence[str | None], ids: Mapping, source: str) -> None:
    """Raises ValueError if a name of a special token has no id."""
    if missing := [str(name) for name in names if name not in ids]:
        raise ValueError(f"{source} lacks {', '.join(missing)}; see tools/train_vocab.py")


def read_layout(spec: Mapping, special_tokens: SpecialTokens, source: str | pathlib.Path) -> Layout:
    """Returns how the post-processor of a tokenizer joins texts.

    Raises ValueError for a post-processor that is not supported, naming the source.
    """
    backend = build_backend(spec, source)
    # Texts of different lengths show their order, even if both are unknown.
    texts = ("a", "b a")
    ids, other_ids = (backend.encode(text, add_special_tokens=False).ids for text in texts)
    _, _, cls, sep, _ = special_ids(backend, special_tokens)
    single, pair = backend.encode(texts[0]), backend.encode(*texts)
    for layout in LAYOUTS:
        first, last = layout.around(cls, sep)
        expected = [*first, *ids, *[sep] * layout.num_separators, *other_ids, *last]
        second = len([*other_ids, *last]) * layout.has_segments
        segments = [0] * (len(expected) - second) + [1] * second
        if layout.cls_last and layout.has_segments:
            segments[-1] = 2
        is_layout = (pair.ids, pair.type_ids) == (expected, segments)
        if is_layout and single.ids == [*first, *ids, *last]:
            return layout
    found = f"gives the ids {pair.ids} and segments {pair.type_ids} for the pair 'a', 'b a'"
    raise ValueError(f"{source}: post_processor {found}, expected {expected} and {segments}")


def template(layout: Layout, spec: Mapping, special_tokens: SpecialTokens) -> dict:
    """Returns the post-processor that joins texts as `layout` says."""
    ids, segment = ids_of_model(spec), int(layout.has_segments)
    of_cls = 2 * segment * layout.cls_last
    cls, sep, last = (
        {"SpecialToken": {"id": name, "type_id": type_id}}
        for name, type_id in (
            (special_tokens.cls, of_cls),
            (special_tokens.sep, 0),
            (special_tokens.sep, segment),
        )
    )
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": segment}}
    before, after = layout.around(cls, sep)
    between, after_pair = [sep] * layout.num_separators, layout.around(cls, last)[1]
    return {
        "type": "TemplateProcessing",
        "single": [*before, first, *after],
        "pair": [*before, first, *between, second, *after_pair],
        "special_tokens": {
            name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in special_tokens[2:4]
        },
    }


def _hidden(name: str) -> str:
    """Returns the piece that is a special token in a unigram model.

    Such a model finds any piece in a text; but no text has a space where it is split into words.
    """
    return f"{name} "


def _rename(spec: dict, names: Mapping[str, str]) -> None:
    vocabulary = spec["model"]["vocab"]
    spec["model"]["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]


def special_ids(backend: tokenizers.Tokenizer, special_tokens: SpecialTokens) -> list[int | None]:
    """Returns the ids of the special tokens; None for one that the vocabulary does not have."""
    ids = backend.get_vocab(with_added_tokens=True)
    return [name and ids.get(name, ids.get(_hidden(name))) for name in special_tokens]


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
