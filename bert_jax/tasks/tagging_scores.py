"""Entities in sequences of tags, and their precision, recall and F1, as fractions.

`find_entities` reads any sequence of B, I and O, legal or not, like conlleval, the script of the
CoNLL shared tasks, and E and S like seqeval's default mode. `find_strict_entities` reads only what
a scheme allows (seqeval's mode "strict").
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Entity(NamedTuple):
    """Words `start` to `end` (exclusive) of a sentence."""

    type: str
    start: int
    end: int


def split_tag(tag: str) -> tuple[str, str]:
    """Splits "B-PER" into ("B", "PER"); returns ("O", "") for anything but an entity's tag."""
    prefix, dash, type_name = tag.partition("-")
    return (prefix, type_name) if dash and prefix in tuple("BIES") else ("O", "")


def find_entities(tags: Sequence[str]) -> list[Entity]:
    """Finds entities by conlleval's rules: a tag after O or another type begins a new one."""
    entities, before = [], ("O", "")
    for place, (prefix, type_name) in enumerate(map(split_tag, tags)):
        if prefix != "O":
            begins = prefix in "BS" or before[0] in "OES" or before[1] != type_name
            start = place if begins else entities.pop().start
            entities.append(Entity(type_name, start, place + 1))
        before = prefix, type_name
    return entities


def find_strict_entities(tags: Sequence[str], scheme: str = "iob2") -> list[Entity]:
    """Finds the entities that are well-formed in `scheme`, "iob1", "iob2" or "bioes", as seqeval.

    iob2: B I*. bioes: S or B I* E. iob1: I I*, or B I* right after the same type; a single B that
    is followed by the B of another type is no entity.
    """
    parts = [*map(split_tag, tags), ("O", "")]
    entities = []
    for entity in find_entities(tags):
        type_name, start, end = entity
        before, after = parts[start - 1], parts[end]
        prefixes = "".join(prefix for prefix, _ in parts[start:end])
        legal = True
        if scheme == "bioes":
            legal = re.fullmatch("S|BI*E", prefixes)
        elif scheme == "iob2":
            legal = prefixes[0] == "B"
        elif prefixes[0] == "B" and before in (("B", type_name), ("I", type_name)):
            legal = prefixes != "B" or after[0] != "B" or after[1] == type_name
        elif prefixes[0] == "B":  # It begins nothing; an I after it does.
            entity, legal = entity._replace(start=start + 1), len(prefixes) > 1
        if legal:
            entities.append(entity)
    return entities


def entity_scores(
    predicted: Sequence[Sequence[str]],
    expected: Sequence[Sequence[str]],
    find: Callable[[Sequence[str]], list[Entity]] = find_entities,
) -> dict[str, float]:
    """Computes precision, recall and F1 of entities, over all types and for each.

    An entity is correct if its type and both ends are. 0 / 0 is 0, as in conlleval.

    Args:
      predicted, expected: tags of each sentence.
      find: finds the entities in the tags of a sentence.

    Returns:
      `precision`, `recall`, `f1`, and `precision/TYPE`, `recall/TYPE`, `f1/TYPE`.
    """
    num_predicted, num_expected, num_correct = Counter(), Counter(), Counter()
    for ours, theirs in zip(predicted, expected, strict=True):
        if len(ours) != len(theirs):
            raise ValueError(f"{len(ours)} tags are predicted for {len(theirs)} words")
        ours, theirs = set(find(ours)), set(find(theirs))
        num_predicted.update(entity.type for entity in ours)
        num_expected.update(entity.type for entity in theirs)
        num_correct.update(entity.type for entity in ours & theirs)
    scores = {}
    types = sorted(num_predicted | num_expected)
    for suffix, chosen in (("", types), *((f"/{each}", [each]) for each in types)):
        correct, found, wanted = (
            sum(counts[each] for each in chosen)
            for counts in (num_correct, num_predicted, num_expected)
        )
        scores[f"precision{suffix}"] = correct / found if found else 0.0
        scores[f"recall{suffix}"] = correct / wanted if wanted else 0.0
        scores[f"f1{suffix}"] = 2 * correct / (found + wanted) if found + wanted else 0.0
    return scores
