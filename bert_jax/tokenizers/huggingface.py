"""Reads the files of transformers' tokenizers, with every option in them."""

import json
import pathlib
import warnings
from collections.abc import Mapping
from typing import NamedTuple

from bert_jax.runtime.model_files import check_not_pointer, read_json, read_optional
from bert_jax.tokenizers.added_tokens import (
    add_piece,
    added_tokens,
    check_names,
    mask_takes_space,
    named_tokens,
    names_of_special_tokens,
)
from bert_jax.tokenizers.byte_pair import (
    MERGES_FILENAME,
    ROBERTA_TOKENS,
    VOCABULARY_JSON_FILENAME,
    byte_level_of,
    check_byte_level,
    is_roberta,
    read_merges,
    roberta_processing,
)
from bert_jax.tokenizers.esm import ESM_TOKENS, esm_spec
from bert_jax.tokenizers.stored import (
    TOKENIZER_FILENAME,
    Layout,
    SpecialTokens,
    StoredTokenizer,
    build_backend,
    check_special_tokens,
    describe_casing,
    ids_of_model,
    lower_cases,
    make_tokenizer,
    read_layout,
    template,
)
from bert_jax.tokenizers.unigram import (
    ALBERT_TOKENS,
    DEBERTA_TOKENS,
    XLNET_ADDED,
    XLNET_TOKENS,
    albert_spec,
    check_unigram,
    deberta_spec,
    deberta_steps,
    metaspace_of,
    xlnet_spec,
)
from bert_jax.tokenizers.wordpiece import (
    CONTINUATION,
    VOCABULARY_FILENAME,
    bert_spec,
    lower_case_of,
    read_lines,
)

CONFIG_FILENAME = "tokenizer_config.json"
ADDED_TOKENS_FILENAME = "added_tokens.json"
GOOGLE_ALBERT_FILENAME = "albert_config.json"  # beside a released model
MAX_WORD_CHARACTERS_IN_TRANSFORMERS = 100
# The type of a model -> transformers' classes that split text as we do, and the special tokens that
# they have by default. BertJapaneseTokenizer, for one, splits otherwise than BERT.
TOKENIZER_CLASSES = {
    "WordPiece": (
        "BertTokenizer",
        "DistilBertTokenizer",
        "ElectraTokenizer",
        "MPNetTokenizer",
        "EsmTokenizer",
    ),
    "BPE": ("RobertaTokenizer",),
    "Unigram": (
        "AlbertTokenizer",
        "XLMRobertaTokenizer",
        "CamembertTokenizer",
        "DebertaV2Tokenizer",
        "XLNetTokenizer",
    ),
}
DEFAULT_TOKENS = {"WordPiece": SpecialTokens(), "BPE": ROBERTA_TOKENS, "Unigram": ALBERT_TOKENS}
# Classes of transformers 4 that are other names -> what transformers 5 reads them as.
OTHER_NAMES = {"LongformerTokenizer": "RobertaTokenizer"}
GENERIC_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")  # tokenizer.json alone counts
# Where no file names a class: `model_type` in config.json -> the class.
CLASS_OF_MODEL = {
    "roberta": "RobertaTokenizer",
    "data2vec-text": "RobertaTokenizer",
    "longformer": "RobertaTokenizer",
    "camembert": "CamembertTokenizer",
    "albert": "AlbertTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "mpnet": "MPNetTokenizer",
    "esm": "EsmTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
    "xlnet": "XLNetTokenizer",
}
# Classes whose SentencePiece model is read without a `tokenizer.json`.
SENTENCEPIECE_CLASSES = {
    "AlbertTokenizer": albert_spec,
    "DebertaV2Tokenizer": deberta_spec,
    "XLNetTokenizer": xlnet_spec,
}
UNIGRAM_ROBERTA_CLASSES = ("XLMRobertaTokenizer", "CamembertTokenizer")
# They have the special tokens of RoBERTa, and join texts as it does.
ROBERTA_CLASSES = ("RobertaTokenizer", *UNIGRAM_ROBERTA_CLASSES, "MPNetTokenizer")
SEGMENTS = "token_type_ids"  # an input of models, one of `model_input_names`
# Classes that give a model the segments of a pair in transformers 5; in 4 all but RoBERTa's do.
CLASSES_WITH_SEGMENTS = ("", "BertTokenizer", "ElectraTokenizer", "DebertaV2Tokenizer")


