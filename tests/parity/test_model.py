"""The model, its loss and its gradients against transformers in torch (`make parity`)."""

import dataclasses
import functools
import json
import os
import pathlib

import jax
import numpy as np
import pytest

from bert_jax.checkpoints.export import params_to_huggingface
from bert_jax.checkpoints.huggingface import config_from_huggingface, params_from_huggingface
from bert_jax.checkpoints.transformers_names import BERT
from bert_jax.data.packing import row_dtype
from bert_jax.model.config import BertConfig
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan
from bert_jax.objectives.left_to_right import LeftToRight
from tests.golden import make_model as golden

# Absolute for outputs and loss, relative for gradients; all in float32.
TOLERANCE = 1e-5

# vocabulary, hidden, layers, heads, feed-forward, positions; lengths of the rows; predictions.
CASES = {
    "odd-sizes": ((1003, 48, 1, 3, 50, 37), (37, 2, 19, 36), 7),
    "tiny": ((30522, 128, 2, 2, 512, 512), (128, 128, 77, 30), 20),
    "narrow-heads": ((997, 96, 5, 12, 384, 64), (64, 10, 33), 11),
    "one-head": ((129, 40, 3, 1, 200, 100), (100, 99, 3), 5),
    "whole-tiles": ((256, 64, 2, 4, 256, 512), (512, 300), 77),
    "deep": ((500, 64, 12, 4, 256, 48), (48, 5, 40), 9),
}

SENTENCES = [
    ("The river rises in the mountains and flows north to the sea.", "It is 240 km long."),
    ("Anarchism is a political philosophy that advocates self-governed societies.", ""),
    (
        "Who wrote the first dictionary of the English language?",
        "Samuel Johnson's appeared in 1755.",
    ),
    ("No.", ""),
    ("Café, naïve, 北京, and an unbelievably-long-compound-word", "deoxyribonucleic acid"),
]


@pytest.mark.parametrize("case", CASES)
def test_outputs_loss_and_gradients_equal_transformers(case):
    (vocab, hidden, layers, heads, intermediate, positions), lengths, num_slots = CASES[case]
    config = BertConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        intermediate_size=intermediate,
        max_position_embeddings=positions,
    )
    tensors = golden.random_tensors(config, seed=layers)
    batch = golden.random_batch(config, seed=hidden, lengths=lengths, num_slots=num_slots)
    params, report = params_from_huggingface(tensors, config)
    assert not report.missing
    assert not report.unused
    expected = golden.transformers_outputs(config, tensors, batch)
    actual = golden.outputs(config, params, batch)
    check(case, golden.largest_errors(config, actual, expected, batch))


def test_left_to_right_loss_and_gradients_equal_transformers_in_packed_rows_too():
    import torch
    import transformers

    config = dataclasses.replace(golden.CONFIG, causal=True)
    tensors, lengths = golden.random_tensors(config, seed=2), (20, 3, 13)
    batch = golden.random_batch(config, seed=3, lengths=lengths, num_slots=5)
    sizes = {key: getattr(config, field) for field, key in BERT.config_keys.items()}
    reference = transformers.BertLMHeadModel(transformers.BertConfig(**sizes)).eval()
    weights = {name: torch.tensor(value) for name, value in tensors.items()}
    absent, _ = reference.load_state_dict(weights, strict=False)
    assert all(name.startswith("cls.predictions.decoder.") for name in absent)
    tokens, segments, real = (
        torch.tensor(batch[name]).long() for name in ("tokens", "segment_ids", "sequence_ids")
    )
    labels = torch.where(real > 0, tokens, -100)  # The model shifts them.
    loss = reference(tokens, real, token_type_ids=segments, labels=labels).loss
    loss.backward()
    expected = {name: value.grad.numpy() for name, value in reference.named_parameters()}

    one_per_row = np.zeros(3, row_dtype(20, 1))
    packed = np.zeros(1, row_dtype(40, 3))
    for index, length in enumerate(lengths):
        start, second = sum(lengths[:index]), length - int(segments[index].sum())
        for row, first, slot in ((one_per_row[index], 0, 0), (packed[0], start, index)):
            row["tokens"][first : first + length] = batch["tokens"][index, :length]
            row["sequence_bounds"][slot] = first, first + second, first + length
    params, _ = params_from_huggingface(tensors, config)
    objective = LeftToRight(next_sentence=False)
    model = objective.make_model(config, ExecutionPlan())

    def loss_fn(params, batch):
        loss, count = objective.sums(model, params, batch)["next_token_loss"]
        return loss / count

    for case, rows in (("one per row", one_per_row), ("packed", packed)):
        rows = {name: rows[name] for name in rows.dtype.names}
        batch = objective.prepare(rows, jax.random.key(0))
        actual, gradients = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
        del gradients["nsp"], gradients["encoder"]["pooler"]  # Not in the model.
        gradients = params_to_huggingface(gradients, config)
        assert gradients.keys() == expected.keys()
        errors = {"loss": abs(float(actual) - loss.item())}
        errors["gradients"] = max(
            np.max(np.abs(gradients[name] - exact)) / np.max(np.abs(exact))
            for name, exact in expected.items()
            if not name.endswith("key.bias")  # 0, up to rounding.
        )
        check(f"left to right, {case}, loss {float(actual):.6f}", errors)


