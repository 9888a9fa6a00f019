"""Counts examples that a model has seen in training, or nearly so: their scores are too good."""

import hashlib
from collections.abc import Sequence

import numpy as np
import scipy  # Imports scipy.sparse on first use.

from bert_jax.data.features import ModelInput
from bert_jax.tasks.task import Task

SHINGLE = 5
"""Consecutive tokens that are compared as one."""
SIMILARITY = 0.8
"""Jaccard similarity of the sets of shingles from which on two inputs are nearly equal."""
MAX_TOKENS = 5_000_000
"""Of train and a split together, up to which near duplicates are counted: 14 s, 0.5 GB."""
MAX_PAIRS = 5_000_000
"""Pairs of inputs with a rare shingle in common, up to which they are compared."""
_PAIRS_AT_ONCE = 20_000
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # Odd, so that every token changes the hash.


def count_duplicates(task: Task) -> list[dict]:
    """Returns for each split how many of its inputs are equal, or nearly equal, to one of train.

    Inputs are compared as the model reads them: without what its tokenizer ignores, such as case,
    and truncated. "near" is None above `MAX_TOKENS` or `MAX_PAIRS`. There are none of retrieval,
    whose splits have other inputs than train.
    """
    if task.head.task == "retrieval" or not task.train:
        return []
    train = {_digest(feature): feature for feature in task.train}
    counts = []
    for split in task.splits:
        is_equal = [_digest(feature) in train for feature in split.features]
        others = [
            feature for feature, equal in zip(split.features, is_equal, strict=True) if not equal
        ]
        near = None
        if sum(map(len, train.values())) + sum(map(len, others)) <= MAX_TOKENS:
            is_near = find_near(list(map(_tokens, others)), list(map(_tokens, train.values())))
            near = None if is_near is None else int(is_near.sum())
        counts.append(
            {
                "split": split.name,
                "equal": sum(is_equal),
                "near": near,
                "inputs": len(is_equal),
            }
        )
    return counts


def find_near(
    inputs: Sequence[np.ndarray], others: Sequence[np.ndarray], similarity: float = SIMILARITY
) -> np.ndarray | None:
    """Returns which of `inputs` are nearly equal to one of `others`, bool `[inputs]`.

    Returns None if more than `MAX_PAIRS` would have to be compared, as of forms that are filled in.
    The result is exact: two sets with a Jaccard similarity of at least t have one of their rarest
    elements in common, of which n elements have n - ceil(t n) + 1 (Chaudhuri, Ganti and Kaushik, A
    primitive operator for similarity joins in data cleaning, 2006). Only such pairs are compared.

    Args:
      inputs, others: tokens, int `[length]` each.
    """
    if not inputs or not others:
        return np.zeros(len(inputs), bool)
    table = _shingle_table([*inputs, *others])
    sizes = np.diff(table.indptr)
    # The columns are in order of frequency, so that those of a row begin with its rarest.
    num_rarest = sizes - np.ceil(similarity * sizes - 1e-9).astype(int) + 1
    places = np.arange(table.nnz) - np.repeat(table.indptr[:-1], sizes)
    rare = table.copy()
    rare.data[places >= np.repeat(num_rarest, sizes)] = 0
    rare.eliminate_zeros()
    own, given = table[: len(inputs)], table[len(inputs) :]
    rare_own, rare_given = rare[: len(inputs)], rare[len(inputs) :]
    # Of each shingle, which is at least the number of pairs: the product itself may not fit.
    if rare_own.sum(axis=0) @ rare_given.sum(axis=0) > MAX_PAIRS:
        return None
    row, other = (rare_own @ rare_given.T).nonzero()
    is_near = np.zeros(len(inputs), bool)
    for start in range(0, len(row), _PAIRS_AT_ONCE):
        rows, columns = (each[start : start + _PAIRS_AT_ONCE] for each in (row, other))
        common = np.asarray(own[rows].multiply(given[columns]).sum(axis=1)).ravel()
        union = sizes[rows] + sizes[len(inputs) + columns] - common
        is_near[rows[common >= similarity * union - 1e-9]] = True
    return is_near


def _tokens(feature: ModelInput) -> np.ndarray:
    return np.concatenate(feature.sequences)


def _digest(feature: ModelInput) -> bytes:
    """Returns 16 bytes that tell the sequences of a feature from those of others."""
    digest = hashlib.blake2b(digest_size=16)
    for tokens in feature.sequences:
        digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
    return digest.digest()


def _shingle_table(inputs: Sequence[np.ndarray]) -> scipy.sparse.csr_array:
    """Returns which shingles each input has, `[inputs, shingles]` of 1, the rarest ones first.

    An input with fewer than `SHINGLE` tokens is one shingle.
    """
    padded = [np.pad(each, (0, max(0, SHINGLE - len(each))), constant_values=-1) for each in inputs]
    owners = np.repeat(np.arange(len(padded)), list(map(len, padded)))
    tokens = np.concatenate(padded).astype(np.int64).astype(np.uint64)
    num_starts = len(tokens) - SHINGLE + 1
    hashes = np.zeros(num_starts, np.uint64)
    for offset in range(SHINGLE):
        hashes = hashes * _FACTOR + tokens[offset : offset + num_starts]
        hashes ^= hashes >> np.uint64(29)
    is_whole = owners[:num_starts] == owners[SHINGLE - 1 :]
    shingles, codes = np.unique(hashes[is_whole], return_inverse=True)
    keys = np.unique(owners[:num_starts][is_whole] * len(shingles) + codes)
    rows, codes = np.divmod(keys, len(shingles))
    counts = np.bincount(codes)
    ranks = np.empty(len(counts), int)
    ranks[np.argsort(counts, kind="stable")] = np.arange(len(counts))
    shape = (len(inputs), len(counts))
    table = scipy.sparse.csr_array((np.ones(len(keys), int), (rows, ranks[codes])), shape)
    table.sort_indices()
    return table
