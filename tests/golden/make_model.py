"""Generates model.npz with transformers' BertForPreTraining (needs torch and transformers).

python tests/golden/make_model.py

The file holds a small model's weights, a batch, and transformers' outputs for them: hidden
states, pooled output, logits, loss, and the gradient of the loss. The functions here also serve
tests/parity/test_model.py, which compares larger models directly.
"""

import functools
import pathlib

import flax
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.checkpoints.huggingface import huggingface_name, params_from_huggingface
from bert_jax.checkpoints.parameters import parameter_shapes
from bert_jax.model.config import BertConfig
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.layers import gather_positions
from bert_jax.objectives.masked_lm import PretrainingModel, target_sums

PATH = pathlib.Path(__file__).with_name("model.npz")
CONFIG = BertConfig(
    vocab_size=131,
    hidden_size=24,
    num_layers=2,
    num_heads=3,
    intermediate_size=40,
    max_position_embeddings=20,
)


def random_tensors(config: BertConfig, seed: int) -> dict[str, np.ndarray]:
    """Returns a float32 state dict in transformers' names, with no value that hides a mistake.

    Fresh biases are 0 and fresh LayerNorm scales 1: two of them swapped, or one left out, would
    not be seen. Here they are random too.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for path, parameter in parameter_shapes(config).items():
        name, leaf = huggingface_name(path), path.rsplit("/", 1)[-1]
        stacked = "{layer}" in name
        shape = parameter.shape[1:] if stacked else parameter.shape
        if shape[0] == config.padded_vocab_size:
            shape = (config.vocab_size, *shape[1:])
        for layer in range(config.num_layers if stacked else 1):
            value = rng.standard_normal(shape[::-1] if leaf == "kernel" else shape)
            if leaf == "kernel":
                value /= np.sqrt(shape[0])
            elif leaf.endswith("embedding"):
                value *= 0.05  # as in the released models
            else:
                value = 0.2 * value + (leaf == "scale")
            tensors[name.format(layer=layer)] = value.astype(np.float32)
    return tensors


def random_batch(config: BertConfig, seed: int, lengths: tuple[int, ...], num_slots: int) -> dict:
    """Returns a batch for `target_sums`: one pair per row, of the given lengths, then padding.

    Rows differ in how many of their `num_slots` slots hold a prediction.
    """
    rng = np.random.default_rng(seed)
    ids, slots = np.zeros((len(lengths), max(lengths)), np.int32), (len(lengths), num_slots)
    batch = {
        "tokens": ids.copy(),
        "segment_ids": ids.copy(),
        "position_ids": ids.copy(),
        "sequence_ids": ids.copy(),
        "target_positions": np.zeros(slots, np.int32),
        "targets": np.zeros(slots, np.int32),
        "target_weights": np.zeros(slots, np.float32),
        "pooled_positions": np.zeros((len(lengths), 1), np.int32),
        "nsp_labels": rng.integers(0, 2, (len(lengths), 1), np.int32),
        "nsp_weights": np.ones((len(lengths), 1), np.float32),
    }
    for row, length in enumerate(lengths):
        # Not 0: torch omits the gradient of the embedding of the padding id.
        batch["tokens"][row, :length] = rng.integers(1, config.vocab_size, length)
        batch["segment_ids"][row, rng.integers(1, length) : length] = 1
        batch["position_ids"][row, :length] = np.arange(length)
        batch["sequence_ids"][row, :length] = 1
        predictions = rng.integers(1, 1 + min(num_slots, length))
        batch["target_positions"][row, :predictions] = rng.permutation(length)[:predictions]
        batch["targets"][row, :predictions] = rng.integers(0, config.vocab_size, predictions)
        batch["target_weights"][row, :predictions] = 1.0
    return batch


def transformers_outputs(config: BertConfig, tensors: dict, batch: dict) -> dict:
    """Returns transformers' `hidden` `[1 + layers, B, L, H]`, `pooled` `[B, H]`,
    `mlm_logits` `[B, L, vocab]`, `nsp_logits` `[B, 2]`, `loss`, and `gradients`, a state dict.
    """
    import torch
    import transformers

    model = transformers.BertForPreTraining(
        transformers.BertConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_position_embeddings,
            type_vocab_size=config.type_vocab_size,
        )
    ).eval()
    tied = {name for name in model.state_dict() if name.startswith("cls.predictions.decoder.")}
    absent, unknown = model.load_state_dict(
        {name: torch.tensor(value) for name, value in tensors.items()}, strict=False
    )
    assert set(absent) == tied and not unknown, (absent, unknown)
    labels = np.full(batch["tokens"].shape, -100)
    rows, slots = np.nonzero(batch["target_weights"])
    labels[rows, batch["target_positions"][rows, slots]] = batch["targets"][rows, slots]
    inputs = {
        "input_ids": batch["tokens"],
        "token_type_ids": batch["segment_ids"],
        "attention_mask": batch["sequence_ids"],
    }
    inputs = {name: torch.tensor(value).long() for name, value in inputs.items()}
    outputs = model(
        **inputs,
        labels=torch.tensor(labels),
        next_sentence_label=torch.tensor(batch["nsp_labels"][:, 0]).long(),
        output_hidden_states=True,
    )
    outputs.loss.backward()
    return {
        "hidden": torch.stack(outputs.hidden_states).detach().numpy(),
        "pooled": model.bert(**inputs).pooler_output.detach().numpy(),
        "mlm_logits": outputs.prediction_logits.detach().numpy(),
        "nsp_logits": outputs.seq_relationship_logits.detach().numpy(),
        "loss": outputs.loss.detach().numpy(),
        "gradients": {name: value.grad.numpy() for name, value in model.named_parameters()},
    }


def outputs(
    config: BertConfig, params: dict, batch: dict, plan: ExecutionPlan = ExecutionPlan()
) -> dict:
    """Returns the same outputs of this project; `gradients` is a parameter tree."""
    return jax.device_get(_outputs(config, plan, params, batch))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _outputs(config, plan, params, batch):
    model, variables = PretrainingModel(config, plan=plan), {"params": params}
    shape = batch["tokens"].shape
    everywhere = batch | {"target_positions": jnp.broadcast_to(jnp.arange(shape[1]), shape)}

    def hidden_and_pooled(model, batch):
        hidden = model.encoder.all_hidden_states(batch)
        pooled = model.encoder.pool(gather_positions(hidden[-1], batch["pooled_positions"]))
        return hidden, pooled[:, 0]

    def loss_fn(params):
        sums = target_sums(model, params, batch, None, "mlm")
        return sum(loss / count for loss, count in (sums["mlm_loss"], sums["nsp_loss"]))

    hidden, pooled = model.apply(variables, batch, method=hidden_and_pooled)
    mlm_logits, nsp_logits = model.apply(variables, everywhere)
    loss, gradients = jax.value_and_grad(loss_fn)(params)
    return {
        "hidden": hidden,
        "pooled": pooled,
        "mlm_logits": mlm_logits,
        "nsp_logits": nsp_logits[:, 0],
        "loss": loss,
        "gradients": gradients,
    }


def largest_errors(config: BertConfig, found: dict, expected: dict, batch: dict) -> dict:
    """Returns the largest absolute error of each output against transformers, where there is text.

    `gradients` is relative: each parameter's largest difference over its largest gradient.
    """
    real = batch["sequence_ids"] > 0
    pairs = {name: (found[name], expected[name]) for name in ("pooled", "nsp_logits", "loss")}
    pairs["hidden"] = found["hidden"][:, real], expected["hidden"][:, real]
    logits = found["mlm_logits"][..., : config.vocab_size]
    pairs["mlm_logits"] = logits[real], expected["mlm_logits"][real]
    errors = {name: float(np.max(np.abs(one - two))) for name, (one, two) in pairs.items()}

    gradients, _ = params_from_huggingface(expected["gradients"], config)
    exact = flax.traverse_util.flatten_dict(gradients, sep="/")
    ours = flax.traverse_util.flatten_dict(found["gradients"], sep="/")
    assert ours.keys() == exact.keys()
    errors["gradients"] = 0.0
    for path, value in exact.items():
        # A number added to all scores does not change a softmax, so the key's bias has a gradient
        # of 0, and its computed gradient is rounding: compare it with the kernel's gradient.
        scale = np.max(np.abs(exact[path.replace("key/bias", "key/kernel")]))
        error = float(np.max(np.abs(ours[path] - value)) / scale)
        errors["gradients"] = max(errors["gradients"], error)
    return errors


def load() -> tuple[BertConfig, dict, dict, dict]:
    """Returns the golden configuration, state dict, batch, and outputs of transformers."""
    groups = {"tensors": {}, "batch": {}, "outputs": {}, "gradients": {}}
    with np.load(PATH) as file:
        for key in file.files:
            group, name = key.split("/")
            groups[group][name] = file[key]
    groups["outputs"]["gradients"] = groups["gradients"]
    return CONFIG, groups["tensors"], groups["batch"], groups["outputs"]


def main() -> None:
    tensors = random_tensors(CONFIG, seed=0)
    batch = random_batch(CONFIG, seed=1, lengths=(20, 3, 13), num_slots=5)
    expected = transformers_outputs(CONFIG, tensors, batch)
    groups = {"tensors": tensors, "batch": batch, "gradients": expected.pop("gradients")}
    groups["outputs"] = expected
    arrays = {
        f"{group}/{name}": value for group, items in groups.items() for name, value in items.items()
    }
    np.savez_compressed(PATH, **arrays)
    print(f"{PATH}: {len(arrays)} arrays, {PATH.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
