"""Extracts the text passages of articles, without lists, tables, headings, and references."""

# ruff: noqa: RUF001 (articles use characters that look like ASCII ones)

import collections
import html
import re

import mwparserfromhell
from mwparserfromhell import nodes
from mwparserfromhell.wikicode import Wikicode

from bert_corpus.unclosed import MAX_REPEATED_CHARACTERS, repeated_characters
from bert_corpus.variants import resolve_variants
from bert_corpus.words import CLOSING_MARKS, SENTENCE_ENDS, UNSPACED_CHARACTERS, count_words
from bert_jax.tokenizers.characters import FORMAT, MARKS, category_class

# Tags whose content is running text. The content of every other tag is dropped.
TEXT_TAGS = {"abbr", "b", "big", "blockquote", "center", "cite", "div", "em", "font", "i"}
TEXT_TAGS |= {"ins", "nowiki", "onlyinclude", "p", "q", "s", "small", "span", "strong", "sub"}
TEXT_TAGS |= {"sup", "u", "var"}
BLOCK_TAGS = {"blockquote", "center", "div", "p"}  # begin and end a line, so they join no words
INVISIBLE_TAGS = {"nowiki", "section", "templatestyles", "wbr"}  # if without content
# Templates that print one of their unnamed arguments -> its position. All others are dropped.
TEXT_TEMPLATES = {"angbr": 0, "angle bracket": 0, "lang": 1, "nihongo": 0, "nowrap": 0}
TEXT_TEMPLATES |= {"smaller": 0, "smallcaps": 0, "transl": -1, "transliteration": -1, "vanchor": 0}
TEXT_TEMPLATES |= {
    "仮リンク": 0,
    "読み仮名": 0,
    "ruby": 0,
    "link-en": 0,
    "internal link helper/en": 0,
}
LIST_ITEM = "\0"  # marks a line that comes from a list item, which is not a passage
GAP = "\1"  # marks where something visible was dropped, such as a reference, template or image
BLOCK = "\2"  # marks the beginning and end of a block
APOSTROPHE = "\3"  # marks one that belongs to no markup of bold or italics
GAPS = re.compile(f"{GAP}+")
# What ends a word, a number or a sentence, and what begins a word or an amount: a space is left
# between them. Scripts without spaces need none.
SIGNS, CURRENCIES = category_class("Sc", "So"), category_class("Sc")
MAX_CONTEXT = 8  # characters on both sides, so that it takes linear time
ENDS_WORD = re.compile(
    rf"(?:(?![{UNSPACED_CHARACTERS}{FORMAT}])[\w{MARKS}.,;:!?…)\]\"”’»%‰°′″™®]"
    rf"|(?<=[\w{MARKS}])['‘“]|\d\s?[{SIGNS}])[{FORMAT}{GAP}]*$"
)
BEGINS_WORD = re.compile(
    rf"[{FORMAT}{GAP}]{{0,{MAX_CONTEXT}}}(?:(?![{UNSPACED_CHARACTERS}{FORMAT}])[\w{MARKS}]|[{CURRENCIES}]\d)"
)
SPACED_BLOCK = re.compile(rf"(?<=[^\s{BLOCK}]){BLOCK}+(?=[^\s{BLOCK}])")

# Templates that stand for a few characters, by what they print.
SYMBOLS = {
    " ": "emsp ensp hairsp hsp nbs nbsp nnbsp pad quad sp space spaces thinsp",
    " – ": "nbndash nbsndash snd snds sndash spnd spndash",
    " — ": "nbmdash smd smdash spmd spmdash",
    "–": "endash ndash –",
    "—": "emdash mdash mdashb —",
    " · ": "dot interpunct middot ·",
    " • ": "bull bullet •",
    APOSTROPHE: "' apostrophe",
    f"{APOSTROPHE}s": "'s",
    "-": "hyphen nbhyph nbhyphen",
    "−": "minus",
    "±": "plusminus plusmn ±",
    "×": "times ×",
    "&": "& amp ampersand",
    "=": "=",
    "": "shy wbr wj zwsp",
    "\u200c": "zwnj",
    "\u200d": "zwj",
}
SYMBOL_TEMPLATES = {name: symbol for symbol, names in SYMBOLS.items() for name in names.split()}
SYMBOL_TEMPLATES |= {"em dash": "—", "en dash": "–", "spaced em dash": " — "}
SYMBOL_TEMPLATES |= dict.fromkeys(
    ("spaced en dash", "spaced en dash space", "spaced endash", "spaced ndash"), " – "
)
SYMBOL_TEMPLATES |= dict.fromkeys(
    ("figure space", "hair space", "narrow no-break space", "non-breaking space", "thin space"), " "
)
MUSIC_SYMBOLS = {"flat": "♭", "b": "♭", "sharp": "♯", "#": "♯", "natural": "♮"}
RANGE_WORDS = {"-", "–", "to", "and", "by", "x", "or", "to(-)", "and(-)"}

