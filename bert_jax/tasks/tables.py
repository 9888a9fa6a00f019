"""Tables of examples: CSV, TSV and JSONL files, and TFDS, as records of text columns."""

import csv
import io
import json
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from bert_jax.corpus.readers import import_tfds


class Record(NamedTuple):
    """One example: its columns as text, and its place, "FILE, line N", for messages."""

    columns: dict[str, str]
    place: str


def check_files_given(data: ConfigDict) -> None:
    """Raises ValueError if `data` names no file to train on, to score or to predict."""
    if not (data.train or data.dev or data.test):
        raise ValueError(
            "no examples: give --config.data.train=FILE to train, or --config.data.dev=FILE or "
            "--config.data.test=FILE to predict with a trained head"
        )


def read_table(
    path: str | pathlib.Path, columns: Sequence[str], header_lines: int = 1
) -> list[Record]:
    """Reads a `.csv`, `.tsv` (or `.tab`) or `.jsonl` file that has all of `columns`.

    CSV fields may be quoted; in TSV a quotation mark is an ordinary character. The first of
    `header_lines` names the columns, the others are skipped. Raises FileNotFoundError without the
    file, and ValueError for anything wrong in it.
    """
    path = pathlib.Path(path)
    if path.suffix == ".jsonl":
        records = [_json_record(*line, columns) for line in read_json_lines(path)]
    elif path.suffix in (".csv", ".tsv", ".tab"):
        records = _read_delimited(path, header_lines)
    else:
        raise ValueError(f"{path} has an unknown suffix: expected .csv, .tsv, .tab or .jsonl")
    check_columns(records, columns)
    return records


def check_columns(records: Iterable[Record], columns: Sequence[str]) -> None:
    """Raises ValueError if a record lacks one of `columns`."""
    for record in records:
        for column in columns:
            if column not in record.columns:
                found = ", ".join(map(repr, record.columns))
                hint = "" if len(record.columns) > 1 else " (commas separate a .csv, tabs a .tsv)"
                raise ValueError(
                    f"{record.place}: no column {column!r}; it has {found}{hint}: give the correct "
                    "name in --config.data"
                )


def read_text(path: pathlib.Path, expected: str) -> str:
    """Reads a UTF-8 file; `expected` describes it in the FileNotFoundError for a missing one."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: expected {expected}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line}, byte {error.start}: not UTF-8 ({error.reason}); convert the "
            "file, for example with iconv"
        ) from None


def read_json_lines(path: str | pathlib.Path) -> list[tuple[dict, str]]:
    """Reads a file with one JSON object per line; returns the objects and their places."""
    objects = []
    text = read_text(pathlib.Path(path), "a .jsonl file")
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            values = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{place}: not JSON ({error}); expected an object per line") from None
        if not isinstance(values, dict):
            raise ValueError(f"{place}: expected a JSON object, found {type(values).__name__}")
        objects.append((values, place))
    if not objects:
        raise ValueError(f"{path} holds no examples")
    return objects


def write_json_lines(path: pathlib.Path, objects: Iterable[dict]) -> None:
    """Writes one JSON object per line."""
    with open(path, "w") as stream:
        stream.writelines(json.dumps(values) + "\n" for values in objects)


def _json_record(values: dict, place: str, columns: Sequence[str]) -> Record:
    for column in columns:
        if isinstance(value := values.get(column), list | dict):
            found = type(value).__name__
            raise ValueError(f"{place}: {column!r} is a {found}, expected text or a number")
    return Record({k: "" if v is None else str(v) for k, v in values.items()}, place)


def _read_delimited(path: pathlib.Path, header_lines: int) -> list[Record]:
    csv.field_size_limit(sys.maxsize)  # A text may be a book.
    # Not splitlines(): a text may hold characters that end a line for Unicode, but not in a table.
    lines = io.StringIO(read_text(path, "a .csv, .tsv or .jsonl file"))
    if path.suffix == ".csv":
        reader = csv.reader(lines, strict=True)
    else:
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    try:
        names = next(reader, [])
        lines = [(f"{path}, line {reader.line_num}", fields) for fields in reader]
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {reader.line_num}: {error}; quote a field that contains a quotation "
            "mark, comma or line end, and double the quotation marks in it"
        ) from None
    if duplicates := [name for name in names if name and names.count(name) > 1]:
        raise ValueError(f"{path}: the header names {duplicates[0]!r} twice: rename one of them")
    records = []
    for number, (place, fields) in enumerate(lines, start=1):
        if number >= header_lines and any(fields):
            if len(fields) != len(names):
                raise ValueError(
                    f"{place}: {len(fields)} fields, but the header names {len(names)}"
                )
            records.append(Record(dict(zip(names, fields, strict=True)), place))
    if not records:
        raise ValueError(f"{path} holds no examples")
    return records


def read_tfds(name: str, split: str, columns: Sequence[str] = ()) -> list[Record]:
    """Reads a split of a prepared TFDS data set, without TensorFlow, as records with `columns`."""
    records = []
    for number, example in enumerate(import_tfds(name).data_source(name, split=split)):
        values = {k: v.decode() if isinstance(v, bytes) else str(v) for k, v in example.items()}
        records.append(Record(values, f"tfds:{name}, {split}, example {number}"))
    check_columns(records, columns)
    return records


def check_texts(records: Iterable[Record], columns: Sequence[str]) -> None:
    """Raises ValueError if one of the texts in `columns` is empty."""
    for record in records:
        for column in columns:
            if not record.columns[column].strip():
                raise ValueError(f"{record.place}: {column!r} is empty; fix or remove the line")


def example_ids(records: Sequence[Record], column: str) -> list[str]:
    """Returns the ids in `column`, which must be unique, or with no `column` the numbers from 0."""
    if not column:
        return [str(number) for number in range(len(records))]
    ids = [record.columns[column] for record in records]
    check_unique(records, ids)
    return ids


def check_unique(examples: Iterable, ids: Iterable[str]) -> None:
    """Raises ValueError, with the `place` of both examples, if two have the same id."""
    places: dict[str, str] = {}
    for example, name in zip(examples, ids, strict=True):
        if name in places:
            raise ValueError(f"{example.place}: id {name!r} is already used in {places[name]}")
        places[name] = example.place
