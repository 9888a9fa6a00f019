"""Tables of examples, as records of text columns.

They are CSV, TSV, JSONL and Parquet files, TFDS, and data sets of the Hugging Face Hub.
"""

import ast
import csv
import hashlib
import json
import pathlib
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from absl import logging
from ml_collections import ConfigDict

from bert_jax.data import hub
from bert_jax.data.tfds import tfds_source
from bert_jax.tasks.records import iterate_records

# Not pyarrow.csv: it accepts a quoted field that is never closed, and reads `"a"b` as ab; it keeps
# "\r\n" inside fields, takes blank lines for rows, and its errors count rows, not lines.
csv.field_size_limit(2**31 - 1)  # In characters; the default is 128 Ki.
_QUOTED_FIELD = re.compile(r'(?<![^\t\n])"(?:[^"]|"")*+"(?![^\t\n])')  # In a TSV.
_UNQUOTE = str.maketrans({'"': None, "\t": "\1", "\n": "\2"})  # In a quoted field.
_JSON = json.JSONDecoder(parse_int=str, parse_float=str)
_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "vertical bars"}
_PARQUET_ROWS = 1024  # Read at once.
SUFFIXES = (".csv", ".tsv", ".tab", ".jsonl", ".parquet")
"""Of the files that `iterate_table` reads."""


EXPECTED_FILE = "expected the path of a file; bert_jax.fit takes examples in memory"


class Record(NamedTuple):
    """One example: its columns as text, and its location, "FILE, line N", for error messages.

    Attributes:
      columns: the text of each value, "" if it is missing. Numbers, booleans and nested values of
        JSON are as written in the file.
      labels: of a table with several labels per text, those of this one; None if they are unknown.
    """

    columns: dict[str, str]
    location: str
    id: str = ""
    labels: tuple[str, ...] | None = None


def files_from_config(data: ConfigDict) -> dict[str, str]:
    """Returns which of data.train, data.dev and data.test are given; raises ValueError if none.

    Raises TypeError for examples in memory instead of a path.
    """
    names = ("train", "dev", "test")
    for name in names:
        if not isinstance(data[name], str | None):
            raise TypeError(f"data.{name} is a {type(data[name]).__name__}: {EXPECTED_FILE}")
    files = {name: data[name] for name in names if data[name]}
    if not files:
        raise ValueError("no examples: set config.data.train=FILE to train")
    return {name: with_split(source, name) for name, source in files.items()}


def is_named(source: object) -> bool:
    """Returns whether a source is "tfds:NAME" or "hub:NAME", and not the path of a file."""
    return str(source).startswith(("tfds:", hub.PREFIX))


def with_split(source: str, name: str) -> str:
    """Returns "tfds:NAME#SPLIT" for "tfds:NAME", the same of "hub:", and any other unchanged."""
    is_complete = "#" in source or not is_named(source)
    if is_complete or (source.startswith(hub.PREFIX) and not hub.has_splits(source)):
        return source
    return f"{source}#{name.replace('dev', 'validation')}"


def read_table(
    source: str | pathlib.Path,
    columns: Sequence[str],
    header_lines: int = 1,
    data_dir: str = "",
    label: str = "",
    label_separator: str = "",
) -> list[Record]:
    """Reads a `.csv`, `.tsv` (or `.tab`), `.jsonl` or `.parquet` file, TFDS or a set of the Hub.

    It has all `columns`. The first of `header_lines` names the columns; the others are skipped.
    Fields may be quoted. With a `label_separator`, records get `labels` from the column `label`: a
    list in JSON, TFDS and the Hub, or a text that is split. null means unknown labels; an empty
    text means no label if any example has labels, and otherwise unknown labels. Raises
    FileNotFoundError if the file is missing, and ValueError if it is malformed, as a TSV whose
    quotation marks can be read in two ways is.
    """
    without_labels: set[str] = set()  # Locations of null.
    options = header_lines, data_dir, label, label_separator, without_labels
    records = list(iterate_table(source, columns, *options))
    if label_separator:
        return _with_label_sets(records, label, label_separator, without_labels)
    return records


