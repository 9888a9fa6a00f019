"""Finds the inputs of a corpus, local or in a bucket, and splits them into units of work."""

import fnmatch
import glob
import hashlib
import importlib.util
import itertools
import json
import math
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import fsspec
from absl import logging

from bert_corpus.content import COMPRESSED_HEAD_BYTES, HEAD_BYTES, recognize
from bert_corpus.hub import hub_size, is_hub_address
from bert_jax.data.tfds import tfds_source

UNIT_BYTES = 1 << 21  # of an input, read by one worker
MAX_UNITS = 1 << 11  # about; units of a large input are larger
# A file that cannot be split is decompressed by each worker that shares it: with this many such
# files, none is shared.
MAX_DECOMPRESSIONS = 16
COMPRESSED = r"(?P<compression>\.(gz|bz2|zst|xz))?"
# Parts of a dump have names like enwiki-latest-pages-articles1.xml-p1p41242.bz2. The index of a
# multistream dump is not a text file.
FORMATS = {
    "text": r"(?!.*-multistream-index)([^.]+|.*\.(txt|text))" + COMPRESSED,
    "dump": r".+\.xml(-p\d+p\d+[\w-]*)?" + COMPRESSED,
    "jsonl": r".+\.(jsonl|ndjson|json)" + COMPRESSED,
    "parquet": r".+\.parquet(?P<compression>)",
    "arrow": r".+\.arrow(?P<compression>)",
    "table": r".+\.(csv|tsv|tab)" + COMPRESSED,
    "fasta": r".+\.(fasta|fas|fa|fna|ffn|frn|faa)" + COMPRESSED,
    "html": r".+\.html?" + COMPRESSED,
    "markdown": r".+\.(md|markdown)" + COMPRESSED,
}
ONE_DOCUMENT = ("file", "html", "markdown")  # in each file
SPLITTABLE = ("text", "lines", "docs", "jsonl", "fasta")  # unless they are compressed
# Beside the Arrow files of a dataset, or of its splits.
SAVED_DATASET = ("state.json", "dataset_info.json", "dataset_dict.json")
WITH_FIELDS = ("jsonl", "json", "table", "parquet", "arrow", "tfds", "hub")


class Source(NamedTuple):
    """One input: a file, local or in a bucket, "tfds:NAME" or "hf:NAME".

    Attributes:
      path: as given, or as found by a glob.
      size: in bytes.
      version: changes when the file is written again.
      format: "text", "lines" (text with a document per line), "file" (text that is one document),
        "dump", "jsonl", "table" (CSV or TSV), "parquet", "arrow", "fasta", "html", "markdown",
        "tfds" or "hub"; or, as the first bytes show, "docs" (the output of WikiExtractor) or "json"
        (an array, or objects that are not one per line).
      text_field: of formats `WITH_FIELDS`.
      data_dir: directory of prepared TFDS datasets; "" means TFDS's default.
      head: a hash of the first bytes; together with the size, it identifies copies of a file.
      repeats: the number of times that each of its training documents is used.
      num_files: of a dataset of the Hub, each of which one worker reads.
    """

    path: str
    size: int
    version: str
    format: str
    text_field: str = "text"
    data_dir: str = ""
    head: str = ""
    repeats: int = 1
    num_files: int = 1


class Unit(NamedTuple):
    """Part `index` of the `count` parts of an input."""

    source: Source
    index: int
    count: int

    def bounds(self, size: int) -> tuple[int, int]:
        """Returns where the unit begins and ends among `size` bytes, row groups or examples."""
        return size * self.index // self.count, size * (self.index + 1) // self.count

    def whole(self) -> "Unit":
        """Returns the whole input as one unit."""
        return Unit(self.source, 0, 1)


