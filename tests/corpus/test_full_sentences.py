"""Sequences of whole sentences keep every token in order, and stay within a document if asked."""

import itertools
import random
from array import array

import numpy as np
import pytest

from bert_corpus.config import CorpusConfig
from bert_corpus.full_sentences import make_full_sentences, make_segments
from bert_corpus.steps import Part, rows_of_group
from bert_jax.data.features import unpack_rows

SEP, MAX_TOKENS = 3, 14


def random_documents(seed: int, longest: int = 9) -> list[list[list[int]]]:
    """Returns documents of sentences, in which no token id occurs twice."""
    rng, ids = random.Random(seed), itertools.count(10)
    return [
        [[next(ids) for _ in range(rng.randint(1, longest))] for _ in range(rng.randint(1, 8))]
        for _ in range(12)
    ]


def flat(nested) -> list:
    return list(itertools.chain.from_iterable(nested))


@pytest.mark.parametrize("crosses_documents", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_sequences_hold_every_sentence_once_whole_and_as_many_as_fit(seed, crosses_documents):
    documents = random_documents(seed)
    sequences = make_full_sentences(documents, MAX_TOKENS, SEP, crosses_documents)
    assert [token for token in flat(sequences) if token != SEP] == flat(flat(documents))
    assert all(1 <= len(sequence) <= MAX_TOKENS for sequence in sequences)
    starts = {sentence[0]: sentence for sentence in flat(documents)}
    first_of_document = {document[0][0] for document in documents}
    for sequence, following in itertools.pairwise(sequences):
        # A sequence begins with a sentence, one that its predecessor had no room for.
        assert following[0] in starts
        starts_document = following[0] in first_of_document
        if crosses_documents or not starts_document:
            needed = len(starts[following[0]]) + starts_document
            assert len(sequence) + needed > MAX_TOKENS
    inner = {token for sequence in sequences for token in sequence[1:]} & first_of_document
    assert bool(inner) == crosses_documents
    # A separator stands before each document that begins inside a sequence, and nowhere else.
    for sequence in sequences:
        before = {after for token, after in itertools.pairwise(sequence) if token == SEP}
        assert before == set(sequence[1:]) & first_of_document and sequence[-1] != SEP


def test_only_a_sentence_longer_than_a_sequence_is_cut():
    long, short = list(range(10, 10 + 2 * MAX_TOKENS + 3)), [100, 101]
    sequences = make_full_sentences([[short, long, short]], MAX_TOKENS, SEP, False)
    rest = long[2 * MAX_TOKENS :]
    expected = [short, long[:MAX_TOKENS], long[MAX_TOKENS : 2 * MAX_TOKENS], rest + short]
    assert [sequence.tolist() for sequence in sequences] == expected


@pytest.mark.parametrize("mode", ["full_sentences", "document_sentences", "single_segments"])
def test_rows_hold_all_tokens_as_one_segment_without_next_sentence_label(mode):
    documents = random_documents(4, longest=30)
    parts = [
        Part(index, 0, b"", [np.array(ids, np.uint16).tobytes() for ids in document])
        for index, document in enumerate(documents)
    ]
    config = CorpusConfig(rows=mode, max_seq_length=32, max_sequences=4)
    rows, counts = rows_of_group(parts, (0, 2, SEP), config, random.Random(0))
    words = rows["tokens"][rows["tokens"] >= 10]
    assert sorted(words.tolist()) == flat(flat(documents))
    assert counts["rows"] == len(rows) and counts["tokens"] == np.count_nonzero(rows["tokens"])
    assert not counts["not_next"] and not any(name.startswith("dropped") for name in counts)
    batch = unpack_rows({name: rows[name] for name in rows.dtype.names})
    assert np.count_nonzero(batch["sequence_ids"]) == counts["tokens"]
    assert not np.any(batch["segment_ids"]) and not np.any(batch["nsp_weights"])
    start, second, end = np.moveaxis(rows["sequence_bounds"].astype(int), -1, 0)
    assert np.sum(end > 0) == counts["pairs"] and np.array_equal(second, end)
    row = np.arange(len(rows))[:, None]
    assert np.all(rows["tokens"][row, start][end > 0] == 2)
    assert np.all(rows["tokens"][row, end - 1][end > 0] == SEP)


@pytest.mark.parametrize("seed", range(3))
def test_single_segments_are_consecutive_tokens_of_one_document(seed):
    documents = random_documents(seed)
    segments = make_segments([[array("H", s) for s in d] for d in documents], MAX_TOKENS)
    expected = []
    for document in documents:
        tokens = flat(document)
        expected += [tokens[n : n + MAX_TOKENS] for n in range(0, len(tokens), MAX_TOKENS)]
    assert [segment.tolist() for segment in segments] == expected