def iterate_table(
    source: object,
    columns: Sequence[str],
    header_lines: int = 1,
    data_dir: str = "",
    label: str = "",
    label_separator: str = "",
    without_labels: set[str] | None = None,
) -> Iterator[Record]:
    """Yields the records of a table, or of examples in memory, but splits no texts into labels.

    `without_labels` receives the locations where the label is null.
    """
    is_path = isinstance(source, str | pathlib.Path)
    suffix = pathlib.Path(source).suffix if is_path and not is_named(source) else ""
    hint = ": set the correct name in text, text_pair, label, label_columns or id" if label else ""
    if not is_path or is_named(source) or suffix in (".jsonl", ".parquet"):
        if suffix == ".jsonl":
            objects = (
                (_values_as_written(line, location), location)
                for line, _, location in _iterate_json_lines(source)
            )
        else:
            values = iterate_rows(source, data_dir) if is_path else check_objects(source)
            objects = (
                ({name: json.dumps(value) for name, value in example.items()}, location)
                for example, location in values
            )
        for values, location in objects:
            record = _record_of_json(values, location, columns, label, label_separator)
            if values.get(label) == "null" and without_labels is not None:
                without_labels.add(location)
            check_columns([record], columns, hint)
            yield record
    elif suffix in (".csv", ".tsv", ".tab"):
        if header_lines < 1:
            raise ValueError(f"header_lines={header_lines}: expected at least 1, the column names")
        for record in _iterate_delimited(pathlib.Path(source), header_lines):
            if len(record.columns) == 1:
                check_columns([record], columns, hint + " (commas separate a .csv, tabs a .tsv)")
            check_columns([record], columns, hint)
            yield record
    else:
        raise ValueError(f"{source} has an unknown suffix: expected one of {', '.join(SUFFIXES)}")


def _record_of_json(
    values: dict[str, str], location: str, columns: Sequence[str], label: str, label_separator: str
) -> Record:
    """Returns the record of an object, given the JSON text of its values."""
    labels = None
    if label_separator and values.get(label, "").startswith("["):
        labels = _listed_labels(values[label], f"{location}: {label!r}")
    for column in (*columns, label):
        kind = {"[": "list", "{": "dict"}.get(values.get(column, "")[:1])
        if kind and (column != label or labels is None):
            message = f"{column!r} is a {kind}, expected text or a number"
            if column == label:
                message += "; to train on several labels, set config.data.label_separator"
            raise ValueError(f"{location}: {message}")
    texts = {column: _text_of_json(value) for column, value in values.items()}
    return Record(texts, location, labels=labels)


def _with_label_sets(
    records: Sequence[Record], column: str, separator: str, unknown: set[str]
) -> list[Record]:
    """Returns the records with the labels in their texts; `unknown` has the locations of null."""
    is_labeled = any(each.labels is not None or each.columns.get(column) for each in records)
    labeled = []
    for record in records:
        text = record.columns.get(column)
        is_text = text is not None and record.labels is None and record.location not in unknown
        if is_text and (text or is_labeled):
            record = with_labels_in_text(record, column, separator)
        labeled.append(record)
    return labeled


def with_labels_in_text(record: Record, column: str, separator: str) -> Record:
    """Returns the record with the labels in its text. Raises ValueError for a list in the text."""
    text = record.columns[column]
    if _is_printed_list(text):
        raise ValueError(
            f"{record.location}: {column!r} is {text:.60}, a list that was written as text: "
            f"write its labels with {separator!r} between them, or the table as .jsonl"
        )
    labels = tuple(filter(None, map(str.strip, text.split(separator))))
    return record._replace(labels=labels)


def _is_printed_list(text: str) -> bool:
    """Returns whether a text is a list as Python or JSON prints it, as pandas does in a CSV."""
    try:
        return text.startswith("[") and isinstance(ast.literal_eval(text.strip()), list)
    except (SyntaxError, ValueError):
        return False


def check_columns(records: Iterable[Record], columns: Iterable[str], hint: str = "") -> None:
    """Raises ValueError, ending with `hint`, if a record lacks one of `columns`."""
    for record in records:
        if missing := [column for column in columns if column not in record.columns]:
            names = ", ".join(record.columns) or "none"
            raise ValueError(f"{record.location}: no column {missing[0]!r}; found {names}{hint}")


def read_text(path: pathlib.Path, expected: str) -> str:
    """Reads a UTF-8 file; `expected` describes it in the FileNotFoundError for a missing one."""
    return "".join(iterate_lines(path, expected))


