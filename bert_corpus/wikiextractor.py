"""Reads the lines of WikiExtractor's output: articles between `<doc ...>` and `</doc>`."""

import html
import re
from collections.abc import Sequence
from typing import NamedTuple

_NAME = r"[\w:.-]+"
_ATTRIBUTE = rf"[ \t]+{_NAME}[ \t]*=[ \t]*(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s\"'>]+)"
_TAG = rf"<doc(?:{_ATTRIBUTE})+[ \t]*>"
# Titles are not escaped: a tag with quotation marks in one ends with its line.
_ODD_TAG = rf"<doc[ \t]+{_NAME}[ \t]*=(?:(?!</doc)[^\n])*>(?=\s*$)"
TAG = re.compile(
    rf"(?P<end></doc\s*>)|{_TAG}|{_ODD_TAG}|(?P<bare><doc>)"
    rf"|(?P<unclear><doc\s+{_NAME}\s*=|^\s*<doc\s*$)"
)
QUOTED_TITLE = re.compile(rf"\stitle\s*=\s*([\"'])(.*?)\1(?=\s+{_NAME}\s*=|\s*>$)")
BARE_TITLE = re.compile(r"\stitle\s*=\s*()([^\s\"'>]+)")

_WRAPPER = r"(?:<\?xml[^\n>]*\?>|</?docs\b[^\n>]*>)"  # around all articles of a file
WRAPPERS = re.compile(rf"\s*(?:{_WRAPPER}\s*)+")
_BEGINNING = rf"\s*(?:{_WRAPPER}\s*)*"
ARTICLES = re.compile(
    rf"{_BEGINNING}(?:{_TAG}|{_ODD_TAG}|<doc>\s*$|<doc>(?s:.*?)</doc\s*>)", re.MULTILINE
)
OTHER_DOCS = re.compile(
    rf"{_BEGINNING}<docs?(?:\s+{_NAME}\s*=|\s*>?\s*$)", re.MULTILINE | re.IGNORECASE
)
LINK = re.compile(r"</?a\b[^>\n]*>")  # of --links


class Part(NamedTuple):
    """A part of a line: "start" (`<doc ...>`, with its title), "text" or "end" (`</doc>`)."""

    kind: str
    text: str = ""


def is_docs(start: str) -> bool:
    """Returns whether a file that begins with `start` is WikiExtractor's output.

    Raises ValueError for `<doc ...>` in another form.
    """
    if ARTICLES.match(start):
        return True
    if match := OTHER_DOCS.match(start):
        raise ValueError(
            f"begins with {match[0].strip()!r}, which is not WikiExtractor's format: expected "
            "<doc ...> in one line before each article, and </doc> after it"
        )
    return False


def split_line(line: str, place: str) -> list[Part]:
    """Returns the parts of a line.

    Raises ValueError, which names the `place`, for `<doc ...>` whose end is not clear.
    """
    if "<doc" not in line and "</doc" not in line:
        return [Part("text", line)]
    parts, position = [], 0
    for match in TAG.finditer(line):
        if match["unclear"]:
            tag = line[match.start() :].strip()
            raise ValueError(
                f"{place}: the end of the tag in {tag!r:.60} is not clear: expected <doc ...> in a "
                "line of its own"
            )
        before = line[position : match.start()]
        if match["bare"] and before.strip():
            continue  # The text is about it.
        parts.append(Part("text", before))
        parts.append(Part("end") if match["end"] else Part("start", _title(match[0])))
        position = match.end()
    parts.append(Part("text", line[position:]))
    return [part for part in parts if len(parts) == 1 or part.kind != "text" or part.text.strip()]


def article_text(lines: Sequence[str], title: str) -> str:
    """Returns the text of the lines of an article, without its title and links."""
    lines = [LINK.sub("", html.unescape(line)) for line in lines]
    has_title = bool(lines) and lines[0].strip() == title
    return "".join(lines[has_title:]).strip()


def _title(tag: str) -> str:
    match = QUOTED_TITLE.search(tag) or BARE_TITLE.search(tag)
    return html.unescape(match[2]).strip() if match else ""
