"""Files of examples, one a line: CSV, TSV and JSONL, read as dictionaries with their places."""

import csv
import io
import json
import pathlib
import sys
from typing import NamedTuple

from bert_jax.corpus.readers import import_tfds


class Record(NamedTuple):
    """One line: its columns as text, and "file, line N" for messages."""

    columns: dict[str, str]
    place: str


def read_table(
    path: str | pathlib.Path, columns: tuple[str, ...], header_lines: int = 1
) -> list[Record]:
    """The records of a `.csv`, `.tsv` (or `.tab`) or `.jsonl` file, which have all of `columns`.

    CSV may quote fields; in TSV a quotation mark is one. The first of `header_lines` names the
    columns, the others are skipped.

    Raises:
      FileNotFoundError: no such file.
      ValueError: unknown suffix, not UTF-8, a line with too few or many fields, or a column that
        is not there, there twice, or in JSONL neither text nor number.
    """
    path = pathlib.Path(path)
    text = read_text(path, "a .csv, .tsv or .jsonl file")
    if path.suffix not in (".csv", ".tsv", ".tab", ".jsonl"):
        raise ValueError(f"{path} has an unknown suffix: expected .csv, .tsv, .tab or .jsonl")
    if path.suffix == ".jsonl":
        objects = _parse_json_lines(path, text)
        for found, at in objects:
            for column in columns:
                if isinstance(found.get(column), list | dict):
                    raise ValueError(
                        f"{at}: {column!r} is a {type(found[column]).__name__}, expected a text or "
                        "a number"
                    )
        records = [
            Record({name: "" if value is None else str(value) for name, value in found.items()}, at)
            for found, at in objects
        ]
    else:
        records = _read_delimited(path, text, header_lines)
    if not records:
        raise ValueError(f"{path} holds no examples")
    for record in records:
        for column in columns:
            if column not in record.columns:
                raise ValueError(
                    f"{record.place}: no column {column!r}; it has "
                    f"{', '.join(map(repr, record.columns))}: name the right one in --config.data"
                    + (
                        "; a .csv has commas, a .tsv tabs between"
                        if len(record.columns) < 2
                        else ""
                    )
                )
    return records


def read_text(path: pathlib.Path, expected: str) -> str:
    """The file's text, which is UTF-8; FileNotFoundError with what was `expected`, ValueError."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: expected {expected}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line}, byte {error.start}: not UTF-8 ({error.reason}); convert the "
            "file, as by iconv"
        ) from None


def read_json_lines(path: str | pathlib.Path) -> list[tuple[dict, str]]:
    """The objects of a file with one on each line, with their places; raises as `read_table`."""
    objects = _parse_json_lines(path, read_text(pathlib.Path(path), "a .jsonl file"))
    if not objects:
        raise ValueError(f"{path} holds no examples")
    return objects


def _parse_json_lines(path, text) -> list[tuple[dict, str]]:
    objects = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            values = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{place}: not JSON ({error}); expected one object a line") from None
        if not isinstance(values, dict):
            raise ValueError(f"{place}: expected a JSON object, found {type(values).__name__}")
        objects.append((values, place))
    return objects


def _read_delimited(path, text, header_lines) -> list[Record]:
    csv.field_size_limit(sys.maxsize)  # A text may be a book.
    # Not splitlines(): texts may hold characters that Unicode, but no table, takes for line ends.
    lines = io.StringIO(text)
    if path.suffix == ".csv":
        reader = csv.reader(lines, strict=True)
    else:
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    names, records = None, []
    try:
        for number, fields in enumerate(reader):
            if names is None:
                names = fields
                if twice := [name for name in names if name and names.count(name) > 1]:
                    raise ValueError(
                        f"{path}: the header names {twice[0]!r} twice: rename one of the columns"
                    )
            elif number >= header_lines and any(fields):
                place = f"{path}, line {reader.line_num}"
                if len(fields) != len(names):
                    raise ValueError(
                        f"{place}: {len(fields)} fields, but the header names {len(names)} columns"
                    )
                records.append(Record(dict(zip(names, fields, strict=True)), place))
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {reader.line_num}: {error}; quote a field that has a quotation mark, a "
            "comma or a line end, and double the quotation marks in it"
        ) from None
    return records


def read_tfds(name: str, split: str) -> list[Record]:
    """The examples of a TFDS set that was prepared beforehand, as text, without TensorFlow.

    Raises:
      ImportError: tensorflow_datasets is not installed.
    """
    return [
        Record(
            {
                column: value.decode() if isinstance(value, bytes) else str(value)
                for column, value in example.items()
            },
            f"tfds:{name}, {split}, example {number}",
        )
        for number, example in enumerate(import_tfds(name).data_source(name, split=split))
    ]
