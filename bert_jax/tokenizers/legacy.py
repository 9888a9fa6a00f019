"""Reads the one file in which corpora and checkpoints until November 2026 stored a tokenizer.

It was `vocab.txt` where that says all, or JSON named after the algorithm, with the special tokens,
the tokenizer in the library's format, and whether a mask takes the white space before it.
"""

import base64
import hashlib
import json
import pathlib
from collections.abc import Mapping

from bert_jax.tokenizers.stored import (
    Layout,
    SpecialTokens,
    StoredTokenizer,
    describe_casing,
    lower_cases,
    make_tokenizer,
    read_layout,
    template,
)
from bert_jax.tokenizers.wordpiece import vocabulary_alone

JSON_FILENAMES = ("wordpiece.json", "bpe.json", "unigram.json")
CHECKPOINT_FILENAME = "metadata"  # in `vocabulary/`


def read_json_file(values: Mapping, source: str, lower_case: bool | None = None) -> StoredTokenizer:
    """Builds the tokenizer of the JSON file.

    Raises ValueError if it is damaged, or for another `lower_case` than it has.
    """
    try:
        spec, special_tokens = values["tokenizer"], SpecialTokens(**values["special_tokens"])
        if spec["post_processor"] is None:
            spec["post_processor"] = template(Layout(), spec, special_tokens)
        layout = read_layout(spec, special_tokens, source)
        mask_lstrip = bool(values.get("mask_lstrip", False))
        stored = make_tokenizer(spec, special_tokens, layout, "", source, mask_lstrip)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{source} is damaged: {error!r}") from error
    lower_cased = lower_cases(stored.backend)
    if lower_case not in (None, lower_cased):
        raise ValueError(f"{source}: the casing of a stored tokenizer is fixed")
    reason = f"as stored in {pathlib.Path(source).name}"
    return stored._replace(casing=describe_casing(lower_cased, reason))


def read_checkpoint_file(path: pathlib.Path) -> tuple[str, bytes]:
    """Returns the name and the bytes of the one file. Raises ValueError if they are damaged."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        filename, content = values["filename"], base64.b64decode(values["base64"])
        if hashlib.sha256(content).hexdigest() != values["sha256"]:
            raise ValueError("the vocabulary does not match its stored SHA-256")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    return filename, content


def file_content(stored: StoredTokenizer) -> bytes:
    """Returns the bytes of the one file."""
    if content := vocabulary_alone(stored):
        return content
    spec = json.loads(stored.backend.to_str())
    if stored.kind == "WordPiece" and stored.layout == Layout():
        spec["post_processor"] = None
    values = {"special_tokens": stored.special_tokens._asdict(), "tokenizer": spec}
    values |= {"mask_lstrip": True} if stored.mask_lstrip else {}
    return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()
