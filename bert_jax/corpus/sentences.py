"""Splits documents into sentences, the units of sentence pairs."""

import sentencex
from mwparserfromhell.parser import ParserError

from bert_jax.corpus.readers import Document
from bert_jax.corpus.wikitext import article_passages, extract_passages

MODES = ("split", "lines")
UNREADABLE = (ParserError, RecursionError)  # raised for markup that cannot be parsed


def split_sentences(document: Document, mode: str = "split", language: str = "en") -> list[str]:
    """Returns the non-empty sentences of `document`, stripped of surrounding white space.

    Plain text is split in `mode` "split" (free text, in which line breaks mean nothing), or has one
    sentence per line in "lines", like the input of the original BERT. Markup is always split. The
    ISO 639-1 `language` selects the abbreviations that do not end a sentence. Raises `UNREADABLE`.
    """
    if document.markup == "wikitext":
        passages = extract_passages(document.text)
    elif document.markup == "article":
        passages = article_passages(document.text)
    elif mode == "lines":
        return [line.strip() for line in document.text.split("\n") if line.strip()]
    else:
        passages = [" ".join(document.text.split())]
    pieces = (piece for passage in passages for piece in sentencex.segment(language, passage))
    return [piece.strip() for piece in pieces if piece.strip()]
