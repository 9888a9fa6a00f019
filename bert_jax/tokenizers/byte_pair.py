"""Byte-level byte-pair encoding, RoBERTa's tokenizer, in the format of `tokenizers`.

A text is split by GPT-2's rule into words with the space before them, whose UTF-8 bytes are merged
pair by pair. Each byte is written as one printable character: a space is "Ġ".
"""

import pathlib
import warnings
from collections.abc import Mapping, Sequence

import tokenizers

from bert_jax.runtime.model_files import check_not_pointer
from bert_jax.tokenizers.stored import SpecialTokens, ids_of_model

VOCABULARY_JSON_FILENAME = "vocab.json"
MERGES_FILENAME = "merges.txt"
SPACE = "Ġ"  # The byte of a space, as the first character of a piece: it begins a word.
ROBERTA_TOKENS = SpecialTokens(pad="<pad>", unk="<unk>", cls="<s>", sep="</s>", mask="<mask>")


def roberta_spec(
    ids: dict[str, int], merges: Sequence[tuple[str, str]], add_prefix_space: bool = False
) -> dict:
    """Returns RoBERTa's tokenizer in the format of `tokenizers`, without a post-processor."""
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"add_prefix_space": add_prefix_space},
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": ids,
            "merges": list(merges),
        },
    }


def roberta_processing(spec: Mapping, special_tokens: SpecialTokens) -> dict:
    """Returns the post-processor of RoBERTa: `<s> a </s>`, or `<s> a </s></s> b </s>`."""
    ids = ids_of_model(spec)
    cls, sep = ([name, ids[name]] for name in special_tokens[2:4])
    byte_level = byte_level_of(spec)  # None in XLM-RoBERTa.
    prefixed = bool(byte_level) and byte_level["add_prefix_space"]
    options = {"trim_offsets": bool(byte_level), "add_prefix_space": prefixed}
    return {"type": "RobertaProcessing", "sep": sep, "cls": cls} | options


def read_merges(directory: pathlib.Path) -> dict:
    """Reads `vocab.json` and `merges.txt`. Raises FileNotFoundError or ValueError."""
    paths = [directory / name for name in (VOCABULARY_JSON_FILENAME, MERGES_FILENAME)]
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{directory} has no {path.name}, which belongs to a BPE")
        check_not_pointer(path)
    try:
        ids, merges = tokenizers.models.BPE.read_file(*map(str, paths))
    except Exception as error:  # `tokenizers` raises Exception itself.
        names = " and ".join(path.name for path in paths)
        raise ValueError(f"{directory}: {names} are not intact: {error}") from error
    return roberta_spec(ids, merges)


def byte_level_of(spec: Mapping) -> dict | None:
    """Returns the byte-level pre-tokenizer of a spec, which comes last; None without one."""
    last = spec.get("pre_tokenizer") or {}
    if last.get("type") == "Sequence":
        last = last["pretokenizers"][-1]
    return last if last.get("type") == "ByteLevel" else None


def is_roberta(spec: Mapping) -> bool:
    """Returns whether a spec is what transformers' RobertaTokenizer makes of any vocabulary.

    It ignores `ignore_merges`, by which the words of `new_words` are found.
    """
    pre_tokenizer = spec["pre_tokenizer"]["type"]
    is_merged = not spec["model"].get("ignore_merges")
    return pre_tokenizer == "ByteLevel" and not spec["normalizer"] and is_merged


def check_byte_level(spec: Mapping, path: pathlib.Path) -> None:
    """Raises ValueError unless a spec is a byte-level BPE; warns of bytes without a piece."""
    if byte_level_of(spec) is None:
        raise ValueError(
            f"{path}: pre_tokenizer is {spec.get('pre_tokenizer')}, expected ByteLevel: of BPE "
            "tokenizers only byte-level ones, such as RoBERTa's, are supported"
        )
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if value := spec["model"].get(name):
            raise ValueError(f"{path}: model.{name}={value!r} is not supported, expected none")
    ids = ids_of_model(spec)
    missing = [
        piece for piece in tokenizers.pre_tokenizers.ByteLevel.alphabet() if piece not in ids
    ]
    if missing and not spec["model"].get("unk_token"):
        reason = f"{len(missing)} of the 256 bytes have no piece, and are dropped from texts"
        warnings.warn(f"{path}: {reason}", stacklevel=4)
