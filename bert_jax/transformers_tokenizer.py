"""Reads and writes the files of transformers' WordPiece tokenizers, with every option in them."""

import contextlib
import json
import pathlib
from collections.abc import Mapping

from bert_jax.wordpiece import (
    CONTINUATION,
    VOCABULARY_FILENAME,
    SpecialTokens,
    WordPiece,
    bert_spec,
    build_backend,
    check_not_pointer,
    check_special_tokens,
    describe_casing,
    lower_case_of,
    read_lines,
    read_vocabulary,
    store_as_json,
)

TRANSFORMERS_FILENAME = "tokenizer.json"
CONFIG_FILENAME = "tokenizer_config.json"
SPECIAL_TOKENS_FILENAME = "special_tokens_map.json"
ADDED_TOKENS_FILENAME = "added_tokens.json"
MAX_WORD_CHARACTERS_IN_TRANSFORMERS = 100
# transformers' classes that split text as BERT does; BertJapaneseTokenizer, for one, does not.
TOKENIZER_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
GENERIC_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")  # tokenizer.json alone counts


def read_json(path: pathlib.Path) -> dict:
    """Reads a JSON object. Raises FileNotFoundError or ValueError, naming the file."""
    return _read_json(path, dict, "object")


def read_list(path: pathlib.Path) -> list:
    """Reads a JSON array. Raises as `read_json`."""
    return _read_json(path, list, "array")


def _read_json(path: pathlib.Path, expected_type: type, name: str) -> dict | list:
    check_not_pointer(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, expected_type):
        raise ValueError(f"{path}: expected a JSON {name}, found {type(values).__name__}")
    return values


def read_directory(directory: pathlib.Path, lower_case: bool | None = None) -> WordPiece:
    """Reads `tokenizer.json`, or else `vocab.txt`, and the files beside it, as transformers does.

    Options in `tokenizer_config.json` override options in `tokenizer.json`. Where neither says
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
        check_not_pointer(vocabulary_path)
        path, pieces = vocabulary_path, read_lines(vocabulary_path.read_bytes(), vocabulary_path)
        ids = {piece: index for index, piece in enumerate(pieces)}  # Of equal lines, the last.
        spec = bert_spec(ids, None, MAX_WORD_CHARACTERS_IN_TRANSFORMERS)
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
    lines = "".join(f"{by_id.get(index, '')}\n" for index in range(max(by_id) + 1)).encode()
    if not spec["added_tokens"]:
        with contextlib.suppress(ValueError):  # For blank lines, or without [MASK].
            content = lines if path == json_path else path.read_bytes()
            plain = read_vocabulary(content, str(path))
            backend = build_backend(spec, path)
            if (plain.backend.to_str(), plain.special_tokens) == (backend.to_str(), special_tokens):
                return plain._replace(casing=casing)
    return store_as_json(spec, special_tokens, casing, str(directory))


def transformers_files(wordpiece: WordPiece, max_length: int) -> dict[str, str | dict]:
    """Returns the files, by name, from which transformers reads a tokenizer.

    `max_length` is the maximum of its inputs, in tokens. `read_directory` reads the same tokenizer.
    """
    spec = json.loads(wordpiece.backend.to_str())
    normalizer, special_tokens = spec["normalizer"], wordpiece.special_tokens
    is_bert = bool(normalizer) and normalizer["type"] == "BertNormalizer"
    config = {
        "tokenizer_class": "BertTokenizer" if is_bert else "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        # transformers ignores it, and has 100.
        "max_input_chars_per_word": spec["model"]["max_input_chars_per_word"],
    }
    if is_bert:
        config |= {
            "do_lower_case": normalizer["lowercase"],
            "strip_accents": normalizer["strip_accents"],
            "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
        }
    if wordpiece.filename == VOCABULARY_FILENAME:
        text = wordpiece.content.decode("utf-8-sig")
        return {VOCABULARY_FILENAME: text, CONFIG_FILENAME: config}
    config |= {f"{field}_token": name for field, name in special_tokens._asdict().items()}
    ids, options = spec["model"]["vocab"], dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    options |= {"normalized": False, "special": True}
    names = [name for name in special_tokens if name is not None]
    spec["added_tokens"] += [{"id": ids[name], "content": name} | options for name in names]
    spec["added_tokens"].sort(key=lambda token: token["id"])
    cls, sep = ({"SpecialToken": {"id": name, "type_id": 0}} for name in special_tokens[2:4])
    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [cls, first, sep],
        "pair": [
            cls,
            first,
            sep,
            second,
            {"SpecialToken": {"id": special_tokens.sep, "type_id": 1}},
        ],
        "special_tokens": {
            name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in special_tokens[2:4]
        },
    }
    return {TRANSFORMERS_FILENAME: json.dumps(spec, ensure_ascii=False), CONFIG_FILENAME: config}


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
    # Fields that a file lacks have BERT's values.
    default = bert_spec({}, None, MAX_WORD_CHARACTERS_IN_TRANSFORMERS)
    normalizer = spec.get("normalizer", {})
    if normalizer is not None and normalizer.get("type") in (None, "BertNormalizer"):
        spec["normalizer"] = default["normalizer"] | normalizer
    spec["model"] = default["model"] | model
    spec["added_tokens"] = spec.get("added_tokens") or []
    return default | spec


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
    defaults = {"do_basic_tokenize": True, "never_split": None, "truncation_side": "right"}
    for name, default in defaults.items():
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
    by_content = {token["content"]: options | token for token in spec["added_tokens"]}
    for index, token in (config.get("added_tokens_decoder") or {}).items():
        by_content[token["content"]] = options | token | {"id": int(index)}
    stated = _read_optional(directory / SPECIAL_TOKENS_FILENAME) | dict(config)
    special = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        tokens = stated.get(name) or []
        tokens = tokens.values() if isinstance(tokens, Mapping) else tokens
        special += [token["content"] if isinstance(token, Mapping) else token for token in tokens]
    for content, index in _read_optional(directory / ADDED_TOKENS_FILENAME).items():
        by_content.setdefault(content, options | {"content": content, "id": index})
    ids = spec["model"]["vocab"]
    for content in special:
        if content not in by_content:
            known = [*ids.values(), *(token["id"] for token in by_content.values())]
            index = ids.get(content, max(known) + 1)
            by_content[content] = options | {"content": content, "id": index}
    pieces = {index: piece for piece, index in ids.items()}
    for token in by_content.values():
        if (piece := pieces.setdefault(token["id"], token["content"])) != token["content"]:
            both = f"{piece!r} and {token['content']!r}"
            raise ValueError(f"{directory}: {both} have the same id {token['id']}")
        token.setdefault("special", token["content"] in special)
        token.setdefault("normalized", not token["special"])
    return sorted(by_content.values(), key=lambda token: token["id"])


def _check_layout(path: pathlib.Path, spec: Mapping, special_tokens: SpecialTokens) -> None:
    """Raises ValueError unless a pair becomes [CLS] a [SEP] b [SEP], with segments 0 and 1."""
    if not spec.get("post_processor"):
        return
    tokenizer = build_backend(spec, path)
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
    normalize = build_backend(spec, directory).normalizer
    return describe_casing(bool(normalize) and normalize.normalize_str("A") == "a", reason)
