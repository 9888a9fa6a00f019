"""A run that predicts one class for everything is recognized, whatever its head."""

import numpy as np
import pytest

from bert_jax.data.features import Feature
from bert_jax.model.heads import HEADS, REGRESSION, TAGGING


@pytest.mark.parametrize(
    ("kind", "collapsed", "different"),
    [
        ("classification", [[0, 1], [2, 3]], [[0, 1], [3, 2]]),
        ("regression", [[0.5], [0.5]], [[0.5], [0.7]]),
        ("multiple_choice", [[0.5], [0.5]], [[0.5], [0.7]]),
        ("embedding", [[[0, 1]], [[0, 1]]], [[[0, 1]], [[1, 0]]]),
        (
            "tagging",
            [[[1, 0], [0, 1], [0, 1], [1, 0]]],
            [[[1, 0], [0, 1], [1, 0], [1, 0]]],
        ),
        ("span", [[[1, 1], [0, 0]]], [[[1, 0], [0, 1]]]),
    ],
)
def test_collapse_is_detected_for_each_head(kind, collapsed, different):
    for outputs, expected in ((collapsed, True), (different, False)):
        outputs = [np.array(output, float) for output in outputs]
        features = [Feature((), ())] * len(outputs)
        assert HEADS[kind].is_collapsed(features, outputs) == expected


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_collapse_of_values_is_relative_to_the_scale_of_the_labels(scale):
    labels = np.array([1990.0, 1991.0, 1993.0]) * scale
    features = [Feature((), (), label) for label in labels]
    constant = labels.mean() + np.array([[0], [2e-3], [1e-3]]) * scale
    assert REGRESSION.is_collapsed(features, list(constant))
    assert not REGRESSION.is_collapsed(features, list(labels[:, None]))


def test_collapse_of_tags_considers_labeled_positions_only():
    """[CLS], a word, an inner piece, another word, [SEP]."""
    tags = [np.eye(3)[numbers] for numbers in ([1, 0, 2, 0, 1], [1, 0, 2, 1, 1])]
    label = np.array([-1, 0, -1, 0, -1])
    assert [TAGGING.is_collapsed([Feature((), (), label)], [output]) for output in tags] == [
        True,
        False,
    ]
