"""Reads tagged words (CoNLL columns or JSONL) and converts between entity tagging schemes.

In CoNLL columns, each line holds a word and its columns, a blank line ends a sentence, -DOCSTART-
or CoNLL-U's "# newdoc" begins a document, and other "# ..." lines before a sentence are comments.
In JSONL, each line is a sentence, `{"tokens": [...], "tags": [...]}`, and may name its "document".

IOB2 begins each entity with B-. IOB1 begins it with I-, or with B- right after an entity of the
same type. BIOES marks the last word of an entity with E- or, if single, S-; BILOU uses L- and U-.
"""

import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from bert_jax.tasks.tables import read_objects, read_text
from bert_jax.tasks.tagging_scores import find_entities

SCHEMES = ("iob1", "iob2", "bioes")
_LAST_PREFIXES = {"bioes": "ES", "bilou": "LU"}  # Of the last word, and of a single one.
_DOCUMENT = ("-DOCSTART-", "# newdoc", "#begin document", "#end document")


class Sentence(NamedTuple):
    """A sentence from a file, and an identifier of its document."""

    words: list[str]
    lines: list[int]  # Line number of each word.
    tags: list[str] | None  # None if unknown.
    document: object
    columns: int = 2  # Number of columns in the file.


def read_sentences(
    path: str | pathlib.Path, word_column: int = 0, tag_column: int = -1, min_columns: int = 2
) -> list[Sentence]:
    """Reads a `.jsonl` file or CoNLL columns, numbered from 0, or with -1 from the end.

    A file with fewer than `min_columns` columns has no tags: only words or, if the training file
    has more columns, words and parts of speech. Raises FileNotFoundError if the file is missing,
    and ValueError if it is malformed.
    """
    if pathlib.Path(path).suffix == ".jsonl":
        return _read_json_lines(path)
    lines = read_text(pathlib.Path(path), "words and their columns, or a .jsonl file").split("\n")
    rows = []
    for line in lines:
        # Not split(): words may contain characters that Unicode, but not CoNLL, treats as spaces.
        fields = re.split(r"[ \t]+", line.strip(" \t\r"))
        rows.append([] if line.startswith(_DOCUMENT) or not fields[0] else fields)
    # "#" may be a word; a comment's columns differ from those of the first line that cannot be one.
    first = next((index for index, row in enumerate(rows) if row and row[0] != "#"), None)
    if first is None:
        raise ValueError(f"{path} holds no words")
    num_columns = len(rows[first])
    has_tags = num_columns >= min_columns
    for column in (word_column, tag_column) if has_tags else (word_column,):
        if not -num_columns <= column < num_columns:
            raise ValueError(
                f"{path}, line {first + 1}: no column {column} (number of columns: {num_columns}): "
                "set --config.data.word_column and tag_column, or fix the file"
            )
    sentences, document, sentence = [], 0, None
    for number, (line, fields) in enumerate(zip(lines, rows, strict=True), start=1):
        if not fields:
            document += line.startswith(_DOCUMENT)
            sentence = None
            continue
        is_like_first = len(fields) == num_columns and ("\t" in line) == ("\t" in lines[first])
        if not sentence and fields[0] == "#" and not is_like_first:
            continue
        if len(fields) != num_columns:
            counts = f"{num_columns} columns, as in line {first + 1}, found {len(fields)}"
            raise ValueError(f"{path}, line {number}: expected {counts}: fix the line")
        if num_columns == 10 and word_column == 1 and re.fullmatch(r"\d+[-.]\d+", fields[0]):
            continue  # CoNLL-U: a contraction (1-2), whose words follow, or an empty node (1.1).
        if not sentence:
            sentence = Sentence([], [], [] if has_tags else None, document, num_columns)
            sentences.append(sentence)
        sentence.words.append(fields[word_column])
        sentence.lines.append(number)
        if has_tags:
            sentence.tags.append(fields[tag_column])
    return sentences


def _read_json_lines(path: str | pathlib.Path) -> list[Sentence]:
    sentences = []
    for values, location in read_objects(path):
        words, tags = values.get("tokens"), values.get("tags")
        texts = [words] if tags is None else [words, tags]
        if not all(map(_are_words, texts)):
            raise ValueError(
                f"{location}: expected 'tokens', a list of words, and optionally 'tags', one per "
                f"word such as B-LOC, without spaces; the object has {', '.join(map(repr, values))}"
            )
        if tags is not None and len(tags) != len(words):
            lengths = f"the lengths of 'tokens' and 'tags' are {len(words)} and {len(tags)}"
            raise ValueError(f"{location}: {lengths}: give each word one tag")
        if sentences and (tags is None) != (sentences[0].tags is None):
            raise ValueError(f"{location}: give all lines 'tags', or none: only some have them")
        lines = [int(location.rpartition(" ")[2])] * len(words)
        sentences.append(Sentence(words, lines, tags, values.get("document")))
    return sentences


def _are_words(texts: object) -> bool:
    if not isinstance(texts, list) or not texts:
        return False
    return all(isinstance(text, str) and re.fullmatch(r"[^ \t\n]+", text) for text in texts)


def find_scheme(path: str | pathlib.Path, sentences: Sequence[Sentence]) -> str:
    """Returns the scheme of a file's tags: one of `SCHEMES`, or "bilou"; "iob2" if several fit.

    Raises ValueError, naming the line, for a tag that cannot mark an entity and for mixed schemes.
    """
    lines = [line for sentence in sentences for line in sentence.lines]
    tags = [tag for sentence in sentences for tag in sentence.tags]
    for line, tag in zip(lines, tags, strict=True):
        if tag != "O" and not re.fullmatch("[BIESLU]-.+", tag):
            raise ValueError(
                f"{path}, line {line}: tag {tag!r}, expected O, or B-, I-, E-, S-, L- or U- and a "
                "type; for tags that mark no entities set --config.data.scheme=none"
            )
    illegal = []
    for scheme in ("iob2", "iob1", *_LAST_PREFIXES):
        legal = [tag for sentence in sentences for tag in convert_tags(sentence.tags, scheme)]
        if legal == tags:
            return scheme
        first = next(i for i, tag in enumerate(tags) if tag != legal[i])
        illegal.append(f"line {lines[first]}: {tags[first]!r} is not {scheme.upper()}")
    raise ValueError(f"{path}: use one scheme in the whole file ({'; '.join(illegal)})")


def convert_tags(tags: Sequence[str], scheme: str) -> list[str]:
    """Rewrites the tags of a sentence in `scheme`, reading illegal sequences as conlleval does."""
    converted, before = ["O"] * len(tags), None
    for entity in find_entities(tags):
        length = entity.end - entity.start
        converted[entity.start : entity.end] = [f"I-{entity.type}"] * length
        follows = before and (before.type, before.end) == (entity.type, entity.start)
        if scheme != "iob1" or follows:
            converted[entity.start] = f"B-{entity.type}"
        if scheme in _LAST_PREFIXES:
            converted[entity.end - 1] = f"{_LAST_PREFIXES[scheme][length == 1]}-{entity.type}"
        before = entity
    return converted
