"""Entity scores against seqeval, whose default mode equals the script of the CoNLL shared tasks."""

import functools
import random

import pytest

from bert_jax.tasks.tagging_scores import entity_scores, find_entities, find_strict_entities

SCHEMES = {"iob1": "IOB1", "iob2": "IOB2", "bioes": "IOBES"}


def random_case(number: int, prefixes: str):
    """A few sentences of random tags, most of them illegal, and predictions that share some."""
    rng = random.Random(number)
    types = rng.choice([["A"], ["A", "B"], ["PER", "X-Y", "B"]])
    tags = ["O", *(f"{prefix}-{each}" for prefix in prefixes for each in types)]
    weights = [rng.random() ** 2 + 0.01 for _ in tags]
    expected = [rng.choices(tags, weights, k=rng.randint(1, 12)) for _ in range(rng.randint(1, 4))]
    kept = rng.random()
    predicted = [
        [tag if rng.random() < kept else rng.choice(tags) for tag in sentence]
        for sentence in expected
    ]
    return predicted, expected


def assert_equal(ours, predicted, expected, **mode):
    from seqeval.metrics import classification_report

    theirs = classification_report(expected, predicted, output_dict=True, zero_division=0, **mode)
    for ending, name in (("", "micro avg"), *((f"/{each}", each) for each in theirs)):
        if ending.endswith(" avg"):
            continue
        for metric, key in (("precision", "precision"), ("recall", "recall"), ("f1", "f1-score")):
            assert ours[f"{metric}{ending}"] == pytest.approx(theirs[name][key], abs=1e-12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prefixes", ["BI", "BIES"])
def test_conlleval_rules_equal_the_default_mode_of_seqeval_in_1000_cases(prefixes):
    for number in range(1000):
        predicted, expected = random_case(number, prefixes)
        if any(map(find_entities, predicted + expected)):
            assert_equal(entity_scores(predicted, expected), predicted, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_strict_scores_equal_seqeval_in_1000_cases(scheme):
    import seqeval.scheme

    find = functools.partial(find_strict_entities, scheme=scheme)
    mode = {"mode": "strict", "scheme": getattr(seqeval.scheme, SCHEMES[scheme])}
    for number in range(1000):
        predicted, expected = random_case(number, "BIES" if scheme == "bioes" else "BI")
        if any(map(find, predicted + expected)):  # Without any, seqeval raises.
            assert_equal(entity_scores(predicted, expected, find), predicted, expected, **mode)
