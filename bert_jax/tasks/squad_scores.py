"""SQuAD's official scores, versions 1.1 and 2.0, as fractions (the scripts print percent)."""

import functools
import itertools
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

Gold = Mapping[str, Sequence[str]]
"""Question id -> the texts of its answers; in 2.0 empty for a question without an answer."""
Texts = Mapping[str, str]  # Question id -> the predicted text.
Odds = Mapping[str, float]  # Question id -> the score of "no answer" minus the score of this text.


def normalize(text: str) -> str:
    """Converts to lower case, removes ASCII punctuation and articles, and collapses spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def exact_match(prediction: str, gold: str) -> float:
    """Returns 1.0 if both are equal when normalized, else 0.0."""
    return float(normalize(prediction) == normalize(gold))


def f1(prediction: str, gold: str, neither: float = 0.0) -> float:
    """Returns the F1 of words; `neither` if both texts have none (0 in version 1.1, 1 in 2.0)."""
    predicted, expected = normalize(prediction).split(), normalize(gold).split()
    common = (Counter(predicted) & Counter(expected)).total()
    if not common:
        return 0.0 if predicted or expected else neither
    precision, recall = common / len(predicted), common / len(expected)
    return 2 * precision * recall / (precision + recall)


f1_v2 = functools.partial(f1, neither=1.0)


def _best(score: Callable[[str, str], float], prediction: str, answers: Sequence[str]) -> float:
    return max(score(prediction, answer) for answer in answers)


def _nonempty(answers: Sequence[str]) -> Sequence[str]:
    """Returns the answers that are not empty when normalized, or one empty answer."""
    return [answer for answer in answers if normalize(answer)] or [""]


def evaluate_v1(gold: Gold, predictions: Texts) -> dict[str, float]:
    """Computes the scores of evaluate-v1.1: the best over the answers, averaged over questions."""
    scores = scores_by_question(gold, predictions, null_answers=False)
    return {name: fmean(values.values()) for name, values in scores.items()}


def scores_by_question(
    gold: Gold, predictions: Texts, null_answers: bool
) -> dict[str, dict[str, float]]:
    """Returns `exact` and `f1` of each question: the best over its answers.

    With `null_answers` as in version 2.0, where an empty prediction means that there is none.
    """
    return {
        name: {
            id_: _best(score, predictions[id_], _nonempty(answers) if null_answers else answers)
            for id_, answers in gold.items()
        }
        for name, score in (("exact", exact_match), ("f1", f1_v2 if null_answers else f1))
    }


def evaluate_v2(
    gold: Gold, predictions: Texts, null_odds: Odds, threshold: float = math.inf
) -> dict[str, float]:
    """Computes the scores of evaluate-v2.0: overall, by type, and at the best thresholds.

    Null odds above `threshold` (`--na-prob-thresh`) change the prediction to no answer.
    """
    result, best = {}, {}
    for name, raw in scores_by_question(gold, predictions, null_answers=True).items():
        scores = raw | {id_: float(not gold[id_]) for id_ in gold if null_odds[id_] > threshold}
        for prefix, has_answer in (("", (True, False)), ("HasAns_", (True,)), ("NoAns_", (False,))):
            if values := [value for id_, value in scores.items() if bool(gold[id_]) in has_answer]:
                result[prefix + name] = fmean(values)
        best_values = best_threshold(gold, predictions, raw, null_odds)
        best[f"best_{name}"], best[f"best_{name}_thresh"] = best_values
    return result | best


def best_threshold(
    gold: Gold, predictions: Texts, scores: Mapping[str, float], null_odds: Odds
) -> tuple[float, float]:
    """Returns the best mean of `scores` over thresholds on `null_odds`, and that threshold.

    The official search starts with no question answered, at threshold 0, and then answers one more
    question at a time, in ascending order of the odds.
    """
    ids = sorted(null_odds, key=null_odds.__getitem__)
    gains = (scores[id_] if gold[id_] else -bool(predictions[id_]) for id_ in ids)
    totals = list(itertools.accumulate(gains, initial=sum(not gold[id_] for id_ in gold)))
    best = max(totals)
    return best / len(gold), [0.0, *map(null_odds.get, ids)][totals.index(best)]


def best_null_threshold(gold: Gold, predictions: Texts, null_odds: Odds) -> float:
    """Returns the threshold on `null_odds` that gives the best F1 when applied to predictions.

    Differs from `best_threshold` where its result cannot be applied: that is 0 if no question is to
    be answered, and may answer only some of the questions with equal odds.
    """
    gains = Counter()
    for id_, odds in null_odds.items():
        answers = _nonempty(gold[id_])
        gains[odds] += _best(f1_v2, predictions[id_], answers) - _best(f1_v2, "", answers)
    thresholds = sorted(gains)
    totals = list(itertools.accumulate(map(gains.get, thresholds), initial=0.0))
    return [thresholds[0] - 1, *thresholds][totals.index(max(totals))]
