"""Drops documents: too short, too long, in another language, or nearly equal to an earlier one."""

import functools
import hashlib
import re
from collections.abc import Iterable, Sequence

import numpy as np

from bert_corpus.config import CorpusConfig
from bert_corpus.words import UNSPACED_CHARACTERS, count_words

SHINGLE_WORDS = 5
# Words between white space, but each character of a script that is written without spaces.
SHINGLE_PARTS = re.compile(rf"[{UNSPACED_CHARACTERS}]|[^\s{UNSPACED_CHARACTERS}]+")
NUM_HASHES = 128  # of a MinHash; the estimate of a similarity is off by up to 0.09
IDENTIFIED_CHARACTERS = 4096  # of a document, enough to identify its language


def drop_reason(sentences: Sequence[str], config: CorpusConfig) -> str:
    """Returns the reason for dropping a document, as named in the manifest, or ""."""
    if config.min_words or config.max_words:
        num_words = sum(map(count_words, sentences))
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
    without spaces.
    """
    import datasketch

    words = SHINGLE_PARTS.findall(" ".join(sentences).lower())
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
