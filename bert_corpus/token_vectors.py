"""Static vectors of the tokens of a text, by the company they keep.

The co-occurrences of tokens in a window, weighted by positive pointwise mutual information, and
reduced by a truncated singular value decomposition: about as good as skip-gram, which factorizes
the same matrix (Levy and Goldberg, 2014; with the settings of Levy, Goldberg and Dagan, 2015,
section 3: smoothed contexts, square roots of the singular values). Needs no library beside SciPy,
and has no random numbers.
"""

import functools
from collections import Counter

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
import tqdm

from bert_corpus.inputs import Unit, find_inputs, split_into_units
from bert_corpus.manifest import check_skipped
from bert_corpus.parallel import usable_cores, worker_processes
from bert_corpus.readers import read_documents
from bert_corpus.sentences import UNREADABLE, split_sentences
from bert_jax.tokenizers.tokenizer import Tokenizer

WINDOW = 5  # tokens on each side
SMOOTHING = 0.75  # the exponent of the counts of contexts
NUM_DIMENSIONS = 200
MIN_COUNT = 10  # Of rarer tokens, the neighbors are chance.


def token_vectors(
    inputs: list[str],
    tokenizer: Tokenizer,
    text_field: str = "text",
    data_dir: str = "",
    num_processes: int = 0,
) -> np.ndarray:
    """Returns float32 [vocab_size, dimensions]; of length 1, or 0 for tokens that are too rare.

    Raises FileNotFoundError and ValueError as `find_inputs`, `read_documents` and `check_skipped`
    do, and ValueError for too little text.
    """
    units = split_into_units(find_inputs(inputs, text_field, data_dir))
    size = tokenizer.vocab_size
    counts = scipy.sparse.csr_array((size, size), dtype=np.int64)
    occurrences, skipped = np.zeros(size, np.int64), Counter()
    encode = functools.partial(_encode_units, tokenizer=tokenizer)
    with worker_processes(encode, num_processes or min(usable_cores(), len(units))) as ordered_map:
        for ids, lengths, unit_skipped in tqdm.tqdm(ordered_map(units), "tokens", len(units)):
            skipped.update(unit_skipped)
            occurrences += np.bincount(ids, minlength=size)
            counts = counts + count_neighbors(ids, lengths, size)
    check_skipped(skipped, text_field)
    is_frequent = occurrences >= MIN_COUNT
    is_frequent[list(tokenizer.special_ids)] = False
    frequent = np.flatnonzero(is_frequent)
    if len(frequent) < 3:
        raise ValueError(
            f"only {len(frequent)} tokens occur at least {MIN_COUNT} times in the text: give more"
        )
    vectors = np.zeros((size, min(NUM_DIMENSIONS, len(frequent) - 1)), np.float32)
    information = positive_information(counts[frequent][:, frequent].astype(np.float64))
    if not information.nnz:
        raise ValueError(
            "in the text, no token occurs beside another more than by chance: give more"
        )
    vectors[frequent] = _unit_vectors(information, vectors.shape[1])
    return vectors


def count_neighbors(ids: np.ndarray, lengths: np.ndarray, size: int) -> scipy.sparse.csr_array:
    """Counts, for all pairs of tokens, how often they are at most `WINDOW` apart in a sentence.

    Args:
      ids: int [tokens], of one sentence after another.
      lengths: int [sentences], the number of tokens of each.
      size: the number of different tokens.
    """
    sentence = np.repeat(np.arange(len(lengths)), lengths)
    pairs = [np.zeros(0, np.int64)]
    for distance in range(1, WINDOW + 1):
        first, second = ids[:-distance].astype(np.int64), ids[distance:].astype(np.int64)
        same = sentence[:-distance] == sentence[distance:]
        pairs += [(first * size + second)[same], (second * size + first)[same]]
    keys, numbers = np.unique(np.concatenate(pairs), return_counts=True)
    return scipy.sparse.csr_array((numbers, np.divmod(keys, size)), shape=(size, size))


def positive_information(counts: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    """Returns max(0, log P(token, context) / (P(token) P(context))), with smoothed contexts."""
    counts = counts.tocoo()
    totals = np.asarray(counts.sum(axis=1)).ravel()
    contexts = totals**SMOOTHING
    contexts /= max(contexts.sum(), 1.0)  # 0 if no sentence has two tokens.
    rows, columns = counts.coords
    values = np.log(counts.data / (totals[rows] * contexts[columns]))
    keep = values > 0
    return scipy.sparse.csr_array((values[keep], (rows[keep], columns[keep])), shape=counts.shape)


def _unit_vectors(information: scipy.sparse.csr_array, num_dimensions: int) -> np.ndarray:
    start = np.ones(information.shape[0])  # The same result each time.
    left, singular_values, _ = scipy.sparse.linalg.svds(information, num_dimensions, v0=start)
    vectors = left * np.sqrt(np.maximum(singular_values, 0))
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(norms, 1e-12)


def _encode_units(
    units: list[Unit], tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray, Counter]:
    """Returns the ids of all sentences, and the number of ids of each."""
    sentences, skipped = [], Counter()
    for unit in units:
        for document in read_documents(unit, skipped):
            try:
                sentences += split_sentences(document)
            except UNREADABLE:
                skipped["unreadable_documents"] += 1
    encoded = tokenizer.encode_batch(sentences)
    lengths = np.array([*map(len, encoded)], np.int64)
    return (
        np.fromiter((i for ids in encoded for i in ids), np.int32, lengths.sum()),
        lengths,
        skipped,
    )