def find_inputs(
    patterns: str | Sequence[str],
    text_field: str = "text",
    data_dir: str = "",
    documents: str = "blank_lines",
) -> list[Source]:
    """Returns the files that match globs (a list or a comma-separated string), "tfds:..." and
    "hf:...".

    A directory that `datasets.save_to_disk` wrote stands for its Arrow files. `text_field` names
    the field of text, or has several names, separated by commas, each but one after a glob of
    inputs, as in "*.csv:body,text"; the first glob that matches counts. `documents` says how text
    files are split into documents: at "blank_lines", or one document per line ("lines") or file
    ("files").

    Raises FileNotFoundError for no match, OSError for a bucket that cannot be read, ImportError
    without its library, and ValueError for an empty file, an unknown suffix or content that is no
    text; or for "lines" or "files" without text files.
    """
    if isinstance(patterns, str):
        patterns = [pattern for pattern in patterns.split(",") if pattern]
    if not patterns:
        raise ValueError("--input is empty; pass files or globs")
    inputs = []
    for pattern in itertools.chain.from_iterable(map(_files_of_saved_dataset, patterns)):
        if is_hub_address(pattern):
            size, version, num_files = hub_size(pattern)
            inputs.append(Source(pattern, size, version, "hub", num_files=num_files))
            continue
        if pattern.startswith("tfds:"):
            info = tfds_source(pattern, "train", data_dir).dataset_info
            size, version = info.splits["train"].num_bytes, str(info.version)
            inputs.append(Source(pattern, size, version, "tfds", data_dir=data_dir))
            continue
        inputs += _find_files(pattern)
    inputs = _with_fields(inputs, text_field)
    if documents != "blank_lines":
        if not any(source.format == "text" for source in inputs):
            kinds = ", ".join(sorted({source.format for source in inputs}))
            raise ValueError(
                f"--documents={documents} is for text files, and the inputs are {kinds}, whose "
                "documents are already separate: leave it out"
            )
        format = {"lines": "lines", "files": "file"}[documents]
        inputs = [
            source._replace(format=format) if source.format == "text" else source
            for source in inputs
        ]
    return inputs


def repeat_inputs(sources: Sequence[Source], repeat: str) -> list[Source]:
    """Returns the sources with their repeats, from "GLOB:N,..." ("" repeats none).

    Raises ValueError for another form, for a glob that matches no source, and for a source that two
    match.
    """
    sources = list(sources)
    for part in filter(None, repeat.split(",")):
        pattern, _, number = part.rpartition(":")
        if not pattern or not number.isdecimal() or int(number) < 2:
            raise ValueError(
                f"--repeat={repeat}: {part!r} is not FILE:N or GLOB:N, with an N of 2 or more"
            )
        wanted = pattern if "://" in pattern else os.path.normpath(os.path.expanduser(pattern))
        paths = [source.path for source in sources]
        # A file whose name is the pattern, such as "a[1].txt", comes before those that it matches.
        matches = [n for n, path in enumerate(paths) if path == wanted]
        matches = matches or [n for n, path in enumerate(paths) if _matches_glob(path, wanted)]
        if not matches:
            raise ValueError(
                f"--repeat={repeat}: {pattern} matches no input; the first is {sources[0].path}"
            )
        for n in matches:
            if sources[n].repeats > 1:
                raise ValueError(f"--repeat={repeat}: {sources[n].path} matches twice")
            sources[n] = sources[n]._replace(repeats=int(number))
    return sources


def _with_fields(sources: list[Source], text_field: str) -> list[Source]:
    """Returns sources with the field of each. Raises ValueError for a glob without a source."""
    names = [name.rpartition(":") for name in text_field.split(",")]
    defaults = [field for pattern, _, field in names if not pattern] or ["text"]
    if len(defaults) > 1 or not all(field for *_, field in names):
        raise ValueError(
            f"--text_field={text_field}: expected a name, or GLOB:NAME for some of the inputs, "
            "separated by commas, such as '*.csv:body,text'"
        )
    unused = {pattern for pattern, *_ in names if pattern}
    found = []
    for source in sources:
        field, base = defaults[0], os.path.basename(source.path)
        for pattern, _, name in names if source.format in WITH_FIELDS else ():
            if pattern and any(_matches_glob(each, pattern) for each in (source.path, base)):
                unused.discard(pattern)
                field = name
                break
        found.append(source._replace(text_field=field))
    if unused:
        raise ValueError(
            f"--text_field: {', '.join(sorted(unused))} matches none of the inputs that have fields"
        )
    return found


