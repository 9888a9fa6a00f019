import collections
import itertools
import random

import pytest

from bert_corpus import pairs as pairs_module
from bert_corpus.pairs import IS_NEXT, NOT_NEXT, make_pairs, truncate_pair


def numbered_documents(num_documents, num_sentences, sentence_length):
    """Returns documents whose tokens are all different, so that each shows where it comes from."""
    tokens = iter(range(10**9))
    return [
        [[next(tokens) for _ in range(sentence_length)] for _ in range(num_sentences)]
        for _ in range(num_documents)
    ]


def pairs_of_document(documents, index, max_seq_length, short_seq_prob, rng):
    whole = range(index, index + 1)
    return make_pairs(documents, index, max_seq_length, short_seq_prob, rng, whole)


def all_pairs(documents, max_seq_length=64, short_seq_prob=0.1, seed=0):
    rng = random.Random(seed)
    return [
        pair
        for index in range(len(documents))
        for pair in pairs_of_document(documents, index, max_seq_length, short_seq_prob, rng)
    ]


def test_half_of_the_pairs_are_not_next():
    pairs = all_pairs(numbered_documents(200, 200, 9))
    not_next = sum(pair.nsp_label == NOT_NEXT for pair in pairs)
    assert abs(not_next - len(pairs) / 2) < 1.5 * len(pairs) ** 0.5  # 3 sigma


@pytest.mark.parametrize(
    ("num_sentences", "sentence_length"),
    [
        *[(2, 9), (3, 9), (5, 9), (16, 9), (2, 80), (3, 80), (5, 80)],
        pytest.param(16, 80, marks=pytest.mark.slow),
    ],
)
def test_half_of_the_pairs_of_short_documents_are_not_next(num_sentences, sentence_length):
    pairs = all_pairs(numbered_documents(2000, num_sentences, sentence_length))
    not_next = sum(pair.nsp_label == NOT_NEXT for pair in pairs)
    assert len(pairs) > 3000
    assert abs(not_next - len(pairs) / 2) < 1.5 * len(pairs) ** 0.5  # 3 sigma


def test_leftover_sentence_ends_a_pair_of_full_length():
    # Two sentences have the target of 40 tokens, one is left over.
    pairs = all_pairs(numbered_documents(300, 3, 20), max_seq_length=43, short_seq_prob=0)
    is_next = [pair for pair in pairs if pair.nsp_label == IS_NEXT]
    assert is_next and all(len(pair.first + pair.second) == 40 for pair in is_next)


def test_a_long_document_has_short_pairs_of_many_lengths():
    """A tenth of its tokens, so that pairs of all lengths are there to fill rows."""
    (document,) = numbered_documents(1, 100_000, 3)
    pairs = make_pairs([document, document], 0, 131, 0.1, random.Random(0), range(0, 1))
    lengths = collections.Counter(len(pair.first + pair.second) for pair in pairs[:-1])
    tokens = sum(length * count for length, count in lengths.items())
    short_tokens = tokens - 128 * lengths[128]
    assert 0.08 < short_tokens / tokens < 0.12
    assert len(lengths) > 15


def released_label(num_sentences, target_reached_by, rng):
    """Returns the labels of a document as create_pretraining_data.py draws them."""
    labels, position = [], 0
    while position < num_sentences:
        chunk = min(target_reached_by, num_sentences - position)
        split = rng.randint(1, chunk - 1) if chunk > 1 else 1
        labels.append(NOT_NEXT if chunk == 1 or rng.random() < 0.5 else IS_NEXT)
        position += chunk if labels[-1] == IS_NEXT else split
    return labels


