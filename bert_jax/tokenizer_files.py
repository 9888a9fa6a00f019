"""Reads WordPiece tokenizers from a vocabulary, from transformers' files, or from our own JSON.

Whatever the source, the result is a tokenizer of the `tokenizers` library that has every option of
the source, and the one file that stores it: `vocab.txt` where that alone gives the same tokenizer,
and otherwise `wordpiece.json`, with all options.
"""

import contextlib
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tokenizers

VOCABULARY_FILENAME = "vocab.txt"
WORDPIECE_FILENAME = "wordpiece.json"
TRANSFORMERS_FILENAME = "tokenizer.json"
CONFIG_FILENAME = "tokenizer_config.json"
SPECIAL_TOKENS_FILENAME = "special_tokens_map.json"
ADDED_TOKENS_FILENAME = "added_tokens.json"
MAX_WORD_CHARACTERS = 200  # A longer word becomes [UNK], as in the released WordpieceTokenizer.
MAX_WORD_CHARACTERS_IN_TRANSFORMERS = 100
CONTINUATION = "##"  # begins a piece that continues a word
# A vocabulary of cased text has capitals among its single letters, and upper case in a quarter to a
# half of its pieces; a few added pieces, such as URL in place of [unused1], do not make it cased.
MIN_CAPITALS, MIN_CASED_PIECES = 0.1, 0.25  # shares
MARKER = re.compile(r"\[[^\]]+\]|<[^>]+>")  # "[unused7]", or an added one such as "<URL>"
# transformers' classes that split text as BERT does; BertJapaneseTokenizer, for one, does not.
TOKENIZER_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
GENERIC_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")  # tokenizer.json alone counts


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


