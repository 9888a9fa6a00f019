"""Parts of tokenized documents, the unit that is shuffled across the corpus before pairing."""

import array
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

# About 32 KiB of text: even a few long documents give many parts, each with many pairs.
MAX_PART_TOKENS = 1 << 13


class DocumentPart(NamedTuple):
    """Consecutive sentences of one document; `source` is the document's number."""

    source: int
    sentences: list[bytes]  # uint16 token ids; Python integers take 20 times the memory

    def ids(self) -> list[list[int]]:
        """Returns the token ids of each sentence."""
        return [memoryview(sentence).cast("H").tolist() for sentence in self.sentences]


def cut_into_parts(source: int, sentences: list[list[int]]) -> Iterator[DocumentPart]:
    """Yields parts with equal numbers of sentences, of at most about `MAX_PART_TOKENS` each."""
    num_parts = min(math.ceil(sum(map(len, sentences)) / MAX_PART_TOKENS), len(sentences))
    bounds = (len(sentences) * part // num_parts for part in range(num_parts + 1))
    encoded = [array.array("H", ids).tobytes() for ids in sentences]
    for start, stop in itertools.pairwise(bounds):
        yield DocumentPart(source, encoded[start:stop])