def _files_of_saved_dataset(pattern: str) -> list[str]:
    """Returns the Arrow files of a directory of `datasets.save_to_disk`, or else the pattern.

    Raises ValueError for a directory of several splits, or in which rows are only selected.
    """
    try:
        if pattern.startswith("tfds:") or is_hub_address(pattern) or glob.has_magic(pattern):
            return [pattern]
        files, path = fsspec.core.url_to_fs(pattern)
        found = [name for name in SAVED_DATASET if files.isfile(f"{path}/{name}")]
        contents = {name: files.cat(f"{path}/{name}") for name in found}
    except Exception:
        return [pattern]  # `_find_files` says what is wrong.
    directory = pattern.rstrip("/")
    try:
        values = {name: json.loads(content) for name, content in contents.items()}
    except ValueError as error:
        raise ValueError(f"{directory}: {', '.join(found)} is damaged: {error}") from None
    if splits := values.get("dataset_dict.json", {}).get("splits"):
        options = ", ".join(f"--input={directory}/{split}" for split in splits)
        raise ValueError(f"{pattern} holds the splits of a dataset: choose among {options}")
    state = values.get("state.json", {})
    if state.get("_indices_data_files"):
        raise ValueError(
            f"{pattern} holds rows and a selection of them, which is not read: save it again with "
            "datasets.load_from_disk(DIR).flatten_indices().save_to_disk(NEW)"
        )
    names = [each["filename"] for each in state.get("_data_files", ())]
    return [f"{directory}/{name}" for name in names] or [pattern]


def _find_files(pattern: str) -> list[Source]:
    """Returns the files that match a glob, sorted, and logs how many are left out as hidden."""
    is_remote = "://" in pattern
    # What the glob lists has the sizes and versions, too: no request for each file.
    options = {"use_listings_cache": True} if pattern.startswith("gs://") else {}
    try:
        files, path = fsspec.core.url_to_fs(pattern, **options)
        names = [path] if files.isfile(path) else sorted(filter(files.isfile, files.glob(path)))
        hidden = [name for name in names if _is_hidden(name, path)]
        names = [name for name in names if not _is_hidden(name, path)]
        found = [(name, files.size(name), files.ukey(name)) for name in names]
    except ImportError as error:
        extra = ": pip install 'bert_jax[buckets]'" if pattern.startswith("gs://") else ""
        raise ImportError(f"cannot read --input={pattern}: {error}{extra}") from error
    except Exception as error:  # Each library of a cloud raises its own.
        fix = "check the address, and log in to the cloud" if is_remote else "check the path"
        raise OSError(f"cannot read --input={pattern}: {error}; {fix}") from error
    if hidden:
        matches = f"{len(hidden):,} files that are hidden or in hidden folders, such as {hidden[0]}"
        fix = "to read them, write the dot in the pattern, such as DIR/.*"
        if not found:
            raise FileNotFoundError(f"--input={pattern} matches only {matches}; {fix}")
        logging.warning("--input=%s: left out %s; %s", pattern, matches, fix)
    if not found:
        is_directory = not is_remote and os.path.isdir(os.path.expanduser(pattern))
        hint = "it is a directory, use DIR/*" if is_directory else "check it and quote a *"
        raise FileNotFoundError(f"--input={pattern} matches no file; {hint}")
    is_relative = not is_remote and not os.path.isabs(os.path.expanduser(pattern))
    shown = files.unstrip_protocol if is_remote else os.path.relpath if is_relative else str
    sources, head_bytes = [], []
    for name, size, version in found:
        path = shown(name)
        named, compression = format_of(path)
        if size == 0:
            raise ValueError(f"{path} is empty; remove it from --input")
        if os.path.basename(path) in SAVED_DATASET:
            raise ValueError(
                f"{path} belongs to a dataset that `datasets.save_to_disk` wrote: give only its "
                f"directory, --input={os.path.dirname(path) or '.'}"
            )
        sources.append(Source(path, size, version, named))
        head_bytes.append(min(size, COMPRESSED_HEAD_BYTES.get(compression, HEAD_BYTES)))
    # At once, because each request to a bucket takes long.
    heads = files.cat_ranges([name for name, *_ in found], [0] * len(found), head_bytes)
    return [_recognized(source, head) for source, head in zip(sources, heads, strict=True)]


