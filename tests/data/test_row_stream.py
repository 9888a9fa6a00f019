"""Streams of rows: interleaved by weight, in the order of each corpus, from any position."""

import types

import numpy as np
import pytest

from bert_jax.data.batches import local_batches
from bert_jax.data.row_stream import RowStream, parse_mixture, source_names, weights_by_size


def corpus(name: int):
    """A corpus of 1,000 rows whose row i is [name, i]."""

    def read(start, stop):
        tokens = np.array([[name, i] for i in range(start, stop)]).reshape(-1, 2)
        return {"tokens": tokens, "row_ids": tokens[:, 1].astype(np.uint32)}

    return types.SimpleNamespace(read=read, shuffle_seed=0, num_rows=1000)


def stream(*weights, first_rows=None):
    first_rows = first_rows or [0] * len(weights)
    return RowStream([corpus(n) for n in range(len(weights))], weights, first_rows)


def test_one_corpus_is_read_in_its_order_from_the_first_row():
    rows = stream(1.0, first_rows=[40]).read(3, 6)
    assert rows["tokens"].tolist() == [[0, 43], [0, 44], [0, 45]]
    assert rows["row_ids"].tolist() == [43, 44, 45]


def test_rows_are_interleaved_by_weight():
    rows = stream(1.0, 0.5, 0.5, first_rows=[0, 100, 7]).read(0, 8)
    expected = [[2, 7], [0, 0], [1, 100], [0, 1], [2, 8], [0, 2], [1, 101], [0, 3]]
    assert rows["tokens"].tolist() == expected
    # Rows of different corpora have different ids, and so different masks.
    assert rows["row_ids"].tolist() == [2007, 0, 1100, 1, 2008, 2, 1101, 3]
    assert rows["row_ids"].dtype == np.uint32


@pytest.mark.parametrize("weights", [(0.3, 0.7), (1, 1e-3), (5, 1, 3, 0.01), (1e-3, 1)])
def test_any_part_is_that_part_of_the_whole_and_has_each_corpus_by_its_weight(weights):
    rows = stream(*weights)
    whole = rows.read(0, 1000)["tokens"]
    parts = [rows.read(start, start + 50)["tokens"] for start in range(0, 1000, 50)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    far = rows.read(10**10, 10**10 + 50)["tokens"]
    np.testing.assert_array_equal(far[20:], rows.read(10**10 + 20, 10**10 + 50)["tokens"])
    for name, weight in enumerate(weights):
        places = whole[:, 0] == name
        np.testing.assert_array_equal(whole[places, 1], np.arange(places.sum()))
        counts = np.cumsum(places)
        expected = np.arange(1, 1001) * weight / sum(weights)
        assert np.abs(counts - expected).max() < 2
        np.testing.assert_array_equal(rows.rows_of_each(np.arange(1, 1001))[name], counts)


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_batches_do_not_depend_on_the_number_of_hosts_or_on_a_resume(num_hosts):
    rows, batch_size = stream(0.7, 0.2, 0.1, first_rows=[3, 0, 5]), 16
    whole = rows.read(0, 6 * batch_size)["tokens"].reshape(6, batch_size, 2)
    size = batch_size // num_hosts
    for first_step in (0, 4):
        hosts = [
            local_batches(rows, [(host * size, (host + 1) * size)], batch_size, first_step, 6)
            for host in range(num_hosts)
        ]
        for expected, *parts in zip(whole[first_step:], *hosts, strict=True):
            found = np.concatenate([part["tokens"] for part in parts])
            np.testing.assert_array_equal(found, expected)


def test_shares_of_a_mixture_in_100_000_rows():
    """Issued by weight, not drawn: within one row of each share, where 3 sigma of draws are 400."""
    weights = np.array([0.5, 0.3, 0.15, 0.05])
    counts = stream(*weights).rows_of_each(100_000)
    assert counts.sum() == 100_000 and np.abs(counts - 100_000 * weights).max() <= 1


def test_mixtures_are_read_from_text():
    assert parse_mixture("gs://b/c") == {"gs://b/c": None}
    assert parse_mixture("gs://b/c:0.7,d:2e-1") == {"gs://b/c": 0.7, "d": 0.2}
    assert source_names(["a"]) == ["a"]
    assert source_names(["/x/corpus/de/128", "/x/corpus/fr/128/"]) == ["de", "fr"]
    assert source_names(["x/wiki/a", "x/books/a/b"]) == ["wiki/a", "books/a/b"]
    assert source_names(["corpus", "corpus/sub"]) == ["corpus", "corpus/sub"]


def test_weights_by_size_favor_small_corpora_at_a_temperature():
    assert weights_by_size([900, 100], 1.0) == [900, 100]
    # XLM-R's alpha of 0.3, from its formula in float64.
    expected = np.array([0.9, 0.1]) ** 0.3
    found = np.array(weights_by_size([900, 100], 1 / 0.3))
    np.testing.assert_allclose(found / found.sum(), expected / expected.sum(), rtol=1e-12)