class FilesBeside(NamedTuple):
    """What the files beside the vocabulary of a model say; empty for a file that it lacks."""

    config: Mapping
    model: Mapping
    special_tokens: Mapping
    added_tokens: Mapping

    @property
    def tokenizer_class(self) -> str:
        """The name of transformers 5's class without "Fast"; "" if no file tells it."""
        name = self.config.get("tokenizer_class") or self.model.get("tokenizer_class") or ""
        name = name.removesuffix("Fast") or CLASS_OF_MODEL.get(self.model.get("model_type"), "")
        return OTHER_NAMES.get(name, name)

    @property
    def version(self) -> int | None:
        """4 (or earlier) or 5 (or later): the version that saved a model; None if unknown."""
        major = str(self.model.get("transformers_version", "")).partition(".")[0]
        return (4 if int(major) < 5 else 5) if major.isdecimal() else None


def read_files_beside(directory: pathlib.Path) -> FilesBeside:
    return FilesBeside(
        config=read_optional(directory / CONFIG_FILENAME),
        model=read_optional(directory / "config.json"),
        special_tokens=read_optional(directory / "special_tokens_map.json"),
        added_tokens=read_optional(directory / ADDED_TOKENS_FILENAME),
    )


def sentencepiece_class(directory: pathlib.Path) -> str:
    """Returns the class of the SentencePiece model in a directory, by the files beside it.

    It is one of `SENTENCEPIECE_CLASSES`, which change a text before their model does; the model
    alone does not say so. "" if it is none of them.
    """
    if (directory / GOOGLE_ALBERT_FILENAME).exists():
        return "AlbertTokenizer"
    name = read_files_beside(directory).tokenizer_class
    return name if name in SENTENCEPIECE_CLASSES else ""


def read_directory(
    directory: pathlib.Path, lower_case: bool | None = None, named: str = ""
) -> StoredTokenizer:
    """Reads a tokenizer of transformers, and the files beside it, as transformers does.

    It is in `tokenizer.json`, or else in `vocab.txt` (WordPiece), `vocab.json` and `merges.txt`
    (byte-level BPE) or `*.model` (ALBERT, DeBERTa, XLNet). Options in `tokenizer_config.json`
    override options in `tokenizer.json`. Where neither says whether BERT lower-cases, the pieces
    decide (`lower_case_of`), where transformers always would; `lower_case` overrides all. If a file
    is `named`, its vocabulary is read, and a `tokenizer.json` with another vocabulary is ignored.

    Raises FileNotFoundError without a vocabulary, and ValueError for a tokenizer or an option that
    is not supported.
    """
    beside = read_files_beside(directory)
    if beside.tokenizer_class == "EsmTokenizer":  # Which reads no tokenizer.json.
        path, spec = _read_esm_vocabulary(directory)
    else:
        path, spec = _read_vocabulary(directory, beside.config, lower_case, named)
    is_older = path.name != TOKENIZER_FILENAME
    stored = _apply_files_beside(path, spec, beside, is_older, lower_case)
    if is_older and (directory / TOKENIZER_FILENAME).exists():
        casing = f"{stored.casing}; {TOKENIZER_FILENAME} beside it has other pieces and is not read"
        stored = stored._replace(casing=casing)
    return stored


def read_alone(spec: dict, source: str, lower_case: bool | None = None) -> StoredTokenizer:
    """Returns the tokenizer of a `tokenizer.json`, whatever its name, without files beside it.

    Raises ValueError for a tokenizer that is not supported.
    """
    path, beside = pathlib.Path(source), FilesBeside({}, {}, {}, {})
    return _apply_files_beside(path, _complete_spec(path, spec), beside, False, lower_case)


