"""BERT's descendants against transformers in torch: hidden states, logits, losses, gradients."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.checkpoints.export import params_to_huggingface
from bert_jax.checkpoints.huggingface import (
    config_from_huggingface,
    head_from_huggingface,
    params_from_huggingface,
)
from bert_jax.model.encoder import Encoder
from bert_jax.model.heads import HEADS, make_model
from bert_jax.model.layers import cross_entropy
from bert_jax.model.pretraining import PretrainingModel

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5  # Absolute for outputs and losses, relative for gradients; all in float32.
LENGTHS, LENGTH = (13, 4, 9), 13

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 20,
}
DISTILBERT_SIZES = {
    "vocab_size": 61,
    "dim": 24,
    "n_layers": 3,
    "n_heads": 2,
    "hidden_dim": 40,
    "max_position_embeddings": 20,
}
# Family -> options of six configurations, each with a seed of its own.
OPTIONS = {
    "Bert": (
        {},
        {"hidden_act": "gelu_new"},
        {"hidden_act": "relu"},
        {"num_hidden_layers": 1},
        {"layer_norm_eps": 1e-5},
        {"type_vocab_size": 3},
    ),
    "Roberta": (
        {"type_vocab_size": 1},
        {"type_vocab_size": 1, "layer_norm_eps": 1e-5},
        {"type_vocab_size": 1, "num_hidden_layers": 1},
        {"num_attention_heads": 2},
        {"type_vocab_size": 1, "hidden_size": 30},
        {"type_vocab_size": 1, "intermediate_size": 17},
    ),
    "DistilBert": (
        {},
        {"activation": "relu"},
        {"n_layers": 1},
        {"sinusoidal_pos_embds": True},
        {"n_heads": 4},
        {"hidden_dim": 17},
    ),
    "Albert": (
        {"embedding_size": 8},
        {"embedding_size": 8, "num_hidden_layers": 4, "num_hidden_groups": 2},
        {"embedding_size": 24},
        {"embedding_size": 8, "hidden_act": "gelu"},
        {"embedding_size": 10, "num_hidden_layers": 1},
        {"embedding_size": 8, "num_hidden_layers": 5, "layer_norm_eps": 1e-6},
    ),
    "Electra": (
        {"embedding_size": 8},
        {"embedding_size": 24},
        {"embedding_size": 30},
        {"embedding_size": 8, "num_hidden_layers": 1},
        {"embedding_size": 8, "layer_norm_eps": 1e-6},
        {"embedding_size": 8, "type_vocab_size": 1},
    ),
}
HEADS_OF_CLASSES = (
    "Model",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)


def random_model(family: str, head: str, seed: int):
    """Returns a model of transformers whose biases and scales are random, too."""
    torch.manual_seed(seed)
    sizes = DISTILBERT_SIZES if family == "DistilBert" else SIZES
    options = (
        sizes | OPTIONS[family][seed] | {"num_labels": 2 if head == "ForQuestionAnswering" else 4}
    )
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, f"{family}{head}")(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            is_scale = value.ndim == 1 and "norm" in name.lower() and name.endswith("weight")
            value.copy_(is_scale + 0.2 * torch.randn(value.shape))
    model.config.architectures = [f"{family}{head}"]
    return model


def random_rows(config, seed: int, is_pair: bool) -> tuple[dict, dict]:
    """Returns rows with one sequence each, and the inputs of transformers."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(2, config.vocab_size, (len(LENGTHS), LENGTH)).astype(np.int32)
    bounds = np.zeros((len(LENGTHS), 1, 3), np.int32)
    mask = np.zeros_like(tokens)
    segments = np.zeros_like(tokens)
    pad = 1 if config.family == "roberta" else 0
    for row, length in enumerate(LENGTHS):
        second = length // 2 if is_pair and config.type_vocab_size > 1 else length
        bounds[row, 0] = 0, second, length
        tokens[row, length:] = pad
        mask[row, :length] = 1
        segments[row, second:length] = 1
    inputs = {"input_ids": tokens, "attention_mask": mask}
    if config.type_vocab_size:
        inputs["token_type_ids"] = segments
    inputs = {name: torch.tensor(value).long() for name, value in inputs.items()}
    return {"tokens": tokens, "sequence_bounds": bounds}, inputs


def check_round_trip(model, params, config, head) -> None:
    """Asserts that the tensors written are those of the model, and nothing else."""
    written = params_to_huggingface(params, config, head)
    expected = {
        name: value.numpy()
        for name, value in model.state_dict().items()
        if "position_ids" not in name
    }
    tied = {name for name in expected if name.endswith("decoder.weight")}
    tied |= {"lm_head.decoder.bias", "predictions.decoder.bias", "cls.predictions.decoder.bias"}
    tied |= {"vocab_projector.weight", "generator_lm_head.weight"}
    assert written.keys() == expected.keys() - tied
    for name, value in written.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def our_outputs(params, config, head, rows):
    """Returns what our model computes for the first position, or the unmasked ones, of each row."""
    if head:
        return make_model(config, head).apply({"params": params}, rows)
    model = PretrainingModel(config, next_sentence=False)
    from bert_jax.data.features import unpack_rows

    batch = unpack_rows(rows)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), rows["tokens"].shape)
    logits = model.apply({"params": params}, batch, positions, method="predict_tokens")
    return logits[..., : config.vocab_size]


