"""CoNLL column files, and the tagging schemes that mark entities in them.

Each line holds a word and its columns, a blank line ends a sentence, and -DOCSTART- begins a
document. IOB2 begins each entity with B-. IOB1 begins it with I-, or with B- right after another
entity of its type. BIOES has E- for the last word of an entity and S- for a single one.
"""

import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from bert_jax.tasks.tables import read_text
from bert_jax.tasks.tagging_scores import find_entities

SCHEMES = ("iob1", "iob2", "bioes")
DOCUMENT_START = "-DOCSTART-"


class Sentence(NamedTuple):
    """Words, the line of each in its file, their tags (None if unknown), and the document's number.

    `columns` is the number of columns of the file.
    """

    words: list[str]
    lines: list[int]
    tags: list[str] | None
    document: int
    columns: int = 1


def read_conll(
    path: str | pathlib.Path, word_column: int, tag_column: int, min_columns: int = 2
) -> list[Sentence]:
    """Reads the sentences of a file; columns count from 0, or from the end with -1 for the last.

    A file with fewer than `min_columns` columns has no tags, only words or, if the training file
    has more columns, words and parts of speech. Raises FileNotFoundError without the file, and
    ValueError for anything wrong in it.
    """
    path = pathlib.Path(path)
    text = read_text(path, "a CoNLL file, a word and its columns on each line")
    sentences, document, begins_sentence = [], 0, True
    for number, line in enumerate(text.split("\n"), start=1):
        # Not split(): words may hold characters that are spaces for Unicode, but not for CoNLL.
        fields = re.split(r"[ \t]+", line.strip(" \t\r"))
        if fields[0] in ("", DOCUMENT_START):
            document += fields[0] == DOCUMENT_START
            begins_sentence = True
            continue
        place = f"{path}, line {number}"
        if not sentences:
            first_line, num_columns = number, len(fields)
            has_tags = num_columns >= min_columns
            for column in (word_column, tag_column) if has_tags else (word_column,):
                if not -num_columns <= column < num_columns:
                    raise ValueError(
                        f"{place}: {num_columns} columns, so there is no column {column}: set "
                        "--config.data.word_column and tag_column, or fix the file"
                    )
        if len(fields) != num_columns:
            found = f"{len(fields)} columns, but line {first_line} has {num_columns}"
            raise ValueError(f"{place}: {found}: fix the line")
        if begins_sentence:
            sentences.append(Sentence([], [], [] if has_tags else None, document, num_columns))
            begins_sentence = False
        sentences[-1].words.append(fields[word_column])
        sentences[-1].lines.append(number)
        if has_tags:
            sentences[-1].tags.append(fields[tag_column])
    if not sentences:
        raise ValueError(f"{path} holds no words")
    return sentences


def find_scheme(path: str | pathlib.Path, sentences: Sequence[Sentence]) -> str:
    """Returns which of `SCHEMES` the tags of a file use; "iob2" where it makes no difference.

    Raises ValueError, with the line, for a tag that cannot mark an entity and for mixed schemes.
    """
    lines = [line for sentence in sentences for line in sentence.lines]
    tags = [tag for sentence in sentences for tag in sentence.tags]
    for line, tag in zip(lines, tags, strict=True):
        if tag != "O" and not re.fullmatch("[BIES]-.+", tag):
            raise ValueError(
                f"{path}, line {line}: tag {tag!r}, expected O, or B-, I-, E- or S- and a type; "
                "for tags that mark no entities set --config.data.scheme=none"
            )
    illegal = []
    for scheme in ("iob2", "iob1", "bioes"):
        legal = [tag for sentence in sentences for tag in convert_tags(sentence.tags, scheme)]
        if legal == tags:
            return scheme
        first = next(place for place, tag in enumerate(tags) if tag != legal[place])
        illegal.append(f"line {lines[first]}: {tags[first]!r} is not {scheme.upper()}")
    raise ValueError(f"{path}: use one scheme in the whole file ({'; '.join(illegal)})")


def convert_tags(tags: Sequence[str], scheme: str) -> list[str]:
    """Rewrites the entities of a sentence in `scheme`; reads illegal sequences like conlleval."""
    converted, before = ["O"] * len(tags), None
    for entity in find_entities(tags):
        length = entity.end - entity.start
        converted[entity.start : entity.end] = [f"I-{entity.type}"] * length
        follows = before and (before.type, before.end) == (entity.type, entity.start)
        if scheme != "iob1" or follows:
            converted[entity.start] = f"B-{entity.type}"
        if scheme == "bioes":
            converted[entity.end - 1] = f"{'S' if length == 1 else 'E'}-{entity.type}"
        before = entity
    return converted