def iterate_lines(path: pathlib.Path, expected: str) -> Iterator[str]:
    """Yields the lines of a UTF-8 file, each with the "\\n" at its end; errors as `read_text`."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: expected {expected}")
    try:
        with open(path, encoding="utf-8-sig") as stream:
            yield from stream
    except UnicodeDecodeError as error:
        raise ValueError(_locate_undecodable(path, error)) from None


def _locate_undecodable(path: pathlib.Path, error: UnicodeDecodeError) -> str:
    """Returns the message for the first byte of a file that is not UTF-8."""
    start = number = 0
    with open(path, "rb") as stream:
        for line in stream:
            number += 1
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as found:
                start += found.start
                break
            start += len(line)
    fix = "convert it with iconv -f ENCODING -t UTF-8, with the encoding that it has"
    return f"{path}, line {number}, byte {start}: not UTF-8: {fix}"


def iterate_rows(source: str | pathlib.Path, data_dir: str = "") -> Iterator[tuple[dict, str]]:
    """Yields (values by column, location) of each row of a table.

    Values have the types of the file, those of CSV and TSV are text, or None if empty. A path with
    none of `SUFFIXES` is read as JSONL.
    """
    suffix = pathlib.Path(source).suffix
    if is_named(source):
        yield from read_objects(source, data_dir)
    elif suffix == ".parquet":
        yield from _iterate_parquet(pathlib.Path(source))
    elif suffix in (".csv", ".tsv", ".tab"):
        for record in iterate_table(source, ()):
            yield {name: text or None for name, text in record.columns.items()}, record.location
    else:
        yield from iterate_objects(source)


def _iterate_parquet(path: pathlib.Path) -> Iterator[tuple[dict, str]]:
    """Yields (object, location) of each row of a Parquet file. Raises OSError or ValueError."""
    import pyarrow  # Here, because the imports take long.
    from pyarrow import parquet

    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: expected a .parquet file")
    number_of_rows = 0
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"{path}: two columns are named {twice[0]!r}: rename one of them")
            for batch in file.iter_batches(_PARQUET_ROWS):
                for values in batch.to_pylist():
                    number_of_rows += 1
                    location = f"{path}, row {number_of_rows}"
                    yield _check_object(values, location), location
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not Parquet, or damaged: {error}") from None
    if not number_of_rows:
        raise ValueError(f"{path} holds no examples")


def read_objects(source: str | pathlib.Path, data_dir: str = "") -> list[tuple[dict, str]]:
    """Reads a JSON object per line, "tfds:NAME#SPLIT" or "hub:NAME#SPLIT".

    Returns (object, location) of each.
    """
    if str(source).startswith("tfds:"):
        return _read_tfds(source, data_dir)
    if is_named(source):
        return _read_hub(str(source))
    return [*iterate_objects(source)]


def iterate_objects(source: str | pathlib.Path) -> Iterator[tuple[dict, str]]:
    """Yields (object, location) of each line of a `.jsonl` file that is not blank."""
    for _, values, location in _iterate_json_lines(source):
        yield values, location


def _iterate_json_lines(source: str | pathlib.Path) -> Iterator[tuple[str, dict, str]]:
    """Yields each line that is not blank, the object in it, and its location."""
    is_empty = True
    lines = iterate_lines(pathlib.Path(source), "a .jsonl file")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        location = f"{source}, line {number}"
        try:
            values = json.loads(line, parse_constant=_refuse_constant)
            json.dumps(values, ensure_ascii=False).encode()  # Fails for a lone surrogate.
        except ValueError as error:
            raise ValueError(f"{location}: not JSON ({error}): write an object per line") from None
        if not isinstance(values, dict):
            raise ValueError(f"{location}: expected a JSON object, found {type(values).__name__}")
        is_empty = False
        yield line, values, location
    if is_empty:
        raise ValueError(f"{source} holds no examples")


def _values_as_written(line: str, location: str) -> dict[str, str]:
    """Returns the JSON text of each value of the object in `line`, such as 1.0 and true.

    Raises ValueError if a key occurs twice.
    """

    def skip_space(index: int) -> int:
        return _JSON_SPACE.match(line, index).end()

    values, index = {}, skip_space(line.index("{") + 1)
    while line[index] != "}":
        key, index = _JSON.raw_decode(line, index)
        start = skip_space(skip_space(index) + len(":"))
        _, index = _JSON.raw_decode(line, start)
        if key in values:
            raise ValueError(f"{location}: {key!r} occurs twice: remove one of the two")
        values[key] = line[start:index]
        index = skip_space(index)
        if line[index] == ",":
            index = skip_space(index + 1)
    return values


def check_objects(examples: object, source: str = "") -> list[tuple[dict, str]]:
    """Returns the dict of each example in memory and its place, "example N" from 0 of `source`.

    `examples` are as in `iterate_records`. Raises TypeError for anything else, and ValueError for
    values that JSON cannot hold.
    """
    objects = []
    for number, values in enumerate(iterate_records(examples)):
        location = f"{source}, example {number}" if source else f"example {number}"
        objects.append((_check_object(values, location), location))
    return objects


def _check_object(values: dict, location: str) -> dict:
    """Returns `values`. Raises ValueError if JSON cannot hold them."""
    try:
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        expected = "text, numbers, or None for a missing value"
        raise ValueError(f"{location}: {error}: expected {expected}") from None
    return values


def field(holder: object, name: str, expected: type | types.UnionType, location: str):
    """Returns `holder[name]`; raises ValueError unless it has the type `expected`."""
    value = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(value, expected):
        found = "none" if value is None else type(value).__name__
        problem = f"must be of type {getattr(expected, '__name__', expected)}, found {found}"
        if isinstance(holder, dict) and name not in holder:
            problem = f"is missing; found {', '.join(holder) or 'an empty object'}"
        raise ValueError(f"{location}: {name!r} {problem}")
    return value


def text_field(values: dict, name: str, location: str, may_be_empty: bool = False) -> str:
    """Returns the string `values[name]`; raises ValueError if it is missing or blank.

    With `may_be_empty`, for `check_empty_texts`, a blank one or null is returned as text.
    """
    if may_be_empty and name in values and values[name] is None:
        return ""
    text = field(values, name, str, location)
    if not may_be_empty and not text.strip():
        raise ValueError(f"{location}: the {name} is empty")
    return text


def id_field(values: dict, location: str, number: int, name: str = "id") -> str:
    """Returns `values[name]` as text, or `number` if it is missing or null; 1 and 1.0 become "1".

    Raises ValueError unless it is text or a whole number.
    """
    id_ = number if values.get(name) is None else values[name]
    if isinstance(id_, bool) or not isinstance(_rounded(id_), str | int):
        raise ValueError(f"{location}: {name!r} must be text or a whole number, found {id_!r:.60}")
    return str(_rounded(id_))


def note_unused_columns(
    records: Iterable[Record], used: Collection[str], split: str, notes: dict[str, int]
) -> None:
    """Names in `notes` the columns with values, besides `used` and ids, that nothing reads."""
    objects = [
        ({name: text or None for name, text in record.columns.items() if name}, record.location)
        for record in records
    ]
    if names := find_unused_keys(objects, used):
        notes[f"{split} columns that are not used ({', '.join(names)})"] = len(names)


def find_unused_keys(
    objects: Iterable[tuple[dict, str]], used: Collection[str]
) -> dict[str, tuple[int, str]]:
    """Returns each key not in `used` -> (number of objects with a value, location of the first).

    A null or an empty list is not a value. Ids, such as "query_id", are left out.
    """
    found: dict[str, tuple[int, str]] = {}
    for values, location in objects:
        for key in values.keys() - set(used):
            is_id = not {"id", "ids"}.isdisjoint(key.lower().split("_"))
            if values[key] is not None and values[key] != [] and not is_id:
                count, first = found.get(key, (0, location))
                found[key] = count + 1, first
    return dict(sorted(found.items()))


def note_unused_keys(unused: Mapping[str, int], what: str, notes: dict[str, int]) -> None:
    """Adds to `notes` how many of `what`, such as "train lines", have each key that is not used."""
    for key, count in unused.items():
        note = f"{what} with {key!r}, which is not used"
        notes[note] = notes.get(note, 0) + count


def drop_blank_rows(
    records: list[Record], label: str, split: str, notes: dict[str, int]
) -> list[Record]:
    """Drops the rows without any field, which spreadsheets append, from a table with labels.

    Counts them in `notes`. In a table without labels, each row is an example to predict.
    """
    if not any(record.columns.get(label) for record in records):
        return records
    kept = [record for record in records if any(record.columns.values())]
    if len(kept) < len(records):
        notes[f"{split} rows without any field, skipped"] = len(records) - len(kept)
    return kept


def drop_unknown_classes(
    source: str, records: list[Record], label: str, split: str, notes: dict[str, int]
) -> list[Record]:
    """Drops the examples without a class from a split of TFDS or the Hub that has classes.

    So SNLI marks those on which its annotators do not agree, by the class -1. Counts them in
    `notes`. In a split without any class, each example is one to predict; in a file it is an error.
    """
    kept = [record for record in records if record.columns.get(label)]
    if not is_named(source) or not kept or len(kept) == len(records):
        return records
    notes[f"{split} examples of unknown class, dropped"] = len(records) - len(kept)
    return kept


def check_empty_texts(
    split: str,
    empty: Sequence[tuple[str, str]],
    is_labeled: bool,
    is_training: bool,
    notes: dict[str, int],
    what: str = "examples with an empty text",
) -> None:
    """Counts the examples of a split that have `empty` texts, (location, name of the text) pairs.

    They are predicted and, where labels are known, scored. But a run that trains
    (`is_training`) raises ValueError for the examples that its checkpoint depends on: the
    examples of train, and of a labeled dev, which selects it.
    """
    if empty and is_training and (split == "train" or (split == "dev" and is_labeled)):
        location, name = empty[0]
        more = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
        raise ValueError(f"{location}: {name} is empty{more}: fix or remove it")
    if empty:
        notes[f"{split} {what}"] = len({location for location, _ in empty})


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON: write null for a missing value")


def _rounded(value: object) -> object:
    """Returns the int that equals a bool or float; any other value unchanged."""
    is_whole = isinstance(value, bool | float) and value == value // 1
    return int(value) if is_whole else value


def _text_of_json(value: str) -> str:
    """Returns the text of a JSON value: of a string its content, "" of null, else as written."""
    if value.startswith('"'):
        return json.loads(value)
    return "" if value == "null" else value


def _listed_labels(value: str, what: str) -> tuple[str, ...]:
    """Returns the labels in a JSON list, numbers as written. Raises ValueError."""
    labels = []
    for label in json.loads(value, parse_int=str, parse_float=str):
        if isinstance(label, bool):
            label = json.dumps(label)
        if not isinstance(label, str) or not label.strip():
            found = f"is a list that holds {json.dumps(label):.60}"
            raise ValueError(f"{what} {found}: expected labels that are text or numbers")
        labels.append(label)
    return tuple(labels)


def _iterate_delimited(path: pathlib.Path, header_lines: int) -> Iterator[Record]:
    expected = "a .csv, .tsv or .jsonl file"
    delimiter = "," if path.suffix == ".csv" else "\t"
    quoting, hint, literal = csv.QUOTE_MINIMAL, "", 0
    if delimiter == "\t" and any('"' in line for line in iterate_lines(path, expected)):
        literal = _find_literal_quote(path, read_text(path, expected), header_lines)
    if literal:
        quoting = csv.QUOTE_NONE
        hint = f": line {literal} has a quotation mark in its text, so no field is read as quoted"
        logging.info("%s%s", path, hint)
    other = _other_separator(next(iterate_lines(path, expected), ""), delimiter)
    wrong_separator = (
        f"{path}, line 1: {_SEPARATORS[delimiter]} separate a {path.suffix}, but this header has "
        f"{other}: convert the file, e.g. with pandas: read_csv(FILE, sep=None, engine='python')"
        ".to_csv(NEW_FILE, index=False)"
    )
    text = iterate_lines(path, expected)
    lines = csv.reader(text, delimiter=delimiter, quoting=quoting, strict=True)
    names: list[str] = []
    num_examples = num_blank = 0
    line = 1
    try:
        for number, fields in enumerate(lines):
            location, line = f"{path}, line {line}", lines.line_num + 1
            if number == 0:
                names = fields
                if duplicates := [name for name in names if name and names.count(name) > 1]:
                    fix = f"the header names {duplicates[0]!r} twice: rename one of them"
                    raise ValueError(f"{path}: {fix}")
            elif number < header_lines:
                continue
            elif len(fields) == len(names):
                num_examples += 1
                yield Record(dict(zip(names, fields, strict=True)), location)
            elif any(fields) and other:
                raise ValueError(wrong_separator)
            elif any(fields):
                counts = f"expected {len(names)} fields, as in the header, found {len(fields)}"
                raise ValueError(f"{location}: {counts}{hint}")
            else:
                num_blank += 1
    except csv.Error as error:
        if other:
            raise ValueError(wrong_separator) from None
        problem = f"{error}: close every quoted field, and double the quotation marks inside it"
        raise ValueError(f"{path}, line {line}: {problem}") from None
    if num_blank and len(names) == 1:  # csv.writer writes the empty field of a single column as "".
        logging.warning('%s: %d blank lines skipped; "" is an empty field', path, num_blank)
    if not num_examples:
        raise ValueError(f"{path} holds no examples")


def _other_separator(header: str, delimiter: str) -> str:
    """Returns what seems to separate the names in the header, if it is not `delimiter`."""
    found = (name for mark, name in _SEPARATORS.items() if mark in header)
    return "" if delimiter in header else next(found, "")


def _find_literal_quote(path: pathlib.Path, text: str, header_lines: int) -> int:
    """Returns the line of a quotation mark that is part of a TSV's text; 0 if all quote fields.

    None quotes a field if `csv.writer` would have quoted a field with one, or if the lines have as
    many fields as the header only without quoting. Raises ValueError if they do with it, too.
    """

    def fits_header(table: str) -> bool:
        header, *lines = table.split("\n")
        rows = (line for line in lines[header_lines - 1 :] if line.strip("\t"))
        return all(row.count("\t") == header.count("\t") for row in rows)

    unquoted = _QUOTED_FIELD.sub(lambda field: field[0].translate(_UNQUOTE), text)
    mark = re.search('"', unquoted) or re.search("[\1\2]", unquoted)
    # A quoted header shows that all fields are quoted.
    if not mark or (mark[0] != '"' and (text.startswith('"') or not fits_header(text))):
        return 0
    line = len(re.findall("[\n\2]", unquoted[: mark.start()])) + 1
    if mark[0] != '"' and fits_header(unquoted):
        raise ValueError(
            f"{path}, line {line}: the quotation mark may quote a field or be part of the text: "
            "quote all fields and the header (csv.QUOTE_ALL), or convert the file to .jsonl"
        )
    return line


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


def _read_hub(source: str) -> list[tuple[dict, str]]:
    objects = check_objects(hub.open_hub(source), source)
    if not objects:
        raise ValueError(f"{source} holds no examples")
    # So GLUE and others hide the labels of test, also those that are numbers and not classes.
    if all(values.get("label") == -1 for values, _ in objects):
        for values, _ in objects:
            values["label"] = None
    return objects


def _json_value(value: object) -> object:
    return value.decode() if isinstance(value, bytes) else value.tolist()


def write_json_lines(path: pathlib.Path, objects: Iterable[dict]) -> None:
    """Writes one JSON object per line."""
    path.write_text("".join(json.dumps(values) + "\n" for values in objects), encoding="utf-8")


def content_hash(source: str, data_dir: str) -> str:
    """Returns a hash of the bytes of a file, or of all examples of "tfds:NAME" or "hub:NAME"."""
    digest, paths = hashlib.sha256(), [pathlib.Path(source)]
    if source.startswith(hub.PREFIX):
        for values, _ in read_objects(source):
            digest.update(json.dumps(values).encode())
        paths = []
    elif source.startswith("tfds:"):
        info = tfds_source(source.partition("#")[0], "all", data_dir).dataset_info
        paths = sorted(pathlib.Path(info.data_dir).glob("*.array_record*"))
    for path in paths:
        with open(path, "rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()[:16]


def with_ids(records: Sequence[Record], column: str) -> list[Record]:
    """Returns the records with the ids in `column`, which must be unique; "": numbers from 0."""
    ids = (record.columns[column] if column else str(i) for i, record in enumerate(records))
    return check_unique([record._replace(id=id_) for record, id_ in zip(records, ids, strict=True)])


def check_unique(examples: list) -> list:
    """Returns `examples`. Raises ValueError, with the `location` of both, if two have one `id`."""
    locations: dict[str, str] = {}
    for example in examples:
        check_new_id(example.id, example.location, locations)
    return examples


def check_new_id(id_: str, location: str, locations: dict[str, str]) -> None:
    """Raises ValueError if `locations`, of each id before, has `id_` elsewhere; adds it."""
    if (first := locations.setdefault(id_, location)) != location:
        raise ValueError(f"{location}: id {id_!r} is already used in {first}")
