"""Reads tagged words (CoNLL columns or JSONL) and converts between entity tagging schemes.

In CoNLL columns, each line holds a word and its columns, a blank line ends a sentence, -DOCSTART-
or CoNLL-U's "# newdoc" begins a document, and other "# ..." lines before a sentence are comments.
Columns are separated by tabs in a line that has one, so that words may contain spaces, and by
spaces in other lines. In JSONL, each line is a sentence, `{"tokens": [...], "tags": [...]}`, or a
text with spans of characters (`character_spans.py`), and may name its "document".

A line that begins with "# " and has as many columns as the others may be a comment, such as
"# newpar", or the word "#". Before the first word of a sentence it is a word if its tag has a
prefix (B-LOC) or is the tag of another word, and otherwise a comment. After the first word it is
always a word: CoNLL-U has comments only before the words.

IOB2 begins each entity with B-. IOB1 begins it with I-, or with B- right after an entity of the
same type. BIOES marks the last word of an entity with E- or, if single, S-; BILOU uses L- and U-.
IO has plain tags, such as PER, and cannot separate entities of the same type.
"""

import itertools
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from absl import logging

from bert_jax.tasks import character_spans
from bert_jax.tasks.tables import find_unused_keys, is_named, iterate_lines, iterate_rows
from bert_jax.tasks.tagging_scores import Entity, are_plain, find_entities
from bert_jax.tasks.words import SplitText

SCHEMES = ("iob1", "iob2", "bioes", "bilou", "io")
# The prefixes of the last word of an entity, and of its only word.
_LAST_PREFIXES = {"bioes": "ES", "bilou": "LU"}
_DOCUMENT = ("-DOCSTART-", "# newdoc", "#begin document", "#end document")
_SHOWN = 5  # Lines named in a message.


class Sentence(NamedTuple):
    """A sentence from a file, and an identifier of its document."""

    words: list[str]  # "" if the file has none in its place.
    lines: list[int]  # Line number of each word.
    tags: list[str] | None  # None if unknown.
    document: object
    columns: int = 2  # Number of columns in the file.
    location: str = ""  # "FILE, line N" of a sentence of JSONL, which may have no words.
    # The text of a line of JSONL, and the characters of its words.
    split_text: SplitText | None = None


def read_sentences(
    path: str | pathlib.Path,
    word_column: int = 0,
    tag_column: int = -1,
    min_columns: int = 2,
    *,
    tags_key: str = "",
    names: Sequence[str] = (),
    known_tags: Collection[str] = (),
    unused: dict[str, int] | None = None,
    counts: dict[str, int] | None = None,
) -> list[Sentence]:
    """Reads a `.jsonl` file, "hub:...", or CoNLL columns, numbered from 0, or with -1 from the end.

    A file with fewer than `min_columns` columns has no tags: only words or, if the training file
    has more columns, words and parts of speech. Logs how many comments are skipped; a tag in
    `known_tags` shows that "#" is a word. In JSONL, `tags_key` is the key of the tags: "" means
    "tags", or else the only key that ends in _tags; `names` are those of tags that are numbers;
    `unused` receives the number of lines that have each key which nothing reads, and `counts` what
    `read_annotated_text` has changed or left out.
    Raises FileNotFoundError if the file is missing, and ValueError if it is malformed.
    """
    columns = word_column, tag_column, min_columns
    return list(iterate_sentences(path, *columns, tags_key, names, known_tags, unused, counts))


