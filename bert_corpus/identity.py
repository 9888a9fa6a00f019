"""Defines when two texts are the same: by what tokenizers keep of them, not by their bytes.

Tokenizers remove or unify white space, invisible characters and, mostly, case, accents and
compatibility forms. Here all of these are removed, so texts that any tokenizer makes equal are
equal: corpora with different vocabularies hold out the same documents, and no document is in both
splits in two spellings. Within a split, copies are found by their token ids.
"""

import codecs
import functools
import hashlib
import re
import unicodedata

from bert_jax.tokenizers.characters import BLANK, category_class

# Enough to tell documents apart, and less than one piece of a long document.
MAX_HASHED_BYTES = 1 << 12
INVISIBLE = re.compile(rf"[{BLANK}{category_class('Mn', 'Me')}]")
INVISIBLE_ASCII = bytes([*range(33), 127])
LOWER_CASE = bytes(range(256)).lower()  # of ASCII


def plain_text(text: str) -> str:
    """Returns a text in lower case, without accents, compatibility forms and format characters."""
    return text.encode("ascii", PLAIN).decode().lower()


def visible_text(text: str) -> bytes:
    """Returns `plain_text` without white space, in UTF-8."""
    return text.encode("ascii", PLAIN).translate(LOWER_CASE, INVISIBLE_ASCII)


def text_hash(text: str, seed: int) -> int:
    """Returns a 64-bit hash of a seed and the first `MAX_HASHED_BYTES` of the `visible_text`."""
    content, start, stop = b"", 0, 2 * MAX_HASHED_BYTES  # Most characters are visible.
    while len(content) < MAX_HASHED_BYTES and start < len(text):
        content += visible_text(text[start:stop])
        start, stop = stop, 2 * stop
    key = str(seed).encode()
    digest = hashlib.blake2b(content[:MAX_HASHED_BYTES], digest_size=8, key=key).digest()
    return int.from_bytes(digest)


@functools.lru_cache(1 << 16)
def _plain(text: str) -> bytes:
    """Returns the plain form of characters outside ASCII, in UTF-8."""
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return INVISIBLE.sub("", re.sub(r"\s", " ", folded)).encode()


def _replace(error: UnicodeEncodeError) -> tuple[bytes, int]:
    return _plain(error.object[error.start : error.end]), error.end


# An error handler, because encoding finds characters outside ASCII ten times as fast as `re`.
PLAIN = "bert_corpus.plain"
codecs.register_error(PLAIN, _replace)
