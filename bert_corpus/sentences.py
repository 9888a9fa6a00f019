"""Splits documents into sentences, the units of sentence pairs."""

import collections

import sentencex
from mwparserfromhell.parser import ParserError

from bert_corpus.pairs import SPECIAL_TOKENS_PER_PAIR
from bert_corpus.readers import Document
from bert_corpus.wikitext import article_passages, extract_passages

MODES = ("split", "lines")
MAX_SENTENCE_TOKENS = 128  # 0.14 % of Wikipedia's sentences are longer, none has more than 210
UNREADABLE = (ParserError, RecursionError)  # raised for markup that cannot be parsed


def split_sentences(
    document: Document,
    mode: str = "split",
    language: str = "en",
    skipped: collections.Counter | None = None,
) -> list[str]:
    """Returns the non-empty sentences of `document`, stripped of surrounding white space.

    Plain text is split in `mode` "split" (free text, in which line breaks mean nothing), or has one
    sentence per line in "lines", like the input of the original BERT. Markup is always split. The
    ISO 639-1 `language` selects the abbreviations that do not end a sentence. Counts the fragments
    of markup that are no running text in `skipped`. Raises `UNREADABLE`.
    """
    if document.markup == "wikitext":
        passages = extract_passages(document.text, skipped)
    elif document.markup == "article":
        passages = article_passages(document.text, skipped)
    elif mode == "lines":
        return [line.strip() for line in document.text.split("\n") if line.strip()]
    else:
        passages = [" ".join(document.text.split())]
    pieces = (piece for passage in passages for piece in sentencex.segment(language, passage))
    return [piece.strip() for piece in pieces if piece.strip()]


def cut_sentence(ids: bytes, max_seq_length: int) -> list[bytes]:
    """Cuts a sentence (uint16 ids) that is longer than a pair into pieces; two fill a pair.

    The splitter returns pages as one sentence if their quotes or brackets are unbalanced, or there
    is no punctuation. Prose (`MAX_SENTENCE_TOKENS`) stays whole; pairs truncate it, as
    in the released code.
    """
    max_tokens = max_seq_length - SPECIAL_TOKENS_PER_PAIR
    if len(ids) <= 2 * max(max_tokens, MAX_SENTENCE_TOKENS):
        return [ids]
    half = 2 * ((max_tokens + 1) // 2)  # in bytes
    return [ids[start : start + half] for start in range(0, len(ids), half)]
