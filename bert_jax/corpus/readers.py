"""Reads documents from text files, Wikipedia dumps and TFDS, one at a time."""

import bz2
import contextlib
import glob
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.etree import ElementTree

# Longer documents are cut at a line break, which bounds memory for files without blank lines.
MAX_DOCUMENT_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 26
TEXT_NAME = re.compile(r"[^.]+|.*\.(txt|text)", re.IGNORECASE)
# Parts of a dump have names like enwiki-latest-pages-articles1.xml-p1p41242.bz2.
DUMP_NAME = re.compile(r".+\.xml(-p\d+p\d+[\w-]*)?(\.bz2)?", re.IGNORECASE)
ARTICLE_SETS = ("wikipedia", "wiki40b")  # TFDS datasets of Wikipedia articles without markup


class Document(NamedTuple):
    """One document, as read from its source."""

    text: str
    markup: str = ""  # "wikitext" (a dump), "article" (`ARTICLE_SETS`), or "" for lines of text
    continues: bool = False  # a further part of the previous document, which was too long
    bytes_read: int = 0  # bytes of the source since the previous document, for the progress bar


def find_inputs(patterns: str | Sequence[str]) -> list[str]:
    """Returns the files that match globs (a list or a comma-separated string) and any "tfds:NAME".

    Raises FileNotFoundError for no match, and ValueError for an empty file or an unknown suffix.
    """
    if isinstance(patterns, str):
        patterns = [pattern for pattern in patterns.split(",") if pattern]
    inputs = []
    for pattern in patterns:
        if pattern.startswith("tfds:"):
            inputs.append(pattern)
            continue
        paths = sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
        if not paths:
            raise FileNotFoundError(f"--input={pattern} matches no file; check it and quote a *")
        for path in paths:
            name = os.path.basename(path)
            if not TEXT_NAME.fullmatch(name) and not DUMP_NAME.fullmatch(name):
                raise ValueError(
                    f"{path} has an unknown suffix; expected UTF-8 text (.txt, .text or none) or a "
                    "Wikipedia dump (.xml or .xml.bz2)"
                )
            if os.path.getsize(path) == 0:
                raise ValueError(f"{path} is empty; remove it from --input")
        inputs += paths
    return inputs


def input_bytes(path: str, data_dir: str = "") -> int:
    """Returns the size of an input, roughly the sum of `bytes_read` over its documents."""
    if path.startswith("tfds:"):
        return tfds_source(path, "train", data_dir).dataset_info.splits["train"].num_bytes
    return os.path.getsize(path)


def read_documents(path: str, data_dir: str = "") -> Iterator[Document]:
    """Yields the documents of one input from `find_inputs`, in order and in constant memory."""
    if path.startswith("tfds:"):
        return read_tfds(path, data_dir)
    is_dump = DUMP_NAME.fullmatch(os.path.basename(path))
    return read_wikipedia_dump(path) if is_dump else read_text_file(path)


def read_text_file(path: str) -> Iterator[Document]:
    """Yields the documents of a UTF-8 file, which are separated by blank lines.

    Raises ValueError if a byte is not valid UTF-8, or a line is too long to be text.
    """
    # Latin-1 maps each byte to one character, so bytes can be counted; "\r" also ends a line.
    with open(path, encoding="latin-1", newline="") as stream:
        lines, continues = [], False
        document_bytes = yielded = offset = 0
        encoded = iter(lambda: stream.readline(MAX_LINE_BYTES).encode("latin-1"), b"")
        # An empty line at the end of the file ends the last document.
        for line_number, line in enumerate(itertools.chain(encoded, [b""]), start=1):
            if len(line) == MAX_LINE_BYTES:
                raise ValueError(f"{path} has a line of over {MAX_LINE_BYTES:,} bytes; is it text?")
            try:
                text = line.decode("utf-8-sig" if offset == 0 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}, line {line_number}, byte {offset + error.start}: "
                    f"0x{line[error.start]:02x} is not UTF-8; convert it with iconv -t UTF-8"
                ) from None
            offset += len(line)
            is_blank = not text.strip()
            if not is_blank:
                lines.append(text.rstrip("\r\n") + "\n")
                document_bytes += len(line)
            if (is_blank and lines) or document_bytes >= MAX_DOCUMENT_BYTES:
                yield Document("".join(lines), continues=continues, bytes_read=offset - yielded)
                lines, document_bytes, yielded, continues = [], 0, offset, True
            continues = continues and not is_blank


