"""Checks a sample of the text of a corpus: its language, and how well the vocabulary fits it."""

import collections
import importlib.util
import unicodedata
from array import array
from collections.abc import Mapping, Sequence

from bert_corpus.config import CorpusConfig
from bert_corpus.encoding import Encoder
from bert_corpus.words import UNSPACED, UNSPACED_CHARACTERS_PER_WORD, count_words
from bert_jax.tokenizers.tokenizer import Tokenizer

# Without a warning:
MAX_TOKENS_PER_WORD = 2.0
MAX_TOKENS_PER_CHARACTER = 1.5  # in scripts without spaces; punctuation counts as tokens
MAX_OTHER_LANGUAGES = 0.2  # of the documents
MAX_ACCENTED_WORDS = 0.01  # of the words, where accents are stripped
# A text with fewer words is too short, and fewer documents are too few, to identify a language.
MIN_WORDS = 20
MIN_DOCUMENTS = 10
# Codes that name the same language, or that are told apart only with long texts.
SAME_LANGUAGE = {"nb": "no", "nn": "no", "bs": "hr", "sr": "hr", "ms": "id"}
# BERT's uncased vocabulary on a sample of the English Wikipedia (docs/corpora.md).
ENGLISH_TOKENS_PER_WORD = 1.32


def check_text(
    texts: Sequence[str], tokenizer: Tokenizer, config: CorpusConfig, is_symbols: bool
) -> tuple[dict, list[str]]:
    """Returns what the manifest says of `texts`, beginnings of documents, and warnings.

    These are the number of `documents`, the share of each of their `languages` (with the library
    py3langid), `tokens_per_word`, and `accented_words`, the share of words that lose accents.
    `is_symbols` says that most documents are sequences of symbols, such as DNA, which have neither
    languages nor accents, and no warning.
    """
    encoder = Encoder(tokenizer)
    num_words = sum(map(count_words, texts))
    num_tokens = sum(map(len, encoder.encode(texts))) // array(encoder.typecode).itemsize
    found = {"documents": len(texts), "tokens_per_word": round(num_tokens / max(num_words, 1), 3)}
    if is_symbols:
        return found, []
    if tokenizer.strips_accents:
        words = [word for text in texts for word in text.split()]
        accented = sum(map(has_accents, words)) / max(len(words), 1)
        found["accented_words"] = round(accented, 4)
    if importlib.util.find_spec("py3langid"):
        found["languages"] = find_languages(texts)
    # Then most words are of these scripts.
    is_unspaced = sum(len(UNSPACED.findall(text)) for text in texts) > num_words
    return found, advise(found, config, is_unspaced)


def has_accents(word: str) -> bool:
    """Returns whether a word has combining marks, which BERT's uncased tokenizer strips."""
    return not word.isascii() and any(
        unicodedata.category(character) == "Mn" for character in unicodedata.normalize("NFD", word)
    )


def find_languages(texts: Sequence[str]) -> dict[str, float]:
    """Returns the share of each language among the documents that are long enough to tell."""
    import py3langid  # from the extra "cleaning"

    counts = collections.Counter(
        py3langid.classify(text)[0] for text in texts if count_words(text) >= MIN_WORDS
    )
    if counts.total() < MIN_DOCUMENTS:
        return {}
    return {code: round(count / counts.total(), 4) for code, count in counts.most_common()}


def advise(found: Mapping, config: CorpusConfig, is_unspaced: bool) -> list[str]:
    """Returns warnings about the text and its vocabulary, from what `check_text` has found.

    `is_unspaced` says that most words are of scripts that are written without spaces.
    """
    warnings = []
    shares = collections.Counter()
    for code, share in found.get("languages", {}).items():
        shares[SAME_LANGUAGE.get(code, code)] += share
    asked = SAME_LANGUAGE.get(config.language, config.language)
    if shares:
        main, share = shares.most_common(1)[0]
        if main != asked and share > 0.5:
            warnings.append(
                f"{share:.0%} of the sampled documents are identified as {main!r}, and --language="
                f"{config.language}: set --language={main}, for the abbreviations of its sentences "
                "and the card of the model; or check the input"
            )
        elif not config.only_language:
            kept = asked if asked in shares else main
            other_share = 1 - shares.pop(kept)
            if other_share > MAX_OTHER_LANGUAGES:
                others = ", ".join(f"{code} {part:.0%}" for code, part in shares.most_common(3))
                warnings.append(
                    f"{other_share:.0%} of the sampled documents are in other languages than "
                    f"{kept!r} ({others}): if that is not wanted, --only_language={kept} drops them"
                )
    fertility = found["tokens_per_word"]
    if is_unspaced:
        per_character = fertility / UNSPACED_CHARACTERS_PER_WORD
        is_high = per_character > MAX_TOKENS_PER_CHARACTER
        finding = (
            f"the vocabulary takes {per_character:.2f} tokens for a character of this script, and "
            "one trained on it about one, or fewer"
        )
    else:
        is_high = fertility > MAX_TOKENS_PER_WORD
        finding = (
            f"the vocabulary splits a word into {fertility:.2f} tokens; on English, BERT's takes "
            f"{ENGLISH_TOKENS_PER_WORD}, and a vocabulary trained on the language needs at most "
            f"about {MAX_TOKENS_PER_WORD:g}"
        )
    if is_high:
        warnings.append(
            f"{finding}: train one on this text (tools/train_vocab.py), or add its words "
            "(tools/extend_vocab.py)"
        )
    if (accented := found.get("accented_words", 0.0)) > MAX_ACCENTED_WORDS:
        warnings.append(
            f"{accented:.1%} of the words lose accents, which the vocabulary strips: if accents "
            "tell words apart in this language, train one with --nostrip_accents and "
            "--output=NAME.json"
        )
    return warnings
