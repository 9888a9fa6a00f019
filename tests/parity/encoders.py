"""Writes docs/encoders.md: which of the encoders that people use most are read here.

PYTHONPATH=. .venv-parity/bin/python tests/parity/encoders.py > docs/encoders.md

encoders.json has what the `config.json` of each says about arithmetic, recorded by hand: nothing is
downloaded. A random model of transformers with that configuration is read here, and its hidden
states are compared. Its vocabulary and positions are as published; layers are fewer and narrower.
"""

import json
import pathlib
import re
from collections.abc import Mapping

import numpy as np
import torch
import transformers

from bert_jax.checkpoints.huggingface import config_from_huggingface, params_from_huggingface
from bert_jax.data.features import unpack_rows
from bert_jax.model.encoder import Encoder

ENCODERS = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
TOLERANCE = 1e-5
LENGTHS, LENGTH = (40, 17), 40

INTRODUCTION = f"""# The encoders that people use

{len(ENCODERS)} of the encoders that are downloaded most from the hub of Hugging Face, chosen by
hand on 2026-11-28. "Equal": a random model of transformers with the same `config.json` (its
vocabulary and positions as published, its layers fewer and narrower) has the same hidden states
here, within 1e-5 in float32. The weights themselves were not downloaded, and what `config.json`
says about arithmetic was recorded from memory, in `tests/parity/encoders.json`: no file was read.
Tokenizers are not part of the comparison: that of BERTweet is refused, and those of Japanese BERTs.
[Families](families.md) says how each model differs from BERT, and what can be done with it.

This page is written by `PYTHONPATH=. .venv-parity/bin/python tests/parity/encoders.py`.

| encoder | `model_type` | hidden states |
| --- | --- | --- |"""


def narrow(values: Mapping) -> dict:
    """Returns the configuration with at most four layers, and a hidden size of at most 32."""
    if values["model_type"] == "distilbert":
        return {**values, "dim": 32, "n_heads": 4, "n_layers": 3, "hidden_dim": 40}
    if values["model_type"] == "xlnet":
        return {**values, "d_model": 32, "n_head": 4, "n_layer": 4, "d_inner": 40}
    small = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": min(values.get("num_hidden_layers", 12), 4),
        "intermediate_size": 40,
    }
    if "attention_window" in values:
        small["attention_window"] = values["attention_window"][: small["num_hidden_layers"]]
    if "embedding_size" in values:
        is_wide = values["embedding_size"] == values["hidden_size"]
        small["embedding_size"] = 32 if is_wide else 16
    return {**values, **small}


def difference_from_transformers(values: Mapping) -> float:
    """Returns the largest difference of hidden states, of all layers and positions.

    Those beyond 1, as there are before LayerNorm, differ relative to their size.

    Raises ValueError if the configuration is not supported here.
    """
    values = narrow(values)
    config_from_huggingface(values)  # Before transformers, which may not know it either.
    torch.manual_seed(0)
    reference_config = transformers.AutoConfig.for_model(**values)
    reference = transformers.AutoModel.from_config(reference_config).eval()
    with torch.no_grad():
        for path, value in reference.named_parameters():
            is_scale = value.ndim == 1 and "norm" in path.lower() and path.endswith("weight")
            value.copy_(is_scale + 0.2 * torch.randn(value.shape))
    reference.config.architectures = [type(reference).__name__]
    config = config_from_huggingface(json.loads(reference.config.to_json_string(use_diff=False)))
    tensors = {path: value.numpy() for path, value in reference.state_dict().items()}
    params, _ = params_from_huggingface(tensors, config, None)

    rng = np.random.default_rng(0)
    tokens = rng.integers(5, config.vocab_size - 1, (len(LENGTHS), LENGTH)).astype(np.int32)
    bounds = np.zeros((len(LENGTHS), 1, 3), np.int32)
    for row, length in enumerate(LENGTHS):
        tokens[row, length:] = reference.config.pad_token_id or 0
        bounds[row, 0] = 0, length, length
    batch = unpack_rows({"tokens": tokens, "sequence_bounds": bounds})
    is_real = np.asarray(batch["sequence_ids"]) > 0
    inputs = {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(is_real).long()}
    with torch.no_grad():
        expected = reference(**inputs, output_hidden_states=True).hidden_states
    states = Encoder(config).apply({"params": params["encoder"]}, batch, method="all_hidden_states")
    largest = 0.0
    for ours, theirs in zip(states[1:], expected[1:], strict=True):
        exact = theirs.numpy()[is_real]
        difference = np.abs(np.asarray(ours)[is_real] - exact) / np.maximum(1, np.abs(exact))
        largest = max(largest, float(difference.max()))
    return largest


def outcome(values: Mapping) -> str:
    """Returns what the table says of a configuration."""
    try:
        difference = difference_from_transformers(values)
    except ValueError as error:
        message = str(error).removeprefix("config.json: ")
        return f"not read: {re.sub(', expected one of [^:]*', '', message)}"
    return "equal" if difference < TOLERANCE else f"differ by {difference:.1e}"


def main() -> None:
    outcomes = {name: outcome(values) for name, values in ENCODERS.items()}
    print(INTRODUCTION)
    for name, found in sorted(outcomes.items(), key=lambda item: item[0].lower()):
        print(f"| {name} | {ENCODERS[name]['model_type']} | {found} |")
    count = sum(found == "equal" for found in outcomes.values())
    print(f"\n{count} of {len(outcomes)} are equal.")


if __name__ == "__main__":
    main()
