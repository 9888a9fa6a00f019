"""Entities in sequences of tags, and their precision, recall and F1, as fractions.

`find_entities` reads any sequence of B, I and O, legal or not, as the script of the CoNLL shared
tasks does (conlleval), and E and S as seqeval's default mode does: to the script neither is always
an end. `find_strict_entities` reads only what a scheme allows (seqeval's mode "strict").
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Entity(NamedTuple):
    """Words `start` to `end` (exclusive) of a sentence."""

    type: str
    start: int
    end: int


def split_tag(tag: str) -> tuple[str, str]:
    """ "B-PER" -> ("B", "PER"); what is no tag of an entity is ("O", "")."""
    prefix, dash, type_name = tag.partition("-")
    return (prefix, type_name) if dash and prefix in tuple("BIES") else ("O", "")


def find_entities(tags: Sequence[str]) -> list[Entity]:
    """By the rules of conlleval: whatever follows O, or is of another type, begins an entity."""
    entities, before = [], ("O", "")
    for place, (prefix, type_name) in enumerate(map(split_tag, tags)):
        if prefix != "O":
            begins = prefix in "BS" or before[0] in "OES" or before[1] != type_name
            start = place if begins else entities.pop().start
            entities.append(Entity(type_name, start, place + 1))
        before = prefix, type_name
    return entities


def find_strict_entities(tags: Sequence[str], scheme: str = "iob2") -> list[Entity]:
    """Those that are well-formed in `scheme` ("iob1", "iob2" or "bioes"), as seqeval finds them.

    iob2: B I*. bioes: S or B I* E. iob1: I I*, or B I* right after the same type; an entity of one
    B that is followed by the B of another type is none.
    """
    parts = [*map(split_tag, tags), ("O", "")]
    inside = "IE" if scheme == "bioes" else "I"
    entities, start, before = [], 0, ("O", "")
    while start < len(tags):
        prefix, type_name = parts[start]
        same = type_name == before[1]
        if scheme == "iob1":
            # An I after a B begins one, since a B that began nothing may stand there.
            begins = prefix == "I" and (before[0] != "I" or not same)
            begins |= prefix == "B" and before[0] in "BI" and same
        else:
            begins = prefix == "B" or (prefix == "S" and scheme == "bioes")
        end = start + 1
        if begins and prefix in "BI":
            while parts[end][0] in inside and parts[end][1] == type_name:
                end += 1
                if parts[end - 1][0] == "E":
                    break
        last, after = parts[end - 1], parts[end]
        ends = {
            "iob1": (last[0], after[0]) != ("B", "B") or last[1] == after[1],
            "iob2": True,
            "bioes": last[0] in "ES",
        }[scheme]
        if begins and ends:
            entities.append(Entity(type_name, start, end))
        start, before = end, last
    return entities


def entity_scores(
    predicted: Sequence[Sequence[str]],
    expected: Sequence[Sequence[str]],
    find: Callable[[Sequence[str]], list[Entity]] = find_entities,
) -> dict[str, float]:
    """Precision, recall and F1 of whole entities over all sentences, and the same of each type.

    An entity is right if its type and both its ends are. What would be 0 / 0 is 0, as in conlleval.

    Args:
      predicted, expected: tags of each sentence.
      find: which entities tags stand for.

    Returns:
      `precision`, `recall`, `f1`, and `precision/TYPE`, `recall/TYPE`, `f1/TYPE`.
    """
    found, wanted, right = Counter(), Counter(), Counter()
    for ours, theirs in zip(predicted, expected, strict=True):
        if len(ours) != len(theirs):
            raise ValueError(f"{len(ours)} tags are predicted for {len(theirs)} words")
        ours, theirs = set(find(ours)), set(find(theirs))
        found.update(entity.type for entity in ours)
        wanted.update(entity.type for entity in theirs)
        right.update(entity.type for entity in ours & theirs)
    scores = {}
    for suffix, types in (("", None), *((f"/{each}", each) for each in sorted(found | wanted))):
        counts = [c.total() if types is None else c[types] for c in (right, found, wanted)]
        precision, recall = (counts[0] / each if each else 0.0 for each in counts[1:])
        total = counts[1] + counts[2]
        scores[f"precision{suffix}"], scores[f"recall{suffix}"] = precision, recall
        scores[f"f1{suffix}"] = 2 * counts[0] / total if total else 0.0
    return scores
