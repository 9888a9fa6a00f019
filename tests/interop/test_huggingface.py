"""A state dict in transformers' names becomes the parameter tree it stands for."""

import flax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import BertConfig
from bert_jax.interop.huggingface import (
    config_from_huggingface,
    huggingface_name,
    parameter_shapes,
    params_from_huggingface,
)
from bert_jax.model import BertForPreTraining

CONFIG = BertConfig(
    vocab_size=131,
    hidden_size=12,
    num_layers=2,
    num_heads=3,
    intermediate_size=20,
    max_position_embeddings=9,
)
VALUES = {
    "model_type": "bert",
    "vocab_size": 131,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 9,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
QUERY = "bert.encoder.layer.1.attention.self.query.weight"


def linear(rng, name: str, inputs: int, outputs: int) -> dict[str, np.ndarray]:
    return {
        f"{name}.weight": rng.standard_normal((outputs, inputs)),
        f"{name}.bias": rng.standard_normal(outputs),
    }


def norm(rng, name: str, size: int = 12) -> dict[str, np.ndarray]:
    return {f"{name}.weight": rng.standard_normal(size), f"{name}.bias": rng.standard_normal(size)}


def state_dict(num_layers: int = 2) -> dict[str, np.ndarray]:
    """BertForPreTraining's, written out by hand, in float64: any float dtype may come."""
    rng = np.random.default_rng(0)
    tensors = {
        "bert.embeddings.word_embeddings.weight": rng.standard_normal((131, 12)),
        "bert.embeddings.position_embeddings.weight": rng.standard_normal((9, 12)),
        "bert.embeddings.token_type_embeddings.weight": rng.standard_normal((2, 12)),
        **norm(rng, "bert.embeddings.LayerNorm"),
        **linear(rng, "bert.pooler.dense", 12, 12),
        "cls.predictions.bias": rng.standard_normal(131),
        **linear(rng, "cls.predictions.transform.dense", 12, 12),
        **norm(rng, "cls.predictions.transform.LayerNorm"),
        **linear(rng, "cls.seq_relationship", 12, 2),
    }
    for layer in range(num_layers):
        prefix = f"bert.encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            tensors |= linear(rng, f"{prefix}.attention.self.{part}", 12, 12)
        tensors |= linear(rng, f"{prefix}.attention.output.dense", 12, 12)
        tensors |= norm(rng, f"{prefix}.attention.output.LayerNorm")
        tensors |= linear(rng, f"{prefix}.intermediate.dense", 12, 20)
        tensors |= linear(rng, f"{prefix}.output.dense", 20, 12)
        tensors |= norm(rng, f"{prefix}.output.LayerNorm")
    return tensors


def flat(params: dict) -> dict[str, np.ndarray]:
    return flax.traverse_util.flatten_dict(params, sep="/")


def assert_same(one: dict, two: dict) -> None:
    assert flat(one).keys() == flat(two).keys()
    for path, value in flat(one).items():
        np.testing.assert_array_equal(value, flat(two)[path], err_msg=path)


def test_each_parameter_holds_the_tensor_of_its_name_and_nothing_is_left_over():
    tensors = state_dict()
    params, report = params_from_huggingface(tensors, CONFIG)
    assert sorted(report.loaded) == sorted(tensors)
    assert report.missing == report.unused == ()
    assert {path: value.shape for path, value in flat(params).items()} == parameter_shapes(CONFIG)
    # Back again, by hand: unstack, drop the rows of padding, transpose.
    back = {}
    for path, value in flat(params).items():
        assert value.dtype == np.float32
        name = huggingface_name(path)
        for layer, piece in enumerate(value if "{layer}" in name else [value]):
            piece = piece.T if path.endswith("kernel") else piece
            back[name.format(layer=layer)] = piece[:131] if piece.shape[0] == 256 else piece
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(back[name], value.astype(np.float32), err_msg=name)


def test_rows_that_pad_the_vocabulary_are_zero():
    params, _ = params_from_huggingface(state_dict(), CONFIG)
    assert params["bert"]["embeddings"]["token_embedding"].shape == (256, 12)
    assert not params["bert"]["embeddings"]["token_embedding"][131:].any()
    assert not params["mlm"]["bias"][131:].any()


def test_the_model_takes_the_parameters():
    params, _ = params_from_huggingface(state_dict(), CONFIG)
    ids = jnp.zeros((2, 9), jnp.int32)
    mlm_logits, nsp_logits = BertForPreTraining(CONFIG).apply({"params": params}, *[ids] * 6)
    assert mlm_logits.shape == (2, 9, 256)
    assert nsp_logits.shape == (2, 9, 2)


def test_a_bare_model_has_no_prefix_and_its_heads_are_reported_missing():
    whole = state_dict()
    bare = {
        name.removeprefix("bert."): value
        for name, value in whole.items()
        if name.startswith("bert.") and "pooler" not in name
    }
    bare["embeddings.position_ids"] = np.arange(9)[None]
    params, report = params_from_huggingface(bare, CONFIG)
    assert report.unused == ("embeddings.position_ids",)
    assert set(report.missing) == {n for n in whole if n.startswith(("cls.", "bert.pooler."))}
    expected, _ = params_from_huggingface(whole, CONFIG)
    assert params.keys() == {"bert"}
    del expected["bert"]["pooler"]
    assert_same(params["bert"], expected["bert"])


def test_names_of_old_checkpoints_and_copies_of_tied_tensors_are_known():
    tensors = state_dict()
    expected, _ = params_from_huggingface(tensors, CONFIG)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta"): value
        for name, value in tensors.items()
    }
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    old["cls.predictions.decoder.bias"] = old.pop("cls.predictions.bias")
    params, report = params_from_huggingface(old, CONFIG)
    assert report.missing == report.unused == ()
    assert_same(params, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({QUERY: None}, rf"{QUERY}: expected shape \(12, 12\), found no such tensor"),
        ({QUERY: np.zeros((12, 6))}, rf"{QUERY}: expected shape \(12, 12\), found \(12, 6\)"),
        (
            {"bert.encoder.layer.0.intermediate.dense.weight": np.zeros((12, 20))},
            r"intermediate.dense.weight: expected shape \(20, 12\), found \(12, 20\)",
        ),
        ({"bert.pooler.dense.bias": None}, "bert.pooler.dense.bias: .* found no such tensor"),
        (
            {"bert.embeddings.word_embeddings.weight": np.zeros((130, 12))},
            r"word_embeddings.weight: expected shape \(131, 12\), found \(130, 12\)",
        ),
        ({"embeddings.LayerNorm.bias": np.zeros(12)}, "bert.embeddings.LayerNorm.bias: .* twice"),
        ({"cls.predictions.decoder.weight": np.zeros((131, 12))}, "expected a copy of bert.emb"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_tensor_is_named_with_what_was_expected_and_found(change, message):
    tensors = {name: value for name, value in (state_dict() | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        params_from_huggingface(tensors, CONFIG)


def test_config_is_read_and_its_defaults_are_bert_base():
    assert config_from_huggingface(VALUES) == CONFIG
    assert config_from_huggingface({"model_type": "bert"}) == BertConfig()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "roberta"}, "model_type is 'roberta', and only 'bert'"),
        ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new', and only 'gelu'"),
        ({"position_embedding_type": "relative_key"}, "only 'absolute' is supported"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"attention_probs_dropout_prob": 0.2}, r"differ \(\[0.1, 0.2\]\)"),
    ],
)
def test_another_architecture_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_huggingface(VALUES | change)
