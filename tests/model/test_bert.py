"""The model against golden values of transformers, and properties for any weights."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from bert_jax.checkpoints.huggingface import params_from_huggingface
from bert_jax.checkpoints.parameters import parameter_shapes
from bert_jax.model import layers
from bert_jax.model.attention import attention
from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.config import BertConfig
from bert_jax.model.dropout import AttentionDropout, Dropout, HiddenDropout, attention_dropout
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan
from bert_jax.objectives.masked_lm import PretrainingModel, target_sums
from bert_jax.training.pretrain_step import step_dropout
from tests.golden import make_model as golden
from tests.helpers.models import example_batch


@pytest.fixture(scope="module")
def example():
    """The golden configuration, its parameters, batch, and the outputs of transformers."""
    config, tensors, batch, expected = golden.load()
    params, _ = params_from_huggingface(tensors, config)
    return config, params, batch, expected


def numbered(batch):
    """Returns the batch with the row numbers that seed dropout."""
    return batch | {"dropout_rows": jnp.arange(len(batch["tokens"]))}


def sums_of(config, plan, params, batch, dropout_key=None):
    dropout = dropout_key is not None and step_dropout(config, numbered(batch), dropout_key)
    model = PretrainingModel(config, plan=plan)
    return target_sums(model, params, batch, dropout or None, "mlm")


@functools.partial(jax.jit, static_argnums=(0, 1))
def loss_and_gradients(config, plan, params, batch, dropout_key):
    def loss_fn(params):
        sums = sums_of(config, plan, params, batch, dropout_key)
        return sums["mlm_loss"][0] + sums["nsp_loss"][0]

    return jax.value_and_grad(loss_fn)(params)


@functools.partial(jax.jit, static_argnums=0)
def encode(config, params, batch):
    return Encoder(config).apply({"params": params["encoder"]}, batch)


def assert_close(tree, expected, tolerance):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance),
        tree,
        expected,
    )


def test_outputs_loss_and_gradients_equal_the_golden_values(example):
    config, params, batch, expected = example
    outputs = golden.outputs(config, params, batch)
    errors = golden.largest_errors(config, outputs, expected, batch)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(
    ("size", "expected"),
    [("base", 110_106_428), pytest.param("large", 336_226_108, marks=pytest.mark.slow)],
)
def test_published_sizes_have_their_number_of_parameters(size, expected):
    config = BertConfig.named(size)
    total = sum(math.prod(leaf.shape) for leaf in parameter_shapes(config).values())
    padding_rows = config.padded_vocab_size - config.vocab_size
    assert total - padding_rows * (config.hidden_size + 1) == expected


def test_heads_and_feed_forward_layer_follow_the_hidden_size_unless_given():
    config = BertConfig.named("base", hidden_size=256)
    assert (config.num_layers, config.num_heads, config.intermediate_size) == (12, 4, 1024)
    explicit = BertConfig.named("tiny", hidden_size=96, num_heads=3, intermediate_size=100)
    assert (explicit.num_heads, explicit.intermediate_size) == (3, 100)
    with pytest.raises(ValueError, match=r"hidden_size is 100"):
        BertConfig.named("tiny", hidden_size=100)


@pytest.mark.slow
def test_scanned_layers_equal_unrolled_ones(example):
    config, params, batch, _ = example
    both = ExecutionPlan(scans_layers=True), ExecutionPlan()
    params, same = (
        jax.jit(PretrainingModel(config, plan=each).init)(jax.random.key(0), example_batch())[
            "params"
        ]
        for each in both
    )
    jax.tree.map(np.testing.assert_array_equal, params, same)
    scanned, unrolled = (
        loss_and_gradients(config, each, params, batch, jax.random.key(1)) for each in both
    )
    assert_close(scanned, unrolled, 1e-5)
    other_dropout = loss_and_gradients(config, both[0], params, batch, jax.random.key(2))
    assert float(scanned[0]) != float(other_dropout[0])  # Dropout was on.


@pytest.mark.parametrize(
    ("remat", "scan_layers"),
    [
        pytest.param("full", False, marks=pytest.mark.slow),
        pytest.param("dots", True, marks=pytest.mark.slow),
        pytest.param("full", True, marks=pytest.mark.slow),
        pytest.param("dots", False, marks=pytest.mark.exhaustive),
    ],
)
def test_recomputed_activations_give_the_same_loss_and_gradients(example, remat, scan_layers):
    config, params, batch, _ = example
    recomputing = ExecutionPlan(remat=remat, scans_layers=scan_layers)
    key = jax.random.key(1)
    expected = loss_and_gradients(config, ExecutionPlan(), params, batch, key)
    assert_close(expected, loss_and_gradients(config, recomputing, params, batch, key), 1e-5)


@pytest.mark.slow
def test_bfloat16_is_close_and_keeps_logits_and_gradients_in_float32(example):
    config, params, batch, expected = example
    outputs = golden.outputs(config, params, batch, ExecutionPlan(dtype="bfloat16"))
    assert outputs["hidden"].dtype == jnp.bfloat16
    assert outputs["mlm_logits"].dtype == outputs["nsp_logits"].dtype == np.float32
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(outputs["gradients"]))
    errors = golden.largest_errors(config, outputs, expected, batch)
    # bfloat16 keeps 8 bits: 2^-8 of values up to 4, after two layers of some sums each.
    assert errors["loss"] < 0.02, errors
    assert max(errors[name] for name in ("hidden", "pooled", "mlm_logits")) < 0.1, errors
    assert errors["gradients"] < 0.1, errors


def test_vocabulary_padding_is_never_predicted_whatever_its_weights(example):
    config, params, batch, _ = example
    expected = golden.outputs(config, params, batch)
    params = jax.tree.map(np.array, params)
    params["encoder"]["embeddings"]["token_embedding"]["embedding"][config.vocab_size :] = 1e3
    params["mlm"]["bias"][config.vocab_size :] = 1e6
    outputs = golden.outputs(config, params, batch)
    assert outputs["mlm_logits"].argmax(-1).max() < config.vocab_size
    assert np.all(jax.nn.softmax(outputs["mlm_logits"])[..., config.vocab_size :] == 0)
    jax.tree.map(np.testing.assert_array_equal, outputs, expected)
    assert not outputs["gradients"]["mlm"]["bias"][config.vocab_size :].any()
    embedding = outputs["gradients"]["encoder"]["embeddings"]["token_embedding"]["embedding"]
    assert not embedding[config.vocab_size :].any()


def test_all_layers_end_with_the_output(example):
    config, params, batch, _ = example
    all_hidden_states = jax.jit(
        functools.partial(Encoder(config).apply, method="all_hidden_states")
    )
    outputs = np.asarray(all_hidden_states({"params": params["encoder"]}, batch))
    assert outputs.shape == (1 + config.num_layers, *batch["tokens"].shape, config.hidden_size)
    assert_close(outputs[-1], encode(config, params, batch), 1e-6)


def assert_gradients_equal_autodiff(function, plain, *inputs):
    """Compares `function` in float32 with `plain` in float64: values and gradients."""
    weights = np.random.default_rng(1).normal(size=jax.eval_shape(function, *inputs).shape)
    arguments = tuple(range(len(inputs)))

    def weighted(function):
        return jax.value_and_grad(lambda *inputs: jnp.sum(weights * function(*inputs)), arguments)

    result = jax.jit(weighted(function))(*[np.asarray(x, np.float32) for x in inputs])
    with jax.enable_x64(True):
        expected = jax.jit(weighted(plain))(*[np.asarray(x, np.float64) for x in inputs])
        assert expected[0].dtype == np.float64
        expected = jax.tree.map(np.asarray, expected)
    assert_close(result, expected, 2e-5)


@pytest.mark.parametrize(("name", "approximate"), [("gelu", False), ("gelu_tanh", True)])
def test_gelu_and_its_gradient_equal_float64(name, approximate):
    plain = functools.partial(jax.nn.gelu, approximate=approximate)
    function = functools.partial(layers.activate, name)
    assert_gradients_equal_autodiff(function, plain, np.linspace(-6, 6, 101))


def saved_arrays(function, *inputs):
    """Returns the shape and dtype of each array that the gradient of `function` saves."""
    _, backward = jax.vjp(function, *inputs)
    return [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(backward)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_gelu_saves_only_its_input(name, dtype):
    function = functools.partial(layers.activate, name)
    x = jnp.ones((3, 5), dtype)
    assert saved_arrays(function, x) == [((3, 5), dtype)]
    assert jax.vjp(function, x)[1](x)[0].dtype == dtype


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "num_probabilities", "num_head_arrays"),
    # none: query, key and value; dots: the context; full: only the inputs.
    [("none", 1, 3), ("dots", 1, 1), ("full", 0, 0)],
)
@pytest.mark.parametrize("rate", [None, 0.1])
def test_attention_saves_what_remat_says(rate, remat, num_probabilities, num_head_arrays):
    dropout = rate and attention_dropout(Dropout(jax.random.key(0), jnp.arange(2), rate), 3, 7)

    def layer(x, matrix):
        mask = AttentionMask(jnp.ones((2, 7), jnp.int32))
        return jnp.tanh(attention(x, x, x, mask, num_heads=3, dropout=dropout) @ matrix)

    layer = ExecutionPlan(remat=remat).with_remat(layer, in_loop=True)
    shapes = [shape for shape, _ in saved_arrays(layer, jnp.ones((2, 7, 12)), jnp.ones((12, 5)))]
    assert shapes.count((2, 3, 7, 7)) == num_probabilities
    assert shapes.count((2, 3, 7, 4)) == num_head_arrays


def test_gelu_of_every_bfloat16_is_within_its_rounding():
    bits = np.arange(2**16, dtype=np.uint16)
    x = jax.lax.bitcast_convert_type(jnp.array(bits), jnp.bfloat16)
    x = x[jnp.isfinite(x.astype(jnp.float32))]
    value, derivative = jax.vmap(jax.value_and_grad(functools.partial(layers.gelu, "gelu")))(x)
    exact = np.asarray(x, np.float64)
    phi = scipy.stats.norm.pdf(exact)
    for actual, expected, slope in (
        (value, exact * scipy.stats.norm.cdf(exact), np.minimum(np.abs(exact), 4)),
        (derivative, scipy.stats.norm.cdf(exact) + exact * phi, 4),
    ):
        assert np.isfinite(actual).all()
        rounding = np.abs(expected) * 2**-8
        error = np.abs(np.asarray(actual, np.float64) - expected)
        assert np.max(error - rounding - 2**-15 * slope) < 1e-37  # Subnormals are flushed.


@pytest.mark.parametrize("offset", [0, 3, 30])
def test_layer_norm_of_bfloat16_is_within_its_rounding(offset):
    x = np.random.default_rng(0).normal(size=(64, 768)) + offset
    x = jnp.asarray(x, jnp.bfloat16)
    actual = layers.layer_norm(x, jnp.ones(768), jnp.zeros(768), 1e-12, jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    expected = (exact - exact.mean(-1, keepdims=True)) / exact.std(-1, keepdims=True)
    error = np.abs(np.asarray(actual, np.float64) - expected)
    assert np.max(error - 2**-8 * np.abs(expected)) < 2**-12


@pytest.mark.parametrize("offset", [0, 30])
def test_layer_norm_and_its_gradients_equal_float64(offset):
    def plain(x, scale, bias):
        centered = x - jnp.mean(x, -1, keepdims=True)
        variance = jnp.mean(centered**2, -1, keepdims=True)
        return centered / jnp.sqrt(variance + 1e-12) * scale + bias

    rng = np.random.default_rng(0)
    x = (offset + 3 * rng.normal(size=(4, 5, 16))).astype(np.float32)  # Exact in both.
    scale, bias = rng.normal(size=(2, 16)).astype(np.float32)
    function = functools.partial(layers.layer_norm, epsilon=1e-12, dtype="float32")
    assert_gradients_equal_autodiff(function, plain, x, scale, bias)


@pytest.mark.parametrize("dropout_rate", [0.0, 0.5])
def test_attention_and_its_gradients_equal_float64(dropout_rate):
    sequence_ids = np.array([[1, 1, 1, 2, 2, 2, 0], [1] * 7])
    settings = Dropout(jax.random.key(3), np.arange(2), dropout_rate)
    dropout = jax.jit(lambda: attention_dropout(settings, 3, 7))()
    kept = np.asarray(jax.jit(dropout.apply)(np.ones((2, 3, 7, 7), np.float32)))

    def plain(query, keys, value):
        query, keys, value = (x.reshape(2, 7, 3, 4) for x in (query, keys, value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, keys) / 2.0  # sqrt(head_dim)
        same = sequence_ids[:, None, :, None] == sequence_ids[:, None, None, :]
        weights = jax.nn.softmax(jnp.where(same, scores, -jnp.inf))
        return jnp.einsum("bhqk,bkhd->bqhd", weights * kept, value).reshape(2, 7, 12)

    def function(query, keys, value):
        mask = AttentionMask(sequence_ids)
        return attention(query, keys, value, mask, num_heads=3, dropout=dropout)

    inputs = np.random.default_rng(0).normal(size=(3, 2, 7, 12)).astype(np.float32)
    assert_gradients_equal_autodiff(function, plain, *inputs)


@pytest.mark.parametrize("changed", [0, 1, 2, 3], ids=["padding", "first", "second", "third"])
def test_tokens_of_one_sequence_leave_the_others_bit_identical(example, changed):
    config, params, _, _ = example
    sequence_ids = np.repeat([1, 2, 3, 0], [7, 5, 4, 4])[None]
    position_ids = np.concatenate([np.arange(n) for n in (7, 5, 4, 4)])[None]
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, config.vocab_size, sequence_ids.shape)
    segment_ids = rng.integers(0, 2, sequence_ids.shape)
    changed_tokens = np.where(sequence_ids == changed, (tokens + 1) % config.vocab_size, tokens)

    batch = {
        "tokens": tokens,
        "segment_ids": segment_ids,
        "position_ids": position_ids,
        "sequence_ids": sequence_ids,
    }
    before, after = (
        np.asarray(encode(config, params, batch | {"tokens": each}))
        for each in (tokens, changed_tokens)
    )
    same = sequence_ids != changed
    np.testing.assert_array_equal(before[same], after[same])
    assert np.all(np.any(before[~same] != after[~same], axis=-1))


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [False, True])
def test_every_dropout_place_of_every_layer_has_its_own_key(example, monkeypatch, scan_layers):
    config, params, batch, _ = example
    used = []

    def record(kind):
        """Records the random words of each use of a kind of dropout."""
        apply = kind.apply

        def recorded(self, x):
            words = self.words[0]
            jax.debug.callback(lambda words: used.append(words.tobytes()), words)
            return apply(self, x)

        monkeypatch.setattr(kind, "apply", recorded)

    record(HiddenDropout)
    record(AttentionDropout)
    plan = ExecutionPlan(scans_layers=scan_layers)
    sums_of(config, plan, params, batch, jax.random.key(0))
    jax.effects_barrier()
    # Embeddings; then attention probabilities and two sublayers in each layer.
    assert len(used) == len(set(used)) == 1 + 3 * config.num_layers
    used.clear()
    sums_of(config, plan, params, batch)
    jax.effects_barrier()
    assert not used