def iterate_sentences(
    path: str | pathlib.Path,
    word_column: int,
    tag_column: int,
    min_columns: int,
    tags_key: str,
    names: Sequence[str],
    known_tags: Collection[str],
    unused: dict[str, int] | None = None,
    counts: dict[str, int] | None = None,
) -> Iterator[Sentence]:
    """Yields the sentences of `read_sentences` one by one; reads a file of columns three times."""
    if is_named(path) or pathlib.Path(path).suffix == ".jsonl":
        unused, counts = ({} if each is None else each for each in (unused, counts))
        yield from _iterate_objects(path, tags_key, names, unused, counts)
        return

    def read_rows() -> Iterator[tuple[str, list[str]]]:
        for line in iterate_lines(pathlib.Path(path), "words and their columns, or a .jsonl file"):
            line = line.removesuffix("\n")
            yield line, [] if line.startswith(_DOCUMENT) else _split_columns(line)

    if pathlib.Path(path).suffix in (".conllu", ".conllup") and word_column == 0:
        fix = "set word_column=1 (and tag_column=3 for its parts of speech)"
        raise ValueError(f"{path}: the first column of CoNLL-U numbers the words: {fix}")
    # "#" may be a word; a comment has other columns than the first line that cannot be one.
    first = None
    for index, (line, row) in enumerate(read_rows()):
        if row and row[0].strip("#") and (first is None or not line.startswith("#")):
            first, num_columns, has_tabs = index, len(row), "\t" in line
            if not line.startswith("#"):
                break
    if first is None:
        raise ValueError(f"{path} holds no words")
    has_tags = num_columns >= min_columns
    columns = (word_column, tag_column) if has_tags else (word_column,)
    for column in columns:
        if not -num_columns <= column < num_columns:
            raise ValueError(
                f"{path}, line {first + 1}: no column {column} (number of columns: {num_columns}): "
                "set word_column and tag_column, or fix the file"
            )
    has_marks = any(row and row[0].startswith("#") for _, row in read_rows())
    seen, assignments = set(known_tags), set()
    if has_marks:
        rows = (row for _, row in read_rows())
        seen |= _values_of_words(rows, num_columns, tag_column if has_tags else -1)
        if num_columns > 3:
            assignments = _values_of_words((row for _, row in read_rows()), num_columns, 2)
    comments, unsure, tag_of_hashtag, others = 0, [], {}, set(known_tags)
    document, sentence, separated_otherwise = 0, None, []
    for number, (line, fields) in enumerate(read_rows(), start=1):
        if not fields:
            document += line.startswith(_DOCUMENT)
            if sentence:
                yield sentence
            sentence = None
            continue
        is_like_first = len(fields) == num_columns and ("\t" in line) == has_tabs
        is_marked = _is_marked(fields)
        is_marked |= has_tabs and line.startswith("#") and "\t" not in line
        if not sentence and is_marked and not is_like_first:
            comments += 1
            continue
        if not sentence and re.match(" *#+ ", line) and num_columns > 1:
            tag = fields[tag_column if has_tags else -1]
            is_assignment = num_columns > 3 and fields[2] == "=" and "=" not in assignments
            if is_assignment or not (tag in seen or re.fullmatch("[BIESLU]-.+", tag)):
                comments += 1
                unsure.append(f"line {number}: {line.strip()[:30]!r}")
                continue
        if len(fields) != num_columns:
            counts = f"{num_columns} columns, as in line {first + 1}, found {len(fields)}"
            raise ValueError(f"{path}, line {number}: expected {counts}: fix the line")
        if num_columns == 10 and word_column % 10 and re.fullmatch(r"\d+[-.]\d+", fields[0]):
            continue  # CoNLL-U: a contraction (1-2), whose words follow, or an empty node (1.1).
        if has_tags and not fields[tag_column]:
            raise ValueError(f"{path}, line {number}: column {tag_column} is empty: fix the line")
        if ("\t" in line) != has_tabs:
            separated_otherwise.append(number)
        if not sentence:
            if has_tags and re.match("#+[^# ]", fields[0]) and "\t" not in line:
                tag_of_hashtag[f"line {number}: {line.strip()[:30]!r}"] = fields[tag_column]
            sentence = Sentence([], [], [] if has_tags else None, document, num_columns)
        sentence.words.append(fields[word_column])
        sentence.lines.append(number)
        if has_tags:
            sentence.tags.append(fields[tag_column])
            if not fields[word_column].startswith("#"):
                others.add(fields[tag_column])
    if sentence:
        yield sentence
    if comments:
        logging.info("%s: %d comments skipped", path, comments)
    if unsure:
        logging.warning(
            "%s: %d lines that begin with # are read as comments, although they have as many "
            "columns as words, because no word has their last column as its tag: %s. If # is a "
            "word there, separate its columns by tabs",
            path,
            len(unsure),
            _shown(unsure),
        )
    hashtags = [
        place
        for place, tag in tag_of_hashtag.items()
        if tag not in others and not re.fullmatch("[BIESLU]-.+", tag)
    ]
    if hashtags:
        logging.warning(
            "%s: %d lines that begin with # are read as words, but no other word has their tag: "
            "%s. If they are comments, write a space after #",
            path,
            len(hashtags),
            _shown(hashtags),
        )
    if separated_otherwise:
        logging.warning(
            "%s: columns are separated by %s in line %d and by %s in %d lines: %s",
            path,
            "tabs" if has_tabs else "spaces",
            first + 1,
            "spaces" if has_tabs else "tabs",
            len(separated_otherwise),
            _shown(list(map(str, separated_otherwise))),
        )