def _apply_files_beside(
    path: pathlib.Path,
    spec: dict,
    beside: FilesBeside,
    is_older: bool,
    lower_case: bool | None,
) -> StoredTokenizer:
    """Returns the tokenizer of a `spec` that was read from `path`, with the options beside it.

    `is_older`: it was not in a `tokenizer.json`, and so has no post-processor.
    """
    config, tokenizer_class, kind = beside.config, beside.tokenizer_class, spec["model"]["type"]
    _check_options(path.parent, beside, kind)

    # The special tokens are pieces like others: they are neither added to a text nor read in it.
    default = ROBERTA_TOKENS if tokenizer_class in ROBERTA_CLASSES else DEFAULT_TOKENS[kind]
    if tokenizer_class == "DebertaV2Tokenizer":
        default = DEBERTA_TOKENS
    if kind == "WordPiece":
        default = default._replace(unk=spec["model"]["unk_token"])
    if kind == "Unigram" and not tokenizer_class and XLNET_TOKENS.cls in ids_of_model(spec):
        default = XLNET_TOKENS  # As tools/train_vocab.py writes it.
    stated = {**beside.special_tokens, **config}
    if tokenizer_class == "XLNetTokenizer":
        default, stated = XLNET_TOKENS, XLNET_ADDED | stated
    if tokenizer_class == "EsmTokenizer":
        default = ESM_TOKENS
        stated["sep_token"] = stated.get("eos_token", ESM_TOKENS.sep)
    special_tokens = names_of_special_tokens(stated, default)
    if tokenizer_class in UNIGRAM_ROBERTA_CLASSES:
        check_names(path, stated, special_tokens, spec["model"])
    if tokenizer_class not in GENERIC_CLASSES:
        stated = {"mask_token": special_tokens.mask} | stated
    added = added_tokens(
        path,
        spec,
        config.get("added_tokens_decoder") or {},
        beside.added_tokens,
        named_tokens(stated),
        special_tokens,
    )
    for token in added:
        if token["content"] in special_tokens:
            add_piece(spec["model"], token)
    spec["added_tokens"] = [each for each in added if each["content"] not in special_tokens]
    ids = ids_of_model(spec)
    check_special_tokens(special_tokens[:4], ids, str(path))
    if special_tokens.mask not in ids:
        special_tokens = special_tokens._replace(mask=None)
    spec |= {"truncation": None, "padding": None}
    if tokenizer_class == "DebertaV2Tokenizer":
        if beside.version != 4:  # There, a tokenizer.json says all.
            spec |= deberta_steps(config)
    elif kind != "WordPiece" and tokenizer_class not in GENERIC_CLASSES:
        _apply_options(path, spec, config, tokenizer_class)
    spec["post_processor"], layout = _post_processor(path, spec, beside, is_older, special_tokens)
    mask_lstrip = False
    if kind == "BPE" or tokenizer_class == "MPNetTokenizer":
        masks = [token for token in added if token["content"] == special_tokens.mask]
        mask_lstrip = mask_takes_space(path, stated, masks)
    if kind == "WordPiece":
        model = spec["model"]
        model |= {name: config[name] for name in ("max_input_chars_per_word",) if name in config}
        model["unk_token"] = special_tokens.unk
        if tokenizer_class != "EsmTokenizer":
            spec["decoder"] = {"type": "WordPiece", "prefix": CONTINUATION, "cleanup": True}
        casing = _choose_casing(path, spec, config, lower_case)
    else:
        lower_cased = lower_cases(build_backend(spec, path))
        if lower_case not in (None, lower_cased):
            raise ValueError(f"{path}: the casing of a {kind} tokenizer is fixed")
        casing = describe_casing(lower_cased, f"by its {kind} tokenizer in {path.name}")
    return make_tokenizer(spec, special_tokens, layout, casing, path, mask_lstrip)


