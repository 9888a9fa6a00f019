"""Reads the files of other libraries' checkpoints: JSON, tensors, vocabularies."""

import json
import pathlib
import warnings

import numpy as np
import safetensors

from bert_jax.tokenization import WORDPIECE_FILENAME, Tokenizer, WordPieceTokenizer, load_tokenizer

WEIGHTS_FILENAMES = ("model.safetensors", "pytorch_model.bin")


def read_json(path: pathlib.Path) -> dict:
    """Reads a JSON object. Raises FileNotFoundError or ValueError, naming the file."""
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def read_tensors(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads `model.safetensors`, or else `pytorch_model.bin`.

    Raises ImportError if that needs torch, ValueError if the file is damaged or of another dtype.
    """
    path, pickled = (directory / name for name in WEIGHTS_FILENAMES)
    if path.exists():
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                return {name: _read_tensor(file, name) for name in file.keys()}  # noqa: SIM118
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path.name} is damaged: {error}") from error
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"{pickled} needs torch: pip install torch, or add {path.name}"
        ) from error
    try:
        tensors = torch.load(pickled, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zipfile and torch raise errors of many types.
        raise ValueError(f"{pickled.name} is not a valid state dict: {error}") from error
    # torch cannot convert bfloat16 to numpy.
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}


def _read_tensor(file: safetensors.safe_open, name: str) -> np.ndarray:
    try:
        return file.get_tensor(name)
    except (AttributeError, TypeError, safetensors.SafetensorError) as error:
        dtype = file.get_slice(name).get_dtype()
        raise ValueError(
            f"tensor {name}: unsupported dtype {dtype}; convert it to F32, F16 or BF16"
        ) from error


def read_tokenizer(directory: pathlib.Path) -> Tokenizer:
    """Reads `vocab.txt`, or else the WordPiece vocabulary of `tokenizer.json`.

    Warns if the directory specifies another text normalization than the tokenizer applies.

    Raises FileNotFoundError without either file, ValueError if it is damaged or not WordPiece.
    """
    path = directory / "tokenizer.json"
    if (directory / WORDPIECE_FILENAME).exists():
        tokenizer = load_tokenizer(directory / WORDPIECE_FILENAME)
        path = directory / "tokenizer_config.json"
        options = read_json(path) if path.exists() else {}
        names = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
    elif path.exists():
        values = read_json(path)
        tokenizer = _wordpiece_from_json(path, values)
        options = values.get("normalizer") or {}
        names = ("lowercase", "strip_accents", "handle_chinese_chars")
    else:
        raise FileNotFoundError(f"{directory} has neither {WORDPIECE_FILENAME} nor {path.name}")
    lower_case = tokenizer.lower_case
    ignored = [
        f"{name}={options[name]}"
        for name, applied in zip(names, (lower_case, lower_case, True), strict=True)
        if options.get(name) not in (None, applied)
    ]
    if ignored:
        warnings.warn(
            f"{path}: {', '.join(ignored)} is ignored: the vocabulary is "
            f"{'uncased' if lower_case else 'cased'}, so text is "
            f"{'lower-cased and stripped of accents' if lower_case else 'not lower-cased'}; "
            "Chinese characters are always split",
            stacklevel=2,
        )
    return tokenizer


def _wordpiece_from_json(path: pathlib.Path, values: dict) -> Tokenizer:
    model = values.get("model", {})
    if model.get("type") != "WordPiece":
        raise ValueError(f"{path}: model.type is {model.get('type')!r}, expected 'WordPiece'")
    ids = model["vocab"] | {each["content"]: each["id"] for each in values.get("added_tokens", ())}
    pieces = sorted(ids, key=ids.get)
    if [ids[piece] for piece in pieces] != list(range(len(pieces))):
        raise ValueError(f"{path}: expected each id from 0 to {len(pieces) - 1:,} exactly once")
    return WordPieceTokenizer("".join(f"{piece}\n" for piece in pieces).encode(), str(path))