def _is_hidden(name: str, pattern: str) -> bool:
    """Returns whether a match is hidden, or in a hidden folder, and the pattern has no such dot.

    The shell and `glob.glob` leave out these matches, too.
    """
    return "/." in name and name != pattern and not _matches(name.split("/"), pattern.split("/"))


def _matches_glob(path: str, pattern: str) -> bool:
    """Returns whether the path of a source matches a glob, whose "*" matches no "/" of a file.

    It matches those of "hf:..." and "tfds:...", which are no paths.
    """
    if path.startswith("tfds:") or is_hub_address(path):
        return path == pattern or fnmatch.fnmatchcase(path, pattern)
    return _matches(path.split("/"), pattern.split("/"))


def _matches(parts: list[str], patterns: list[str]) -> bool:
    """Returns whether the parts of a path match those of a glob; it must name leading dots."""
    if not parts or not patterns:
        return not parts and patterns in ([], ["**"])
    is_named = patterns[0].startswith(".") or not parts[0].startswith(".")
    if patterns[0] == "**":
        return _matches(parts, patterns[1:]) or (is_named and _matches(parts[1:], patterns))
    is_match = parts[0] == patterns[0] or (is_named and fnmatch.fnmatchcase(parts[0], patterns[0]))
    return is_match and _matches(parts[1:], patterns[1:])


def _recognized(source: Source, head: bytes | Exception) -> Source:
    """Returns a source with the format that its first bytes show."""
    if isinstance(head, Exception):
        raise OSError(f"cannot read {source.path}: {head}") from head
    source = source._replace(head=hashlib.blake2b(head, digest_size=8).hexdigest())
    if source.format in ("parquet", "arrow"):
        return source
    _, compression = format_of(source.path)
    format = recognize(source.path, source.format, compression, head)
    if format == "html" and not importlib.util.find_spec("trafilatura"):
        raise ImportError(f"{source.path} is HTML: pip install 'bert_jax[html]', which reads it")
    return source._replace(format=format)


def format_of(path: str) -> tuple[str, str]:
    """Returns the format (a key of `FORMATS`) and the compression that a name says.

    The compression is the suffix, or "". Raises ValueError for an unknown suffix.
    """
    for name, pattern in FORMATS.items():
        if match := re.fullmatch(pattern, os.path.basename(path), re.IGNORECASE):
            return name, (match["compression"] or "").lower()
    raise ValueError(
        f"{path} has an unknown suffix; expected UTF-8 text (.txt, .text or none), a Wikipedia "
        "dump (.xml), JSON lines (.jsonl, .ndjson, .json), a table (.csv, .tsv, .tab), a page "
        "(.html, .htm, .md) or sequences (.fasta, .fa, .fna, .faa), all also as .gz, .bz2, .zst or "
        ".xz; or .parquet or .arrow; if it is text, such as a log, rename it to *.txt"
    )


def split_into_units(sources: Sequence[Source]) -> list[list[Unit]]:
    """Returns the units that workers read, in order: a function of the sizes of the inputs.

    Small inputs are read together.
    """
    unit_bytes = max(UNIT_BYTES, sum(source.size for source in sources) // MAX_UNITS)
    num_compressed = sum(
        not is_splittable(source) and source.format not in ONE_DOCUMENT for source in sources
    )
    units, room = [], 0.0
    for source in sources:
        size, max_count = source.size, source.size
        if source.format in ONE_DOCUMENT:
            max_count = 1
        elif source.format == "hub":
            max_count = source.num_files
        elif not is_splittable(source):
            size, max_count = 4 * size, max(1, MAX_DECOMPRESSIONS // num_compressed)
        count = min(math.ceil(size / unit_bytes), max_count)
        for index in range(count):
            if size / count > room:
                units.append([])
                room = unit_bytes
            units[-1].append(Unit(source, index, count))
            room -= size / count
    return units


def is_splittable(source: Source) -> bool:
    """Returns whether an input can be read from the middle."""
    if source.format in ("parquet", "tfds", "hub"):
        return True
    _, compression = format_of(source.path)
    if source.format == "dump":
        return compression == ".bz2" and "-multistream" in os.path.basename(source.path)
    return not compression and source.format in SPLITTABLE
