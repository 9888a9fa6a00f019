"""Drops documents: too short, too long, in another language, or nearly equal to an earlier one."""

import functools
import hashlib
import pickle
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from bert_corpus.config import CorpusConfig
from bert_corpus.identity import plain_text
from bert_corpus.readers import Document
from bert_corpus.words import UNSPACED_CHARACTERS, count_words

SHINGLE_WORDS = 5
# Words between white space, but each character of a script that is written without spaces.
SHINGLE_PARTS = re.compile(rf"[{UNSPACED_CHARACTERS}]|[^\s{UNSPACED_CHARACTERS}]+")
NUM_HASHES = 128  # of a MinHash; the estimate of a similarity is off by up to 0.09
IDENTIFIED_CHARACTERS = 4096  # of a document, enough to identify its language
MAX_SPOOLED_BYTES = 1 << 24  # of a document's pieces in memory; more are kept on disk


def count_later_words(
    documents: Iterable[Document], config: CorpusConfig
) -> Iterator[tuple[Document, int]]:
    """Yields each document, or piece of a long one, and the number of words in the pieces after it.

    The number is needed only at the first piece, which decides whether the document is dropped; it
    is 0 at the others, and everywhere without `min_words` and `max_words`. Counting stops as soon
    as the number exceeds these limits.
    """
    documents, limit = iter(documents), config.max_words or config.min_words
    document = next(documents, None)
    while document is not None:
        with tempfile.SpooledTemporaryFile(MAX_SPOOLED_BYTES) as spool:
            num_words, num_pieces, following = 0, 0, next(documents, None)
            while following and following.continues and not document.continues:
                if num_words > limit or not limit:
                    break
                num_words, num_pieces = num_words + count_words(following.text), num_pieces + 1
                pickle.dump(following, spool)
                following = next(documents, None)
            yield document, num_words
            spool.seek(0)
            for _ in range(num_pieces):
                yield pickle.load(spool), 0
        document = following


def drop_reason(sentences: Sequence[str], config: CorpusConfig, later_words: int = 0) -> str:
    """Returns the reason for dropping a document, as named in the manifest, or "".

    For a long document, `sentences` are those of its first piece, and `later_words` is the number
    of words in the pieces after it.
    """
    if config.min_words or config.max_words:
        num_words = later_words + sum(map(count_words, sentences))
        if num_words < config.min_words:
            return "short_documents"
        if config.max_words and num_words > config.max_words:
            return "long_documents"
    if config.only_language:
        import py3langid  # from the extra "cleaning", as is datasketch

        language, _ = py3langid.classify(" ".join(sentences)[:IDENTIFIED_CHARACTERS])
        if language != config.only_language:
            return "documents_in_other_languages"
    return ""


@functools.cache
def _bands(threshold: float) -> list[slice]:
    """Returns the hashes of each band: documents that agree in a band are nearly equal."""
    import datasketch

    index = datasketch.MinHashLSH(threshold, NUM_HASHES)
    return [slice(start, start + index.r) for start in range(0, index.b * index.r, index.r)]


def near_duplicate_keys(sentences: Sequence[str], threshold: float) -> list[int]:
    """Returns a 64-bit key for each band of MinHashes of a document.

    Two documents have a key in common with a probability that rises from 0 to 1 as the Jaccard
    similarity of their sets of five consecutive words passes `threshold` (Leskovec, Rajaraman and
    Ullman, Mining of Massive Datasets, section 3.4), or of characters in scripts that are written
    without spaces. Words are compared as `plain_text`.
    """
    import datasketch

    words = SHINGLE_PARTS.findall(plain_text(" ".join(sentences)))
    starts = range(max(1, len(words) - SHINGLE_WORDS + 1))
    shingles = {" ".join(words[start : start + SHINGLE_WORDS]).encode() for start in starts}
    minhash = datasketch.MinHash(NUM_HASHES, seed=1)
    minhash.update_batch(shingles)
    values = [minhash.hashvalues[band].tobytes() for band in _bands(threshold)]
    return [int.from_bytes(hashlib.blake2b(value, digest_size=8).digest()) for value in values]


def near_duplicates(documents: np.ndarray, columns: Iterable[np.ndarray]) -> np.ndarray:
    """Returns the documents that have a key in common with an earlier one.

    `documents` are ascending, uint64 `[documents]`; `columns` are their keys in each band.
    """
    is_dropped = np.zeros(len(documents), bool)
    for keys in columns:
        is_first = np.zeros(len(documents), bool)
        is_first[np.unique(keys, return_index=True)[1]] = True
        is_dropped |= ~is_first
    return documents[is_dropped]
