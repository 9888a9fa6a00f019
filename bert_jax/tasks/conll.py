"""CoNLL column files, and the schemes of tags that mark entities in them.

A word and its columns stand on each line, a blank line ends a sentence, and -DOCSTART- begins a
document. IOB2 begins each entity with B-; IOB1 with I-, and with B- only right after another of its
type; BIOES has E- for the last word of an entity and S- for the only one.
"""

import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from bert_jax.tasks.tables import read_text
from bert_jax.tasks.tagging_scores import Entity, find_entities, split_tag

SCHEMES = ("iob1", "iob2", "bioes")
DOCUMENT_START = "-DOCSTART-"


class Sentence(NamedTuple):
    """Words, the file's line of each, their tags (None: not known), and the document's number.

    `columns` is how many the file has.
    """

    words: list[str]
    lines: list[int]
    tags: list[str] | None
    document: int
    columns: int = 1


def read_conll(
    path: str | pathlib.Path, word_column: int, tag_column: int, fewest: int = 2
) -> list[Sentence]:
    """The sentences of a file; columns count from 0, or with -1 for the last from the end.

    A file of fewer than `fewest` columns has no tags: it has words only, one a line, or, where the
    training file has more, words and parts of speech.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not UTF-8, no words in it, no such column, or a line of fewer or more of them.
    """
    path = pathlib.Path(path)
    text = read_text(path, "a CoNLL file, a word and its columns on each line")
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        # Not split(): a word may hold characters that Unicode, but not CoNLL, takes for spaces.
        line = line.strip(" \t\r")
        rows.append((number, re.split(r"[ \t]+", line) if line else []))
    words = [row for row in rows if row[1] and row[1][0] != DOCUMENT_START]
    if not words:
        raise ValueError(f"{path} holds no words")
    first_line, first = words[0]
    has_tags = len(first) >= fewest
    named = {"word_column": word_column} | ({"tag_column": tag_column} if has_tags else {})
    for name, column in named.items():
        if not -len(first) <= column < len(first):
            raise ValueError(
                f"{path}, line {first_line}: {len(first)} columns, so there is no column {column} "
                f"as --config.data.{name} says: name another, or mend the file"
            )
    sentences, document, ended = [], 0, True
    for number, fields in rows:
        if not fields or fields[0] == DOCUMENT_START:
            document += bool(fields)
            ended = True
            continue
        if len(fields) != len(first):
            raise ValueError(
                f"{path}, line {number}: {len(fields)} columns, but line {first_line} has "
                f"{len(first)}: mend the line"
            )
        if ended:
            sentences.append(Sentence([], [], [] if has_tags else None, document, len(first)))
            ended = False
        sentences[-1].words.append(fields[word_column])
        sentences[-1].lines.append(number)
        if has_tags:
            sentences[-1].tags.append(fields[tag_column])
    return sentences


def find_scheme(path: str | pathlib.Path, sentences: Sequence[Sentence]) -> str:
    """Which of `SCHEMES` the tags of a file are in; "iob2" where it makes no difference.

    Raises ValueError, with the line, for what is no tag of an entity and for mixed schemes.
    """
    first: dict[str, tuple[int, str]] = {}  # Where a tag stands that only this scheme has.
    not_bioes = None
    for sentence in sentences:
        before = ("O", "")
        for line, tag in zip(sentence.lines, sentence.tags, strict=True):
            if tag != "O" and not re.fullmatch("[BIES]-.+", tag):
                raise ValueError(
                    f"{path}, line {line}: tag {tag!r}, expected O, or B-, I-, E- or S- and a "
                    "type; for tags that mark no entities set --config.data.scheme=none"
                )
            prefix, type_name = split_tag(tag)
            within, continues = before[0] in "BI", prefix in "IE"
            if within != continues or (within and before[1] != type_name):
                not_bioes = not_bioes or (line, tag)
            if prefix in "ES":
                first.setdefault("bioes", (line, tag))
            elif prefix == "I" and (before[0] == "O" or before[1] != type_name):
                first.setdefault("iob1", (line, tag))
            elif prefix == "B" and (before[0] == "O" or before[1] != type_name):
                first.setdefault("iob2", (line, tag))
            before = prefix, type_name
        if before[0] in "BI":
            not_bioes = not_bioes or (line, tag)
    if "bioes" in first:
        scheme, wrong, other = "bioes", not_bioes, "IOB"
    else:
        scheme, wrong, other = "iob1", first.get("iob2"), "IOB2"
    if scheme in first and wrong:
        raise ValueError(
            f"{path}, line {wrong[0]}: {wrong[1]!r} is in {other}, but {first[scheme][1]!r} on "
            f"line {first[scheme][0]} is in {scheme.upper()}: tag the whole file in one scheme"
        )
    return scheme if scheme in first else "iob2"


def convert_tags(tags: Sequence[str], scheme: str) -> list[str]:
    """The same entities in `scheme`; sequences that are not legal are read as conlleval does."""
    return write_tags(find_entities(tags), len(tags), scheme)


def write_tags(entities: Sequence[Entity], length: int, scheme: str) -> list[str]:
    """Tags of a sentence of `length` words, from entities that are in order."""
    tags, before = ["O"] * length, None
    for entity in entities:
        inside = f"I-{entity.type}"
        tags[entity.start : entity.end] = [inside] * (entity.end - entity.start)
        follows = before and (before.type, before.end) == (entity.type, entity.start)
        if scheme != "iob1" or follows:
            tags[entity.start] = f"B-{entity.type}"
        if scheme == "bioes":
            tags[entity.end - 1] = f"E-{entity.type}"
            if entity.end - entity.start == 1:
                tags[entity.start] = f"S-{entity.type}"
        before = entity
    return tags