@pytest.mark.parametrize("sentence_length", [20, 40])
def test_released_pairs_label_a_lone_sentence_not_next(sentence_length):
    """Documents of 3 sentences, of which 40 / `sentence_length` reach the target."""
    rng, documents = random.Random(0), numbered_documents(2000, 3, sentence_length)
    labels = [
        pair.nsp_label
        for index in range(2000)
        for pair in make_pairs(documents, index, 43, 0.0, rng, range(index, index + 1), True)
    ]
    expected = [n for _ in range(2000) for n in released_label(3, 40 // sentence_length, rng)]
    # 3 standard deviations of a difference of means.
    shares = sum(labels) / len(labels), sum(expected) / len(expected)
    assert abs(shares[0] - shares[1]) < 3 * (0.5 / 4000) ** 0.5
    assert abs(len(labels) / len(expected) - 1) < 0.03
    assert shares[0] > 0.6 if sentence_length == 20 else shares[0] == 1


def test_long_sentences_do_not_bias_the_labels():
    pairs = all_pairs(numbered_documents(50, 200, 80))
    assert abs(sum(pair.nsp_label for pair in pairs) / len(pairs) - 0.5) < 0.03


def test_is_next_continues_the_document_and_not_next_is_from_another():
    documents = numbered_documents(20, 30, 7)
    document_tokens = 30 * 7
    # No pair reaches this length, so none is truncated.
    for first, second, label, *_ in all_pairs(documents, max_seq_length=10_000):
        assert first == list(range(first[0], first[0] + len(first)))
        if label == IS_NEXT:
            assert second[0] == first[-1] + 1
        else:
            assert second[0] // document_tokens != first[0] // document_tokens


def test_every_sentence_is_used():
    documents = numbered_documents(10, 40, 5)
    for max_seq_length, short_seq_prob in ((10_000, 0.1), (10_000, 1), (13, 0)):
        pairs = all_pairs(documents, max_seq_length, short_seq_prob)
        firsts_and_true_seconds = {
            token
            for first, second, label, *_ in pairs
            for token in first + (second if label == IS_NEXT else [])
        }
        # Sentences replaced by a random span begin the next pair.
        assert firsts_and_true_seconds == set(range(10 * 40 * 5))


def test_pairs_fit_and_no_span_is_empty():
    for first, second, *_ in all_pairs(numbered_documents(30, 30, 23), max_seq_length=32):
        assert first and second
        assert len(first) + len(second) <= 29


def test_one_document_in_ten_is_cut_into_shorter_pairs():
    documents = numbered_documents(2000, 40, 1)
    rng = random.Random(0)
    first_pairs = [pairs_of_document(documents, index, 23, 0.1, rng)[0] for index in range(2000)]
    # A random span may be short at its document's end; a true continuation here cannot be.
    first_pairs = [pair for pair in first_pairs if pair.nsp_label == IS_NEXT]
    short = sum(len(pair.first) + len(pair.second) < 20 for pair in first_pairs)
    # 0.1 * 18/19, as the short length is drawn from 2 to the full length.
    assert abs(short / len(first_pairs) - 0.095) < 3 * (0.1 * 0.9 / len(first_pairs)) ** 0.5


def test_single_document_gives_only_is_next():
    (document,) = numbered_documents(1, 50, 8)
    pairs = all_pairs([document])
    assert pairs and all(pair.nsp_label == IS_NEXT for pair in pairs)
    assert all_pairs([document[:1]]) == []


def test_one_sentence_documents_give_not_next():
    documents = numbered_documents(3, 1, 4)
    assert [pair.nsp_label for pair in all_pairs(documents)] == [NOT_NEXT] * 3


def truncate_one_by_one(first, second, max_tokens, rng):
    first, second = list(first), list(second)
    while len(first) + len(second) > max_tokens:
        longer = first if len(first) > len(second) else second
        del longer[0 if rng.random() < 0.5 else -1]
    return first, second


@pytest.mark.parametrize("max_tokens", [2, 7, 8, 20])
def test_truncated_lengths_equal_token_by_token_truncation(max_tokens):
    rng = random.Random(0)
    for first_length in range(1, 25):
        for second_length in range(1, 25):
            spans = list(range(first_length)), list(range(second_length))
            truncated = truncate_pair(*spans, max_tokens, rng)
            expected = truncate_one_by_one(*spans, max_tokens, rng)
            assert [len(span) for span in truncated] == [len(span) for span in expected]
            for span in truncated:
                assert span == list(range(span[0], span[0] + len(span)))


def test_truncation_removes_from_front_and_back_equally():
    rng = random.Random(0)
    fronts = [truncate_pair([1], list(range(41)), 22, rng)[1][0] for _ in range(4000)]
    # Of 20 removed tokens, Binomial(20, 1/2) are from the front: mean 10, variance 5.
    mean = sum(fronts) / 4000
    assert abs(mean - 10) < 3 * (5 / 4000) ** 0.5
    assert abs(sum((front - mean) ** 2 for front in fronts) / 4000 - 5) < 0.5


@pytest.mark.parametrize("max_seq_length", [5, 16, 43, 10_000])
@pytest.mark.parametrize("num_documents", [1, 20])
def test_every_token_is_in_a_pair_or_counted_as_truncated(
    monkeypatch, max_seq_length, num_documents
):
    """Random spans are copies; sentences before one left over at the end are used twice."""
    whole_spans = []

    def recording_truncation(first, second, *arguments):
        whole_spans.append((first, second))
        return truncate_pair(first, second, *arguments)

    monkeypatch.setattr(pairs_module, "truncate_pair", recording_truncation)
    rng = random.Random(0)
    documents = numbered_documents(num_documents, 31, 40)
    documents = [[ids[: rng.randint(1, 40)] for ids in document] for document in documents]
    for index, document in enumerate(documents):
        whole_spans.clear()
        pairs = pairs_of_document(documents, index, max_seq_length, 0.5, rng)
        uses = collections.Counter()
        for (first, second), pair in zip(whole_spans, pairs, strict=True):
            uses.update(first + (second if pair.nsp_label == IS_NEXT else []))
        tokens = set(itertools.chain(*document))
        assert set(uses) == tokens
        assert max(uses.values()) <= 2
        used_twice = {token for token, count in uses.items() if count == 2}
        assert used_twice <= set(itertools.chain(*whole_spans[-1]))
        kept = sum(
            len(pair.first) + (len(pair.second) if pair.nsp_label == IS_NEXT else 0)
            for pair in pairs
        )
        truncated = sum(pair.num_truncated for pair in pairs)
        assert kept + truncated == uses.total()
        assert (truncated > 0) == (max_seq_length < 10_000)


def test_random_next_never_comes_from_another_part_of_the_same_document():
    # Parts 1 to 3 are one document, parts 0 and 4 are others.
    documents = [[[10 * part + n] * 3 for n in range(8)] for part in range(5)]
    document_parts, rng = range(1, 4), random.Random(0)
    spans = [
        pair.second
        for _ in range(50)
        for pair in make_pairs(documents, 2, 16, 0.0, rng, document_parts)
        if pair.nsp_label == NOT_NEXT
    ]
    assert {token // 10 for span in spans for token in span} == {0, 4}
    alone = make_pairs(documents[1:4], 1, 16, 0.0, rng, range(3))
    assert alone and all(pair.nsp_label == IS_NEXT for pair in alone)


def test_all_other_documents_are_equally_likely_beside_a_long_one():
    documents = numbered_documents(1000, 4, 7)
    rng = random.Random(0)
    others = [
        pair.second[0] // 28
        for index in range(998)
        for pair in make_pairs(documents, index, 100, 0.0, rng, range(998))
        if pair.nsp_label == NOT_NEXT
    ]
    assert set(others) == {998, 999}
    assert abs(others.count(998) / len(others) - 0.5) < 1.5 / len(others) ** 0.5  # 3 sigma


@pytest.mark.parametrize("max_seq_length", [16, 17, 32])
def test_span_lengths_do_not_reveal_the_order(max_seq_length):
    documents, rng = numbered_documents(40, 30, 20), random.Random(0)
    pairs = [
        pair
        for index in range(40)
        for pair in make_pairs(
            documents, index, max_seq_length, 0.0, rng, range(40), swaps_half=True
        )
    ]
    swapped = [pair for pair in pairs if pair.nsp_label == NOT_NEXT]
    assert abs(len(swapped) - len(pairs) / 2) < 1.5 * len(pairs) ** 0.5  # 3 sigma
    assert all((pair.first[0] > pair.second[0]) == (pair.nsp_label == NOT_NEXT) for pair in pairs)
    lengths = [  # Of both spans, among the pairs of either label.
        collections.Counter((len(pair.first), len(pair.second)) for pair in some)
        for some in (swapped, [pair for pair in pairs if pair.nsp_label == IS_NEXT])
    ]
    assert lengths[0].keys() == lengths[1].keys()