def loss_and_labels(head, config, rng):
    """Returns our loss of outputs, and the labels of transformers."""
    batch = len(LENGTHS)
    is_real = np.arange(LENGTH) < np.array(LENGTHS)[:, None]
    if not head:
        labels = rng.integers(0, config.vocab_size, (batch, LENGTH))
        weights = is_real

        def loss(outputs, rows):
            return jnp.sum(cross_entropy(outputs, jnp.asarray(labels))[0] * weights) / weights.sum()

        return loss, {"labels": torch.tensor(np.where(is_real, labels, -100))}
    task_head = HEADS[head["task"]]
    if head["task"] == "tagging":
        labels = rng.integers(0, 4, (batch, LENGTH))
        theirs = {"labels": torch.tensor(np.where(is_real, labels, -100))}
        weights = is_real
    elif head["task"] == "span":
        labels = np.array([[[1, 3]], [[0, 2]], [[5, 8]]])
        theirs = {
            "start_positions": torch.tensor(labels[:, 0, 0]),
            "end_positions": torch.tensor(labels[:, 0, 1]),
        }
        weights = np.ones((batch, 1))
    else:
        labels = rng.integers(0, 4, (batch, 1))
        theirs = {"labels": torch.tensor(labels[:, 0])}
        weights = np.ones((batch, 1))

    def loss(outputs, rows):
        losses = task_head.loss(outputs, rows | {"labels": jnp.asarray(labels, jnp.int32)})
        return jnp.sum(losses * weights) / weights.sum()

    return loss, theirs


@pytest.mark.parametrize("head_class", HEADS_OF_CLASSES)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", OPTIONS)
def test_model_equals_transformers(family, seed, head_class):
    model = random_model(family, head_class, seed)
    values = json.loads(model.config.to_json_string(use_diff=False))
    config, head = config_from_huggingface(values), head_from_huggingface(values)
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    params, report = params_from_huggingface(tensors, config, head)
    assert all("position_ids" in name for name in report.unused)
    check_round_trip(model, params, config, head)

    is_choice = head_class == "ForMultipleChoice"
    rows, inputs = random_rows(config, seed, is_pair=head_class != "Model")
    encoder = model.base_model
    with torch.no_grad():
        expected = encoder(**inputs, output_hidden_states=True).hidden_states
    from bert_jax.data.features import unpack_rows

    states = Encoder(config).apply(
        {"params": params["encoder"]}, unpack_rows(rows), method="all_hidden_states"
    )
    is_real = np.arange(LENGTH) < np.array(LENGTHS)[:, None]
    # ALBERT's first hidden states are those that the first layer reads.
    for ours, theirs in zip(states, expected, strict=True):
        if theirs.shape == ours.shape:
            assert np.max(np.abs(ours - theirs.numpy())[is_real]) < TOLERANCE
    if head_class == "Model":
        return
    if is_choice:
        inputs = {name: value[None] for name, value in inputs.items()}
    if family == "Roberta" and head and head["task"] == "regression":
        pytest.skip("no such case")

    loss, labels = loss_and_labels(head, config, np.random.default_rng(seed))
    if is_choice:
        labels = {"labels": torch.tensor([1])}
    theirs = model(**inputs, **labels)
    theirs.loss.backward()

    def our_loss(params):
        outputs = our_outputs(params, config, head, rows)
        if is_choice:
            return cross_entropy(outputs[..., 0].reshape(1, -1), jnp.array([1]))[0][0], outputs
        return loss(outputs, rows), outputs

    (value, outputs), gradients = jax.jit(jax.value_and_grad(our_loss, has_aux=True))(params)
    assert abs(float(value) - theirs.loss.item()) < TOLERANCE
    if head_class == "ForQuestionAnswering":
        logits = torch.stack([theirs.start_logits, theirs.end_logits], -1).detach().numpy()
        assert np.max(np.abs(outputs - logits)[is_real]) < TOLERANCE
    else:
        logits = theirs.logits.detach().numpy()
        outputs = np.asarray(outputs)
        if logits.ndim == 2:
            outputs = outputs.reshape(logits.shape)
            assert np.max(np.abs(outputs - logits)) < TOLERANCE
        else:
            assert np.max(np.abs(outputs - logits)[is_real]) < TOLERANCE
    written = params_to_huggingface(gradients, config, head)
    for name, parameter in model.named_parameters():
        if name in written and parameter.grad is not None and "key.bias" not in name:
            exact = parameter.grad.numpy()
            error = np.max(np.abs(written[name] - exact)) / max(np.max(np.abs(exact)), 0.1)
            assert error < TOLERANCE, name