def _post_processor(
    path: pathlib.Path,
    spec: Mapping,
    beside: FilesBeside,
    is_older: bool,
    special_tokens: SpecialTokens,
) -> tuple[dict, Layout]:
    """Returns the post-processor that joins texts as they were joined when the model was trained.

    transformers 4 joins texts as `tokenizer.json` says, and adds nothing without a post-processor.
    transformers 5 does so only for generic classes; other classes join texts in their own way.
    Without a class, as in files of other programs, a post-processor is used if there is one.

    Warns if no special tokens are added. Raises ValueError for a layout that is not supported.
    """
    kind, version, tokenizer_class = spec["model"]["type"], beside.version, beside.tokenizer_class
    is_generic, is_roberta_class = (
        tokenizer_class in classes for classes in (GENERIC_CLASSES, ROBERTA_CLASSES)
    )
    own = (*TOKENIZER_CLASSES["WordPiece"], "DebertaV2Tokenizer", "XLNetTokenizer")
    has_own = is_roberta_class or tokenizer_class in own
    follows_file = is_generic or version == 4 or (spec["post_processor"] and not has_own)
    if follows_file and not is_older:
        bare = Layout(0, True, is_bare=True)
        processor = spec["post_processor"] or template(bare, spec, special_tokens)
        layout = read_layout({**spec, "post_processor": processor}, special_tokens, path)
        if is_roberta_class and layout.num_separators == 2:  # The options are those of the class.
            processor = roberta_processing(spec, special_tokens)
    elif is_roberta_class or (kind == "BPE" and not is_generic):
        processor, layout = roberta_processing(spec, special_tokens), Layout(2, False)
    else:
        layout = Layout(cls_last=tokenizer_class == "XLNetTokenizer")
        processor = template(layout, spec, special_tokens)
    if layout.is_bare:
        _warn_of_bare_texts(path, spec, special_tokens, None if is_generic else version)
    # Without segments from transformers, a model reads all tokens as segment 0.
    is_in_5 = tokenizer_class in CLASSES_WITH_SEGMENTS
    has_none = is_roberta_class or tokenizer_class == "EsmTokenizer"
    has_default = is_in_5 if version == 5 else not has_none
    inputs = beside.config.get("model_input_names") or [SEGMENTS] * has_default
    if layout.has_segments and SEGMENTS not in inputs:
        layout = layout._replace(has_segments=False)
        return template(layout, spec, special_tokens), layout
    if kind == "WordPiece" and layout == Layout():  # As of a vocabulary alone.
        processor = template(layout, spec, special_tokens)
    return processor, layout


def _warn_of_bare_texts(
    path: pathlib.Path, spec: Mapping, special_tokens: SpecialTokens, version: int | None
) -> None:
    """Warns that sequences have no special tokens; `version` is transformers', if it matters."""
    usual = roberta_processing(spec, special_tokens)
    if spec["model"]["type"] != "BPE" and special_tokens.cls != ROBERTA_TOKENS.cls:
        usual = {name: usual[name] for name in ("type", "sep", "cls")} | {"type": "BertProcessing"}
    as_when = ", as in transformers 4, which saved the model (5 adds them)" if version == 4 else ""
    warnings.warn(
        f"{path} adds no special tokens: texts are read without {special_tokens.cls} and "
        f"{special_tokens.sep}{as_when}. If the model was trained with them, set in that file "
        f'"post_processor": {json.dumps(usual)}',
        stacklevel=6,
    )


def _read_vocabulary(
    directory: pathlib.Path, config: Mapping, lower_case: bool | None, named: str
) -> tuple[pathlib.Path, dict]:
    """Returns the file of a vocabulary, and the tokenizer in the library's format.

    `named` is the file that a user named, or "".
    """
    path = directory / TOKENIZER_FILENAME
    if not path.exists():
        return _read_older_vocabulary(directory, config, lower_case, named)
    spec = _complete_spec(path, read_json(path))
    if named and named != TOKENIZER_FILENAME:
        own_path, own = _read_older_vocabulary(directory, config, lower_case, named)
        if _ids_and_merges(own) != _ids_and_merges(spec):
            return own_path, own
    return path, spec


def _read_esm_vocabulary(directory: pathlib.Path) -> tuple[pathlib.Path, dict]:
    """Returns the file of ESM's pieces, and their tokenizer in the library's format."""
    path = directory / VOCABULARY_FILENAME
    check_not_pointer(path)
    pieces = (piece.strip() for piece in read_lines(path.read_bytes(), path))
    return path, esm_spec({piece: index for index, piece in enumerate(pieces)})


def _ids_and_merges(spec: Mapping) -> tuple[dict[str, int], list[str]]:
    merges = spec["model"].get("merges", [])  # "a b", or in newer files ["a", "b"]
    return ids_of_model(spec), [m if isinstance(m, str) else " ".join(m) for m in merges]


