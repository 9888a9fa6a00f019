"""Larger models: what their layers and positions are copies of, and outputs that stay."""

import functools

import flax
import jax
import numpy as np
import pytest

import bert_jax
from bert_jax.checkpoints.enlarge import deepen, lengthen, widen, write_enlarged
from bert_jax.checkpoints.parameters import LoadedModel, LoadReport, model_settings
from bert_jax.checkpoints.save import save_model
from bert_jax.model.architecture import config_from_settings
from bert_jax.objectives.masked_lm import PretrainingModel
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import write_vocabulary
from tests.helpers.models import (
    batch_of_row,
    example_batch,
    random_params,
    small_deberta_config,
    small_esm_config,
    small_longformer_config,
    small_model_config,
    small_modernbert_config,
    small_mpnet_config,
    small_xlnet_config,
)

CASES = {
    "bert": functools.partial(small_model_config, num_layers=1),
    "modernbert": small_modernbert_config,
    "modernbert, untied": functools.partial(small_modernbert_config, ties_embeddings=False),
    "albert": functools.partial(small_model_config, embedding_size=16, shares_layers=True),
    "mpnet": small_mpnet_config,
    "esm": small_esm_config,
    "longformer": small_longformer_config,
    "deberta": small_deberta_config,
}
FAST = ("bert",)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in FAST]


def make_model(config, tokenizer=None, **settings) -> LoadedModel:
    """Returns a model with random parameters, biases included."""
    params = random_params(PretrainingModel(config), example_batch())
    settings = model_settings(config, params) | settings
    return LoadedModel(params, settings, tokenizer, LoadReport((), (), ()))


def flat(model: LoadedModel) -> dict:
    return flax.traverse_util.flatten_dict(jax.device_get(model.params), sep="/")


def outputs_of(model: LoadedModel) -> list[np.ndarray]:
    """Returns the logits of masked LM and next sentence for a row of tokens."""
    tokens = np.random.default_rng(1).integers(5, 30, (1, 12))
    where = {"target_positions": np.arange(12)[None], "pooled_positions": np.zeros((1, 1), int)}
    module = PretrainingModel(config_from_settings(model.settings))
    return jax.jit(module.apply)({"params": model.params}, batch_of_row(tokens) | where)


