"""Extracts the text passages of wiki markup, without lists, tables, headings, and references."""

# ruff: noqa: RUF001 (articles use characters that look like ASCII ones)

import html
import re

import mwparserfromhell
from mwparserfromhell import nodes
from mwparserfromhell.wikicode import Wikicode

# Tags whose content is running text. The content of every other tag is dropped.
TEXT_TAGS = {"abbr", "b", "big", "blockquote", "center", "cite", "div", "em", "font", "i"}
TEXT_TAGS |= {"ins", "nowiki", "onlyinclude", "p", "q", "s", "small", "span", "strong", "sub"}
TEXT_TAGS |= {"sup", "u", "var"}
# Templates that print one of their unnamed arguments inside a sentence, and its position. Every
# other template is dropped.
TEXT_TEMPLATES = {"angbr": 0, "angle bracket": 0, "lang": 1, "nihongo": 0, "nowrap": 0}
TEXT_TEMPLATES |= {"smaller": 0, "smallcaps": 0, "transl": -1, "transliteration": -1, "vanchor": 0}
QUANTITY_TEMPLATES = {"convert", "cvt"}
RANGE_WORDS = {"-", "–", "to", "and", "by", "x", "or", "to(-)", "and(-)"}

# Marks a line that comes from a list item, which is not a passage.
LIST_ITEM = "\0"

MEDIA_OR_CATEGORY = re.compile(
    r"\s*(file|image|media|category)\s*:"
    r"|[^|\]]+:[^|\]]+\.(jpe?g|png|svg|gif|tiff?|webp|webm|og[gav]|pdf|djvu|midi?|wav|flac|mp3)\s*$",
    re.IGNORECASE,
)
# [[fr:Anarchisme]] or [[Kategorie:Politik]], which are not part of the text.
OTHER_NAMESPACE = re.compile(r"[\w -]+:\S")

# White space is collapsed first: the later patterns take quadratic time on long runs of it.
CLEANING = [
    (re.compile(r"\s+"), " "),
    (re.compile(r"'{2,}"), ""),  # bold and italics
    (re.compile(r"__[A-Z]+__"), ""),  # __NOTOC__ and the like
    (re.compile(r"\[\s*\]"), ""),
    # Dropped templates leave "(; born 1950)", "(, )" or "( or )".
    (re.compile(r"([(\[])\s*(?:(?:[,;:/–-]|\b(?:or|and)\b)\s*)+"), r"\1"),
    (re.compile(r"\s*[,;:]\s*(?=[,;:)\]])"), ""),
    (re.compile(r"\s*\(\s*\)"), ""),
    (re.compile(r" {2,}"), " "),
    (re.compile(r"(?<=[(\[]) | (?=[)\]]|[,;:.!?](?:\s|$))"), ""),
    (re.compile(r"^[,;:.)] *|,(?=\.)"), ""),
]
ENDS_LIKE_A_SENTENCE = re.compile(r"[.!?…。！？؟।][\"'”’»)\]]*$")


def extract_passages(wikitext: str) -> list[str]:
    """Returns the running text of an article, one string per paragraph.

    Drops paragraphs that do not end like a sentence (captions, hand-written table rows, "See also"
    lines, the line before a list). Raises ParserError or RecursionError for unparsable markup.
    """
    text = plain_text(mwparserfromhell.parse(wikitext, skip_style_tags=True))
    # A paragraph may span several lines; blank lines and lists end it.
    paragraphs: list[list[str]] = [[]]
    for line in text.split("\n"):
        if not line.strip() or line.startswith((LIST_ITEM, "|", "!", "{|")):
            paragraphs.append([])
        else:
            paragraphs[-1].append(line.replace(LIST_ITEM, ""))
    passages = []
    for lines in paragraphs:
        passage = html.unescape(" ".join(lines))  # "&amp;nbsp;" leaves "&nbsp;" in the markup
        for pattern, replacement in CLEANING:
            passage = pattern.sub(replacement, passage)
        passage = passage.strip()
        if ENDS_LIKE_A_SENTENCE.search(passage) and " " in passage:
            passages.append(passage)
    return passages


def plain_text(markup: Wikicode) -> str:
    """Returns the text of parsed markup, with `LIST_ITEM` before each list item."""
    return "".join(map(_node_text, markup.nodes))


def _node_text(node: nodes.Node) -> str:
    match node:
        case nodes.Text():
            return node.value
        case nodes.Wikilink() if MEDIA_OR_CATEGORY.match(str(node.title)):
            return ""
        case nodes.Wikilink(text=Wikicode()):
            return plain_text(node.text)
        case nodes.Wikilink() if not OTHER_NAMESPACE.match(str(node.title)):
            return str(node.title).removeprefix(":")
        case nodes.ExternalLink(title=Wikicode()):
            return plain_text(node.title)
        case nodes.HTMLEntity():
            return node.normalize()
        case nodes.Template():
            return _template_text(node)
        case nodes.Heading():
            return "\n\n"
        case nodes.Tag():
            return _tag_text(node)
        case _:  # comments, template parameters, links to other namespaces
            return ""


def _template_text(template: nodes.Template) -> str:
    name = str(template.name).strip().lower().replace("_", " ")
    arguments = [plain_text(p.value).strip() for p in template.params if not p.showkey]
    if name in QUANTITY_TEMPLATES:
        length = 4 if len(arguments) > 3 and arguments[1] in RANGE_WORDS else 2
        return " ".join(arguments[:length])
    if name == "as of":
        return " ".join(["As of", *arguments[:1]])
    position = 0 if name.startswith("lang-") else TEXT_TEMPLATES.get(name, len(arguments))
    return "".join(arguments[position:][:1])


def _tag_text(tag: nodes.Tag) -> str:
    name = str(tag.tag).strip().lower()
    if name == "br":
        return "\n\n"
    if tag.wiki_markup and name in ("li", "dd", "dt"):
        return LIST_ITEM
    return plain_text(tag.contents) if name in TEXT_TAGS and tag.contents is not None else ""
