"""A language whose probabilities are known.

    python experiments/toy_language.py OUTPUT

writes a text of it: a sentence on each line, and blank lines between documents. A sentence is a
subject, a verb, an object and perhaps a place; subject and object may have an adjective, and the
subject a clause of its own. A verb has the number of its subject, however far that is, and is one
of those that its kind does.
"""

import math
import pathlib
import random
import sys

# A kind of subject: its nouns, and the verbs of which it is the subject. Few and regular, so that a
# small model soon learns which belong together.
KINDS = {
    "people": ("king queen farmer doctor", "love find build paint"),
    "animals": ("dog cat horse bird", "chase smell bite hear"),
    "machines": ("ship train clock engine", "pull lift move slow"),
}
ADJECTIVES = ["old", "young", "small", "large"]
PLACES = ["river", "city", "forest", "house"]
HAS_ADJECTIVE, HAS_CLAUSE, HAS_PLACE = 0.4, 0.3, 0.5
NUM_DOCUMENTS, SENTENCES_OF_A_DOCUMENT = 1000, 120


# By kind of subject and whether it is plural; a verb of a singular subject ends with an s, too.
NOUNS = {
    (kind, is_plural): [noun + "s" * is_plural for noun in nouns.split()]
    for kind, (nouns, _) in KINDS.items()
    for is_plural in (False, True)
}
VERBS = {
    (kind, is_plural): [verb + "s" * (not is_plural) for verb in verbs.split()]
    for kind, (_, verbs) in KINDS.items()
    for is_plural in (False, True)
}


def random_sentence(rng: random.Random) -> list[str]:
    """Returns the words of a sentence, with its full stop."""

    def noun_phrase():
        subject = rng.choice(list(NOUNS))
        words = [rng.choice(["the", "some" if subject[1] else "one"])]
        if rng.random() < HAS_ADJECTIVE:
            words.append(rng.choice(ADJECTIVES))
        return [*words, rng.choice(NOUNS[subject])], subject

    words, subject = noun_phrase()
    if rng.random() < HAS_CLAUSE:
        words += ["that", rng.choice(VERBS[subject]), *noun_phrase()[0]]
    words += [rng.choice(VERBS[subject]), *noun_phrase()[0]]
    if rng.random() < HAS_PLACE:
        words += [rng.choice(["near", "in"]), "the", rng.choice(PLACES)]
    return [*words, "."]


def log_probability(words: list[str]) -> float:
    """Returns that of the words of a sentence, in nats; -inf of what is none.

    What begins with a word has one reading at most: the sum is of choices, not of readings.
    """
    words, total = list(words), 0.0

    def take(chances: dict[str, float]) -> str:
        nonlocal total
        word = words.pop(0) if words else ""
        total += math.log(chances[word]) if chances.get(word) else -math.inf
        return word

    def uniform(choices) -> dict[str, float]:
        return {word: 1 / len(choices) for word in choices}

    def may(word_follows: bool, chance: float) -> bool:
        nonlocal total
        total += math.log(chance if word_follows else 1 - chance)
        return word_follows

    def noun_phrase():
        article = take({"the": 0.5, "some": 0.25, "one": 0.25})
        if may(bool(words) and words[0] in ADJECTIVES, HAS_ADJECTIVE):
            take(uniform(ADJECTIVES))
        # Half of the nouns are plural; those after "one" and "some" are of one number.
        fits = {"the": (False, True), "one": (False,), "some": (True,)}.get(article, ())
        subjects = [subject for subject in NOUNS if subject[1] in fits]
        noun = take(uniform([noun for subject in subjects for noun in NOUNS[subject]]))
        return next((subject for subject in subjects if noun in NOUNS[subject]), None)

    subject = noun_phrase()
    if may(words[:1] == ["that"], HAS_CLAUSE):
        take({"that": 1.0})
        take(uniform(VERBS.get(subject, ())))
        noun_phrase()
    take(uniform(VERBS.get(subject, ())))
    noun_phrase()
    if may(words[:1] in (["near"], ["in"]), HAS_PLACE):
        take({"near": 0.5, "in": 0.5})
        take({"the": 1.0})
        take(uniform(PLACES))
    take({".": 1.0})
    return -math.inf if words else total


def sentences_of(words: list[str]) -> list[list[str]]:
    """Splits a text at its full stops; the rest is a sentence of its own, if there is any."""
    ends = [place + 1 for place, word in enumerate(words) if word == "."]
    starts = [0, *ends]
    ends += [len(words)] * (ends[-1:] != [len(words)])
    return [words[start:end] for start, end in zip(starts, ends, strict=False)]


def main(output: str) -> None:
    rng = random.Random(0)
    documents = (
        "".join(" ".join(random_sentence(rng)) + "\n" for _ in range(SENTENCES_OF_A_DOCUMENT))
        for _ in range(NUM_DOCUMENTS)
    )
    path = pathlib.Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(documents), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