def _values_of_words(rows: Iterable[Sequence[str]], num_columns: int, column: int) -> set[str]:
    """Returns the values of a column in the lines that cannot be comments."""

    return {
        row[column]
        for before, row in itertools.pairwise(itertools.chain([[]], rows))
        # A line after a word is a word.
        if len(row) == num_columns and (not _is_marked(row) or (before and not _is_marked(before)))
    }


def _is_marked(row: Sequence[str]) -> bool:
    """Returns whether a line may be a comment: it begins with number signs and a space."""
    return bool(re.match("#+( |$)", row[0]))


def _split_columns(line: str) -> list[str]:
    """Returns the columns of a line, separated by tabs or, without one, by spaces; [] if blank."""
    # Not split(): words may contain characters that Unicode, but not CoNLL, treats as spaces.
    content = line.rstrip(" \t\r")
    if not content:
        return []
    if "\t" in content:
        return [column.strip(" ") for column in content.split("\t")]
    return re.split(" +", content.lstrip(" "))


def _shown(texts: Sequence[str]) -> str:
    """Returns the first texts, and how many there are beyond."""
    more = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _iterate_objects(
    path: str | pathlib.Path,
    tags_key: str,
    names: Sequence[str],
    unused: dict[str, int],
    counts: dict[str, int],
) -> Iterator[Sentence]:
    keys, has_tags, has_words, num_sentences = set(), None, False, 0
    # Key that is not read -> its number of lines, and the location of the first.
    unread: dict[str, tuple[int, str]] = {}
    may_be_tags: dict[str, bool] = {}
    for values, location in iterate_rows(path):
        text, read = None, {"tokens", "document"}
        if character_spans.is_annotated_text(values):
            found = character_spans.read_annotated_text(values, location, tags_key, counts)
            if found is None:
                continue
            text, tags, key = found
            words = [text[0][start:end] for start, end in text[1]]
            read = character_spans.other_keys(values)
        else:
            key = tags_key or _find_tags_key(values, location)
            words, tags = values.get("tokens"), values.get(key)
        if isinstance(tags, list) and tags and all(type(tag) is int for tag in tags):
            tags = _named_tags(tags, names, f"{location}: {key!r}")
        if tags is not None:
            keys.add(key)
        if isinstance(words, list):  # A table's missing value is written as null.
            words = ["" if _is_empty(word) else word for word in words]
        are_tags = tags is None or (_are_words(tags) and "" not in tags)
        if not _are_words(words) or not are_tags:
            raise ValueError(
                f"{location}: expected 'tokens', a list of words, and optionally {key!r}, one per "
                "word such as B-LOC, all without tabs, line breaks and spaces around them, or "
                f"'text' and 'spans'; the object has {', '.join(map(repr, values))}"
            )
        if tags is not None and len(tags) != len(words):
            lengths = f"the lengths of 'tokens' and {key!r} are {len(words)} and {len(tags)}"
            raise ValueError(f"{location}: {lengths}: give each word one tag")
        if has_tags not in (None, tags is not None):
            raise ValueError(f"{location}: give all lines {key!r}, or none: only some have them")
        has_tags, has_words = tags is not None, has_words or bool(words)
        lines = [int(location.rpartition(" ")[2])] * len(words)
        document = values.get("document")
        for name in find_unused_keys([(values, location)], read):
            count, first = unread.get(name, (0, location))
            unread[name] = count + 1, first
            may_be_tags[name] = may_be_tags.get(name, True) and _may_be_tags(values, name)
        num_sentences += 1
        yield Sentence(words, lines, tags, document, location=location, split_text=text)
    if not has_words:
        left_out = "".join(f" ({count} {what})" for what, count in counts.items())
        raise ValueError(f"{path} holds no words{left_out}")
    for key in sorted(unread.keys() - keys):
        count, location = unread[key]
        unused[key] = count
        if not keys and may_be_tags[key] and count == num_sentences:
            raise ValueError(
                f"{location}: no 'tags', but {key!r} has a value for each of the 'tokens': set "
                f"tags={key} if these are the tags, or remove it"
            )
    if found := sorted(keys - {"tags", tags_key}):
        logging.info("%s: the tags are read from %s", path, ", ".join(map(repr, found)))


def _may_be_tags(values: Mapping, key: str) -> bool:
    """Returns whether an object has a text or a number for each word under `key`."""
    found, words = values.get(key), values.get("tokens")
    is_list = isinstance(found, list) and words is not None and len(found) == len(words)
    return is_list and all(isinstance(each, str | int) for each in found)


