"""Unigram language models of ALBERT, XLNet and DeBERTa, in the format of `tokenizers`.

ALBERT's quotes are replaced, accents are stripped and text is lower-cased before SentencePiece's
own normalization, and XLNet's is read so, too, but cased; DeBERTa's text stays as it is but for
repeated spaces. "▁" begins a word. A text has the pieces of highest likelihood.
"""

import base64
from collections.abc import Mapping

from bert_jax.tokenizers.stored import SpecialTokens

ALBERT_TOKENS = SpecialTokens(pad="<pad>", unk="<unk>")
DEBERTA_TOKENS = SpecialTokens()
XLNET_TOKENS = SpecialTokens(pad="<pad>", unk="<unk>", cls="<cls>", sep="<sep>", mask="<mask>")
# Other tokens that XLNet's class finds in a text.
XLNET_ADDED = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "additional_special_tokens": ["<eop>", "<eod>"],
}
SPACE = "▁"
# Pieces such as "9," are split into "9" and ",". Google's code splits those that it finds again, so
# that now and then digits are grouped otherwise; here they are less likely than their parts, as in
# the tokenizer.json of the released models.
NUMBER_COMMA_PENALTY = 100.0


def albert_spec(content: bytes, config: Mapping, source: str) -> dict:
    """Returns the tokenizer of ALBERT's `spiece.model`, without a post-processor.

    `config` has the options of `tokenizer_config.json`: do_lower_case, keep_accents and
    remove_space. Raises ValueError for a damaged model, or one that is not a unigram model.
    """
    model = _read_model(content, source)
    normalizers: list[dict] = [
        {"type": "Replace", "pattern": {"String": quotes}, "content": '"'}
        for quotes in ("``", "''")
    ]
    if not config.get("keep_accents", False):
        normalizers += [{"type": "NFKD"}, {"type": "StripAccents"}]
    if config.get("do_lower_case", True):
        normalizers.append({"type": "Lowercase"})
    if characters := model.normalizer_spec.precompiled_charsmap:
        encoded = base64.b64encode(characters).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always"}
    vocabulary = []
    for piece in model.pieces:
        is_number = len(piece.piece) > 1 and piece.piece[-1] == "," and piece.piece[-2].isdigit()
        vocabulary.append([piece.piece, piece.score - NUMBER_COMMA_PENALTY * is_number])
    steps = {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace | {"split": True}],
        },
        "decoder": metaspace | {"split": True},
    }
    return _spec(vocabulary, model.trainer_spec.unk_id) | steps


def xlnet_spec(content: bytes, config: Mapping, source: str) -> dict:
    """Returns the tokenizer of XLNet's `spiece.model`, without a post-processor.

    Takes and raises what `albert_spec` does; also raises ValueError for keep_accents, of which
    versions of transformers make different ids.
    """
    if config.get("keep_accents"):
        raise ValueError(f"{source}: keep_accents=True is not supported, expected False")
    return albert_spec(content, {"do_lower_case": False} | {**config}, source)


def deberta_spec(content: bytes, config: Mapping, source: str) -> dict:
    """Returns the tokenizer of DeBERTa's `spm.model`, without a post-processor.

    Its mask has the id after the last piece. Takes and raises what `albert_spec` does; the options
    are those of `deberta_steps`.
    """
    model = _read_model(content, source)
    vocabulary = [[piece.piece, piece.score] for piece in model.pieces]
    spec = _spec(vocabulary, model.trainer_spec.unk_id) | deberta_steps(config)
    mask = config.get("mask_token") or DEBERTA_TOKENS.mask
    mask = mask["content"] if isinstance(mask, Mapping) else mask
    if mask not in dict(vocabulary):
        spec["added_tokens"] = [{"id": len(vocabulary), "content": mask, "special": True}]
    return spec


def deberta_steps(config: Mapping) -> dict:
    """Returns what precedes and follows the model, for the options of `tokenizer_config.json`.

    They are do_lower_case, split_by_punct and add_prefix_space. transformers 5 has these steps for
    all models of its class, whatever other files say; 4 also applies the model's own normalization.
    """
    spaces = {"type": "Replace", "pattern": {"Regex": r"\s{2,}|[\n\r\t]"}, "content": " "}
    end = {"type": "Strip", "strip_left": False, "strip_right": True}
    lower = [{"type": "Lowercase"}] * bool(config.get("do_lower_case", False))
    scheme = "always" if config.get("add_prefix_space", True) else "first"
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": True}
    split = [{"type": "Punctuation", "behavior": "Isolated"}] * bool(config.get("split_by_punct"))
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*lower, spaces, {"type": "NFC"}, end]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split, metaspace]},
        "decoder": metaspace,
    }


def _read_model(content: bytes, source: str):
    """Returns the protocol buffer of a SentencePiece unigram model. Raises ValueError."""
    from sentencepiece import sentencepiece_model_pb2

    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(content)
    except Exception as error:  # google.protobuf's DecodeError, of one of its implementations.
        raise ValueError(f"{source} is not an intact SentencePiece model: {error}") from error
    if not model.pieces or model.trainer_spec.model_type != model.trainer_spec.UNIGRAM:
        expected = "as ALBERT's and DeBERTa's are"
        raise ValueError(f"{source} is not a SentencePiece unigram model, {expected}")
    return model


def _spec(vocabulary: list, unk_id: int) -> dict:
    """Returns a tokenizer of pieces with their scores, without what precedes and follows."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "post_processor": None,
        "model": {
            "type": "Unigram",
            "unk_id": unk_id,
            "vocab": vocabulary,
            "byte_fallback": False,
        },
    }


def metaspace_of(spec: Mapping) -> dict | None:
    """Returns the pre-tokenizer that marks words by "▁", which comes last; None without one."""
    last = spec.get("pre_tokenizer") or {}
    if last.get("type") == "Sequence":
        last = last["pretokenizers"][-1]
    is_supported = last.get("type") == "Metaspace" and last.get("replacement") == SPACE
    return last if is_supported else None


def check_unigram(spec: Mapping, path: object) -> None:
    """Raises ValueError unless the words of a unigram model begin with "▁"."""
    if metaspace_of(spec) is None:
        found = f"pre_tokenizer is {spec.get('pre_tokenizer')}"
        raise ValueError(f"{path}: {found}, expected Metaspace with the replacement {SPACE!r}")