def test_padding_rows_of_the_vocabulary_take_no_probability():
    config = BertConfig(
        vocab_size=1003, hidden_size=48, num_layers=1, num_heads=3, intermediate_size=50
    )
    params, _ = params_from_huggingface(golden.random_tensors(config, seed=0), config)
    batch = golden.random_batch(config, seed=1, lengths=(50, 9), num_slots=7)
    logits = golden.outputs(config, params, batch)["mlm_logits"]
    assert logits.shape[-1] == 1024
    probabilities = np.asarray(jax.nn.softmax(logits, axis=-1))
    assert np.all(probabilities[..., 1003:] == 0)


def test_released_weights_have_the_hidden_states_of_transformers_on_real_sentences():
    import torch
    import transformers
    from safetensors.numpy import load_file

    directory = os.environ.get("BERT_JAX_MINILM")
    if not directory:
        pytest.skip("BERT_JAX_MINILM names no directory: `make parity` fetches the weights")
    directory = pathlib.Path(directory)
    config = config_from_huggingface(json.loads((directory / "config.json").read_text()))
    params, report = params_from_huggingface(load_file(directory / "model.safetensors"), config)
    assert report.unused == ("embeddings.position_ids",)
    assert all(name.startswith("cls.") for name in report.missing)

    tokenizer = transformers.BertTokenizer.from_pretrained(directory)
    texts, seconds = zip(*SENTENCES, strict=True)
    inputs = tokenizer(list(texts), list(seconds), padding=True, return_tensors="pt")
    model = transformers.BertModel.from_pretrained(directory).eval()
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True)

    tokens, segments, real = (
        inputs[name].numpy() for name in ("input_ids", "token_type_ids", "attention_mask")
    )
    batch = {
        "tokens": tokens,
        "segment_ids": segments,
        "position_ids": np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape),
        "sequence_ids": real,
    }

    def hidden_and_pooled(model, batch):
        hidden = model.all_hidden_states(batch)
        return hidden, model.pool(hidden[-1][:, :1])[:, 0]

    run = jax.jit(functools.partial(Encoder(config).apply, method=hidden_and_pooled))
    hidden, pooled = run({"params": params["encoder"]}, batch)
    exact = torch.stack(expected.hidden_states).numpy()[:, real > 0]
    print(f"largest hidden value {np.abs(exact).max():.1f}")
    errors = {
        "hidden": np.max(np.abs(hidden[:, real > 0] - exact)),
        "pooled": np.max(np.abs(pooled - expected.pooler_output.numpy())),
    }
    check("minilm", errors)


def check(case: str, errors: dict) -> None:
    print(f"{case}:", ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    assert max(errors.values()) < TOLERANCE, errors
