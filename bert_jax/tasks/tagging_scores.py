"""Entities in sequences of tags, and their precision, recall and F1, as fractions.

`find_entities` reads any sequence of B, I and O, legal or not, as conlleval (the script of the
CoNLL shared tasks) does. It reads E and S as seqeval's default mode does, and BILOU's L and U like
E and S. Of plain tags (O, PER, LOC), a run of equal ones is an entity, as in transformers'
token-classification pipeline.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Entity(NamedTuple):
    """Words `start` to `end` (exclusive) of a sentence."""

    type: str
    start: int
    end: int


def split_tag(tag: str) -> tuple[str, str]:
    """Splits "B-PER" into ("B", "PER"); a tag without prefix, "PER", is read as ("I", "PER")."""
    prefix, dash, type_name = tag.partition("-")
    if dash and prefix in tuple("BIESLU"):
        return prefix, type_name
    return ("O", "") if tag == "O" else ("I", tag)


def are_plain(tags: Iterable[str]) -> bool:
    """Returns whether tags have no prefixes: some have none, and none begins with B- or I-.

    In such a set, E-mail is a type, and its E no prefix.
    """
    tags = set(tags) - {"O"}
    has_plain = any(not re.match("[BIESLU]-.", tag) for tag in tags)
    return has_plain and not any(tag.startswith(("B-", "I-")) for tag in tags)


def find_entities(tags: Sequence[str]) -> list[Entity]:
    """Finds entities by conlleval's rules: a tag after O or another type begins a new one."""
    entities, before = [], ("O", "")
    for index, (prefix, type_name) in enumerate(map(split_tag, tags)):
        if prefix != "O":
            begins = prefix in "BSU" or before[0] in "OESLU" or before[1] != type_name
            start = index if begins else entities.pop().start
            entities.append(Entity(type_name, start, index + 1))
        before = prefix, type_name
    return entities


def find_runs(tags: Sequence[str]) -> list[Entity]:
    """Finds the entities in plain tags: the longest runs of equal tags other than O."""
    entities, start = [], 0
    for tag, run in itertools.groupby(tags):
        end = start + len(list(run))
        if tag != "O":
            entities.append(Entity(tag, start, end))
        start = end
    return entities


def find_strict_entities(tags: Sequence[str], scheme: str = "iob2") -> list[Entity]:
    """Finds the entities well-formed in `scheme`, one with prefixes, as seqeval does.

    iob2: B I*. bioes: S or B I* E. bilou: U or B I* L. iob1: I I*, or B I* right after the same
    type; a single B that is followed by the B of another type is no entity.
    """
    parts = [*map(split_tag, tags), ("O", "")]
    entities = []
    for type_name, start, end in find_entities(tags):
        prefixes = "".join(prefix for prefix, _ in parts[start:end])
        legal = True
        if scheme == "bioes":
            legal = re.fullmatch("S|BI*E", prefixes)
        elif scheme == "bilou":
            legal = re.fullmatch("U|BI*L", prefixes)
        elif scheme == "iob2":
            legal = prefixes[0] == "B"
        elif prefixes[0] == "B" and parts[start - 1] in (("B", type_name), ("I", type_name)):
            legal = prefixes != "B" or parts[end][0] != "B" or parts[end][1] == type_name
        elif prefixes[0] == "B":  # This B begins nothing; an I after it does.
            start, legal = start + 1, len(prefixes) > 1
        if legal:
            entities.append(Entity(type_name, start, end))
    return entities


EntityCounts = tuple[Counter, Counter, Counter]
"""Predicted, expected and correct entities: "" counts all, and "/TYPE" those of a type."""


def entity_scores(
    predicted: Sequence[Sequence[str]],
    expected: Sequence[Sequence[str]],
    find: Callable[[Sequence[str]], list[Entity]] = find_entities,
) -> dict[str, float]:
    """Computes `precision`, `recall` and `f1` of entities, and `precision/TYPE` etc. by type.

    `find` finds the entities in the tags of a sentence. An entity is correct if its type and both
    ends are. 0 / 0 is 0, as in conlleval.
    """
    return scores_of_counts(count_all_entities(predicted, expected, find))


def count_all_entities(
    predicted: Sequence[Sequence[str]],
    expected: Sequence[Sequence[str]],
    find: Callable[[Sequence[str]], list[Entity]],
) -> EntityCounts:
    """Counts the entities of sentences, as `entity_scores`."""
    counts = Counter(), Counter(), Counter()
    for predicted_tags, expected_tags in zip(predicted, expected, strict=True):
        if len(predicted_tags) != len(expected_tags):
            lengths = f"{len(expected_tags)} and {len(predicted_tags)}"
            raise ValueError(f"expected a tag for each word; their numbers are {lengths}")
        count_entities(counts, find(predicted_tags), find(expected_tags))
    return counts


def count_entities(
    counts: EntityCounts, predicted: Iterable[Entity], expected: Iterable[Entity]
) -> None:
    """Adds the entities of a sentence to `counts`."""
    entities = set(predicted), set(expected)
    for count, members in zip(counts, (*entities, set.intersection(*entities)), strict=True):
        count.update(suffix for entity in members for suffix in ("", f"/{entity.type}"))


def scores_of_counts(counts: EntityCounts) -> dict[str, float]:
    """Computes the scores of `entity_scores`."""
    scores = {}
    for suffix in sorted({"", *counts[0], *counts[1]}):
        num_predicted, num_expected, num_correct = (count[suffix] for count in counts)
        scores[f"precision{suffix}"] = num_correct / max(num_predicted, 1)
        scores[f"recall{suffix}"] = num_correct / max(num_expected, 1)
        scores[f"f1{suffix}"] = 2 * num_correct / max(num_predicted + num_expected, 1)
    return scores


def type_table(counts: EntityCounts) -> list[tuple]:
    """Returns a header, and a row of each type: its expected entities, scores and other counts."""
    scores = scores_of_counts(counts)
    rows = []
    for suffix in sorted({*counts[0], *counts[1]} - {""}):
        num_predicted, num_expected, num_correct = (count[suffix] for count in counts)
        values = [round(scores[f"{name}{suffix}"], 4) for name in ("precision", "recall", "f1")]
        rows.append((suffix[1:], num_expected, *values, num_predicted, num_correct))
    header = ("type", "examples", "precision", "recall", "f1", "predicted", "correct")
    return [header, *rows]
