"""Unigram language models with ALBERT's normalization, in the format of `tokenizers`.

ALBERT's quotes are replaced, accents are stripped and text is lower-cased before SentencePiece's
own normalization; "▁" begins a word. A text has the pieces of highest likelihood.
"""

import base64
from collections.abc import Mapping

from bert_jax.tokenizers.stored import SpecialTokens

ALBERT_TOKENS = SpecialTokens(pad="<pad>", unk="<unk>")
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
    from sentencepiece import sentencepiece_model_pb2

    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(content)
    except Exception as error:  # google.protobuf's DecodeError, of one of its implementations.
        raise ValueError(f"{source} is not an intact SentencePiece model: {error}") from error
    if not model.pieces or model.trainer_spec.model_type != model.trainer_spec.UNIGRAM:
        raise ValueError(f"{source} is not a SentencePiece unigram model, as ALBERT's are")
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
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace | {"split": True}],
        },
        "post_processor": None,
        "decoder": metaspace | {"split": True},
        "model": {
            "type": "Unigram",
            "unk_id": model.trainer_spec.unk_id,
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