def read_wikipedia_dump(path: str) -> Iterator[Document]:
    """Yields the articles of a MediaWiki XML dump (.xml or .xml.bz2), without redirects.

    Raises ValueError if the file is damaged, or not a MediaWiki dump.
    """
    opener = bz2.open if path.lower().endswith(".bz2") else contextlib.nullcontext
    with open(path, "rb") as compressed, opener(compressed) as stream:
        position = num_pages = 0
        try:
            events = ElementTree.iterparse(stream, events=("start", "end"))
            _, root = next(events)
            for event, element in events:
                if event != "end" or not element.tag.endswith("}page"):
                    continue
                num_pages += 1
                text = element.findtext("{*}revision/{*}text") or ""
                is_article = element.findtext("{*}ns") == "0"
                if is_article and element.find("{*}redirect") is None:
                    before, position = position, compressed.tell()
                    yield Document(text, "wikitext", bytes_read=position - before)
                root.clear()  # The root would otherwise keep every page.
        except (ElementTree.ParseError, OSError, EOFError) as error:
            raise ValueError(
                f"{path} is damaged or cut off after {num_pages} pages ({error}); download it again"
            ) from error
    if not num_pages:
        raise ValueError(f"{path} holds no <page>; expected a MediaWiki XML export")


def tfds_source(name: str, split: str, data_dir: str = "") -> Sequence[dict]:
    """Opens a split of a dataset that was prepared as ArrayRecord; never downloads anything.

    `name` is the TFDS name, such as "wiki40b/en", with or without the prefix "tfds:"; `data_dir` ""
    means TFDS's default. Examples hold numpy values, and bytes for text. Raises FileNotFoundError
    for a missing dataset, and ValueError for an unknown split or another file format.
    """
    # Imported here because the import takes half a second.
    from tensorflow_datasets.core import read_only_builder, registered

    name = name.removeprefix("tfds:")
    prepare = f"`tfds build {name} --file_format=array_record --overwrite`"
    try:
        builder = read_only_builder.builder_from_files(
            name, data_dir=os.path.expanduser(data_dir) or None
        )
    except registered.DatasetNotFoundError:
        raise FileNotFoundError(
            f"no prepared dataset tfds:{name} in {data_dir or 'the default data_dir of TFDS'}; "
            f"prepare it where TensorFlow is installed with {prepare}, or give another data_dir"
        ) from None
    try:
        return builder.as_data_source(split)
    except NotImplementedError:
        raise ValueError(
            f"tfds:{name} is prepared as {builder.info.file_format.value} in {builder.data_dir}; "
            f"expected array_record: prepare it again with {prepare}"
        ) from None
    except ValueError as error:
        raise ValueError(f"tfds:{name} in {builder.data_dir}: {error}") from None


def read_tfds(name: str, data_dir: str = "") -> Iterator[Document]:
    """Yields the "text" field of the train split of `name`, as `tfds_source` opens it."""
    source = tfds_source(name, "train", data_dir)
    if "text" not in (fields := source.dataset_info.features):
        raise ValueError(f"{name} has the fields {', '.join(fields)}; expected 'text'")
    markup = "article" if name.removeprefix("tfds:").startswith(ARTICLE_SETS) else ""
    for example in source:
        yield Document(example["text"].decode(), markup, bytes_read=len(example["text"]))
