"""Reads the column of text of tables: CSV and TSV, Parquet, and Arrow files."""

import collections
import contextlib
import csv
import re
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import fsspec

from bert_corpus.files import (
    MAX_LINE_BYTES,
    Document,
    damaged,
    decode_line,
    open_unit,
    raise_if_unreadable,
    read_lines,
)
from bert_corpus.inputs import Unit

MAX_SHOWN = 20  # columns in an error
BATCH_ROWS = 1024  # of Parquet, read at once
ARROW_FILE = b"ARROW1"  # begins Arrow's file format; `datasets` writes its stream format


def read_table(unit: Unit, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the text column of a CSV or TSV file, whose header names it.

    Fields may be quoted, as RFC 4180 says, and then hold line ends. Raises ValueError for a header
    without the column, for a row with another number of fields, and for quotation marks that do not
    quote a field: with tabs as delimiters, those of a field that holds a tab or a line end. Counts
    rows whose column is empty.
    """
    path, field = unit.source.path, unit.source.text_field
    lines = (decode_line(line, offset, unit) for offset, _, line in read_lines(unit))
    header_line = next(lines, "")
    is_tsv = re.search(r"\.(tsv|tab)(\.\w+)?$", path, re.IGNORECASE)
    names, delimiter = _split_header(header_line, "\t,;" if is_tsv else ",;\t", field)
    if field not in names:
        raise no_column(path, names, field, ": its first line must name the columns, or")
    if names.count(field) > 1:
        raise ValueError(f"{path}: the header names {field!r} twice: rename one of them")
    index, line_number = names.index(field), 2
    csv.field_size_limit(MAX_LINE_BYTES)  # So that a quote that is not closed fills no memory.
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        for row in rows:
            place, line_number = f"{path}, line {line_number}", rows.line_num + 2
            if not row:
                continue
            if len(row) != len(names):
                counts = f"expected {len(names)} fields, as in the header, found {len(row)}"
                raise ValueError(f"{place}: {counts}; quote a text that holds {delimiter!r}")
            if delimiter == "\t" and any(re.search(r"[\t\r\n]", value) for value in row):
                raise ValueError(
                    f"{place}: a quoted field holds a tab or a line end, so perhaps its quotation "
                    'mark is text, and the field holds other fields: write " as "" and quote the '
                    "field, or write the table as .csv or .jsonl"
                )
            skipped["lines"] += 1
            if row[index]:
                yield Document(row[index])
            else:
                skipped["lines_without_text"] += 1
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {line_number}: {error}; close every quoted field, and double the "
            "quotation marks inside it"
        ) from None


def _split_header(line: str, delimiters: str, field: str) -> tuple[list[str], str]:
    """Returns the names in a header, and what separates them: the first that gives `field`.

    Spreadsheets in countries with decimal commas write semicolons.
    """
    headers = [(next(csv.reader([line], delimiter=d), []), d) for d in delimiters]
    return next((header for header in headers if field in header[0]), headers[0])


def no_column(path: str, names: Iterable[str], field: str, fix: str = ":") -> ValueError:
    """Returns the error of a table without the column of text."""
    names = list(names)
    shown = [f"{name!r:.50}" for name in names[:MAX_SHOWN]]
    shown += [f"{len(names) - MAX_SHOWN} more"] * (len(names) > MAX_SHOWN)
    return ValueError(
        f"{path} has the columns {', '.join(shown)}; expected {field!r}{fix} name the column with "
        "--text_field"
    )


def read_parquet(unit: Unit, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the text column of the row groups of a unit."""
    from pyarrow import parquet  # here, because the imports of this file take long

    path, field = unit.source.path, unit.source.text_field
    with _damage_named(path), fsspec.open(path, "rb") as stream:
        file = parquet.ParquetFile(stream, page_checksum_verification=True)
        _check_column(path, file.schema_arrow, field)
        groups = range(*unit.bounds(file.num_row_groups))
        yield from _documents(file.iter_batches(BATCH_ROWS, groups, [field]), field, skipped)


def read_arrow(unit: Unit, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the text column of an Arrow file, in the file format or the stream format."""
    path, field = unit.source.path, unit.source.text_field
    with _damage_named(path), open_unit(unit) as (stream, *_):
        schema, batches = _arrow_batches(stream)
        _check_column(path, schema, field)
        yield from _documents(batches, field, skipped)


def _arrow_batches(stream: BinaryIO):
    """Returns the schema of an Arrow file, and an iterator of its record batches."""
    from pyarrow import ipc

    is_file = stream.read(len(ARROW_FILE)) == ARROW_FILE
    stream.seek(0)
    reader = ipc.open_file(stream) if is_file else ipc.open_stream(stream)
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    return reader.schema, map(_validated, batches)


def _validated(batch):
    """Returns a record batch. Raises ArrowInvalid for a damaged one, of which Arrow may crash."""
    batch.validate(full=True)
    return batch


@contextlib.contextmanager
def _damage_named(path: str) -> Iterator[None]:
    """Raises ValueError, naming the file, for what pyarrow raises if it is damaged."""
    import pyarrow

    try:
        yield
    except (OSError, EOFError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise_if_unreadable(error)
        raise damaged(path, error) from error


def _check_column(path: str, schema, field: str) -> None:
    """Raises ValueError unless a pyarrow schema has a column of strings of this name."""
    import pyarrow

    if field not in schema.names:
        raise no_column(path, schema.names, field)
    strings = pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()
    kind = schema.field(field).type
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if not any(map(kind.equals, strings)):
        raise ValueError(f"column {field!r} of {path} is {kind}; expected string")


def _documents(batches: Iterable, field: str, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the texts of a column of record batches; counts the rows, and those without text."""
    for batch in batches:
        for text in batch.column(field).to_pylist():
            skipped["lines"] += 1
            if isinstance(text, str):
                yield Document(text)
            else:
                skipped["lines_without_text"] += 1