MEDIA_OR_CATEGORY = re.compile(
    r"\s*(file|image|media|category|ファイル|画像|カテゴリ|文件|檔案|档案|图像|圖像|分类|分類"
    r"|파일|분류|ไฟล์|ภาพ|หมวดหมู่)\s*:"
    r"|[^|\]]+:[^|\]]+\.(jpe?g|png|svg|gif|tiff?|webp|webm|og[gav]|pdf|djvu|midi?|wav|flac|mp3)\s*$",
    re.IGNORECASE,
)
# [[fr:Anarchisme]] or [[Kategorie:Politik]], which are not part of the text.
OTHER_NAMESPACE = re.compile(rf"[\w{MARKS}{FORMAT} -]+:\S")
# Those that fill a line are categories and links to other languages, and what they show (after "|")
# is the key by which a category sorts the article.
LINES_OF_OTHER_NAMESPACES = re.compile(
    rf"^(?:[ \t]*\[\[[\w{MARKS}{FORMAT} -]+:[^\s\[\]][^\[\]\n]*\]\])+[ \t]*$", re.MULTILINE
)


def _space(removed: re.Match) -> str:
    """Returns a space if what is removed stands between words or sentences, or else nothing."""
    text, start, end = removed.string, removed.start(), removed.end()
    before = text[max(0, start - MAX_CONTEXT) : start]
    return " " if ENDS_WORD.search(before) and BEGINS_WORD.match(text, end) else ""


BOLD_OR_ITALICS = re.compile(r"'{2,}")
# White space is collapsed first: later patterns take quadratic time on long runs of it.
CLEANING = [
    (re.compile(r"\s+"), " "),
    (BOLD_OR_ITALICS, ""),
    (re.compile(r"__[A-Z]+__"), ""),  # __NOTOC__ and the like
    (re.compile(r"\[\s*\]"), _space),
    # Dropped templates leave "(; born 1950)", "(, )" or "( or )".
    (re.compile(r"([(\[])\s*(?:(?:[,;:/–-]|\b(?:or|and)\b)\s*)+"), r"\1"),
    (re.compile(r"\s*[,;:]\s*(?=[,;:)\]])"), ""),
    (re.compile(r"\s*\(\s*\)"), _space),
    (re.compile(r" {2,}"), " "),
    (re.compile(r"(?<=[(\[]) | (?=[)\]]|[,;:.!?](?:\s|$))"), ""),
    (re.compile(r"^[,;:.)] *|,(?=\.)"), ""),
    # The same in full-width characters.
    (re.compile(r"(?<=（)[\s、，；：・]+|[\s、，；：・]+(?=）)"), ""),
    (re.compile(r"（）"), _space),
]
# TFDS's wiki40b marks the parts of an article; a title or heading is on the next line.
WIKI40B_HEADING = re.compile(r"_START_(?:ARTICLE|SECTION)_\n?[^\n]*")
WIKI40B_BREAK = re.compile(r"_START_PARAGRAPH_|_NEWLINE_")
MAX_FRAGMENT_WORDS = 12  # of a caption, a table row or a line of "See also"
ENDS_LIKE_A_SENTENCE = re.compile(rf"[.!?{SENTENCE_ENDS}][{CLOSING_MARKS}]*$")


class UnclosedMarkupError(ValueError):
    """Raised for a page that would take too long to parse."""


def extract_passages(wikitext: str, skipped: collections.Counter | None = None) -> list[str]:
    """Returns the running text of an article, one string per paragraph.

    Drops short paragraphs that do not end like a sentence (captions, hand-written table rows, "See
    also" lines), and counts them in `skipped`. Raises ParserError or RecursionError for unparsable
    markup, and UnclosedMarkupError, also counted, for markup whose parsing takes quadratic time.
    """
    _check_unclosed_markup(wikitext, skipped)
    markup = LINES_OF_OTHER_NAMESPACES.sub("", resolve_variants(wikitext))
    text = plain_text(mwparserfromhell.parse(markup, skip_style_tags=True))
    text = BOLD_OR_ITALICS.sub("", text)  # They may stand between a word and what was dropped.
    text = GAPS.sub(_space, text)
    if BLOCK in text:
        text = SPACED_BLOCK.sub(" ", text).replace(BLOCK, "")
    # A paragraph may span several lines; blank lines and lists end it.
    lines = [
        "" if line.isspace() or line.startswith((LIST_ITEM, "|", "!", "{|")) else line
        for line in text.split("\n")
    ]
    passages = []
    for paragraph in "\n".join(lines).split("\n\n"):
        passage = html.unescape(paragraph.replace(LIST_ITEM, ""))  # &amp;nbsp; leaves &nbsp;
        for pattern, replacement in CLEANING:
            passage = pattern.sub(replacement, passage)
        passages.append(passage.replace(APOSTROPHE, "'").strip())
    return _running_text(passages, skipped)