def read_json(path: pathlib.Path) -> dict:
    """Reads a JSON object. Raises FileNotFoundError or ValueError, naming the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


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
    pieces = _read_lines(content, source)
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
        spec = _bert_spec(ids, lower_case, MAX_WORD_CHARACTERS)
        casing = _casing(lower_case, "as asked")
        return _stored_as_json(spec, SpecialTokens(), casing, source)
    spec = _bert_spec(ids, of_pieces, MAX_WORD_CHARACTERS)
    return WordPiece(
        VOCABULARY_FILENAME,
        content,
        tokenizers.Tokenizer.from_str(json.dumps(spec)),
        SpecialTokens(),
        _casing(of_pieces, reason),
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
    return WordPiece(WORDPIECE_FILENAME, content, backend, special_tokens, values["casing"])


def read_directory(directory: pathlib.Path, lower_case: bool | None = None) -> WordPiece:
    """Reads `tokenizer.json`, or else `vocab.txt`, and the files beside it, as transformers does.

    Options in `tokenizer_config.json` override those of `tokenizer.json`. Where neither says
    whether to lower-case, the pieces decide (`lower_case_of`), where transformers always would;
    `lower_case` overrides all. Raises FileNotFoundError without a vocabulary, and ValueError for a
    tokenizer that is not WordPiece, or for an option that is not supported.
    """
    json_path, vocabulary_path = directory / TRANSFORMERS_FILENAME, directory / VOCABULARY_FILENAME
    config = _read_optional(directory / CONFIG_FILENAME)
    _check_options(directory, config)
    if json_path.exists():
        path, spec = json_path, _read_spec(json_path)
    elif vocabulary_path.exists():
        path, pieces = vocabulary_path, _read_lines(vocabulary_path.read_bytes(), vocabulary_path)
        ids = {piece: index for index, piece in enumerate(pieces)}  # Of equal lines, the last.
        spec = _bert_spec(ids, None, MAX_WORD_CHARACTERS_IN_TRANSFORMERS)
    else:
        names = f"{VOCABULARY_FILENAME} nor {TRANSFORMERS_FILENAME}"
        raise FileNotFoundError(f"{directory} has neither {names}")
    model = spec["model"]
    model |= {name: config[name] for name in ("max_input_chars_per_word",) if name in config}

    # The special tokens are pieces like others: they are neither added to a text nor read in it.
    special_tokens = _special_tokens(directory, config, model["unk_token"])
    model["unk_token"] = special_tokens.unk
    added = _added_tokens(directory, config, spec)
    for token in added:
        if token["content"] in special_tokens:
            model["vocab"].setdefault(token["content"], token["id"])
    if path == json_path:
        _check_layout(json_path, spec, special_tokens)
    spec["added_tokens"] = [each for each in added if each["content"] not in special_tokens]
    casing = _choose_casing(directory, spec, config, lower_case)
    spec |= {"truncation": None, "padding": None, "post_processor": None}
    spec["decoder"] = {"type": "WordPiece", "prefix": CONTINUATION, "cleanup": True}
    ids = model["vocab"] | {each["content"]: each["id"] for each in spec["added_tokens"]}
    check_special_tokens(special_tokens[:4], ids, str(directory))
    if special_tokens.mask not in ids:
        special_tokens = special_tokens._replace(mask=None)

    by_id = {index: piece for piece, index in ids.items()}
    lines = "".join(f"{by_id.get(index, '')}\n" for index in range(max(by_id) + 1))
    if not spec["added_tokens"]:
        with contextlib.suppress(ValueError):  # For blank lines, or without [MASK].
            plain = read_vocabulary(lines.encode(), str(path))
            backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
            if (plain.backend.to_str(), plain.special_tokens) == (backend.to_str(), special_tokens):
                return plain._replace(casing=casing)
    return _stored_as_json(spec, special_tokens, casing, str(directory))


def _stored_as_json(
    spec: dict, special_tokens: SpecialTokens, casing: str, source: str
) -> WordPiece:
    """Returns the tokenizer of a `spec`, with every id as it says. Raises ValueError."""
    # `tokenizers` numbers new tokens from the count of pieces: unused ids need one, too.
    ids, added = spec["model"]["vocab"], spec["added_tokens"]
    new = [token["id"] for token in added if token["content"] not in ids]
    gaps = {*range(min(new, default=0))}.difference(ids.values())
    spec["model"]["vocab"] = ids | {f"[no piece {index}]": index for index in gaps}
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # `tokenizers` raises Exception itself.
        raise ValueError(f"{source}: {error}") from error
    found = {token.content: index for index, token in backend.get_added_tokens_decoder().items()}
    if wrong := [each for each in added if found.get(each["content"]) != each["id"]]:
        name, index = wrong[0]["content"], wrong[0]["id"]
        raise ValueError(
            f"{source}: the added token {name!r} has id {index}, expected {found.get(name)}: the "
            "ids of added tokens must be consecutive"
        )
    values = {
        "special_tokens": special_tokens._asdict(),
        "casing": casing,
        "tokenizer": json.loads(backend.to_str()),
    }
    content = json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()
    return WordPiece(WORDPIECE_FILENAME, content, backend, special_tokens, casing)


def _bert_spec(ids: dict[str, int], lower_case: bool | None, max_word_characters: int) -> dict:
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


def _read_lines(content: bytes, source: str | pathlib.Path) -> list[str]:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        hint = "a SentencePiece model has the suffix .model"
        raise ValueError(f"{source}, line {line}, byte {error.start}: not UTF-8; {hint}") from None
    # Not splitlines(): pieces may contain characters that only Unicode treats as line ends.
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def _read_optional(path: pathlib.Path) -> dict:
    return read_json(path) if path.exists() else {}


def _read_spec(path: pathlib.Path) -> dict:
    """Reads a `tokenizer.json`. Raises ValueError unless its model is WordPiece."""
    spec = read_json(path)
    model = spec.get("model") or {}
    is_old = "type" not in model and "max_input_chars_per_word" in model  # As in 2020.
    if model.get("type") != "WordPiece" and not is_old:
        raise ValueError(f"{path}: model.type is {model.get('type')!r}, expected 'WordPiece'")
    if (prefix := model.get("continuing_subword_prefix", CONTINUATION)) != CONTINUATION:
        name = "model.continuing_subword_prefix"
        raise ValueError(f"{path}: {name} is {prefix!r}, expected {CONTINUATION!r}")
    spec["model"] = {"type": "WordPiece", "unk_token": SpecialTokens().unk} | model
    spec["added_tokens"] = spec.get("added_tokens") or []
    return spec


def _check_options(directory: pathlib.Path, config: Mapping) -> None:
    """Raises ValueError for what would change the ids, and is not in `tokenizers`."""
    name = config.get("tokenizer_class") or _read_optional(directory / "config.json").get(
        "tokenizer_class"
    )
    if name and name.removesuffix("Fast") not in (*TOKENIZER_CLASSES, *GENERIC_CLASSES):
        raise ValueError(
            f"{directory}: tokenizer_class {name!r} is not supported, expected BertTokenizer; "
            "its token ids would be others"
        )
    for name, default in {"do_basic_tokenize": True, "never_split": None}.items():
        if config.get(name, default) not in (default, []):
            path = directory / CONFIG_FILENAME
            raise ValueError(
                f"{path}: {name}={config[name]!r} is not supported, expected {default}"
            )


def _special_tokens(directory: pathlib.Path, config: Mapping, unk_token: str) -> SpecialTokens:
    """Returns the names of the special tokens as in `tokenizer_config.json` or its older file."""
    stated = _read_optional(directory / SPECIAL_TOKENS_FILENAME) | dict(config)
    defaults = SpecialTokens()._replace(unk=unk_token)
    names = {}
    for field, default in defaults._asdict().items():
        name = stated.get(f"{field}_token", default)
        names[field] = name["content"] if isinstance(name, Mapping) else name
    return SpecialTokens(**names)


def _added_tokens(directory: pathlib.Path, config: Mapping, spec: Mapping) -> list[dict]:
    """Returns the tokens that are read in texts as one piece, in the order of their ids.

    They are in `tokenizer.json`, `added_tokens_decoder` in `tokenizer_config.json` or, in older
    models, `added_tokens.json`; tokens that are named as special without an id are pieces of the
    vocabulary, or get the next id. Raises ValueError if two of these have the same id.
    """
    options = {"single_word": False, "lstrip": False, "rstrip": False}
    by_content = {token["content"]: dict(token) for token in spec["added_tokens"]}
    for index, token in (config.get("added_tokens_decoder") or {}).items():
        by_content[token["content"]] = options | token | {"id": int(index)}
    stated = _read_optional(directory / SPECIAL_TOKENS_FILENAME) | dict(config)
    special = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        tokens = stated.get(name) or []
        tokens = tokens.values() if isinstance(tokens, Mapping) else tokens
        special += [token["content"] if isinstance(token, Mapping) else token for token in tokens]
    for content, index in _read_optional(directory / ADDED_TOKENS_FILENAME).items():
        default = {"content": content, "id": index, "normalized": content not in special}
        by_content.setdefault(content, options | default)
    ids = spec["model"]["vocab"]
    for content in special:
        if content not in by_content:
            known = [*ids.values(), *(token["id"] for token in by_content.values())]
            index = ids.get(content, max(known) + 1)
            by_content[content] = options | {"content": content, "id": index, "normalized": False}
    pieces = {index: piece for piece, index in ids.items()}
    for token in by_content.values():
        if (piece := pieces.setdefault(token["id"], token["content"])) != token["content"]:
            both = f"{piece!r} and {token['content']!r}"
            raise ValueError(f"{directory}: {both} have the same id {token['id']}")
        # None is special to the library: it would skip those in decoding.
        token |= {"special": False, "normalized": token.get("normalized", not token.get("special"))}
    return sorted(by_content.values(), key=lambda token: token["id"])


def _check_layout(path: pathlib.Path, spec: Mapping, special_tokens: SpecialTokens) -> None:
    """Raises ValueError unless a pair becomes [CLS] a [SEP] b [SEP], with segments 0 and 1."""
    if not spec.get("post_processor"):
        return
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encoded = tokenizer.encode("a", "a")
    ids = tokenizer.encode("a", add_special_tokens=False).ids
    cls, sep = (spec["model"]["vocab"].get(name) for name in special_tokens[2:4])
    expected = [cls, *ids, sep, *ids, sep]
    segments = [0] * (len(ids) + 2) + [1] * (len(ids) + 1)
    if (encoded.ids, encoded.type_ids) != (expected, segments):
        found = f"gives the ids {encoded.ids} and segments {encoded.type_ids} for the pair 'a', 'a'"
        raise ValueError(f"{path}: post_processor {found}, expected {expected} and {segments}")


def _choose_casing(
    directory: pathlib.Path, spec: dict, config: Mapping, lower_case: bool | None
) -> str:
    """Completes the normalizer of a `spec`; returns whether it lower-cases, and why."""
    path, normalizer = directory / CONFIG_FILENAME, spec["normalizer"]
    is_bert = bool(normalizer) and normalizer["type"] == "BertNormalizer"
    fields = {
        "do_lower_case": "lowercase",
        "strip_accents": "strip_accents",
        "tokenize_chinese_chars": "handle_chinese_chars",
    }
    stated = {}
    if is_bert and str(config.get("tokenizer_class")).removesuffix("Fast") not in GENERIC_CLASSES:
        given = {fields[name]: config[name] for name in fields if name in config}
        # For accents, null is a value: as `lowercase`.
        stated = {k: v for k, v in given.items() if v is not None or k == "strip_accents"}
        normalizer |= stated
    if lower_case is not None:
        if not is_bert:
            raise ValueError(f"{directory}: the casing of a normalizer {normalizer} is fixed")
        normalizer["lowercase"], reason = lower_case, "as asked"
    elif "lowercase" in stated:
        reason = f"do_lower_case in {path.name}"
    elif is_bert and normalizer["lowercase"] is None:
        normalizer["lowercase"], reason = lower_case_of([*spec["model"]["vocab"]])
    else:
        reason = f"the normalizer of {TRANSFORMERS_FILENAME}"
    normalize = tokenizers.Tokenizer.from_str(json.dumps(spec)).normalizer
    return _casing(bool(normalize) and normalize.normalize_str("A") == "a", reason)


def _casing(lower_case: bool, reason: str) -> str:
    return f"{'lower-cased' if lower_case else 'cased'} ({reason})"
