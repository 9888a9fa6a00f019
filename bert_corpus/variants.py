"""Resolves MediaWiki's markup for variants of a language: -{zh-hans:计算机;zh-hant:電腦}-."""

import re

# "-{{" is a hyphen before a template, but "-{{{" the markup before one; "}}-" and "}}}-" likewise.
OPEN = r"-\{(?!\{)|-\{(?=\{\{[^{])"
CLOSE = r"(?<!\})\}-|(?<=\}\})\}-"
TOKEN = re.compile(f"({OPEN})|({CLOSE})")
CODE = r"[a-z]{2,3}(?:-[a-z]{2,4}){0,2}"  # such as zh-hans or sr-ec
FLAGS = re.compile(rf"\s*((?:[A-Z+-]|{CODE})?(?:\s*;\s*(?:[A-Z+-]|{CODE}))*)\s*\|")
# "zh-hans:计算机" or, in one direction only, "電腦=>zh-hans:计算机"
RULE = re.compile(rf"\s*(?:[^;:]*=>\s*)?({CODE})\s*:")
NEXT_RULE = re.compile(rf";\s*(?=(?:[^;:]*=>\s*)?{CODE}\s*:|$)")
HIDDEN_FLAGS = {"H", "T", "-", "N"}  # rules for the page, its title, the name of a variant
# MediaWiki's order for readers of Chinese who chose no variant; elsewhere it shows the first.
PREFERRED = ("zh-hans", "zh-cn", "zh-sg", "zh-my", "zh-hant", "zh-tw", "zh-hk", "zh-mo")


def resolve_variants(wikitext: str) -> str:
    """Returns wikitext with one variant of each text that has several, as MediaWiki would show it.

    Simplified Chinese is preferred; of other languages, the first variant is taken. Rules that a
    page only declares are removed. Unclosed markup is left as it is.
    """
    if "-{" not in wikitext:
        return wikitext
    # The texts of the markup that is open at this point, the innermost last.
    opened: list[list[str]] = [[]]
    position = 0
    for match in TOKEN.finditer(wikitext):
        opened[-1].append(wikitext[position : match.start()])
        position = match.end()
        if match[1]:
            opened.append([])
        elif len(opened) > 1:
            content = "".join(opened.pop())
            opened[-1].append(_shown(content))
        else:
            opened[-1].append(match[2])
    opened[-1].append(wikitext[position:])
    return "-{".join("".join(texts) for texts in opened)


def _shown(content: str) -> str:
    """Returns the visible part of the content of -{ }-."""
    if flags := FLAGS.match(content):
        names = {name.strip() for name in flags[1].split(";")}
        if names & HIDDEN_FLAGS:
            return ""
        content = content[flags.end() :]
        if "R" in names:
            return content
    variants: dict[str, str] = {}
    for rule in NEXT_RULE.split(content):
        if match := RULE.match(rule):
            variants.setdefault(match[1], rule[match.end() :].strip())
        elif rule.strip():
            return content  # text that is not to be converted
    for code in PREFERRED:
        if code in variants:
            return variants[code]
    return next(iter(variants.values()), "")
