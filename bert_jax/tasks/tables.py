"""Tables of examples: CSV, TSV and JSONL files, and TFDS, as records of text columns."""

import csv
import hashlib
import io
import json
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from bert_jax.corpus.tfds import tfds_source

csv.field_size_limit(2**31 - 1)  # In characters; the default is 128 Ki.
_QUOTED_FIELD = re.compile(r'(?<![^\t\n])"(?:[^"]|"")*+"(?![^\t\n])')  # In a TSV.


class Record(NamedTuple):
    """One example: its columns as text, and its location, "FILE, line N", for error messages."""

    columns: dict[str, str]
    location: str


def files_from_config(data: ConfigDict) -> dict[str, str]:
    """Returns which of data.train, data.dev and data.test are given; raises ValueError if none."""
    files = {name: data[name] for name in ("train", "dev", "test") if data[name]}
    if not files:
        raise ValueError(
            "no examples: give --config.data.train=FILE to train, or data.dev=FILE to predict"
        )
    return {name: with_split(source, name) for name, source in files.items()}


def with_split(source: str, name: str) -> str:
    """Returns "tfds:NAME#SPLIT" for "tfds:NAME", and any other source unchanged."""
    is_complete = "#" in source or not source.startswith("tfds:")
    return source if is_complete else f"{source}#{name.replace('dev', 'validation')}"


def read_table(
    source: str | pathlib.Path,
    columns: Sequence[str],
    header_lines: int = 1,
    separator: str = "",
    data_dir: str = "",
) -> list[Record]:
    """Reads a `.csv`, `.tsv` (or `.tab`) or `.jsonl` file, or TFDS, that has all of `columns`.

    Fields may be quoted, but if a TSV has a quotation mark in an unquoted field, none is taken as
    quoted. The first of `header_lines` names the columns; the others are skipped. JSON and TFDS
    values become text (equal numbers the same text), and lists are joined by `separator`, if any.
    Raises FileNotFoundError if the file is missing, and ValueError if it is malformed.
    """
    hint, suffix = "give the correct name in --config.data", pathlib.Path(source).suffix
    if str(source).startswith("tfds:") or suffix == ".jsonl":
        objects = read_objects(source, data_dir)
        records = [_json_record(*each, columns, separator) for each in objects]
    elif suffix in (".csv", ".tsv", ".tab"):
        records = _read_delimited(pathlib.Path(source), header_lines)
        if len(records[0].columns) == 1:
            hint += " (commas separate a .csv, tabs a .tsv)"
    else:
        raise ValueError(f"{source} has an unknown suffix: expected .csv, .tsv, .tab or .jsonl")
    check_columns(records, columns, f": {hint}")
    return records


def check_columns(records: Iterable[Record], columns: Iterable[str], hint: str = "") -> None:
    """Raises ValueError, ending with `hint`, if a record lacks one of `columns`."""
    for record in records:
        if missing := [column for column in columns if column not in record.columns]:
            found = list(record.columns)
            raise ValueError(f"{record.location}: no {missing[0]!r} among {found}{hint}")


