"""Estimates how long the parser of wikitext takes for markup that is never closed."""

import re

# Of characters, which the parser reads again for markup that is not closed: a second or two.
MAX_REPEATED_CHARACTERS = 4_000_000
# Their content is no markup.
RAW_TAGS = {"ce", "chem", "gallery", "graph", "hiero", "imagemap", "math", "nowiki", "pre", "score"}
RAW_TAGS |= {"source", "syntaxhighlight", "templatedata", "timeline"}
SINGLE_TAGS = {"br", "dd", "dt", "hr", "img", "li", "link", "meta", "td", "th", "tr", "wbr"}
# Without groups, so that `re` skips to these characters.
MARK = re.compile(r"\{\{+|\}\}+|\[\[|\]\]|\[[a-z/]|<|\{\||\|\}(?!\})")
LINK = re.compile(r"\[\[[^\n\[\]{}<>|]*")  # the title
TAG = re.compile(r"</?([^\s<>/!|][^\s<>/\"']*)")


class _Finder:
    """Finds the next occurrence of strings after ascending positions, in linear time."""

    def __init__(self, text: str):
        self.text = text
        self.found: dict[str, int] = {}

    def find(self, string: str, position: int) -> int:
        """Returns where `string` begins at or after `position`, or the length of the text."""
        if self.found.get(string, -1) < position:
            found = self.text.find(string, position)
            self.found[string] = len(self.text) if found < 0 else found
        return self.found[string]


def repeated_characters(wikitext: str) -> int:
    """Returns about how many characters mwparserfromhell reads again.

    It reads from an opening template, link, tag or table until this is closed, or cannot be closed
    any more; then it takes the opening as text, and goes back: many of them take quadratic time.
    """
    finder, length = _Finder(wikitext), len(wikitext)
    opened: list[tuple[str, int]] = []  # kind and position, the innermost last
    repeated = position = 0
    while match := MARK.search(wikitext, position):
        mark, start, position = match[0], match.start(), match.end()
        if mark.startswith("{{"):
            opened += [("{{", start)] * (len(mark) // 2)
        elif mark.startswith("}}"):
            for _ in range(len(mark) // 2):
                _close(opened, "{{")
        elif mark == "[[":
            position = LINK.match(wikitext, start).end()
            if wikitext.startswith("|", position):
                opened.append(("[[", start))
            elif wikitext.startswith("]]", position):
                position += 2
            else:
                repeated += position - start
        elif mark == "]]":
            _close(opened, "[[")
        elif mark[0] == "[":  # an external link ends with its line
            end = finder.find("\n", start)
            if finder.find("]", start) >= end:
                repeated += end - start
        elif mark == "{|":
            opened.append(("{|", start))
        elif mark == "|}":
            _close(opened, "{|")
        elif wikitext.startswith("<!--", start):
            end = finder.find("-->", position)
            repeated += length - start if end == length else 0
            position = max(position, end % length)
        elif tag := TAG.match(wikitext, start):
            name, position = tag[1].lower(), tag.end()
            end = finder.find(">", position)
            if wikitext.startswith("/", start + 1):
                repeated += _close_tag(opened, name, start)
            elif wikitext.startswith("/>", end - 1):
                position = max(position, end)
            elif name in RAW_TAGS and end < length:
                closing = finder.find(f"</{name}", end)
                repeated += length - start if closing == length else 0
                position = max(position, closing % length)
            elif name not in SINGLE_TAGS:
                opened.append((f"<{name}", start))
    return repeated + sum(length - start for _, start in opened)


def _close(opened: list[tuple[str, int]], kind: str) -> None:
    """Removes the innermost opening if it is of a kind; within others, its end is text."""
    if opened and opened[-1][0] == kind:
        opened.pop()


def _close_tag(opened: list[tuple[str, int]], name: str, position: int) -> int:
    """Removes a closed tag, and those in it that are not closed; returns their lengths."""
    repeated = 0
    while opened and opened[-1][0].startswith("<"):
        kind, start = opened.pop()
        if kind == f"<{name}":
            break
        repeated += position - start
    return repeated