@pytest.mark.parametrize("name", [*FAST, *SLOW])
@pytest.mark.slow
def test_a_wider_model_computes_the_same_and_its_copies_differ(name):
    model = make_model(CASES[name](vocab_size=33))
    wide = widen(model, 64)
    config = config_from_settings(wide.settings)
    assert (config.hidden_size, config.num_heads) == (64, 8)
    for found, expected in zip(outputs_of(wide), outputs_of(model), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    kernel = flat(wide)["encoder/layers/output/kernel"]
    halves = np.split(kernel, 2, axis=1)
    assert np.abs(halves[0] - halves[1]).max() > 0.1
    again = flat(widen(model, 64))
    assert all(np.array_equal(leaf, again[path]) for path, leaf in flat(wide).items())


def layer_numbers(model: LoadedModel) -> LoadedModel:
    """Returns the model with its number in each parameter of a layer that all layers have."""
    layers = jax.tree.map(
        lambda leaf: np.zeros_like(leaf) + np.arange(len(leaf)).reshape(-1, *[1] * (leaf.ndim - 1)),
        model.params["encoder"]["layers"],
    )
    return model._replace(
        params=model.params | {"encoder": {**model.params["encoder"], "layers": layers}}
    )


@pytest.mark.parametrize(
    ("config", "num_layers", "expected"),
    [
        (small_model_config(num_layers=3), 8, [0, 1, 2, 0, 1, 2, 0, 1]),
        # The first is global, as every third, and has no norm before attention.
        (
            small_modernbert_config(num_layers=5, attention_pattern="gll"),
            9,
            [0, 1, 2, 3, 4, 1, 3, 2, 4],
        ),
        (small_deberta_config(num_layers=3), 6, [0, 1, 2, 1, 2, 1]),
    ],
    ids=["bert", "modernbert", "deberta"],
)
@pytest.mark.slow
def test_further_layers_are_copies_in_turn(config, num_layers, expected):
    deep = deepen(layer_numbers(make_model(config)), num_layers)
    assert config_from_settings(deep.settings).num_layers == num_layers
    found = flat(deep)
    np.testing.assert_array_equal(found["encoder/layers/query/kernel"][:, 0, 0], expected)
    if config.architecture == "modernbert":  # It is stacked from the second layer on.
        norm = found["encoder/layers/attention_norm/scale"][:, 0]
        np.testing.assert_array_equal(norm + 1, expected[1:])
    if config.architecture == "deberta":
        assert len(found["encoder/layers/convolution/kernel"]) == 1


def test_layers_that_share_parameters_keep_them():
    model = make_model(small_model_config(shares_layers=True))
    deep = deepen(model, 4)
    assert config_from_settings(deep.settings).num_layers == 4
    assert all(
        leaf is not None and np.array_equal(leaf, flat(model)[path])
        for path, leaf in flat(deep).items()
    )


@pytest.mark.parametrize("config", [small_model_config(), small_mpnet_config()])
def test_further_positions_repeat_the_old_ones(config):
    model = make_model(config)
    path = "encoder/embeddings/position_embedding/embedding"
    table, longer = (flat(each)[path] for each in (model, lengthen(model, 150)))
    offset = config.position_offset
    assert len(longer) == offset + 150
    np.testing.assert_array_equal(longer[: offset + 64], table)
    np.testing.assert_array_equal(longer[offset + 64 : offset + 128], table[offset:])
    np.testing.assert_array_equal(longer[offset + 128 :], table[offset : offset + 22])


def test_rotary_positions_have_no_table():
    model = make_model(small_modernbert_config())
    longer = lengthen(model, 100)
    assert config_from_settings(longer.settings).max_position_embeddings == 100
    assert all(np.array_equal(leaf, flat(model)[path]) for path, leaf in flat(longer).items())


def test_the_tool_writes_a_model_that_loads(tmp_path, capsys):
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    config = small_model_config(tokenizer.vocab_size, num_layers=1)
    model = make_model(config, tokenizer)
    save_model(tmp_path / "old", config, tokenizer, model.params, model.settings)
    write_enlarged(str(tmp_path / "old"), str(tmp_path / "new"), 64, 3, 100)
    loaded = bert_jax.load(tmp_path / "new")
    sizes = loaded.config.hidden_size, loaded.config.num_layers
    assert (*sizes, loaded.config.max_position_embeddings) == (64, 3, 100)
    assert "parameters, " in capsys.readouterr().out
    with pytest.raises(FileExistsError, match="new exists already"):
        write_enlarged("nowhere", str(tmp_path / "new"), num_layers=2)  # Before it is read.


BERT, MODERNBERT = small_model_config(), small_modernbert_config()


@pytest.mark.parametrize(
    ("function", "config", "size", "message"),
    [
        (deepen, BERT, 2, "--num_layers=2: expected more than the model's 2"),
        (deepen, BERT, -1, "--num_layers=-1: expected more"),
        (deepen, small_longformer_config(), 4, "attention_window has 2 entries"),
        (
            deepen,
            small_modernbert_config(num_layers=3, attention_pattern="gll"),
            4,
            "layer 3 is of a kind that the model does not have",
        ),
        (widen, BERT, 16, "--hidden_size=16: expected a multiple of the model's 32"),
        (widen, BERT, 48, "--hidden_size=48: expected a multiple of the model's 32"),
        (widen, BERT, 0, "--hidden_size=0: expected more than the model's 32"),
        (widen, BERT, 32, "--hidden_size=32: expected more"),
        (widen, small_xlnet_config(), 64, "the outputs of xlnet would change; expected one of"),
        (lengthen, BERT, 64, "--max_position_embeddings=64: expected more than the model's 64"),
        (lengthen, MODERNBERT, 10, "--max_position_embeddings=10: expected more"),
    ],
)
def test_bad_sizes_are_errors(function, config, size, message):
    with pytest.raises(ValueError, match=message):
        function(make_model(config), size)


def test_modules_of_an_objective_and_no_size_are_errors(tmp_path):
    model = make_model(BERT)
    own = model._replace(params=model.params | {"own": {"kernel": np.zeros((32, 2))}})
    with pytest.raises(ValueError, match="own/kernel belongs to no part of bert or its heads"):
        deepen(own, 4)
    with pytest.raises(ValueError, match="give --hidden_size, --num_layers or"):
        write_enlarged(str(tmp_path), str(tmp_path / "new"))
