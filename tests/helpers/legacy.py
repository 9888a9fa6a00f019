"""Corpora and checkpoints as versions until November 2026 wrote them."""

import base64
import hashlib
import json
import pathlib
import shutil

from bert_jax.checkpoints.checksums import CHECKSUMS, write_checksums
from bert_jax.data.rows import MANIFEST, manifest_checksum
from bert_jax.tokenizers import legacy
from bert_jax.tokenizers.tokenizer import SentencePieceTokenizer, load_tokenizer
from bert_jax.tokenizers.wordpiece import vocabulary_alone


def one_file(tokenizer) -> tuple[str, bytes]:
    """Returns the name and the content of the file that stored a tokenizer."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        return "spiece.model", tokenizer.files()["spiece.model"]
    is_alone = vocabulary_alone(tokenizer.stored) is not None
    filename = "vocab.txt" if is_alone else f"{tokenizer.stored.kind.lower()}.json"
    return filename, legacy.file_content(tokenizer.stored)


def make_legacy_corpus(directory: pathlib.Path) -> pathlib.Path:
    """Changes a corpus to the form of earlier versions; returns it."""
    tokenizer = load_tokenizer(directory)
    filename, content = one_file(tokenizer)
    for name in tokenizer.files():
        (directory / name).unlink()
    (directory / filename).write_bytes(content)
    manifest = json.loads((directory / MANIFEST).read_text())
    manifest["vocabulary"] = {
        "filename": filename,
        "sha256": hashlib.sha256(content).hexdigest(),
        "size": tokenizer.vocab_size,
    }
    manifest["crc32"] = manifest_checksum(manifest)
    (directory / MANIFEST).write_text(json.dumps(manifest))
    return directory


def make_legacy_checkpoint(directory: pathlib.Path) -> pathlib.Path:
    """Changes a checkpoint to the form of earlier versions; returns it."""
    filename, content = one_file(load_tokenizer(directory))
    shutil.rmtree(directory / "vocabulary")
    values = {
        "filename": filename,
        "sha256": hashlib.sha256(content).hexdigest(),
        "base64": base64.b64encode(content).decode(),
    }
    (directory / "vocabulary").mkdir()
    (directory / "vocabulary/metadata").write_text(json.dumps(values))
    if (directory / CHECKSUMS).exists():
        write_checksums(directory)
    return directory