def _read_older_vocabulary(
    directory: pathlib.Path, config: Mapping, lower_case: bool | None, named: str
) -> tuple[pathlib.Path, dict]:
    """Reads the vocabulary from files other than `tokenizer.json`; see `_read_vocabulary`."""
    path = directory / VOCABULARY_FILENAME
    if named == VOCABULARY_FILENAME or (not named and path.exists()):
        check_not_pointer(path)
        pieces = read_lines(path.read_bytes(), path)
        ids = {piece: index for index, piece in enumerate(pieces)}  # The last of equal lines wins.
        return path, bert_spec(ids, None, MAX_WORD_CHARACTERS_IN_TRANSFORMERS)
    path = directory / VOCABULARY_JSON_FILENAME
    if named in (path.name, MERGES_FILENAME) or (not named and path.exists()):
        spec = read_merges(directory)
        check_byte_level(spec, path)
        return path, spec
    if models := [directory / named] if named else sorted(directory.glob("*.model")):
        path, *others = models
        tokenizer_class = sentencepiece_class(directory)
        if others or not tokenizer_class:
            found = ", ".join(each.name for each in models)
            raise ValueError(
                f"{directory}: expected one SentencePiece model, and files that say it is "
                f"ALBERT's, DeBERTa's or XLNet's (tokenizer_class or model_type), found {found}; "
                f"of other models, such as XLM-RoBERTa, add their {TOKENIZER_FILENAME}"
            )
        check_not_pointer(path)
        casing = {} if lower_case is None else {"do_lower_case": lower_case}
        read = SENTENCEPIECE_CLASSES[tokenizer_class]
        return path, read(path.read_bytes(), config | casing, str(path))
    names = f"{VOCABULARY_FILENAME} nor {TOKENIZER_FILENAME}, {VOCABULARY_JSON_FILENAME} or *.model"
    fix = "copy the model's tokenizer into it"
    raise FileNotFoundError(f"{directory} has neither {names}: {fix}")


def _complete_spec(path: pathlib.Path, spec: dict) -> dict:
    """Returns a `tokenizer.json` with all fields; ValueError if its model is not supported."""
    model = spec.get("model") or {}
    spec["added_tokens"] = spec.get("added_tokens") or []
    is_old = "type" not in model and "max_input_chars_per_word" in model  # Files of 2020.
    kind = "WordPiece" if is_old else model.get("type")
    if kind not in TOKENIZER_CLASSES:
        *names, last = map(repr, TOKENIZER_CLASSES)
        expected = f"{', '.join(names)} or {last}"
        raise ValueError(f"{path}: model.type is {model.get('type')!r}, expected {expected}")
    if kind != "WordPiece":
        check = check_byte_level if kind == "BPE" else check_unigram
        check(spec, path)
        return {"normalizer": None, "post_processor": None} | spec
    if (prefix := model.get("continuing_subword_prefix", CONTINUATION)) != CONTINUATION:
        name = "model.continuing_subword_prefix"
        raise ValueError(f"{path}: {name} is {prefix!r}, expected {CONTINUATION!r}")
    # Fields that a file lacks have BERT's values.
    default = bert_spec({}, None, MAX_WORD_CHARACTERS_IN_TRANSFORMERS)
    normalizer = spec.get("normalizer", {})
    if normalizer is not None and normalizer.get("type") in (None, "BertNormalizer"):
        spec["normalizer"] = default["normalizer"] | normalizer
    spec["model"] = default["model"] | model
    return default | spec


