"""BERT's descendants against golden values of transformers; `make parity` compares many more."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bert_jax
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.huggingface import (
    config_from_huggingface,
    head_from_huggingface,
    params_from_huggingface,
)
from bert_jax.checkpoints.parameters import model_settings
from bert_jax.model.config import BertConfig
from bert_jax.model.encoder import Encoder
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.golden import make_families as golden
from tests.helpers.models import random_params, small_model_config

# The others are compared in the slow tier.
FAST = ("RobertaForMaskedLM", "AlbertForMaskedLM", "ElectraForSequenceClassification")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in golden.MODELS],
)
def test_hidden_states_and_logits_equal_the_golden_values(name):
    config, head, tensors, rows = golden.make_case(name)
    actual = golden.our_outputs(config, head, tensors, rows)
    is_real = np.arange(golden.LENGTH) < np.array(golden.LENGTHS)[:, None]
    with np.load(golden.PATH) as expected:
        for key, value in actual.items():
            exact = expected[f"{name}/{key}"]
            difference = np.abs(value - exact)
            worst = np.max(difference[is_real] if difference.ndim == 3 else difference)
            assert worst < 1e-5 * max(1, np.max(np.abs(exact))), key


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in golden.MODELS if name.startswith("Roberta")])
def test_xlm_roberta_is_roberta_under_other_names(name):
    config, head, tensors, rows = golden.make_case(name)
    values = golden.MODELS[name] | {"model_type": "xlm-roberta", "architectures": [f"XLM{name}"]}
    other = config_from_huggingface(values)
    assert dataclasses.replace(other, family="roberta") == config
    assert head_from_huggingface(values) == head
    assert other.has_pooler_input_dropout
    expected = golden.our_outputs(config, head, tensors, rows)
    for key, value in golden.our_outputs(other, head, tensors, rows).items():
        np.testing.assert_array_equal(value, expected[key])


@pytest.mark.slow
def test_gradient_of_shared_layers_is_the_sum_over_their_copies():
    shared = small_model_config(
        vocab_size=40,
        num_layers=4,
        embedding_size=8,
        shares_layers=True,
        num_layer_groups=2,
    )
    copied = dataclasses.replace(shared, shares_layers=False, num_layer_groups=1)
    tokens = np.arange(20).reshape(2, 10) % 40
    batch = {
        "tokens": tokens,
        "segment_ids": 0 * tokens,
        "position_ids": np.arange(10) + 0 * tokens,
        "sequence_ids": 1 + 0 * tokens,
    }
    params = random_params(Encoder(shared), batch)
    copies = params | {
        "layers": jax.tree.map(lambda leaf: jnp.repeat(leaf, 2, axis=0), params["layers"])
    }

    def loss_and_gradients(config, params):
        def loss(params):
            return jnp.sum(jnp.sin(Encoder(config).apply({"params": params}, batch)))

        return jax.jit(jax.value_and_grad(loss))(params)

    (loss, gradients), (expected_loss, expected) = (
        loss_and_gradients(shared, params),
        loss_and_gradients(copied, copies),
    )
    assert jax.tree.leaves(params["layers"])[0].shape[0] == 2
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    expected["layers"] = jax.tree.map(
        lambda leaf: leaf.reshape(2, 2, *leaf.shape[1:]).sum(axis=1), expected["layers"]
    )
    jax.tree.map(
        lambda one, two: np.testing.assert_allclose(one, two, atol=1e-5), gradients, expected
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shares_layers": True, "num_layer_groups": 5}, "num_layer_groups is 5"),
        ({"num_layer_groups": 2}, "num_layer_groups is 2: .* 1 without shares_layers"),
        ({"family": "gpt"}, "family is 'gpt'"),
        ({"activation": "swish"}, "activation is 'swish'"),
        ({"pooler_activation": ""}, "pooler_activation is ''"),
    ],
)
def test_invalid_architecture_is_an_error(fields, message):
    with pytest.raises(ValueError, match=message):
        BertConfig(**fields)


@pytest.mark.parametrize("name", ["DistilBertForMaskedLM", "ElectraForSequenceClassification"])
def test_what_is_written_is_read_again(name, tmp_path):
    config, head, tensors, _ = golden.make_case(name)
    params, _ = params_from_huggingface(tensors, config, head)
    vocabulary = tmp_path / "vocab.txt"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(97, 123))]
    vocabulary.write_text("".join(f"{piece}\n" for piece in pieces))
    settings = model_settings(config, params) | ({"head": head} if head else {})
    directory = tmp_path / "written"
    save_huggingface(directory, params, settings, load_tokenizer(vocabulary))
    loaded = bert_jax.load(directory)
    assert loaded.config == config
    assert loaded.head == head
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
