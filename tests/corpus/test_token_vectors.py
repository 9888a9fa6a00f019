"""Static vectors: counts and information by their definitions; similar tokens, similar vectors."""

import collections
import math

import numpy as np
import pytest
import scipy.sparse

from bert_corpus.token_vectors import (
    SMOOTHING,
    WINDOW,
    count_neighbors,
    positive_information,
    token_vectors,
)
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import write_vocabulary


def test_neighbors_are_counted_within_sentences():
    rng = np.random.default_rng(0)
    sentences = [rng.integers(0, 5, size) for size in (0, 1, 9, 2, 14)]
    expected = collections.Counter()
    for ids in sentences:
        for i in range(len(ids)):
            for j in range(len(ids)):
                expected[ids[i], ids[j]] += i != j and abs(i - j) <= WINDOW
    counts = count_neighbors(np.concatenate(sentences), np.array([*map(len, sentences)]), 5)
    found = counts.toarray()
    assert {(i, j): found[i, j] for i in range(5) for j in range(5)} == {
        (i, j): expected[i, j] for i in range(5) for j in range(5)
    }


def test_information_is_that_of_its_definition():
    counts = np.random.default_rng(1).integers(0, 9, (6, 6))
    counts = counts + counts.T
    found = positive_information(scipy.sparse.csr_array(counts.astype(float))).toarray()
    total, marginal = counts.sum(), counts.sum(axis=1)
    smoothed = [each**SMOOTHING / sum(marginal**SMOOTHING) for each in marginal]
    for i in range(6):
        for j in range(6):
            ratio = (counts[i, j] / total) / (marginal[i] / total * smoothed[j])
            assert found[i, j] == pytest.approx(max(0.0, math.log(ratio)) if ratio else 0.0)


def test_tokens_in_the_same_company_have_similar_vectors(tmp_path):
    rng = np.random.default_rng(2)
    verbs, tools = ["eat", "cook", "boil"], ["drive", "park", "wash"]
    companies = {"soup": verbs, "rice": verbs, "car": tools, "bus": tools}
    lines = [
        " ".join([word, *rng.choice(companies[word], 4)])
        for word in rng.choice(sorted(companies), 400)
    ]
    (tmp_path / "text.txt").write_text("\n\n".join([*lines, "rare soup"]))
    words = [*companies, *verbs, *tools, "rare", "absent"]
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt", words))
    vectors = token_vectors([str(tmp_path / "text.txt")], tokenizer)
    soup, rice, car, bus, rare, absent = (
        vectors[tokenizer.token_to_id(word)]
        for word in ("soup", "rice", "car", "bus", "rare", "absent")
    )
    assert soup @ rice > 0.9 and car @ bus > 0.9
    assert max(soup @ car, soup @ bus, rice @ car) < 0.3
    np.testing.assert_allclose(np.linalg.norm([soup, car], axis=1), 1, rtol=1e-5)
    assert not rare.any() and not absent.any() and not vectors[tokenizer.unk_id].any()
    np.testing.assert_array_equal(vectors, token_vectors([str(tmp_path / "text.txt")], tokenizer))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a river of people", "only 0 tokens occur at least 10 times in the text"),
        ("a\n\nriver\n\nof\n\n" * 10, "no token occurs beside another more than by chance"),
    ],
)
def test_too_little_text_is_an_error(text, message, tmp_path):
    (tmp_path / "text.txt").write_text(text)
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    with pytest.raises(ValueError, match=message):
        token_vectors([str(tmp_path / "text.txt")], tokenizer)
