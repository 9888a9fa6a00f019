"""The toy language's probabilities are those of its generator."""

import itertools
import math
import random

import pytest
import toy_language


def test_probabilities_of_plain_sentences_sum_to_that_of_leaving_all_else_out():
    phrases = [
        (subject, [article, noun])
        for subject, nouns in toy_language.NOUNS.items()
        for article in ("the", "some" if subject[1] else "one")
        for noun in nouns
    ]
    total = 0.0
    for (subject, words), (_, others) in itertools.product(phrases[::3], phrases[::16]):
        for verb in toy_language.VERBS[subject]:
            total += math.exp(toy_language.log_probability([*words, verb, *others, "."]))
    left_out = (1 - toy_language.HAS_ADJECTIVE) ** 2 * (1 - toy_language.HAS_CLAUSE)
    left_out *= 1 - toy_language.HAS_PLACE
    # All phrases without an adjective are as probable: of each, the listed ones are a part.
    share = len(phrases[::3]) / len(phrases) * len(phrases[::16]) / len(phrases)
    assert total == pytest.approx(left_out * share)


def test_what_the_generator_writes_is_possible():
    rng = random.Random(0)
    sentences = [toy_language.random_sentence(rng) for _ in range(5_000)]
    logs = [toy_language.log_probability(sentence) for sentence in sentences]
    assert all(map(math.isfinite, logs))
    has_clause = sum("that" in sentence for sentence in sentences) / len(sentences)
    assert has_clause == pytest.approx(toy_language.HAS_CLAUSE, abs=0.02)
    text = [word for sentence in sentences[:50] for word in sentence]
    assert toy_language.sentences_of(text) == sentences[:50]


@pytest.mark.parametrize(
    "text",
    [
        "the king love the dog .",
        "the kings that love the dog loves the cat .",
        "the king loves the dog",
        "the king chases the dog .",
        "one kings love the dog .",
        "the king loves the dog . the",
        "",
    ],
)
def test_what_it_does_not_have_is_impossible(text):
    assert toy_language.log_probability(text.split()) == -math.inf
