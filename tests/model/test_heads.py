"""Collapsed predictions are detected for each head; an output depends only on its own sequence."""

import functools

import jax
import numpy as np
import pytest

from bert_jax.data.features import ModelInput, RowShape, unpack_rows
from bert_jax.model.heads import CLASSIFICATION, HEADS, REGRESSION, TAGGING, make_model
from tests.helpers.models import random_params, small_model_config


@pytest.mark.parametrize(
    ("kind", "collapsed", "different"),
    [
        ("classification", [[0, 1], [2, 3]], [[0, 1], [3, 2]]),
        ("regression", [[0.5], [0.5]], [[0.5], [0.7]]),
        ("multiple_choice", [[0.5], [0.5]], [[0.5], [0.7]]),
        ("embedding", [[[0, 1]], [[0, 1]]], [[[0, 1]], [[1, 0]]]),
        ("tagging", [[[1, 0], [0, 1], [0, 1], [1, 0]]], [[[1, 0], [0, 1], [1, 0], [1, 0]]]),
        ("span", [[[1, 1], [0, 0]]], [[[1, 0], [0, 1]]]),
    ],
)
def test_collapse_is_detected_for_each_head(kind, collapsed, different):
    for outputs, expected in ((collapsed, True), (different, False)):
        outputs = [np.array(output, float) for output in outputs]
        features = [ModelInput((), ())] * len(outputs)
        assert HEADS[kind].is_collapsed(features, outputs) == expected


def test_collapse_is_at_the_cls_of_the_model():
    """Which is the first token, or the last one."""
    first, last = np.eye(4)[0], np.eye(4)[3]
    spans, is_collapsed = [np.stack([first, first], axis=1)], HEADS["span"].is_collapsed
    assert is_collapsed([], spans) and not is_collapsed([], spans, True)
    spans = [np.stack([last, last], axis=1), np.ones((1, 2))]  # Of four tokens, and of one.
    assert is_collapsed([], spans, True) and not is_collapsed([], spans)
    tags = [np.eye(2)[[0, 0, 1, 1]]]  # Two words, <sep> and <cls>.
    assert TAGGING.is_collapsed([ModelInput((), ())], tags, True)
    assert not TAGGING.is_collapsed([ModelInput((), ())], tags)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_collapse_of_values_is_relative_to_the_scale_of_the_labels(scale):
    labels = np.array([1990.0, 1991.0, 1993.0]) * scale
    features = [ModelInput((), (), label) for label in labels]
    constant = labels.mean() + np.array([[0], [2e-3], [1e-3]]) * scale
    assert REGRESSION.is_collapsed(features, list(constant))
    assert not REGRESSION.is_collapsed(features, list(labels[:, None]))
    # A small part of the labels' deviation is as bad as none.
    assert REGRESSION.is_collapsed(features, list(labels.mean() + 0.04 * labels[:, None]))
    assert not REGRESSION.is_collapsed(features, list(labels.mean() + 0.06 * labels[:, None]))


def test_collapse_of_tags_considers_labeled_positions_only():
    """[CLS], a word, an inner piece, another word, [SEP]."""
    tags = [np.eye(3)[numbers] for numbers in ([1, 0, 2, 0, 1], [1, 0, 2, 1, 1])]
    label = np.array([-1, 0, -1, 0, -1])
    assert [TAGGING.is_collapsed([ModelInput((), (), label)], [output]) for output in tags] == [
        True,
        False,
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "causal", "lstm_size"),
    [(CLASSIFICATION, True, 0), (CLASSIFICATION, True, 6), (TAGGING, False, 6)],
)
def test_output_depends_on_every_token_of_its_sequence_and_on_no_other(head, causal, lstm_size):
    config = small_model_config(50, initializer_range=0.3, causal=causal)
    settings = {"task": head.name, "labels": ["a", "b", "c"], "lstm_size": lstm_size}
    model = make_model(config, settings)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(5, 50, length).astype(np.int32) for length in (5, 3, 6)]
    shape = RowShape(16, 3, head.label_layout, 0)

    def packed(first):
        return [ModelInput((tokens,), (len(tokens),)) for tokens in (first, *sequences[1:])]

    changed = [sequences[0] + (np.arange(5) == position) for position in range(5)]
    together = [packed(first) for first in (sequences[0], *changed)]
    rows = shape.build([*together, *([feature] for feature in together[0])], 9)
    batch = rows | unpack_rows(rows, causal)
    params = random_params(model, batch, std=0.3)
    outputs = np.asarray(jax.jit(model.apply)({"params": params}, batch))
    if head is CLASSIFICATION:
        first, others, alone = outputs[:6, :1], outputs[:6, 1:], outputs[6:, 0]
    else:
        first, others, alone = outputs[:6, :5], outputs[:6, 5:14], outputs[6:]
        alone = np.concatenate([alone[row, :length] for row, length in enumerate((5, 3, 6))])
    assert (np.abs(first[1:] - first[0]).max(axis=-1) > 1e-5).all()  # At each of its positions.
    np.testing.assert_allclose(others, np.broadcast_to(others[0], others.shape), atol=1e-6)
    together = np.concatenate([first[0], others[0]])
    np.testing.assert_allclose(together, alone, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "head", "classifier_rate", "places"),
    [
        ("bert", "classification", None, 1),
        ("albert", "classification", 0.2, 1),
        ("roberta", "classification", None, 2),
        ("electra", "regression", 0.1, 2),
        # transformers pools it with the encoder's own pooler.
        ("roberta", "multiple_choice", None, 1),
    ],
)
def test_dropout_is_before_the_head_and_in_some_families_before_the_pooler(
    family, head, classifier_rate, places
):
    size, rate = 64, 0.3
    config = small_model_config(
        20,
        hidden_size=size,
        num_layers=1,
        num_heads=2,
        family=family,
        classifier_dropout_rate=classifier_rate,
    )
    model = make_model(config, {"task": head, "labels": ["label"] * size})
    tokens = np.random.default_rng(0).integers(5, 20, (64, 4))
    bounds = np.broadcast_to(np.array([0, 4, 4], np.int32), (64, 1, 3))
    batch = unpack_rows({"tokens": tokens.astype(np.int32), "sequence_bounds": bounds})
    params = jax.jit(model.init)(jax.random.key(0), batch)["params"]
    # Pooler and head only pass on what is not dropped: elsewhere, hidden states are never 0.
    identity = {"kernel": np.eye(size, dtype=np.float32), "bias": np.zeros(size, np.float32)}
    params |= {"head": identity, "encoder": params["encoder"] | {"pooler": {"dense": identity}}}
    apply = jax.jit(functools.partial(model.apply, dropout=rate))
    outputs = apply({"params": params}, batch, rngs={"dropout": jax.random.key(1)})
    kept = (1 - (rate if classifier_rate is None else classifier_rate)) ** places
    sigma = np.sqrt(kept * (1 - kept) / outputs.size)
    assert abs(np.mean(np.asarray(outputs) != 0) - kept) < 4 * sigma