def _find_tags_key(values: Mapping, location: str) -> str:
    """Returns "tags", or the only key that ends in _tags, as in datasets of Hugging Face."""
    found = [key for key in values if key.endswith("_tags")]
    if "tags" in values or not found:
        return "tags"
    if len(found) > 1:
        listed = ", ".join(map(repr, found))
        fix = f"choose one, such as tags={found[-1]}"
        raise ValueError(f"{location}: there are several kinds of tags, {listed}: {fix}")
    return found[0]


def _named_tags(tags: Sequence[int], names: Sequence[str], what: str) -> list[str]:
    """Returns the names of tags that are numbers, from 0; without names, or for names that are
    numbers, the numbers as text."""
    if not names or {str(tag) for tag in tags} <= set(names):
        return list(map(str, tags))
    for tag in tags:
        if not 0 <= tag < len(names):
            problem = f"there are only {len(names)} names of tags, from 0: {', '.join(names)}"
            raise ValueError(f"{what} has {tag}, but {problem}: name all in config.data.labels")
    return [names[tag] for tag in tags]


def _is_empty(word: object) -> bool:
    return word is None or (isinstance(word, str) and not word.strip(" \t\r\n"))


def _are_words(texts: object) -> bool:
    return isinstance(texts, list) and all(
        isinstance(text, str) and text == text.strip(" ") and not re.search(r"[\t\r\n]", text)
        for text in texts
    )


def find_scheme(
    path: str | pathlib.Path, sentences: Sequence[Sentence], repair: bool = False
) -> tuple[str, int]:
    """Returns the scheme of a file's tags, and the number of tags that were illegal in it.

    The scheme is one of `SCHEMES`; "iob2" if several fit. If none fits, it is iob2, bioes or bilou,
    the one with the fewest illegal tags. Raises ValueError, naming the lines, for
    tags that cannot mark an entity and, unless `repair`, for illegal tags; these are logged, and
    `convert_tags` repairs them.
    """
    lines = [line for sentence in sentences for line in sentence.lines]
    tags = [tag for sentence in sentences for tag in sentence.tags]
    if are_plain(tags):
        return "io", 0
    is_unknown = [tag != "O" and not re.fullmatch("[BIESLU]-.+", tag) for tag in tags]
    if count := sum(is_unknown):
        first = is_unknown.index(True)
        raise ValueError(
            f"{path}, line {lines[first]}: tag {tags[first]!r}, expected O, or B-, I-, E-, S-, L- "
            f"or U- and a type, as in other lines (number of such tags: {count})"
        )
    illegal = {}
    for scheme in ("iob2", "iob1", *_LAST_PREFIXES):
        legal = [tag for sentence in sentences for tag in convert_tags(sentence.tags, scheme)]
        places = zip(lines, tags, legal, strict=True)
        illegal[scheme] = [f"line {line}: {old!r}" for line, old, new in places if old != new]
        if not illegal[scheme]:
            return scheme, 0
    # Never IOB1: where a B- is illegal in IOB1, the file is meant to be IOB2.
    scheme = min(("iob2", *_LAST_PREFIXES), key=lambda scheme: len(illegal[scheme]))
    count = len(illegal[scheme])
    listed = _shown(illegal[scheme])
    found = f"{path}: {count} of {len(tags)} tags are not {scheme.upper()} ({listed})"
    if not repair:
        others = [f"{len(illegal[name])} not {name.upper()}" for name in illegal if name != scheme]
        raise ValueError(
            f"{found}, {', '.join(others)}: use one scheme in the whole file, or set "
            "config.data.repair_tags=True to read them as conlleval does, where a stray I- "
            "begins an entity"
        )
    logging.warning("%s; repaired, as conlleval reads them", found)
    return scheme, count


def convert_tags(
    tags: Sequence[str],
    scheme: str,
    find: Callable[[Sequence[str]], list[Entity]] = find_entities,
) -> list[str]:
    """Rewrites the tags of a sentence in `scheme`.

    Reads illegal sequences as conlleval does, or plain tags if `find` is `find_runs`.
    """
    converted, before = ["O"] * len(tags), None
    for entity in find(tags):
        length = entity.end - entity.start
        inside = entity.type if scheme == "io" else f"I-{entity.type}"
        converted[entity.start : entity.end] = [inside] * length
        follows = before and (before.type, before.end) == (entity.type, entity.start)
        if scheme in ("iob2", *_LAST_PREFIXES) or (scheme == "iob1" and follows):
            converted[entity.start] = f"B-{entity.type}"
        if scheme in _LAST_PREFIXES:
            converted[entity.end - 1] = f"{_LAST_PREFIXES[scheme][length == 1]}-{entity.type}"
        before = entity
    return converted
