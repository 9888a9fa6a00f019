"""Inputs that are equal to one of train, and nearly equal ones by their exact similarity."""

from types import SimpleNamespace

import numpy as np
import pytest

from bert_jax.data.features import ModelInput
from bert_jax.model import heads
from bert_jax.tasks import duplicates
from bert_jax.tasks.duplicates import count_duplicates, find_near


def shingles(tokens):
    tokens = tokens.tolist()
    return {tuple(tokens[start : start + 5]) for start in range(max(1, len(tokens) - 4))}


def jaccard(one, other):
    return len(one & other) / len(one | other)


def changed(rng, tokens, count):
    """Returns a copy of which some tokens are replaced, and perhaps some are cut off."""
    tokens = tokens.copy()
    tokens[rng.integers(len(tokens), size=count)] = rng.integers(50, size=count)
    return tokens[rng.integers(2) :] if len(tokens) > 1 else tokens


@pytest.mark.parametrize("similarity", [0.5, 0.8, 1.0])
def test_near_inputs_are_those_with_the_similarity(similarity):
    rng = np.random.default_rng(0)
    # Few different tokens, so that unrelated inputs have shingles in common; some are short.
    others = [rng.integers(3, size=rng.integers(1, 60), dtype=np.int32) for _ in range(60)]
    inputs = [changed(rng, others[n], rng.integers(3)) for n in rng.integers(60, size=100)]
    inputs += [rng.integers(3, size=rng.integers(1, 60), dtype=np.int32) for _ in range(20)]
    sets = [list(map(shingles, each)) for each in (inputs, others)]
    expected = [any(jaccard(each, other) >= similarity for other in sets[1]) for each in sets[0]]
    assert find_near(inputs, others, similarity).tolist() == expected
    assert 0 < sum(expected) < len(expected)


def test_counts_of_each_split(monkeypatch):
    rng = np.random.default_rng(0)
    train = [rng.integers(1000, size=60, dtype=np.int32) for _ in range(5)]
    near = train[2].copy()
    near[0] = 1  # One of 56 shingles differs.
    far = rng.integers(1000, size=60, dtype=np.int32)

    def split(name, *inputs):
        features = [ModelInput((tokens,), (len(tokens),)) for tokens in inputs]
        return SimpleNamespace(name=name, features=features)

    task = SimpleNamespace(
        head=heads.CLASSIFICATION,
        train=split("train", *train).features,
        splits=[split("dev", train[0], near, near, far, train[0]), split("test", far)],
    )
    expected = [
        {"split": "dev", "equal": 2, "near": 2, "inputs": 5},
        {"split": "test", "equal": 0, "near": 0, "inputs": 1},
    ]
    assert count_duplicates(task) == expected
    monkeypatch.setattr(duplicates, "MAX_TOKENS", 400)
    assert [each["near"] for each in count_duplicates(task)] == [None, 0]
    task.head = heads.EMBEDDING
    assert count_duplicates(task) == []


def test_forms_with_too_many_pairs_are_not_compared(monkeypatch):
    form = np.arange(60, dtype=np.int32)
    filled = [np.append(form, np.int32([100 + n, 100 + n])) for n in range(20)]
    assert find_near(filled[:10], filled[10:]).all()
    monkeypatch.setattr(duplicates, "MAX_PAIRS", 50)
    assert find_near(filled[:10], filled[10:]) is None
