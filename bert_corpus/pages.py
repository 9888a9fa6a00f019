"""Reads the running text of pages: HTML and Markdown, each file a document."""

import codecs
import collections
import logging
import re
from collections.abc import Iterator

from bert_corpus.content import CONVERT
from bert_corpus.files import Document, decode_line, read_lines
from bert_corpus.inputs import Unit

CHARSET = re.compile(rb"<meta[^>]*\bcharset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
CHARSET_BYTES = 1 << 10  # at the beginning of a page, in which the standard expects its encoding
# What browsers read these names as: supersets, and never UTF-16, in which they could not be written
# (WHATWG Encoding Standard; HTML Standard, 13.2.3.2).
SUPERSETS = {
    **dict.fromkeys(("ascii", "us-ascii", "iso-8859-1", "iso8859-1", "latin1"), "cp1252"),
    **dict.fromkeys(("iso-8859-9", "latin5"), "cp1254"),
    **dict.fromkeys(("iso-8859-11", "tis-620"), "cp874"),
    **dict.fromkeys(("gb2312", "gbk"), "gb18030"),
    **dict.fromkeys(("shift_jis", "shift-jis", "x-sjis"), "cp932"),
    **dict.fromkeys(("euc-kr", "ks_c_5601-1987"), "cp949"),
    "big5": "big5hkscs",
    **dict.fromkeys(("utf-16", "utf-16le", "utf-16be"), "utf-8"),
}
# Metadata in YAML or TOML. Each line must look like it, because "---" is also a rule before prose:
# a key without spaces, an indented line, an item or the end of a list; in TOML also a blank line.
KEY = r"""["']?\w[\w.-]*["']?[ \t]*"""
FRONT_MATTER = re.compile(
    rf"---[ \t]*\n{KEY}:(?:[ \t].*)?\n(?:(?:{KEY}:(?:[ \t].*)?|[ \t]+\S.*|-(?:[ \t].*)?|[\]}}])\n)*"
    r"(?:---|\.\.\.)[ \t]*$"
    rf"|\+\+\+[ \t]*\n(?:(?:{KEY}=.*|\[.*\][ \t]*|[ \t]+\S.*|\]|[ \t]*)\n)+\+\+\+[ \t]*$",
    re.MULTILINE,
)
# Tokens of markdown-it whose content is no running text -> the name of their count.
NOT_TEXT = {"fence": "code_blocks", "code_block": "code_blocks", "html_block": "html_blocks"}


def read_html(unit: Unit, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the main text of a page, without menus, tables and comments, by trafilatura.

    Its paragraphs are separated by blank lines. Counts a page of which nothing remains. Raises
    ValueError for bytes that are not of the page's encoding: the one that it declares, or UTF-8.
    """
    import trafilatura  # from the extra "html"; here, because the import takes long

    # Of a page of which nothing remains, it writes an error; here it is counted.
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    content = b"".join(line for *_, line in read_lines(unit))
    declared = CHARSET.search(content, 0, CHARSET_BYTES)
    if declared and not content.startswith(codecs.BOM_UTF8):
        page = _decoded_as(content, declared[1].decode(), unit)
    else:
        page = _decoded(unit)
    if text := trafilatura.extract(page, include_comments=False, include_tables=False):
        yield Document(re.sub(r"\n+", "\n\n", text))
    else:
        skipped["pages_without_text"] += 1


def _decoded(unit: Unit) -> str:
    """Returns the text of a UTF-8 file. Raises ValueError as `decode_line`."""
    return "".join(decode_line(line, offset, unit) for offset, _, line in read_lines(unit))


def _decoded_as(content: bytes, charset: str, unit: Unit) -> str:
    """Returns the text of a page in the encoding that it declares."""
    try:
        return content.decode(SUPERSETS.get(charset.lower(), charset))
    except (LookupError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{unit.source.path} declares the encoding {charset}: {error}; {CONVERT}, and declare "
            "that"
        ) from None


def read_markdown(unit: Unit, skipped: collections.Counter) -> Iterator[Document]:
    """Yields the text of a file of Markdown (CommonMark), without its markup.

    Headings, paragraphs and items are separated by blank lines. Blocks of code or HTML, tables,
    images and the metadata at the beginning are left out, and counted, as is a page of which
    nothing remains.
    """
    from markdown_it import MarkdownIt  # here, because the import takes long

    text = _decoded(unit).replace("\r\n", "\n").replace("\r", "\n")
    if match := FRONT_MATTER.match(text):
        text = text[match.end() :]
        skipped["metadata_blocks"] += 1
    parser = MarkdownIt("commonmark").enable("table")
    passages, in_table = [], False
    for token in parser.parse(text):
        if token.type in ("table_open", "table_close"):
            in_table = token.type == "table_open"
            skipped["tables"] += in_table
        elif token.type == "inline" and not in_table:
            passages.append("".join(map(_inline_text, token.children)).strip())
            skipped["images"] += sum(child.type == "image" for child in token.children)
        elif name := NOT_TEXT.get(token.type):
            skipped[name] += 1
    if passages := [*filter(None, passages)]:
        yield Document("\n\n".join(passages))
    else:
        skipped["pages_without_text"] += 1


def _inline_text(token) -> str:
    """Returns the text of a token within a paragraph."""
    if token.type in ("softbreak", "hardbreak"):
        return " " if token.type == "softbreak" else "\n"
    if token.type == "html_inline":
        return " " if token.content.lower().startswith("<br") else ""
    return "" if token.type == "image" else token.content
