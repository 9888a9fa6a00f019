"""SQuAD's official scores, of versions 1.1 and 2.0, as fractions (the scripts print percent)."""

import collections
import itertools
import math
import re
import string
from collections.abc import Mapping, Sequence

ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

Gold = Mapping[str, Sequence[str]]
"""Question id -> the texts of its answers; in 2.0 none for a question that has no answer."""


def normalize(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def exact_match(prediction: str, gold: str) -> float:
    return float(normalize(prediction) == normalize(gold))


def f1(prediction: str, gold: str) -> float:
    """Of the words that both have; 1.1 gives 0 if neither has any."""
    predicted, expected = normalize(prediction).split(), normalize(gold).split()
    common = (collections.Counter(predicted) & collections.Counter(expected)).total()
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(expected)
    return 2 * precision * recall / (precision + recall)


def f1_or_none(prediction: str, gold: str) -> float:
    """As `f1`, but 2.0 gives 1 if neither has a word."""
    if not normalize(prediction) and not normalize(gold):
        return 1.0
    return f1(prediction, gold)


def evaluate_v1(gold: Gold, predictions: Mapping[str, str]) -> dict[str, float]:
    """Mean over the questions of the best over their answers."""
    result = {}
    for name, score in (("exact", exact_match), ("f1", f1)):
        best = [
            max(score(predictions[id_], answer) for answer in answers)
            for id_, answers in gold.items()
        ]
        result[name] = math.fsum(best) / len(best)
    return result


def evaluate_v2(
    gold: Gold,
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float],
    threshold: float = math.inf,
) -> dict[str, float]:
    """What evaluate-v2.0 prints: overall, by type, and at the best thresholds.

    Args:
      null_odds: of each question, greater where "no answer" is likelier.
      threshold: above it a question counts as predicted to have no answer (`--na-prob-thresh`).
    """
    result, best = {}, {}
    for name, score in (("exact", exact_match), ("f1", f1_or_none)):
        raw = {
            id_: max(score(predictions[id_], answer) for answer in _real(answers))
            for id_, answers in gold.items()
        }
        scores = {
            id_: float(not gold[id_]) if null_odds[id_] > threshold else value
            for id_, value in raw.items()
        }
        for kind, answered in (("", None), ("HasAns_", True), ("NoAns_", False)):
            chosen = [value for id_, value in scores.items() if answered in (None, bool(gold[id_]))]
            if chosen:
                result[kind + name] = math.fsum(chosen) / len(chosen)
        best[f"best_{name}"], best[f"best_{name}_thresh"] = best_threshold(
            gold, predictions, raw, null_odds
        )
    return result | best


def best_threshold(
    gold: Gold,
    predictions: Mapping[str, str],
    scores: Mapping[str, float],
    null_odds: Mapping[str, float],
) -> tuple[float, float]:
    """The best mean of `scores` that a threshold on `null_odds` gives, and that threshold.

    As the official search: it starts from no answer anywhere, at threshold 0, and then answers one
    question more at a time, the least odds first.
    """
    total = best = sum(not answers for answers in gold.values())
    threshold = 0.0
    for id_ in sorted(null_odds, key=null_odds.__getitem__):
        total += scores[id_] if gold[id_] else -bool(predictions[id_])
        if total > best:
            best, threshold = total, null_odds[id_]
    return best / len(gold), threshold


def deciding_threshold(
    gold: Gold, predictions: Mapping[str, str], null_odds: Mapping[str, float]
) -> float:
    """The threshold with which "no answer" where the odds are above it gives the best F1.

    `best_threshold` gives the same, but for what cannot decide: it gives 0 for no answer anywhere,
    and may answer only some of the questions of the same odds.
    """
    order = sorted(null_odds, key=null_odds.__getitem__)
    threshold, total, best = null_odds[order[0]] - 1, 0.0, 0.0
    for id_, following in itertools.zip_longest(order, order[1:]):
        answers = _real(gold[id_])
        total += max(f1_or_none(predictions[id_], answer) for answer in answers)
        total -= max(f1_or_none("", answer) for answer in answers)
        is_last_of_its_odds = following is None or null_odds[following] > null_odds[id_]
        if is_last_of_its_odds and total > best:
            threshold, best = null_odds[id_], total
    return threshold


def _real(answers: Sequence[str]) -> Sequence[str]:
    """The answers that leave something when normalized; if there are none, the empty one."""
    return [answer for answer in answers if normalize(answer)] or [""]