def article_passages(text: str, skipped: collections.Counter | None = None) -> list[str]:
    """Returns the running text of an article from TFDS's wiki40b or wikipedia, by paragraph.

    In wikipedia, where headings are not marked, drops fragments as `extract_passages` does.
    """
    text, num_marks = WIKI40B_HEADING.subn("", text)
    lines = [" ".join(line.split()) for line in WIKI40B_BREAK.sub("\n", text).split("\n")]
    return list(filter(None, lines)) if num_marks else _running_text(lines, skipped)


def _running_text(passages: list[str], skipped: collections.Counter | None) -> list[str]:
    """Returns the passages that are running text; counts the others, and their words."""
    kept = []
    for passage in filter(None, passages):
        num_words = count_words(passage)
        ends = ENDS_LIKE_A_SENTENCE.search(passage)
        if num_words > (1 if ends else MAX_FRAGMENT_WORDS):
            kept.append(passage)
        elif skipped is not None:
            skipped["fragments"] += 1
            skipped["words_in_fragments"] += num_words
    return kept


def _check_unclosed_markup(wikitext: str, skipped: collections.Counter | None) -> None:
    # Most pages are too small to reach the limit whatever they hold.
    if len(wikitext) * sum(map(wikitext.count, "{[<")) <= MAX_REPEATED_CHARACTERS:
        return
    if repeated_characters(wikitext) > MAX_REPEATED_CHARACTERS:
        if skipped is not None:
            skipped["pages_of_unclosed_markup"] += 1
        raise UnclosedMarkupError("too many templates, links, tags or tables are never closed")


def plain_text(markup: Wikicode) -> str:
    """Returns the text of parsed markup, with `LIST_ITEM`, `GAP` and `BLOCK`."""
    return "".join(map(_node_text, markup.nodes))


def _node_text(node: nodes.Node) -> str:
    match node:
        case nodes.Text():
            return node.value
        case nodes.Wikilink() if MEDIA_OR_CATEGORY.match(str(node.title)):
            return GAP
        case nodes.Wikilink(text=Wikicode() as text) | nodes.ExternalLink(title=Wikicode() as text):
            return plain_text(text)
        case nodes.Wikilink() if not OTHER_NAMESPACE.match(str(node.title)):
            return str(node.title).removeprefix(":")
        case nodes.HTMLEntity():
            return node.normalize()
        case nodes.Template():
            return _template_text(node)
        case nodes.Heading():
            return "\n\n"
        case nodes.Tag():
            name = str(node.tag).strip().lower()
            if name == "br":
                return "\n\n"
            if node.wiki_markup and name in ("li", "dd", "dt"):
                return LIST_ITEM
            if name in BLOCK_TAGS and node.contents is not None:
                return f"{BLOCK}{plain_text(node.contents)}{BLOCK}"
            if name in TEXT_TAGS and node.contents is not None:
                return plain_text(node.contents)
            if name in INVISIBLE_TAGS:
                return ""
        case nodes.Comment():
            return ""
    return GAP  # other tags, template parameters, links to other namespaces


def _template_text(template: nodes.Template) -> str:
    name = str(template.name).strip().lower().replace("_", " ")
    name = name.removeprefix("template:").strip()
    arguments = [plain_text(p.value).strip() for p in template.params if not p.showkey]
    if name in ("convert", "cvt"):
        length = 4 if len(arguments) > 3 and arguments[1] in RANGE_WORDS else 2
        return " ".join(arguments[:length])
    if name == "as of":
        return " ".join(["As of", *arguments[:1]])
    if name in SYMBOL_TEMPLATES:
        return SYMBOL_TEMPLATES[name]
    if name == "music" and arguments:
        return MUSIC_SYMBOLS.get(arguments[0], GAP)
    position = 0 if name.startswith("lang-") else TEXT_TEMPLATES.get(name, len(arguments))
    return "".join(arguments[position:][:1]) or GAP
