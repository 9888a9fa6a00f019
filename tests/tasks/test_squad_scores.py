"""The official rules on cases that are easy to get wrong; tests/parity has 1,000 random ones."""

import math
import random

import pytest

from bert_jax.tasks.squad_scores import (
    best_null_threshold,
    best_threshold,
    evaluate_v1,
    evaluate_v2,
    normalize,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat's\tanthem, an A.", "cats anthem"),
        ("a.m.", "am"),  # Punctuation is removed first, and the rest is no article.
        ("the-end", "theend"),
        (
            "\u00a0Caf\u00c9 \u2014 50\u00a0%",
            "caf\u00e9 \u2014 50",
        ),  # Only ASCII punctuation is removed.
        ("THE", ""),
    ],
)
def test_normalization(text, expected):
    assert normalize(text) == expected


@pytest.mark.parametrize(
    ("prediction", "gold", "exact", "f1"),
    [
        ("the cat sat", ["Cat"], 0, 2 / 3),
        ("cat cat", ["cat"], 0, 2 / 3),  # Words are counted, not looked up.
        ("cat", ["dog", "The cat!"], 1, 1),  # The best over the answers.
        ("b c", ["b d", "c b"], 0, 1),
        ("the", ["a"], 1, 0),  # 1.1 only: equal, but no word in common.
        ("", ["cat"], 0, 0),
    ],
)
def test_version_1_scores(prediction, gold, exact, f1):
    found = evaluate_v1({"q": gold}, {"q": prediction})
    assert found == pytest.approx({"exact": exact, "f1": f1})


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        ("", [], 1),
        ("the", [], 1),
        ("cat", [], 0),
        ("", ["cat"], 0),
        ("", ["the"], 1),  # An answer that is empty when normalized counts as none,
        ("a", ["the", "cat"], 0),  # unless there is another one.
    ],
)
def test_version_2_scores(prediction, gold, score):
    found = evaluate_v2({"q": gold}, {"q": prediction}, {"q": 0.0})
    assert found["exact"] == found["f1"] == score
    kind = "HasAns" if gold else "NoAns"
    assert found[f"{kind}_exact"] == found[f"{kind}_f1"] == score
    assert not any(name.startswith("NoAns" if gold else "HasAns") for name in found)


def test_scores_by_type_and_at_the_best_threshold():
    gold = {"1": ["cat"], "2": ["dog"], "3": [], "4": []}
    predictions = {"1": "cat", "2": "dog bird", "3": "fish", "4": "cow"}
    odds = {"1": -2.0, "2": 1.0, "3": 0.5, "4": 3.0}
    found = evaluate_v2(gold, predictions, odds, threshold=2.0)
    assert found == pytest.approx(
        {
            "exact": 2 / 4,
            "f1": (1 + 2 / 3 + 0 + 1) / 4,
            "HasAns_exact": 1 / 2,
            "HasAns_f1": (1 + 2 / 3) / 2,
            "NoAns_exact": 1 / 2,
            "NoAns_f1": 1 / 2,
            "best_exact": 3 / 4,
            "best_exact_thresh": -2.0,
            "best_f1": 3 / 4,
            "best_f1_thresh": -2.0,
        }
    )


def test_best_threshold_is_0_if_no_answers_at_all_are_best():
    scores = {"1": 0.0, "2": 0.0}
    found = best_threshold({"1": ["x"], "2": []}, {"1": "y", "2": "z"}, scores, {"1": 1, "2": -1})
    assert found == (0.5, 0.0)


def f1_with(threshold, gold, predictions, odds):
    texts = {id_: "" if odds[id_] > threshold else text for id_, text in predictions.items()}
    return evaluate_v2(gold, texts, odds)["f1"]


def test_deciding_threshold_gives_the_best_f1():
    rng = random.Random(0)
    for _ in range(300):
        ids = range(rng.randint(1, 6))
        gold = {id_: rng.choice([[], ["cat"], ["cat dog"], ["the"]]) for id_ in ids}
        predictions = {id_: rng.choice(["cat", "bird", "the", ""]) for id_ in ids}
        odds = {id_: rng.randint(-9, -6) + rng.choice([0, rng.random()]) for id_ in ids}
        found, *others = (
            f1_with(threshold, gold, predictions, odds)
            for threshold in [best_null_threshold(gold, predictions, odds), -10, *odds.values()]
        )
        assert found == pytest.approx(max(others))


def test_deciding_threshold_is_the_official_one_if_that_can_be_applied():
    gold, predictions = {1: ["cat"], 2: [], 3: []}, {1: "cat", 2: "dog", 3: "bird"}
    for odds, official, deciding, f1 in [
        ({1: -3, 2: -2, 3: 1}, -3, -3, 1),
        ({1: -2, 2: -3, 3: -4}, 0, -5, 2 / 3),  # No answers at all are best; 0 answers all.
        ({1: -3, 2: -3, 3: 1}, -3, -4, 1),  # No threshold separates 1 and 2.
    ]:
        found = evaluate_v2(gold, predictions, odds)
        assert (found["best_f1_thresh"], found["best_f1"]) == pytest.approx((official, f1))
        assert best_null_threshold(gold, predictions, odds) == deciding


def test_infinite_threshold_answers_every_question():
    gold, predictions = {"1": ["x"]}, {"1": "x"}
    assert evaluate_v2(gold, predictions, {"1": math.inf})["f1"] == 1
