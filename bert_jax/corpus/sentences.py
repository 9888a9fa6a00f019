"""Sentences of a document, in order: the unit from which sentence pairs are made."""

import sentencex
from mwparserfromhell.parser import ParserError

from bert_jax.corpus.readers import Document
from bert_jax.corpus.wikitext import extract_passages

MODES = ("split", "lines")


class UnreadableDocument(ValueError):
    """The markup of a document cannot be parsed; it is counted and left out."""


def split_sentences(document: Document, mode: str = "split", language: str = "en") -> list[str]:
    """Returns the sentences of `document`, without surrounding white space, none empty.

    Args:
      document: text or wiki markup. Markup is always split, passage by passage.
      mode: for text, "split": free text, whose line breaks mean nothing; "lines": one sentence a
        line already, as in the original BERT's input, kept as it is.
      language: ISO 639-1 code, for the abbreviations that do not end a sentence.

    Raises:
      UnreadableDocument: the markup is beyond the parser.
    """
    if document.is_wikitext:
        try:
            passages = extract_passages(document.text)
        except (ParserError, RecursionError) as error:
            raise UnreadableDocument(str(error)) from error
    elif mode == "lines":
        return [line.strip() for line in document.text.split("\n") if line.strip()]
    else:
        passages = [" ".join(document.text.split())]
    sentences = []
    for passage in passages:
        pieces = (piece.strip() for piece in sentencex.segment(language, passage))
        sentences += [piece for piece in pieces if piece]
    return sentences
