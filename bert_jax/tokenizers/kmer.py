"""Tokenizers of sequences, such as DNA: k letters are one token.

The k-mers do not overlap, as in the Nucleotide Transformer (Dalla-Torre et al., 2023). If they did,
as in DNABERT (Ji et al., 2021), a masked one could be read off its two neighbors, unless k
consecutive ones are masked together.
"""

import itertools
import re

from bert_jax.tokenizers.stored import Layout, SpecialTokens, special_added_tokens, template
from bert_jax.tokenizers.wordpiece import bert_spec

MAX_KMERS = 1 << 19


def kmer_spec(k: int, letters: str) -> dict:
    """Returns the tokenizer of all k-mers of some capital letters, in the format of `tokenizers`.

    A text is cut into k-mers from the left, in upper or lower case. A letter that begins none,
    because another character or the end is too near, is a token of its own; any other character is
    unknown, up to white space. Raises ValueError for letters that are no distinct capitals, and for
    more than `MAX_KMERS` k-mers.
    """
    if not re.fullmatch("[A-Z]+", letters) or len(set(letters)) < len(letters):
        raise ValueError(f"--letters={letters}; expected distinct capital letters, such as ACGT")
    num_kmers = len(letters) ** k
    if num_kmers > MAX_KMERS:
        raise ValueError(
            f"--k={k} of {len(letters)} letters gives {num_kmers:,} k-mers; expected at most "
            f"{MAX_KMERS:,}"
        )
    kmers = map("".join, itertools.product(letters, repeat=k))
    pieces = dict.fromkeys([*SpecialTokens(), *letters, *kmers])
    ids = {piece: index for index, piece in enumerate(pieces)}
    spec = bert_spec(ids, None, max_word_characters=100)
    # A WordPiece model, which reads each part as itself, or as unknown.
    split = {"type": "Split", "invert": False, "behavior": "Isolated"}
    spec["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            split | {"pattern": {"Regex": rf"[{letters}]{{{k}}}|\S"}},
            split | {"pattern": {"Regex": r"\s+"}, "behavior": "Removed"},
        ],
    }
    spec["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Replace", "pattern": {"String": letter.lower()}, "content": letter}
            for letter in letters
        ],
    }
    spec["post_processor"] = template(Layout(), spec, SpecialTokens())
    spec["added_tokens"] = special_added_tokens(ids, SpecialTokens(), mask_lstrip=False)
    return spec