def read_text(path: pathlib.Path, expected: str) -> str:
    """Reads a UTF-8 file; `expected` describes it in the FileNotFoundError for a missing one."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: expected {expected}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        location = f"{path}, line {line}, byte {error.start}"
        raise ValueError(f"{location}: not UTF-8: convert the file, e.g. with iconv") from None


def read_objects(source: str | pathlib.Path, data_dir: str = "") -> list[tuple[dict, str]]:
    """Reads a JSON object per line, or "tfds:NAME#SPLIT"; returns them, located."""
    if str(source).startswith("tfds:"):
        return _read_tfds(source, data_dir)
    objects = []
    text = read_text(pathlib.Path(source), "a .jsonl file")
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        location = f"{source}, line {number}"
        try:
            values = json.loads(line, parse_constant=_refuse_constant)
        except ValueError as error:
            raise ValueError(
                f"{location}: not JSON ({error}); expected an object per line"
            ) from None
        if not isinstance(values, dict):
            raise ValueError(f"{location}: expected a JSON object, found {type(values).__name__}")
        objects.append((values, location))
    if not objects:
        raise ValueError(f"{source} holds no examples")
    return objects


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON: write null for a missing value")


def _json_record(values: dict, location: str, columns: Sequence[str], separator: str) -> Record:
    for column in columns:
        value = values.get(column)
        if separator and isinstance(value, list):
            values[column] = separator.join(map(_json_text, value))
        elif isinstance(value, list | dict):
            found = type(value).__name__
            raise ValueError(f"{location}: {column!r} is a {found}, expected text or a number")
    return Record({name: _json_text(value) for name, value in values.items()}, location)


def _json_text(value: object) -> str:
    """Returns the same text for equal values, such as a label written as 1, 1.0 or true."""
    if isinstance(value, bool | float) and value == value // 1:
        value = int(value)
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value)


def _read_delimited(path: pathlib.Path, header_lines: int) -> list[Record]:
    text = read_text(path, "a .csv, .tsv or .jsonl file")
    separator = "," if path.suffix == ".csv" else "\t"
    quoting, hint = csv.QUOTE_MINIMAL, ""
    if separator == "\t" and (line := _stray_quotation_mark(text)):
        quoting = csv.QUOTE_NONE
        hint = f" (line {line} has a quotation mark in a field that is not quoted, so none is)"
        logging.info("%s:%s", path, hint)
    lines = csv.reader(io.StringIO(text), delimiter=separator, quoting=quoting, strict=True)
    rows, line = [], 1
    try:
        for fields in lines:
            rows.append((fields, f"{path}, line {line}"))
            line = lines.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {line}: {error}: end a field that begins with a quotation mark with "
            "another, and double the quotation marks in it"
        ) from None
    records, names = [], rows[0][0] if rows else []
    if duplicates := [name for name in names if name and names.count(name) > 1]:
        raise ValueError(f"{path}: the header names {duplicates[0]!r} twice: rename one of them")
    for fields, location in rows[max(header_lines, 1) :]:
        if any(fields):
            if len(fields) != len(names):
                counts = f"{len(fields)} fields, but the header names {len(names)}"
                raise ValueError(f"{location}: {counts}{hint}")
            records.append(Record(dict(zip(names, fields, strict=True)), location))
    if not records:
        raise ValueError(f"{path} holds no examples")
    return records


def _stray_quotation_mark(text: str) -> int:
    """Returns the line of a quotation mark that a TSV writer would have quoted, or 0."""
    rest = _QUOTED_FIELD.sub(lambda field: "\n" * field[0].count("\n"), text)
    return rest.count("\n", 0, rest.index('"')) + 1 if '"' in rest else 0


def _read_tfds(source: str, data_dir: str) -> list[tuple[dict, str]]:
    name, _, split = source.partition("#")
    examples, objects = tfds_source(name, split, data_dir), []
    features = examples.dataset_info.features
    for number, example in enumerate(examples):
        values = json.loads(json.dumps(example, default=_json_value))
        for key, value in values.items():
            if isinstance(value, int) and (classes := getattr(features[key], "names", None)):
                values[key] = classes[value] if value >= 0 else None  # -1 hides the class.
        objects.append((values, f"{source}, example {number}"))
    return objects


def _json_value(value: bytes | np.ndarray | np.generic) -> object:
    return value.decode() if isinstance(value, bytes) else value.tolist()


def write_json_lines(path: pathlib.Path, objects: Iterable[dict]) -> None:
    """Writes one JSON object per line."""
    path.write_text("".join(json.dumps(values) + "\n" for values in objects))


def content_hash(source: str, data_dir: str) -> str:
    """Returns a hash of the bytes of a file, or of all examples of "tfds:NAME"."""
    paths = [pathlib.Path(source)]
    if source.startswith("tfds:"):
        info = tfds_source(source.partition("#")[0], "all", data_dir).dataset_info
        paths = sorted(pathlib.Path(info.data_dir).glob("*.array_record*"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def check_texts(records: Iterable[Record], columns: Sequence[str]) -> None:
    """Raises ValueError if one of the texts in `columns` is empty."""
    for record in records:
        for column in columns:
            if not record.columns[column].strip():
                raise ValueError(f"{record.location}: {column!r} is empty; fix or remove the line")


def example_ids(records: Sequence[Record], column: str) -> list[str]:
    """Returns the ids in `column`, which must be unique; numbers from 0 if `column` is empty."""
    if not column:
        return [str(number) for number in range(len(records))]
    ids = [record.columns[column] for record in records]
    check_unique(records, ids)
    return ids


def check_unique(examples: Iterable, ids: Iterable[str]) -> None:
    """Raises ValueError, with the `location` of both examples, if two have the same id."""
    locations: dict[str, str] = {}
    for example, name in zip(examples, ids, strict=True):
        if name in locations:
            raise ValueError(
                f"{example.location}: id {name!r} is already used in {locations[name]}"
            )
        locations[name] = example.location
