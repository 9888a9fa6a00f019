"""Splits documents into sentences, the units of sentence pairs."""

import collections
import itertools
import re

import sentencex
from mwparserfromhell.parser import ParserError

from bert_corpus.files import Document
from bert_corpus.pairs import SPECIAL_TOKENS_PER_PAIR
from bert_corpus.wikitext import UnclosedMarkupError, article_passages, extract_passages
from bert_corpus.words import CLOSING_MARKS, SENTENCE_ENDS, count_words

MODES = ("split", "lines")
MAX_SENTENCE_TOKENS = 128  # 0.14 % of Wikipedia's sentences are longer, none has more than 210
# Raised for markup that cannot be parsed.
UNREADABLE = (ParserError, RecursionError, UnclosedMarkupError)
# Longer text without spaces is cut: the library takes quadratic time for it.
MAX_UNSPACED_CHARACTERS = 1000
UNSPACED_PIECES = re.compile(
    rf"(?s).{{1,{MAX_UNSPACED_CHARACTERS}}}(?:(?<=[.!?{SENTENCE_ENDS}])[{CLOSING_MARKS}]*|(?<=\s)|\Z)"
    rf"|.{{{MAX_UNSPACED_CHARACTERS}}}"
)
# Thai and Lao put spaces between phrases and have no full stop. Consecutive phrases count as one
# sentence of at most this many characters.
MAX_PHRASES_CHARACTERS = 200
PHRASES = re.compile(rf"(?s)\S.{{0,{MAX_PHRASES_CHARACTERS - 1}}}(?=\s|\Z)|\S+")
# A long word of ASCII, such as an address, is cut only where the library takes quadratic time.
ASCII_PIECE = re.compile(rf"(?s).{{{MAX_UNSPACED_CHARACTERS}}}[^!?]*(?:[!?]+[{CLOSING_MARKS}]*|\Z)")
LONG_WORD = re.compile(rf"\S{{{MAX_UNSPACED_CHARACTERS}}}\S*")
# Full stops of Khmer, and of Tibetan at a space, which the library doesn't know.
KHMER_STOPS, TIBETAN_STOPS = "។៕", "།༎"
OTHER_ENDS = re.compile(
    rf"(?<=[{KHMER_STOPS}])(?![{CLOSING_MARKS}]|ល។)|(?<=[{TIBETAN_STOPS}])\s+"  # "។ល។" is "etc."
)


def split_sentences(
    document: Document,
    mode: str = "split",
    language: str = "en",
    skipped: collections.Counter | None = None,
) -> list[str]:
    """Returns the non-empty sentences of `document`, stripped of surrounding white space.

    Plain text is split in `mode` "split" (free text, in which line breaks mean nothing), or has one
    sentence per line in "lines", like the input of the original BERT. Markup is always split. No
    sentence continues in another paragraph. The ISO 639-1 `language` selects the abbreviations that
    do not end a sentence. Counts the fragments of markup that are no running text in `skipped`.
    Raises `UNREADABLE`.
    """
    if document.markup == "wikitext":
        passages = extract_passages(document.text, skipped)
    elif document.markup == "article":
        passages = article_passages(document.text, skipped)
    elif document.markup == "sequence":
        return [document.text]
    elif mode == "lines":
        return [line.strip() for line in _with_unix_ends(document.text).split("\n") if line.strip()]
    else:
        # Text files that are split at blank lines have none left.
        paragraphs = re.split(r"\n\s*\n", _with_unix_ends(document.text))
        passages = [" ".join(paragraph.split()) for paragraph in paragraphs]
    pieces = itertools.chain.from_iterable(_segment(passage, language) for passage in passages)
    return [piece.strip() for piece in pieces if piece.strip()]


def _with_unix_ends(text: str) -> str:
    """Returns text with "\\n" as line end, as text files are read; JSON may hold others."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _segment(passage: str, language: str) -> list[str]:
    """Returns the sentences of a passage, whose only white space is spaces, in linear time."""
    if any(stop in passage for stop in KHMER_STOPS + TIBETAN_STOPS):
        passage = OTHER_ENDS.sub("\n", passage)
    if _has_long_word(passage):
        passage = LONG_WORD.sub(_cut_long_word, passage)
    if passage.isascii() and "\n" not in passage:
        return sentencex.segment(language, passage)
    pieces = []
    for stretch in passage.split("\n"):
        for piece in sentencex.segment(language, stretch):
            is_long = len(piece) > MAX_PHRASES_CHARACTERS
            if is_long and count_words(piece) > 2 * len(piece.split()):
                for phrases in PHRASES.findall(piece):
                    pieces += UNSPACED_PIECES.findall(phrases)
            else:
                pieces.append(piece)
    return pieces


def _has_long_word(passage: str) -> bool:
    """Returns whether spaces are far apart somewhere; true if a word has twice the limit."""
    starts = range(0, len(passage) - MAX_UNSPACED_CHARACTERS + 1, MAX_UNSPACED_CHARACTERS)
    return any(passage.find(" ", start, start + MAX_UNSPACED_CHARACTERS) < 0 for start in starts)


def _cut_long_word(word: re.Match) -> str:
    """Returns a long word, with line breaks where it is cut: after a sentence, or anywhere."""
    if word[0].isascii():
        return ASCII_PIECE.sub(r"\g<0>\n", word[0])
    return "\n".join(UNSPACED_PIECES.findall(word[0]))


def cut_sentence(ids: bytes, max_seq_length: int, itemsize: int = 2) -> list[bytes]:
    """Cuts a sentence that is longer than a pair into pieces; two fill a pair.

    Token ids have `itemsize` bytes.
    The splitter returns pages as one sentence if their quotes or brackets are unbalanced, or there
    is no punctuation. Prose (`MAX_SENTENCE_TOKENS`) stays whole; pairs truncate it, as
    in the released code.
    """
    max_tokens = max_seq_length - SPECIAL_TOKENS_PER_PAIR
    if len(ids) <= itemsize * max(max_tokens, MAX_SENTENCE_TOKENS):
        return [ids]
    half = itemsize * ((max_tokens + 1) // 2)  # in bytes
    return [ids[start : start + half] for start in range(0, len(ids), half)]