def _check_options(directory: pathlib.Path, beside: FilesBeside, kind: str) -> None:
    """Raises ValueError for what would change the ids, and is not in `tokenizers`.

    Warns of padding on the left, which changes no ids, but in transformers may change positions.
    """
    config, tokenizer_class = beside.config, beside.tokenizer_class
    classes = TOKENIZER_CLASSES[kind]
    if tokenizer_class and tokenizer_class not in (*classes, *GENERIC_CLASSES):
        raise ValueError(
            f"{directory}: tokenizer_class {tokenizer_class!r} is not supported, expected "
            f"{' or '.join(classes)}; its token ids would be others"
        )
    if code := (config.get("auto_map") or {}).get("AutoTokenizer"):
        raise ValueError(
            f"{directory / CONFIG_FILENAME}: auto_map says that AutoTokenizer is {code}, code of "
            "the model's repository, which is not run here, and its token ids may differ. If "
            "transformers gives the same ids without it (trust_remote_code=False), remove auto_map"
        )
    defaults = {"do_basic_tokenize": True, "never_split": None, "truncation_side": "right"}
    defaults |= {"remove_space": True, "sp_model_kwargs": None}  # ALBERT's options.
    # Of other versions of transformers; one of them may be the file that is read there.
    defaults |= {"fast_tokenizer_files": [TOKENIZER_FILENAME]}
    for name, default in defaults.items():
        if config.get(name, default) not in (default, [], {}):
            path = directory / CONFIG_FILENAME
            raise ValueError(
                f"{path}: {name}={config[name]!r} is not supported, expected {default}"
            )
    # XLNet's <cls> is last, and padding comes first.
    is_xlnet = tokenizer_class == "XLNetTokenizer" or beside.model.get("model_type") == "xlnet"
    if config.get("padding_side", "right") != "right" and not is_xlnet:
        warnings.warn(
            f"{directory / CONFIG_FILENAME}: padding_side={config['padding_side']!r} has no effect "
            "here: texts are computed as transformers computes each text alone. In its batches, "
            "positions of absolute embeddings also count padding on the left",
            stacklevel=5,
        )


def _apply_options(path: pathlib.Path, spec: dict, config: Mapping, tokenizer_class: str) -> None:
    """Applies the options of `tokenizer_config.json` to a BPE or unigram model.

    Raises ValueError for one that contradicts the `tokenizer.json`, of which some versions of
    transformers follow the one and others the other.
    """
    prefixed = config.get("add_prefix_space")
    if tokenizer_class == "XLNetTokenizer":
        prefixed, unk_id = None, spec["model"]["unk_id"]  # Its class has no such option.
        if config.get("unk_id", unk_id) != unk_id:
            raise ValueError(
                f"{path}: unk_id is {unk_id}, but {config['unk_id']} in {CONFIG_FILENAME}"
            )
    if prefixed is not None and spec["model"]["type"] == "BPE":
        byte_level_of(spec)["add_prefix_space"] = prefixed
    elif prefixed is not None:
        metaspace_of(spec)["prepend_scheme"] = "always" if prefixed else "never"
    steps = (spec["normalizer"] or {}).get("normalizers", [spec["normalizer"] or {}])
    types = [step.get("type") for step in steps]
    options = {"do_lower_case": "Lowercase" in types, "keep_accents": "StripAccents" not in types}
    wrong = {
        name: config[name] for name in options if config.get(name, options[name]) != options[name]
    }
    if tokenizer_class == "RobertaTokenizer" and not is_roberta(spec):
        wrong["tokenizer_class"] = tokenizer_class
    if tokenizer_class in UNIGRAM_ROBERTA_CLASSES and not (
        {*types} <= {None, "Precompiled", "Replace"}
    ):
        wrong["tokenizer_class"] = tokenizer_class
    if tokenizer_class in TOKENIZER_CLASSES["Unigram"]:
        # They take only the vocabulary and the precompiled step of a file, and split at white space
        # first, which leaves no repeated spaces to replace.
        split = [{"type": "WhitespaceSplit"}, metaspace_of(spec)]
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": split}
    if wrong and path.suffix != ".model":  # There the options were applied.
        raise ValueError(
            f"{path}: its normalizer has the steps {types} before {spec['pre_tokenizer']['type']}, "
            f"but the files beside it say {wrong}: make them agree"
        )


def _choose_casing(path: pathlib.Path, spec: dict, config: Mapping, lower_case: bool | None) -> str:
    """Completes the normalizer of a `spec`; returns whether it lower-cases, and why."""
    normalizer = spec["normalizer"]
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
            raise ValueError(f"{path}: the casing of a normalizer {normalizer} is fixed")
        normalizer["lowercase"], reason = lower_case, "as asked"
    elif "lowercase" in stated:
        reason = f"do_lower_case in {CONFIG_FILENAME}"
    elif is_bert and normalizer["lowercase"] is None:
        normalizer["lowercase"], reason = lower_case_of([*spec["model"]["vocab"]])
    else:
        reason = f"the normalizer of {path.name}"
    return describe_casing(lower_cases(build_backend(spec, path)), reason)
